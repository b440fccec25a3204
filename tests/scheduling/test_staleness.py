"""The staleness gate: quota arithmetic by hand, and the three invariants of `scheduling.staleness`."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiderl.scheduling.staleness import StalenessGate
from tiderl.types import WeightVersion


def versions(counts: dict[int, int]) -> dict[WeightVersion, int]:
    return {WeightVersion(version): count for version, count in counts.items()}


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


def test_late_by_hand() -> None:
    gate = gate_of(2, 1, 100, 10)
    assert [gate.is_late(WeightVersion(v)) for v in (7, 8, 9, 10)] == [True, False, False, False]
    on_policy = gate_of(0, 1, 100, 5)
    assert [on_policy.is_late(WeightVersion(v)) for v in (4, 5)] == [True, False]


@pytest.mark.parametrize(
    ("staleness", "others", "room", "leaves_time"),
    [
        # Version 5, two groups a step. A group of version 5 - staleness must be in this step.
        (1, {4: 1}, 0, False),
        (1, {4: 1}, 1, True),
        (1, {5: 2}, 0, True),
        (1, {4: 1, 5: 2}, 1, True),
        (1, {4: 1, 5: 3}, 1, False),
        (0, {5: 1}, 0, False),
        (0, {5: 2}, 2, True),
        # Version 4 has this step and the next: two groups and the room of this one; of version 3 only what the room holds.
        (2, {4: 2}, 0, True),
        (2, {4: 3}, 0, False),
        (2, {4: 3}, 1, True),
        (2, {3: 1, 4: 2}, 1, True),
        (2, {3: 1, 4: 3}, 1, False),
        # Groups of version 5 have three steps; together with older ones they must not be too many either.
        (2, {4: 2, 5: 2}, 0, True),
        (2, {4: 2, 5: 3}, 0, False),
        (2, {4: 2, 5: 3}, 1, True),
    ],
)
def test_leaves_time_by_hand(staleness: int, others: dict[int, int], room: int, leaves_time: bool) -> None:
    gate = gate_of(staleness, 2, 100, 5)
    assert gate.leaves_time(versions(others), room) is leaves_time


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
    """Groups are admitted at once or later, become ready in any order, and drop out at random."""
    rng = random.Random(seed)
    gate = gate_of(staleness, groups_per_step, steps)
    playing: list[WeightVersion] = []
    ready: list[WeightVersion] = []
    num_admitted = num_dropped = num_trained = taken = 0

    def admit(count: int) -> None:
        nonlocal num_admitted
        gate.admit(count)
        num_admitted += count
        playing.extend([gate.version] * count)
        assert gate.outstanding <= (staleness + 1) * groups_per_step  # invariant 1
        assert num_admitted - num_dropped <= steps * groups_per_step  # invariant 3

    while gate.version < steps:
        admit(gate.quota if not playing else rng.randint(0, gate.quota))
        group = playing.pop(rng.randrange(len(playing))) if playing else None
        if group is not None and rng.random() < 0.2:
            gate.retire(1)
            num_dropped += 1
        elif group is not None:
            ready.append(group)
        while ready and taken < groups_per_step:
            ready.sort()
            if not gate.leaves_time(Counter([*playing, *ready[1:]]), groups_per_step - taken - 1):
                break
            assert not gate.is_late(ready.pop(0))  # invariant 2
            taken += 1
        if taken < groups_per_step:
            continue
        num_trained += taken
        taken = 0
        admit(rng.randint(0, gate.quota))  # while the weights travel, groups still start under the old ones
        gate.advance(WeightVersion(gate.version + 1))
        gate.retire(groups_per_step)
        assert not any(gate.is_late(start) for start in [*playing, *ready])  # invariant 2
    assert num_trained == steps * groups_per_step
    assert not playing and not ready and gate.outstanding == 0  # invariant 3: nothing was generated in vain
