"""Everything that the scheduling core can be told. Facts, in the past tense; the core decides what follows from them.

An event says what happened, never what to do. Measured times are in seconds, lengths in tokens. All events are frozen and
hold plain values only, so that the journal can store them and a replay can feed them to a fresh core.

Source: paper §4 (CTB), §5.1 (RA2P), §5.2 (ERS).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from tiderl.types import FailureKind, GroupSpec, MicroBatchId, Rank, Role, TaskId, TaskKind, WeightVersion


@dataclass(frozen=True, slots=True)
class Tick:
    """A deadline that the core had named has passed."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Somebody wants the job to end early, keeping its state (SIGINT, SIGTERM, a time limit)."""

    reason: str


@dataclass(frozen=True, slots=True)
class RankJoined:
    """A rank has loaded what its role needs. The engine's KV cache has `num_kv_blocks` blocks (0: the rank has no engine)."""

    rank: Rank
    role: Role
    weight_version: WeightVersion
    num_kv_blocks: int
    kv_block_tokens: int


@dataclass(frozen=True, slots=True)
class RankLost:
    """A rank died, hangs, or said that it cannot go on."""

    rank: Rank
    reason: str


@dataclass(frozen=True, slots=True)
class GroupsSupplied:
    """The answer to `SupplyGroups`: the next groups of the task stream, in order."""

    kind: TaskKind
    groups: tuple[GroupSpec, ...]


@dataclass(frozen=True, slots=True)
class EnvironmentCapacity:
    """How many sessions all environment servers together can hold (paper §4.1, constraint 1)."""

    num_sessions: int


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What a rank's engine says of itself: the second source for lengths (paper Appendix B.2). `total_` counts since its start.

    `used_tokens` are those in blocks that requests hold now; `cached` and `prefilled` tokens add up to the prompts' tokens.
    """

    rank: Rank
    used_tokens: int
    num_running: int
    num_waiting: int
    total_prefilled_tokens: int
    total_cached_tokens: int
    total_preemptions: int


@dataclass(frozen=True, slots=True)
class SecondsSpent:
    """How a rank has spent the time since its process began, by `ledger.Activity`, on its own clock."""

    rank: Rank
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TurnStarted:
    """A task sends a prompt of `context_tokens` to its rank's engine: a turn begins, or goes on after a pause."""

    task_id: TaskId
    rank: Rank
    context_tokens: int


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """The engine has answered. `context_tokens` is all of it; `generated_tokens` were made and `prefilled_tokens` of the prompt
    computed since the `TurnStarted` before."""

    task_id: TaskId
    rank: Rank
    context_tokens: int
    generated_tokens: int
    prefilled_tokens: int


@dataclass(frozen=True, slots=True)
class TaskPaused:
    """The answer to `PauseTask`: the task has left its rank, its record is with the shell, its environment's clock stands still.

    `generated_tokens` counts all its turns, the interrupted one included; `prefilled_tokens` is what was computed since the
    last report.
    """

    task_id: TaskId
    rank: Rank
    context_tokens: int
    generated_tokens: int
    prefilled_tokens: int


@dataclass(frozen=True, slots=True)
class PausedTaskLost:
    """A paused task can't go on: its environment session is gone."""

    task_id: TaskId
    detail: str


@dataclass(frozen=True, slots=True)
class TaskFinished:
    """A task left a trajectory. `generated_tokens` counts all its turns."""

    task_id: TaskId
    rank: Rank
    context_tokens: int
    generated_tokens: int
    num_turns: int
    oldest_version: WeightVersion
    newest_version: WeightVersion
    reward: float
    success: bool


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """A task ended without a trajectory. All its `generated_tokens` were in vain; `prefilled_tokens` is what was computed since
    the last report."""

    task_id: TaskId
    rank: Rank
    kind: FailureKind
    detail: str
    retryable: bool
    generated_tokens: int
    prefilled_tokens: int


@dataclass(frozen=True, slots=True)
class MicroBatchTrained:
    """An actor has made forward and backward of a micro-batch. Seconds are of the job's clock and this micro-batch's own share.

    `reference_s` and `swap_s` are 0.0 where another rank scored it, or nobody; `waited_s` is what the actor's idle device waited
    for the reference's log-probs.
    """

    rank: Rank
    step: int
    micro_batch_id: MicroBatchId
    num_tokens: int
    reference_s: float
    swap_s: float
    forward_s: float
    backward_s: float
    waited_s: float


@dataclass(frozen=True, slots=True)
class ReferenceScored:
    """A Ref rank has scored a micro-batch and sent the log-probs to its actor."""

    rank: Rank
    step: int
    micro_batch_id: MicroBatchId
    num_tokens: int
    reference_s: float


@dataclass(frozen=True, slots=True)
class StepTrained:
    """An actor rank has left the step. Equal on all actors, except for the sums and seconds, which are its own share."""

    step: int
    rank: Rank
    updated: bool
    abandoned: bool
    version: WeightVersion
    grad_norm: float
    lr: float
    num_trained_tokens: int
    num_padding_tokens: int
    reference_s: float
    swap_s: float
    forward_s: float
    backward_s: float
    waited_s: float
    optimizer_s: float
    #: How often the reference was brought to the device.
    num_swaps: int
    sums: Mapping[str, float]
    max_same_version_gap: float


@dataclass(frozen=True, slots=True)
class SyncReady:
    """A member has stopped at the door of the weight sync: nothing of its own keeps it from the collective."""

    rank: Rank
    version: WeightVersion


@dataclass(frozen=True, slots=True)
class SyncFinished:
    """A member has sent or received, checked and loaded the weights; `canary_gap` is its largest log-prob difference."""

    rank: Rank
    version: WeightVersion
    ok: bool
    detail: str
    transfer_s: float
    load_s: float
    canary_gap: float


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """An actor's part of the checkpoint after `step` updates is on disk, or could not be written."""

    step: int
    final: bool
    rank: Rank
    ok: bool
    detail: str


Event = (
    Tick
    | StopRequested
    | RankJoined
    | RankLost
    | GroupsSupplied
    | EnvironmentCapacity
    | EngineLoad
    | SecondsSpent
    | TurnStarted
    | TurnEnded
    | TaskPaused
    | PausedTaskLost
    | TaskFinished
    | TaskFailed
    | MicroBatchTrained
    | ReferenceScored
    | StepTrained
    | SyncReady
    | SyncFinished
    | CheckpointSaved
)

EVENT_TYPES: tuple[type, ...] = get_args(Event)
