"""The workloads of tools/bench_*.py: token arithmetic by hand, on small traces and in the synthetic stream's means."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tools.bench_workload import (
    MAX_CONTEXT_TOKENS,
    MAX_TURNS,
    ROUNDS,
    TRAJECTORY_TOKENS,
    GroupWork,
    TaskWork,
    TurnWork,
    clipped,
    distinct_prefill_tokens,
    read_trace,
    synthetic,
)

TRACES = Path(__file__).parents[2].parent / "shared" / "traces"

#: 10 tokens of prompt; 3 generated, 5 observed; 2 generated, 4 observed; 6 generated.
TASK = TaskWork(10, (TurnWork(3, 5, 0.1), TurnWork(2, 4, 0.2), TurnWork(6, 0, 0.3)))


def session(prompt_and_output: Sequence[tuple[int, int]], latency_s: float | None = None, kind: str = "t") -> str:
    turns = [{"prompt_tokens": p, "output_tokens": o, "env_latency_s": latency_s} for p, o in prompt_and_output]
    return json.dumps({"task_id": "x", "task_type": kind, "turns": turns, "final_context_tokens": 0, "reward": None})


def write(folder: Path, *sessions: str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(line + "\n" for line in sessions), encoding="utf-8")
    return path


def read(path: Path, **changes: Any) -> list[GroupWork]:
    settings: dict[str, Any] = {"group_size": 1, "num_groups": 1, "token_scale": 1.0, "latency_s": 0.5}
    return read_trace(path, seed=0, max_context_tokens=10_000, **(settings | changes))


class TestTaskWork:
    def test_turns_follow_each_other(self) -> None:
        assert TASK.turn_spans == ((10, 13), (18, 20), (24, 30))
        assert (TASK.context_tokens, TASK.output_tokens) == (30, 11)

    @pytest.mark.parametrize(("cap", "num_turns"), [(31, 3), (30, 2), (21, 2), (20, 1), (14, 1)])
    def test_a_turn_that_would_reach_the_cap_is_cut(self, cap: int, num_turns: int) -> None:
        short = clipped(TASK, cap)
        assert short.turn_spans == TASK.turn_spans[:num_turns]
        assert short.turns[-1].observation_tokens == 0

    def test_a_task_without_a_turn_is_refused(self) -> None:
        with pytest.raises(ValueError, match="the first turn ends at 13 tokens"):
            clipped(TASK, 13)

    def test_distinct_prefill_counts_a_prompt_once_and_each_later_turns_news(self) -> None:
        # Turn 2 computes 5 observed tokens and the last one of turn 1; turn 3 computes 4 and the last one of turn 2.
        assert distinct_prefill_tokens([GroupWork("t", (TASK,))]) == 10 + (5 + 1) + (4 + 1)
        assert distinct_prefill_tokens([GroupWork("t", (TASK, TASK)), GroupWork("t", (TASK,))]) == 2 * 10 + 3 * 11


class TestTrace:
    def test_observations_are_what_prompts_have_beyond_the_turn_before(self, tmp_path: Path) -> None:
        path = write(tmp_path, session([(100, 7), (120, 9), (130, 4)], latency_s=0.25))
        (group,) = read(path)
        # 120 - 107 = 13; 130 - 129 = 1.
        assert group.tasks == (TaskWork(100, (TurnWork(7, 13, 0.25), TurnWork(9, 1, 0.25), TurnWork(4, 0, 0.25))),)
        assert group.tasks[0].turn_spans == ((100, 107), (120, 129), (130, 134))

    def test_an_observation_has_a_token_even_where_the_trace_shrinks(self, tmp_path: Path) -> None:
        (group,) = read(write(tmp_path, session([(100, 7), (90, 9)])))
        assert group.tasks[0].turn_spans == ((100, 107), (108, 117))

    def test_lines_in_a_row_play_as_a_group_from_the_first_ones_prompt(self, tmp_path: Path) -> None:
        lines = [session([(100 + i, 5), (110 + i, 6)], kind=f"kind{i}") for i in range(5)]
        groups = read(write(tmp_path, *lines), group_size=2, num_groups=2)
        assert [group.task_type for group in groups] == ["kind0", "kind2"]
        assert [[task.prompt_tokens for task in group.tasks] for group in groups] == [[100, 100], [102, 102]]
        assert all(task.turn_spans[1] == (task.prompt_tokens + 10, task.prompt_tokens + 16) for task in groups[1].tasks)

    def test_tokens_are_scaled_and_latencies_are_not(self, tmp_path: Path) -> None:
        (group,) = read(write(tmp_path, session([(100, 7), (120, 1)], latency_s=2.0)), token_scale=0.25)
        assert group.tasks == (TaskWork(25, (TurnWork(2, 3, 2.0), TurnWork(1, 0, 2.0))),)

    def test_missing_latencies_are_drawn_around_the_median(self, tmp_path: Path) -> None:
        lines = [session([(10, 1), (20, 1)]) for _ in range(500)]
        groups = read(write(tmp_path, *lines), num_groups=500)
        latencies = sorted(turn.latency_s for group in groups for task in group.tasks for turn in task.turns)
        assert latencies[500] == pytest.approx(0.5, rel=0.1)
        assert latencies[0] < 0.25 < 1.0 < latencies[-1]

    def test_a_trace_that_is_too_short_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="has 1 sessions, 1 groups of 2 need 2"):
            read(write(tmp_path, session([(10, 1)])), group_size=2)

    @pytest.mark.skipif(not TRACES.is_dir(), reason=f"needs the recorded traces in {TRACES}")
    @pytest.mark.parametrize("name", ["webshop_react", "scienceworld_gold_measured", "miniwob_scripted_measured"])
    def test_recorded_sessions_are_read_token_exactly(self, name: str) -> None:
        path = TRACES / f"{name}.jsonl"
        groups = read(path, num_groups=50)
        for group, line in zip(groups, path.read_text(encoding="utf-8").splitlines(), strict=False):
            turns = json.loads(line)["turns"]
            assert [(t["prompt_tokens"], t["prompt_tokens"] + t["output_tokens"]) for t in turns] == list(
                group.tasks[0].turn_spans
            )


class TestSynthetic:
    def test_a_group_shares_its_prompt_and_depends_on_seed_and_number_alone(self) -> None:
        groups = list(islice(synthetic(3, group_size=4, num_types=2), 6))
        assert groups == list(islice(synthetic(3, group_size=4, num_types=2), 6))
        assert groups != list(islice(synthetic(4, group_size=4, num_types=2), 6))
        assert all(len({task.prompt_tokens for task in group.tasks}) == 1 for group in groups)
        assert len({group.tasks[0].prompt_tokens for group in groups}) > 1
        assert [group.task_type for group in groups] == ["type0", "type1"] * 3
        # More tasks in a group do not change the ones that it had.
        assert next(synthetic(3, group_size=2, num_types=2)).tasks == groups[0].tasks[:2]

    def test_means_are_the_papers(self) -> None:
        tasks = [task for group in islice(synthetic(0, group_size=8, num_types=5), 1000) for task in group.tasks]
        # Cutting at 20 turns and 8192 tokens costs a little.
        assert sum(len(task.turns) for task in tasks) / len(tasks) == pytest.approx(ROUNDS, rel=0.03)
        assert sum(task.context_tokens for task in tasks) / len(tasks) == pytest.approx(TRAJECTORY_TOKENS, rel=0.03)
        assert max(len(task.turns) for task in tasks) == MAX_TURNS
        assert max(task.context_tokens for task in tasks) < MAX_CONTEXT_TOKENS

    def test_scaling_keeps_the_rounds(self) -> None:
        full, half = (next(synthetic(0, group_size=64, token_scale=scale)) for scale in (1.0, 0.5))
        assert [len(task.turns) for task in half.tasks] == [len(task.turns) for task in full.tasks]
        halved = sum(task.context_tokens for task in half.tasks) / sum(task.context_tokens for task in full.tasks)
        assert halved == pytest.approx(0.5, rel=0.01)
