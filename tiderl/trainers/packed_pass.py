"""One packed forward pass on a device: a `PackedBatch` in, log-probs out, and their way to trajectories and back.

`unpack` and `gather` are the twins of `PackedBatch`'s for tensors: where actor and reference share a device, the actor reads the
reference's log-probs where the reference has written them.

Invariants (tests/conformance/test_reference.py, tests/conformance/test_deferred_loss.py):

1. A packed forward gives what one forward a trajectory gives.
2. `gather` undoes `unpack`, for tensors and for arrays.
3. `gather` reads tensors that are on the device in place: no copy is made of them.

Source: paper §5.1 (colocated mode: ref_log_probs are handed over in memory).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tiderl.rl.packing import PackedBatch
from tiderl.trainers.base import LogProbs
from tiderl.trainers.model import PackedCausalLM


def done_s(device: torch.device) -> float:
    """A clock, read when the device has done everything that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def to_device(array: npt.NDArray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def packed_log_probs(model: PackedCausalLM, batch: PackedBatch, temperature: float, device: torch.device) -> Tensor:
    """Log-probs [num_targets] (fp32) of the batch's targets, under softmax(logits / temperature)."""
    token_ids, position_ids = to_device(batch.token_ids, device), to_device(batch.position_ids, device)
    rows, targets = to_device(batch.rows, device), to_device(batch.targets, device)
    log_probs: Tensor = model(token_ids, position_ids, batch.lengths, rows, targets, temperature)
    return log_probs


def unpack(batch: PackedBatch, values: Tensor) -> list[Tensor]:
    """Values [num_targets] as one tensor [num_tokens] a trajectory, 0.0 where nothing was generated; all are views of one."""
    starts = np.cumsum([0, *batch.num_tokens[:-1]])
    flat = values.new_zeros(sum(batch.num_tokens))
    flat[to_device(starts[batch.owners] + batch.places, values.device)] = values
    return list(flat.split(batch.num_tokens))


def gather(batch: PackedBatch, log_probs: Sequence[LogProbs], device: torch.device) -> Tensor:
    """The targets' values [num_targets], on the device, out of one tensor or array [num_tokens] a trajectory.

    Raises `ValueError` where these are not the batch's trajectories.
    """
    arrays = [own for own in log_probs if isinstance(own, np.ndarray)]
    if len(arrays) == len(log_probs):
        return to_device(batch.gather(arrays), device)
    tensors = [torch.as_tensor(own, device=device) for own in log_probs]
    shapes = tuple(tuple(own.shape) for own in tensors)
    if shapes != tuple((n,) for n in batch.num_tokens):
        raise ValueError(f"gather: tensors of shapes {shapes} for trajectories of {batch.num_tokens} tokens")
    counts = np.bincount(batch.owners, minlength=len(tensors)).tolist()
    places = to_device(batch.places, device).split(counts)
    return torch.cat([own.index_select(0, own_places) for own, own_places in zip(tensors, places, strict=True)])
