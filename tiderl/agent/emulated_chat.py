"""Prompts of emulated episodes: sizes become token ids, and an answer's first id becomes the action.

    initial:    instruction's fillers, observation's fillers, call        next_turn:  END if missing, observation's fillers, call

Fillers are drawn from the seed that the environment names, so that equal texts are equal ids: tasks share their workload's
instruction, siblings their first prompt. That is all that a prefix cache sees of a prompt.

Invariants (tests/unit/test_emulated_chat.py):

1. A prompt has exactly the tokens that the environment said, call included, and ends with the call for the answer it asks for.
2. Equal sizes give equal ids; other seeds give other ids.
3. A text that is no emulated environment's, and an environment that runs at another time scale, is a `UserError` that says so.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from tiderl.engines.emulated_language import END, NUM_FILLERS, call_id, read_act
from tiderl.envs.builtin.emulated_sizes import ActionSizes, InstructionSizes, ObservationSizes
from tiderl.envs.payload import PayloadError
from tiderl.envs.protocol import Observation
from tiderl.errors import ConfigError, EngineError, ModelError, UserError

#: Workloads have one instruction each; recorded sessions have none.
_MAX_INSTRUCTIONS = 16


class EmulatedChat:
    """The `Chat` of emulated engines (`agent.loop`). `time_scale`: the job's `emulate.time_scale`."""

    stop_token_ids: tuple[int, ...] = (END,)

    def __init__(self, time_scale: float) -> None:
        self._time_scale = time_scale

    def initial(self, instruction: str, observation: Observation) -> list[int]:
        """The first prompt. Raises `UserError` for what no emulated environment of the job's time scale says."""
        try:
            sizes = InstructionSizes.read(instruction)
        except PayloadError as error:
            raise _not_emulated(f"the instruction {instruction[:80]!r}", error) from error
        if sizes.time_scale != self._time_scale:
            raise ConfigError(
                "emulate.time_scale",
                f"is {self._time_scale:g}, but the environment server runs at {sizes.time_scale:g}: start it with "
                f"`--options '{{\"time_scale\": {self._time_scale:g}}}'`, or change the setting",
            )
        return [*_instruction_ids(sizes.filler, sizes.num_tokens), *_observation_ids(observation)]

    def next_turn(self, generated_ids: Sequence[int], observation: Observation) -> list[int]:
        """The ids behind `generated_ids`. Raises `UserError` as `initial` does."""
        ids = _observation_ids(observation)
        return ids if len(generated_ids) > 0 and generated_ids[-1] == END else [END, *ids]

    def action_text(self, generated_ids: Sequence[int]) -> str:
        """What the environment reads: the skill and the roll of the answer. Raises `EngineError` if it doesn't begin with them."""
        try:
            act = read_act(generated_ids[0])
        except (IndexError, ValueError) as error:
            raise EngineError(
                f"an emulated answer begins with an act, this one with {list(generated_ids[:1])}: is it an emulated engine's?"
            ) from error
        return ActionSizes(act.skill, act.roll).text()


def _observation_ids(observation: Observation) -> list[int]:
    if observation.images:
        raise ModelError("emulated observations have their images' tokens in their text; this one comes with images")
    try:
        sizes = ObservationSizes.read(observation.text)
    except PayloadError as error:
        raise _not_emulated(f"the observation {observation.text[:80]!r}", error) from error
    return [*_fillers(sizes.filler, sizes.num_tokens - 1), call_id(sizes.answer_tokens, exact=sizes.exact)]


def _not_emulated(what: str, error: PayloadError) -> UserError:
    return UserError(
        f"{what} is not one of an emulated environment ({error}): an emulated engine plays those only, "
        "such as env.name = emulated-text"
    )


@functools.lru_cache(maxsize=_MAX_INSTRUCTIONS)
def _instruction_ids(filler: int, num_tokens: int) -> tuple[int, ...]:
    return tuple(_fillers(filler, num_tokens))


def _fillers(seed: int, num_tokens: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, NUM_FILLERS, num_tokens).tolist()
    return ids
