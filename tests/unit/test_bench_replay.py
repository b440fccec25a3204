"""`tools/bench_replay.py` with an engine that makes up tokens: a workload is played token-exactly, pauses included."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from tiderl.config.schema import (
    AgentConfig,
    CheckpointConfig,
    Config,
    EvalConfig,
    ModelConfig,
    RolloutConfig,
    ScheduleConfig,
    TrainConfig,
)
from tiderl.engines.base import EngineInfo, EngineStats, Generation, Sampling
from tiderl.errors import TideError
from tools.bench_replay import Replay, RunResult
from tools.bench_workload import GroupWork, TaskWork, TurnWork

BLOCK = 4
#: Two groups of three; every context has 46 tokens in the end.
TASK = TaskWork(16, (TurnWork(6, 4, 0.0), TurnWork(6, 4, 0.0), TurnWork(10, 0, 0.0)))
GROUPS = [GroupWork("t", (TASK,) * 3)] * 2
ENDS = {end for _, end in TASK.turn_spans}


def job(rollout: RolloutConfig) -> Config:
    return Config(
        model=ModelConfig(max_context_tokens=64),
        agent=AgentConfig(max_new_tokens=64),
        rollout=replace(rollout, kv_reserve=0.0),
        train=TrainConfig(steps=1, groups_per_step=2, group_size=3),
        schedule=ScheduleConfig(max_staleness=0),
        eval=EvalConfig(every=0),
        checkpoint=CheckpointConfig(every=0),
    )


@dataclass
class FakeEngine:
    """A token every few passes of the event loop, whatever is asked of it; all of a prompt is computed every time."""

    calls: list[tuple[str, list[int], int, str]] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)
    num_generated: int = 0
    num_prefilled: int = 0
    fails: bool = False

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], sampling: Sampling, *, hold: bool = False
    ) -> Generation:
        assert sampling.ignore_stop
        self.num_prefilled += len(prompt_token_ids)
        num_new = 0
        while num_new < sampling.max_new_tokens and request_id not in self.aborted:
            await asyncio.sleep(0)
            num_new += 1
        if self.fails:
            raise TideError("broken")
        finish = "aborted" if request_id in self.aborted else "length"
        self.aborted.discard(request_id)
        self.num_generated += num_new
        self.calls.append((request_id, list(prompt_token_ids), num_new, finish))
        made = np.arange(num_new)
        return Generation(made.astype(np.int32), -made.astype(np.float32), np.zeros(num_new, np.int32), 0, finish)

    def abort(self, request_id: str) -> None:
        self.aborted.add(request_id)

    def release(self, request_id: str, *, discard_from: int | None = None) -> None:
        pass

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0, 0, self.num_generated, self.num_prefilled, 0, 0, 0, 0, 0.0, 0.0, 0.0)


async def play(engine: FakeEngine, rollout: RolloutConfig, num_blocks: int) -> RunResult:
    info = EngineInfo(BLOCK, num_blocks, 64)
    replay = Replay(GROUPS, job(rollout), engine, info, vocab_size=1000)  # type: ignore[arg-type]
    return await replay.run(timeout_s=20.0)


async def test_tasks_are_played_token_exactly() -> None:
    engine = FakeEngine()
    result = await play(engine, RolloutConfig(scheduler="fixed", max_tasks_per_rank=2), 1000)
    assert {(len(prompt), len(prompt) + num_new) for _, prompt, num_new, _ in engine.calls} == set(TASK.turn_spans)
    assert (len(engine.calls), result.generated_tokens) == (6 * 3, 6 * 22)
    assert (result.num_pauses, result.most_tasks) == (0, 2)
    # A prompt for each group, and for each task 4 + 1 tokens in two turns; the engine has computed all prompts in full.
    assert result.prefill_first == 2 * 16 + 6 * 10
    assert result.prefill_repeated == 6 * (16 + 26 + 36) - result.prefill_first
    assert result.hit_rate == pytest.approx(0.0)


async def test_a_group_shares_its_prompt_and_nothing_else() -> None:
    engine = FakeEngine()
    await play(engine, RolloutConfig(scheduler="fixed", max_tasks_per_rank=6), 1000)
    assert len({tuple(prompt) for _, prompt, _, _ in engine.calls if len(prompt) == 16}) == 2
    assert len({tuple(prompt[22:26]) for _, prompt, _, _ in engine.calls if len(prompt) == 26}) == 6


async def test_paused_turns_go_on_where_they_were_cut() -> None:
    engine = FakeEngine()
    # Room for two whole contexts, and present lengths let three tasks in.
    result = await play(engine, RolloutConfig(footprint="paper"), 2 * 48 // BLOCK)
    assert result.num_pauses > 0
    assert result.generated_tokens == 6 * 22
    for _, prompt, num_new, finish in engine.calls:
        assert finish == "aborted" or len(prompt) + num_new in ENDS
    finals = [prompt + list(range(num_new)) for _, prompt, num_new, _ in engine.calls if len(prompt) + num_new == 46]
    assert len(finals) == 6


async def test_a_failed_task_ends_the_run() -> None:
    with pytest.raises(TideError, match="broken"):
        await play(FakeEngine(fails=True), RolloutConfig(), 1000)
