"""Admission: the three invariants of `scheduling.ctb` against a model that scans everything, and its costs."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.scheduling.driver import spec_of
from tiderl.scheduling.ctb import Admission
from tiderl.scheduling.lifecycle import Group, Task
from tiderl.types import GroupId, Rank, TaskId, TaskKind, WeightVersion

RESERVE = 100


def task_of(task_id: int, group_id: int, kind: TaskKind = TaskKind.TRAIN) -> Task:
    group = Group(spec_of(group_id, kind), num_pending=1, start_version=WeightVersion(0))
    return Task(TaskId(task_id), group)


def admission_of(*budgets: int, capacity: int = 100, max_tasks: int = 100) -> Admission:
    admission = Admission(reserve_per_task_tokens=RESERVE, max_tasks_per_rank=max_tasks)
    admission.set_capacity(capacity)
    for rank, budget in enumerate(budgets):
        admission.add_rank(Rank(rank), budget)
    return admission


def place_all(admission: Admission) -> list[tuple[int, int]]:
    placed = []
    while (found := admission.place()) is not None:
        placed.append((int(found[0].task_id), int(found[1])))
    return placed


def test_invariant_2_the_order_by_hand() -> None:
    admission = admission_of(1000)
    admission.enqueue(task_of(7, group_id=2))
    admission.enqueue(task_of(5, group_id=3))
    admission.enqueue(task_of(6, group_id=2))
    admission.enqueue(task_of(9, group_id=10**6, kind=TaskKind.EVAL))
    assert place_all(admission) == [(9, 0), (6, 0), (7, 0), (5, 0)]
    assert admission.num_queued == 0


def test_the_roomiest_rank_is_taken_ties_by_rank() -> None:
    # Headrooms 250 400 400: 1, 2 (both 300 then), 1 before 2, then 0 with 250, and so on; 50 tokens are of no use.
    admission = admission_of(250, 400, 400)
    for task in range(12):
        admission.enqueue(task_of(task, group_id=task))
    assert [rank for _, rank in place_all(admission)] == [1, 2, 1, 2, 0, 1, 2, 0, 1, 2]
    assert admission.num_queued == 2


def test_a_released_place_is_taken_again() -> None:
    admission = admission_of(100, 100)
    for task in range(3):
        admission.enqueue(task_of(task, group_id=task))
    assert place_all(admission) == [(0, 0), (1, 1)]
    admission.release(TaskId(1), Rank(1))
    assert place_all(admission) == [(2, 1)]


def test_environments_bound_all_ranks_together() -> None:
    admission = admission_of(1000, 1000, capacity=3)
    for task in range(5):
        admission.enqueue(task_of(task, group_id=task))
    assert len(place_all(admission)) == 3
    admission.set_capacity(2)  # a server is gone: nobody is thrown out, and nobody comes in
    assert place_all(admission) == []
    admission.release(TaskId(0), Rank(0))
    assert place_all(admission) == []
    admission.set_capacity(4)
    assert len(place_all(admission)) == 2


def test_drain_takes_one_kind_out_of_the_queue_in_order() -> None:
    admission = admission_of()
    for task, kind in enumerate([TaskKind.TRAIN, TaskKind.EVAL, TaskKind.TRAIN, TaskKind.EVAL]):
        admission.enqueue(task_of(task, group_id=10 - task, kind=kind))
    assert [t.task_id for t in admission.drain(TaskKind.TRAIN)] == [2, 0]
    assert admission.num_queued == 2
    assert admission.drain(TaskKind.TRAIN) == []
    admission.add_rank(Rank(0), 1000)
    assert place_all(admission) == [(3, 0), (1, 0)]


def test_memory_does_not_grow_with_the_tasks_that_came_and_went() -> None:
    admission = admission_of(300, 300)
    sizes = []
    for task in range(1000):
        admission.enqueue(task_of(task, group_id=task))
        found = admission.place()
        assert found is not None
        admission.release(found[0].task_id, found[1])
        sizes.append(sum(len(v) for v in vars(admission).values() if hasattr(v, "__len__")))
    assert max(sizes[10:]) <= max(sizes[:10])


class AdmissionMachine(RuleBasedStateMachine):
    """Random arrivals and departures, held against plain counting."""

    @initialize(
        budgets=st.lists(st.integers(0, 550), min_size=1, max_size=4),
        capacity=st.integers(0, 8),
        max_tasks=st.integers(1, 4),
    )
    def begin(self, budgets: list[int], capacity: int, max_tasks: int) -> None:
        self.admission = admission_of(*budgets, capacity=capacity, max_tasks=max_tasks)
        self.budgets, self.capacity, self.max_tasks = budgets, capacity, max_tasks
        self.queued: list[tuple[bool, int, int]] = []
        self.active: dict[int, int] = {}
        self.next_task = 0

    @rule(group_id=st.integers(0, 5), is_eval=st.booleans())
    def a_task_comes(self, group_id: int, is_eval: bool) -> None:
        self.admission.enqueue(task_of(self.next_task, group_id, TaskKind.EVAL if is_eval else TaskKind.TRAIN))
        self.queued.append((not is_eval, GroupId(group_id), TaskId(self.next_task)))
        self.next_task += 1

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def a_task_leaves(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(sorted(self.active)))
        self.admission.release(TaskId(task), Rank(self.active.pop(task)))

    @rule(capacity=st.integers(0, 8))
    def the_environments_change(self, capacity: int) -> None:
        self.admission.set_capacity(capacity)
        self.capacity = capacity

    @rule()
    def place(self) -> None:
        self.queued.sort()
        roomy = self.roomy_ranks()
        found = self.admission.place()
        if not self.queued or not roomy or len(self.active) >= self.capacity:
            assert found is None
            return
        assert found is not None, "invariant 3: a task waits although there is room"
        task, rank = found
        assert (task.task_id, rank) == (self.queued.pop(0)[2], max(roomy, key=lambda r: (self.headroom(r), -r)))
        self.active[task.task_id] = rank

    def headroom(self, rank: int) -> int:
        return self.budgets[rank] - RESERVE * self.on(rank)

    def on(self, rank: int) -> int:
        return sum(r == rank for r in self.active.values())

    def roomy_ranks(self) -> list[int]:
        ranks: Any = range(len(self.budgets))
        return [r for r in ranks if self.headroom(r) >= RESERVE and self.on(r) < self.max_tasks]

    @invariant()
    def budgets_hold(self) -> None:
        """Invariant 1, and the books agree."""
        if not hasattr(self, "admission"):
            return
        assert self.admission.num_active == len(self.active)
        assert self.admission.num_queued == len(self.queued)
        for rank, budget in self.admission.ranks.items():
            assert budget.reserved_tokens == RESERVE * self.on(rank) <= max(budget.budget_tokens, 0)
            assert len(budget.tasks) == self.on(rank) <= self.max_tasks


TestAdmission = AdmissionMachine.TestCase
