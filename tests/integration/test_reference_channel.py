"""Log-probs from Ref ranks to actors over real TCP on the loopback, and torchrun's store for the addresses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from tiderl.config.schema import Config
from tiderl.errors import WaitTimeout, WireError
from tiderl.types import MicroBatchId, Rank
from tiderl.wire.job import Job
from tiderl.wire.messages import Hello, ReferenceMessage, wire_codec
from tiderl.wire.sockets import ClientKeys, ClientSocket, JobKeys
from tiderl.worker.process import listening_hosts
from tiderl.worker.reference_channel import ActorAddress, ReferenceListener, ReferenceSender

T = TypeVar("T")

#: Far above what anything here takes: a test that reaches it has hung.
BOUND_S = 30.0
KEYS = JobKeys.generate().public_for_clients()
LIMIT_BYTES = 1_000_000


async def soon(awaitable: Awaitable[T]) -> T:
    return await asyncio.wait_for(awaitable, BOUND_S)


@contextlib.asynccontextmanager
async def listening(store: Store, *ranks: int) -> AsyncIterator[list[ReferenceListener]]:
    """Actors that have put their addresses into the store."""
    async with contextlib.AsyncExitStack() as stack:
        listeners = []
        for rank in ranks:
            listener = ReferenceListener(KEYS, max_message_bytes=LIMIT_BYTES)
            stack.push_async_callback(listener.close)
            (await listener.open("127.0.0.1", "127.0.0.1")).publish(store, Rank(rank))
            listeners.append(listener)
        yield listeners


@contextlib.asynccontextmanager
async def joined(store: Store, rank: int, *actors: int, keys: ClientKeys = KEYS) -> AsyncIterator[ReferenceSender]:
    """A Ref rank that has found these actors."""
    sender = ReferenceSender(Rank(rank), keys, max_message_bytes=LIMIT_BYTES)
    try:
        found = {Rank(a): ActorAddress.find(store, Rank(a), timeout_s=BOUND_S) for a in actors}
        await sender.connect(found, timeout_s=BOUND_S, lost_s=BOUND_S)
        yield sender
    finally:
        await sender.close()


def message(number: int, *lengths: int) -> ReferenceMessage:
    generator = np.random.default_rng(number)
    return ReferenceMessage(
        3, MicroBatchId(number), tuple(generator.normal(size=n).astype(np.float32) for n in lengths)
    )


async def test_two_ref_ranks_reach_two_actors_bit_for_bit_and_in_order() -> None:
    store = HashStore()
    async with listening(store, 0, 1) as actors, joined(store, 2, 0, 1) as first, joined(store, 3, 0, 1) as second:
        for number in range(20):
            await first.send(Rank(number % 2), message(number, 5, 1 + number), timeout_s=BOUND_S)
            await second.send(Rank(number % 2), message(100 + number, 7), timeout_s=BOUND_S)
        for place, actor in enumerate(actors):
            heard = [await soon(actor.receive()) for _ in range(20)]
            for sender in (0, 100):
                numbers = [m.micro_batch_id - sender for m in heard if sender <= m.micro_batch_id < sender + 100]
                assert numbers == list(range(place, 20, 2))
            for got in heard:
                lengths = [len(values) for values in got.log_probs]
                sent = message(got.micro_batch_id, *lengths)
                assert all(a.tobytes() == b.tobytes() for a, b in zip(got.log_probs, sent.log_probs, strict=True))
                assert got.step == 3


async def test_a_stranger_is_not_heard_and_the_store_holds_nothing_that_helps_him() -> None:
    store = HashStore()
    async with listening(store, 0) as (actor,):
        published = store.get("reference/0").decode()
        assert KEYS.client_secret not in published
        assert KEYS.client_public not in published
        stranger = JobKeys.generate().public_for_clients()
        with pytest.raises(WireError, match="actor rank 0 at .* refuses the keys of rank 9"):
            async with joined(store, 9, 0, keys=stranger):
                pass
        async with joined(store, 2, 0) as sender:
            await sender.send(Rank(0), message(1, 4), timeout_s=BOUND_S)
            assert (await soon(actor.receive())).micro_batch_id == 1


async def test_every_actor_listens_with_a_key_of_its_own() -> None:
    store = HashStore()
    async with listening(store, 0, 1):
        addresses = [ActorAddress.find(store, Rank(a), timeout_s=BOUND_S) for a in (0, 1)]
    assert len({KEYS.server_public, *(address.public_key for address in addresses)}) == 3


async def test_an_actor_that_is_gone_is_named() -> None:
    store = HashStore()
    async with listening(store, 0, 1) as (_, second), joined(store, 2, 0, 1) as sender:
        await second.close()

        async def send_until_refused() -> None:
            while True:  # until the loss has been noticed, messages go into the queue
                await sender.send(Rank(1), message(0, 1), timeout_s=BOUND_S)
                await asyncio.sleep(0.01)

        with pytest.raises(WireError, match="rank 2 has lost its connection to actor rank 1"):
            await soon(send_until_refused())
        await sender.send(Rank(0), message(5, 2), timeout_s=BOUND_S)
        with pytest.raises(WireError, match="log-probs to rank 7, which is no actor that it knows"):
            await sender.send(Rank(7), message(0, 1), timeout_s=BOUND_S)


async def test_no_wait_for_an_actor_is_without_a_bound() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=BOUND_S))
    with pytest.raises(WaitTimeout, match=r"a Ref rank waited 0\.1 s for the address of actor rank 0 in vain"):
        ActorAddress.find(store, Rank(0), timeout_s=0.1)
    async with listening(store, 0) as (actor,):
        await actor.close()
        sender = ReferenceSender(Rank(2), KEYS, max_message_bytes=LIMIT_BYTES)
        found = {Rank(0): ActorAddress.find(store, Rank(0), timeout_s=BOUND_S)}
        with pytest.raises(WaitTimeout, match=r"rank 2 waited .* for actor rank 0 at 127\.0\.0\.1"):
            await soon(sender.connect(found, timeout_s=0.3, lost_s=BOUND_S))
        await sender.close()


async def test_what_is_no_reference_message_is_an_error_with_its_sender() -> None:
    """Whoever holds the job's keys still gets nothing else decoded here."""
    store = HashStore()
    async with listening(store, 0) as (actor,):
        address = ActorAddress.find(store, Rank(0), timeout_s=BOUND_S)
        peer = ClientSocket(5)
        keys = ClientKeys(address.public_key, KEYS.client_public, KEYS.client_secret)
        await peer.connect(address.address, keys, timeout_s=BOUND_S)
        await peer.send(wire_codec(LIMIT_BYTES).encode(Hello(Rank(5), "host", 1)))
        with pytest.raises(WireError, match="log-probs of rank 5 cannot be read: 'Hello' is not a registered message"):
            await soon(actor.receive())
        await peer.close()


async def test_log_probs_beyond_the_limit_are_refused_where_they_are_sent() -> None:
    store = HashStore()
    async with listening(store, 0), joined(store, 2, 0) as sender:
        with pytest.raises(WireError, match=r"over the limit of 1000000 \(wire.max_message_bytes\)"):
            await sender.send(Rank(0), message(0, LIMIT_BYTES // 4 + 1), timeout_s=BOUND_S)


@pytest.mark.parametrize(
    ("rank", "local_rank", "expected"),
    [
        (1, 1, ("0.0.0.0", "rank-0-machine")),  # on rank 0's machine: as the coordinator
        (9, 1, ("127.0.0.1", "127.0.0.1")),  # elsewhere: where the way to the coordinator begins
    ],
)
def test_an_actor_listens_where_ref_ranks_on_other_machines_find_it(
    monkeypatch: pytest.MonkeyPatch, rank: int, local_rank: int, expected: tuple[str, str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    connect_host = "rank-0-machine" if rank == local_rank else "127.0.0.1"
    job = Job(Config(), 16, Path("/run"), None, "0.0.0.0", connect_host, port=4321)
    assert listening_hosts(job, Rank(rank)) == expected
