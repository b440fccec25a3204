"""Invariants of `tiderl.engines.emulated_cache`: a naive twin, and cases worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tiderl.engines.emulated_cache import BlockCache, BlockKeys

NUM_BLOCKS = 7


class NaiveCache:
    """The same queue as a plain list; contents are (block, tuple of keys from the context's beginning)."""

    def __init__(self) -> None:
        self.queue = list(range(NUM_BLOCKS))
        self.users = dict.fromkeys(range(NUM_BLOCKS), 0)
        self.content: dict[int, int | None] = dict.fromkeys(range(NUM_BLOCKS))
        self.kept_at: dict[int, int] = {}
        self.now = 0

    def lookup(self, keys: list[int], max_blocks: int) -> list[int]:
        found: list[int] = []
        for key in keys[:max_blocks]:
            having = [block for block, content in self.content.items() if content == key]
            if not having:
                break
            found.append(min(having, key=lambda block: self.kept_at[block]))
        return found

    def take(self, num_blocks: int) -> list[int]:
        taken, self.queue = self.queue[:num_blocks], self.queue[num_blocks:]
        for block in taken:
            self.users[block], self.content[block] = 1, None
        return taken

    def share(self, blocks: list[int]) -> None:
        for block in blocks:
            self.users[block] += 1
            if block in self.queue:
                self.queue.remove(block)

    def keep(self, block: int, key: int) -> None:
        self.now += 1
        self.content[block], self.kept_at[block] = key, self.now

    def free(self, blocks: list[int]) -> None:
        for block in blocks:
            self.users[block] -= 1
        left = [block for block in reversed(blocks) if self.users[block] == 0]
        empty = [block for block in left if self.content[block] is None]
        self.queue = empty + self.queue + [block for block in left if block not in empty]

    def discard(self, blocks: list[int]) -> None:
        first = [block for block in reversed(blocks) if self.users[block] == 0]
        self.queue = first + [block for block in self.queue if block not in first]


class CacheMachine(RuleBasedStateMachine):
    """Contexts over a small alphabet of keys come and go; both caches must give the same blocks in the same order."""

    def __init__(self) -> None:
        super().__init__()
        self.cache, self.naive = BlockCache(NUM_BLOCKS), NaiveCache()
        #: Blocks of the contexts, and how many of them are kept.
        self.contexts: list[tuple[list[int], list[int], int]] = []
        self.freed: list[int] = []

    @rule(branch=st.integers(0, 2), length=st.integers(1, 4), num_full=st.integers(0, 4))
    def begin(self, branch: int, length: int, num_full: int) -> None:
        # Contexts of the same branch share their beginning, as chained keys do.
        keys = [1, 100 + branch % 2, 200 + branch, 300 + branch][:length]
        found = self.cache.lookup(keys, length - 1)
        assert found == self.naive.lookup(keys, length - 1)
        num_new = length - len(found)
        free_found = sum(self.naive.users[block] == 0 for block in found)
        assert self.cache.num_free_among(found) == free_found
        if num_new + free_found > self.cache.num_free:
            return
        self.cache.share(found)
        self.naive.share(found)
        blocks = found + self.cache.take(num_new)
        assert blocks == found + self.naive.take(num_new)
        num_full = min(max(num_full, len(found)), length)
        self.cache.keep(blocks, keys, len(found), num_full)
        for place in range(len(found), num_full):
            self.naive.keep(blocks[place], keys[place])
        self.contexts.append((blocks, keys, num_full))

    @precondition(lambda self: self.contexts)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        blocks, _, _ = self.contexts.pop(data.draw(st.integers(0, len(self.contexts) - 1)))
        self.cache.free(blocks)
        self.naive.free(blocks)
        self.freed = blocks

    @rule(start=st.integers(0, 4))
    def discard_the_end_of_what_was_freed_last(self, start: int) -> None:
        self.cache.discard(self.freed[start:])
        self.naive.discard(self.freed[start:])
        self.freed = []

    @precondition(lambda self: not self.contexts)
    @rule()
    def forget(self) -> None:
        self.cache.forget()
        self.naive.content = dict.fromkeys(range(NUM_BLOCKS))

    @invariant()
    def same_as_the_twin(self) -> None:
        assert list(self.cache._free) == self.naive.queue
        assert self.cache._counts == list(self.naive.users.values())
        assert self.cache._keys == list(self.naive.content.values())

    @invariant()
    def every_block_is_free_or_used(self) -> None:
        used = {block for blocks, _, _ in self.contexts for block in blocks}
        assert self.cache.num_used == len(used)
        assert self.cache.num_free == NUM_BLOCKS - len(used)
        for block in range(NUM_BLOCKS):
            assert self.cache._counts[block] == sum(block in blocks for blocks, _, _ in self.contexts)


TestCacheMachine = CacheMachine.TestCase


def test_freed_blocks_are_taken_from_the_end_of_a_context() -> None:
    cache = BlockCache(6)
    first, second = cache.take(3), cache.take(3)
    cache.keep(first, [10, 11], 0, 2)  # its third block is not full
    cache.keep(second, [20, 21, 22], 0, 3)
    cache.free(second)
    cache.free(first)
    assert cache.take(6) == [first[2], second[2], second[1], second[0], first[1], first[0]]


def test_forget_with_blocks_in_use_is_a_bug() -> None:
    cache = BlockCache(2)
    cache.take(1)
    with pytest.raises(AssertionError, match="1 blocks are in use"):
        cache.forget()


class TestBlockKeys:
    BLOCK, MAX = 4, 64

    def keys(self, ids: list[int]) -> list[int]:
        keys: list[int] = []
        BlockKeys(self.BLOCK, self.MAX).extend(keys, np.array(ids, np.int32))
        return keys

    def test_only_full_blocks_have_keys(self) -> None:
        assert [len(self.keys([5] * n)) for n in (1, 3, 4, 7, 8, 64)] == [0, 0, 1, 1, 2, 16]

    def test_all_at_once_or_piece_by_piece(self) -> None:
        ids = np.random.default_rng(0).integers(0, 2**21, self.MAX).astype(np.int32)
        maker, pieces = BlockKeys(self.BLOCK, self.MAX), list[int]()
        for end in (3, 9, 12, 13, 40, 64):
            maker.extend(pieces, ids[:end])
        assert pieces == self.keys(ids.tolist())

    def test_keys_are_those_of_the_definition(self) -> None:
        ids = [2**21 - 1 - n for n in range(12)]
        maker = BlockKeys(self.BLOCK, self.MAX)
        weights = [int(weight) for weight in maker._weights]
        expected = [sum((t + 1) * w for t, w in zip(ids[:end], weights, strict=False)) % 2**64 for end in (4, 8, 12)]
        assert [key % 2**64 for key in self.keys(ids)] == expected

    @pytest.mark.parametrize("changed", range(8))
    def test_a_change_shows_from_its_block_on(self, changed: int) -> None:
        ids = [7] * 16
        others = [*ids[:changed], 8, *ids[changed + 1 :]]
        same = [a == b for a, b in zip(self.keys(ids), self.keys(others), strict=True)]
        assert same == [block < changed // self.BLOCK for block in range(4)]

    def test_zeros_and_places_count(self) -> None:
        keys = self.keys([0] * 64)
        assert len(set(keys)) == 16
        assert not set(keys) & set(self.keys([1] * 64))
