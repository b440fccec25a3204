"""Length estimates: quantiles against NumPy's, survivors against the three sentences of `scheduling.estimates`."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiderl.scheduling.estimates import (
    MIN_FINALS,
    PRIOR_WEIGHT,
    RENEWALS_PER_WINDOW,
    WINDOW,
    LengthEstimates,
    MovingQuantile,
)

MAX_CONTEXT = 1000
#: Quarters and the like are exact in binary; others would test how two programs round, not what a quantile is.
SHARES = st.integers(0, 1 << 10).map(lambda n: n / (1 << 10))
LENGTHS = st.integers(1, MAX_CONTEXT)


@given(values=st.lists(st.integers(0, 50), min_size=1, max_size=3 * WINDOW), q=SHARES)
def test_invariant_1_the_quantile_is_numpys_nearest_rank_over_the_window(values: list[int], q: float) -> None:
    seen = MovingQuantile()
    for value in values:
        seen.add(value)
    assert seen.quantile(q) == np.quantile(values[-WINDOW:], q, method="inverted_cdf")
    assert seen.quantile(q) in values[-WINDOW:]
    assert len(seen) == min(len(values), WINDOW)


@given(values=st.lists(st.integers(0, 50), max_size=2 * WINDOW), bound=st.integers(-1, 51))
def test_num_above_counts_the_greater_ones_of_the_window(values: list[int], bound: int) -> None:
    seen = MovingQuantile()
    for value in values:
        seen.add(value)
    assert seen.num_above(bound) == sum(value > bound for value in values[-WINDOW:])


def test_invariant_1_by_hand() -> None:
    seen = MovingQuantile()
    assert seen.quantile(0.5) is None
    for value in (40, 10, 30, 20):
        seen.add(value)
    assert [seen.quantile(q) for q in (0.0, 0.25, 0.26, 0.5, 0.75, 0.76, 1.0)] == [10, 10, 20, 20, 30, 40, 40]


def test_types_are_apart_and_prompts_first_turns_and_finals_too() -> None:
    estimates = LengthEstimates(max_context_tokens=MAX_CONTEXT, max_turns=20)
    estimates.saw_prompt("a", 1)
    estimates.saw_first_turn("a", 2)
    estimates.saw_first_turn("b", 3)
    assert [estimates.prompt(t, 0.5) for t in ("a", "b", "c")] == [1, None, None]
    assert [estimates.first_turn(t, 0.5) for t in ("a", "b", "c")] == [2, 3, None]
    assert not estimates.knows("a"), "a type is known by its finished tasks alone"


def test_a_type_is_known_after_some_finished_tasks() -> None:
    estimates = LengthEstimates(max_context_tokens=MAX_CONTEXT, max_turns=20)
    known = []
    for _ in range(MIN_FINALS + 1):
        known.append(estimates.knows("a"))
        estimates.saw_final("a", 5)
    assert known == [False] * MIN_FINALS + [True]
    assert not estimates.knows("b")


def estimates_with(finals: list[int]) -> LengthEstimates:
    estimates = LengthEstimates(max_context_tokens=MAX_CONTEXT, max_turns=20)
    for tokens in finals:
        estimates.saw_final("a", tokens)
    return estimates


@given(
    finals=st.lists(LENGTHS, max_size=2 * WINDOW),
    context=st.integers(0, MAX_CONTEXT - 1),
    growth=st.lists(st.integers(0, MAX_CONTEXT), max_size=8).map(sorted),
)
def test_invariant_2_survivors_fall_from_whole_to_nothing(finals: list[int], context: int, growth: list[int]) -> None:
    left = MAX_CONTEXT - context
    whole, survivors = estimates_with(finals).survivors("a", context, [0, *growth, left, left + 1])
    assert whole > 0
    assert survivors[0] == whole
    assert all(sooner >= later >= 0 for sooner, later in pairwise(survivors))
    assert survivors[-2:] == [0, 0]


@given(context=st.integers(MAX_CONTEXT, 2 * MAX_CONTEXT), finals=st.lists(LENGTHS, max_size=8))
def test_invariant_2_nothing_goes_on_beyond_the_longest_context(context: int, finals: list[int]) -> None:
    whole, survivors = estimates_with(finals).survivors("a", context, [1, 40])
    assert whole > 0
    assert survivors == [0, 0]


@given(finals=st.lists(LENGTHS, max_size=2 * WINDOW), context=st.integers(0, MAX_CONTEXT - 1), growth=LENGTHS)
def test_invariant_3_seen_lengths_weigh_one_the_assumption_its_weight(
    finals: list[int], context: int, growth: int
) -> None:
    whole, (survivors,) = estimates_with(finals).survivors("a", context, [growth])
    longer = [final for final in finals[-WINDOW:] if final > context]
    # Each seen length votes 1 or 0, the assumption PRIOR_WEIGHT times a straight line from 1 to 0 at the cap.
    line = max(0.0, 1 - growth / (MAX_CONTEXT - context))
    votes = sum(final > context + growth for final in longer) + PRIOR_WEIGHT * line
    assert survivors / whole == pytest.approx(votes / (len(longer) + PRIOR_WEIGHT), abs=1e-3)


@pytest.mark.parametrize("finals", [[], [100] * 30, [300] * 30])
def test_invariant_3_the_assumption_counts_alone_for_an_outgrown_context(finals: list[int]) -> None:
    whole, survivors = estimates_with(finals).survivors("a", 300, [0, 175, 350, 525, 700])
    assert [n / whole for n in survivors] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert estimates_with(finals).survivors("unknown", 300, [350]) == (whole, [survivors[2]])


def test_invariant_3_by_hand() -> None:
    # Eight seen, four of which end at 400 and four at 900; the assumption weighs as much as all eight together.
    whole, survivors = estimates_with([400] * 4 + [900] * 4).survivors("a", 200, [199, 200, 400, 700])
    expected = [
        (8 + 8 * (601 / 800)) / 16,
        (4 + 8 * (600 / 800)) / 16,
        (4 + 8 * (400 / 800)) / 16,
        (0 + 8 * (100 / 800)) / 16,
    ]
    assert [n / whole for n in survivors] == pytest.approx(expected, abs=1e-3)


STEPS = (40, 80, 160, 320, 640, 1280)


@given(finals=st.lists(LENGTHS, max_size=WINDOW), context=st.integers(0, MAX_CONTEXT), own=st.integers(0, 500))
def test_a_course_is_mean_and_variance_of_what_survives(finals: list[int], context: int, own: int) -> None:
    estimates = estimates_with(finals)
    whole, survivors = estimates.survivors("a", context, STEPS)
    course = estimates.course("a", context, own, STEPS)
    for step, alive, expected, variance in zip(STEPS, survivors, course.expected, course.variance, strict=True):
        share = Fraction(alive, whole)
        assert expected == math.floor((own + step) * share)
        assert variance == math.floor((own + step) ** 2 * share * (1 - share)), "of a use that is all or nothing"


@given(finals=st.lists(LENGTHS, min_size=1, max_size=2 * WINDOW))
def test_courses_are_renewed_before_much_of_the_window_is_new(finals: list[int]) -> None:
    estimates = LengthEstimates(max_context_tokens=MAX_CONTEXT, max_turns=20)
    newest = [estimates_with([]).course("a", 100, 50, STEPS)]
    for number, final in enumerate(finals, 1):
        assert estimates.course("a", 100, 50, STEPS) in newest
        estimates.saw_final("a", final)
        newest.append(estimates_with(finals[:number]).course("a", 100, 50, STEPS))
        newest = newest[-max(1, min(number, WINDOW) // RENEWALS_PER_WINDOW + 1) :]
    assert estimates.course("a", 100, 50, STEPS) in newest


def test_the_value_that_makes_a_type_known_is_told_once() -> None:
    estimates = LengthEstimates(max_context_tokens=MAX_CONTEXT, max_turns=20)
    assert [estimates.saw_prompt("a", 1) for _ in range(3)] == [True, False, False]
    assert [estimates.saw_first_turn("a", 1) for _ in range(3)] == [True, False, False]
    finals = [estimates.saw_final("a", 1) for _ in range(2 * WINDOW)]
    assert [number for number, makes_known in enumerate(finals, 1) if makes_known] == [MIN_FINALS]
    assert estimates.saw_prompt("b", 1), "types are apart"
