"""The readiness buffer: RAS, TPRM and head-of-line latency by hand, and the order of `take`."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiderl.scheduling.readiness import ReadinessBuffer, Signals
from tiderl.types import GroupId, WeightVersion


def add(buffer: ReadinessBuffer, group: int, version: int, now_s: float) -> None:
    buffer.add(GroupId(group), WeightVersion(version), now_s)


def test_invariant_1_oldest_version_first_then_group_id() -> None:
    buffer = ReadinessBuffer()
    for group, version in [(5, 2), (9, 1), (3, 2), (4, 1)]:
        add(buffer, group, version, 0.0)
    assert buffer.oldest_start_version() == 1
    assert [buffer.take() for _ in range(4)] == [4, 9, 3, 5]
    assert len(buffer) == 0
    assert buffer.oldest_start_version() is None


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_invariant_1_for_any_arrivals(versions: list[int]) -> None:
    buffer = ReadinessBuffer()
    for group, version in enumerate(versions):
        add(buffer, group, version, float(group))
    taken = [buffer.take() for _ in versions]
    assert taken == sorted(range(len(versions)), key=lambda group: (versions[group], group))


def test_signals_by_hand() -> None:
    """Invariants 2-4: two groups are there when the step starts at 10 s, three come 1, 4 and 9 s after that."""
    buffer = ReadinessBuffer()
    add(buffer, 0, 0, 3.0)
    add(buffer, 1, 0, 8.0)
    buffer.start_step(10.0)
    assert buffer.signals(10.0) == Signals(ready_at_start=2, time_per_ready_s=None, head_of_line_s=7.0)
    for group, now_s in ((2, 11.0), (3, 14.0), (4, 19.0)):
        add(buffer, group, 1, now_s)
    # The gaps are 1, 3 and 5 s; group 0 has waited since 3 s.
    assert buffer.signals(20.0) == Signals(2, 3.0, 17.0)


def test_invariant_4_a_taken_group_waits_no_longer() -> None:
    buffer = ReadinessBuffer()
    add(buffer, 0, 1, 1.0)  # newer weights, so it is taken last although it was ready first
    add(buffer, 1, 0, 2.0)
    add(buffer, 2, 0, 5.0)
    assert buffer.take() == 1
    assert buffer.signals(10.0).head_of_line_s == 9.0
    assert buffer.take() == 2
    assert buffer.take() == 0
    assert buffer.signals(10.0).head_of_line_s == 0.0


def test_a_new_step_starts_its_own_signals() -> None:
    buffer = ReadinessBuffer()
    buffer.start_step(0.0)
    add(buffer, 0, 0, 2.0)
    assert buffer.signals(3.0) == Signals(0, 2.0, 1.0)
    buffer.start_step(6.0)
    assert buffer.signals(7.0) == Signals(1, None, 5.0)
    buffer.take()
    add(buffer, 1, 0, 10.0)
    assert buffer.signals(10.0) == Signals(1, 4.0, 0.0)
