"""The emulated trainer: the protocol in full, its order and its time; no gradients.

Each call waits for the seconds that the profile gives to what a real actor would compute or move. The weights are those of
`rl.emulated_model` for the version, so that a sync and its canary are real; the trainer's log-probs are taken to be the engine's.
No loss is made up: `sums` is empty and the gradient norm is 0.0.

What takes how long (costs of `profiles.costs.CostModel`, the job's seconds):

    start                swap_s(weights)
    begin_step           gather_s
    forward, backward    forward_s, backward_s
    end_step             the wait for the slowest actor, optimizer_s
    full_weights         sync_s, before the weights are handed out: receivers see the broadcast take so long
    score, save, load    nothing: the canary is tiny, and no profile says how fast a disk is

Invariants: those of `base.py` that do not speak of gradients, and (tests/unit/test_emulated_trainer.py,
tests/conformance/test_trainer_emulated.py)

1. The seconds that pass are the cost model's, without drift (`emulated_pace.py`); reported ones are those that passed.
2. What would not fit into the GPU's memory is refused (`emulated_memory.py`): a forward, whose activations stay until its backward,
   limits how many may be in flight.
3. Nothing between `begin_step` and `end_step` involves another rank; every other call meets all actors (`emulated_calls.py`).

Source: paper §3, §5.1.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from tiderl.clock import JobClock
from tiderl.config.schema import Config
from tiderl.errors import TrainerError
from tiderl.profiles.costs import CostModel
from tiderl.rl import emulated_model
from tiderl.rl.packing import PackedBatch, pack
from tiderl.trainers.base import InFlight, LogProbs, MicroBatchResult, StepResult
from tiderl.trainers.emulated_calls import ActorCalls
from tiderl.trainers.emulated_memory import ActorMemory
from tiderl.trainers.emulated_pace import Pace
from tiderl.trainers.in_flight import InFlightForwards
from tiderl.trainers.optim import learning_rate
from tiderl.types import MicroBatch, WeightVersion

#: The real trainers' name for it, with a format that none of them reads.
MARKER = "checkpoint.json"
FORMAT = "emulated-1"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Forward:
    """A micro-batch whose activations are held."""

    num_tokens: int
    batch: PackedBatch
    forward_s: float


class EmulatedTrainer:
    """One actor rank. `group` holds the actors and no other rank; the leader broadcasts to `num_receivers` rollout ranks."""

    def __init__(
        self,
        config: Config,
        group: dist.ProcessGroup,
        costs: CostModel,
        clock: JobClock,
        num_receivers: int,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._config = config
        self._costs = costs
        self._clock = clock
        self._num_receivers = num_receivers
        self._actors = ActorCalls(group, config.timeouts.collective_s)
        #: Of the rank's GPU: a reference beside this actor takes its own from it.
        self.memory = ActorMemory(config, costs, self._actors.num_actors)
        self._pace = Pace(clock, sleep)
        self._has_reference = config.loss.kl_weight > 0.0
        self._version = WeightVersion(0)
        self._in_step = False
        self._num_trained_tokens = 0
        self._in_flight: InFlightForwards[_Forward] = InFlightForwards()

    @property
    def version(self) -> WeightVersion:
        return self._version

    @property
    def late_s(self) -> float:
        """Seconds by which this actor's work is behind the profile, because the machine could not keep up."""
        return self._pace.late_s

    def start(self) -> None:
        """(collective) See `base.Trainer`. Raises `TrainerError` where model and optimizer don't fit."""
        self.memory.check_resident()
        self._pace.begin()
        self._pace.wait(self._costs.swap_s(self._costs.weight_bytes))
        self._actors.meet("start")

    def begin_step(self) -> None:
        self._require_between_steps("begin_step")
        self._actors.meet("begin_step")
        self._pace.begin()
        self._pace.wait(self._costs.gather_s(self._actors.num_actors))
        self._num_trained_tokens = 0
        self._in_step = True

    def _require_between_steps(self, call: str) -> None:
        if self._in_step:
            raise TrainerError(f"{call} was called inside a training step; call end_step first")

    def forward(self, micro_batch: MicroBatch) -> InFlight:
        """See `base.Trainer`. Raises `TrainerError` outside a step, and where the micro-batch does not fit into memory."""
        if not self._in_step:
            raise TrainerError("forward was called outside a training step; call begin_step first")
        self._pace.begin()
        batch = pack(micro_batch.trajectories)
        forward_s = 0.0
        if batch.num_targets:
            self.memory.take_activations(sum(batch.lengths))
            forward_s = self._pace.wait(self._costs.forward_s(batch.lengths))
        return self._in_flight.add(micro_batch.num_tokens, _Forward(micro_batch.num_tokens, batch, forward_s))

    def backward(self, in_flight: InFlight, reference: Sequence[LogProbs] | None) -> MicroBatchResult:
        """See `base.Trainer`. Raises `TrainerError` without `reference` where the loss needs it, and for a forward that has had
        its backward or is of another step."""
        if reference is None and self._has_reference:
            raise TrainerError("backward: loss.kl_weight is above 0, so reference log-probs are needed")
        with self._in_flight.finishing(in_flight) as forward:
            self._pace.begin()
            batch, backward_s = forward.batch, 0.0
            if batch.num_targets:
                checkpoint_layers = self._config.trainer.checkpoint_layers
                seconds = self._costs.backward_s(batch.lengths, checkpoint_layers=checkpoint_layers)
                backward_s = self._pace.wait(seconds)
                self.memory.free_activations(sum(batch.lengths))
        self._num_trained_tokens += batch.num_targets
        return MicroBatchResult(
            num_tokens=forward.num_tokens,
            num_trained_tokens=batch.num_targets,
            num_padding_tokens=batch.num_padding_tokens,
            forward_s=forward.forward_s,
            backward_s=backward_s,
            sums={},
            max_same_version_gap=0.0,
        )

    def end_step(self, *, abandon: bool) -> StepResult:
        if not self._in_step:
            raise TrainerError("end_step was called without begin_step")
        if not abandon:
            self._in_flight.require_none()
        self._in_flight.drop()
        self.memory.free_all_activations()
        began_s = self._clock.now_s()
        rows = self._actors.meet("end_step", abandon, self._num_trained_tokens)
        abandoned, num_tokens = any(row[0] for row in rows), sum(row[1] for row in rows)
        # A step without an update reduces its gradients and frees its parameters all the same, as `FsdpTrainer` does.
        self._pace.begin()
        self._pace.wait(self._costs.optimizer_s(self._actors.num_actors))
        self._in_step = False
        lr = learning_rate(self._config.optim, self._config.train.steps, self._version)
        updated = not abandoned and num_tokens > 0
        if updated:
            self._version = WeightVersion(self._version + 1)
        return StepResult(
            updated=updated,
            abandoned=abandoned,
            version=self._version,
            grad_norm=0.0,
            lr=lr,
            num_trained_tokens=num_tokens,
            optimizer_s=self._clock.now_s() - began_s,
        )

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `base.Trainer`. All actors take part in the gathering to its end, so all of them are busy for sync_s."""
        self._require_between_steps("full_weights")
        self._actors.meet("full_weights")
        self._pace.begin()
        self._pace.wait(self._costs.sync_s(self._num_receivers))
        yield emulated_model.WEIGHT_NAME, torch.from_numpy(emulated_model.weights_of(self._version))

    def score(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """See `base.Trainer`; a call inside a step sees the same weights and waits for no one."""
        if not self._in_step:
            self._actors.meet("score")
        return emulated_model.score(emulated_model.weights_of(self._version), token_ids)

    def save(self, folder: Path) -> None:
        """See `base.Trainer`. There is so little to write that it is on disk when this returns."""
        self._require_between_steps("save")
        self._actors.agree("save", _write(folder, self._version) if self._actors.rank == 0 else "")

    def wait_saved(self) -> None:
        self._actors.meet("wait_saved")

    def load(self, folder: Path) -> None:
        """See `base.Trainer`. Raises `TrainerError` where the checkpoint is missing, not whole or of a real trainer."""
        self._require_between_steps("load")
        version, problem = self._version, ""
        try:
            version = _read(folder)
        except TrainerError as error:
            problem = str(error)
        self._actors.agree("load", problem)
        self._version = version

    def export_hf(self, folder: Path) -> None:
        """Raises `TrainerError`: there is no model to export."""
        raise TrainerError(
            f"export_hf to {folder}: trainer.kind is emulated, so there is no model; set checkpoint.export_hf = false"
        )


def _write(folder: Path, version: WeightVersion) -> str:
    """A checkpoint, whole or not there at all; returns what is wrong, or nothing."""
    partial = folder.with_name(folder.name + ".partial")
    if folder.exists():
        return f"cannot save a checkpoint to {folder}: it exists; choose another run.name or remove it"
    try:
        if partial.exists():
            logger.warning("removing %s, left behind by a save that was cut off", partial)
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        (partial / MARKER).write_text(json.dumps({"format": FORMAT, "version": version}), encoding="utf-8")
        partial.rename(folder)
    except OSError as error:
        return f"cannot save a checkpoint to {folder}: {error}; check space and permissions"
    return ""


def _read(folder: Path) -> WeightVersion:
    """The version of a checkpoint. Raises `TrainerError`."""
    marker = folder / MARKER
    if not marker.is_file():
        raise TrainerError(f"{folder} is not a whole checkpoint ({MARKER} is missing); choose another in run.resume")
    try:
        content = json.loads(marker.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise TrainerError(
                f"{marker} has format {content['format']}, the emulated trainer reads {FORMAT}; choose another in "
                f"run.resume, or set trainer.kind as in that run"
            )
        return WeightVersion(int(content["version"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainerError(
            f"{marker} is broken ({type(error).__name__}: {error}); choose another in run.resume"
        ) from error
