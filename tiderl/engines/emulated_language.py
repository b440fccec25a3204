"""The language of emulated models: token ids that carry sizes, so that lengths travel through prompts as real contexts do.

An emulated observation ends with a *call* that says how long the answer to it is; an emulated answer begins with an *act* that says
how good the model is by now, and with a random number that makes siblings differ. All else is filler. So engine, turn loop, pause,
resume and environment need no channel beside the token ids: what is left to generate after a pause can be read off the record.

    prompt:  filler … filler call          answer:  act filler … filler END

Invariants (tests/unit/test_emulated_language.py):

1. Ids of different kinds never overlap, and fit into int32.
2. `answer_length(call, act)` is exact for an exact call, log-normal with median n and sigma `SPREAD` over the rolls for the other.
3. The open call of a prompt that ends in the middle of an answer is that answer's, and none is open after its `END`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

NUM_FILLERS = 32_000
#: Ends an answer; the engine generates it as the last token, as models do.
END = NUM_FILLERS
MAX_ANSWER_TOKENS = 65_535
#: Sigma of the logarithm of an answer's length where the call says "about".
SPREAD = 0.4
NUM_SKILLS = 1_001
NUM_ROLLS = 1_000

_EXACT = 100_000
_ABOUT = 200_000
_ACT = 1_000_000


@dataclass(frozen=True, slots=True)
class Act:
    """The first token of an answer. `skill` in [0, 1]: share of the training that the model has behind it. `roll` is random, in
    [0, NUM_ROLLS)."""

    skill: float
    roll: int


def call_id(num_tokens: int, *, exact: bool) -> int:
    """The last id of an observation: answer with `num_tokens` (1 or more, END included), or with about as many."""
    if not 1 <= num_tokens <= MAX_ANSWER_TOKENS:
        raise ValueError(f"an emulated answer has 1 to {MAX_ANSWER_TOKENS} tokens, asked for {num_tokens}")
    return (_EXACT if exact else _ABOUT) + num_tokens


def is_call(token_id: int) -> bool:
    return 0 < token_id - _EXACT <= MAX_ANSWER_TOKENS or 0 < token_id - _ABOUT <= MAX_ANSWER_TOKENS


def act_id(skill: float, roll: int) -> int:
    assert 0.0 <= skill <= 1.0 and 0 <= roll < NUM_ROLLS, (skill, roll)
    return _ACT + round(skill * (NUM_SKILLS - 1)) * NUM_ROLLS + roll


def read_act(token_id: int) -> Act:
    """Raises `ValueError` for an id that is no act."""
    number = token_id - _ACT
    if not 0 <= number < NUM_SKILLS * NUM_ROLLS:
        raise ValueError(f"token {token_id} does not begin an emulated answer")
    skill, roll = divmod(number, NUM_ROLLS)
    return Act(skill / (NUM_SKILLS - 1), roll)


def answer_length(call: int, act: int) -> int:
    """Tokens of the answer to `call` that begins with `act`, END included."""
    if call < _ABOUT:
        return call - _EXACT
    quantile = (read_act(act).roll + 0.5) / NUM_ROLLS
    num_tokens = (call - _ABOUT) * math.exp(SPREAD * NormalDist().inv_cdf(quantile))
    return min(max(1, round(num_tokens)), MAX_ANSWER_TOKENS)


def open_call(prompt_token_ids: npt.NDArray[np.int32]) -> tuple[int, int] | None:
    """(call, index of it) of the answer that the prompt asks for, or is in the middle of; None where nothing is asked for."""
    last = prompt_token_ids.size - 1
    if last >= 0 and is_call(token_id := int(prompt_token_ids[last])):  # no pause: the usual case
        return token_id, last
    # Only calls and ENDs lie in this range, and they are few: nothing else is looked at one by one.
    for index in np.flatnonzero((prompt_token_ids >= END) & (prompt_token_ids < _ACT))[::-1].tolist():
        token_id = int(prompt_token_ids[index])
        if token_id == END:
            return None
        if is_call(token_id):
            return token_id, index
    return None
