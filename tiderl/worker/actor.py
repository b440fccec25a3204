"""The Actor role: trains on what it is assigned, with reference log-probs from its own rank or from Ref ranks.

Orders come in one stream and are worked off one after the other on the device thread; within an open step `ActorStep` says what is
next. Log-probs of Ref ranks come past that stream, on the event loop, while the device thread may be deep in a backward.

Invariants (tests/unit/test_actor_worker.py, tests/integration/test_job.py):

1. Collectives happen in the order of the coordinator's orders, which is the same on all actors.
2. An abandoned step still goes through `end_step` on every actor: nobody is left alone in a collective.
3. A checkpoint is reported only when it is on disk.
4. The reference is brought to the device at most once for everything that waits (colocated), and leaves it before the actor's own
   passes begin, unless it stays there for good.
5. Every micro-batch is answered with `MicroBatchTrained`, every step with `StepTrained`.

Source: paper §5.1 (RA2P), §5.2 (sync_params).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch

from tiderl.errors import TideError
from tiderl.scheduling.actions import (
    AbandonStep,
    CloseStep,
    FinishColocated,
    OpenStep,
    PrepareSync,
    SaveCheckpoint,
    StartSync,
)
from tiderl.scheduling.events import CheckpointSaved, RankJoined, SyncFinished, SyncReady
from tiderl.scheduling.ledger import Activity
from tiderl.trainers.base import LogProbs, Reference, StepResult, Trainer
from tiderl.trainers.reference import swap_policy
from tiderl.types import MicroBatch, MicroBatchId, Pipelining, Role, Trajectory, WeightVersion
from tiderl.wire.messages import MicroBatchMessage, ReferenceMessage
from tiderl.worker.actor_step import ActorStep, AwaitLogProbs, Backward, Forward, Idle, Next, Score
from tiderl.worker.context import WorkerContext
from tiderl.worker.reference_channel import ReferenceListener
from tiderl.worker.role_device import RoleDevice
from tiderl.worker.step_tally import StepTally
from tiderl.worker.sync import WeightSender, canary_ids

logger = logging.getLogger(__name__)


class ActorWorker:
    """One actor rank. `reference`: where there is a KL penalty. `listener`: where there are Ref ranks; it is open already."""

    def __init__(
        self,
        context: WorkerContext,
        trainer: Trainer,
        vocab_size: int,
        *,
        reference: Reference | None = None,
        listener: ReferenceListener | None = None,
    ) -> None:
        self._context = context
        self._trainer = trainer
        self._reference = reference
        self._listener = listener
        swap = context.config.trainer.swap
        #: Where the reference is between two uses; not known before a step has shown how much memory the actor itself takes.
        self._swap: Literal["offload", "resident"] | None = None if swap == "auto" else swap
        self._canary_ids = canary_ids(vocab_size)
        self._device = RoleDevice(f"actor-{context.rank}", context.meter)
        self._orders: deque[Any] = deque()
        #: Something has come that the device may have to do.
        self._arrived = asyncio.Event()
        self._step: ActorStep | None = None
        self._tally: StepTally | None = None
        self._last_step = -1
        #: Log-probs that came before their step was opened here.
        self._early: list[ReferenceMessage] = []
        self._unreported_save: SaveCheckpoint | None = None
        self._saved_step: int | None = None

    @property
    def phase(self) -> str:
        return self._device.phase

    async def start(self) -> RankJoined:
        self._device.start()
        await self._device.run("load", Activity.STARTUP, self._trainer.start)
        if (resume_dir := self._context.resume_dir) is not None:
            await self._device.run("load", Activity.STARTUP, lambda: self._trainer.load(resume_dir / "trainer"))
        if self._reference is not None:
            await self._device.run("load", Activity.STARTUP, self._reference.start)
        self._context.meter.rest(Activity.DATA_WAIT)
        return RankJoined(self._context.rank, Role.ACTOR, self._trainer.version, 0, 0)

    def handle(self, message: Any) -> None:
        self._orders.append(message)
        self._arrived.set()

    def gauges(self) -> dict[str, float]:
        return {}

    async def stop(self) -> int:
        if self._listener is not None:
            await self._listener.close()
        await self._device.stop(self._context.config.timeouts.shutdown_s)
        return 0

    async def run(self) -> None:
        if self._listener is None:
            return await self._work()
        parts = [asyncio.ensure_future(self._work()), asyncio.ensure_future(self._listen(self._listener))]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in done:
                part.result()
        finally:
            for part in parts:
                part.cancel()

    async def _listen(self, listener: ReferenceListener) -> None:
        while True:
            self.deliver(await listener.receive())

    def deliver(self, message: ReferenceMessage) -> None:
        """Log-probs from a Ref rank, which may come before their micro-batch, or too late."""
        if self._step is not None and message.step == self._step.number:
            self._step.deliver(message.micro_batch_id, message.log_probs)
            self._arrived.set()
        elif message.step > self._last_step:
            self._early.append(message)
        else:
            logger.info("log-probs of micro-batch %d come after their step and are dropped", message.micro_batch_id)

    async def _work(self) -> None:
        """Do what there is to do, and sleep when there is nothing. How long nothing may come is the coordinator's to judge."""
        while True:
            # Before looking at what is there: what comes after the look wakes the loop again.
            self._arrived.clear()
            if self._step is not None:
                self._absorb(self._step)
                await self._go_on(self._step, self._step.next())
            elif self._orders:
                await self._obey(self._orders.popleft())
            else:
                await self._arrived.wait()

    async def _obey(self, order: Any) -> None:
        """Outside a step."""
        if isinstance(order, OpenStep):
            await self._open_step(order)
        elif isinstance(order, AbandonStep | FinishColocated) and order.step <= self._last_step:
            logger.info("%s comes after step %d was left", type(order).__name__, order.step)
        elif isinstance(order, PrepareSync):
            self._context.meter.rest(Activity.SYNC)
            self._context.emit(SyncReady(self._context.rank, order.version))
        elif isinstance(order, StartSync):
            await self._sync(order)
        elif isinstance(order, SaveCheckpoint):
            await self._save(order)
        else:
            raise TideError(f"actor rank {self._context.rank} got {type(order).__name__}, which it has no use for")

    # --- a step ---------------------------------------------------------------------------------------------------

    async def _open_step(self, order: OpenStep) -> None:
        if order.pipelining is not Pipelining.NONE and self._reference is None:
            raise TideError(
                f"step {order.step} is {order.pipelining.value}, but actor rank {self._context.rank} has no reference, because "
                "loss.kl_weight is 0"
            )
        settings = self._context.config.trainer
        window_tokens = settings.window_tokens or 2 * settings.max_micro_batch_tokens
        self._step = ActorStep(order.step, order.pipelining, window_tokens=window_tokens)
        self._tally = StepTally(self._context.rank, order.step)
        self._last_step = order.step
        early, self._early = self._early, []
        for message in early:
            self.deliver(message)
        await self._device.run("open", Activity.FORWARD, self._trainer.begin_step)

    def _absorb(self, step: ActorStep) -> None:
        """Take the orders that belong to the open step; those behind them wait until it is over."""
        while self._orders:
            order = self._orders[0]
            if isinstance(order, MicroBatchMessage):
                action = order.action
                step.add(MicroBatch(action.micro_batch_id, action.step, order.trajectories, action.advantages))
            elif isinstance(order, FinishColocated):
                logger.info("step %d is finished colocated: %s", order.step, order.reason)
                step.finish_colocated()
            elif isinstance(order, AbandonStep):
                step.abandon()
            elif isinstance(order, CloseStep):
                step.close()
            elif step.is_closed:
                return
            else:
                raise TideError(
                    f"actor rank {self._context.rank} got {type(order).__name__} in the middle of step {step.number}"
                )
            self._orders.popleft()

    async def _go_on(self, step: ActorStep, action: Next) -> None:
        """One thing on the device, or one wait."""
        if isinstance(action, Score):
            await self._score(step, action.micro_batches)
        elif isinstance(action, Forward):
            forward = partial(self._trainer.forward, action.micro_batch)
            step.forwarded(await self._device.run("train", Activity.FORWARD, forward))
        elif isinstance(action, Backward):
            backward = partial(self._trainer.backward, action.in_flight, action.log_probs)
            result = await self._device.run("train", Activity.BACKWARD, backward)
            step.trained()
            self._context.emit(self._open_tally.trained(action.micro_batch, result))
        elif isinstance(action, AwaitLogProbs):
            await self._await_log_probs(action.micro_batch_id)
        elif action is Idle.CLOSE:
            await self._close_step(step)
        else:
            await self._arrived.wait()

    async def _score(self, step: ActorStep, micro_batches: Sequence[MicroBatch]) -> None:
        """The reference comes, scores one micro-batch after the other (an abandoned step needs no more), and goes."""
        assert self._reference is not None
        model, tally, first = self._reference, self._open_tally, micro_batches[0].micro_batch_id
        if not model.is_on_device:
            tally.swapped(first, await self._device.run("swap", Activity.SWAP, model.swap_in), is_new=True)
        log_probs: dict[MicroBatchId, list[LogProbs]] = {}
        for micro_batch in micro_batches:
            score = partial(self._timed_log_probs, model, micro_batch.trajectories)
            values, seconds = await self._device.run("ref", Activity.REFERENCE, score)
            log_probs[micro_batch.micro_batch_id] = values
            tally.scored(micro_batch.micro_batch_id, seconds)
            self._absorb(step)
            if step.is_abandoned:
                break
        step.scored(log_probs)
        if self._swap != "resident":
            tally.swapped(first, await self._device.run("swap", Activity.SWAP, model.swap_out), is_new=False)

    def _timed_log_probs(self, model: Reference, trajectories: Sequence[Trajectory]) -> tuple[list[LogProbs], float]:
        """Device thread: with the seconds that it took."""
        began_s = self._context.clock.now_s()
        log_probs = model.log_probs(trajectories)
        if self._context.device.type == "cuda":
            torch.cuda.synchronize(self._context.device)  # by now the passes are only queued there
        return log_probs, self._context.clock.now_s() - began_s

    async def _await_log_probs(self, micro_batch_id: MicroBatchId) -> None:
        """Bounded by the coordinator: when a Ref rank is lost it orders to finish colocated (`timeouts.lost_s`)."""
        self._device.phase = "wait ref"
        began_s = self._context.clock.now_s()
        await self._arrived.wait()
        self._open_tally.waited(micro_batch_id, self._context.clock.now_s() - began_s)
        self._device.phase = "idle"

    async def _close_step(self, step: ActorStep) -> None:
        result = await self._device.run("update", Activity.OPTIMIZER, partial(self._end_step, step, self._open_tally))
        report = self._open_tally.closed(result)
        self._step = self._tally = None
        self._context.emit(report)
        await self._report_save()

    def _end_step(self, step: ActorStep, tally: StepTally) -> StepResult:
        """Device thread."""
        result = self._trainer.end_step(abandon=step.is_abandoned)
        if self._reference is not None and self._swap is None and tally.num_micro_batches and not result.abandoned:
            self._swap = swap_policy(self._context.config, self._reference)
            logger.info("trainer.swap is auto: from here on %s", self._swap)
        return result

    @property
    def _open_tally(self) -> StepTally:
        assert self._tally is not None
        return self._tally

    # --- weights --------------------------------------------------------------------------------------------------

    async def _sync(self, order: StartSync) -> None:
        context, began_s = self._context, self._context.clock.now_s()
        await self._device.run("sync", Activity.SYNC, lambda: self._send_weights(order.version))
        seconds = context.clock.now_s() - began_s
        context.meter.rest(Activity.DATA_WAIT)
        context.tell_seconds()
        context.emit(SyncFinished(context.rank, order.version, True, "", seconds, 0.0, 0.0))

    def _send_weights(self, version: WeightVersion) -> None:
        """Device thread. All actors gather each parameter; the leader also broadcasts it."""
        context = self._context
        canary = self._trainer.score(self._canary_ids)
        weights = self._trainer.full_weights()
        if context.rank == context.sync_leader:
            assert context.sync_group is not None
            bucket_bytes = context.config.wire.sync_bucket_bytes
            WeightSender(context.sync_group, context.sync_leader, bucket_bytes, context.device).send(
                weights, version, canary
            )
        else:
            for _ in weights:
                pass

    async def _save(self, order: SaveCheckpoint) -> None:
        await self._report_save()
        config = self._context.config
        folder = self._context.run_dir / "checkpoints" / f"step_{order.step:06d}"
        try:
            # The orders are the same on all actors; the shared folder is not: another actor may have written its part by now.
            if order.step != self._saved_step:
                await self._device.run("save", Activity.CHECKPOINT, lambda: self._trainer.save(folder / "trainer"))
                self._saved_step = order.step
            if order.final and config.checkpoint.export_hf and order.step >= config.train.steps:
                await self._device.run("export", Activity.CHECKPOINT, lambda: self._trainer.export_hf(folder / "hf"))
        except (TideError, OSError) as error:
            self._context.emit(CheckpointSaved(order.step, order.final, self._context.rank, False, str(error)))
            return
        self._unreported_save = order
        if order.final:
            await self._report_save()

    async def _report_save(self) -> None:
        """Wait for the checkpoint that is being written, if any, and say how it went."""
        order, self._unreported_save = self._unreported_save, None
        if order is None:
            return
        ok, detail = True, ""
        try:
            await self._device.run("save", Activity.CHECKPOINT, self._trainer.wait_saved)
        except (TideError, OSError) as error:
            ok, detail = False, str(error)
        self._context.emit(CheckpointSaved(order.step, order.final, self._context.rank, ok, detail))
