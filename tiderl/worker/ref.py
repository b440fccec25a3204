"""The Ref role: holds the reference model on its device, scores micro-batches in the order of assignment, and sends the log-probs
straight to the actors that wait for them.

Invariants (tests/unit/test_ref_worker.py):

1. Every `ScoreMessage` is answered with one `ReferenceMessage` to its actor and then one `ReferenceScored`, in order.
2. The model comes to the device once, before the rank joins. It never changes: a Ref rank has no part in weight syncs, nor in any
   collective after the start, so that its death stops nobody.
3. The rank tells its seconds at every heartbeat.

Source: paper §5.1 (decoupled mode: Ref computes F0, F1, F2 … in sequence while the actors' forwards run).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tiderl.errors import TideError
from tiderl.scheduling.events import RankJoined, ReferenceScored
from tiderl.scheduling.ledger import Activity
from tiderl.trainers.base import LogProbs, Reference
from tiderl.types import Rank, Role, WeightVersion
from tiderl.wire.messages import ReferenceMessage, ScoreMessage
from tiderl.worker.context import WorkerContext
from tiderl.worker.reference_channel import ActorAddress, ReferenceSender
from tiderl.worker.role_device import RoleDevice

logger = logging.getLogger(__name__)


class RefWorker:
    """One Ref rank. `actors`: all that it may have to send to, and where they listen."""

    def __init__(
        self,
        context: WorkerContext,
        reference: Reference,
        sender: ReferenceSender,
        actors: Mapping[Rank, ActorAddress],
    ) -> None:
        self._context = context
        self._reference = reference
        self._sender = sender
        self._actors = actors
        self._device = RoleDevice(f"ref-{context.rank}", context.meter)
        self._orders: deque[ScoreMessage] = deque()
        self._arrived = asyncio.Event()

    @property
    def phase(self) -> str:
        return self._device.phase

    async def start(self) -> RankJoined:
        self._device.start()
        timeouts = self._context.config.timeouts
        await self._sender.connect(self._actors, timeout_s=timeouts.start_s, lost_s=timeouts.lost_s)
        await self._device.run("load", Activity.STARTUP, self._reference.start)
        await self._device.run("swap", Activity.SWAP, self._reference.swap_in)
        self._context.meter.rest(Activity.DATA_WAIT)
        return RankJoined(self._context.rank, Role.REF, WeightVersion(0), 0, 0)

    def handle(self, message: Any) -> None:
        if not isinstance(message, ScoreMessage):
            raise TideError(f"Ref rank {self._context.rank} got {type(message).__name__}, which it has no use for")
        self._orders.append(message)
        self._arrived.set()

    def gauges(self) -> dict[str, float]:
        return {}

    async def stop(self) -> int:
        self._orders.clear()
        await self._device.stop(self._context.config.timeouts.shutdown_s)
        await self._sender.close()
        return 0

    async def run(self) -> None:
        parts = [asyncio.ensure_future(self._work()), asyncio.ensure_future(self._tell_seconds())]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in done:
                part.result()
        finally:
            for part in parts:
                part.cancel()

    async def _tell_seconds(self) -> None:
        while True:
            await asyncio.sleep(self._context.config.timeouts.heartbeat_s)
            self._context.tell_seconds()

    async def _work(self) -> None:
        """Score what there is, and sleep when there is nothing."""
        while True:
            self._arrived.clear()
            if self._orders:
                await self._score(self._orders.popleft())
            else:
                await self._arrived.wait()

    async def _score(self, message: ScoreMessage) -> None:
        action = message.action
        log_probs, seconds = await self._device.run("ref", Activity.REFERENCE, partial(self._log_probs, message))
        answer = ReferenceMessage(action.step, action.micro_batch_id, log_probs)
        await self._sender.send(action.actor, answer, timeout_s=self._context.config.timeouts.lost_s)
        num_tokens = sum(trajectory.num_tokens for trajectory in message.trajectories)
        self._context.emit(ReferenceScored(self._context.rank, action.step, action.micro_batch_id, num_tokens, seconds))

    def _log_probs(self, message: ScoreMessage) -> tuple[tuple[npt.NDArray[np.float32], ...], float]:
        """Device thread: with the seconds that it took until they were in host memory."""
        began_s = self._context.clock.now_s()
        log_probs = tuple(_in_host_memory(values) for values in self._reference.log_probs(message.trajectories))
        return log_probs, self._context.clock.now_s() - began_s


def _in_host_memory(values: LogProbs) -> npt.NDArray[np.float32]:
    return values.cpu().numpy() if isinstance(values, torch.Tensor) else values
