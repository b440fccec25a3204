"""What coordinator and workers say to each other, beyond the scheduling core's own events and actions.

A worker's events travel as they are (`scheduling.events`); those that carry data have a message here that holds event and data
together. An action with ranks travels as it is (`scheduling.actions`); `MicroBatchMessage` adds the trajectories to one.

Source: paper Appendix B (processes), §7 (heartbeats).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiderl.scheduling.actions import ACTION_TYPES, AssignMicroBatch, ResumeTask, ScoreMicroBatch
from tiderl.scheduling.events import EVENT_TYPES, TaskFinished, TaskPaused
from tiderl.types import MicroBatchId, PausedTask, Rank, Trajectory
from tiderl.wire.codec import Codec


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker's first message: where it runs."""

    rank: Rank
    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A worker lives. `phase` is what its device does now; `loop_lag_s` is how late its event loop was since the last one."""

    rank: Rank
    phase: str
    loop_lag_s: float
    gauges: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RankFailed:
    """A worker cannot go on, and says why before it ends. `user_error`: the cause is something the user can mend."""

    rank: Rank
    reason: str
    user_error: bool


@dataclass(frozen=True, slots=True)
class Farewell:
    """A worker's last message after `Shutdown`. `total_generated_tokens` is its engine's own count, to hold against the ledger."""

    rank: Rank
    total_generated_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class TrajectoryMessage:
    """A finished task: the fact for the core, and the trajectory for the buffer."""

    event: TaskFinished
    trajectory: Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class PausedMessage:
    """A paused task leaves its rank: the fact for the core, and the task itself for whoever goes on with it."""

    event: TaskPaused
    task: PausedTask


@dataclass(frozen=True, slots=True, eq=False)
class ResumeMessage:
    """A paused task comes to a rank."""

    action: ResumeTask
    task: PausedTask


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatchMessage:
    """A micro-batch for an actor: the core's order, and the trajectories that it names, in that order."""

    action: AssignMicroBatch
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ScoreMessage:
    """A micro-batch for a Ref rank: the core's order, and the trajectories that it names, in that order."""

    action: ScoreMicroBatch
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceMessage:
    """From a Ref rank straight to an actor: reference log-probs of a micro-batch's trajectories, in order, each [num_tokens]."""

    step: int
    micro_batch_id: MicroBatchId
    log_probs: tuple[npt.NDArray[np.float32], ...]


MESSAGE_TYPES: tuple[type, ...] = (
    Hello,
    Heartbeat,
    RankFailed,
    Farewell,
    TrajectoryMessage,
    PausedMessage,
    ResumeMessage,
    MicroBatchMessage,
    ScoreMessage,
    ReferenceMessage,
)


def wire_codec(max_message_bytes: int) -> Codec:
    """The codec that both ends of the control connection use."""
    return Codec((*MESSAGE_TYPES, *EVENT_TYPES, *ACTION_TYPES), max_message_bytes=max_message_bytes)
