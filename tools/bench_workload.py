"""Workloads of the benches: what multi-turn trajectories look like in numbers, synthetic or read from a recorded trace.

A workload is a sequence of groups; the tasks of a group start from one prompt. Nothing here knows TideRL: lengths in tokens,
latencies in seconds.

Invariants (tests/unit/test_bench_workload.py):

1. Synthetic groups depend on (seed, number) alone. On average a task has `ROUNDS` turns and `TRAJECTORY_TOKENS` tokens.
2. A trace is played token-exactly: what a turn's prompt has beyond the turn before is the observation, at least 1 token.
3. `distinct_prefill_tokens` is what an engine with an endless cache would compute of prompts, whatever the order of the turns.

Source: paper §6 (WebShop: 8 rounds, 3400 tokens a trajectory, at most 20 turns and 8192 tokens).
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

ROUNDS = 8.0
TRAJECTORY_TOKENS = 3400
MAX_TURNS = 20
MAX_CONTEXT_TOKENS = 8192
#: How the 3400 tokens are made up: 800 + 8 * 75 + 7 * 2000 / 7. Recorded WebShop sessions have relatively longer prompts (they hold
#: an example episode) and shorter outputs (no reasoning model).
PROMPT_TOKENS, OUTPUT_TOKENS = 800.0, 75.0
OBSERVATION_TOKENS = (TRAJECTORY_TOKENS - PROMPT_TOKENS - ROUNDS * OUTPUT_TOKENS) / (ROUNDS - 1)
#: Sigmas of the lognormal spreads. Half of the spread in rounds is the group's: some tasks are harder than others.
_PROMPT_SPREAD, _ROUNDS_SPREAD, _OUTPUT_SPREAD, _OBSERVATION_SPREAD, _LATENCY_SPREAD = 0.1, 0.25, 0.5, 0.5, 0.6
#: Mean rounds of the shortest and of the longest type, relative to `ROUNDS`.
_TYPE_RANGE = (0.6, 1.4)


@dataclass(frozen=True, slots=True)
class TurnWork:
    """One turn: what is generated, and the environment's answer (no tokens after the last turn)."""

    output_tokens: int
    observation_tokens: int
    latency_s: float


@dataclass(frozen=True, slots=True)
class TaskWork:
    """One trajectory."""

    prompt_tokens: int
    turns: tuple[TurnWork, ...]

    @property
    def turn_spans(self) -> tuple[tuple[int, int], ...]:
        """Of every turn: the length of its prompt, and of the context when it has ended."""
        spans, length = [], self.prompt_tokens
        for turn in self.turns:
            spans.append((length, length + turn.output_tokens))
            length += turn.output_tokens + turn.observation_tokens
        return tuple(spans)

    @property
    def context_tokens(self) -> int:
        """Length of the trajectory in the end."""
        return self.turn_spans[-1][1]

    @property
    def output_tokens(self) -> int:
        return sum(turn.output_tokens for turn in self.turns)


@dataclass(frozen=True, slots=True)
class GroupWork:
    """Tasks that start from one prompt."""

    task_type: str
    tasks: tuple[TaskWork, ...]


def distinct_prefill_tokens(groups: Sequence[GroupWork]) -> int:
    """Prompt tokens that must be computed at least once: a group's prompt, and what every later turn adds to the context computed
    so far, which is the observation and the last token of the turn before (sampled, but never computed on)."""
    return sum(
        group.tasks[0].prompt_tokens
        + sum(turn.observation_tokens + 1 for task in group.tasks for turn in task.turns[:-1])
        for group in groups
    )


def synthetic(
    seed: int, *, group_size: int, num_types: int = 1, token_scale: float = 1.0, latency_s: float = 1.0
) -> Iterator[GroupWork]:
    """An endless stream of WebShop-like groups, the types taking turns. `latency_s` is the environment's median."""
    number = 0
    while True:
        rng = random.Random(f"{seed}/{number}")
        shortest, longest = _TYPE_RANGE
        kind = number % num_types
        share = kind / (num_types - 1) if num_types > 1 else 0.5
        rounds = _spread(rng, ROUNDS * (shortest + share * (longest - shortest)), _ROUNDS_SPREAD)
        prompt_tokens = _tokens(rng, PROMPT_TOKENS * token_scale, _PROMPT_SPREAD)
        tasks = tuple(_task(rng, rounds, prompt_tokens, token_scale, latency_s) for _ in range(group_size))
        yield GroupWork(f"type{kind}", tasks)
        number += 1


def _task(rng: random.Random, rounds: float, prompt_tokens: int, token_scale: float, latency_s: float) -> TaskWork:
    num_turns = min(MAX_TURNS, max(2, round(_spread(rng, rounds, _ROUNDS_SPREAD))))
    turns = [
        TurnWork(
            _tokens(rng, OUTPUT_TOKENS * token_scale, _OUTPUT_SPREAD),
            _tokens(rng, OBSERVATION_TOKENS * token_scale, _OBSERVATION_SPREAD) if turn < num_turns - 1 else 0,
            latency_s * rng.lognormvariate(0.0, _LATENCY_SPREAD),
        )
        for turn in range(num_turns)
    ]
    return clipped(TaskWork(prompt_tokens, tuple(turns)), int(MAX_CONTEXT_TOKENS * token_scale))


def _spread(rng: random.Random, mean: float, sigma: float) -> float:
    return mean * rng.lognormvariate(-sigma * sigma / 2, sigma)


def _tokens(rng: random.Random, mean: float, sigma: float) -> int:
    return max(1, round(_spread(rng, mean, sigma)))


def clipped(task: TaskWork, max_context_tokens: int) -> TaskWork:
    """The task without the turns that would not end below `max_context_tokens`, as a turn loop would cut it. Raises `ValueError`
    if not even the first one does."""
    fitting = sum(end < max_context_tokens for _, end in task.turn_spans)
    if fitting == 0:
        raise ValueError(
            f"the first turn ends at {task.turn_spans[0][1]} tokens, a context may have {max_context_tokens}: "
            "raise the context's cap, or scale the tokens down"
        )
    if fitting == len(task.turns):
        return task
    last = task.turns[fitting - 1]
    return replace(task, turns=(*task.turns[: fitting - 1], TurnWork(last.output_tokens, 0, last.latency_s)))


def read_trace(
    path: Path,
    seed: int,
    *,
    group_size: int,
    num_groups: int,
    token_scale: float,
    latency_s: float,
    max_context_tokens: int,
) -> list[GroupWork]:
    """The first groups of a trace (format: README.md beside the traces; a line is one trajectory).

    A trace has no groups: `group_size` lines in a row play as one, of the first one's type, from the first one's prompt; what
    follows the prompt is each line's own. Latencies that were not recorded are lognormal with median `latency_s`. Raises
    `ValueError` where the file has fewer lines than are asked for, or a line that is not in the format.
    """
    rng = random.Random(f"{seed}/{path.name}")
    wanted = group_size * num_groups
    with path.open(encoding="utf-8") as lines:
        sessions = [_session(line, rng, token_scale, latency_s) for line in islice(lines, wanted)]
    if len(sessions) < wanted:
        raise ValueError(f"{path} has {len(sessions)} sessions, {num_groups} groups of {group_size} need {wanted}")
    groups = []
    for first in range(0, wanted, group_size):
        members = sessions[first : first + group_size]
        task_type, leader = members[0]
        tasks = (replace(task, prompt_tokens=leader.prompt_tokens) for _, task in members)
        groups.append(GroupWork(task_type, tuple(clipped(task, max_context_tokens) for task in tasks)))
    return groups


def _session(line: str, rng: random.Random, token_scale: float, latency_s: float) -> tuple[str, TaskWork]:
    record = json.loads(line)
    calls = record["turns"]
    if not calls:
        raise ValueError(f"session {record['task_id']} has no turns")
    turns = []
    for call, following in zip(calls, [*calls[1:], None], strict=True):
        observation = 0
        if following is not None:
            observation = max(1, following["prompt_tokens"] - call["prompt_tokens"] - call["output_tokens"])
            observation = _scaled(observation, token_scale)
        seconds = call["env_latency_s"]
        if seconds is None:
            seconds = latency_s * rng.lognormvariate(0.0, _LATENCY_SPREAD)
        turns.append(TurnWork(_scaled(call["output_tokens"], token_scale), observation, seconds))
    return record["task_type"], TaskWork(_scaled(calls[0]["prompt_tokens"], token_scale), tuple(turns))


def _scaled(tokens: int, scale: float) -> int:
    return max(1, math.floor(tokens * scale + 0.5))
