"""Everything that the scheduling core can ask of its shell. Orders, in the imperative.

An action with a `rank` or `ranks` field goes to those ranks; the others are for the shell itself (task stream, metrics,
console). The order of the actions in a tuple is the order in which they must be performed.

Source: paper §4 (CTB), §5.1 (RA2P), §5.2 (ERS).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from tiderl.types import GroupSpec, MicroBatchId, Pipelining, Rank, TaskId, TaskKind, WeightVersion


@dataclass(frozen=True, slots=True)
class SupplyGroups:
    """Draw the next `count` groups of the task stream; answer with `GroupsSupplied`."""

    kind: TaskKind
    count: int


@dataclass(frozen=True, slots=True)
class StartTask:
    """Open an environment session and play it on `rank`."""

    rank: Rank
    task_id: TaskId
    group: GroupSpec
    attempt: int


@dataclass(frozen=True, slots=True)
class PauseTask:
    """Interrupt a task and hand it over: answer with `TaskPaused`, or with its end if that comes first."""

    rank: Rank
    task_id: TaskId


@dataclass(frozen=True, slots=True)
class ResumeTask:
    """Go on with a paused task on `rank`, which may be another one than before."""

    rank: Rank
    task_id: TaskId


@dataclass(frozen=True, slots=True)
class EndPaused:
    """Paused tasks that nobody waits for any more: end their environment sessions, forget their records. No answer."""

    task_ids: tuple[TaskId, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class CancelTask:
    """End a task without a trajectory; answer with `TaskFailed(kind=CANCELLED)`."""

    rank: Rank
    task_id: TaskId


@dataclass(frozen=True, slots=True)
class DropTrajectories:
    """Forget these finished trajectories: nothing will train on them."""

    task_ids: tuple[TaskId, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class OpenStep:
    """Get ready for training step `step` from weights `version` (numbered from 0)."""

    ranks: tuple[Rank, ...]
    step: int
    version: WeightVersion
    pipelining: Pipelining


@dataclass(frozen=True, slots=True)
class AssignMicroBatch:
    """Send these trajectories to an actor; it trains in the order of assignment, and answers each with `MicroBatchTrained`."""

    rank: Rank
    step: int
    micro_batch_id: MicroBatchId
    task_ids: tuple[TaskId, ...]
    advantages: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ScoreMicroBatch:
    """Send these trajectories to a Ref rank; it sends their reference log-probs to `actor` and answers with `ReferenceScored`.
    Comes after the `AssignMicroBatch` with the same id."""

    rank: Rank
    step: int
    micro_batch_id: MicroBatchId
    actor: Rank
    task_ids: tuple[TaskId, ...]


@dataclass(frozen=True, slots=True)
class FinishColocated:
    """Nobody else will score what you still wait for in this step (a Ref rank is gone): score it yourselves. No answer."""

    ranks: tuple[Rank, ...]
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class CloseStep:
    """Nothing more is assigned in this step: reduce, update, answer with `StepTrained`."""

    ranks: tuple[Rank, ...]
    step: int
    num_micro_batches: int


@dataclass(frozen=True, slots=True)
class AbandonStep:
    """Leave the step without an update as soon as possible; answer with `StepTrained(abandoned=True)`."""

    ranks: tuple[Rank, ...]
    step: int


@dataclass(frozen=True, slots=True)
class PrepareSync:
    """Come to the door of the weight sync and answer with `SyncReady`."""

    ranks: tuple[Rank, ...]
    version: WeightVersion


@dataclass(frozen=True, slots=True)
class StartSync:
    """Everyone is at the door: `leader` broadcasts weights `version`, all answer with `SyncFinished`."""

    ranks: tuple[Rank, ...]
    version: WeightVersion
    leader: Rank


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    """The actors save theirs, the shell saves the core's state; each actor answers with `CheckpointSaved`."""

    ranks: tuple[Rank, ...]
    step: int
    final: bool


@dataclass(frozen=True, slots=True)
class ReportStep:
    """A training step made an update, the `step`-th from 0: one line of metrics. Keys: see `scheduling.metrics`."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ReportEvaluation:
    """An evaluation round is over. `num_missing` tasks failed or came too late; the means are over the others."""

    version: WeightVersion
    num_tasks: int
    num_missing: int
    success: float
    reward: float
    turns: float
    complete: bool


@dataclass(frozen=True, slots=True)
class ReportLedger:
    """Weights `version` are on all ranks: what the ranks did since the sync before, and where all tokens are now.

    `seconds` by `ledger.Activity` add up to `elapsed_s` rank-seconds, but for `error` of them (a share).
    """

    version: WeightVersion
    seconds: Mapping[str, float]
    elapsed_s: float
    error: float
    tokens: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Note:
    """One line for the log: a decision with its reason, a failure with its place."""

    level: str
    text: str


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End the job: all ranks leave. `exit_code` 0 is a finished job, or one stopped by request with its state saved."""

    exit_code: int
    reason: str


Action = (
    SupplyGroups
    | StartTask
    | PauseTask
    | ResumeTask
    | EndPaused
    | CancelTask
    | DropTrajectories
    | OpenStep
    | AssignMicroBatch
    | ScoreMicroBatch
    | FinishColocated
    | CloseStep
    | AbandonStep
    | PrepareSync
    | StartSync
    | SaveCheckpoint
    | ReportStep
    | ReportEvaluation
    | ReportLedger
    | Note
    | Shutdown
)

ACTION_TYPES: tuple[type, ...] = get_args(Action)
