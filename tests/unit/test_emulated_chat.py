"""From sizes to token ids and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiderl.agent.emulated_chat import EmulatedChat
from tiderl.engines.emulated_language import (
    END,
    MAX_ANSWER_TOKENS,
    NUM_FILLERS,
    NUM_ROLLS,
    NUM_SKILLS,
    act_id,
    call_id,
    open_call,
)
from tiderl.envs.builtin.emulated import EmulatedText
from tiderl.envs.builtin.emulated_sizes import ActionSizes, InstructionSizes, ObservationSizes
from tiderl.envs.protocol import ImagePart, Observation
from tiderl.errors import ConfigError, EngineError, ModelError, UserError

CHAT = EmulatedChat(2.0)
INSTRUCTION = InstructionSizes(1, 50, 2.0).text()
observations = st.builds(
    ObservationSizes, st.integers(0, 2**63 - 1), st.integers(1, 300), st.integers(1, MAX_ANSWER_TOKENS), st.booleans()
)


def seen(sizes: ObservationSizes) -> Observation:
    return Observation(sizes.text())


def is_filler(ids: list[int]) -> bool:
    return all(0 <= token < NUM_FILLERS for token in ids)


@given(st.integers(0, 300), observations)
def test_the_first_prompt_has_the_tokens_that_were_said_and_ends_with_the_call(
    num_tokens: int, sizes: ObservationSizes
) -> None:
    ids = CHAT.initial(InstructionSizes(1, num_tokens, 2.0).text(), seen(sizes))
    assert len(ids) == num_tokens + sizes.num_tokens
    assert ids[-1] == call_id(sizes.answer_tokens, exact=sizes.exact)
    assert is_filler(ids[:-1])
    assert open_call(np.array(ids, np.int32)) == (ids[-1], len(ids) - 1)


@given(observations)
def test_the_next_turn_closes_an_answer_that_was_cut(sizes: ObservationSizes) -> None:
    act = act_id(0.5, 7)
    ids = CHAT.next_turn([act, 5, END], seen(sizes))
    assert len(ids) == sizes.num_tokens
    assert is_filler(ids[:-1])
    assert ids[-1] == call_id(sizes.answer_tokens, exact=sizes.exact)
    for cut in ([act, 5], [act], []):
        assert CHAT.next_turn(cut, seen(sizes)) == [END, *ids]


def test_equal_sizes_are_equal_ids_and_other_seeds_are_not() -> None:
    one, same, other = (seen(ObservationSizes(filler, 40, 9, exact=True)) for filler in (1, 1, 2))
    ids, other_ids = CHAT.initial(INSTRUCTION, one), CHAT.initial(INSTRUCTION, other)
    # In another process' chat too: the ids come from the seeds alone.
    assert EmulatedChat(2.0).initial(INSTRUCTION, same) == ids
    assert other_ids[:50] == ids[:50]
    # 39 fillers of 32,000: on average 0.001 agree by chance.
    assert sum(a == b for a, b in zip(ids[50:-1], other_ids[50:-1], strict=True)) <= 1


def test_a_prompt_that_was_given_out_may_be_changed() -> None:
    observation = seen(ObservationSizes(3, 5, 9, exact=True))
    ids = CHAT.initial(INSTRUCTION, observation)
    untouched = list(ids)
    ids[:] = [0] * len(ids)
    assert CHAT.initial(INSTRUCTION, observation) == untouched


@given(st.integers(0, NUM_SKILLS - 1), st.integers(0, NUM_ROLLS - 1))
def test_an_answers_act_becomes_the_action(step: int, roll: int) -> None:
    skill = step / (NUM_SKILLS - 1)
    assert ActionSizes.read(CHAT.action_text([act_id(skill, roll), 5, 6, END])) == ActionSizes(skill, roll)


@pytest.mark.parametrize("ids", [[], [5, 6], [END]])
def test_an_answer_without_an_act_is_the_engines_failure(ids: list[int]) -> None:
    with pytest.raises(EngineError, match="begins with an act"):
        CHAT.action_text(ids)


def test_the_stop_token_is_the_end() -> None:
    assert CHAT.stop_token_ids == (END,)


def test_another_time_scale_is_refused_with_both_settings() -> None:
    started = EmulatedText().start("train", 0, {"time_scale": 4})
    assert EmulatedChat(4.0).initial(started.instruction, started.observation)
    with pytest.raises(ConfigError, match=r"emulate.time_scale: is 2, .* server runs at 4: .*--options .*time_scale"):
        CHAT.initial(started.instruction, started.observation)


def test_a_real_environment_is_refused() -> None:
    observation = seen(ObservationSizes(0, 1, 1, exact=True))
    with pytest.raises(UserError, match="instruction 'Find your way.*emulated-text"):
        CHAT.initial("Find your way in a grid world.", observation)
    with pytest.raises(UserError, match="observation 'go to the red ball.*emulated-text"):
        CHAT.initial(INSTRUCTION, Observation("go to the red ball."))
    with pytest.raises(UserError, match="observation 'you see a door"):
        CHAT.next_turn([END], Observation("you see a door"))
    images = Observation(observation.text, (ImagePart(b"x", "image/png"),))
    with pytest.raises(ModelError, match="images"):
        CHAT.next_turn([END], images)
