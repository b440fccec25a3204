"""The packed batch holds every target once, knows where it came from, and holds nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiderl.rl.packing import pack, split_by_tokens
from tiderl.types import Finish, GroupId, TaskId, TaskKind, Trajectory


def trajectory(token_ids: list[int], generated: list[bool]) -> Trajectory:
    mask = np.array(generated, dtype=np.bool_)
    places = np.arange(len(token_ids))
    return Trajectory(
        task_id=TaskId(7),
        group_id=GroupId(0),
        kind=TaskKind.TRAIN,
        token_ids=np.array(token_ids, dtype=np.int32),
        generated=mask,
        log_probs=np.where(mask, -0.5 * places, 0.0).astype(np.float32),
        weight_versions=np.where(mask, places % 3, -1).astype(np.int32),
        turns=(),
        images=(),
        reward=0.0,
        success=False,
        finish=Finish.DONE,
    )


@st.composite
def trajectories(draw: st.DrawFn) -> list[Trajectory]:
    masks = draw(st.lists(st.lists(st.booleans(), max_size=12), max_size=5))
    return [
        trajectory(draw(st.lists(st.integers(0, 99), min_size=len(m) + 1, max_size=len(m) + 1)), [False, *m])
        for m in masks
    ]


def test_a_batch_worked_out_by_hand() -> None:
    batch = pack(
        [
            trajectory([10, 11, 12, 13, 14], [False, False, True, True, False]),
            trajectory([20, 21], [False, False]),
            trajectory([30, 31, 32], [False, True, False]),
        ]
    )
    # Token 13 is the last target of the first trajectory, so it is no input, and neither is 14 behind it.
    assert batch.token_ids.tolist() == [10, 11, 12, 30]
    assert batch.position_ids.tolist() == [0, 1, 2, 0]
    assert batch.lengths == (3, 0, 1)
    assert batch.cu_seqlens.tolist() == [0, 3, 4]
    assert batch.rows.tolist() == [1, 2, 3]
    assert batch.targets.tolist() == [12, 13, 31]
    assert batch.owners.tolist() == [0, 0, 2]
    assert batch.places.tolist() == [2, 3, 1]
    assert batch.engine_log_probs.tolist() == [-1.0, -1.5, -0.5]
    assert batch.weight_versions.tolist() == [2, 0, 1]
    assert batch.num_padding_tokens == 0


def test_nothing_packs_to_nothing() -> None:
    batch = pack([])
    assert batch.num_targets == 0
    assert batch.token_ids.shape == batch.rows.shape == (0,)
    assert batch.cu_seqlens.tolist() == [0]
    assert batch.unpack(np.zeros(0, dtype=np.float32)) == []
    assert batch.gather([]).shape == (0,)


def test_a_generated_first_token_is_refused() -> None:
    with pytest.raises(ValueError, match="task 7: token 0 is marked generated"):
        pack([trajectory([1, 2], [True, True])])


@given(trajectories())
def test_every_generated_token_is_one_target_predicted_by_the_token_before_it(batch_of: list[Trajectory]) -> None:
    batch = pack(batch_of)
    wanted = [(i, p) for i, t in enumerate(batch_of) for p in np.flatnonzero(t.generated)]
    assert list(zip(batch.owners.tolist(), batch.places.tolist(), strict=True)) == wanted
    assert batch.targets.tolist() == [int(batch_of[i].token_ids[p]) for i, p in wanted]
    assert batch.token_ids[batch.rows].tolist() == [int(batch_of[i].token_ids[p - 1]) for i, p in wanted]
    assert batch.position_ids[batch.rows].tolist() == [p - 1 for _, p in wanted]
    assert sum(batch.lengths) == batch.token_ids.shape[0] == batch.position_ids.shape[0]
    assert batch.num_padding_tokens == 0


@given(trajectories())
def test_segments_are_the_beginnings_of_their_trajectories(batch_of: list[Trajectory]) -> None:
    batch = pack(batch_of)
    start = 0
    for t, length in zip(batch_of, batch.lengths, strict=True):
        assert batch.token_ids[start : start + length].tolist() == t.token_ids[:length].tolist()
        assert batch.position_ids[start : start + length].tolist() == list(range(length))
        start += length


@given(trajectories())
def test_unpack_and_gather_are_inverse(batch_of: list[Trajectory]) -> None:
    batch = pack(batch_of)
    arrays = batch.unpack(batch.engine_log_probs)
    for t, array in zip(batch_of, arrays, strict=True):
        np.testing.assert_array_equal(array, t.log_probs)
    np.testing.assert_array_equal(batch.gather(arrays), batch.engine_log_probs)


def test_values_of_another_batch_are_refused() -> None:
    batch = pack([trajectory([1, 2, 3], [False, True, True])])
    with pytest.raises(ValueError, match="3 values for 2 targets"):
        batch.unpack(np.zeros(3, dtype=np.float32))
    with pytest.raises(ValueError, match="trajectories of"):
        batch.gather([np.zeros(2, dtype=np.float32)])


@given(st.lists(st.integers(1, 50)), st.integers(1, 60))
def test_ranges_cover_all_in_order_and_hold_as_much_as_fits(num_tokens: list[int], max_tokens: int) -> None:
    ranges = split_by_tokens(num_tokens, max_tokens)
    assert [i for r in ranges for i in r] == list(range(len(num_tokens)))
    for r in ranges:
        assert len(r) == 1 or sum(num_tokens[i] for i in r) <= max_tokens
        if r.stop < len(num_tokens):
            assert sum(num_tokens[i] for i in r) + num_tokens[r.stop] > max_tokens
