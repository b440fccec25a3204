"""A whole job of the live coordinator over real sockets on loopback, with ranks that are coroutines of the same process."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from tests.scheduling.driver import small_config, trained
from tiderl.config.schema import Config, TimeoutsConfig
from tiderl.coordinator.journal import Header, JournalWriter, journal_codec, read_journal
from tiderl.coordinator.load import LoadMeter
from tiderl.coordinator.replay import replay
from tiderl.coordinator.reports import Reports
from tiderl.coordinator.server import Coordinator
from tiderl.coordinator.stream import TaskStream, TaskTypes
from tiderl.observe.console import Console
from tiderl.observe.metrics import MetricsWriter
from tiderl.scheduling import actions as ac
from tiderl.scheduling import events as ev
from tiderl.scheduling.core import Core
from tiderl.types import FailureKind, Finish, Rank, Role, SessionHandle, Trajectory, WeightVersion
from tiderl.wire import messages as ms
from tiderl.wire.sockets import ClientSocket, JobKeys, ServerSocket

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
    #: What it has told of its time, and when (a rank that is busy with one thing after the other).
    seconds: dict[str, float] = field(default_factory=dict)
    told_s: float = field(default_factory=time.monotonic)

    @property
    def is_actor(self) -> bool:
        return self.rank < self.config.roles.num_actors

    async def live(self, port: int, keys: JobKeys) -> None:
        self.socket = ClientSocket(self.rank)
        self.codec = ms.wire_codec(self.config.wire.max_message_bytes)
        await self.socket.connect(f"127.0.0.1:{port}", keys.public_for_clients(), timeout_s=10.0)
        self.beating = asyncio.ensure_future(self.beat())
        try:
            await self.say(ms.Hello(self.rank, "localhost", 1))
            if "talk nonsense" in self.habits:
                await self.socket.send([msgpack.packb(["Nonsense", []])], timeout_s=5.0)
            is_ref = not self.is_actor and self.rank < self.config.roles.num_actors + self.config.roles.num_ref
            role = Role.ACTOR if self.is_actor else Role.REF if is_ref else Role.ROLLOUT
            num_kv_blocks = 25 if role is Role.ROLLOUT else 0
            await self.say(ev.RankJoined(self.rank, role, WeightVersion(0), num_kv_blocks, 16))
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
            await self.say(ev.TaskFailed(order.task_id, self.rank, FailureKind.ENVIRONMENT, "flaky", True, 0, 0))
            return
        self.num_generated += 4
        await self.say(ev.TurnStarted(order.task_id, self.rank, 8))
        await self.say(ev.TurnEnded(order.task_id, self.rank, NUM_CONTEXT_TOKENS, 4, 8))
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

    async def on_PauseTask(self, order: ac.PauseTask) -> None:
        """The same."""

    async def on_OpenStep(self, order: ac.OpenStep) -> None:
        self.abandoned = False

    async def on_MicroBatchMessage(self, message: ms.MicroBatchMessage) -> None:
        assert tuple(t.task_id for t in message.trajectories) == message.action.task_ids
        for trajectory in message.trajectories:
            assert trajectory.token_ids.tolist() == [trajectory.task_id] * NUM_CONTEXT_TOKENS
        if not self.abandoned:
            action, num_tokens = message.action, sum(t.num_tokens for t in message.trajectories)
            await self.say(
                ev.MicroBatchTrained(
                    self.rank, action.step, action.micro_batch_id, num_tokens, 0.0, 0.0, 0.01, 0.02, 0.0
                )
            )

    async def on_ScoreMessage(self, message: ms.ScoreMessage) -> None:
        if "die scoring" in self.habits:
            self.left = True
            return
        action, num_tokens = message.action, sum(t.num_tokens for t in message.trajectories)
        assert tuple(t.task_id for t in message.trajectories) == action.task_ids
        await self.say(ev.ReferenceScored(self.rank, action.step, action.micro_batch_id, num_tokens, 0.01))

    async def on_FinishColocated(self, order: ac.FinishColocated) -> None:
        """A fake actor needs no log-probs."""

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

    async def say_seconds(self, activity: str) -> None:
        """All time since the last word of this kind was `activity`."""
        now_s = time.monotonic()
        self.seconds[activity] = self.seconds.get(activity, 0.0) + now_s - self.told_s
        self.told_s = now_s
        await self.say(ev.SecondsSpent(self.rank, dict(self.seconds)))

    async def on_PrepareSync(self, order: ac.PrepareSync) -> None:
        await self.say(ev.SyncReady(self.rank, order.version))

    async def on_StartSync(self, order: ac.StartSync) -> None:
        self.version = order.version
        await self.say_seconds("sync")
        await self.say(ev.SyncFinished(self.rank, order.version, True, "", 0.0, 0.0, 0.0))

    async def on_SaveCheckpoint(self, order: ac.SaveCheckpoint) -> None:
        if "cannot save" in self.habits and not order.final:
            await self.say(ev.CheckpointSaved(order.step, order.final, self.rank, False, "disk full"))
        else:
            await self.say(ev.CheckpointSaved(order.step, order.final, self.rank, True, ""))

    async def on_Shutdown(self, order: ac.Shutdown) -> None:
        if "no farewell" not in self.habits:
            await self.say_seconds("shutdown")
            await self.say(ms.Farewell(self.rank, self.num_generated))
            self.left = True


class NoSessions:
    """For runs in which no task is paused."""

    def adopt(self, handle: SessionHandle) -> Any:
        raise AssertionError(f"nobody has paused {handle}")


class Run:
    """A whole run: `end` is the core's last word, `ranks` remember their orders."""

    make_core: Callable[[Header], Core] = staticmethod(Header.fresh_core)
    make_rank: Callable[..., FakeRank] = FakeRank

    def __init__(self, run_dir: Path, config: Config, num_rollout: int = 2, **habits: str) -> None:
        """`habits` by rank: `r1="no farewell"`."""
        self.run_dir, self.config = run_dir, config
        world_size = config.roles.num_actors + config.roles.num_ref + num_rollout
        self.ranks = [self.make_rank(Rank(r), config, frozenset({habits.get(f"r{r}", "")})) for r in range(world_size)]
        self.out = io.StringIO()
        self.sessions: Any = NoSessions()

    @contextlib.asynccontextmanager
    async def coordinating(self) -> AsyncIterator[Coordinator]:
        """The coordinator listens and all ranks live; call its `run`."""
        keys = JobKeys.generate()
        wire = ServerSocket(keys)
        header = Header(self.config, len(self.ranks), None)
        self.core = self.make_core(header)
        types = {"train": TaskTypes([("type", 50)]), "test": TaskTypes([("type", 50)])}
        stream = TaskStream(env="env", train_split="train", num_train=50, eval_split="test", seed=3, types=types)
        metrics = MetricsWriter(self.run_dir / "metrics.jsonl")
        reports = Reports(metrics, Console("line", self.config.train.steps, self.out), LoadMeter(), None)
        lives: list[asyncio.Task[None]] = []
        try:
            port = await wire.bind("127.0.0.1")
            with JournalWriter(self.run_dir / "journal.msgpack", header) as journal:
                shared = (stream, wire, journal, reports, self.sessions)
                self.coordinator = Coordinator(self.config, self.core, *shared, self.run_dir, len(self.ranks))
                lives = [asyncio.create_task(rank.live(port, keys)) for rank in self.ranks]
                self.coordinator.tell(ev.EnvironmentCapacity(64))
                yield self.coordinator
        finally:
            for rank, life in zip(self.ranks, lives, strict=False):
                # A socket that is being closed must not be interrupted in that.
                if not rank.is_closing:
                    life.cancel()
            self.errors = [e for e in await asyncio.gather(*lives, return_exceptions=True) if isinstance(e, Exception)]
            reports.close()
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
