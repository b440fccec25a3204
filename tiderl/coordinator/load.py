"""The coordinator's own load: how late its event loop is, what an event costs it; and whether an emulated run can be trusted.

A probe wants to wake on every tick of a fixed grid and writes down how late it did, in real time, whatever the job's clock counts.
A loop that hangs for a second misses fifty ticks, and each of them counts: the percentiles are those of a message that comes at
any moment, not those of the probe's own luck.

Invariants (tests/unit/test_load.py):

1. A percentile differs by less than 5 % from the exact one of what was recorded, between 10 µs and 1000 s.
2. Memory and the cost of a record are constant, however long the run.
3. What came before `start_counting` leaves no trace.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

PROBE_INTERVAL_S = 0.020

#: An emulated run whose event loop or backends are later than this has measured the machine that it ran on.
MAX_LAG_P99_S = 0.020
MAX_LATE_SHARE = 0.03

_FLOOR_S = 1e-5
_CEILING_S = 1e3
#: Width of a bucket. Half of one (geometrically) is 4 %, the most by which a percentile is wrong.
_RATIO = 1.08
_NUM_BUCKETS = math.ceil(math.log(_CEILING_S / _FLOOR_S) / math.log(_RATIO)) + 1


class LagHistogram:
    """Counts of durations on a log scale: bucket 0 holds all up to 10 µs, bucket i those up to `_RATIO` ** i times as much."""

    def __init__(self) -> None:
        self._counts = [0] * _NUM_BUCKETS
        self.num_recorded = 0

    def record(self, lag_s: float) -> None:
        """A duration; below 10 µs (also less than nothing) it counts as 10 µs, above 1000 s as 1000 s."""
        bucket = 0
        if lag_s > _FLOOR_S:
            bucket = min(math.ceil(math.log(lag_s / _FLOOR_S) / math.log(_RATIO)), _NUM_BUCKETS - 1)
        self._counts[bucket] += 1
        self.num_recorded += 1

    def percentile_s(self, percent: float) -> float:
        """The smallest duration that `percent` of all do not exceed, to 4 %; 0.0 where nothing was recorded."""
        if not self.num_recorded:
            return 0.0
        wanted = max(1, math.ceil(self.num_recorded * (percent / 100)))
        seen = 0
        for bucket, count in enumerate(self._counts):
            seen += count
            if seen >= wanted:
                return _FLOOR_S * _RATIO ** (bucket - 0.5) if bucket else _FLOOR_S
        raise AssertionError(f"percentile {percent} is past the last of {seen} records")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Since `start_counting`. Seconds are real ones."""

    num_events: int
    #: Of the whole process, everything that it did for the events included; 0.0 before the first event.
    cpu_s_per_1000_events: float
    lag_p50_s: float
    lag_p99_s: float


class LoadMeter:
    """Counts from `start_counting` on: the start of the ranks, on the same machine perhaps, is not the coordinator's load."""

    def __init__(self, read_cpu_s: Callable[[], float] = time.process_time) -> None:
        self._read_cpu_s = read_cpu_s
        self.start_counting()

    def start_counting(self) -> None:
        """Forget everything so far."""
        self._lag = LagHistogram()
        self._num_events = 0
        self._start_cpu_s = self._read_cpu_s()

    def count_event(self) -> None:
        """The coordinator handles one event."""
        self._num_events += 1

    async def probe(self) -> None:
        """Measure the running event loop until cancelled."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            due_s += PROBE_INTERVAL_S
            # A tick that has passed already is recorded at once, as late as it is by then.
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            self._lag.record(loop.time() - due_s)

    def report(self) -> LoadReport:
        cpu_s = self._read_cpu_s() - self._start_cpu_s
        return LoadReport(
            num_events=self._num_events,
            cpu_s_per_1000_events=1000 * cpu_s / self._num_events if self._num_events else 0.0,
            lag_p50_s=self._lag.percentile_s(50),
            lag_p99_s=self._lag.percentile_s(99),
        )


def doubt(lag_p99_s: float, late_share: float) -> str:
    """Why the figures of an emulated run are not to be trusted, and what helps; empty where nothing speaks against them.

    `lag_p99_s`: of the coordinator's event loop, in real time. `late_share`: seconds by which the emulated backends were late and
    that they never caught up, as a share of their busy time.
    """
    reasons = []
    if lag_p99_s > MAX_LAG_P99_S:
        reasons.append(
            f"the coordinator's event loop was up to {1000 * lag_p99_s:.0f} ms late (p99; at most {1000 * MAX_LAG_P99_S:.0f} ms)"
        )
    if late_share > MAX_LATE_SHARE:
        reasons.append(
            f"the emulated backends were late for {late_share:.1%} of their busy time (at most {MAX_LATE_SHARE:.0%})"
        )
    if not reasons:
        return ""
    return (
        " and ".join(reasons) + ": this machine is too slow for the run; lower emulate.time_scale, or use fewer ranks"
    )
