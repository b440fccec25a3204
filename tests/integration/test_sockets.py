"""The sockets over real TCP on the loopback: who is heard, what is bounded, and what a loss looks like."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import TypeVar

import numpy as np
import pytest
import zmq
import zmq.asyncio

from tiderl.errors import ConfigError, WaitTimeout, WireError
from tiderl.wire.sockets import ClientKeys, ClientSocket, JobKeys, ServerSocket

T = TypeVar("T")

#: Far above what anything here takes: a test that reaches it has hung.
BOUND_S = 30.0
KEYS = JobKeys.generate()
OTHER_KEYS = JobKeys.generate()
#: What somebody has who knows the coordinator's public key, but is not of the job.
STRANGER = ClientKeys(KEYS.server_public, OTHER_KEYS.client_public, OTHER_KEYS.client_secret)


async def soon(awaitable: Awaitable[T]) -> T:
    return await asyncio.wait_for(awaitable, BOUND_S)


@pytest.fixture(autouse=True)
def no_descriptor_left_behind() -> Iterator[None]:
    """Sockets, contexts and their threads all hold file descriptors."""
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= len(before)


@contextlib.asynccontextmanager
async def listening(
    max_message_bytes: int = 1_000_000, max_queued_messages: int = 1000
) -> AsyncIterator[tuple[ServerSocket, str]]:
    coordinator = ServerSocket(KEYS, max_message_bytes=max_message_bytes, max_queued_messages=max_queued_messages)
    try:
        yield coordinator, f"127.0.0.1:{await coordinator.bind('127.0.0.1')}"
    finally:
        await coordinator.close(linger_s=0.0)


@contextlib.asynccontextmanager
async def joined(
    address: str, rank: int, max_message_bytes: int = 1_000_000, max_queued_messages: int = 1000
) -> AsyncIterator[ClientSocket]:
    worker = ClientSocket(rank, max_message_bytes=max_message_bytes, max_queued_messages=max_queued_messages)
    try:
        await worker.connect(address, KEYS.public_for_clients(), timeout_s=BOUND_S)
        yield worker
    finally:
        await worker.close(linger_s=0.0)


@contextlib.asynccontextmanager
async def raw_dealer(address: str, keys: ClientKeys | None, identity: bytes) -> AsyncIterator[zmq.asyncio.Socket]:
    """A peer that does not keep our rules."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    try:
        socket.linger = 0
        socket.identity = identity
        if keys is not None:
            socket.curve_serverkey = keys.server_public.encode()
            socket.curve_publickey = keys.client_public.encode()
            socket.curve_secretkey = keys.client_secret.encode()
        socket.connect(f"tcp://{address}")
        yield socket
    finally:
        socket.close()
        # On a thread of its own: an intruder that libzmq does not let go must not stop the event loop.
        ending = threading.Thread(target=context.term, daemon=True)
        ending.start()
        await asyncio.to_thread(ending.join, BOUND_S)


async def assert_both_ways(coordinator: ServerSocket, worker: ClientSocket, rank: int) -> None:
    await soon(worker.send([b"up", b""]))
    assert await soon(coordinator.recv()) == (rank, [b"up", b""])
    await soon(coordinator.send(rank, [b"down"]))
    assert await soon(worker.recv()) == [b"down"]


async def test_messages_go_both_ways() -> None:
    async with listening() as (coordinator, address), joined(address, 3) as worker:
        await assert_both_ways(coordinator, worker, 3)


async def test_many_ranks_are_told_apart_and_keep_their_order() -> None:
    num_ranks, num_messages = 24, 20
    async with listening() as (coordinator, address), contextlib.AsyncExitStack() as stack:
        workers = await asyncio.gather(*(stack.enter_async_context(joined(address, rank)) for rank in range(num_ranks)))
        for number in range(num_messages):
            await asyncio.gather(*(worker.send([bytes([number])]) for worker in workers))
        heard: dict[int, list[int]] = {rank: [] for rank in range(num_ranks)}
        for _ in range(num_ranks * num_messages):
            rank, (frame,) = await soon(coordinator.recv())
            heard[rank].append(frame[0])
        assert heard == {rank: list(range(num_messages)) for rank in range(num_ranks)}
        for rank in range(num_ranks):
            await coordinator.send(rank, [bytes([rank])])
        assert await asyncio.gather(*(soon(worker.recv()) for worker in workers)) == [
            [bytes([r])] for r in range(num_ranks)
        ]


async def test_memory_of_a_sent_frame_may_be_reused_at_once() -> None:
    async with listening() as (coordinator, address), joined(address, 0) as worker:
        array = np.full(100_000, 7, np.uint8)
        await worker.send([memoryview(array)])
        array[:] = 0
        _, (frame,) = await soon(coordinator.recv())
        assert frame == bytes([7]) * 100_000


@pytest.mark.parametrize(
    ("keys", "identity"),
    [(STRANGER, b"3"), (OTHER_KEYS.public_for_clients(), b"4"), (None, b"5")],
    ids=["unknown client key", "wrong server key", "no key"],
)
async def test_peers_without_the_keys_are_not_heard_and_disturb_nobody(
    keys: ClientKeys | None, identity: bytes
) -> None:
    async with listening() as (coordinator, address), joined(address, 3) as worker:
        async with raw_dealer(address, keys, identity) as intruder:
            await intruder.send(b"let me in")
            answer = asyncio.ensure_future(intruder.recv())
            # All that arrives is the worker's, though the intruder spoke first.
            for _ in range(20):
                await assert_both_ways(coordinator, worker, 3)
            assert not answer.done()
            answer.cancel()
            if identity != b"3":
                with pytest.raises(WireError, match=f"rank {identity.decode()} is not connected"):
                    await coordinator.send(int(identity), [b"hello"])


async def test_garbage_on_the_port_disturbs_nobody() -> None:
    async with listening() as (coordinator, address), joined(address, 3) as worker:
        host, port = address.split(":")
        for garbage in (
            b"GET / HTTP/1.1\r\n\r\n",
            bytes(range(256)) * 50,
            b"\xff" + bytes(8) + b"\x7f\x03" + bytes(60),
        ):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(garbage)
            await assert_both_ways(coordinator, worker, 3)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await soon(writer.wait_closed())


async def test_a_worker_with_another_job_s_client_key_is_told_so() -> None:
    async with listening() as (_, address):
        worker = ClientSocket(3)
        with pytest.raises(WireError, match="refuses the keys of rank 3"):
            await soon(worker.connect(address, STRANGER, timeout_s=BOUND_S))
        await worker.close()


@pytest.mark.parametrize("keys", [KEYS, OTHER_KEYS], ids=["nobody listens", "wrong server key"])
async def test_a_worker_that_cannot_join_gives_up_after_its_bound(keys: JobKeys) -> None:
    async with listening() as (coordinator, address):
        if keys is KEYS:
            await coordinator.close()
        worker = ClientSocket(3)
        doubt = "" if keys is KEYS else ".*hangs up in the handshake"
        with pytest.raises(WaitTimeout, match=f"rank 3 waited 0.4 s for the coordinator at {address}{doubt}"):
            await soon(worker.connect(address, keys.public_for_clients(), timeout_s=0.4))
        await worker.close()


async def test_a_worker_that_comes_before_the_coordinator_joins_it_later() -> None:
    async with listening() as (_, address):
        port = int(address.split(":")[1])
    # The port is free again; a coordinator cannot be told its port, so a plain socket plays its part.
    worker = ClientSocket(3)
    joining = asyncio.ensure_future(worker.connect(f"127.0.0.1:{port}", KEYS.public_for_clients(), timeout_s=BOUND_S))
    await asyncio.sleep(0.05)
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    router.curve_server = True
    router.curve_secretkey = KEYS.server_secret.encode()
    router.bind(f"tcp://127.0.0.1:{port}")
    try:
        await soon(joining)
        await worker.send([b"here"])
        assert await soon(router.recv_multipart()) == [b"3", b"here"]
    finally:
        await worker.close()
        router.close(linger=0)
        context.term()


async def test_an_oversized_message_is_refused_before_it_is_sent() -> None:
    async with listening(max_message_bytes=1000) as (coordinator, address):
        async with joined(address, 3, max_message_bytes=1000) as worker:
            with pytest.raises(WireError, match="message of rank 3 has 1001 bytes, over the limit of 1000"):
                await worker.send([bytes(1000), b"x"])
            await assert_both_ways(coordinator, worker, 3)
            with pytest.raises(WireError, match="message to rank 3 has 1001 bytes, over the limit of 1000"):
                await coordinator.send(3, [bytes(1001)])
            await assert_both_ways(coordinator, worker, 3)


async def test_an_oversized_message_is_dropped_where_it_arrives_and_its_sender_cut_off() -> None:
    async with listening(max_message_bytes=1000) as (coordinator, address), joined(address, 3) as worker:
        async with joined(address, 4) as careless:
            await careless.send([b"fine"])
            await careless.send([bytes(2000)])
            assert await soon(coordinator.recv()) == (4, [b"fine"])
            with pytest.raises(WireError, match="rank 4 has lost its connection"):
                await soon(careless.recv())
            assert "rank 4 has lost" in careless.lost
            with pytest.raises(WireError, match="rank 4 has lost its connection"):
                await soon(careless.send([b"again"]))
            await assert_both_ways(coordinator, worker, 3)


@pytest.mark.parametrize("identity", [b"three", b"03", b"-1", b"\xff\xfe", b" 3"])
async def test_a_peer_that_is_no_rank_is_reported_and_the_next_message_still_arrives(identity: bytes) -> None:
    async with listening() as (coordinator, address), joined(address, 3) as worker:
        async with raw_dealer(address, KEYS.public_for_clients(), identity) as odd:
            await odd.send(b"hello")
            with pytest.raises(WireError, match="which is no rank"):
                await soon(coordinator.recv())
            await assert_both_ways(coordinator, worker, 3)


async def test_a_rank_that_is_not_connected_is_named() -> None:
    async with listening() as (coordinator, _):
        with pytest.raises(WireError, match="rank 7 is not connected"):
            await coordinator.send(7, [b"hello"])


async def test_a_rank_that_does_not_read_fills_its_own_queue_only() -> None:
    async with listening(max_queued_messages=10) as (coordinator, address):
        async with joined(address, 3) as worker, joined(address, 4, max_queued_messages=10):
            with pytest.raises(WireError, match="rank 4 has left 10 messages unread"):
                for _ in range(10_000):  # the kernel's buffers take some too
                    await coordinator.send(4, [bytes(100_000)])
            await assert_both_ways(coordinator, worker, 3)


async def test_a_coordinator_that_does_not_read_makes_a_worker_wait_within_its_bound() -> None:
    async with listening(max_queued_messages=10) as (_, address), joined(address, 3, max_queued_messages=10) as worker:
        with pytest.raises(WaitTimeout, match="rank 3 waited 0.2 s for the coordinator to read its messages"):
            for _ in range(10_000):
                await worker.send([bytes(100_000)], timeout_s=0.2)


async def test_a_lost_connection_is_reported_after_what_had_arrived() -> None:
    async with listening() as (coordinator, address), joined(address, 3) as worker:
        await worker.send([b"up"])
        await soon(coordinator.recv())
        for number in range(5):
            await coordinator.send(3, [bytes([number])])
        await coordinator.close(linger_s=BOUND_S)
        assert [await soon(worker.recv()) for _ in range(5)] == [[bytes([number])] for number in range(5)]
        with pytest.raises(WireError, match=r"rank 3 has lost its connection to the coordinator at tcp://127\.0\.0\.1"):
            await soon(worker.recv())


async def test_a_receive_that_is_cancelled_takes_no_message_with_it() -> None:
    async with listening() as (coordinator, address), joined(address, 3) as worker:
        await worker.send([b"up"])
        await soon(coordinator.recv())
        for _ in range(20):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(worker.recv(), 0.001)
        await coordinator.send(3, [b"down"])
        assert await soon(worker.recv()) == [b"down"]


async def test_what_is_queued_is_sent_before_the_socket_closes() -> None:
    async with listening() as (coordinator, address), joined(address, 3) as worker:
        for number in range(100):
            await worker.send([bytes([number]) * 1000])
        await worker.close(linger_s=BOUND_S)
        assert [(await soon(coordinator.recv()))[1][0][0] for _ in range(100)] == list(range(100))


async def test_closing_twice_or_before_anything_else_is_harmless() -> None:
    coordinator, worker = ServerSocket(KEYS), ClientSocket(0)
    for socket in (coordinator, worker):
        await socket.close()
        await socket.close()


async def test_a_worker_that_has_not_connected_says_so() -> None:
    worker = ClientSocket(5)
    with pytest.raises(WireError, match="rank 5 has not connected"):
        await worker.recv()
    with pytest.raises(WireError, match="rank 5 has not connected"):
        await worker.send([b"x"])
    await worker.close()


async def test_an_address_that_is_not_ours_is_a_config_error() -> None:
    coordinator = ServerSocket(KEYS)
    with pytest.raises(ConfigError, match=r"wire.bind_host: cannot listen on '203\.0\.113\.7'"):
        await coordinator.bind("203.0.113.7")
    await coordinator.close()


def test_keys_are_fresh_and_keep_their_secrets_out_of_the_logs() -> None:
    assert len({*dataclasses.astuple(KEYS), *dataclasses.astuple(OTHER_KEYS)}) == 8
    for keys in (KEYS, KEYS.public_for_clients()):
        assert KEYS.client_secret not in repr(keys)
        assert KEYS.server_secret not in repr(keys)
    assert KEYS.server_secret not in dataclasses.astuple(KEYS.public_for_clients())
