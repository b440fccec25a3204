"""The KV cache of an emulated engine: which blocks are whose, which are found again, and which are given away next.

As vLLM's block pool: blocks are shared by count; a full block is found under its key for as long as nobody else has taken it, also
while it is free; free blocks are taken from the front of one queue. Freed blocks with a key join its end, the end of a context
before its beginning; those without a key go to the front.

Invariants (tests/unit/test_emulated_cache.py, held against a naive twin):

1. A block is either in the free queue or used by `count >= 1` contexts: free + used = `num_blocks`.
2. A key says what is in the block and in all blocks before it, so a hit is a prefix of hits.
3. Keys of two contexts that differ are different, but for a chance below 2**-43 a pair (`BlockKeys`).
4. After `forget` nothing is found.

Source: paper §4.1; vLLM 0.32, v1/core/block_pool.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

_KEY_SEED = 20_270_102


class BlockKeys:
    """Keys of the full blocks of a context, all at once: running sums of its ids with one random weight for every place.

    Two contexts whose ids (below 2**21) differ up to some place have the same sum there for at most 2**21 of the 2**64 values that
    the weight of the last differing place can have.
    """

    def __init__(self, block_size_tokens: int, max_context_tokens: int) -> None:
        self._block_size = block_size_tokens
        random = np.random.default_rng(_KEY_SEED)
        # Signed, since numpy multiplies int32 with int64 in one pass; sums wrap around all the same.
        self._weights = random.integers(-(1 << 63), 1 << 63, max_context_tokens, dtype=np.int64)

    def extend(self, keys: list[int], token_ids: npt.NDArray[np.int32]) -> None:
        """Append the keys of the full blocks that `keys`, the first ones of the same context, lack."""
        block_size = self._block_size
        start, end = len(keys) * block_size, token_ids.size // block_size * block_size
        if start >= end:
            return
        # 1 is added so that a block of zeros changes the sum.
        terms = (token_ids[start:end] + np.int32(1)) * self._weights[start:end]
        if keys:
            terms[:1] += keys[-1]  # a slice: arrays wrap around without a warning, scalars don't
        keys += terms.cumsum()[block_size - 1 :: block_size].tolist()


class BlockCache:
    """Blocks by number. The caller says when a block is full, and never asks for more than `num_free`."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._counts = [0] * num_blocks
        self._keys: list[int | None] = [None] * num_blocks
        #: Next to be taken first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        #: The oldest block of a key, and the younger ones: equal blocks are not merged.
        self._found: dict[int, int] = {}
        self._twins: dict[int, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def lookup(self, keys: Sequence[int], max_blocks: int) -> list[int]:
        """Blocks of the longest known prefix of `keys[:max_blocks]`."""
        blocks = []
        for key in keys[:max_blocks]:
            found = self._found.get(key)
            if found is None:
                break
            blocks.append(found)
        return blocks

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """How many of the blocks would leave the free queue if they were shared."""
        return sum(self._counts[block] == 0 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """One more context uses these blocks."""
        for block in blocks:
            if self._counts[block] == 0:
                del self._free[block]
            self._counts[block] += 1

    def take(self, num_blocks: int) -> list[int]:
        """So many blocks for one context, from the front of the queue; what was in them is not found any more."""
        blocks = []
        for _ in range(num_blocks):
            block, _ = self._free.popitem(last=False)
            self._forget_key(block)
            self._counts[block] = 1
            blocks.append(block)
        return blocks

    def keep(self, blocks: Sequence[int], keys: Sequence[int], start: int, end: int) -> None:
        """Blocks `start .. end - 1` of a context are full: they are found under their keys from now on."""
        for place in range(start, end):
            block, key = blocks[place], keys[place]
            self._keys[block] = key
            if self._found.setdefault(key, block) != block:
                self._twins.setdefault(key, []).append(block)

    def free(self, blocks: Sequence[int]) -> None:
        """A context is done with its blocks, given from its beginning to its end."""
        without_key = []
        for block in reversed(blocks):
            self._counts[block] -= 1
            if self._counts[block] == 0:
                self._free[block] = None
                if self._keys[block] is None:
                    without_key.append(block)
        self._to_front(without_key)

    def discard(self, blocks: Sequence[int]) -> None:
        """Those of the blocks that are free are taken next, the last one first; until then they are found."""
        self._to_front([block for block in reversed(blocks) if self._counts[block] == 0])

    def forget(self) -> None:
        """Nothing is found any more. All blocks must be free."""
        assert self.num_used == 0, f"{self.num_used} blocks are in use"
        self._keys = [None] * self.num_blocks
        self._found.clear()
        self._twins.clear()

    def _to_front(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self._free.move_to_end(block, last=False)

    def _forget_key(self, block: int) -> None:
        key = self._keys[block]
        if key is None:
            return
        self._keys[block] = None
        twins = self._twins.get(key)
        if twins is None:
            del self._found[key]
            return
        if self._found[key] == block:
            self._found[key] = twins.pop(0)
        else:
            twins.remove(block)
        if not twins:
            del self._twins[key]
