"""When the steps of an emulated engine are over: a schedule that a late wake-up does not move.

Invariants (tests/unit/test_emulated_pace.py):

1. While there is work, a step is due at the time when the one before was due, plus its own duration. Work that comes to an idle
   engine starts when it came, but not before the last step was due.
2. What a wake-up is late is caught up by the following steps. Only what is left when the engine falls idle is lost (`late_s`).
3. What else occupies the device moves the schedule by as long as it took.

All seconds are the job's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tiderl.clock import JobClock


class Pace:
    """One device's schedule. Device thread only, but for `late_s`."""

    def __init__(self, clock: JobClock, sleep: Callable[[float], None] = time.sleep) -> None:
        """`sleep` waits for so many real seconds."""
        self._clock = clock
        self._sleep = sleep
        self._due_s = clock.now_s()
        self._lost_s = 0.0
        #: When the engine fell idle, and how far behind it was then. None: it works.
        self._idle_since_s: float | None = self._due_s
        self._behind_s = 0.0

    @property
    def late_s(self) -> float:
        """Seconds that were never caught up."""
        return self._lost_s + self._behind_s

    def work_came(self, at_s: float) -> None:
        """There is work since `at_s`: the schedule goes on from there if the engine was idle."""
        if self._idle_since_s is None:
            return
        if at_s >= self._idle_since_s:
            self._lost_s += self._behind_s
        # else it had come before the engine thought itself idle, and the delay is caught up after all
        self._behind_s = 0.0
        self._idle_since_s = None
        self._due_s = max(self._due_s, at_s)

    def step(self, duration_s: float) -> None:
        """Wait until a step of `duration_s` is over."""
        assert self._idle_since_s is None, "a step without work"
        self._due_s += duration_s
        self._wait_until(self._due_s)

    def fall_idle(self) -> None:
        """Nothing is left to do. Only the first call after work counts."""
        if self._idle_since_s is not None:
            return
        now_s = self._clock.now_s()
        self._idle_since_s = now_s
        self._behind_s = max(now_s - self._due_s, 0.0)

    def spend(self, duration_s: float) -> None:
        """Wait for something that begins now."""
        self._wait_until(self._clock.now_s() + duration_s)

    @contextmanager
    def other_work(self) -> Iterator[None]:
        """The device does something else than steps."""
        began_s = self._clock.now_s()
        if self._idle_since_s is not None:
            self._due_s = max(self._due_s, began_s)
            self._lost_s += self._behind_s
            self._behind_s = 0.0
        try:
            yield
        finally:
            self._due_s += self._clock.now_s() - began_s

    def _wait_until(self, due_s: float) -> None:
        while (left_s := due_s - self._clock.now_s()) > 0:
            self._sleep(self._clock.real_s(left_s))
