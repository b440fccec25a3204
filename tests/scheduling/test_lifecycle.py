"""Which state may follow which: the arrows of `scheduling.lifecycle`, written down a second time."""

from __future__ import annotations

import itertools

import pytest

from tests.scheduling.driver import spec_of
from tiderl.errors import IllegalEvent
from tiderl.scheduling.lifecycle import LEGAL, ON_RANK, Group, Task, TaskState
from tiderl.types import Rank, TaskId, WeightVersion

Q, S, G, A, F, O = TaskState  # noqa: E741 - as in the drawing: queued, starting, generating, acting, finished, out
#: The drawing in the module's docstring, arrow by arrow. A retry leads back to the queue from every state on a rank.
ARROWS = {(Q, S), (S, G), (G, A), (A, G), (A, F), (G, F), (S, Q), (G, Q), (A, Q), (Q, O), (S, O), (G, O), (A, O)}


def task_in(state: TaskState, rank: int | None = 3) -> Task:
    group = Group(spec_of(0), num_pending=1, start_version=WeightVersion(0))
    return Task(TaskId(1), group, state=state, rank=None if rank is None else Rank(rank))


@pytest.mark.parametrize(("source", "target"), list(itertools.product(TaskState, TaskState)))
def test_invariant_1_only_along_the_arrows(source: TaskState, target: TaskState) -> None:
    task = task_in(source)
    if (source, target) in ARROWS:
        task.require(target, Rank(3))
    else:
        with pytest.raises(IllegalEvent, match=f"task 1 cannot go from {source.value} to {target.value}"):
            task.require(target, Rank(3))
    assert task.state is source


def test_every_state_has_its_arrows() -> None:
    assert set(LEGAL) == set(TaskState)
    assert not LEGAL[F] and not LEGAL[O], "an end is an end"
    assert {state for state in TaskState if Q in LEGAL[state]} == ON_RANK, "whoever is on a rank can be tried again"


@pytest.mark.parametrize("rank", [None, 4])
def test_invariant_1_only_the_rank_that_has_the_task_may_speak_of_it(rank: int | None) -> None:
    with pytest.raises(IllegalEvent, match="not on rank 3"):
        task_in(G, rank).require(A, Rank(3))


def test_invariant_2_a_group_is_complete_when_no_task_is_pending() -> None:
    group = Group(spec_of(0), num_pending=2, start_version=WeightVersion(0))
    group.tasks = [Task(TaskId(i), group, state=state) for i, state in enumerate([F, O])]
    assert not group.is_complete
    group.num_pending = 0
    assert group.is_complete
    assert [t.task_id for t in group.finished] == [0]


def test_a_task_is_of_its_groups_kind() -> None:
    task = task_in(Q)
    assert task.kind is task.group.spec.kind
