"""The reference model of the KL penalty: whole in host memory, on the device only while it is needed.

All parameters lie in one block of bytes, on the host (pinned where there is a GPU) and on the device, so that a swap is a few long
copies at the full speed of the link. The device's block is one storage for good, of which the parameters are views: `swap_out`
resizes it to nothing, `swap_in` to its full size. The reference never changes, so the device's copy is dropped, not written back.
On a CPU the "device" is host memory too: the block is a second copy, which comes and goes as on a GPU.

Invariants (tests/conformance/test_reference.py):

1. It is the model of `model.path`, in `model.dtype`: what the job started from, also in a resumed run.
2. Swapping out frees the parameters' memory. After swapping in again they are in the same storages, and log-probs are equal bit for
   bit, whatever became of the device's copy in between.
3. Log-probs are those that the actor would compute under the same weights: packed, logits / agent.temperature, fp32.

Source: paper §5.1 (colocated mode), §8 (a read-only copy is dropped).
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from tiderl.config.schema import Config
from tiderl.errors import TrainerError
from tiderl.rl.packing import pack, split_by_tokens
from tiderl.trainers.base import LogProbs, Reference
from tiderl.trainers.model import DTYPES, PackedCausalLM, load_causal_lm
from tiderl.trainers.packed_pass import done_s, packed_log_probs, unpack
from tiderl.types import Trajectory

#: Every parameter starts at a multiple of this, as the device's allocator would have it (kernels read in wide words).
ALIGNMENT_BYTES = 512
#: Pinned memory comes in powers of two: chunks of one waste none of it.
PINNED_CHUNK_BYTES = 256 * 1024 * 1024
#: Of a GPU's memory: left free by a resident reference, for what fragments and libraries take.
SPARE_SHARE = 0.05
MEMINFO = Path("/proc/meminfo")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a parameter's bytes begin in the block, and how to read them."""

    parameter: nn.Parameter
    start: int
    num_bytes: int
    shape: torch.Size
    dtype: torch.dtype


class HostedReference:
    """One rank's; `device` is that rank's."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._host_chunks: tuple[Tensor, ...] = ()
        self._num_bytes = 0
        self._block: Tensor | None = None  # [num_bytes] uint8 on the device; its storage is empty while swapped out
        self._is_on_device = False

    @property
    def is_on_device(self) -> bool:
        return self._is_on_device

    def start(self) -> None:
        """See `base.Reference`. Takes no memory of the device yet."""
        causal_lm = load_causal_lm(self._config.model.path, DTYPES[self._config.model.dtype])
        model = PackedCausalLM(causal_lm, checkpoint_head=False, checkpoint_layers=False).requires_grad_(False)
        for buffer in model.buffers():  # a few KB, such as the rotary frequencies: these stay on the device
            buffer.data = buffer.data.to(self._device)
        parameters = list(model.parameters())  # tied ones once
        sizes = [_aligned(parameter.nbytes) for parameter in parameters]
        starts = list(itertools.accumulate(sizes, initial=0))
        self._num_bytes = starts.pop()
        host = torch.empty(self._num_bytes, dtype=torch.uint8)
        self._places: list[_Place] = []
        for parameter, start in zip(parameters, starts, strict=True):
            loaded = parameter.data
            host[start : start + loaded.nbytes] = loaded.contiguous().view(-1).view(torch.uint8)
            self._places.append(_Place(parameter, start, loaded.nbytes, loaded.shape, loaded.dtype))
            parameter.data = loaded.new_empty(0)  # frees what was loaded, one parameter after the other
        chunks = host.split(PINNED_CHUNK_BYTES)
        self._host_chunks = tuple(c.pin_memory() for c in chunks) if self._device.type == "cuda" else chunks
        self._model = model

    def swap_in(self) -> float:
        """See `base.Reference`. Raises `TrainerError` before `start`."""
        if not self._host_chunks:
            raise TrainerError("swap_in: the reference is not loaded; call start first")
        if self._is_on_device:
            return 0.0
        began_s = done_s(self._device)
        if self._block is None:
            self._block = self._settle()
        self._block.untyped_storage().resize_(self._num_bytes)
        for part, chunk in zip(
            self._block.split([c.nbytes for c in self._host_chunks]), self._host_chunks, strict=True
        ):
            part.copy_(chunk, non_blocking=True)
        self._is_on_device = True
        return done_s(self._device) - began_s

    def _settle(self) -> Tensor:
        """The device's block, and the parameters made views of it for good."""
        block = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device)
        for place in self._places:
            own = block[place.start : place.start + place.num_bytes]
            place.parameter.data = own.view(place.dtype).view(place.shape)
        return block

    def swap_out(self) -> float:
        """See `base.Reference`."""
        if not self._is_on_device:
            return 0.0
        assert self._block is not None
        began_s = done_s(self._device)
        self._is_on_device = False
        self._block.untyped_storage().resize_(0)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)  # for fits_beside: from here on the actor is alone
        return done_s(self._device) - began_s

    def log_probs(self, trajectories: Sequence[Trajectory]) -> list[LogProbs]:
        """See `base.Reference`: tensors, those that are computed together views of one."""
        if not self._is_on_device:
            raise TrainerError("log_probs: the reference is not on the device; call swap_in first")
        tensors: list[LogProbs] = []
        for part in split_by_tokens([t.num_tokens for t in trajectories], self._config.trainer.max_micro_batch_tokens):
            batch = pack(trajectories[part.start : part.stop])
            values = torch.zeros(0, device=self._device)
            if batch.num_targets:
                with torch.no_grad():
                    values = packed_log_probs(self._model, batch, self._config.agent.temperature, self._device)
            tensors.extend(unpack(batch, values))
        return tensors

    def fits_beside(self) -> bool:
        """See `base.Reference`.

        On a GPU: what this process could have, less the most that it has had since the last `swap_out`. On a CPU: twice what all
        actors' copies take must be available now (`MemAvailable`), as if they all shared this machine.
        """
        if self._is_on_device:
            raise TrainerError("fits_beside was asked while the reference is on the device; call swap_out first")
        if self._device.type != "cuda":
            return 2 * self._config.roles.num_actors * self._num_bytes <= available_bytes(MEMINFO)
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        own_bytes = free_bytes + torch.cuda.memory_reserved(self._device)
        left_bytes = own_bytes - torch.cuda.max_memory_allocated(self._device)
        return self._num_bytes <= left_bytes - SPARE_SHARE * total_bytes


def swap_policy(config: Config, reference: Reference) -> Literal["offload", "resident"]:
    """Where an actor's reference is between two uses. With `trainer.swap = "auto"` ask when `base.Reference.fits_beside` may be
    asked, and offload until then."""
    if config.trainer.swap != "auto":
        return config.trainer.swap
    return "resident" if reference.fits_beside() else "offload"


def available_bytes(meminfo: Path) -> int:
    """Host memory that can be had without swapping to disk, from Linux's /proc/meminfo; 0 where it does not say."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        found = None
    if found is None:
        log.warning(
            "%s does not say how much memory is available: taken to be none, so the reference is offloaded", meminfo
        )
        return 0
    return 1024 * int(found.group(1))


def _aligned(num_bytes: int) -> int:
    return math.ceil(num_bytes / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
