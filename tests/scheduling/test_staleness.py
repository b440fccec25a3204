"""The staleness gate: quota arithmetic by hand, and the three invariants of `scheduling.staleness`."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiderl.scheduling.staleness import StalenessGate
from tiderl.types import WeightVersion


def gate_of(staleness: int, groups_per_step: int, steps: int, version: int = 0) -> StalenessGate:
    return StalenessGate(staleness, groups_per_step, steps, WeightVersion(version))


@pytest.mark.parametrize(
    ("staleness", "groups", "steps", "version", "outstanding", "quota"),
    [
        (0, 4, 10, 0, 0, 4),  # on-policy: one batch
        (1, 4, 10, 0, 0, 8),
        (2, 4, 10, 3, 5, 7),  # 3 batches of 4, less 5
        (2, 4, 10, 8, 0, 8),  # two steps are left: two batches, not three
        (2, 4, 10, 9, 3, 1),
        (2, 4, 10, 10, 0, 0),  # nothing left to train
        (1, 4, 10, 0, 8, 0),
    ],
)
def test_quota_by_hand(staleness: int, groups: int, steps: int, version: int, outstanding: int, quota: int) -> None:
    gate = gate_of(staleness, groups, steps, version)
    gate.outstanding = outstanding
    assert gate.quota == quota


def test_due_and_late_by_hand() -> None:
    gate = gate_of(2, 1, 100, 10)
    assert [gate.is_due(WeightVersion(v)) for v in (7, 8, 9, 10)] == [True, True, False, False]
    assert [gate.is_late(WeightVersion(v)) for v in (7, 8, 9, 10)] == [True, False, False, False]


def test_without_staleness_everything_is_due_at_once() -> None:
    gate = gate_of(0, 1, 100, 5)
    assert gate.is_due(WeightVersion(5))
    assert not gate.is_late(WeightVersion(5))
    assert gate.is_late(WeightVersion(4))


def test_what_the_bound_forbids_is_refused() -> None:
    gate = gate_of(1, 2, 10)
    with pytest.raises(AssertionError):
        gate.admit(5)
    gate.admit(4)
    with pytest.raises(AssertionError):
        gate.retire(5)
    gate.advance(WeightVersion(2))
    with pytest.raises(AssertionError):
        gate.advance(WeightVersion(1))


@given(st.integers(0, 3), st.integers(1, 4), st.integers(1, 12), st.integers(0, 2**32))
def test_invariants_over_a_run(staleness: int, groups_per_step: int, steps: int, seed: int) -> None:
    """Groups are admitted at once or later, finish in any order, and drop out at random; steps take the due ones first."""
    rng = random.Random(seed)
    gate = gate_of(staleness, groups_per_step, steps)
    waiting: list[int] = []  # start versions of admitted groups
    num_admitted = num_dropped = num_trained = 0
    while gate.version < steps:
        quota = gate.quota if len(waiting) < groups_per_step else rng.randint(0, gate.quota)
        gate.admit(quota)
        num_admitted += quota
        waiting += [gate.version] * quota
        assert gate.outstanding <= (staleness + 1) * groups_per_step  # invariant 1
        assert num_admitted - num_dropped <= steps * groups_per_step  # invariant 3
        if rng.random() < 0.3 and waiting:
            waiting.pop(rng.randrange(len(waiting)))
            gate.retire(1)
            num_dropped += 1
        if len(waiting) < groups_per_step:
            continue
        rng.shuffle(waiting)
        waiting.sort(key=lambda start: not gate.is_due(WeightVersion(start)))
        batch, waiting = waiting[:groups_per_step], waiting[groups_per_step:]
        assert not any(gate.is_late(WeightVersion(start)) for start in batch)  # invariant 2
        num_trained += len(batch)
        # While the weights travel, groups may still start under the old ones.
        early = rng.randint(0, gate.quota)
        gate.admit(early)
        num_admitted += early
        waiting += [gate.version] * early
        gate.advance(WeightVersion(gate.version + 1))
        gate.retire(groups_per_step)
        assert not any(gate.is_late(WeightVersion(start)) for start in waiting)  # invariant 2
    assert num_trained == steps * groups_per_step
    assert not waiting and gate.outstanding == 0  # invariant 3: nothing was generated in vain
