"""The JSON of emulated texts: what is written is read back, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiderl.engines import emulated_language
from tiderl.envs.builtin import emulated_sizes
from tiderl.envs.builtin.emulated_sizes import (
    MAX_ANSWER_TOKENS,
    MAX_SEED,
    MAX_TOKENS,
    ActionSizes,
    InstructionSizes,
    ObservationSizes,
)
from tiderl.envs.payload import PayloadError

seeds = st.integers(0, MAX_SEED - 1)
SIZES = (InstructionSizes, ObservationSizes, ActionSizes)


@given(seeds, st.integers(0, MAX_TOKENS), st.floats(1e-6, 1e6))
def test_an_instruction_is_read_back(filler: int, num_tokens: int, time_scale: float) -> None:
    sizes = InstructionSizes(filler, num_tokens, time_scale)
    assert InstructionSizes.read(sizes.text()) == sizes


@given(seeds, st.integers(1, MAX_TOKENS), st.integers(1, MAX_ANSWER_TOKENS), st.booleans(), st.text(max_size=20))
def test_an_observation_is_read_back(filler: int, num_tokens: int, answer_tokens: int, exact: bool, error: str) -> None:
    sizes = ObservationSizes(filler, num_tokens, answer_tokens, exact, error)
    assert ObservationSizes.read(sizes.text()) == sizes


@given(st.floats(0.0, 1.0), seeds)
def test_an_action_is_read_back(skill: float, roll: int) -> None:
    sizes = ActionSizes(skill, roll)
    assert ActionSizes.read(sizes.text()) == sizes


def test_texts_are_compact() -> None:
    assert InstructionSizes(0, 700, 2.0).text() == '{"filler":0,"tokens":700,"time_scale":2.0}'
    assert ObservationSizes(7, 5, 102, exact=False).text() == '{"filler":7,"tokens":5,"answer":102,"exact":false}'
    assert ActionSizes(0.25, 999).text() == '{"skill":0.25,"roll":999}'


@given(
    st.one_of(
        st.text(st.characters(exclude_categories=())), st.recursive(st.none() | st.integers(), st.lists).map(repr)
    )
)
def test_whatever_else_it_is_a_payload_error_says_so(text: str) -> None:
    for sizes in SIZES:
        with pytest.raises(PayloadError):
            sizes.read(text)


@pytest.mark.parametrize(
    ("sizes", "text", "words"),
    [
        (InstructionSizes, '{"filler":0,"tokens":5}', "time_scale: is missing"),
        (InstructionSizes, '{"filler":0,"tokens":5,"time_scale":0}', "time_scale: must be more than 0"),
        (InstructionSizes, '{"filler":0,"tokens":-1,"time_scale":1}', "tokens: must be between 0"),
        (InstructionSizes, '{"filler":-1,"tokens":1,"time_scale":1}', "filler: must be between 0"),
        (ObservationSizes, '{"filler":0,"tokens":0,"answer":1,"exact":true}', "tokens: must be between 1"),
        (
            ObservationSizes,
            '{"filler":0,"tokens":1,"answer":65536,"exact":true}',
            "answer: must be between 1 and 65535",
        ),
        (ObservationSizes, '{"filler":0,"tokens":1,"answer":1,"exact":1}', "exact: expected bool"),
        (ObservationSizes, '{"filler":9223372036854775808,"tokens":1,"answer":1,"exact":true}', "filler: must be"),
        (ObservationSizes, '{"filler":0,"tokens":1e400,"answer":1,"exact":true}', "tokens: expected int"),
        (ActionSizes, '{"skill":1.5,"roll":0}', "skill: must be between 0 and 1"),
        (ActionSizes, '{"skill":NaN,"roll":0}', "NaN"),
        (ActionSizes, '{"skill":0,"roll":-1}', "roll: must be between 0"),
        (ActionSizes, '{"skill":0,"roll":1,"word":"go"}', "'word': no such field here; there are skill, roll"),
        (ActionSizes, "go north", "not JSON"),
    ],
)
def test_the_error_names_what_is_wrong(sizes: type[InstructionSizes], text: str, words: str) -> None:
    with pytest.raises(PayloadError, match=words):
        sizes.read(text)


def test_the_numbers_of_the_language_stand_here_too() -> None:
    assert emulated_sizes.MAX_ANSWER_TOKENS == emulated_language.MAX_ANSWER_TOKENS
    assert emulated_sizes.SPREAD == emulated_language.SPREAD
