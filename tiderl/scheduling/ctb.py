"""Continuous Task Batching, admission: which queued task starts next, and on which rollout rank.

Every rollout rank is a pool of KV-cache tokens. A task is admitted only where the whole context that it may grow to still
fits, so an admitted task never has to be preempted; within the budget, the rank with the most headroom is taken.

Invariants (tests/scheduling/test_ctb.py):

1. The reservations of a rank never exceed its budget, its tasks never exceed `max_tasks_per_rank`, and the tasks of all ranks
   never exceed the environments' capacity.
2. Evaluation tasks come before training tasks; then older groups, then smaller task ids.
3. As long as some rank has room and the environments have a free session, no queued task waits.

Source: paper §4.1 (budgets, environment concurrency), §4.2 (evaluation first).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from tiderl.scheduling.lifecycle import Task
from tiderl.types import GroupId, Rank, TaskId, TaskKind


@dataclass(slots=True)
class RankBudget:
    """One rollout rank: what it can hold and what is promised."""

    budget_tokens: int
    reserved_tokens: int = 0
    tasks: set[TaskId] = field(default_factory=set)


class Admission:
    """The queue of tasks and the budgets of the rollout ranks."""

    def __init__(self, *, reserve_per_task_tokens: int, max_tasks_per_rank: int) -> None:
        self._reserve = reserve_per_task_tokens
        self._max_tasks = max_tasks_per_rank
        self._queue: list[tuple[bool, GroupId, TaskId, Task]] = []
        self._by_headroom: list[tuple[int, Rank]] = []
        #: What is in that heap: no entry is there twice, or it would grow with every task that comes and goes.
        self._offered: set[tuple[int, Rank]] = set()
        self._capacity = 0
        self.num_active = 0
        self.ranks: dict[Rank, RankBudget] = {}

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def set_capacity(self, num_sessions: int) -> None:
        """How many tasks the environments can hold at once."""
        self._capacity = num_sessions

    def add_rank(self, rank: Rank, budget_tokens: int) -> None:
        """A rollout rank takes tasks from now on."""
        self.ranks[rank] = RankBudget(budget_tokens)
        self._offer(rank)

    def enqueue(self, task: Task) -> None:
        heapq.heappush(self._queue, (task.kind is not TaskKind.EVAL, task.group.spec.group_id, task.task_id, task))

    def drain(self, kind: TaskKind) -> list[Task]:
        """Take all queued tasks of `kind` out of the queue, in order."""
        taken = sorted(entry for entry in self._queue if entry[3].kind is kind)
        self._queue = [entry for entry in self._queue if entry[3].kind is not kind]
        heapq.heapify(self._queue)
        return [entry[3] for entry in taken]

    def place(self) -> tuple[Task, Rank] | None:
        """Admit the next task, or None if nothing waits or nothing has room."""
        if not self._queue or self.num_active >= self._capacity:
            return None
        rank = self._roomiest()
        if rank is None:
            return None
        task = heapq.heappop(self._queue)[3]
        budget = self.ranks[rank]
        budget.reserved_tokens += self._reserve
        budget.tasks.add(task.task_id)
        self.num_active += 1
        self._offer(rank)
        return task, rank

    def release(self, task_id: TaskId, rank: Rank) -> None:
        """A task has left its rank: its tokens are free at once."""
        budget = self.ranks[rank]
        budget.tasks.remove(task_id)
        budget.reserved_tokens -= self._reserve
        self.num_active -= 1
        self._offer(rank)

    def _has_room(self, rank: Rank) -> bool:
        budget = self.ranks[rank]
        return budget.reserved_tokens + self._reserve <= budget.budget_tokens and len(budget.tasks) < self._max_tasks

    def _headroom(self, rank: Rank) -> int:
        budget = self.ranks[rank]
        return budget.budget_tokens - budget.reserved_tokens

    def _offer(self, rank: Rank) -> None:
        """Put the rank into the heap under its present headroom; entries with an older headroom are skipped later."""
        entry = (-self._headroom(rank), rank)
        if self._has_room(rank) and entry not in self._offered:
            heapq.heappush(self._by_headroom, entry)
            self._offered.add(entry)

    def _roomiest(self) -> Rank | None:
        heap = self._by_headroom
        while heap:
            negative_headroom, rank = heap[0]
            if -negative_headroom == self._headroom(rank) and self._has_room(rank):
                return rank
            self._offered.discard(heapq.heappop(heap))
        return None
