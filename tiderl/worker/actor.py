"""The Actor role, with the reference on the same rank (colocated RA2P).

Orders are worked off one after the other on the device thread. Micro-batches that are there together are taken together: first the
reference scores all of them, then the actor trains on them (ready-batch aggregation), so that a swap would be needed once.

Invariants (tests/integration/test_job.py):

1. Collectives happen in the order of the coordinator's orders, which is the same on all actors.
2. An abandoned step still goes through `end_step` on every actor: nobody is left alone in a collective.
3. A checkpoint is reported only when it is on disk.

Source: paper §5.1 (colocated mode), §5.2 (sync_params).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from tiderl.engines.device_thread import DeviceThread
from tiderl.errors import TideError
from tiderl.scheduling.actions import AbandonStep, CloseStep, OpenStep, PrepareSync, SaveCheckpoint, StartSync
from tiderl.scheduling.events import CheckpointSaved, RankJoined, StepTrained, SyncFinished, SyncReady
from tiderl.scheduling.ledger import Activity
from tiderl.trainers.base import MicroBatchResult, StepResult, Trainer
from tiderl.types import MicroBatch, Role, WeightVersion
from tiderl.wire.messages import MicroBatchMessage
from tiderl.worker.context import WorkerContext
from tiderl.worker.sync import WeightSender, canary_ids

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Step:
    """What this rank did in the open step."""

    order: OpenStep
    reference_s: float = 0.0
    results: list[MicroBatchResult] = field(default_factory=list)


class ActorWorker:
    """One actor rank."""

    def __init__(self, context: WorkerContext, trainer: Trainer, vocab_size: int) -> None:
        self._context = context
        self._trainer = trainer
        self._canary_ids = canary_ids(vocab_size)
        self._device = DeviceThread(f"actor-{context.rank}", step=lambda: False)
        self._inbox: deque[Any] = deque()
        self._arrived = asyncio.Event()
        self._step: _Step | None = None
        self._abandoned: int | None = None
        self._unreported_save: SaveCheckpoint | None = None
        self._saved_step: int | None = None
        self.phase = "start"

    async def start(self) -> RankJoined:
        self._device.start()
        await self._on_device("load", Activity.STARTUP, self._trainer.start)
        if (resume_dir := self._context.resume_dir) is not None:
            await self._on_device("load", Activity.STARTUP, lambda: self._trainer.load(resume_dir / "trainer"))
        self._context.meter.rest(Activity.DATA_WAIT)
        return RankJoined(self._context.rank, Role.ACTOR, self._trainer.version, 0, 0)

    def handle(self, message: Any) -> None:
        if isinstance(message, AbandonStep):
            self._abandoned = message.step
        else:
            self._inbox.append(message)
            self._arrived.set()

    def gauges(self) -> dict[str, float]:
        return {}

    async def stop(self) -> int:
        bound_s = self._context.config.timeouts.shutdown_s
        await asyncio.to_thread(self._device.stop, timeout_s=bound_s, setting="timeouts.shutdown_s")
        return 0

    async def run(self) -> None:
        while True:
            await self._arrived.wait()
            batch = self._take_micro_batches()
            if batch:
                await self._train(batch)
            elif self._inbox:
                await self._obey(self._inbox.popleft())
            else:
                self._arrived.clear()

    def _take_micro_batches(self) -> list[MicroBatchMessage]:
        batch = []
        while self._inbox and isinstance(self._inbox[0], MicroBatchMessage):
            batch.append(self._inbox.popleft())
        return batch

    async def _obey(self, order: Any) -> None:
        if isinstance(order, OpenStep):
            self._step = _Step(order)
            await self._on_device("open", Activity.FORWARD, self._trainer.begin_step)
        elif isinstance(order, CloseStep):
            await self._close_step(order)
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

    async def _train(self, batch: list[MicroBatchMessage]) -> None:
        step = self._step
        assert step is not None, "a micro-batch without an open step"
        references = None
        if step.order.use_reference:
            trajectories = [t for message in batch for t in message.trajectories]
            began_s = self._context.clock.now_s()
            references = await self._on_device(
                "ref", Activity.REFERENCE, lambda: self._trainer.reference_log_probs(trajectories)
            )
            step.reference_s += self._context.clock.now_s() - began_s
        first = 0
        for message in batch:
            if self._abandoned == step.order.step:
                return
            action = message.action
            micro_batch = MicroBatch(action.micro_batch_id, action.step, message.trajectories, action.advantages)
            end = first + len(message.trajectories)
            own = references[first:end] if references is not None else None
            first = end
            train = partial(self._trainer.train_micro_batch, micro_batch, own)
            result = await self._on_device("train", Activity.FORWARD, train)
            self._context.meter.move(Activity.FORWARD, {Activity.BACKWARD: result.backward_s})
            step.results.append(result)

    async def _close_step(self, order: CloseStep) -> None:
        step, self._step = self._step, None
        assert step is not None and step.order.step == order.step, "closing a step that is not open"
        abandon = self._abandoned == order.step
        result: StepResult = await self._on_device(
            "update", Activity.OPTIMIZER, lambda: self._trainer.end_step(abandon=abandon)
        )
        self._context.emit(self._report(step, result))
        await self._report_save()

    def _report(self, step: _Step, result: StepResult) -> StepTrained:
        sums: Counter[str] = Counter()
        for micro_batch in step.results:
            sums.update(micro_batch.sums)
        return StepTrained(
            step=step.order.step,
            rank=self._context.rank,
            updated=result.updated,
            abandoned=result.abandoned,
            version=result.version,
            grad_norm=result.grad_norm,
            lr=result.lr,
            num_trained_tokens=sum(r.num_trained_tokens for r in step.results),
            num_padding_tokens=sum(r.num_padding_tokens for r in step.results),
            reference_s=step.reference_s,
            forward_s=sum(r.forward_s for r in step.results),
            backward_s=sum(r.backward_s for r in step.results),
            optimizer_s=result.optimizer_s,
            sums=dict(sums),
            max_same_version_gap=max((r.max_same_version_gap for r in step.results), default=0.0),
        )

    # --- weights --------------------------------------------------------------------------------------------------

    async def _sync(self, order: StartSync) -> None:
        context, began_s = self._context, self._context.clock.now_s()
        await self._on_device("sync", Activity.SYNC, lambda: self._send_weights(order.version))
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
                await self._on_device("save", Activity.CHECKPOINT, lambda: self._trainer.save(folder / "trainer"))
                self._saved_step = order.step
            if order.final and config.checkpoint.export_hf and order.step >= config.train.steps:
                await self._on_device("export", Activity.CHECKPOINT, lambda: self._trainer.export_hf(folder / "hf"))
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
            await self._on_device("save", Activity.CHECKPOINT, self._trainer.wait_saved)
        except (TideError, OSError) as error:
            ok, detail = False, str(error)
        self._context.emit(CheckpointSaved(order.step, order.final, self._context.rank, ok, detail))

    async def _on_device(self, phase: str, activity: Activity, function: Callable[[], T]) -> T:
        def work() -> T:
            with self._context.meter.work(activity):
                return function()

        self.phase = phase
        try:
            return await self._device.submit(work)
        finally:
            self.phase = "idle"
