"""`sync_params`: new weights from the actors' leader to the rollout ranks, over the sync group that was made at the start.

The leader packs parameters into buckets and broadcasts each behind a header. Nothing about the model need be known before: names,
shapes and a checksum travel with every bucket. Receivers compare the checksum on arrival, and names and shapes with what their
engine expects, before the engine is touched.

    per bucket:  header  int64 [4]    version, 1 if this is the last, manifest bytes, bucket bytes
                 manifest uint8 [m]   JSON: [[name, dtype, shape, offset], …] and the checksum
                 bucket  uint8 [n]    the tensors' bytes, each at a multiple of 16
    at the end:  canary  float32      the leader's log-probs of `canary_ids`

Invariants (tests/integration/test_sync.py):

1. What arrives is bit for bit what was sent; a flipped bit anywhere in a bucket is a `WeightMismatch` that names it.
2. A missing, unknown or misshapen parameter is a `WeightMismatch`, raised after the last broadcast, so that no other member hangs.
3. No process group is made or destroyed.

Source: paper §5.2 (`sync_params`), §7 (a bad rank is left out).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from tiderl.errors import WeightMismatch
from tiderl.types import WeightVersion

_ALIGN_BYTES = 16
_ROW_WORDS = 1024

#: Length of the canary sequence; long enough to pass through attention, short enough to cost nothing.
NUM_CANARY_TOKENS = 32


def canary_ids(vocab_size: int) -> list[int]:
    """The token sequence that trainer and engine both score after a sync: arbitrary ids of the model's vocabulary."""
    return np.random.default_rng(20260810).integers(0, vocab_size, NUM_CANARY_TOKENS).tolist()


def checksum(data: torch.Tensor) -> int:
    """A 64-bit sum of a uint8 tensor, sensitive to every bit and to the order of its 8 KiB rows; one pass over memory.

    All weights are odd: an even one would shift the top bit of a word out of the sum.
    """
    num_bytes = data.numel()
    row_bytes = _ROW_WORDS * 8
    whole = num_bytes // row_bytes * row_bytes
    rows = data[:whole].view(torch.int64).view(-1, _ROW_WORDS).sum(dim=1)
    weights = torch.arange(rows.numel(), dtype=torch.int64, device=data.device) * 2 + 1
    tail = torch.zeros(row_bytes, dtype=torch.uint8, device=data.device)
    tail[: num_bytes - whole] = data[whole:]
    tail_sum = (tail.view(torch.int64) * (torch.arange(_ROW_WORDS, device=data.device) * 2 + 1)).sum()
    return int(((rows * weights).sum() + tail_sum * 31 + num_bytes).item())


@dataclass(slots=True)
class _Bucket:
    """Parameters on their way into one broadcast."""

    capacity_bytes: int
    items: list[tuple[str, torch.Tensor, int]] = field(default_factory=list)
    num_bytes: int = 0

    def has_room(self, tensor: torch.Tensor) -> bool:
        return not self.items or self.num_bytes + tensor.nbytes <= self.capacity_bytes

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self.items.append((name, tensor, self.num_bytes))
        self.num_bytes += -(-tensor.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES


class WeightSender:
    """The leader's end."""

    def __init__(self, group: dist.ProcessGroup, leader: int, bucket_bytes: int, device: torch.device) -> None:
        self._group, self._leader, self._bucket_bytes, self._device = group, leader, bucket_bytes, device

    def send(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: WeightVersion, canary: npt.NDArray[np.float32]
    ) -> None:
        """Broadcast all weights and the canary's log-probs [NUM_CANARY_TOKENS - 1]."""
        bucket = _Bucket(self._bucket_bytes)
        for name, tensor in weights:
            if not bucket.has_room(tensor):
                self._broadcast(bucket, version, last=False)
                bucket = _Bucket(self._bucket_bytes)
            bucket.add(name, tensor.detach().contiguous())
        self._broadcast(bucket, version, last=True)
        dist.broadcast(torch.from_numpy(canary).to(self._device), self._leader, group=self._group)

    def _broadcast(self, bucket: _Bucket, version: WeightVersion, *, last: bool) -> None:
        data = torch.zeros(bucket.num_bytes, dtype=torch.uint8, device=self._device)
        entries = []
        for name, tensor, offset in bucket.items:
            data[offset : offset + tensor.nbytes] = tensor.view(-1).view(torch.uint8)
            entries.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset])
        manifest = json.dumps({"entries": entries, "checksum": checksum(data)}).encode()
        header = torch.tensor([version, int(last), len(manifest), data.numel()], dtype=torch.int64, device=self._device)
        dist.broadcast(header, self._leader, group=self._group)
        manifest_tensor = torch.frombuffer(bytearray(manifest), dtype=torch.uint8).to(self._device)
        dist.broadcast(manifest_tensor, self._leader, group=self._group)
        dist.broadcast(data, self._leader, group=self._group)


@dataclass(frozen=True, slots=True)
class ReceivedWeights:
    """Checked weights, in the order of sending; the tensors are views of the receive buffers."""

    version: WeightVersion
    weights: list[tuple[str, torch.Tensor]]
    canary: npt.NDArray[np.float32]


class WeightReceiver:
    """A rollout rank's end."""

    def __init__(self, group: dist.ProcessGroup, leader: int, device: torch.device) -> None:
        self._group, self._leader, self._device = group, leader, device

    def receive(self, expected: Mapping[str, tuple[int, ...]]) -> ReceivedWeights:
        """Take part in every broadcast, then check. Raises `WeightMismatch` with everything that was wrong."""
        faults: list[str] = []
        weights: list[tuple[str, torch.Tensor]] = []
        last, version = False, WeightVersion(-1)
        while not last:
            header = self._take(4, torch.int64).tolist()
            version, last = WeightVersion(header[0]), bool(header[1])
            manifest = json.loads(bytes(self._take(header[2], torch.uint8).cpu().numpy()))
            data = self._take(header[3], torch.uint8)
            names = [entry[0] for entry in manifest["entries"]]
            if checksum(data) != manifest["checksum"]:
                faults.append(
                    f"the bucket with {names[0]} … {names[-1]} arrived with another checksum than it was sent with"
                )
                continue
            weights += [(name, _view(data, dtype, shape, offset)) for name, dtype, shape, offset in manifest["entries"]]
        canary = self._take(NUM_CANARY_TOKENS - 1, torch.float32).cpu().numpy()
        faults += _differences({name: tuple(t.shape) for name, t in weights}, expected) if not faults else []
        if faults:
            raise WeightMismatch(f"weights of version {version}: " + "; ".join(faults))
        return ReceivedWeights(version, weights, canary)

    def _take(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(length, dtype=dtype, device=self._device)
        dist.broadcast(tensor, self._leader, group=self._group)
        return tensor


def _view(data: torch.Tensor, dtype_name: str, shape: list[int], offset: int) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, dtype_name)
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return data[offset : offset + num_bytes].view(dtype).view(shape)


def _differences(got: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    missing = sorted(expected.keys() - got.keys())
    unknown = sorted(got.keys() - expected.keys())
    misshapen = sorted(n for n in got.keys() & expected.keys() if got[n] != expected[n])
    return [
        *(f"{name} is missing" for name in missing),
        *(f"{name} is not a parameter of the engine's model" for name in unknown),
        *(f"{name} has shape {list(got[name])}, the engine's has {list(expected[name])}" for name in misshapen),
    ]
