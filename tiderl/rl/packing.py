"""The plan of one padding-free forward pass: which tokens go in, which rows of the output are needed, and whose they are.

The trajectories of a micro-batch lie one behind the other in a single sequence, each with positions from 0 and attention
to itself alone. Logits are needed only where the *next* token was generated, which in agent work is a few per cent of all
rows. A trajectory's tokens from its last generated one on predict nothing, so they are not computed at all.

Invariants (tests/unit/test_packing.py):

1. Every generated token of every trajectory is exactly one target, in trajectory order and then token order.
2. `token_ids[rows]` are the tokens just before the targets, within the same trajectory.
3. `unpack` puts one value a target back where its token was, and 0.0 everywhere else.
4. A packed batch holds no padding: `num_padding_tokens` is measured, not assumed, and it is 0.

Source: paper §3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tiderl.types import Trajectory

ScalarT = TypeVar("ScalarT", bound=np.generic)


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """Inputs [num_inputs], targets [num_targets], and where both come from. Trajectories without a target have length 0."""

    token_ids: npt.NDArray[np.int64]  # [num_inputs]
    position_ids: npt.NDArray[np.int64]  # [num_inputs]
    #: Input tokens of each trajectory; they follow one another in `token_ids`.
    lengths: tuple[int, ...]
    #: Row of the input whose output predicts each target, and the target itself.
    rows: npt.NDArray[np.int64]  # [num_targets]
    targets: npt.NDArray[np.int64]  # [num_targets]
    #: Index of each target's trajectory, and its index in that trajectory's `token_ids`.
    owners: npt.NDArray[np.int64]  # [num_targets]
    places: npt.NDArray[np.int64]  # [num_targets]
    #: What the engine recorded for each target.
    engine_log_probs: npt.NDArray[np.float32]  # [num_targets]
    weight_versions: npt.NDArray[np.int32]  # [num_targets]
    #: Tokens of each trajectory, computed on or not.
    num_tokens: tuple[int, ...]

    @property
    def num_targets(self) -> int:
        return int(self.targets.shape[0])

    @property
    def num_padding_tokens(self) -> int:
        """Input tokens that belong to no trajectory."""
        return int(self.token_ids.shape[0]) - sum(self.lengths)

    @property
    def cu_seqlens(self) -> npt.NDArray[np.int32]:
        """Boundaries of the non-empty segments, from 0 to num_inputs, in the form that varlen attention kernels take."""
        return np.cumsum([0, *(n for n in self.lengths if n)], dtype=np.int32)

    def unpack(self, values: npt.NDArray[np.float32]) -> list[npt.NDArray[np.float32]]:
        """Values [num_targets] back as one array [num_tokens] a trajectory, 0.0 where nothing was generated."""
        if values.shape != self.targets.shape:
            raise ValueError(f"unpack: {values.shape[0]} values for {self.num_targets} targets")
        arrays = [np.zeros(n, dtype=np.float32) for n in self.num_tokens]
        counts = np.bincount(self.owners, minlength=len(arrays))
        ends = np.cumsum(counts)
        for array, start, end in zip(arrays, ends - counts, ends, strict=True):
            array[self.places[start:end]] = values[start:end]
        return arrays

    def gather(self, arrays: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
        """The inverse of `unpack`: the targets' values [num_targets] out of one array [num_tokens] a trajectory."""
        shapes = tuple(a.shape for a in arrays)
        if shapes != tuple((n,) for n in self.num_tokens):
            raise ValueError(f"gather: arrays of shapes {shapes} for trajectories of {self.num_tokens} tokens")
        if not arrays:
            return np.zeros(0, dtype=np.float32)
        starts = np.cumsum([0, *self.num_tokens[:-1]])
        return np.concatenate(arrays)[starts[self.owners] + self.places].astype(np.float32, copy=False)


def pack(trajectories: Sequence[Trajectory]) -> PackedBatch:
    """Plan one forward pass over `trajectories`. Raises `ValueError` where a token is generated from nothing."""
    places = [np.flatnonzero(t.generated) for t in trajectories]
    for trajectory, generated in zip(trajectories, places, strict=True):
        if generated.size and generated[0] == 0:
            raise ValueError(
                f"trajectory of task {trajectory.task_id}: token 0 is marked generated, but nothing comes before it"
            )
    lengths = tuple(int(p[-1]) if p.size else 0 for p in places)
    starts = np.cumsum([0, *lengths], dtype=np.int64)
    per_target = [(t, p) for t, p in zip(trajectories, places, strict=True)]
    return PackedBatch(
        token_ids=_concatenate([t.token_ids[:n] for t, n in zip(trajectories, lengths, strict=True)], np.int64),
        position_ids=_concatenate([np.arange(n) for n in lengths], np.int64),
        lengths=lengths,
        rows=_concatenate([p - 1 + start for p, start in zip(places, starts[:-1], strict=True)], np.int64),
        targets=_concatenate([t.token_ids[p] for t, p in per_target], np.int64),
        owners=np.repeat(np.arange(len(places), dtype=np.int64), [p.size for p in places]),
        places=_concatenate(places, np.int64),
        engine_log_probs=_concatenate([t.log_probs[p] for t, p in per_target], np.float32),
        weight_versions=_concatenate([t.weight_versions[p] for t, p in per_target], np.int32),
        num_tokens=tuple(t.num_tokens for t in trajectories),
    )


def split_by_tokens(num_tokens: Sequence[int], max_tokens: int) -> list[range]:
    """Consecutive ranges of trajectories, in order, of at most `max_tokens` each (a longer trajectory gets a range to itself)."""
    ranges: list[range] = []
    start = used = 0
    for i, n in enumerate(num_tokens):
        if i > start and used + n > max_tokens:
            ranges.append(range(start, i))
            start, used = i, 0
        used += n
    if start < len(num_tokens):
        ranges.append(range(start, len(num_tokens)))
    return ranges


def _concatenate(arrays: Sequence[npt.NDArray[Any]], dtype: type[ScalarT]) -> npt.NDArray[ScalarT]:
    """Like `np.concatenate`, but also of nothing, and to a stated type."""
    return np.concatenate([np.zeros(0, dtype=dtype), *(array.astype(dtype, copy=False) for array in arrays)])
