"""The task stream: the three invariants of `coordinator.stream`."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from tiderl.coordinator.stream import EVAL_BASE, TaskStream
from tiderl.types import TaskKind


def stream_of(num_train: int = 5, seed: int = 0) -> TaskStream:
    return TaskStream(env="babyai", train_split="train", num_train=num_train, eval_split="test", seed=seed)


@given(st.integers(1, 12), st.integers(0, 2**63), st.lists(st.integers(0, 60), max_size=10))
def test_invariant_1_a_group_is_the_same_in_every_order(num_train: int, seed: int, numbers: list[int]) -> None:
    in_order = [stream_of(num_train, seed).train_group(n) for n in range(61)]
    anew = stream_of(num_train, seed)
    assert [anew.train_group(n) for n in numbers] == [in_order[n] for n in numbers]


def test_invariant_1_a_group_is_the_same_in_every_process() -> None:
    code = (
        "from tiderl.coordinator.stream import TaskStream\n"
        "s = TaskStream(env='babyai', train_split='train', num_train=1000, eval_split='test', seed=7)\n"
        "print([s.train_group(n).seed for n in (0, 1, 999, 1000, 123456)])"
    )
    # Another hash seed must make no difference.
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    here = stream_of(1000, 7)
    assert done.stdout.strip() == str([here.train_group(n).seed for n in (0, 1, 999, 1000, 123456)])


@given(st.integers(1, 50), st.integers(0, 2**32), st.integers(0, 5))
def test_invariant_2_an_epoch_holds_every_seed_once(num_train: int, seed: int, epoch: int) -> None:
    stream = stream_of(num_train, seed)
    groups = [stream.train_group(epoch * num_train + i) for i in range(num_train)]
    assert sorted(group.seed for group in groups) == list(range(num_train))


def test_epochs_and_seeds_shuffle_differently() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [stream_of(100, seed).train_group(epoch * 100 + i).seed for i in range(100)]

    assert order(0, 0) != list(range(100))
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)


def test_what_a_group_says() -> None:
    group = stream_of().train_group(3)
    assert (group.group_id, group.kind, group.env, group.split) == (3, TaskKind.TRAIN, "babyai", "train")


def test_invariant_3_evaluation_plays_the_same_tasks_under_new_ids() -> None:
    stream = stream_of()
    first, second = stream.eval_round(4), stream.eval_round(4)
    assert [g.seed for g in first] == [g.seed for g in second] == [0, 1, 2, 3]
    assert {(g.kind, g.split) for g in first + second} == {(TaskKind.EVAL, "test")}
    ids = [g.group_id for g in first + second] + [stream.train_group(n).group_id for n in range(1000)]
    assert len(set(ids)) == len(ids)
    assert all(g.group_id >= EVAL_BASE for g in first)
