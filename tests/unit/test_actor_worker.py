"""The Actor role among fakes: what its device does in each way of computing the reference, and what it says of it.

One device log tells the order: `begin`, `in`/`out` (swaps), `s5+4` (scores trajectories of 5 and 4 tokens), `f0`/`b0` (passes of
micro-batch 0), `end` or `leave` (the update, or an abandoned step).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit import worker_fakes as fakes
from tests.unit.worker_fakes import assigned, closed, opened, scored
from tiderl.errors import TideError, WireError
from tiderl.scheduling import actions as ac
from tiderl.scheduling import events as ev
from tiderl.scheduling.ledger import Activity
from tiderl.types import MicroBatchId, Pipelining, Role, WeightVersion
from tiderl.worker.actor import ActorWorker

ABANDON = ac.AbandonStep((fakes.ACTOR,), 0)
FINISH = ac.FinishColocated((fakes.ACTOR,), 0, "Ref rank 2 is lost")


class Actor(fakes.HeardRank):
    """One actor rank with fakes for trainer and reference."""

    def __init__(self, folder: Path, *, swap: str = "offload", fits: bool = False, reference: bool = True) -> None:
        self.device = fakes.Device()
        super().__init__(folder, fakes.ACTOR, fakes.config(swap), self.device.time)
        self.trainer: Any = fakes.FakeTrainer(self.device)
        self.reference: Any = fakes.FakeReference(self.device, fits=fits) if reference else None
        self.worker = ActorWorker(self.context, self.trainer, 100, reference=self.reference)

    def orders(self, *messages: Any) -> None:
        for message in messages:
            self.worker.handle(message)

    async def reaches(self, phase: str) -> None:
        async with asyncio.timeout(fakes.BOUND_S):
            while self.worker.phase != phase:  # noqa: ASYNC110 - a phase is not announced
                await asyncio.sleep(0.001)

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """While the device is where it was to be held."""
        assert await asyncio.to_thread(self.device.reached.wait, fakes.BOUND_S), f"never came to {self.device.hold}"
        yield
        self.device.go_on.set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        joined = await self.worker.start()
        assert joined == ev.RankJoined(fakes.ACTOR, Role.ACTOR, WeightVersion(0), 0, 0)
        life = asyncio.ensure_future(self.worker.run())
        try:
            yield
            assert not life.done(), life.exception()
        finally:
            life.cancel()
            await asyncio.wait({life})
            await self.worker.stop()


async def test_without_a_reference(tmp_path: Path) -> None:
    actor = Actor(tmp_path, reference=False)
    async with actor.running():
        actor.orders(opened(Pipelining.NONE), assigned(0, 5, 4), assigned(1, 3), closed())
        trained = await actor.says(ev.StepTrained)
        assert actor.device.passes == "begin f0 b0 f1 b1 end"
        assert actor.trainer.references == [None, None]
        assert actor.trainer.advantages == [(0.5, 0.5), (0.5,)]
        assert (trained.reference_s, trained.swap_s, trained.waited_s, trained.num_swaps) == (0.0, 0.0, 0.0, 0)
        with pytest.raises(TideError, match="step 1 is colocated, but actor rank 0 has no reference"):
            await actor.worker._obey(opened(Pipelining.COLOCATED, 1))


async def test_colocated_swaps_once_for_all_that_waits_and_hands_log_probs_over_without_a_copy(tmp_path: Path) -> None:
    actor = Actor(tmp_path)
    async with actor.running():
        actor.device.hold = "begin"
        actor.orders(opened(Pipelining.COLOCATED))
        async with actor.held():
            actor.orders(assigned(0, 5, 4), assigned(1, 3))
        await actor.says(ev.MicroBatchTrained, 2)
        actor.orders(assigned(2, 2), closed())
        trained = await actor.says(ev.StepTrained)
    assert actor.device.passes == "begin in s5+4 s3 out f0 b0 f1 b1 in s2 out f2 b2 end"
    assert trained.num_swaps == 2
    handed_over = [values for reference in actor.trainer.references for values in reference]
    assert all(a is b for a, b in zip(handed_over, actor.reference.returned, strict=True))


async def test_what_comes_while_the_actor_trains_waits_for_the_next_swap(tmp_path: Path) -> None:
    actor = Actor(tmp_path)
    async with actor.running():
        actor.device.hold = "f0"
        actor.orders(opened(Pipelining.COLOCATED), assigned(0, 5))
        async with actor.held():
            actor.orders(assigned(1, 4), assigned(2, 3), closed())
        trained = await actor.says(ev.StepTrained)
    assert actor.device.passes == "begin in s5 out f0 b0 in s4 s3 out f1 b1 f2 b2 end"
    assert trained.num_swaps == 2


async def test_alternating_swaps_for_every_micro_batch(tmp_path: Path) -> None:
    actor = Actor(tmp_path)
    async with actor.running():
        actor.orders(opened(Pipelining.ALTERNATING), assigned(0, 5), assigned(1, 3), closed())
        trained = await actor.says(ev.StepTrained)
    assert actor.device.passes == "begin in s5 out f0 b0 in s3 out f1 b1 end"
    assert trained.num_swaps == 2
    assert trained.swap_s == 8.0


async def test_a_resident_reference_comes_once_and_stays(tmp_path: Path) -> None:
    actor = Actor(tmp_path, swap="resident")
    async with actor.running():
        actor.orders(opened(Pipelining.ALTERNATING), assigned(0, 5), assigned(1, 3), closed())
        first = await actor.says(ev.StepTrained)
        actor.orders(opened(Pipelining.COLOCATED, 1), assigned(2, 2, step=1), closed(1))
        second = await actor.says(ev.StepTrained, 2)
    assert actor.device.passes == "begin in s5 f0 b0 s3 f1 b1 end begin s2 f2 b2 end"
    assert [(step.num_swaps, step.swap_s) for step in (first, second)] == [(1, 3.0), (0, 0.0)]


@pytest.mark.parametrize(("fits", "second"), [(True, "in s4 f1 b1"), (False, "in s4 out f1 b1")])
async def test_auto_is_settled_by_the_first_step_that_shows_the_actor_s_memory(
    tmp_path: Path, fits: bool, second: str
) -> None:
    actor = Actor(tmp_path, swap="auto", fits=fits)
    async with actor.running():
        actor.orders(opened(Pipelining.COLOCATED), closed())
        await actor.says(ev.StepTrained)
        actor.orders(opened(Pipelining.COLOCATED, 1), assigned(0, 5, step=1), closed(1))
        await actor.says(ev.StepTrained, 2)
        actor.orders(opened(Pipelining.COLOCATED, 2), assigned(1, 4, step=2), closed(2))
        await actor.says(ev.StepTrained, 3)
    assert actor.device.passes == f"begin end begin in s5 out f0 b0 end fits? begin {second} end"


async def test_decoupled_runs_ahead_and_finishes_in_order_of_assignment(tmp_path: Path) -> None:
    """A window of 20 tokens; log-probs come in another order, one of them before its step is opened."""
    actor = Actor(tmp_path)
    async with actor.running():
        actor.worker.deliver(scored(1, 12))
        actor.orders(opened(Pipelining.DECOUPLED), assigned(0, 8), assigned(1, 12), assigned(2, 1), closed())
        await actor.reaches("wait ref")
        assert actor.device.passes == "begin f0 f1"
        actor.worker.deliver(scored(2, 1))
        actor.worker.deliver(scored(0, 8))
        trained = await actor.says(ev.StepTrained)
    assert actor.device.passes == "begin f0 f1 b0 b1 f2 b2 end"
    assert [float(reference[0][0]) for reference in actor.trainer.references] == [0.0, -1.0, -2.0]
    assert (trained.num_swaps, trained.swap_s, trained.reference_s) == (0, 0.0, 0.0)


async def test_waiting_for_log_probs_is_counted_for_the_micro_batch_that_is_waited_for(tmp_path: Path) -> None:
    actor = Actor(tmp_path)
    async with actor.running():
        before_s = actor.meter.totals()
        actor.orders(opened(Pipelining.DECOUPLED), assigned(0, 4), assigned(1, 4))
        await actor.reaches("wait ref")
        actor.device.time.now_s += 7.0
        actor.worker.deliver(scored(0, 4))
        await actor.says(ev.MicroBatchTrained)
        await actor.reaches("wait ref")
        actor.worker.deliver(scored(1, 4))
        await actor.says(ev.MicroBatchTrained, 2)
        actor.device.time.now_s += 100.0  # for data, not for log-probs
        actor.orders(closed())
        trained = await actor.says(ev.StepTrained)
    assert [event.waited_s for event in actor.all_of(ev.MicroBatchTrained)] == [7.0, 0.0]
    assert trained.waited_s == 7.0
    spent = {name: s - before_s.get(name, 0.0) for name, s in actor.meter.totals().items()}
    assert spent[Activity.DATA_WAIT.value] == 107.0
    assert (spent[Activity.FORWARD.value], spent[Activity.BACKWARD.value]) == (8.0, 16.0)


async def test_a_lost_ref_rank_makes_the_actor_score_the_rest_itself(tmp_path: Path) -> None:
    actor = Actor(tmp_path)
    async with actor.running():
        actor.orders(opened(Pipelining.DECOUPLED), assigned(0, 8), assigned(1, 12), assigned(2, 1))
        actor.worker.deliver(scored(1, 12))
        await actor.reaches("wait ref")
        actor.orders(FINISH)
        await actor.says(ev.MicroBatchTrained, 3)
        actor.worker.deliver(scored(3, 2))  # of another Ref rank, too late
        actor.orders(assigned(3, 2), closed())
        trained = await actor.says(ev.StepTrained)
        actor.worker.deliver(scored(2, 1))  # after the step
    assert actor.device.passes == "begin f0 f1 in s8 s1 out b0 b1 f2 b2 in s2 out f3 b3 end"
    assert trained.num_swaps == 2
    first = [float(reference[0][0]) for reference in actor.trainer.references]
    assert first == [-8.0, -1.0, -1.0, -2.0]  # own ones are minus the length; that of micro-batch 1 had come


async def test_every_micro_batch_is_answered_with_its_own_share_and_the_step_with_the_sums(tmp_path: Path) -> None:
    actor = Actor(tmp_path)
    async with actor.running():
        actor.device.hold = "begin"
        actor.orders(opened(Pipelining.COLOCATED))
        async with actor.held():
            actor.orders(assigned(0, 5, 4), assigned(1, 3), closed())
        trained = await actor.says(ev.StepTrained)
        totals = actor.meter.totals()
    # 0.5 s a token to score, 1 s forward, 2 s backward; the swaps (3 s in, 1 s out) were for the first and those after it.
    assert actor.all_of(ev.MicroBatchTrained) == [
        ev.MicroBatchTrained(fakes.ACTOR, 0, MicroBatchId(0), 9, 4.5, 4.0, 9.0, 18.0, 0.0),
        ev.MicroBatchTrained(fakes.ACTOR, 0, MicroBatchId(1), 3, 1.5, 0.0, 3.0, 6.0, 0.0),
    ]
    assert trained == ev.StepTrained(
        step=0,
        rank=fakes.ACTOR,
        updated=True,
        abandoned=False,
        version=WeightVersion(1),
        grad_norm=1.5,
        lr=1e-3,
        num_trained_tokens=12,
        num_padding_tokens=2,
        reference_s=6.0,
        swap_s=4.0,
        forward_s=12.0,
        backward_s=24.0,
        waited_s=0.0,
        optimizer_s=0.5,
        num_swaps=1,
        sums={"loss": 0.5},
        max_same_version_gap=0.125,
    )
    worked = {a: totals[a.value] for a in (Activity.REFERENCE, Activity.SWAP, Activity.FORWARD, Activity.BACKWARD)}
    assert worked == {Activity.REFERENCE: 6.0, Activity.SWAP: 4.0, Activity.FORWARD: 12.0, Activity.BACKWARD: 24.0}
    assert totals[Activity.OPTIMIZER.value] == 0.5


@pytest.mark.parametrize(
    ("pipelining", "entry", "expected"),
    [
        (Pipelining.COLOCATED, "s5", "begin in s5 out leave"),
        (Pipelining.COLOCATED, "f0", "begin in s5 s3 out f0 leave"),
        (Pipelining.COLOCATED, "b0", "begin in s5 s3 out f0 b0 leave"),
        (Pipelining.ALTERNATING, "in", "begin in s5 out leave"),
        (Pipelining.DECOUPLED, "f1", "begin f0 f1 leave"),
    ],
)
async def test_an_abandoned_step_goes_no_further_but_is_left_with_all_others(
    tmp_path: Path, pipelining: Pipelining, entry: str, expected: str
) -> None:
    """The order comes while the device is at `entry`."""
    actor = Actor(tmp_path)
    async with actor.running():
        actor.device.hold = entry
        actor.orders(opened(pipelining), assigned(0, 5), assigned(1, 3))
        async with actor.held():
            actor.orders(ABANDON)
        actor.orders(assigned(2, 1), closed())
        trained = await actor.says(ev.StepTrained)
        actor.worker.deliver(scored(0, 5))
        actor.orders(opened(Pipelining.COLOCATED, 1), closed(1))
        assert not (await actor.says(ev.StepTrained, 2)).abandoned
    assert trained.abandoned
    assert actor.device.passes == f"{expected} begin end"


async def test_an_order_to_abandon_that_comes_too_late_is_harmless(tmp_path: Path) -> None:
    actor = Actor(tmp_path)
    async with actor.running():
        actor.device.hold = "end"
        actor.orders(opened(Pipelining.COLOCATED), closed())
        async with actor.held():
            actor.orders(ABANDON, FINISH)
        await actor.says(ev.StepTrained)
        actor.orders(opened(Pipelining.COLOCATED, 1), closed(1))
        assert not (await actor.says(ev.StepTrained, 2)).abandoned


async def test_orders_behind_a_step_wait_until_it_is_over(tmp_path: Path) -> None:
    """Collectives happen in the order of the orders, whatever log-probs the step still waits for."""
    actor = Actor(tmp_path)
    version = WeightVersion(1)
    async with actor.running():
        actor.orders(opened(Pipelining.DECOUPLED), assigned(0, 5), closed())
        actor.orders(ac.PrepareSync((fakes.ACTOR,), version))
        await actor.reaches("wait ref")
        assert not actor.all_of(ev.SyncReady)
        actor.worker.deliver(scored(0, 5))
        await actor.says(ev.SyncReady)
    kinds = [type(message) for message in actor.said]
    assert kinds.index(ev.StepTrained) < kinds.index(ev.SyncReady)


async def test_an_order_that_has_no_place_in_a_step_ends_the_rank(tmp_path: Path) -> None:
    actor = Actor(tmp_path)
    await actor.worker.start()
    actor.orders(opened(Pipelining.COLOCATED), ac.PrepareSync((fakes.ACTOR,), WeightVersion(1)))
    with pytest.raises(TideError, match="actor rank 0 got PrepareSync in the middle of step 0"):
        await asyncio.wait_for(actor.worker.run(), fakes.BOUND_S)
    await actor.worker.stop()


async def test_log_probs_come_over_the_listener_and_what_is_wrong_there_ends_the_rank(tmp_path: Path) -> None:
    class Listener:
        """Two messages, and then one that cannot be read."""

        def __init__(self) -> None:
            self.messages: asyncio.Queue[Any] = asyncio.Queue()
            self.is_closed = False

        async def receive(self) -> Any:
            message = await self.messages.get()
            if isinstance(message, Exception):
                raise message
            return message

        async def close(self) -> None:
            self.is_closed = True

    actor = Actor(tmp_path)
    listener: Any = Listener()
    actor.worker = ActorWorker(actor.context, actor.trainer, 100, reference=actor.reference, listener=listener)
    await actor.worker.start()
    life = asyncio.ensure_future(actor.worker.run())
    actor.orders(opened(Pipelining.DECOUPLED), assigned(0, 5), closed())
    listener.messages.put_nowait(scored(0, 5))
    await actor.says(ev.StepTrained)
    assert np.array_equal(actor.trainer.references[0][0], np.zeros(5, np.float32))
    listener.messages.put_nowait(WireError("reference log-probs of rank 2 cannot be read"))
    with pytest.raises(WireError, match="rank 2 cannot be read"):
        await asyncio.wait_for(life, fakes.BOUND_S)
    await actor.worker.stop()
    assert listener.is_closed
