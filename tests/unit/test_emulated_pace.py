"""Invariants of `tiderl.engines.emulated_pace`, in virtual time. Durations are sums of powers of two: additions are exact."""

from __future__ import annotations

import pytest

from tiderl.clock import JobClock
from tiderl.engines.emulated_pace import Pace


class VirtualTime:
    """Real seconds that pass when somebody sleeps, a bit more than was asked for."""

    def __init__(self, scale: float = 1.0) -> None:
        self.real_s = 1000.0
        self.late_s: list[float] = []
        self.clock = JobClock(scale, lambda: self.real_s)
        self.pace = Pace(self.clock, self.sleep)

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.real_s += seconds + (self.late_s.pop(0) if self.late_s else 0.0)

    @property
    def now_s(self) -> float:
        return self.clock.now_s()


def test_steps_take_their_durations() -> None:
    time = VirtualTime()
    time.pace.work_came(1000.0)
    for _ in range(100):
        time.pace.step(0.25)
    assert time.real_s == 1025.0


def test_a_late_wake_up_is_caught_up() -> None:
    time = VirtualTime()
    time.pace.work_came(1000.0)
    time.late_s = [0.125, 0.0, 0.25, 0.75]
    ends = []
    for _ in range(6):
        time.pace.step(0.5)
        ends.append(time.real_s - 1000.0)
    # The fifth and the sixth find their times past or near, and sleep no longer than that.
    assert ends == [0.625, 1.0, 1.75, 2.75, 2.75, 3.0]
    time.pace.fall_idle()
    assert time.pace.late_s == 0.0


def test_what_was_not_caught_up_is_lost_and_counted() -> None:
    time = VirtualTime()
    time.pace.work_came(1000.0)
    time.late_s = [0.125]
    time.pace.step(0.5)
    time.pace.fall_idle()
    time.pace.fall_idle()  # a release while idle, say
    assert time.pace.late_s == 0.125
    time.real_s = 1010.0
    time.pace.work_came(1010.0)
    time.pace.step(0.5)
    assert (time.real_s, time.pace.late_s) == (1010.5, 0.125)


def test_work_that_was_there_before_the_late_end_loses_nothing() -> None:
    time = VirtualTime()
    time.pace.work_came(1000.0)
    time.late_s = [0.25]
    time.pace.step(0.5)
    time.pace.fall_idle()
    # Called for 0.125 s after the step was due, and before it was over.
    time.pace.work_came(1000.625)
    time.pace.step(0.5)
    assert (time.real_s, time.pace.late_s) == (1001.125, 0.0)


def test_work_that_came_during_a_step_starts_when_it_was_due() -> None:
    time = VirtualTime()
    time.pace.work_came(1000.0)
    time.pace.step(0.5)
    time.pace.fall_idle()
    time.pace.work_came(1000.25)
    time.pace.step(0.5)
    assert time.real_s == 1001.0


def test_other_work_moves_the_schedule_and_is_not_caught_up() -> None:
    time = VirtualTime()
    time.pace.work_came(1000.0)
    time.late_s = [0.125]
    time.pace.step(0.5)
    with time.pace.other_work():
        time.pace.spend(2.0)
    time.pace.step(0.5)  # due at 1.0 of the schedule: 3.0 now, the lateness caught up
    assert time.real_s == 1003.0


def test_other_work_of_an_idle_device_delays_what_comes_meanwhile() -> None:
    time = VirtualTime()
    time.real_s = 1005.0
    with time.pace.other_work():
        time.pace.spend(2.0)
    time.pace.work_came(1006.0)
    time.pace.step(0.5)
    assert time.real_s == 1007.5


def test_other_work_right_after_a_late_end_does_not_make_up_for_it() -> None:
    time = VirtualTime()
    time.pace.work_came(1000.0)
    time.late_s = [0.25]
    time.pace.step(0.5)
    time.pace.fall_idle()
    with time.pace.other_work():
        time.pace.spend(1.0)
    time.pace.work_came(1001.75)
    time.pace.step(0.5)
    assert (time.real_s, time.pace.late_s) == (1002.25, 0.25)


def test_other_work_that_fails_counts_too() -> None:
    time = VirtualTime()
    time.pace.work_came(1000.0)
    with pytest.raises(ConnectionError), time.pace.other_work():
        time.pace.spend(1.0)
        raise ConnectionError
    time.pace.step(0.5)
    assert time.real_s == 1001.5


@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_emulated_seconds_pass_by_the_scale(scale: float) -> None:
    time = VirtualTime(scale)
    time.pace.work_came(time.now_s)
    for _ in range(8):
        time.pace.step(0.25)
    assert time.real_s == 1000.0 + 2.0 / scale
