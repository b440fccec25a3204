"""The trainer protocol: forward, backward, optimizer and weights of one actor rank.

All calls come from the rank's device thread. Calls marked (collective) are made by every actor of the group in the same order;
the others involve no other rank, so that actors may get unequal numbers of micro-batches without waiting for each other.

Invariants (tests/conformance/test_trainer.py, every implementation):

1. The gradient after `end_step` is that of the sum over all trained tokens of all ranks of the token losses, divided by the
   global number of trained tokens; it does not depend on how trajectories were spread over ranks and micro-batches.
2. A step with no micro-batch on some rank works; a step abandoned by any rank changes nothing on any rank.
3. `full_weights` yields the Hugging Face names that the engine expects, in a fixed order, tied duplicates left out.
4. Non-finite losses or gradients never reach the weights: the update is skipped and reported.

Source: paper §3, Appendix B.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from tiderl.types import MicroBatch, Trajectory, WeightVersion

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class MicroBatchResult:
    """What one micro-batch did on this rank. Sums are over trained tokens; the seconds are wall time."""

    num_tokens: int
    num_trained_tokens: int
    #: Tokens that were computed on but belong to no trajectory.
    num_padding_tokens: int
    forward_s: float
    backward_s: float
    #: Sums over trained tokens, by metric name (`loss`, `kl`, `clip_low`, `clip_high`, `entropy`, `log_prob_gap`, …).
    sums: Mapping[str, float]
    #: Largest |trainer - engine| log-prob among tokens that the trainer's present weights produced (0.0 if none).
    max_same_version_gap: float


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of `end_step`, equal on all ranks."""

    #: False: abandoned, or skipped because something was not finite; the version did not grow.
    updated: bool
    abandoned: bool
    version: WeightVersion
    grad_norm: float
    lr: float
    num_trained_tokens: int
    optimizer_s: float


class Trainer(Protocol):
    """See the module docstring for the invariants."""

    @property
    def version(self) -> WeightVersion:
        """Updates made so far."""

    def start(self) -> None:
        """(collective) Load model, reference (if `loss.kl_weight` > 0) and optimizer. Raises `ModelError`."""

    def begin_step(self) -> None:
        """(collective) Zero the gradients and make the parameters available for the whole step."""

    def reference_log_probs(self, trajectories: Sequence[Trajectory]) -> list[npt.NDArray[np.float32]]:
        """Reference log-probs, one array [num_tokens] a trajectory, 0.0 where `generated` is False."""

    def train_micro_batch(
        self, micro_batch: MicroBatch, reference: Sequence[npt.NDArray[np.float32]] | None
    ) -> MicroBatchResult:
        """Forward and backward; gradients add up locally."""

    def end_step(self, *, abandon: bool) -> StepResult:
        """(collective) Reduce, clip, update. If any rank abandons, all do."""

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(collective) All parameters, whole, one after the other, in the model's dtype; every rank iterates to the end."""

    def score(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """(collective) Log-probs [num_tokens - 1] of ids 1.. given those before, under the present weights."""

    def save(self, folder: Path) -> None:
        """(collective) Snapshot now, write in the background. `wait_saved` says when it is whole."""

    def wait_saved(self) -> None:
        """(collective) Block until the last `save` is on disk. Raises `TrainerError` if it failed."""

    def load(self, folder: Path) -> None:
        """(collective) Weights, optimizer and version from a checkpoint, whatever number of actors wrote it."""

    def export_hf(self, folder: Path) -> None:
        """(collective) Write a Hugging Face model folder with the tokenizer."""
