"""The job's clock."""

from __future__ import annotations

import pytest

from tiderl.clock import JobClock


class Watch:
    """The machine's time, set by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_without_a_scale_the_jobs_seconds_are_the_machines() -> None:
    watch = Watch()
    clock = JobClock(read_s=watch)
    began_s = clock.now_s()
    watch.now_s += 2.5
    assert clock.now_s() - began_s == 2.5
    assert clock.real_s(2.5) == 2.5


@pytest.mark.parametrize("scale", [0.25, 1.0, 4.0])
def test_waiting_for_real_s_lets_the_jobs_time_grow_by_as_much(scale: float) -> None:
    watch = Watch()
    clock = JobClock(scale, watch)
    began_s = clock.now_s()
    watch.now_s += clock.real_s(6.0)
    assert clock.now_s() - began_s == pytest.approx(6.0)


def test_four_emulated_seconds_pass_in_one_real_second_at_a_scale_of_four() -> None:
    watch = Watch()
    clock = JobClock(4.0, watch)
    began_s = clock.now_s()
    watch.now_s += 1.0
    assert clock.now_s() - began_s == 4.0
    assert clock.real_s(4.0) == 1.0
