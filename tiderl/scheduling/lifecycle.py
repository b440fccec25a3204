"""The records of tasks, groups and ranks, and which state may follow which.

    task    QUEUED → STARTING → GENERATING ⇄ ACTING → FINISHED
                  ↖______________(retry)____________↙   ↘ OUT   (failed for good, or cancelled)

    group   OPEN → READY → TRAINING → GONE        (train)
            OPEN → GONE                           (evaluated, or too few trajectories left, or late)

Invariants (tests/scheduling/test_lifecycle.py):

1. A state changes only along the arrows; anything else is an `IllegalEvent` before anything is changed.
2. A group is complete when none of its tasks can still leave a trajectory.

Source: paper §2.1 (groups), §4.1 (tasks).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from tiderl.errors import IllegalEvent
from tiderl.types import GroupSpec, Rank, TaskId, TaskKind, WeightVersion


class TaskState(enum.Enum):
    QUEUED = "queued"
    STARTING = "starting"
    GENERATING = "generating"
    ACTING = "acting"
    FINISHED = "finished"
    OUT = "out"


class GroupState(enum.Enum):
    OPEN = "open"
    READY = "ready"
    TRAINING = "training"
    GONE = "gone"


#: States in which a task is on a rank: its environment session may exist, its context may be in the KV cache.
ON_RANK = frozenset({TaskState.STARTING, TaskState.GENERATING, TaskState.ACTING})

LEGAL: dict[TaskState, frozenset[TaskState]] = {
    TaskState.QUEUED: frozenset({TaskState.STARTING, TaskState.OUT}),
    TaskState.STARTING: frozenset({TaskState.GENERATING, TaskState.QUEUED, TaskState.OUT}),
    TaskState.GENERATING: frozenset({TaskState.ACTING, TaskState.FINISHED, TaskState.QUEUED, TaskState.OUT}),
    TaskState.ACTING: frozenset({TaskState.GENERATING, TaskState.FINISHED, TaskState.QUEUED, TaskState.OUT}),
    TaskState.FINISHED: frozenset(),
    TaskState.OUT: frozenset(),
}


@dataclass(slots=True)
class Task:
    """One trajectory to be generated, and what its present attempt has used."""

    task_id: TaskId
    group: Group
    state: TaskState = TaskState.QUEUED
    attempt: int = 0
    rank: Rank | None = None
    context_tokens: int = 0
    generated_tokens: int = 0
    num_turns: int = 0
    reward: float = 0.0
    success: bool = False

    @property
    def kind(self) -> TaskKind:
        return self.group.spec.kind

    def require(self, target: TaskState, rank: Rank) -> None:
        """Check that the task may go to `target` on an event from `rank`; changes nothing."""
        if self.rank != rank:
            raise IllegalEvent(f"task {self.task_id} is on rank {self.rank}, not on rank {rank}")
        if target not in LEGAL[self.state]:
            raise IllegalEvent(f"task {self.task_id} cannot go from {self.state.value} to {target.value}")


@dataclass(slots=True)
class Group:
    """The tasks that start from one environment state, and how many of them are still to come."""

    spec: GroupSpec
    #: Tasks that may still leave a trajectory.
    num_pending: int
    #: Oldest weight version among the tokens of the group, or the version under which it was admitted.
    start_version: WeightVersion
    state: GroupState = GroupState.OPEN
    tasks: list[Task] = field(default_factory=list)

    @property
    def finished(self) -> list[Task]:
        return [t for t in self.tasks if t.state is TaskState.FINISHED]

    @property
    def is_complete(self) -> bool:
        return self.num_pending == 0
