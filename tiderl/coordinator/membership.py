"""Who is there: the last sign of life of every rank, what it said it does, and when silence means that it is lost.

Invariants (tests/unit/test_membership.py):

1. A rank that was heard within `timeouts.lost_s` is not lost; one that was not is reported lost, once.
2. Before a rank's first message `timeouts.start_s` is the bound, from the coordinator's start.
3. A rank that has said farewell, or is lost, is no longer present.
"""

from __future__ import annotations

from collections.abc import Iterator

from tiderl.config.schema import TimeoutsConfig
from tiderl.types import Rank
from tiderl.wire.messages import Farewell, Heartbeat


class Membership:
    """Signs of life. Times are in seconds on the coordinator's clock."""

    def __init__(self, world_size: int, timeouts: TimeoutsConfig) -> None:
        self._timeouts = timeouts
        self._heard_s: dict[Rank, float] = {}
        self._waiting_for: set[Rank] = {Rank(r) for r in range(world_size)}
        self.beats: dict[Rank, Heartbeat] = {}
        self.farewells: dict[Rank, Farewell] = {}

    def heard(self, rank: Rank, now_s: float) -> None:
        self._heard_s[rank] = now_s

    def beat(self, heartbeat: Heartbeat) -> None:
        self.beats[heartbeat.rank] = heartbeat

    def left(self, farewell: Farewell) -> None:
        self.farewells[farewell.rank] = farewell
        self._waiting_for.discard(farewell.rank)

    def lose(self, rank: Rank) -> bool:
        """Nothing more will come from the rank; False if that was known, or if it has left."""
        was_here = rank in self._waiting_for
        self._waiting_for.discard(rank)
        return was_here

    def present(self) -> list[Rank]:
        """Ranks that have been heard of, and have neither left nor been lost."""
        return sorted(self._waiting_for & self._heard_s.keys())

    def newly_lost(self, now_s: float) -> Iterator[tuple[Rank, str]]:
        """Ranks whose silence has passed its bound, with the reason; each is reported once."""
        for rank in sorted(self._waiting_for):
            heard_s = self._heard_s.get(rank)
            if heard_s is None and now_s > self._timeouts.start_s:
                yield rank, f"never heard of within {self._timeouts.start_s:g} s (timeouts.start_s)"
            elif heard_s is not None and now_s - heard_s > self._timeouts.lost_s:
                beat = self.beats.get(rank)
                last = f"; its last phase was {beat.phase!r}" if beat is not None else ""
                yield rank, f"silent for {now_s - heard_s:.0f} s (timeouts.lost_s = {self._timeouts.lost_s:g}){last}"
            else:
                continue
            self._waiting_for.discard(rank)

    def gauges(self) -> dict[str, float]:
        """The sum of every gauge over all ranks."""
        total: dict[str, float] = {}
        for beat in self.beats.values():
            for name, value in beat.gauges.items():
                total[name] = total.get(name, 0.0) + value
        return total
