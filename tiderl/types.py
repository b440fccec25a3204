"""The nouns that every room shares: ids, roles, trajectories and what they are made of. All frozen.

A *task* is one trajectory to be generated: one environment session, played turn by turn. The G tasks that start from the
same environment state form a *group* (GRPO). A *trajectory* is the record that a finished task leaves behind: token ids
exactly as the engine saw and produced them, never text (token in, token out).

Source: paper §2.1.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NewType

import numpy as np
import numpy.typing as npt

TaskId = NewType("TaskId", int)
GroupId = NewType("GroupId", int)
MicroBatchId = NewType("MicroBatchId", int)
Rank = NewType("Rank", int)
#: Number of optimizer updates behind a set of weights; 0 is the model that the job started from.
WeightVersion = NewType("WeightVersion", int)


class Role(enum.Enum):
    """What a rank is doing for the job right now. Actors keep theirs; pool ranks are moved by ERS."""

    ROLLOUT = "rollout"
    REF = "ref"
    ACTOR = "actor"


class TaskKind(enum.Enum):
    TRAIN = "train"
    EVAL = "eval"


class Pipelining(enum.Enum):
    """Where, and in which order, a step's reference log-probs are computed (paper §5.1)."""

    #: There is no reference: no KL penalty.
    NONE = "none"
    #: On the actors' ranks: all micro-batches that are there, then the actor on all of them.
    COLOCATED = "colocated"
    #: On ranks of its own, while the actors' forwards run.
    DECOUPLED = "decoupled"
    #: On the actors' ranks, reference and actor in turn for every micro-batch (as streaming systems do).
    ALTERNATING = "alternating"


class FailureKind(enum.Enum):
    """Why a task ended without a trajectory. A failure is never a reward."""

    ENVIRONMENT = "environment"
    TIMEOUT = "timeout"
    ENGINE = "engine"
    RANK_LOST = "rank_lost"
    NEVER_FITS = "never_fits"
    CANCELLED = "cancelled"


class Finish(enum.Enum):
    """Why a trajectory ended; its reward counts in every case."""

    DONE = "done"
    MAX_TURNS = "max_turns"
    MAX_CONTEXT = "max_context"


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """What a group plays: everything that a worker needs to start its tasks, and that the core needs to know of them."""

    group_id: GroupId
    kind: TaskKind
    env: str
    #: Which task of the environment: same env, split and seed give the same initial state.
    split: str
    seed: int
    #: Tasks of one type are expected to have similar lengths and latencies (estimates are kept per type).
    task_type: str


@dataclass(frozen=True, slots=True)
class Image:
    """An image inside a trajectory, at the place where its placeholder tokens start."""

    data: bytes
    media_type: str
    #: Index into the trajectory's `token_ids` of the first placeholder token, and their number.
    position: int
    num_placeholders: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call and the environment's answer to it. Indices are into the trajectory's `token_ids`."""

    #: First generated token of the turn, and one past the last.
    start: int
    end: int
    #: Seconds from the request to the last token, pauses not counted.
    generate_s: float
    #: Seconds that the environment took for this turn's action (0.0 where the episode was cut before it).
    env_s: float
    #: Prompt tokens that the engine had not to compute again: held since the last turn, or found in its prefix cache.
    cached_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """The record of a finished task. All arrays have length [num_tokens].

    `generated` is True where the model produced the token (only these carry loss). There `log_probs` holds the engine's
    log-probability under the distribution sampled from (logits / temperature, over the whole vocabulary), and
    `weight_versions` the weights that produced the token; elsewhere they hold 0.0 and -1.
    """

    task_id: TaskId
    group_id: GroupId
    kind: TaskKind
    token_ids: npt.NDArray[np.int32]
    generated: npt.NDArray[np.bool_]
    log_probs: npt.NDArray[np.float32]
    weight_versions: npt.NDArray[np.int32]
    turns: tuple[Turn, ...]
    images: tuple[Image, ...]
    reward: float
    success: bool
    finish: Finish

    def __post_init__(self) -> None:
        shape = self.token_ids.shape
        for name in ("generated", "log_probs", "weight_versions"):
            if getattr(self, name).shape != shape:
                raise ValueError(
                    f"trajectory of task {self.task_id}: {name} has shape {getattr(self, name).shape}, token_ids {shape}"
                )

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_generated(self) -> int:
        return int(self.generated.sum())


@dataclass(frozen=True, slots=True)
class SessionHandle:
    """All that it takes to go on with an environment session from another process (paper.md, rule 9: pausing has a lease)."""

    url: str
    session_id: str
    #: The turn that the server expects next, from 0.
    turn: int
    #: The server ends the session if it hears nothing for this long: while it is active, while it is paused.
    lease_s: float
    pause_lease_s: float


@dataclass(frozen=True, slots=True, eq=False)
class PausedTask:
    """A task between two ranks: its tokens so far and its environment session. Arrays have length [num_tokens], as in `Trajectory`.

    The next thing to do with it is always to generate: the turn at `turn_start`, of which the tokens from there on are made
    already (none, where the task was held before its next turn).
    """

    task_id: TaskId
    group: GroupSpec
    attempt: int
    session: SessionHandle
    token_ids: npt.NDArray[np.int32]
    generated: npt.NDArray[np.bool_]
    log_probs: npt.NDArray[np.float32]
    weight_versions: npt.NDArray[np.int32]
    turns: tuple[Turn, ...]
    #: Index of the open turn's first generated token: at most num_tokens.
    turn_start: int
    #: What the open turn has used so far, as in `Turn`.
    generate_s: float
    cached_tokens: int
    #: Seconds that the task has been played, pauses not counted (`rollout.task_timeout_s`).
    played_s: float


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Trajectories that one actor rank takes through one forward and one backward, with one advantage each."""

    micro_batch_id: MicroBatchId
    step: int
    trajectories: tuple[Trajectory, ...]
    advantages: tuple[float, ...]

    @property
    def num_tokens(self) -> int:
        return sum(t.num_tokens for t in self.trajectories)
