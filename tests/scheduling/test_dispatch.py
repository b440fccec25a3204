"""Dispatch of a batch: deals and cuts by hand, and the three invariants of `scheduling.dispatch`."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiderl.scheduling.dispatch import colocated, cut_to_memory, zig_zag
from tiderl.types import TaskId

LENGTHS = st.lists(st.integers(1, 100), max_size=40)


def items(*lengths: int) -> list[tuple[int, TaskId]]:
    return [(length, TaskId(i)) for i, length in enumerate(lengths)]


def test_zig_zag_by_hand() -> None:
    # 9 8 7 are dealt to ranks 0 1 2, then 6 5 4 to 2 1 0, then 3 to 0 again.
    dealt = zig_zag(items(3, 9, 4, 8, 5, 7, 6), 3)
    assert [[length for length, _ in hand] for hand in dealt] == [[9, 4, 3], [8, 5], [7, 6]]


def test_zig_zag_breaks_ties_by_task() -> None:
    assert zig_zag([(5, TaskId(3)), (5, TaskId(1)), (5, TaskId(2))], 2) == [[(5, 1)], [(5, 2), (5, 3)]]


def test_cut_to_memory_by_hand() -> None:
    # 6 opens a bin of 10; 5 does not fit and opens another; 4 goes back to the first, 3 to the second, 2 too.
    cut = cut_to_memory(items(6, 5, 4, 3, 2), 10)
    assert [[length for length, _ in b] for b in cut] == [[6, 4], [5, 3, 2]]


def test_colocated_by_hand() -> None:
    # Dealt 9 6 5 2 1: rank 0 gets 9 2 1, rank 1 gets 6 5. With room for 10 those become 9+1, 2 and 6, 5.
    shares = colocated(items(1, 9, 2, 6, 5), 2, 10)
    expected: list[tuple[int, tuple[int, ...], int]] = [(0, (1, 0), 10), (0, (2,), 2), (1, (3,), 6), (1, (4,), 5)]
    assert [(share.dp_index, share.task_ids, share.num_tokens) for share in shares] == expected


def test_a_trajectory_that_fits_nowhere_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        colocated(items(11), 1, 10)


def test_a_rank_may_get_nothing() -> None:
    assert [share.dp_index for share in colocated(items(4, 3), 3, 10)] == [0, 1]


@given(LENGTHS, st.integers(1, 6), st.integers(100, 250))
def test_invariant_1_each_trajectory_once_and_within_memory(
    lengths: list[int], num_ranks: int, max_tokens: int
) -> None:
    shares = colocated(items(*lengths), num_ranks, max_tokens)
    assert Counter(t for share in shares for t in share.task_ids) == Counter(range(len(lengths)))
    for share in shares:
        assert share.num_tokens == sum(lengths[t] for t in share.task_ids) <= max_tokens
        assert 0 <= share.dp_index < num_ranks


@given(LENGTHS, st.integers(1, 6))
def test_invariant_2_sums_differ_by_at_most_the_longest(lengths: list[int], num_ranks: int) -> None:
    sums = [sum(length for length, _ in hand) for hand in zig_zag(items(*lengths), num_ranks)]
    assert max(sums) - min(sums) <= max(lengths, default=0)


@given(LENGTHS, st.integers(1, 6), st.integers(100, 250))
def test_invariant_3_the_last_micro_batch_of_a_rank_is_its_smallest(
    lengths: list[int], num_ranks: int, max_tokens: int
) -> None:
    shares = colocated(items(*lengths), num_ranks, max_tokens)
    for rank in range(num_ranks):
        own = [share.num_tokens for share in shares if share.dp_index == rank]
        assert own == sorted(own, reverse=True)


@given(LENGTHS, st.integers(1, 6), st.integers(0, 2**32))
def test_the_order_of_arrival_does_not_matter(lengths: list[int], num_ranks: int, seed: int) -> None:
    pairs = items(*lengths)
    shuffled = list(pairs)
    random.Random(seed).shuffle(shuffled)
    assert colocated(shuffled, num_ranks, 120) == colocated(pairs, num_ranks, 120)
