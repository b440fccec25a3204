"""The direct way of reference log-probs from Ref ranks to actors, past the coordinator.

    actor     ReferenceListener   listens, and puts its address and public key into torchrun's store
    Ref rank  ReferenceSender     joins every actor at its start, then sends

Messages are received on the actor's event loop, which has no part in any process group: a backward's collectives and the arrival of
log-probs never wait for each other.

Invariants (tests/integration/test_reference_channel.py):

1. Only ranks of the job are heard; the store holds nothing secret.
2. Log-probs arrive bit for bit, from every Ref rank in the order of its sending.
3. No wait of a Ref rank is without a bound, and an actor that is gone is a `TideError` that names it.

Source: paper §5.1 (ref_log_probs are needed when the backward starts), design.md (The picture).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed import Store  # type: ignore[attr-defined]

from tiderl.errors import WireError
from tiderl.types import Rank
from tiderl.wire.codec import Codec
from tiderl.wire.messages import ReferenceMessage
from tiderl.wire.sockets import ClientKeys, ClientSocket, ServerSocket
from tiderl.worker.store import await_key

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ActorAddress:
    """How to reach an actor: `host:port`, and the public key that it listens with."""

    address: str
    public_key: str

    def publish(self, store: Store, actor: Rank) -> None:
        store.set(_store_key(actor), json.dumps([self.address, self.public_key]))

    @classmethod
    def find(cls, store: Store, actor: Rank, *, timeout_s: float) -> ActorAddress:
        """Blocks until the actor has published it. Raises `WaitTimeout`."""
        what = f"the address of actor rank {actor}"
        text = await_key(store, _store_key(actor), waiter="a Ref rank", waited_for=what, bound_s=timeout_s)
        address, public_key = json.loads(text)
        return cls(address, public_key)


class ReferenceListener:
    """An actor's end. To be used from one event loop."""

    def __init__(self, keys: ClientKeys, *, max_message_bytes: int) -> None:
        self._keys = keys.with_own_server()
        self._wire = ServerSocket(self._keys, max_message_bytes=max_message_bytes)
        self._codec = Codec((ReferenceMessage,), max_message_bytes=max_message_bytes)

    async def open(self, bind_host: str, connect_host: str) -> ActorAddress:
        """Listen on `bind_host`; others find it as `connect_host`. Raises `ConfigError`."""
        port = await self._wire.bind(bind_host)
        host = f"[{connect_host}]" if ":" in connect_host else connect_host
        return ActorAddress(f"{host}:{port}", self._keys.server_public)

    async def receive(self) -> ReferenceMessage:
        """The next message of any Ref rank. Waits without bound: whether one is still to come is known to the coordinator alone.

        Raises `WireError` for what no Ref rank of this version sends.
        """
        rank, frames = await self._wire.recv()
        try:
            message: ReferenceMessage = self._codec.decode(frames)
        except WireError as error:
            raise WireError(f"reference log-probs of rank {rank} cannot be read: {error}") from error
        return message

    async def close(self) -> None:
        await self._wire.close(linger_s=0.0)


class ReferenceSender:
    """A Ref rank's end. To be used from one event loop."""

    def __init__(self, rank: Rank, keys: ClientKeys, *, max_message_bytes: int) -> None:
        self._rank = rank
        self._keys = keys
        self._max_message_bytes = max_message_bytes
        self._codec = Codec((ReferenceMessage,), max_message_bytes=max_message_bytes)
        self._wires: dict[Rank, ClientSocket] = {}

    async def connect(self, actors: Mapping[Rank, ActorAddress], *, timeout_s: float, lost_s: float) -> None:
        """Join all actors. Raises `WireError` or `WaitTimeout`, each with the actor's rank."""
        deadline_s = time.monotonic() + timeout_s
        for actor, place in actors.items():
            wire = ClientSocket(self._rank, server=f"actor rank {actor}", max_message_bytes=self._max_message_bytes)
            self._wires[actor] = wire
            keys = dataclasses.replace(self._keys, server_public=place.public_key)
            left_s = max(0.0, deadline_s - time.monotonic())
            await wire.connect(place.address, keys, timeout_s=left_s, lost_s=lost_s)
        logger.info("joined %d actors", len(self._wires))

    async def send(self, actor: Rank, message: ReferenceMessage, *, timeout_s: float) -> None:
        """Queue a message. Raises `WireError` (the actor is gone, the message too large) or `WaitTimeout` (it does not read)."""
        wire = self._wires.get(actor)
        if wire is None:
            raise WireError(f"rank {self._rank} was to send log-probs to rank {actor}, which is no actor that it knows")
        await wire.send(self._codec.encode(message), timeout_s=timeout_s)

    async def close(self) -> None:
        await asyncio.gather(*(wire.close() for wire in self._wires.values()))


def _store_key(actor: Rank) -> str:
    return f"reference/{actor}"
