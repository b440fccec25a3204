"""The tokens of a task as they come, turn by turn; what a trajectory and a paused task are made from.

Invariants (tests/unit/test_loop*.py):

1. `generated` is True exactly for ids that the engine returned, with its log-probs and versions.
2. A turn may be made in several pieces, on several ranks: its `Turn` begins with the first piece and adds up all of them.
3. `resumed` of what `paused` gave goes on as if nothing had happened.

Source: paper §2.1 (turns), §4.1 (tasks are paused and resumed whole), §7 (each token records its version).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tiderl.engines.base import Generation
from tiderl.scheduling.actions import StartTask
from tiderl.types import Finish, PausedTask, SessionHandle, Trajectory, Turn


@dataclass(slots=True)
class Recorder:
    """The record of one task. The open turn is the one at `turn_start`; `observe` opens it, `close_turn` ends it."""

    token_ids: list[int] = field(default_factory=list)
    generated: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    turn_start: int = 0
    #: What the open turn has used so far, as in `Turn`.
    generate_s: float = 0.0
    cached_tokens: int = 0

    @classmethod
    def resumed(cls, task: PausedTask) -> Recorder:
        return cls(
            token_ids=task.token_ids.tolist(),
            generated=task.generated.tolist(),
            log_probs=task.log_probs.tolist(),
            versions=task.weight_versions.tolist(),
            turns=list(task.turns),
            turn_start=task.turn_start,
            generate_s=task.generate_s,
            cached_tokens=task.cached_tokens,
        )

    def observe(self, ids: list[int]) -> None:
        """Add the ids of an observation, and open the turn that answers it."""
        self.token_ids += ids
        self.generated += [False] * len(ids)
        self.log_probs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)
        self.turn_start = self.num_tokens
        self.generate_s, self.cached_tokens = 0.0, 0

    def generate(self, generation: Generation, generate_s: float) -> None:
        """Add a piece of the open turn, which took `generate_s`."""
        self.token_ids += generation.token_ids.tolist()
        self.generated += [True] * len(generation.token_ids)
        self.log_probs += generation.log_probs.tolist()
        self.versions += generation.weight_versions.tolist()
        self.generate_s += generate_s
        self.cached_tokens += generation.cached_tokens

    def close_turn(self, env_s: float) -> None:
        self.turns.append(Turn(self.turn_start, self.num_tokens, self.generate_s, env_s, self.cached_tokens))

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return sum(self.generated)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the first prompt, which all tasks of the group share."""
        return self.turns[0].start if self.turns else self.turn_start

    @property
    def turn_ids(self) -> list[int]:
        """What the open turn has generated so far."""
        return self.token_ids[self.turn_start :]

    def trajectory(self, order: StartTask, reward: float, success: bool, finish: Finish) -> Trajectory:
        return Trajectory(
            task_id=order.task_id,
            group_id=order.group.group_id,
            kind=order.group.kind,
            token_ids=np.array(self.token_ids, np.int32),
            generated=np.array(self.generated, np.bool_),
            log_probs=np.array(self.log_probs, np.float32),
            weight_versions=np.array(self.versions, np.int32),
            turns=tuple(self.turns),
            images=(),
            reward=reward,
            success=success,
            finish=finish,
        )

    def paused(self, order: StartTask, session: SessionHandle, played_s: float) -> PausedTask:
        return PausedTask(
            task_id=order.task_id,
            group=order.group,
            attempt=order.attempt,
            session=session,
            token_ids=np.array(self.token_ids, np.int32),
            generated=np.array(self.generated, np.bool_),
            log_probs=np.array(self.log_probs, np.float32),
            weight_versions=np.array(self.versions, np.int32),
            turns=tuple(self.turns),
            turn_start=self.turn_start,
            generate_s=self.generate_s,
            cached_tokens=self.cached_tokens,
            played_s=played_s,
        )
