"""The trainer protocol (forward, backward, optimizer and weights of one actor rank), and that of the reference model.

All calls come from the rank's device thread. Calls marked (collective) are made by every actor of the group in the same order;
the others involve no other rank, so that actors may get unequal numbers of micro-batches without waiting for each other.

Invariants (tests/conformance/test_trainer.py, every implementation):

1. The gradient after `end_step` is that of the sum over all trained tokens of all ranks of the token losses, divided by the
   global number of trained tokens; it does not depend on how trajectories were spread over ranks and micro-batches.
2. A step with no micro-batch on some rank works; a step abandoned by any rank changes nothing on any rank.
3. `full_weights` yields the Hugging Face names that the engine expects, in a fixed order, tied duplicates left out.
4. Non-finite losses or gradients never reach the weights: the update is skipped and reported.
5. The loss is built in `backward`, not in `forward`: any number of forwards may be in flight (memory permitting), and gradients do
   not depend on how forwards and backwards are interleaved; bit for bit, where backwards come in the order of the forwards.
6. The reference is the model that the job started from, read only: leaving the device writes nothing back, and coming back gives
   the same log-probs, bit for bit, in the same place.

Source: paper §3, Appendix B.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from tiderl.types import MicroBatch, Trajectory, WeightVersion

if TYPE_CHECKING:
    import torch


class InFlight(Protocol):
    """A micro-batch between its forward and its backward: it holds the graph."""

    @property
    def num_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class MicroBatchResult:
    """What one micro-batch did on this rank. Sums are over trained tokens; the seconds are the job's."""

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


#: A trajectory's log-probs [num_tokens], float32: a tensor on the device where reference and actor share one, else an array.
LogProbs: TypeAlias = "torch.Tensor | npt.NDArray[np.float32]"


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
        """(collective) Load model and optimizer. Raises `ModelError`."""

    def begin_step(self) -> None:
        """(collective) Zero the gradients and make the parameters available for the whole step."""

    def forward(self, micro_batch: MicroBatch) -> InFlight:
        """Log-probs under the present weights, the graph kept. Raises `TrainerError` outside a step."""

    def backward(self, in_flight: InFlight, reference: Sequence[LogProbs] | None) -> MicroBatchResult:
        """Loss and backward; gradients add up locally. `reference`: one a trajectory, on any device, taken without a copy where it
        is on the trainer's; None where the loss has no KL penalty. Each `InFlight` once."""

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


class Reference(Protocol):
    """The reference model on one rank: whole in host memory, on the device while it is needed. Involves no other rank."""

    @property
    def is_on_device(self) -> bool: ...

    def start(self) -> None:
        """Load the model that the job started from into host memory. Raises `ModelError`."""

    def swap_in(self) -> float:
        """Bring it to the device, in place; returns the job's seconds that it took, 0.0 where it is there."""

    def swap_out(self) -> float:
        """Free its place on the device; nothing is written back. Returns seconds, 0.0 where it is not there."""

    def fits_beside(self) -> bool:
        """Whether it could stay on the device beside an actor and one micro-batch (`trainer.swap = "auto"`). Ask while it is not
        there, at the end of a step that had micro-batches. Raises `TrainerError` while it is there."""

    def log_probs(self, trajectories: Sequence[Trajectory]) -> list[LogProbs]:
        """One a trajectory [num_tokens], 0.0 where `generated` is False; any number of trajectories, computed a micro-batch's worth
        of tokens at a time. On the device. Raises `TrainerError` where it is not swapped in."""
