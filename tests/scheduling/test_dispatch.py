"""Dispatch of a batch: deals and cuts by hand, and the four invariants of `scheduling.dispatch`."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiderl.scheduling.dispatch import Share, cut_to_memory, saturates, spread, zig_zag
from tiderl.types import TaskId

LENGTHS = st.lists(st.integers(1, 100), max_size=40)
LOADS = st.lists(st.integers(0, 300), min_size=1, max_size=6)
EQUAL_LOADS = st.builds(lambda load, num_ranks: [load] * num_ranks, st.integers(0, 300), st.integers(1, 6))
MAX_TOKENS = st.integers(100, 250)


def items(*lengths: int) -> list[tuple[int, TaskId]]:
    return [(length, TaskId(i)) for i, length in enumerate(lengths)]


def plain(shares: list[Share]) -> list[tuple[int, tuple[int, ...], int]]:
    return [(share.dp_index, tuple(share.task_ids), share.num_tokens) for share in shares]


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


def test_a_fresh_step_by_hand() -> None:
    # Dealt 9 6 5 2 1: rank 0 gets 9 2 1, rank 1 gets 6 5. With room for 10 those become 9+1, 2 and 6, 5.
    shares = spread(items(1, 9, 2, 6, 5), [0, 0], 10)
    assert plain(shares) == [(0, (1, 0), 10), (0, (2,), 2), (1, (3,), 6), (1, (4,), 5)]


def test_a_later_deal_levels_what_was_there_by_hand() -> None:
    # Rank 0 has 7. 6 and 5 go to rank 1 (0, then 6 < 7), 4 to rank 0 (7 < 11), 1 to either (11 = 11): the lower index.
    shares = spread(items(6, 5, 4, 1), [7, 0], 20)
    assert plain(shares) == [(0, (2, 3), 5), (1, (0, 1), 11)]


def test_smallest_last_by_hand() -> None:
    # Dealt 9 6 5 4 3 2 with room for 10: rank 0 gets 9 4 3 (9, 4+3), rank 1 gets 6 5 and the smallest, 2, at first left out (6, 5).
    # 2 would fit into 5, but 7 is not less than the 6 and the 4+3 of others: it stays alone. Then by rounds, the larger first.
    shares = spread(items(9, 6, 5, 4, 3, 2), [0, 0], 10, smallest_last=True)
    assert plain(shares) == [(0, (0,), 9), (1, (1,), 6), (0, (3, 4), 7), (1, (2,), 5), (1, (5,), 2)]


def test_smallest_last_takes_no_micro_batch_of_its_own_where_it_needs_none() -> None:
    # Rank 0 gets 9 4, rank 1 gets 8 and 5 with room for 9: the smallest, 1, comes to rank 0 and joins its last, 4 + 1 <= 5.
    shares = spread(items(9, 8, 5, 4, 1), [0, 0], 9, smallest_last=True)
    assert plain(shares) == [(0, (0,), 9), (1, (1,), 8), (1, (2,), 5), (0, (3, 4), 5)]


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, False), (29, False), (30, True), (31, True)])
def test_saturates(num_tokens: int, expected: bool) -> None:
    assert saturates(num_tokens, num_ranks=3, max_tokens=10) is expected


@pytest.mark.parametrize("smallest_last", [False, True])
def test_a_trajectory_that_fits_nowhere_is_our_own_mistake(smallest_last: bool) -> None:
    with pytest.raises(AssertionError):
        spread(items(11, 12), [0], 10, smallest_last=smallest_last)


@pytest.mark.parametrize("smallest_last", [False, True])
def test_a_rank_or_all_may_get_nothing(smallest_last: bool) -> None:
    assert [share.dp_index for share in spread(items(4, 3), [0, 0, 0], 10, smallest_last=smallest_last)] == [0, 1]
    assert spread([], [0, 0, 0], 10, smallest_last=smallest_last) == []


@given(LENGTHS, LOADS | EQUAL_LOADS, MAX_TOKENS, st.booleans())
def test_invariant_1_each_trajectory_once_and_within_memory(
    lengths: list[int], loads: list[int], max_tokens: int, smallest_last: bool
) -> None:
    shares = spread(items(*lengths), loads, max_tokens, smallest_last=smallest_last)
    assert Counter(t for share in shares for t in share.task_ids) == Counter(range(len(lengths)))
    for share in shares:
        assert share.num_tokens == sum(lengths[t] for t in share.task_ids) <= max_tokens
        assert 0 <= share.dp_index < len(loads)


@given(LENGTHS, LOADS, MAX_TOKENS, st.booleans())
def test_invariant_2_who_gets_something_ends_at_most_the_longest_above_any_other(
    lengths: list[int], loads: list[int], max_tokens: int, smallest_last: bool
) -> None:
    shares = spread(items(*lengths), loads, max_tokens, smallest_last=smallest_last)
    sums = list(loads)
    for share in shares:
        sums[share.dp_index] += share.num_tokens
    assert all(sums[share.dp_index] - min(sums) <= max(lengths) for share in shares)


@given(LENGTHS, EQUAL_LOADS, MAX_TOKENS, st.booleans())
def test_invariant_2_equal_loads_stay_within_the_longest(
    lengths: list[int], loads: list[int], max_tokens: int, smallest_last: bool
) -> None:
    shares = spread(items(*lengths), loads, max_tokens, smallest_last=smallest_last)
    sums = [sum(share.num_tokens for share in shares if share.dp_index == rank) for rank in range(len(loads))]
    assert max(sums) - min(sums) <= max(lengths, default=0)
    by_hand = zig_zag(items(*lengths), len(loads))
    assert sums == [sum(length for length, _ in hand) for hand in by_hand]


@given(LENGTHS, LOADS | EQUAL_LOADS, MAX_TOKENS, st.booleans())
def test_invariant_3_the_largest_first_and_the_smallest_last(
    lengths: list[int], loads: list[int], max_tokens: int, smallest_last: bool
) -> None:
    shares = spread(items(*lengths), loads, max_tokens, smallest_last=smallest_last)
    for rank in range(len(loads)):
        own = [share.num_tokens for share in shares if share.dp_index == rank]
        assert own == sorted(own, reverse=True)
    for share in shares:
        assert lengths[share.task_ids[-1]] == min(lengths[t] for t in share.task_ids)


@given(LENGTHS.filter(len), LOADS | EQUAL_LOADS, MAX_TOKENS)
def test_invariant_4_the_smallest_of_all_is_the_very_last(
    lengths: list[int], loads: list[int], max_tokens: int
) -> None:
    *before, last = spread(items(*lengths), loads, max_tokens, smallest_last=True)
    assert all(last.num_tokens <= share.num_tokens for share in before)
    assert lengths[last.task_ids[-1]] == min(lengths)
    num_fed: dict[int, int] = defaultdict(int)
    rounds = []
    for share in before:
        rounds.append(num_fed[share.dp_index])
        num_fed[share.dp_index] += 1
    assert rounds == sorted(rounds)


@given(LENGTHS, LOADS | EQUAL_LOADS, MAX_TOKENS)
def test_without_smallest_last_ranks_come_one_after_the_other(
    lengths: list[int], loads: list[int], max_tokens: int
) -> None:
    shares = spread(items(*lengths), loads, max_tokens)
    assert all(a.dp_index <= b.dp_index for a, b in pairwise(shares))


@given(LENGTHS, LOADS | EQUAL_LOADS, st.integers(0, 2**32), st.booleans())
def test_the_order_of_arrival_does_not_matter(
    lengths: list[int], loads: list[int], seed: int, smallest_last: bool
) -> None:
    pairs = items(*lengths)
    shuffled = list(pairs)
    random.Random(seed).shuffle(shuffled)
    dealt = spread(shuffled, loads, 120, smallest_last=smallest_last)
    assert dealt == spread(pairs, loads, 120, smallest_last=smallest_last)
