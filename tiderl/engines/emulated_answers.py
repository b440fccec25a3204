"""What an emulated model answers: the tokens of a turn, drawn all at once when its first one is made.

Invariants (tests/unit/test_emulated_answers.py):

1. With an open call: an act if the prompt has none yet, fillers, and `END` as the last token, at the length that call and act say.
   (An answer of one token is an act alone.)
2. Without one: fillers up to the cap.
3. The first stop id ends the answer and is kept; with `ignore_stop` only the cap does.
4. The same seed, rank and prompts give the same answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from tiderl.engines.emulated_language import END, NUM_FILLERS, NUM_ROLLS, act_id, answer_length, open_call

#: Fillers are drawn so many at once: a call of the generator costs as much as hundreds of tokens.
_NUM_DRAWN = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """All tokens of a turn [num_tokens, 1 or more], and why the last of them ends it."""

    token_ids: npt.NDArray[np.int32]
    finish: Literal["stop", "length"]


class Answers(Protocol):
    """A source of answers; tests have scripted ones."""

    def answer(
        self,
        request_id: str,
        prompt: npt.NDArray[np.int32],
        version: int,
        max_tokens: int,
        stop_ids: tuple[int, ...] | None,
    ) -> Answer:
        """At most `max_tokens` tokens, begun under the weights of `version`. `stop_ids` None: nothing but the cap ends it."""


class EmulatedAnswers:
    """Answers of a model that has learned the share `version / num_train_steps` of what there is to learn."""

    def __init__(self, seed: int, rank: int, num_train_steps: int) -> None:
        self._random = np.random.default_rng((abs(seed), rank))
        self._drawn = np.empty(0, np.int32)
        self._num_train_steps = num_train_steps

    def answer(
        self,
        request_id: str,
        prompt: npt.NDArray[np.int32],
        version: int,
        max_tokens: int,
        stop_ids: tuple[int, ...] | None,
    ) -> Answer:
        called = open_call(prompt)
        wanted = self._fillers(max_tokens) if called is None else self._asked_for(prompt, called, version)
        if stop_ids is None:
            more = self._fillers(max(max_tokens - wanted.size, 0))
            return Answer(np.concatenate([wanted[:max_tokens], more]), "length")
        return cut(wanted, max_tokens, stop_ids, complete=called is not None)

    def _asked_for(self, prompt: npt.NDArray[np.int32], called: tuple[int, int], version: int) -> npt.NDArray[np.int32]:
        """The whole answer to a call, or what is left of it."""
        call, index = called
        num_made = prompt.size - 1 - index
        if num_made:
            return self._ended(max(answer_length(call, int(prompt[index + 1])) - num_made, 1))
        skill = min(version / self._num_train_steps, 1.0)
        act = act_id(skill, int(self._random.random() * NUM_ROLLS))
        tokens = self._ended(answer_length(call, act))
        # Last, so that an answer of one token is an act, which the environment needs.
        tokens[0] = act
        return tokens

    def _ended(self, num_tokens: int) -> npt.NDArray[np.int32]:
        tokens = self._fillers(num_tokens)
        tokens[-1] = END
        return tokens

    def _fillers(self, num_tokens: int) -> npt.NDArray[np.int32]:
        if num_tokens > self._drawn.size:
            self._drawn = self._random.integers(0, NUM_FILLERS, max(num_tokens, _NUM_DRAWN), dtype=np.int32)
        fillers, self._drawn = self._drawn[:num_tokens].copy(), self._drawn[num_tokens:]
        return fillers


def cut(token_ids: npt.NDArray[np.int32], max_tokens: int, stop_ids: tuple[int, ...], *, complete: bool) -> Answer:
    """The tokens up to the first stop id or the cap. `complete`: they end by themselves, where neither comes before."""
    kept = token_ids[:max_tokens]
    # Few ids, each compared with all: many times faster than `np.isin` here.
    stops = [int(places[0]) for stop_id in stop_ids if (places := (kept == stop_id).nonzero()[0]).size]
    if stops:
        return Answer(kept[: min(stops) + 1], "stop")
    return Answer(kept, "stop" if complete and kept.size == token_ids.size else "length")
