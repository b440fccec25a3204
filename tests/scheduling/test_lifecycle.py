"""Which state may follow which: the arrows of `scheduling.lifecycle`, written down a second time."""

from __future__ import annotations

import itertools

import pytest

from tests.scheduling.bench import make_group
from tiderl.errors import IllegalEvent
from tiderl.scheduling.lifecycle import ACTIVE, LEGAL, ON_RANK, Task, TaskState
from tiderl.types import Rank, TaskKind

# As in the drawing: queued, starting, generating, acting, pausing, paused, resuming, finished, out.
Q, S, G, A, PING, PED, R, F, OUT = TaskState
#: The drawing in the module's docstring, arrow by arrow.
FORWARD = {(Q, S), (S, G), (G, A), (A, G), (A, F)}
#: Whatever is active can be told to pause; before the order reaches it, it may finish.
PAUSES = {(S, PING), (G, PING), (A, PING), (R, PING), (PING, PED), (PED, R), (R, G), (PING, F)}
#: A retry leads back to the queue from wherever a session can fail: on a rank, or paused.
RETRIES = {(S, Q), (G, Q), (A, Q), (PING, Q), (PED, Q), (R, Q)}
ENDS = {(state, OUT) for state in (Q, S, G, A, PING, PED, R)}
ARROWS = FORWARD | PAUSES | RETRIES | ENDS


def task_in(state: TaskState, rank: int | None = 3) -> Task:
    task = make_group(0, 1, first_task=1).tasks[0]
    task.state, task.rank = state, None if rank is None else Rank(rank)
    return task


@pytest.mark.parametrize(("source", "target"), list(itertools.product(TaskState, TaskState)))
def test_invariant_1_only_along_the_arrows(source: TaskState, target: TaskState) -> None:
    assert (target in LEGAL[source]) is ((source, target) in ARROWS)
    task = task_in(source)
    if (source, target) in ARROWS and source in ON_RANK:
        task.require(target, Rank(3))
    else:
        with pytest.raises(IllegalEvent, match="task 1 "):
            task.require(target, Rank(3))
    assert task.state is source


def test_an_end_is_an_end_and_everything_else_has_one() -> None:
    assert set(LEGAL) == set(TaskState)
    assert not LEGAL[F] and not LEGAL[OUT]
    for state in set(TaskState) - {F, OUT}:
        assert OUT in LEGAL[state]


def test_a_task_that_is_told_to_pause_is_on_its_rank_but_not_active() -> None:
    assert {S, G, A, R} == ACTIVE
    assert ACTIVE | {PING} == ON_RANK


@pytest.mark.parametrize("state", TaskState)
def test_invariant_1_only_the_rank_that_plays_the_task_may_speak_of_it(state: TaskState) -> None:
    for rank in (None, 4):
        with pytest.raises(IllegalEvent, match="not on rank 3"):
            task_in(state, rank).require_rank(Rank(3))
    if state in ON_RANK:
        task_in(state).require_rank(Rank(3))
    else:
        with pytest.raises(IllegalEvent, match=f"task 1 is {state.value}"):
            task_in(state).require_rank(Rank(3))


def test_another_attempt_has_nothing_of_this_one() -> None:
    task = task_in(A)
    fresh = task_in(Q, rank=None)
    task.attempt = 2
    task.in_turn, task.num_turns, task.context_tokens = True, 3, 70
    task.computed_tokens, task.generated_tokens = 60, 20
    task.forget_attempt()
    assert task.attempt == 2, "but it is counted"
    for name in ("rank", "in_turn", "num_turns", "context_tokens", "computed_tokens", "generated_tokens"):
        assert getattr(task, name) == getattr(fresh, name), name


@pytest.mark.parametrize(
    ("num_finished", "num_pending", "is_complete"),
    [(0, 5, False), (2, 1, False), (3, 2, True), (2, 0, True), (0, 0, True)],
)
def test_invariant_2_a_group_is_complete_with_all_it_needs_or_with_nothing_to_come(
    num_finished: int, num_pending: int, is_complete: bool
) -> None:
    group = make_group(0, 3, first_task=0, num_tasks=5)
    assert group.num_pending == 5
    group.num_finished, group.num_pending = num_finished, num_pending
    assert group.is_complete is is_complete
    assert group.completion == pytest.approx(num_finished / 3)


def test_the_finished_are_those_with_a_trajectory() -> None:
    group = make_group(0, 5, first_task=0)
    for task, state in zip(group.tasks, (F, OUT, PED, F, Q), strict=True):
        task.state = state
    assert [task.task_id for task in group.finished] == [0, 3]


def test_a_task_is_of_its_groups_kind() -> None:
    assert [make_group(0, 1, kind, first_task=0).tasks[0].kind for kind in TaskKind] == list(TaskKind)
