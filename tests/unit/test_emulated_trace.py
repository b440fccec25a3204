"""Recorded sessions: what a line becomes, how it is played, and which lines are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiderl.envs.builtin.emulated_trace import (
    DEFAULT_RESET_S,
    DEFAULT_STEP_S,
    RecordedEpisode,
    RecordedSession,
    RecordedTurn,
    read_trace,
)
from tiderl.envs.builtin.emulated_workloads import Reply
from tiderl.errors import UserError

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"

SESSION = {
    "task_id": "a",
    "task_type": "shop",
    "reset_s": 1.5,
    "turns": [
        {"prompt_tokens": 100, "output_tokens": 10, "env_latency_s": 0.25, "kind": "act"},
        {"prompt_tokens": 150, "output_tokens": 20, "env_latency_s": None},
        # The history was rewritten: 150 + 20 tokens have become 120.
        {"prompt_tokens": 120, "output_tokens": 1, "env_latency_s": 0.5},
    ],
    "reward": 0.75,
}


def trace(tmp_path: Path, *lines: Any) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return str(path)


def play(episode: RecordedEpisode, skill: float = 0.5) -> list[Reply]:
    replies = [episode.act(skill, 1)]
    while not replies[-1].done:
        replies.append(episode.act(skill, 1))
    return replies


def test_a_line_becomes_a_session(tmp_path: Path) -> None:
    turns = (
        RecordedTurn(100, 10, 0.25),
        RecordedTurn(40, 20, DEFAULT_STEP_S),
        RecordedTurn(1, 2, 0.5),  # an answer has an act and an end
    )
    assert read_trace(trace(tmp_path, SESSION)) == (RecordedSession("shop", turns, 1.5, 0.75),)


def test_what_a_line_may_leave_open(tmp_path: Path) -> None:
    line = {key: value for key, value in SESSION.items() if key != "reset_s"} | {"reward": None}
    (session,) = read_trace(trace(tmp_path, line))
    assert (session.reset_s, session.reward) == (DEFAULT_RESET_S, 0.0)


def test_an_episode_has_the_sessions_sizes_and_seconds(tmp_path: Path) -> None:
    (session,) = read_trace(trace(tmp_path, SESSION))
    episode = RecordedEpisode(session, "train", 0)
    opening = episode.opening
    assert (opening.instruction_tokens, opening.delay_s) == (0, 1.5)
    assert (opening.observation.num_tokens, opening.observation.answer_tokens) == (100, 10)
    replies = play(episode)
    assert [reply.delay_s for reply in replies] == [0.25, DEFAULT_STEP_S, 0.5]
    assert [(reply.observation.num_tokens, reply.observation.answer_tokens) for reply in replies[:2]] == [
        (40, 20),
        (1, 2),
    ]
    assert [reply.reward for reply in replies] == [0.0, 0.0, 0.75]
    assert [(reply.done, reply.success) for reply in replies] == [(False, False), (False, False), (True, True)]
    assert opening.observation.exact and all(reply.observation.exact for reply in replies)


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(2, 500)), min_size=1, max_size=10))
def test_contexts_that_grow_are_the_recorded_ones(sizes: list[tuple[int, int]]) -> None:
    """Each turn adds an observation and an answer; the recorded context is the sum of all before."""
    session = RecordedSession("t", tuple(RecordedTurn(seen, said, 0.0) for seen, said in sizes), 0.0, 1.0)
    turns, context = [], 0
    for seen, said in sizes:
        turns.append({"prompt_tokens": context + seen, "output_tokens": said, "env_latency_s": 0})
        context += seen + said
    from tiderl.envs.builtin.emulated_trace import _session

    assert _session({"task_type": "t", "turns": turns, "reset_s": 0, "reward": 1}) == session


def test_siblings_play_the_same_session_with_texts_of_their_own(tmp_path: Path) -> None:
    (session,) = read_trace(trace(tmp_path, SESSION))
    first, second, other = (RecordedEpisode(session, "train", seed) for seed in (3, 3, 4))
    assert first.opening == second.opening
    assert first.opening.observation.filler != other.opening.observation.filler
    assert RecordedEpisode(session, "test", 3).opening.observation.filler != first.opening.observation.filler
    ours, theirs = play(first, 0.0), play(second, 1.0)
    for one, two in zip(ours, theirs, strict=True):
        assert one.observation.num_tokens == two.observation.num_tokens
        assert one.observation.filler != two.observation.filler


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nonsense", "line 2 is no recorded session: not JSON"),
        ("[]", "expected a JSON object"),
        ({"task_type": "t", "reward": 1}, "turns: is missing"),
        (SESSION | {"turns": []}, "turns: a session has at least one"),
        (SESSION | {"turns": [3]}, "turns: expected objects, got int"),
        (SESSION | {"turns": [{"prompt_tokens": 5}]}, "output_tokens: is missing"),
        (SESSION | {"turns": [{"prompt_tokens": 0, "output_tokens": 1}]}, "0 prompt and 1 output tokens"),
        (SESSION | {"turns": [{"prompt_tokens": 1, "output_tokens": 65536}]}, "65536 output tokens are out of range"),
        (SESSION | {"reset_s": -1}, "reset_s: must not be negative"),
        (SESSION | {"reward": "high"}, "reward: expected float, got str"),
        (SESSION | {"task_type": None}, "task_type: expected str"),
    ],
)
def test_a_line_that_is_no_session_is_named(tmp_path: Path, line: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_trace(trace(tmp_path, SESSION, line))


def test_files_that_cannot_be_played(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no-such-file cannot be read: No such file"):
        read_trace(str(tmp_path / "no-such-file"))
    with pytest.raises(UserError, match="is empty"):
        read_trace(trace(tmp_path))


@pytest.mark.skipif(not TRACES.is_dir(), reason="the recorded sessions are not part of the repository")
def test_the_recorded_sessions_can_be_read() -> None:
    # The README beside them says how many there are.
    sizes = {"webshop_react": 500, "miniwob_scripted_measured": 90, "mooncake_conversation_sessions": 2012}
    for name, number in sizes.items():
        assert len(read_trace(str(TRACES / f"{name}.jsonl"))) == number
