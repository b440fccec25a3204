"""The meter of a rank's seconds: its invariants, against a clock that is set by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.test_clock import Watch
from tiderl.clock import JobClock
from tiderl.scheduling.ledger import Activity
from tiderl.worker.seconds import RankMeter

WAITS = (Activity.ENV_WAIT, Activity.WEIGHT_WAIT, Activity.DATA_WAIT)
WORK = (Activity.FORWARD, Activity.SYNC, Activity.REFERENCE)


class Metered:
    def __init__(self, scale: float = 1.0) -> None:
        self.watch = Watch()
        self.meter = RankMeter(JobClock(scale, self.watch))

    def passes(self, seconds: float) -> None:
        self.watch.now_s += seconds


def test_an_actors_step_by_hand() -> None:
    rank = Metered()
    rank.passes(3.0)
    rank.meter.rest(Activity.DATA_WAIT)
    rank.passes(5.0)
    with rank.meter.work(Activity.FORWARD):
        rank.passes(2.0)
    rank.meter.move(Activity.FORWARD, {Activity.BACKWARD: 1.25})
    rank.passes(0.5)
    assert rank.meter.totals() == {"startup": 3.0, "data_wait": 5.5, "forward": 0.75, "backward": 1.25}


def test_work_goes_before_waiting_whatever_the_event_loop_says_meanwhile() -> None:
    rank = Metered()
    rank.meter.rest(Activity.ENV_WAIT)
    with rank.meter.work(Activity.SYNC):
        rank.passes(1.0)
        rank.meter.rest(Activity.WEIGHT_WAIT)
        rank.passes(1.0)
    rank.passes(4.0)
    assert rank.meter.totals() == {"startup": 0.0, "env_wait": 0.0, "sync": 2.0, "weight_wait": 4.0}


def test_work_that_raises_is_over() -> None:
    rank = Metered()
    rank.meter.rest(Activity.DATA_WAIT)
    with pytest.raises(ValueError, match="boom"), rank.meter.work(Activity.FORWARD):
        rank.passes(1.0)
        raise ValueError("boom")
    rank.passes(2.0)
    assert rank.meter.totals() == {"startup": 0.0, "forward": 1.0, "data_wait": 2.0}


def test_an_engine_that_says_it_worked_longer_than_the_rank_waited_gets_what_there_is() -> None:
    rank = Metered()
    rank.meter.rest(Activity.ENV_WAIT)
    rank.passes(2.0)
    assert rank.meter.totals()["env_wait"] == 2.0
    rank.passes(3.0)
    # Of the 5 s two were told as waiting already.
    rank.meter.move(Activity.ENV_WAIT, {Activity.PREFILL: 1.0, Activity.DECODE: 3.0})
    totals = rank.meter.totals()
    assert totals == {"startup": 0.0, "env_wait": 2.0, "prefill": 0.75, "decode": 2.25}


def test_shutdown_is_final() -> None:
    rank = Metered()
    rank.meter.rest(Activity.SHUTDOWN)
    rank.meter.rest(Activity.ENV_WAIT)
    rank.passes(2.0)
    assert rank.meter.totals() == {"startup": 0.0, "shutdown": 2.0}


def test_the_seconds_are_the_jobs() -> None:
    rank = Metered(scale=4.0)
    rank.passes(1.5)
    assert rank.meter.totals() == {"startup": 6.0}


MOVES = st.one_of(
    st.tuples(st.just("passes"), st.floats(0.0, 10.0)),
    st.tuples(st.just("rest"), st.sampled_from(WAITS)),
    st.tuples(st.just("work"), st.sampled_from(WORK), st.floats(0.0, 10.0)),
    st.tuples(st.just("move"), st.sampled_from(WAITS + WORK), st.floats(0.0, 10.0)),
    st.tuples(st.just("totals")),
)


@given(st.lists(MOVES, max_size=40))
def test_totals_add_up_to_the_time_and_never_shrink(moves: list[tuple]) -> None:
    rank = Metered()
    told: dict[str, float] = {}
    for name, *arguments in moves:
        if name == "passes":
            rank.passes(arguments[0])
        elif name == "rest":
            rank.meter.rest(arguments[0])
        elif name == "work":
            with rank.meter.work(arguments[0]):
                rank.passes(arguments[1])
        elif name == "move":
            rank.meter.move(arguments[0], {Activity.BACKWARD: arguments[1], Activity.DECODE: arguments[1] / 2})
        totals = rank.meter.totals() if name == "totals" else None
        if totals is not None:
            assert sum(totals.values()) == pytest.approx(rank.watch.now_s - 100.0, abs=1e-9)
            assert all(totals.get(activity, 0.0) >= seconds for activity, seconds in told.items())
            told = totals
    assert sum(rank.meter.totals().values()) == pytest.approx(rank.watch.now_s - 100.0, abs=1e-9)
