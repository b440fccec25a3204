"""The live coordinator over real sockets on loopback, with ranks that are coroutines of the same process: no torch, no engine."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from tests.scheduling.driver import small_config, trained
from tiderl.config.schema import Config, TimeoutsConfig
from tiderl.coordinator import checkpoints
from tiderl.coordinator.journal import Header, JournalWriter, journal_codec, read_journal
from tiderl.coordinator.replay import replay
from tiderl.coordinator.server import Coordinator
from tiderl.coordinator.stream import TaskStream
from tiderl.observe.console import Console
from tiderl.observe.metrics import MetricsWriter
from tiderl.scheduling import actions as ac
from tiderl.scheduling import events as ev
from tiderl.types import FailureKind, Finish, Rank, Role, Trajectory, WeightVersion
from tiderl.wire import messages as ms
from tiderl.wire.sockets import CoordinatorSocket, JobKeys, WorkerSocket

TIMEOUTS = TimeoutsConfig(start_s=30.0, heartbeat_s=0.1, lost_s=30.0, shutdown_s=1.0, step_s=20.0, sync_s=20.0)
NUM_CONTEXT_TOKENS = 12
FIRST_VERSION = WeightVersion(0)


def config_of(**changes: Any) -> Config:
    return replace(small_config(**changes), timeouts=TIMEOUTS)


def trajectory_of(order: ac.StartTask, version: int) -> Trajectory:
    n = NUM_CONTEXT_TOKENS
    generated = np.arange(n) >= n - 4
    return Trajectory(
        task_id=order.task_id,
        group_id=order.group.group_id,
        kind=order.group.kind,
        token_ids=np.full(n, order.task_id, np.int32),
        generated=generated,
        log_probs=np.where(generated, -1.0, 0.0).astype(np.float32),
        weight_versions=np.where(generated, version, -1).astype(np.int32),
        turns=(),
        images=(),
        reward=float(order.task_id % 2),
        success=bool(order.task_id % 2),
        finish=Finish.DONE,
    )


@dataclass
class FakeRank:
    """A worker process without a device. `habits` are the ways in which it may misbehave."""

    rank: Rank
    config: Config
    habits: frozenset[str] = frozenset()
    version: WeightVersion = FIRST_VERSION
    orders: list[Any] = field(default_factory=list)
    num_generated: int = 0
    left: bool = False
    is_closing: bool = False
    abandoned: bool = False
    third_step: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_actor(self) -> bool:
        return self.rank < self.config.roles.num_actors

    async def live(self, port: int, keys: JobKeys) -> None:
        self.socket = WorkerSocket(self.rank)
        self.codec = ms.wire_codec(self.config.wire.max_message_bytes)
        await self.socket.connect(f"127.0.0.1:{port}", keys.public_for_clients(), timeout_s=10.0)
        self.beating = asyncio.ensure_future(self.beat())
        try:
            await self.say(ms.Hello(self.rank, "localhost", 1))
            if "talk nonsense" in self.habits:
                await self.socket.send([msgpack.packb(["Nonsense", []])], timeout_s=5.0)
            role = Role.ACTOR if self.is_actor else Role.ROLLOUT
            await self.say(ev.RankJoined(self.rank, role, WeightVersion(0), 0 if self.is_actor else 400))
            while not self.left:
                await self.obey(self.codec.decode(await self.socket.recv()))
        finally:
            self.is_closing = True
            self.beating.cancel()
            await asyncio.wait([self.beating])
            await self.socket.close()

    async def beat(self) -> None:
        while True:
            await self.say(ms.Heartbeat(self.rank, "busy", 0.0, {"used_blocks": 1.0, "num_blocks": 4.0}))
            await asyncio.sleep(TIMEOUTS.heartbeat_s)

    async def say(self, message: Any) -> None:
        await self.socket.send(self.codec.encode(message), timeout_s=5.0)

    async def obey(self, order: Any) -> None:
        self.orders.append(order)
        if "freeze" in self.habits:
            self.beating.cancel()
            await asyncio.sleep(60.0)
        name = type(order).__name__
        if f"hang at {name}" in self.habits:
            await asyncio.sleep(60.0)
        await getattr(self, f"on_{name}")(order)

    async def on_StartTask(self, order: ac.StartTask) -> None:
        if "fail first attempts" in self.habits and order.attempt == 1:
            await self.say(ev.TaskFailed(order.task_id, self.rank, FailureKind.ENVIRONMENT, "flaky", True, 0))
            return
        self.num_generated += 4
        await self.say(ev.TurnStarted(order.task_id, self.rank, 8))
        await self.say(ev.TurnEnded(order.task_id, self.rank, NUM_CONTEXT_TOKENS, 4))
        trajectory = trajectory_of(order, self.version)
        finished = ev.TaskFinished(
            order.task_id,
            self.rank,
            NUM_CONTEXT_TOKENS,
            4,
            1,
            self.version,
            self.version,
            trajectory.reward,
            trajectory.success,
        )
        if "lie" in self.habits:
            finished = replace(finished, generated_tokens=1)
        await self.say(ms.TrajectoryMessage(finished, trajectory))

    async def on_CancelTask(self, order: ac.CancelTask) -> None:
        """The task has ended already."""

    async def on_OpenStep(self, order: ac.OpenStep) -> None:
        self.abandoned = False

    async def on_MicroBatchMessage(self, message: ms.MicroBatchMessage) -> None:
        assert tuple(t.task_id for t in message.trajectories) == message.action.task_ids
        for trajectory in message.trajectories:
            assert trajectory.token_ids.tolist() == [trajectory.task_id] * NUM_CONTEXT_TOKENS

    async def on_AbandonStep(self, order: ac.AbandonStep) -> None:
        self.abandoned = True

    async def on_CloseStep(self, order: ac.CloseStep) -> None:
        if "run out of memory" in self.habits:
            await self.say(ms.RankFailed(self.rank, "out of memory; lower trainer.max_micro_batch_tokens", True))
            return
        self.version = WeightVersion(self.version + (not self.abandoned))
        await self.say(trained(order.step, self.rank, self.version, not self.abandoned, self.abandoned))
        if order.step == 2:
            self.third_step.set()

    async def on_PrepareSync(self, order: ac.PrepareSync) -> None:
        await self.say(ev.SyncReady(self.rank, order.version))

    async def on_StartSync(self, order: ac.StartSync) -> None:
        self.version = order.version
        await self.say(ev.SyncFinished(self.rank, order.version, True, "", 0.0, 0.0, 0.0))

    async def on_SaveCheckpoint(self, order: ac.SaveCheckpoint) -> None:
        if "cannot save" in self.habits and not order.final:
            await self.say(ev.CheckpointSaved(order.step, order.final, self.rank, False, "disk full"))
        else:
            await self.say(ev.CheckpointSaved(order.step, order.final, self.rank, True, ""))

    async def on_Shutdown(self, order: ac.Shutdown) -> None:
        if "no farewell" not in self.habits:
            await self.say(ms.Farewell(self.rank, self.num_generated))
            self.left = True


class Run:
    """A whole run: `end` is the core's last word, `ranks` remember their orders."""

    def __init__(self, run_dir: Path, config: Config, num_rollout: int = 2, **habits: str) -> None:
        """`habits` by rank: `r1="no farewell"`."""
        self.run_dir, self.config = run_dir, config
        world_size = config.roles.num_actors + num_rollout
        self.ranks = [FakeRank(Rank(r), config, frozenset({habits.get(f"r{r}", "")})) for r in range(world_size)]
        self.out = io.StringIO()

    @contextlib.asynccontextmanager
    async def coordinating(self) -> AsyncIterator[Coordinator]:
        """The coordinator listens and all ranks live; call its `run`."""
        keys = JobKeys.generate()
        wire = CoordinatorSocket(keys)
        header = Header(self.config, len(self.ranks), None)
        self.core = header.fresh_core()
        stream = TaskStream(env="env", train_split="train", num_train=50, eval_split="test", seed=3)
        metrics = MetricsWriter(self.run_dir / "metrics.jsonl")
        console = Console("line", self.config.train.steps, self.out)
        lives: list[asyncio.Task[None]] = []
        try:
            port = await wire.bind("127.0.0.1")
            with JournalWriter(self.run_dir / "journal.msgpack", header) as journal:
                self.coordinator = Coordinator(
                    self.config, self.core, stream, wire, journal, metrics, console, self.run_dir, len(self.ranks)
                )
                lives = [asyncio.create_task(rank.live(port, keys)) for rank in self.ranks]
                self.coordinator.tell(ev.EnvironmentCapacity(64))
                yield self.coordinator
        finally:
            for rank, life in zip(self.ranks, lives, strict=False):
                # A socket that is being closed must not be interrupted in that.
                if not rank.is_closing:
                    life.cancel()
            self.errors = [e for e in await asyncio.gather(*lives, return_exceptions=True) if isinstance(e, Exception)]
            metrics.close()
            await wire.close()

    async def to_the_end(self, timeout_s: float = 40.0) -> ac.Shutdown:
        async with self.coordinating() as coordinator, asyncio.timeout(timeout_s):
            end = await coordinator.run()
        assert not self.errors, self.errors
        return end

    def replayed(self) -> tuple[list[ev.Event], list[ac.Action]]:
        """Events and actions of the journal, after a fresh core has decided all of it again."""
        header, records = read_journal(self.run_dir / "journal.msgpack")
        found = list(records)
        comparison = replay(header.fresh_core(), found)
        assert comparison.differences == []
        codec = journal_codec()
        return [codec.unpack(r.event) for r in found], [codec.unpack(a) for r in found for a in r.actions]

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]


async def test_invariant_1_a_whole_job_is_in_the_journal_and_decides_the_same_again(tmp_path: Path) -> None:
    config = config_of(steps=3, groups_per_step=2, group_size=2, num_actors=2, eval_every=2, checkpoint_every=1)
    run = Run(tmp_path, config, r3="fail first attempts")
    end = await run.to_the_end()
    assert end == ac.Shutdown(0, "all 3 steps are done")
    events, actions = run.replayed()
    assert actions[-1] == end
    steps = [line for line in run.lines() if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [0, 1, 2]
    assert [line["version"] for line in run.lines() if line["kind"] == "eval"] == [0, 2, 3]
    assert [a.metrics["reward"] for a in actions if isinstance(a, ac.ReportStep)] == [line["reward"] for line in steps]
    # What the ranks said is what the core heard, and nothing was lost at the end.
    made = sum(rank.num_generated for rank in run.ranks)
    balances = run.core.rollout.ledger.balances()
    assert balances["generated"] == made == run.coordinator.engine_generated_tokens
    assert balances["trained"] == 3 * 2 * 2 * 4
    assert balances["evaluated"] == 3 * 2 * 4
    assert sum(isinstance(e, ev.TaskFailed) for e in events) > 0
    assert sum(line.startswith("step ") for line in run.out.getvalue().splitlines()) == 3


async def test_invariant_2_ranks_get_their_orders_in_the_cores_order(tmp_path: Path) -> None:
    run = Run(tmp_path, config_of(steps=2, num_actors=2, checkpoint_every=1))
    await run.to_the_end()
    _, actions = run.replayed()
    for rank in run.ranks:
        told = [a for a in actions if rank.rank in getattr(a, "ranks", ()) or getattr(a, "rank", None) == rank.rank]
        got = [order.action if isinstance(order, ms.MicroBatchMessage) else order for order in rank.orders]
        assert got == [*told, actions[-1]], "everything, once, in order, and the end"
        if rank.is_actor:
            names = [type(o).__name__ for o in rank.orders]
            assert names.index("OpenStep") < names.index("MicroBatchMessage") < names.index("CloseStep")


async def test_checkpoints_are_complete_and_the_newest_are_kept(tmp_path: Path) -> None:
    config = config_of(steps=5, checkpoint_every=1)
    config = replace(config, checkpoint=replace(config.checkpoint, keep=2))
    await Run(tmp_path, config).to_the_end()
    kept = sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir())
    assert kept[-1] == "step_000005" and len(kept) == 2
    state = checkpoints.read_scheduler_state(checkpoints.find_checkpoint(tmp_path))
    assert (state["version"], state["next_step"], state["open_groups"]) == (5, 5, [])


async def test_a_checkpoint_that_lacks_a_part_is_not_marked_complete(tmp_path: Path) -> None:
    run = Run(tmp_path, config_of(steps=2, num_actors=2, checkpoint_every=1), r1="cannot save")
    assert (await run.to_the_end()).exit_code == 0
    assert not (checkpoints.checkpoint_dir(tmp_path, 1) / "COMPLETE").exists()
    assert checkpoints.find_checkpoint(tmp_path).name == "step_000002"
    assert "rank 1 could not save step 1: disk full" in run.out.getvalue()


async def test_invariant_3_a_silent_rank_is_lost_and_the_others_leave(tmp_path: Path) -> None:
    """It is connected, and takes its orders; but it says nothing, not even that it lives."""
    config = config_of(steps=2)
    config = replace(config, timeouts=replace(TIMEOUTS, lost_s=2.0))
    run = Run(tmp_path, config, r2="freeze")
    end = await run.to_the_end()
    assert end.exit_code == 1
    assert end.reason.startswith("rank 2 (rollout) is lost: silent for")
    assert "timeouts.lost_s = 2" in end.reason and "'busy'" in end.reason
    assert any(isinstance(event, ev.RankLost) for event in run.replayed()[0])
    for rank in run.ranks[:2]:
        assert rank.orders[-1] == end and rank.left


async def test_a_rank_that_beats_but_does_not_come_to_the_sync_is_named_at_the_deadline(tmp_path: Path) -> None:
    config = config_of(steps=2)
    config = replace(config, timeouts=replace(TIMEOUTS, sync_s=0.5))
    run = Run(tmp_path, config, r1="hang at PrepareSync")
    end = await run.to_the_end()
    assert end.exit_code == 1
    assert "ranks [1]" in end.reason and "[timeouts]" in end.reason
    assert isinstance(run.replayed()[0][-1], ev.Tick)


async def test_invariant_4_the_wait_for_a_farewell_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path, config_of(steps=1), r2="no farewell")
    with caplog.at_level(logging.WARNING):
        end = await run.to_the_end()
    assert end.exit_code == 0
    assert run.ranks[2].orders[-1] == end, "it was told, and did not answer"
    assert "ranks [2] did not say farewell within timeouts.shutdown_s" in caplog.text
    assert [rank.left for rank in run.ranks] == [True, True, False]


async def test_a_stop_saves_what_was_done(tmp_path: Path) -> None:
    run = Run(tmp_path, config_of(steps=100_000))
    async with run.coordinating() as coordinator, asyncio.timeout(30):
        ending = asyncio.ensure_future(coordinator.run())
        await run.ranks[0].third_step.wait()
        coordinator.tell(ev.StopRequested("got SIGTERM"))
        end = await ending
    assert end == ac.Shutdown(0, "got SIGTERM")
    assert not run.errors
    run.replayed()
    state = checkpoints.read_scheduler_state(checkpoints.find_checkpoint(tmp_path))
    assert state["version"] >= 2
    trained_groups = state["num_supplied"] - len(state["open_groups"])
    assert trained_groups == state["version"] * run.config.train.groups_per_step


async def test_a_rank_that_fails_says_why_and_whose_fault_it_is(tmp_path: Path) -> None:
    run = Run(tmp_path, config_of(steps=2), r0="run out of memory")
    end = await run.to_the_end()
    assert end == ac.Shutdown(1, "rank 0 (actor) is lost: out of memory; lower trainer.max_micro_batch_tokens")
    assert run.coordinator.user_error
    assert "! rank 0 (actor) is lost: out of memory" in run.out.getvalue()


async def test_a_rank_that_contradicts_the_scheduler_ends_the_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, config_of(steps=2), r1="lie")
    with caplog.at_level(logging.ERROR):
        end = await run.to_the_end()
    assert end.exit_code == 1
    assert "a rank and the scheduler disagree" in end.reason and "1 generated tokens, 4 were reported" in end.reason
    run.replayed()


async def test_a_rank_that_cannot_be_understood_is_lost(tmp_path: Path) -> None:
    """Whatever it meant to say, the core would wait for it without end."""
    end = await Run(tmp_path, config_of(steps=1), r1="talk nonsense").to_the_end()
    assert end.exit_code == 1
    assert "rank 1" in end.reason and "'Nonsense' is not a registered message" in end.reason
