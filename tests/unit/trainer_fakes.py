"""What tests of the emulated trainer share: a cost model of round numbers, a clock moved by sleeps alone, small trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tiderl.trainers.base import LogProbs, MicroBatchResult, Trainer
from tiderl.types import Finish, GroupId, MicroBatch, MicroBatchId, TaskId, TaskKind, Trajectory

GB = 10**9


@dataclass
class RoundCosts:
    """The trainer's part of `CostModel`. Every figure differs from the others, and is easy to add up in the head."""

    memory_bytes: int = 1000 * GB
    weight_bytes: int = 15 * GB

    def forward_s(self, lengths: Sequence[int]) -> float:
        """1 s per 100 tokens, and 1 s per 100 pairs of them that see each other."""
        return sum(n / 100 + n * n / 100 for n in lengths)

    def backward_s(self, lengths: Sequence[int], *, checkpoint_layers: bool) -> float:
        return (3 if checkpoint_layers else 2) * self.forward_s(lengths)

    def optimizer_s(self, num_actors: int) -> float:
        return 5.0 + num_actors

    def swap_s(self, num_bytes: int) -> float:
        return num_bytes / (10 * GB)

    def gather_s(self, num_actors: int) -> float:
        return 0.25 * num_actors

    def sync_s(self, num_receivers: int) -> float:
        return 4.0 + num_receivers / 8

    def trainer_bytes(self, num_actors: int, *, reference: bool) -> int:
        return 45 * GB + 24 * GB // num_actors + (15 * GB if reference else 0)

    def activation_bytes(self, num_tokens: int, *, checkpoint_layers: bool) -> int:
        return num_tokens * GB // (10 if checkpoint_layers else 1)


@dataclass
class FakeTime:
    """A machine's clock, on which the job's seconds pass `scale` times as fast. A sleep ends `overshoot_s` late."""

    scale: float = 4.0
    now_s: float = 1000.0
    overshoot_s: float = 0.0
    sleeps_s: list[float] = field(default_factory=list)

    def read_s(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0.0
        self.sleeps_s.append(seconds)
        self.now_s += seconds + self.overshoot_s


def sleeps(time: FakeTime) -> list[float]:
    """The job's seconds of all sleeps since the last call."""
    taken = [seconds * time.scale for seconds in time.sleeps_s]
    time.sleeps_s.clear()
    return taken


def trajectory(num_tokens: int, generated: Sequence[int]) -> Trajectory:
    """The tokens at the places `generated` have log-probs -1, -2, … in order."""
    mask = np.zeros(num_tokens, dtype=np.bool_)
    mask[list(generated)] = True
    log_probs = np.zeros(num_tokens, dtype=np.float32)
    log_probs[list(generated)] = -1.0 - np.arange(len(generated))
    return Trajectory(
        task_id=TaskId(0),
        group_id=GroupId(0),
        kind=TaskKind.TRAIN,
        token_ids=np.arange(num_tokens, dtype=np.int32),
        generated=mask,
        log_probs=log_probs,
        weight_versions=np.where(mask, 0, -1).astype(np.int32),
        turns=(),
        images=(),
        reward=0.0,
        success=False,
        finish=Finish.DONE,
    )


def micro_batch(*trajectories: Trajectory) -> MicroBatch:
    return MicroBatch(MicroBatchId(0), 0, trajectories, (1.0,) * len(trajectories))


def train(trainer: Trainer, batch: MicroBatch, reference: Sequence[LogProbs] | None) -> MicroBatchResult:
    """Forward, and backward at once."""
    return trainer.backward(trainer.forward(batch), reference)
