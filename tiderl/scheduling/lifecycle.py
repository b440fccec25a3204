"""The records of tasks and groups, and which state may follow which.

    task    QUEUED → STARTING → GENERATING ⇄ ACTING → FINISHED
               ↖        ↓            ↓          ↓      ↗
                ↖       └────────→ PAUSING ←────┘─────↗
                 ↖                   ↓  ↖
                  (retry)          PAUSED → RESUMING → GENERATING …
            any of them but FINISHED → OUT   (failed for good, cancelled, or not needed any more)

    group   OPEN → READY → TRAINING → GONE        (train)
            OPEN → GONE                           (evaluated, or too few trajectories left, or late)

A task is *on a rank* from STARTING until it has finished, failed or handed itself over as PAUSED. It is *active* there until it is
told to leave, paused or for good: a PAUSING task still reports what it was doing, and may finish before the order reaches it.

Invariants (tests/scheduling/test_lifecycle.py):

1. A state changes only along the arrows; anything else is an `IllegalEvent` before anything is changed.
2. A group is complete when it has all the trajectories that it needs, or none of its tasks can still leave one.

Source: paper §2.1 (groups), §4.1 (tasks), Algorithm 1 (pause and resume).
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
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    FINISHED = "finished"
    OUT = "out"

    # By identity, in C: states are looked up several times an event.
    __hash__ = object.__hash__


class GroupState(enum.Enum):
    OPEN = "open"
    READY = "ready"
    TRAINING = "training"
    GONE = "gone"


#: States in which a task holds its context in its rank's KV cache, by right.
ACTIVE = frozenset({TaskState.STARTING, TaskState.GENERATING, TaskState.ACTING, TaskState.RESUMING})
#: States in which a rank plays the task and will report its end.
ON_RANK = ACTIVE | {TaskState.PAUSING}

_S = TaskState
LEGAL: dict[TaskState, frozenset[TaskState]] = {
    _S.QUEUED: frozenset({_S.STARTING, _S.OUT}),
    _S.STARTING: frozenset({_S.GENERATING, _S.PAUSING, _S.QUEUED, _S.OUT}),
    _S.GENERATING: frozenset({_S.ACTING, _S.PAUSING, _S.QUEUED, _S.OUT}),
    _S.ACTING: frozenset({_S.GENERATING, _S.PAUSING, _S.FINISHED, _S.QUEUED, _S.OUT}),
    _S.PAUSING: frozenset({_S.PAUSED, _S.FINISHED, _S.QUEUED, _S.OUT}),
    _S.PAUSED: frozenset({_S.RESUMING, _S.QUEUED, _S.OUT}),
    _S.RESUMING: frozenset({_S.GENERATING, _S.PAUSING, _S.QUEUED, _S.OUT}),
    _S.FINISHED: frozenset(),
    _S.OUT: frozenset(),
}


@dataclass(slots=True)
class Task:
    """One trajectory to be generated, and what its present attempt has used."""

    task_id: TaskId
    group: Group
    state: TaskState = TaskState.QUEUED
    attempt: int = 0
    rank: Rank | None = None
    #: Between a `TurnStarted` and what answers it.
    in_turn: bool = False
    num_turns: int = 0
    context_tokens: int = 0
    #: The newest turn that was seen to start, from 0, and the context that it started with.
    turn_seen: int = -1
    turn_context_tokens: int = 0
    #: Tokens from the start that an engine has computed once: what is computed of them again is repeated prefill.
    computed_tokens: int = 0
    generated_tokens: int = 0
    reward: float = 0.0
    success: bool = False
    #: The group has all the trajectories that it needs; this one will be dropped.
    is_spare: bool = False

    @property
    def kind(self) -> TaskKind:
        return self.group.spec.kind

    def require(self, target: TaskState, rank: Rank) -> None:
        """Check that the task may go to `target` on an event from `rank`; changes nothing."""
        self.require_rank(rank)
        if target not in LEGAL[self.state]:
            raise IllegalEvent(f"task {self.task_id} cannot go from {self.state.value} to {target.value}")

    def require_rank(self, rank: Rank) -> None:
        """Check that `rank` is playing the task; changes nothing."""
        if self.rank != rank or self.state not in ON_RANK:
            raise IllegalEvent(f"task {self.task_id} is {self.state.value} on rank {self.rank}, not on rank {rank}")

    def forget_attempt(self) -> None:
        """Back to the start: another attempt has nothing of this one."""
        self.rank, self.in_turn, self.turn_seen = None, False, -1
        self.num_turns = self.context_tokens = self.computed_tokens = self.generated_tokens = 0


@dataclass(slots=True)
class Group:
    """The tasks that start from one environment state, and how many of them are still to come."""

    spec: GroupSpec
    #: Trajectories that the group consists of.
    size: int
    #: Tasks that may still leave a trajectory.
    num_pending: int
    #: Oldest weight version among the tokens of the group, or the version under which it was admitted.
    start_version: WeightVersion
    state: GroupState = GroupState.OPEN
    tasks: list[Task] = field(default_factory=list)
    num_finished: int = 0
    #: The rank whose prefix cache most likely holds the group's shared prompt: where one of its tasks was last admitted.
    home: Rank | None = None
    #: Length of the shared prompt, and of a context after one turn (a probe's, paper §4.1), once one of its tasks has told.
    prompt_tokens: int | None = None
    first_turn_tokens: int | None = None
    #: How much of the shared prompt an engine has computed once.
    computed_prompt_tokens: int = 0

    @property
    def finished(self) -> list[Task]:
        return [t for t in self.tasks if t.state is TaskState.FINISHED]

    @property
    def is_complete(self) -> bool:
        return self.num_finished >= self.size or self.num_pending == 0

    @property
    def completion(self) -> float:
        """N_finished / N_total (paper §4.2)."""
        return self.num_finished / self.size
