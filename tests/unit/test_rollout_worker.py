"""The Rollout role among fakes: what it answers to orders, and what it says of its engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.loop_fakes import (
    CONFIG,
    PROMPT,
    STOP_ID,
    FakeChat,
    FakeEngine,
    FakeSession,
    FakeSessions,
    order_of,
    stepped,
)
from tiderl.clock import JobClock
from tiderl.config.schema import TimeoutsConfig
from tiderl.engines.base import EngineInfo, EngineStats
from tiderl.errors import EngineError, TideError
from tiderl.scheduling import actions as ac
from tiderl.scheduling import events as ev
from tiderl.types import FailureKind, Rank, Role, TaskId, WeightVersion
from tiderl.wire.messages import PausedMessage, ResumeMessage, TrajectoryMessage
from tiderl.worker.context import WorkerContext
from tiderl.worker.rollout import RolloutWorker
from tiderl.worker.seconds import RankMeter

STATS = EngineStats(
    num_running=3,
    num_waiting=1,
    num_held=2,
    used_blocks=5,
    total_generated_tokens=70,
    total_prefilled_tokens=100,
    total_cached_tokens=400,
    total_preemptions=6,
    total_steps=9,
    total_read_tokens=900,
    total_prefill_s=0.25,
    total_decode_s=0.5,
    total_late_s=0.125,
)
TASK = TaskId(11)


class Engine(FakeEngine):
    def start(self) -> EngineInfo:
        return EngineInfo(block_size_tokens=16, num_blocks=25, max_context_tokens=50)

    def stats(self) -> EngineStats:
        return STATS

    def shutdown(self) -> None:
        self.log.append("shutdown")


class Rank3:
    """A rollout rank and everything that it says."""

    def __init__(self, tmp_path: Path, engine: FakeEngine, session: FakeSession, rank: int = 3) -> None:
        config = replace(CONFIG, timeouts=TimeoutsConfig(heartbeat_s=0.01))
        self.said: list[Any] = []
        self._spoken = asyncio.Event()
        group: Any = object()
        self.meter = RankMeter(JobClock())
        context = WorkerContext(
            config,
            Rank(rank),
            tmp_path,
            None,
            torch.device("cpu"),
            None,
            None,
            group,
            self.hear,
            self.meter.clock,
            self.meter,
        )
        self.worker = RolloutWorker(context, engine, FakeSessions(session), FakeChat(), 100)  # type: ignore[arg-type]

    def hear(self, message: Any) -> None:
        self.said.append(message)
        self._spoken.set()

    async def says(self, kind: type) -> Any:
        async with asyncio.timeout(20.0):
            while not any(isinstance(message, kind) for message in self.said):
                self._spoken.clear()
                await self._spoken.wait()
        return next(message for message in self.said if isinstance(message, kind))


async def test_a_task_is_paused_on_one_rank_and_goes_on_on_another(tmp_path: Path) -> None:
    session = FakeSession([stepped(), stepped(done=True, reward=0.5)])
    engine = Engine([([40, STOP_ID], 1), None], partial=([41, 42], 1))
    here = Rank3(tmp_path, engine, session)
    await here.worker.start()
    here.worker.handle(order_of())
    await engine.hangs.wait()
    assert here.worker.phase == "1 tasks"
    here.worker.handle(ac.PauseTask(Rank(3), TASK))
    message = await here.says(PausedMessage)
    assert here.worker.phase == "idle"
    assert message.event == ev.TaskPaused(TASK, Rank(3), len(message.task.token_ids), 4, message.event.prefilled_tokens)
    assert message.task.token_ids.tolist() == [*PROMPT, 40, STOP_ID, 3, 3, 41, 42]

    other_engine = Engine([([43, STOP_ID], 2)])
    there = Rank3(tmp_path, other_engine, session, rank=4)
    there.worker.handle(ResumeMessage(ac.ResumeTask(Rank(4), TASK), message.task))
    done = await there.says(TrajectoryMessage)
    assert done.event.rank == 4
    assert done.trajectory.token_ids.tolist() == [*PROMPT, 40, STOP_ID, 3, 3, 41, 42, 43, STOP_ID]
    assert other_engine.prompts == [message.task.token_ids.tolist()]
    assert done.trajectory.group_id == order_of().group.group_id
    assert session.num_ends == 1
    assert [m for m in here.said + there.said if isinstance(m, ev.TaskFailed)] == []


async def test_a_task_that_cannot_be_resumed_is_answered_with_its_failure(tmp_path: Path) -> None:
    session = FakeSession([])
    engine = Engine([None], partial=([41], 0))
    here = Rank3(tmp_path, engine, session)
    here.worker.handle(order_of())
    await engine.hangs.wait()
    here.worker.handle(ac.PauseTask(Rank(3), TASK))
    task = (await here.says(PausedMessage)).task
    there = Rank3(tmp_path, Engine([None]), session, rank=4)
    there.worker.handle(ResumeMessage(ac.ResumeTask(Rank(4), TASK), task))
    there.worker.handle(ac.CancelTask(Rank(4), TASK))
    failed = await there.says(ev.TaskFailed)
    assert (failed.rank, failed.kind, failed.generated_tokens) == (4, FailureKind.CANCELLED, 1)


async def test_orders_for_a_task_whose_outcome_is_on_the_way_are_nothing(tmp_path: Path) -> None:
    here = Rank3(tmp_path, Engine([([STOP_ID], 0)]), FakeSession([stepped(done=True)]))
    here.worker.handle(order_of())
    await here.says(TrajectoryMessage)
    said = list(here.said)
    here.worker.handle(ac.PauseTask(Rank(3), TASK))
    here.worker.handle(ac.CancelTask(Rank(3), TASK))
    await asyncio.sleep(0)
    assert here.said == said


async def test_an_order_that_is_not_for_this_role_is_refused(tmp_path: Path) -> None:
    here = Rank3(tmp_path, Engine([]), FakeSession([]))
    with pytest.raises(TideError, match="rollout rank 3 got CloseStep, which it has no use for"):
        here.worker.handle(ac.CloseStep((Rank(3),), 0, 0))


async def test_what_the_rank_says_of_its_engine(tmp_path: Path) -> None:
    here = Rank3(tmp_path, Engine([]), FakeSession([]))
    assert here.worker.gauges() == {}
    assert await here.worker.start() == ev.RankJoined(Rank(3), Role.ROLLOUT, WeightVersion(0), 25, 16)
    assert here.worker.gauges() == {
        "running": 3, "waiting": 1, "held": 2, "used_blocks": 5, "num_blocks": 25, "generated_tokens": 70,
        "prefilled_tokens": 100, "cached_tokens": 400, "preemptions": 6,
        "steps": 9, "read_tokens": 900, "prefill_s": 0.25, "decode_s": 0.5, "late_s": 0.125,
    }  # fmt: skip
    running = asyncio.create_task(here.worker.run())
    load = await here.says(ev.EngineLoad)
    assert load == ev.EngineLoad(Rank(3), 5 * 16, 3, 1, 100, 400, 6)
    here.said.clear()
    await here.says(ev.EngineLoad)  # again and again
    running.cancel()
    await asyncio.wait((running,))
    assert await here.worker.stop() == 70


async def test_what_fails_in_a_task_ends_the_rank(tmp_path: Path) -> None:
    class Dead(Engine):
        async def generate(self, *arguments: Any, **settings: Any) -> Any:
            raise EngineError("the engine is dead")

    here = Rank3(tmp_path, Dead([]), FakeSession([]))
    await here.worker.start()
    running = asyncio.create_task(here.worker.run())
    here.worker.handle(order_of())
    with pytest.raises(EngineError, match="the engine is dead"):
        async with asyncio.timeout(20.0):
            await running


async def test_a_rank_that_leaves_cancels_its_tasks(tmp_path: Path) -> None:
    session, engine = FakeSession([]), Engine([None])
    here = Rank3(tmp_path, engine, session)
    await here.worker.start()
    here.worker.handle(order_of())
    await engine.hangs.wait()
    assert await here.worker.stop() == 70
    assert (await here.says(ev.TaskFailed)).kind is FailureKind.CANCELLED
    assert session.num_ends == 1
    assert engine.log[-1] == "shutdown"
