"""Recorded sessions as emulated episodes: the sizes and seconds of a trace file, one JSON object a line.

    {"task_type": …, "turns": [{"prompt_tokens": …, "output_tokens": …, "env_latency_s": …}, …], "reset_s": …, "reward": …}

Of these `env_latency_s`, `reset_s` and `reward` may be null or missing. `prompt_tokens` is the whole context that the model saw
at that call. What else a line holds is not looked at.

Invariants (tests/unit/test_emulated_trace.py):

1. An episode has the session's turns, with exact answer lengths. Where the recorded contexts grow, its contexts are the recorded
   ones; where they shrink (the history was rewritten), the observation is one token.
2. Siblings play the same session, whatever the skill; their texts differ from the first action on.
3. A file that cannot be read, or a line that is no session, is a `UserError` that names it.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiderl.envs import payload
from tiderl.envs.builtin.emulated_sizes import MAX_ANSWER_TOKENS, MAX_SEED, MAX_TOKENS, ObservationSizes
from tiderl.envs.builtin.emulated_workloads import Opening, Reply
from tiderl.envs.payload import PayloadError, take
from tiderl.errors import UserError

#: Seconds where the trace has none: the median MiniWoB step and reset, measured (traces/README.md).
DEFAULT_STEP_S = 0.1
DEFAULT_RESET_S = 0.15
#: An emulated answer has an act and an end.
MIN_ANSWER_TOKENS = 2
#: Rewards above count as success.
SUCCESS_REWARD = 0.5


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """`observation_tokens`: what the turn added to the context before it."""

    observation_tokens: int
    answer_tokens: int
    env_s: float


@dataclass(frozen=True, slots=True)
class RecordedSession:
    """One line of a trace; at least one turn."""

    task_type: str
    turns: tuple[RecordedTurn, ...]
    reset_s: float
    reward: float


class RecordedEpisode:
    """One trajectory along a session; as `emulated_workloads.Episode`."""

    def __init__(self, session: RecordedSession, split: str, seed: int) -> None:
        self._session = session
        self._history = random.Random(f"trace/{split}/{seed}").randrange(MAX_SEED)
        self._num_turns = 0
        # Nothing says what the sessions have in common: all of the first prompt is the task's own.
        self.opening = Opening(0, 0, self._observation(0), session.reset_s)

    def act(self, skill: float, roll: int) -> Reply:
        """Play an answer; its sizes are the session's, but the texts after it are this trajectory's own."""
        self._history = random.Random(f"{self._history}/{skill}/{roll}").randrange(MAX_SEED)
        turns, env_s = self._session.turns, self._session.turns[self._num_turns].env_s
        self._num_turns += 1
        if self._num_turns < len(turns):
            return Reply(self._observation(self._num_turns), env_s, 0.0, done=False, success=False)
        last = ObservationSizes(self._history, 1, turns[-1].answer_tokens, exact=True)
        reward = self._session.reward
        return Reply(last, env_s, reward, done=True, success=reward > SUCCESS_REWARD)

    def _observation(self, turn: int) -> ObservationSizes:
        recorded = self._session.turns[turn]
        return ObservationSizes(self._history, recorded.observation_tokens, recorded.answer_tokens, exact=True)


@functools.cache
def read_trace(path: str) -> tuple[RecordedSession, ...]:
    """The sessions of a trace file, at least one. Raises `UserError`."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"trace file {path} cannot be read: {error.strerror}") from error
    sessions = []
    for number, line in enumerate(lines, start=1):
        try:
            sessions.append(_session(payload.load(line)))
        except PayloadError as error:
            raise UserError(f"trace file {path}, line {number} is no recorded session: {error}") from error
    if not sessions:
        raise UserError(f"trace file {path} is empty; it needs one recorded session a line")
    return tuple(sessions)


def _session(fields: dict[str, Any]) -> RecordedSession:
    turns: list[RecordedTurn] = []
    context_tokens = 0
    for turn in take(fields, "turns", list):
        if not isinstance(turn, dict):
            raise PayloadError(f"turns: expected objects, got {type(turn).__name__}")
        prompt_tokens, output_tokens = take(turn, "prompt_tokens", int), take(turn, "output_tokens", int)
        if not (1 <= prompt_tokens <= MAX_TOKENS and 0 <= output_tokens <= MAX_ANSWER_TOKENS):
            raise PayloadError(f"turns: {prompt_tokens} prompt and {output_tokens} output tokens are out of range")
        env_s = _seconds(turn, "env_latency_s", DEFAULT_STEP_S)
        answer_tokens = max(output_tokens, MIN_ANSWER_TOKENS)
        turns.append(RecordedTurn(max(1, prompt_tokens - context_tokens), answer_tokens, env_s))
        context_tokens = prompt_tokens + answer_tokens
    if not turns:
        raise PayloadError("turns: a session has at least one")
    reward = 0.0 if fields.get("reward") is None else take(fields, "reward", float)
    reset_s = _seconds(fields, "reset_s", DEFAULT_RESET_S)
    return RecordedSession(take(fields, "task_type", str), tuple(turns), reset_s, reward)


def _seconds(fields: dict[str, Any], name: str, default_s: float) -> float:
    if fields.get(name) is None:
        return default_s
    seconds = take(fields, name, float)
    if seconds < 0.0:
        raise PayloadError(f"{name}: must not be negative, got {seconds:g}")
    return seconds
