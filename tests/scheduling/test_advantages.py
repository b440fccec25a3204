"""Group advantages: by hand, and the three invariants of `scheduling.advantages`."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiderl.scheduling.advantages import group_advantages

REWARDS = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=16)
SPREAD = REWARDS.filter(lambda rewards: statistics.pstdev(rewards) > 1e-3)


def test_by_hand_two_wins_of_four() -> None:
    # mean 1/2, every distance 1/2, so the standard deviation is 1/2 as well.
    assert group_advantages([1.0, 0.0, 0.0, 1.0], by_std=True) == (1.0, -1.0, -1.0, 1.0)
    assert group_advantages([1.0, 0.0, 0.0, 1.0], by_std=False) == (0.5, -0.5, -0.5, 0.5)


def test_by_hand_one_win_of_four() -> None:
    # mean 1/4, variance (9 + 1 + 1 + 1) / 16 / 4 = 3/16, so 3/4 / (sqrt(3)/4) = sqrt(3).
    win, *losses = group_advantages([1.0, 0.0, 0.0, 0.0], by_std=True)
    assert win == pytest.approx(math.sqrt(3), rel=1e-12)
    assert losses == pytest.approx([-1 / math.sqrt(3)] * 3, rel=1e-12)


def test_the_order_is_that_of_the_rewards() -> None:
    low, high, middle = group_advantages([0.0, 4.0, 2.0], by_std=False)
    assert (low, high, middle) == (-2.0, 2.0, 0.0)


@given(REWARDS, st.booleans())
def test_invariant_1_they_sum_to_zero(rewards: list[float], by_std: bool) -> None:
    advantages = group_advantages(rewards, by_std=by_std)
    assert len(advantages) == len(rewards)
    assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-6)


@given(st.floats(-1e6, 1e6), st.integers(1, 12), st.booleans())
def test_invariant_2_equal_rewards_give_zeros(reward: float, size: int, by_std: bool) -> None:
    assert group_advantages([reward] * size, by_std=by_std) == (0.0,) * size


def test_invariant_2_a_spread_that_is_only_rounding_gives_zeros() -> None:
    assert group_advantages([0.1 + 0.2, 0.3, 0.3], by_std=True) == (0.0, 0.0, 0.0)


@given(SPREAD)
def test_invariant_3_unit_standard_deviation(rewards: list[float]) -> None:
    assert statistics.pstdev(group_advantages(rewards, by_std=True)) == pytest.approx(1.0, rel=1e-9)


@given(SPREAD, st.floats(0.5, 1000.0), st.floats(-10.0, 10.0))
def test_invariant_3_scale_and_offset_of_the_rewards_change_nothing(
    rewards: list[float], scale: float, offset: float
) -> None:
    moved = [scale * reward + offset for reward in rewards]
    assert group_advantages(moved, by_std=True) == pytest.approx(group_advantages(rewards, by_std=True), abs=1e-6)


@given(SPREAD)
def test_by_another_implementation(rewards: list[float]) -> None:
    mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
    assert group_advantages(rewards, by_std=True) == pytest.approx(
        [(r - mean) / std for r in rewards], rel=1e-6, abs=1e-9
    )
