"""The global buffer's readiness: which complete groups wait for the trainer, and the signals that ERS and RA2P read from it.

The unit is a complete, rewarded group. A *training step starts* when the trainer is free and under new weights, not when enough
data is there: the time in between is TWT.

Invariants (tests/scheduling/test_readiness.py):

1. `take` yields the groups with the oldest start version first, ties by group id.
2. RAS is the number of groups that were ready when the step started.
3. TPRM is the mean gap between groups becoming ready after that, the first gap counted from the step's start.
4. Head-of-line latency is the age of the group that has waited longest.
5. The expected gap is the mean of the newest `_NUM_GAPS` gaps between arrivals, over steps.

Source: paper §2.1 (RAS, TPRM), §5.2 (head-of-line latency).
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from dataclasses import dataclass

from tiderl.types import GroupId, WeightVersion

_NUM_GAPS = 16


@dataclass(frozen=True, slots=True)
class Signals:
    """What the buffer says when a step opens."""

    ready_at_start: int
    time_per_ready_s: float | None
    head_of_line_s: float


class ReadinessBuffer:
    """Ready groups, ordered for the trainer, and their arrival times."""

    def __init__(self) -> None:
        self._heap: list[tuple[WeightVersion, GroupId]] = []
        self._arrivals: deque[tuple[float, GroupId]] = deque()
        self._waiting: set[GroupId] = set()
        self._newest_s: deque[float] = deque(maxlen=_NUM_GAPS + 1)
        #: How many groups are ready, by start version.
        self.num_by_version: Counter[WeightVersion] = Counter()
        self._step_started_s = 0.0
        self._last_arrival_s: float | None = None
        self._num_arrivals = 0
        self._ready_at_start = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, group_id: GroupId, start_version: WeightVersion, now_s: float) -> None:
        """A group has become ready."""
        assert group_id not in self._waiting, group_id
        heapq.heappush(self._heap, (start_version, group_id))
        self._arrivals.append((now_s, group_id))
        self._waiting.add(group_id)
        self.num_by_version[start_version] += 1
        self._last_arrival_s = now_s
        self._newest_s.append(now_s)
        self._num_arrivals += 1

    def take(self) -> GroupId:
        """Remove and return the group that should be trained next."""
        start_version, group_id = heapq.heappop(self._heap)
        self._waiting.remove(group_id)
        self.num_by_version[start_version] -= 1
        if not self.num_by_version[start_version]:
            del self.num_by_version[start_version]
        return group_id

    def oldest_start_version(self) -> WeightVersion | None:
        """The start version of the group that `take` would return."""
        return self._heap[0][0] if self._heap else None

    def oldest(self, num_groups: int) -> list[GroupId]:
        """The groups that `take` would return next, at most so many."""
        return [group_id for _, group_id in heapq.nsmallest(num_groups, self._heap)]

    @property
    def expected_gap_s(self) -> float:
        """Seconds until another group becomes ready, as things went lately; 0.0 before there are two."""
        num_gaps = len(self._newest_s) - 1
        return (self._newest_s[-1] - self._newest_s[0]) / num_gaps if num_gaps > 0 else 0.0

    def start_step(self, now_s: float) -> None:
        """The trainer is free: the signals of a new step begin."""
        self._step_started_s = now_s
        self._last_arrival_s = None
        self._num_arrivals = 0
        self._ready_at_start = len(self._waiting)

    def signals(self, now_s: float) -> Signals:
        """RAS, TPRM (None while nothing has become ready since the step started) and head-of-line latency (0.0 if none waits)."""
        while self._arrivals and self._arrivals[0][1] not in self._waiting:
            self._arrivals.popleft()
        gap_s = None
        if self._last_arrival_s is not None:
            gap_s = (self._last_arrival_s - self._step_started_s) / self._num_arrivals
        return Signals(self._ready_at_start, gap_s, now_s - self._arrivals[0][0] if self._arrivals else 0.0)
