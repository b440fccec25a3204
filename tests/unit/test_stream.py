"""The task stream: the three invariants of `coordinator.stream`."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiderl.coordinator.stream import EVAL_BASE, TaskStream, TaskTypes
from tiderl.types import TaskKind


def stream_of(num_train: int = 5, seed: int = 0) -> TaskStream:
    return TaskStream(
        env="babyai",
        train_split="train",
        num_train=num_train,
        eval_split="test",
        seed=seed,
        types={"train": TaskTypes([("long", 2), ("short", num_train)]), "test": TaskTypes([("other", 1000)])},
    )


@given(st.integers(1, 12), st.integers(0, 2**63), st.lists(st.integers(0, 60), max_size=10))
def test_invariant_1_a_group_is_the_same_in_every_order(num_train: int, seed: int, numbers: list[int]) -> None:
    in_order = [stream_of(num_train, seed).train_group(n) for n in range(61)]
    anew = stream_of(num_train, seed)
    assert [anew.train_group(n) for n in numbers] == [in_order[n] for n in numbers]


def test_invariant_1_a_group_is_the_same_in_every_process() -> None:
    code = (
        "from tiderl.coordinator.stream import TaskStream, TaskTypes\n"
        "types = {'train': TaskTypes([('t', 1000)])}\n"
        "s = TaskStream(env='babyai', train_split='train', num_train=1000, eval_split='test', seed=7, types=types)\n"
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


def test_invariant_4_a_group_has_the_type_of_its_task() -> None:
    stream = stream_of(num_train=6)
    groups = [stream.train_group(n) for n in range(12)]
    assert {(g.seed, g.task_type) for g in groups} == {
        (0, "long"), (1, "long"), (2, "short"), (3, "short"), (4, "short"), (5, "short"),
    }  # fmt: skip
    assert [g.task_type for g in stream.eval_round(2)] == ["other", "other"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5)), max_size=8))
def test_types_are_those_of_the_runs_written_out(runs: list[tuple[str, int]]) -> None:
    written_out = [name for name, length in runs for _ in range(length)]
    types = TaskTypes(runs)
    assert [types[seed] for seed in range(len(written_out))] == written_out
    with pytest.raises(IndexError):
        types[len(written_out)]
