"""Invariants of `tiderl.engines.emulated_language`."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiderl.engines import emulated_language as language
from tiderl.engines.emulated_language import (
    END,
    MAX_ANSWER_TOKENS,
    NUM_FILLERS,
    NUM_ROLLS,
    NUM_SKILLS,
    Act,
    act_id,
    answer_length,
    call_id,
    is_call,
    open_call,
    read_act,
)

lengths = st.integers(1, MAX_ANSWER_TOKENS)
acts = st.builds(
    lambda skill, roll: act_id(skill / (NUM_SKILLS - 1), roll),
    st.integers(0, NUM_SKILLS - 1),
    st.integers(0, NUM_ROLLS - 1),
)


def test_kinds_never_overlap_and_fit_into_int32() -> None:
    exact = range(call_id(1, exact=True), call_id(MAX_ANSWER_TOKENS, exact=True) + 1)
    about = range(call_id(1, exact=False), call_id(MAX_ANSWER_TOKENS, exact=False) + 1)
    act = range(act_id(0.0, 0), act_id(1.0, NUM_ROLLS - 1) + 1)
    bounds = [range(NUM_FILLERS), range(END, END + 1), exact, about, act]
    for before, after in itertools.pairwise(bounds):
        assert before.stop <= after.start
    assert act.stop <= 2**21  # what `BlockKeys` counts on


@given(st.integers(0, 2**21))
def test_calls_are_told_from_everything_else(token_id: int) -> None:
    is_one = any(
        call_id(1, exact=exact) <= token_id <= call_id(MAX_ANSWER_TOKENS, exact=exact) for exact in (False, True)
    )
    assert is_call(token_id) == is_one


@given(st.floats(0, 1), st.integers(0, NUM_ROLLS - 1))
def test_an_act_is_read_as_it_was_written(skill: float, roll: int) -> None:
    act = read_act(act_id(skill, roll))
    assert act == Act(pytest.approx(skill, abs=0.5 / (NUM_SKILLS - 1)), roll)


@pytest.mark.parametrize("token_id", [0, END, call_id(5, exact=True), act_id(0.0, 0) - 1, act_id(1.0, 999) + 1])
def test_what_is_no_act_is_refused(token_id: int) -> None:
    with pytest.raises(ValueError, match=f"token {token_id} does not begin"):
        read_act(token_id)


@given(lengths, acts)
def test_an_exact_call_is_exact(num_tokens: int, act: int) -> None:
    assert answer_length(call_id(num_tokens, exact=True), act) == num_tokens


def test_about_is_log_normal_with_the_calls_median() -> None:
    call = call_id(300, exact=False)
    lengths = np.array([answer_length(call, act_id(0.3, roll)) for roll in range(NUM_ROLLS)])
    assert np.median(lengths) == pytest.approx(300, abs=1)
    assert np.log(lengths).std() == pytest.approx(language.SPREAD, rel=0.02)
    assert lengths.mean() == pytest.approx(300 * math.exp(language.SPREAD**2 / 2), rel=0.02)
    assert (np.diff(lengths) >= 0).all()


@pytest.mark.parametrize("num_tokens", [0, -1, MAX_ANSWER_TOKENS + 1])
def test_calls_for_impossible_lengths_are_refused(num_tokens: int) -> None:
    with pytest.raises(ValueError, match="1 to 65535 tokens"):
        call_id(num_tokens, exact=True)


def naive_open_call(prompt: list[int]) -> tuple[int, int] | None:
    found = None
    for index, token_id in enumerate(prompt):
        if is_call(token_id):
            found = token_id, index
        elif token_id == END:
            found = None
    return found


pieces = st.one_of(
    st.integers(0, NUM_FILLERS - 1),
    st.just(END),
    acts,
    st.builds(lambda n, exact: call_id(n, exact=exact), lengths, st.booleans()),
)


@given(st.lists(pieces, max_size=30))
def test_the_open_call_is_the_last_one_without_an_end_behind_it(prompt: list[int]) -> None:
    assert open_call(np.array(prompt, np.int32)) == naive_open_call(prompt)
