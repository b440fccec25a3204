"""The Rollout role: plays tasks with the engine, and takes new weights between two engine steps.

Invariants (tests/unit/test_rollout_worker.py, tests/integration/test_job.py):

1. Every `StartTask` and every `ResumeMessage` is answered once: with a trajectory, with the paused task, or with a typed failure.
2. Generation goes on during and after a weight sync; only the sync itself keeps the engine from stepping.
3. Weights that do not pass their checks never reach the engine; the rank says so in `SyncFinished`.

Source: paper §2.1, §5.2.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np

from tiderl.agent.loop import Chat, SessionSource, TaskPlayer
from tiderl.config.schema import Config
from tiderl.engines.base import Engine
from tiderl.errors import TideError, WaitTimeout, WeightMismatch
from tiderl.scheduling.actions import CancelTask, PauseTask, PrepareSync, StartSync, StartTask
from tiderl.scheduling.events import EngineLoad, RankJoined, SyncFinished, SyncReady, TaskFailed, TaskPaused
from tiderl.scheduling.ledger import Activity
from tiderl.types import PausedTask, Role, TaskId, Trajectory, WeightVersion
from tiderl.wire.messages import PausedMessage, ResumeMessage, TrajectoryMessage
from tiderl.worker.context import WorkerContext
from tiderl.worker.sync import WeightReceiver, canary_ids

logger = logging.getLogger(__name__)

#: Largest canary difference by dtype where `wire.canary_tolerance` is 0: rounding of two correct implementations.
_CANARY_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.3}


class RolloutWorker:
    """One rollout rank."""

    def __init__(
        self, context: WorkerContext, engine: Engine, sessions: SessionSource, chat: Chat, vocab_size: int
    ) -> None:
        assert context.sync_group is not None
        self._context = context
        self._engine = engine
        self._sessions = sessions
        self._chat = chat
        self._canary_ids = canary_ids(vocab_size)
        self._receiver = WeightReceiver(context.sync_group, context.sync_leader, context.device)
        self._players: dict[TaskId, TaskPlayer] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._syncing = False
        self._num_blocks = self._block_tokens = 0
        #: Seconds that the engine had worked when the rank last told of its own.
        self._engine_s = {Activity.PREFILL: 0.0, Activity.DECODE: 0.0}
        self.start_phase = "load"

    @property
    def phase(self) -> str:
        if self.start_phase:
            return self.start_phase
        if self._syncing:
            return "sync"
        return f"{len(self._players)} tasks" if self._players else "idle"

    async def start(self) -> RankJoined:
        info = await asyncio.to_thread(self._engine.start)
        self.start_phase = ""
        self._rest()
        self._num_blocks, self._block_tokens = info.num_blocks, info.block_size_tokens
        logger.info("engine: %d KV blocks of %d tokens", info.num_blocks, info.block_size_tokens)
        rank = self._context.rank
        return RankJoined(rank, Role.ROLLOUT, WeightVersion(0), self._num_blocks, self._block_tokens)

    async def run(self) -> None:
        """Report the engine's load until something has failed; raises what it was."""
        while True:
            await asyncio.wait({self._failed}, timeout=self._context.config.timeouts.heartbeat_s)
            if self._failed.done():
                return self._failed.result()
            self._context.emit(self._load())

    def handle(self, message: Any) -> None:
        if isinstance(message, StartTask):
            self._begin(message)
        elif isinstance(message, ResumeMessage):
            task = message.task
            self._begin(StartTask(message.action.rank, task.task_id, task.group, task.attempt), task)
        elif isinstance(message, PauseTask | CancelTask):
            player = self._players.get(message.task_id)
            if player is None:
                return  # its outcome is on the way already
            if isinstance(message, PauseTask):
                player.pause()
            else:
                player.cancel()
        elif isinstance(message, PrepareSync):
            self._spawn(self._come_to_the_door(message.version))
        elif isinstance(message, StartSync):
            self._spawn(self._sync(message))
        else:
            raise TideError(f"rollout rank {self._context.rank} got {type(message).__name__}, which it has no use for")

    def gauges(self) -> dict[str, float]:
        if self.start_phase:
            return {}
        stats = self._engine.stats()
        return {
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "held": stats.num_held,
            "used_blocks": stats.used_blocks,
            "num_blocks": self._num_blocks,
            "generated_tokens": stats.total_generated_tokens,
            "prefilled_tokens": stats.total_prefilled_tokens,
            "cached_tokens": stats.total_cached_tokens,
            "preemptions": stats.total_preemptions,
            "steps": stats.total_steps,
            "read_tokens": stats.total_read_tokens,
            "prefill_s": stats.total_prefill_s,
            "decode_s": stats.total_decode_s,
            "late_s": stats.total_late_s,
        }

    async def stop(self) -> int:
        for player in self._players.values():
            player.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=self._context.config.timeouts.shutdown_s / 2)
        self._count_engine_seconds()
        total = self._engine.stats().total_generated_tokens
        try:
            await asyncio.to_thread(self._engine.shutdown)
        except WaitTimeout as error:
            logger.warning("the engine is left to the end of the process: %s", error)
        return total

    def _load(self) -> EngineLoad:
        stats = self._engine.stats()
        return EngineLoad(
            rank=self._context.rank,
            used_tokens=stats.used_blocks * self._block_tokens,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            total_prefilled_tokens=stats.total_prefilled_tokens,
            total_cached_tokens=stats.total_cached_tokens,
            total_preemptions=stats.total_preemptions,
        )

    def _begin(self, order: StartTask, paused: PausedTask | None = None) -> None:
        context = self._context
        player = TaskPlayer(
            order, context.config, self._engine, self._sessions, self._chat, context.emit, context.clock, paused=paused
        )
        self._players[order.task_id] = player
        self._rest()
        self._spawn(self._play(order.task_id, player))

    async def _play(self, task_id: TaskId, player: TaskPlayer) -> None:
        outcome = await player.play()
        del self._players[task_id]
        self._rest()
        if isinstance(outcome, TaskFailed):
            self._context.emit(outcome)
            return
        event, record = outcome
        if isinstance(event, TaskPaused):
            assert isinstance(record, PausedTask)
            self._context.emit(PausedMessage(event, record))
        else:
            assert isinstance(record, Trajectory)
            self._context.emit(TrajectoryMessage(event, record))

    async def _come_to_the_door(self, version: WeightVersion) -> None:
        """Ready means that the device thread answers: one that hangs would leave the others alone in the broadcast."""
        await self._engine.submit(lambda: None)
        self._context.emit(SyncReady(self._context.rank, version))

    async def _sync(self, order: StartSync) -> None:
        self._syncing = True
        try:
            event = await self._engine.submit(lambda: self._receive(order.version))
        finally:
            self._syncing = False
        self._count_engine_seconds()
        self._context.tell_seconds()
        self._context.emit(event)

    def _receive(self, version: WeightVersion) -> SyncFinished:
        """Device thread: take part in the broadcast, check, load, and hold the engine's log-probs against the trainer's."""
        with self._context.meter.work(Activity.SYNC):
            return self._receive_in_time(version)

    def _receive_in_time(self, version: WeightVersion) -> SyncFinished:
        rank, now_s = self._context.rank, self._context.clock.now_s
        began_s = now_s()
        try:
            received = self._receiver.receive(self._engine.expected_weights())
            transferred_s = now_s()
            self._engine.update_weights(received.weights, version)
        except WeightMismatch as error:
            return SyncFinished(rank, version, False, str(error), now_s() - began_s, 0.0, 0.0)
        gap = float(np.abs(self._engine.score(self._canary_ids) - received.canary).max())
        tolerance = _tolerance(self._context.config)
        ok = gap <= tolerance
        detail = "" if ok else f"the canary's log-probs differ by {gap:.2e}, wire.canary_tolerance is {tolerance:g}"
        return SyncFinished(rank, version, ok, detail, transferred_s - began_s, now_s() - transferred_s, gap)

    def _rest(self) -> None:
        """What an idle engine waits for."""
        self._context.meter.rest(Activity.ENV_WAIT if self._players else Activity.WEIGHT_WAIT)

    def _count_engine_seconds(self) -> None:
        """The engine works only while tasks are here: its steps' seconds were counted as waiting for environments so far."""
        stats = self._engine.stats()
        worked = {Activity.PREFILL: stats.total_prefill_s, Activity.DECODE: stats.total_decode_s}
        self._context.meter.move(Activity.ENV_WAIT, {a: s - self._engine_s[a] for a, s in worked.items()})
        self._engine_s = worked

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.ensure_future(coroutine)
        self._running.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._failed.done():
            self._failed.set_exception(error)


def _tolerance(config: Config) -> float:
    return config.wire.canary_tolerance or _CANARY_TOLERANCE[config.model.dtype]
