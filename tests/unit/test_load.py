"""The coordinator's load: percentiles against numpy's, the probe in virtual time, CPU seconds with a counter of our own."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit import virtual_time
from tiderl.coordinator.load import PROBE_INTERVAL_S, LagHistogram, LoadMeter, LoadReport, doubt

LAGS_S = st.lists(st.floats(1e-5, 1e3), min_size=1, max_size=300)


@given(LAGS_S, st.sampled_from([1, 50, 90, 99, 99.9, 100]))
def test_percentiles_are_within_5_per_cent_of_numpys(lags_s: list[float], percent: float) -> None:
    histogram = LagHistogram()
    for lag_s in lags_s:
        histogram.record(lag_s)
    exact_s = float(np.percentile(lags_s, percent, method="inverted_cdf"))
    assert histogram.percentile_s(percent) == pytest.approx(exact_s, rel=0.05)


@given(LAGS_S)
def test_percentiles_never_fall(lags_s: list[float]) -> None:
    histogram = LagHistogram()
    for lag_s in lags_s:
        histogram.record(lag_s)
    values = [histogram.percentile_s(percent) for percent in range(0, 101, 5)]
    assert all(a <= b for a, b in itertools.pairwise(values))


@pytest.mark.parametrize(("lag_s", "counted_s"), [(-1.0, 1e-5), (0.0, 1e-5), (9e-6, 1e-5), (1e9, 1e3)])
def test_what_is_off_the_scale_counts_as_its_end(lag_s: float, counted_s: float) -> None:
    histogram = LagHistogram()
    histogram.record(lag_s)
    assert histogram.percentile_s(50) == pytest.approx(counted_s, rel=0.05)


def test_an_empty_histogram_has_no_lag() -> None:
    assert LagHistogram().percentile_s(99) == 0.0


def test_memory_does_not_grow_with_the_run() -> None:
    histogram = LagHistogram()
    before = len(histogram._counts)
    for lag_s in np.geomspace(1e-7, 1e5, 2000):
        histogram.record(float(lag_s))
    assert len(histogram._counts) == before < 300
    assert histogram.num_recorded == sum(histogram._counts) == 2000


def test_an_idle_loop_is_never_late() -> None:
    async def idle() -> LoadReport:
        meter = LoadMeter()
        async with asyncio.TaskGroup() as group:
            probing = group.create_task(meter.probe())
            await asyncio.sleep(100 * PROBE_INTERVAL_S)
            probing.cancel()
        return meter.report()

    report = virtual_time.run(idle())
    assert (report.lag_p50_s, report.lag_p99_s) == (1e-5, 1e-5)


def block(seconds: float) -> None:
    """What a callback that computes does to a loop: time passes, nothing else runs."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, virtual_time.VirtualTimeLoop)
    loop._jumping.now_s += seconds


def test_a_loop_that_hangs_is_late_for_all_that_it_missed() -> None:
    """1 s of 10: the ticks due in it are late by 1 s, 0.98 s, … 0.02 s, so that a tenth of all ticks is late, evenly up to 1 s."""

    async def hang() -> LagHistogram:
        meter = LoadMeter()
        async with asyncio.TaskGroup() as group:
            probing = group.create_task(meter.probe())
            await asyncio.sleep(4.49)
            block(1.0)
            await asyncio.sleep(4.5)
            probing.cancel()
        return meter._lag

    lag = virtual_time.run(hang())
    assert lag.num_recorded == pytest.approx(500, abs=2)
    assert lag.percentile_s(89) == 1e-5
    assert lag.percentile_s(95) == pytest.approx(0.5, rel=0.1)
    assert lag.percentile_s(100) == pytest.approx(1.0, rel=0.06)


def test_what_came_before_the_counting_leaves_no_trace() -> None:
    cpu_s = iter([100.0, 107.0, 107.5])
    meter = LoadMeter(lambda: next(cpu_s))
    for _ in range(50):
        meter.count_event()
    meter._lag.record(30.0)
    meter.start_counting()
    for _ in range(20):
        meter.count_event()
    # 0.5 CPU seconds for 20 events.
    assert meter.report() == LoadReport(20, 25.0, 0.0, 0.0)


def test_no_event_costs_nothing() -> None:
    cpu_s = iter([0.0, 3.0])
    assert LoadMeter(lambda: next(cpu_s)).report() == LoadReport(0, 0.0, 0.0, 0.0)


def test_the_verdict() -> None:
    assert doubt(0.020, 0.03) == ""
    assert doubt(0.0, 0.0) == ""
    late_loop, late_engines = doubt(0.031, 0.0), doubt(0.0, 0.041)
    assert "31 ms late (p99; at most 20 ms)" in late_loop and "backends" not in late_loop
    assert "4.1% of their busy time (at most 3%)" in late_engines and "event loop" not in late_engines
    both = doubt(0.031, 0.041)
    assert "31 ms" in both and "4.1%" in both
    assert all("lower emulate.time_scale" in sentence for sentence in (late_loop, late_engines, both))
