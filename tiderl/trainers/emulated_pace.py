"""Waiting in place of computing, so that what was waited adds up to what the profile says.

A sleep ends a little late every time, and what a call really does takes its while too. Both are taken off the sleeps that follow:
due times are absolute within a stretch of work, and a stretch begins with what the one before was late.

Invariants (tests/unit/test_emulated_pace.py):

1. Over any number of waits the seconds that passed in them are those that were asked for, plus `late_s`: nothing accumulates.
2. Time between stretches (for data, for other ranks) is not worked off, and neither shortens nor lengthens a wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tiderl.clock import JobClock


class Pace:
    """One thread's. All seconds are the job's; only `sleep` is given real ones."""

    def __init__(self, clock: JobClock, sleep: Callable[[float], None] = time.sleep) -> None:
        self._clock = clock
        self._sleep = sleep
        self._mark_s = self._due_s = clock.now_s()
        self._behind_s = 0.0

    @property
    def late_s(self) -> float:
        """By how much the work done so far ended after its time, not yet caught up."""
        return max(0.0, self._behind_s)

    def begin(self) -> None:
        """A stretch of work begins now."""
        self._mark_s = self._clock.now_s()
        self._due_s = self._mark_s - self._behind_s

    def wait(self, seconds: float) -> float:
        """Work for `seconds` more; returns how many passed since the stretch began or the last `wait` of it returned."""
        self._due_s += seconds
        left_s = self._due_s - self._clock.now_s()
        if left_s > 0.0:
            self._sleep(self._clock.real_s(left_s))
        now_s = self._clock.now_s()
        self._behind_s = now_s - self._due_s
        passed_s, self._mark_s = now_s - self._mark_s, now_s
        return passed_s
