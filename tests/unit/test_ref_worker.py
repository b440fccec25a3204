"""The Ref role among fakes: what it sends to whom, in which order, and where its seconds go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit import worker_fakes as fakes
from tests.unit.worker_fakes import to_score
from tiderl.errors import TideError, WireError
from tiderl.scheduling import actions as ac
from tiderl.scheduling import events as ev
from tiderl.scheduling.ledger import Activity
from tiderl.types import MicroBatchId, Rank, Role, WeightVersion
from tiderl.wire.messages import ReferenceMessage
from tiderl.worker.ref import RefWorker
from tiderl.worker.reference_channel import ActorAddress

ACTORS = {Rank(0): ActorAddress("localhost:1", "key 0"), Rank(1): ActorAddress("localhost:2", "key 1")}


class FakeSender:
    """Writes into the rank's own record of what it said, so that the order shows; actor 1 may be gone."""

    def __init__(self, said: list[Any]) -> None:
        self.said = said
        self.lost: Rank | None = None
        self.is_closed = False
        self.connected: Any = None

    async def connect(self, actors: Any, *, timeout_s: float, lost_s: float) -> None:
        self.connected = (dict(actors), timeout_s, lost_s)

    async def send(self, actor: Rank, message: ReferenceMessage, *, timeout_s: float) -> None:
        assert timeout_s == fakes.BOUND_S
        if actor == self.lost:
            raise WireError(f"rank 2 has lost its connection to actor rank {actor}")
        self.said.append((actor, message))

    async def close(self) -> None:
        self.is_closed = True


class Ref(fakes.HeardRank):
    """One Ref rank with fakes for the model and the way to the actors."""

    def __init__(self, folder: Path, *, as_tensors: bool = True) -> None:
        self.device = fakes.Device()
        super().__init__(folder, fakes.REF, fakes.config(), self.device.time)
        self.sender: Any = FakeSender(self.said)
        reference: Any = fakes.FakeReference(self.device, as_tensors=as_tensors)
        self.worker = RefWorker(self.context, reference, self.sender, ACTORS)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Future[None]]:
        joined = await self.worker.start()
        assert joined == ev.RankJoined(fakes.REF, Role.REF, WeightVersion(0), 0, 0)
        life = asyncio.ensure_future(self.worker.run())
        try:
            yield life
        finally:
            life.cancel()
            await asyncio.wait({life})
            assert await self.worker.stop() == 0
        assert self.sender.is_closed


async def test_the_model_is_on_the_device_before_the_rank_joins_and_every_actor_reached(tmp_path: Path) -> None:
    ref = Ref(tmp_path)
    assert ref.worker.phase == "start"
    async with ref.running():
        assert ref.device.log == ["load", "in"]
        assert ref.sender.connected == (ACTORS, fakes.BOUND_S, fakes.BOUND_S)
        assert ref.worker.phase == "idle"


@pytest.mark.parametrize("as_tensors", [True, False], ids=["tensors", "arrays"])
async def test_micro_batches_are_scored_in_order_and_sent_to_their_actors(tmp_path: Path, as_tensors: bool) -> None:
    ref = Ref(tmp_path, as_tensors=as_tensors)
    async with ref.running():
        ref.worker.handle(to_score(4, 5, 3, actor=Rank(1)))
        ref.worker.handle(to_score(9, 2, actor=Rank(0)))
        await ref.says(ev.ReferenceScored, 2)
    spoken = [message for message in ref.said if not isinstance(message, ev.SecondsSpent)]
    (actor_4, sent_4), scored_4, (actor_9, sent_9), scored_9 = spoken
    assert (actor_4, actor_9) == (Rank(1), Rank(0))
    for sent, number, lengths in ((sent_4, 4, (5, 3)), (sent_9, 9, (2,))):
        assert (sent.step, sent.micro_batch_id) == (0, number)
        assert [values.tolist() for values in sent.log_probs] == [[-n] * n for n in lengths]
        assert all(isinstance(values, np.ndarray) and values.dtype == np.float32 for values in sent.log_probs)
    # Half a second a token.
    assert scored_4 == ev.ReferenceScored(fakes.REF, 0, MicroBatchId(4), 8, 4.0)
    assert scored_9 == ev.ReferenceScored(fakes.REF, 0, MicroBatchId(9), 2, 1.0)
    assert ref.device.log == ["load", "in", "s5+3", "s2"]


async def test_every_second_is_accounted_for_and_told(tmp_path: Path) -> None:
    ref = Ref(tmp_path)
    ref.device.time.now_s += 2.0
    async with ref.running():
        ref.device.time.now_s += 11.0
        ref.worker.handle(to_score(0, 8))
        await ref.says(ev.ReferenceScored)
        told = len(ref.all_of(ev.SecondsSpent))
        last = await ref.says(ev.SecondsSpent, told + 2)  # one may have been on its way
    seconds = {name: value for name, value in last.seconds.items() if value}
    expected = {Activity.STARTUP: 2.0, Activity.SWAP: 3.0, Activity.DATA_WAIT: 11.0, Activity.REFERENCE: 4.0}
    assert seconds == {activity.value: value for activity, value in expected.items()}
    assert last.rank == fakes.REF


async def test_a_busy_rank_says_so_and_goes_on_listening(tmp_path: Path) -> None:
    ref = Ref(tmp_path)
    ref.device.hold = "s5"
    async with ref.running():
        ref.worker.handle(to_score(0, 5))
        assert await asyncio.to_thread(ref.device.reached.wait, fakes.BOUND_S)
        assert ref.worker.phase == "ref"
        told = len(ref.all_of(ev.SecondsSpent))
        await ref.says(ev.SecondsSpent, told + 2)
        ref.worker.handle(to_score(1, 4))
        ref.device.go_on.set()
        await ref.says(ev.ReferenceScored, 2)


async def test_a_lost_actor_ends_the_rank_and_is_named(tmp_path: Path) -> None:
    ref = Ref(tmp_path)
    ref.sender.lost = Rank(1)
    async with ref.running() as life:
        ref.worker.handle(to_score(0, 5, actor=Rank(1)))
        with pytest.raises(WireError, match="lost its connection to actor rank 1"):
            await asyncio.wait_for(asyncio.shield(life), fakes.BOUND_S)
    assert not ref.all_of(ev.ReferenceScored)


def test_orders_of_other_roles_are_refused(tmp_path: Path) -> None:
    order = ac.PrepareSync((fakes.REF,), WeightVersion(0))
    with pytest.raises(TideError, match="Ref rank 2 got PrepareSync, which it has no use for"):
        Ref(tmp_path).worker.handle(order)
