"""The job's clock: real seconds, or emulated ones that pass `scale` times as fast.

Where engine and trainer are emulated, only their compute is: everything else runs in real time beside it. With a time scale of 4
an emulated second is over in 0.25 s, and whatever the job measures of itself (steps, waits, goodput) must be read off this clock.
Bounds on the machine itself (sockets, heartbeats, processes) stay in real seconds.

Invariants (tests/unit/test_clock.py):

1. With a scale of 1 the job's seconds are the machine's.
2. `real_s` is the inverse: waiting for `real_s(x)` lets `now_s` grow by x.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class JobClock:
    """Seconds as the job counts them. Only differences mean something."""

    def __init__(self, scale: float = 1.0, read_s: Callable[[], float] = time.monotonic) -> None:
        assert scale > 0, scale
        self.scale = scale
        self._read_s = read_s

    def now_s(self) -> float:
        return self._read_s() * self.scale

    def real_s(self, job_s: float) -> float:
        """How long the machine takes for `job_s` of the job's seconds."""
        return job_s / self.scale
