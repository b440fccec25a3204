"""Paused tasks in the live coordinator, over real sockets: a scripted stand-in for the core says who pauses and who resumes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.integration.fake_ranks import TIMEOUTS, FakeRank, Run, config_of
from tiderl.coordinator.journal import journal_codec, read_journal
from tiderl.errors import EnvironmentFailure
from tiderl.scheduling import actions as ac
from tiderl.scheduling import events as ev
from tiderl.types import (
    FailureKind,
    GroupId,
    GroupSpec,
    PausedTask,
    Rank,
    SessionHandle,
    TaskId,
    TaskKind,
    Turn,
)
from tiderl.wire import messages as ms

#: The actor, and two rollout ranks.
ONE, TWO = Rank(1), Rank(2)
GROUP = GroupSpec(GroupId(3), TaskKind.TRAIN, "env", "train", 17, "type")
END = ac.Shutdown(0, "the script is over")
LEASE_S = 3600.0

Script = Callable[[ev.Event], list[ac.Action]]


def start(task_id: int, rank: Rank = ONE) -> ac.StartTask:
    return ac.StartTask(rank, TaskId(task_id), GROUP, 2)


def paused_task(task_id: int, lease_s: float = LEASE_S) -> PausedTask:
    """Forty tokens with every bit pattern that a float may have: what travels must not be rounded or normalized."""
    rng = np.random.default_rng(task_id)
    log_probs = rng.integers(0, 2**32, 40, dtype=np.uint64).astype(np.uint32).view(np.float32)
    return PausedTask(
        task_id=TaskId(task_id),
        group=GROUP,
        attempt=2,
        session=SessionHandle("http://10.0.0.5:8300", f"s{task_id}", 3, 300.0, lease_s),
        token_ids=rng.integers(0, 2**31, 40).astype(np.int32),
        generated=rng.random(40) < 0.5,
        log_probs=log_probs,
        weight_versions=rng.integers(-1, 5, 40).astype(np.int32),
        turns=(Turn(10, 15, 0.1, 1 / 3, 8), Turn(20, 30, 1e-9, 2.0, 10)),
        turn_start=35,
        generate_s=0.1 + 0.2,
        cached_tokens=20,
        played_s=12.34,
    )


class ScriptedCore:
    """What the coordinator needs of a core; its answers are the test's."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.roles: dict[Rank, Any] = {}
        self.rollout = SimpleNamespace(supply=SimpleNamespace(num_supplied=0), num_paused=0)
        self.training = SimpleNamespace(saving={}, on_disk=set(), waits_for=lambda: "the script")

    def handle(self, event: ev.Event, now_s: float) -> tuple[ac.Action, ...]:
        return tuple(self._script(event))

    def next_deadline_s(self) -> None:
        return None


class Sessions:
    """The environment servers: what each session hears. `lost` ones are unknown; renewals wait for `answering`."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, SessionHandle]] = []
        self.lost: set[str] = set()
        self.answering = asyncio.Event()
        self.answering.set()
        self.renewing = asyncio.Event()

    def adopt(self, handle: SessionHandle) -> SimpleNamespace:
        async def pause() -> None:
            self.renewing.set()
            await self.answering.wait()
            self.heard.append(("pause", handle))
            if handle.session_id in self.lost:
                raise EnvironmentFailure(f"there is no session {handle.session_id} here", retryable=True)

        async def end() -> None:
            self.heard.append(("end", handle))

        return SimpleNamespace(pause=pause, end=end)

    def ended(self) -> list[str]:
        return sorted(handle.session_id for what, handle in self.heard if what == "end")


@dataclass
class PausingRank(FakeRank):
    """Pauses what it is told to; says whatever else the test wants of it."""

    lease_s: float = LEASE_S
    pausing_at_the_end: tuple[int, ...] = ()
    load: ev.EngineLoad | None = None
    resumed: list[ms.ResumeMessage] = field(default_factory=list)

    async def on_StartTask(self, order: ac.StartTask) -> None:
        await self.say(ev.TurnStarted(order.task_id, self.rank, 8))
        if self.load is not None:
            await self.say(self.load)

    async def on_PauseTask(self, order: ac.PauseTask) -> None:
        await self.pause(order.task_id)

    async def pause(self, task_id: int) -> None:
        event = ev.TaskPaused(TaskId(task_id), self.rank, 40, 20, 8)
        await self.say(ms.PausedMessage(event, paused_task(task_id, self.lease_s)))

    async def on_ResumeMessage(self, message: ms.ResumeMessage) -> None:
        self.resumed.append(message)
        await self.say(ev.TurnStarted(message.task.task_id, self.rank, 40))

    async def on_CancelTask(self, order: ac.CancelTask) -> None:
        await self.say(ev.TaskFailed(order.task_id, self.rank, FailureKind.CANCELLED, "as told", False, 0, 0))

    async def on_Shutdown(self, order: ac.Shutdown) -> None:
        for task_id in self.pausing_at_the_end:
            await self.pause(task_id)
        await super().on_Shutdown(order)


class PausingRun(Run):
    """A run under a script that is asked for every event's actions."""

    make_rank = PausingRank
    ranks: list[PausingRank]  # type: ignore[assignment]

    def __init__(self, run_dir: Path, script: Script) -> None:
        super().__init__(run_dir, replace(config_of(), timeouts=replace(TIMEOUTS, shutdown_s=5.0)))
        self.make_core = lambda header: ScriptedCore(script)  # type: ignore[method-assign, return-value, assignment]
        self.sessions = Sessions()

    def journal(self) -> list[tuple[ev.Event, list[ac.Action]]]:
        codec = journal_codec()
        _, records = read_journal(self.run_dir / "journal.msgpack")
        return [(codec.unpack(r.event), [codec.unpack(a) for a in r.actions]) for r in records]

    def events(self, kind: type) -> list[Any]:
        return [event for event, _ in self.journal() if isinstance(event, kind)]


def bits(task: PausedTask) -> list[bytes]:
    """The task as it is on the wire: every field, every array."""
    codec = ms.wire_codec(1 << 20)
    return [bytes(frame) for frame in codec.encode(ms.ResumeMessage(ac.ResumeTask(ONE, task.task_id), task))]


def once_both_joined(actions: list[ac.Action]) -> Callable[[ev.Event], list[ac.Action]]:
    joined: set[Rank] = set()

    def answer(event: ev.Event) -> list[ac.Action]:
        if isinstance(event, ev.RankJoined):
            joined.add(event.rank)
            return actions if joined == {Rank(0), ONE, TWO} and event.rank in joined else []
        return []

    return answer


async def test_invariant_5_a_paused_task_reaches_another_rank_bit_for_bit(tmp_path: Path) -> None:
    first = once_both_joined([start(5), start(6), ac.PauseTask(ONE, TaskId(5)), ac.PauseTask(ONE, TaskId(6))])
    num_resumed = 0

    def script(event: ev.Event) -> list[ac.Action]:
        nonlocal num_resumed
        if isinstance(event, ev.TaskPaused):
            return [ac.ResumeTask(TWO if event.task_id == 5 else ONE, event.task_id)]
        if isinstance(event, ev.TurnStarted) and event.context_tokens == 40:
            num_resumed += 1
            return [END] if num_resumed == 2 else []
        return first(event)

    run = PausingRun(tmp_path, script)
    assert await run.to_the_end() == END
    (elsewhere,), (here,) = run.ranks[TWO].resumed, run.ranks[ONE].resumed
    assert elsewhere.action == ac.ResumeTask(TWO, TaskId(5)) and here.action == ac.ResumeTask(ONE, TaskId(6))
    assert bits(elsewhere.task) == bits(paused_task(5)) != bits(here.task) == bits(paused_task(6))
    assert elsewhere.task.session == paused_task(5).session and elsewhere.task.turns == paused_task(5).turns
    assert run.sessions.heard == [], "the session is another rank's now: it hears nothing of the coordinator"
    assert run.events(ev.TaskPaused) == [ev.TaskPaused(TaskId(n), ONE, 40, 20, 8) for n in (5, 6)]


async def test_paused_tasks_that_nobody_needs_are_ended(tmp_path: Path) -> None:
    first = once_both_joined([start(n) for n in (5, 6, 7)] + [ac.PauseTask(ONE, TaskId(n)) for n in (5, 6, 7)])
    num_paused = 0

    def script(event: ev.Event) -> list[ac.Action]:
        nonlocal num_paused
        if isinstance(event, ev.TaskPaused):
            num_paused += 1
            if num_paused == 3:
                return [ac.EndPaused((TaskId(5), TaskId(7)), "their group is complete"), ac.ResumeTask(TWO, TaskId(6))]
        if isinstance(event, ev.TurnStarted) and event.context_tokens == 40:
            return [END]
        return first(event)

    run = PausingRun(tmp_path, script)
    await run.to_the_end()
    assert run.sessions.heard and {what for what, _ in run.sessions.heard} == {"end"}
    assert run.sessions.ended() == ["s5", "s7"]
    assert {h.session_id: h for _, h in run.sessions.heard}["s5"] == paused_task(5).session


async def test_a_long_pause_is_renewed_and_a_session_that_is_gone_is_told_to_the_core(tmp_path: Path) -> None:
    first = once_both_joined([start(5), start(6), ac.PauseTask(ONE, TaskId(5)), ac.PauseTask(ONE, TaskId(6))])

    def script(event: ev.Event) -> list[ac.Action]:
        return [END] if isinstance(event, ev.PausedTaskLost) else first(event)

    run = PausingRun(tmp_path, script)
    run.ranks[ONE].lease_s = 0.3
    run.sessions.lost = {"s6"}
    await run.to_the_end()
    (lost,) = run.events(ev.PausedTaskLost)
    assert lost == ev.PausedTaskLost(TaskId(6), "there is no session s6 here")
    assert ("pause", paused_task(5, 0.3).session) in run.sessions.heard
    assert run.sessions.ended() == ["s5"], "the job's end ends the one that was left"


async def test_a_task_that_was_resumed_before_the_core_heard_of_its_loss_is_not_reported(tmp_path: Path) -> None:
    """Both decisions stand in one inbox: the fact that makes the core resume it, and the loss."""
    first = once_both_joined([start(6), ac.PauseTask(ONE, TaskId(6))])

    def script(event: ev.Event) -> list[ac.Action]:
        if isinstance(event, ev.EnvironmentCapacity) and event.num_sessions == 1:
            return [ac.ResumeTask(TWO, TaskId(6))]
        if isinstance(event, ev.TurnStarted) and event.context_tokens == 40:
            return [END]
        return first(event)

    run = PausingRun(tmp_path, script)
    run.ranks[ONE].lease_s = 0.3
    run.sessions.lost = {"s6"}
    async with run.coordinating() as coordinator, asyncio.timeout(40.0):
        lose = coordinator._lost_paused

        def lose_after_a_capacity(task_id: TaskId, detail: str) -> None:
            coordinator.tell(ev.EnvironmentCapacity(1))
            lose(task_id, detail)

        coordinator._paused._on_lost = lose_after_a_capacity
        await coordinator.run()
    assert run.events(ev.PausedTaskLost) == []
    assert len(run.ranks[TWO].resumed) == 1


async def test_invariant_2_orders_about_a_task_wait_with_it_while_its_lease_is_renewed(tmp_path: Path) -> None:
    first = once_both_joined([start(5), ac.PauseTask(ONE, TaskId(5))])
    resume = [ac.ResumeTask(TWO, TaskId(5)), ac.PauseTask(TWO, TaskId(5)), ac.CancelTask(TWO, TaskId(5)), start(9, TWO)]

    def script(event: ev.Event) -> list[ac.Action]:
        if isinstance(event, ev.EnvironmentCapacity) and event.num_sessions == 1:
            return list(resume)
        if isinstance(event, ev.TurnStarted) and event.task_id == 9:
            run.sessions.answering.set()
        return [END] if isinstance(event, ev.TaskFailed) else first(event)

    run = PausingRun(tmp_path, script)
    run.ranks[ONE].lease_s = 9.0  # a renewal comes after three seconds, and may take as long
    run.sessions.answering.clear()
    async with run.coordinating() as coordinator, asyncio.timeout(40.0):
        running = asyncio.create_task(coordinator.run())
        await run.sessions.renewing.wait()
        coordinator.tell(ev.EnvironmentCapacity(1))
        assert await running == END
    orders = [o.action if isinstance(o, ms.ResumeMessage) else o for o in run.ranks[TWO].orders]
    assert orders == [resume[3], *resume[:3], END]
    assert [what for what, _ in run.sessions.heard] == ["pause", "end"], "it was paused again, and ended with the job"


async def test_invariant_4_the_sessions_of_paused_tasks_end_with_the_job(tmp_path: Path) -> None:
    """Those that are paused, and those that a leaving rank still hands over."""
    first = once_both_joined([start(5), ac.PauseTask(ONE, TaskId(5))])
    run = PausingRun(tmp_path, lambda event: [END] if isinstance(event, ev.TaskPaused) else first(event))
    run.ranks[TWO].pausing_at_the_end = (8, 9)
    await run.to_the_end()
    assert run.sessions.ended() == ["s5", "s8", "s9"]


async def test_invariant_1_the_load_of_an_engine_is_a_fact_for_the_core(tmp_path: Path) -> None:
    load = ev.EngineLoad(TWO, 320, 3, 1, 1000, 4000, 2)

    first = once_both_joined([start(5, TWO)])
    run = PausingRun(tmp_path, lambda event: [END] if isinstance(event, ev.EngineLoad) else first(event))
    run.ranks[TWO].load = load
    await run.to_the_end()
    assert (load, [END]) in run.journal()


STEP_KEYS = ("reward", "success", "goodput", "ras", "step_s", "twt_s", "rwt_s")


@pytest.mark.parametrize("num_paused", [0, 4])
async def test_the_console_shows_how_many_tasks_are_paused(tmp_path: Path, num_paused: int) -> None:
    run = PausingRun(tmp_path, lambda event: [])
    async with run.coordinating() as coordinator:
        run.core.rollout.num_paused = num_paused  # type: ignore[misc]
        coordinator._housekeep()
        coordinator._reports.console.step(ac.ReportStep(0, dict.fromkeys(STEP_KEYS, 1.0)))
    assert ("· 4 paused" in run.out.getvalue()) == (num_paused == 4)
