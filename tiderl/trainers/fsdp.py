"""The FSDP2 trainer: sharded parameters and optimizer, whole parameters during a step, one reduction at its end.

Actors get unequal and unknown numbers of micro-batches, so a micro-batch must not wait for another rank. `begin_step`
therefore gathers all parameters and keeps them; each backward adds to gradients that stay on this rank; `end_step`
reduces them once. FSDP2 reduces in a backward pass, so the last one is a single token with weight zero, the *flush*.
Between steps only the shards are held: fp32 master weights and the two moments of AdamW, 12 bytes a parameter over the ranks.

The loss is deferred: a forward ends with the log-probs, which `backward` cuts off the graph as a leaf. The loss is built on the
leaf, and the gradient that it leaves there goes down the graph that was kept: the chain rule cut in two, with the operations, and
their order, of one backward through all.

Invariants: those of `base.py`, and (tests/conformance/test_trainer.py, test_deferred_loss.py)

1. Nothing between `begin_step` and `end_step` involves another rank.
2. The log-probs are of the distribution sampled from: logits / agent.temperature. `score` alone uses temperature 1.
3. A graph is freed by its backward, or with its step: an abandoned one may leave forwards in flight.

Source: paper §3, §5.1, Appendix B.3.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tiderl.config.schema import Config
from tiderl.errors import TrainerError
from tiderl.rl.loss import PolicyLoss, policy_loss
from tiderl.rl.packing import PackedBatch, pack
from tiderl.trainers.base import InFlight, LogProbs, MicroBatchResult, StepResult
from tiderl.trainers.checkpoint import CheckpointWriter, check_fits, raise_together, read_info, read_tensors
from tiderl.trainers.export import write_model_folder
from tiderl.trainers.in_flight import InFlightForwards
from tiderl.trainers.model import DTYPES, PackedCausalLM, load_causal_lm
from tiderl.trainers.optim import build_optimizer, global_norm, learning_rate, local_gradients
from tiderl.trainers.packed_pass import done_s, gather, packed_log_probs, to_device
from tiderl.types import MicroBatch, WeightVersion

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Forward:
    """A micro-batch whose loss is still to be built."""

    micro_batch: MicroBatch
    batch: PackedBatch
    log_probs: Tensor | None  # [num_targets], with its graph; None where there is no target
    forward_s: float


class FsdpTrainer:
    """One actor rank. Both groups hold the actors and no other rank; `device` is this rank's.

    `storage_group` is a gloo group of the checkpoints' own: their thread must not share one with the device thread's collectives.
    It is made by the caller, with all other groups: a group that only some ranks make gets another name on each of them.
    """

    def __init__(
        self, config: Config, group: dist.ProcessGroup, storage_group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._config = config
        self._group = group
        self._storage_group = storage_group
        self._device = device
        self._dtype = DTYPES[config.model.dtype]
        self._version = WeightVersion(0)
        self._in_step = False
        self._num_trained_tokens = 0
        self._losses_finite = True
        self._in_flight: InFlightForwards[_Forward] = InFlightForwards()

    @property
    def version(self) -> WeightVersion:
        return self._version

    def start(self) -> None:
        """(collective) See `base.Trainer`. Each rank reads the model folder for itself."""
        settings = self._config.trainer
        self._model = PackedCausalLM(
            load_causal_lm(self._config.model.path, None),
            checkpoint_head=settings.checkpoint_head,
            checkpoint_layers=settings.checkpoint_layers,
        )
        self._shard()
        self._optimizer = build_optimizer(self._model.parameters(), self._config.optim)
        self._writer = CheckpointWriter(self._storage_group, self._config.timeouts.step_s)

    def _shard(self) -> None:
        mesh = DeviceMesh.from_group(self._group, self._device.type)
        # Activations in the model's dtype; gradients add up and are reduced in fp32.
        low = self._dtype is not torch.float32
        policy = (
            MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=torch.float32) if low else MixedPrecisionPolicy()
        )
        # Layer by layer, so that a GPU never holds more than one whole layer in fp32.
        for layer in (*self._model.layers, self._model):
            layer.to(device=self._device, dtype=torch.float32)
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        for module in self._sharded_modules():
            module.set_reshard_after_forward(False, recurse=False)
            module.set_reshard_after_backward(False, recurse=False)
            module.set_requires_gradient_sync(False, recurse=False)
            # The division is by the number of tokens, ours; and gloo can't do FSDP2's (PREMUL_SUM).
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def _sharded_modules(self) -> list[FSDPModule]:
        return [module for module in self._model.modules() if isinstance(module, FSDPModule)]

    def begin_step(self) -> None:
        self._require_between_steps("begin_step")
        self._optimizer.zero_grad()
        self._gather_parameters()
        self._num_trained_tokens = 0
        self._losses_finite = True
        self._in_step = True

    def _gather_parameters(self) -> None:
        for module in self._sharded_modules():
            module.unshard()

    def _free_parameters(self) -> None:
        for module in self._sharded_modules():
            module.reshard()

    def _require_between_steps(self, call: str) -> None:
        if self._in_step:
            raise TrainerError(f"{call} was called inside a training step; call end_step first")

    def forward(self, micro_batch: MicroBatch) -> InFlight:
        """See `base.Trainer`. Raises `TrainerError` outside a step."""
        if not self._in_step:
            raise TrainerError("forward was called outside a training step; call begin_step first")
        batch = pack(micro_batch.trajectories)
        log_probs, began_s = None, done_s(self._device)
        if batch.num_targets:
            log_probs = packed_log_probs(self._model, batch, self._config.agent.temperature, self._device)
        forward = _Forward(micro_batch, batch, log_probs, done_s(self._device) - began_s)
        return self._in_flight.add(micro_batch.num_tokens, forward)

    def backward(self, in_flight: InFlight, reference: Sequence[LogProbs] | None) -> MicroBatchResult:
        """See `base.Trainer`. Raises `TrainerError` without `reference` where the loss needs it, and for a forward that has had
        its backward or is of another step; `ValueError` where `reference` is that of other trajectories."""
        if reference is None and self._config.loss.kl_weight > 0.0:
            raise TrainerError("backward: loss.kl_weight is above 0, so reference log-probs are needed")
        with self._in_flight.finishing(in_flight) as forward:
            if forward.log_probs is None:
                return MicroBatchResult(forward.micro_batch.num_tokens, 0, 0, 0.0, 0.0, {}, 0.0)
            return self._backward(forward, forward.log_probs, reference)

    def _backward(self, forward: _Forward, log_probs: Tensor, reference: Sequence[LogProbs] | None) -> MicroBatchResult:
        batch, began_s = forward.batch, done_s(self._device)
        leaf = log_probs.detach().requires_grad_()
        loss = self._loss(forward, leaf, reference)
        loss.total.backward()
        log_probs.backward(leaf.grad)
        backward_done_s = done_s(self._device)

        self._num_trained_tokens += batch.num_targets
        sums = dict(zip(loss.sums, torch.stack(list(loss.sums.values())).tolist(), strict=True))
        self._losses_finite = self._losses_finite and math.isfinite(sums["loss"])
        gaps = np.abs(leaf.detach().cpu().numpy() - batch.engine_log_probs)
        return MicroBatchResult(
            num_tokens=forward.micro_batch.num_tokens,
            num_trained_tokens=batch.num_targets,
            num_padding_tokens=batch.num_padding_tokens,
            forward_s=forward.forward_s,
            backward_s=backward_done_s - began_s,
            sums=sums,
            max_same_version_gap=float(gaps.max(initial=0.0, where=batch.weight_versions == self._version)),
        )

    def _loss(self, forward: _Forward, leaf: Tensor, reference: Sequence[LogProbs] | None) -> PolicyLoss:
        batch = forward.batch
        advantages = np.asarray(forward.micro_batch.advantages, dtype=np.float32)[batch.owners]
        reference_log_probs = None
        if reference is not None and self._config.loss.kl_weight > 0.0:
            reference_log_probs = gather(batch, reference, self._device)
        return policy_loss(
            leaf,
            to_device(batch.engine_log_probs, self._device),
            to_device(advantages, self._device),
            reference_log_probs,
            self._config.loss,
        )

    def end_step(self, *, abandon: bool) -> StepResult:
        if not self._in_step:
            raise TrainerError("end_step was called without begin_step")
        if not abandon:
            self._in_flight.require_none()
        self._in_flight.drop()
        began_s = done_s(self._device)
        counts = torch.tensor(
            [abandon, not self._losses_finite, self._num_trained_tokens], dtype=torch.int64, device=self._device
        )
        dist.all_reduce(counts, group=self._group)
        num_abandoning, num_not_finite, num_tokens = (int(n) for n in counts.tolist())
        # Also after an abandoned step: the flush is what empties FSDP2's gradient buffers.
        self._flush()
        self._free_parameters()
        self._in_step = False
        grad_norm = 0.0
        updated = False
        lr = learning_rate(self._config.optim, self._config.train.steps, self._version)
        if not num_abandoning and num_tokens:
            grad_norm = self._scale_and_clip(num_tokens)
            updated = math.isfinite(grad_norm) and not num_not_finite
            if not updated:
                log.warning(
                    "update %d skipped: gradient norm %g, %d ranks with a loss not finite",
                    self._version + 1,
                    grad_norm,
                    num_not_finite,
                )
        if updated:
            for parameters in self._optimizer.param_groups:
                parameters["lr"] = lr
            self._optimizer.step()
            self._version = WeightVersion(self._version + 1)
        self._optimizer.zero_grad()
        return StepResult(
            updated, bool(num_abandoning), self._version, grad_norm, lr, num_tokens, done_s(self._device) - began_s
        )

    def _flush(self) -> None:
        """(collective) Reduce what the micro-batches of all ranks have added up into the shards' gradients."""
        token = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._model.set_requires_gradient_sync(True)  # type: ignore[operator]
        (self._model(token, token, (1,), token, token, 1.0).sum() * 0.0).backward()
        self._model.set_requires_gradient_sync(False)  # type: ignore[operator]

    def _scale_and_clip(self, num_tokens: int) -> float:
        """Divide by the tokens, clip to the global norm; returns the norm before clipping."""
        gradients = local_gradients(self._model.parameters())
        norm = global_norm(gradients, self._group) / num_tokens
        limit = self._config.optim.max_grad_norm
        clip = min(1.0, limit / norm) if limit > 0.0 and norm > 0.0 else 1.0
        for gradient in gradients:
            gradient.mul_(clip / num_tokens)
        return norm

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `base.Trainer`. A tensor is the caller's until the next update: it may share memory with the trainer's."""
        self._require_between_steps("full_weights")
        for name, parameter in self._model.hf_parameters():
            shard = parameter.detach().to(self._dtype)  # before the gathering: half the bytes in bfloat16
            assert isinstance(shard, DTensor)
            yield name, shard.full_tensor()

    def score(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """See `base.Trainer`; a call inside a step sees the same weights and waits for no one."""
        if len(token_ids) < 2:
            raise ValueError(f"score: needs at least 2 tokens, got {len(token_ids)}")
        ids = torch.tensor(token_ids, dtype=torch.int64, device=self._device)
        places = torch.arange(len(token_ids) - 1, device=self._device)
        if not self._in_step:
            self._gather_parameters()
        with torch.no_grad():
            values: Tensor = self._model(ids[:-1], places, (len(token_ids) - 1,), places, ids[1:], 1.0)
        if not self._in_step:
            self._free_parameters()
        return values.cpu().numpy()

    def _state(self) -> dict[str, Tensor]:
        """Everything that a checkpoint holds beside the version, by name; the tensors are the trainer's own."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._model.hf_parameters():
            moments = self._optimizer.state[parameter]
            tensors[f"weights.{name}"] = parameter.detach()
            tensors[f"exp_avg.{name}"] = moments["exp_avg"]
            tensors[f"exp_avg_sq.{name}"] = moments["exp_avg_sq"]
        return tensors

    def save(self, folder: Path) -> None:
        self._require_between_steps("save")
        self._writer.save(folder, self._state(), self._version)

    def wait_saved(self) -> None:
        self._writer.wait()

    def load(self, folder: Path) -> None:
        """See `base.Trainer`. Raises `TrainerError` where the checkpoint is missing, not whole or of another model."""
        self._require_between_steps("load")
        info = read_info(folder)
        tensors = self._state()
        check_fits(folder, info, tensors)
        read_tensors(folder, tensors, self._storage_group)
        self._version = WeightVersion(info.version)
        for state in self._optimizer.state.values():
            state["step"].fill_(info.version)  # AdamW's bias correction counts updates, as the version does

    def export_hf(self, folder: Path) -> None:
        """See `base.Trainer`. Raises `TrainerError` on every rank if rank 0 can't write."""
        # A checkpoint that is still being written has its own collectives on the storage group.
        self._writer.wait()
        weights = self.full_weights()
        problem = ""
        if self._group.rank() == 0:
            shapes = {name: tuple(parameter.shape) for name, parameter in self._model.hf_parameters()}
            try:
                write_model_folder(folder, weights, shapes, self._dtype, Path(self._config.model.path))
            except OSError as error:
                problem = str(error)
        for _ in weights:
            pass  # what rank 0 has not taken, also after a failure: gathering needs every rank
        raise_together(problem, f"cannot export the model to {folder}", self._storage_group)
