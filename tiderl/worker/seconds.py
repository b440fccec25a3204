"""Where this rank's seconds go: one activity at a time, from its process's first line to its last.

Several threads tell the meter what the rank does: the event loop knows what it waits for, the device thread what it works on.
Work goes before waiting: a rank whose device computes does not wait.

Invariants (tests/unit/test_rank_meter.py):

1. The totals always add up to the time since the meter was made.
2. No total ever shrinks from one `totals()` to the next.
3. Shutdown is final: what the rank still does counts as that.

Source: paper §2.1 (RWT and TWT).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tiderl.clock import JobClock
from tiderl.scheduling.ledger import Activity


class RankMeter:
    """Counts seconds of the job's clock. Any thread may call anything; work is not nested."""

    def __init__(self, clock: JobClock) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._resting = Activity.STARTUP
        self._working: Activity | None = None
        self._since_s = clock.now_s()
        self._totals: dict[Activity, float] = {}
        self._told: dict[Activity, float] = {}

    def rest(self, activity: Activity) -> None:
        """What the rank does from now on whenever its device works on nothing."""
        with self._lock:
            self._count()
            if self._resting is not Activity.SHUTDOWN:
                self._resting = activity

    @contextmanager
    def work(self, activity: Activity) -> Iterator[None]:
        """The device works on something."""
        with self._lock:
            self._count()
            self._working = activity
        try:
            yield
        finally:
            with self._lock:
                self._count()
                self._working = None

    def move(self, source: Activity, shares: Mapping[Activity, float]) -> None:
        """Of what was counted as `source` these seconds were something else, as the backend knows by now."""
        with self._lock:
            self._count()
            wanted_s, there_s = sum(shares.values()), self._totals.get(source, 0.0)
            # What was told once stays: a backend that measures a little more than there was gets a little less.
            moved_s = min(wanted_s, there_s - self._told.get(source, 0.0))
            if moved_s <= 0.0:
                return
            for activity, seconds in shares.items():
                self._totals[activity] = self._totals.get(activity, 0.0) + seconds * (moved_s / wanted_s)
            self._totals[source] = there_s - moved_s

    def totals(self) -> dict[str, float]:
        """Seconds by activity since the meter was made."""
        with self._lock:
            self._count()
            self._told = dict(self._totals)
            return {activity.value: seconds for activity, seconds in self._totals.items()}

    def _count(self) -> None:
        now_s = self.clock.now_s()
        activity = self._working or self._resting
        self._totals[activity] = self._totals.get(activity, 0.0) + now_s - self._since_s
        self._since_s = now_s
