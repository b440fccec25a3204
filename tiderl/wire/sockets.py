"""The sockets between the processes of a job: ROUTER and DEALER over TCP, encrypted and authenticated by CURVE.

Servers are the coordinator, for all workers, and actors, for Ref ranks; each has a key pair of its own. Clients are workers, and
share the one client key pair that is made at the job's start (`JobKeys.generate`): whoever holds it is a worker of the job, and
everybody else gets no answer. Frames are opaque here; `codec.py` gives them meaning. This is the only file that imports zmq.

Invariants (tests/integration/test_sockets.py):

1. Only peers with the job's client key are heard; a wrong key, no key or garbage disturbs nobody.
2. Between a client and its server messages arrive whole, once and in order, or the connection is reported lost: a client
   whose connection breaks does not come back under the same socket, because what was on its way would be missing in silence.
3. No send waits without a bound. The server's never waits at all: a rank that leaves `max_queued_messages` unread, or that
   is not connected, is a `WireError` which names it. A client's waits for `timeout_s` and then raises `WaitTimeout`.
4. A frame over `max_message_bytes` is refused where it is sent; a peer that sends one all the same is disconnected.
5. `close` sends what is queued for at most `linger_s` and leaves no socket, task or thread behind; should libzmq not end its
   context in time, it says so in the log and goes on.

Sent frames are copied: the caller may reuse their memory as soon as `send` has returned.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from tiderl.errors import ConfigError, WaitTimeout, WireError
from tiderl.wire.codec import DEFAULT_MAX_MESSAGE_BYTES
from tiderl.wire.leaves import Buffer

DEFAULT_MAX_QUEUED_MESSAGES = 10_000
#: What ending a context may take beyond its linger, and how often it is looked at.
_TERM_GRACE_S = 2.0
_TERM_POLL_S = 0.005
#: Where libzmq looks for the one who decides which client keys are let in (ZAP, RFC 27).
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_NEVER_MS = 24 * 3600 * 1000
#: Between attempts to join; `connect` bounds them all together.
_RETRY_S = 0.1
_WATCHED_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
)


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """What a worker needs to join: Z85 text, to be kept secret (files 0600, never on a command line)."""

    server_public: str
    client_public: str
    client_secret: str = field(repr=False)

    def with_own_server(self) -> JobKeys:
        """For a worker that listens itself: a fresh server key pair, for the clients of the same job."""
        server_public, server_secret = zmq.curve_keypair()
        return JobKeys(server_public.decode(), server_secret.decode(), self.client_public, self.client_secret)


@dataclass(frozen=True, slots=True)
class JobKeys:
    """The keys of one server of a job, as Z85 text. Only that server holds all four."""

    server_public: str
    server_secret: str = field(repr=False)
    client_public: str
    client_secret: str = field(repr=False)

    @classmethod
    def generate(cls) -> JobKeys:
        """Fresh random keys."""
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        return cls(server_public.decode(), server_secret.decode(), client_public.decode(), client_secret.decode())

    def public_for_clients(self) -> ClientKeys:
        """The part that workers get: all but the server's secret."""
        return ClientKeys(self.server_public, self.client_public, self.client_secret)


class ServerSocket:
    """The server's end: hears all ranks that join it, speaks to each. To be used from one event loop."""

    def __init__(
        self,
        keys: JobKeys,
        *,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        max_queued_messages: int = DEFAULT_MAX_QUEUED_MESSAGES,
    ) -> None:
        self._client_key = z85.decode(keys.client_public)
        self._max_message_bytes = max_message_bytes
        self._max_queued_messages = max_queued_messages
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _set_limits(self._socket, max_message_bytes, max_queued_messages)
        self._socket.curve_server = True
        self._socket.curve_publickey = keys.server_public.encode()
        self._socket.curve_secretkey = keys.server_secret.encode()
        self._socket.router_mandatory = True
        self._zap = self._context.socket(zmq.REP)
        self._zap.linger = 0
        self._gate: asyncio.Task[None] | None = None

    async def bind(self, host: str) -> int:
        """Listen on a free port of `host` (an address of this machine, or 0.0.0.0) and return it. Raises `ConfigError`."""
        # The gate must stand before the door opens: without a ZAP handler libzmq lets every CURVE client in.
        self._zap.bind(_ZAP_ENDPOINT)
        self._gate = asyncio.create_task(self._keep_gate(), name="wire-gate")
        is_ipv6 = ":" in host
        self._socket.ipv6 = is_ipv6
        try:
            self._socket.bind(f"tcp://[{host}]:0" if is_ipv6 else f"tcp://{host}:0")
        except zmq.ZMQError as error:
            raise ConfigError(
                "wire.bind_host", f"cannot listen on {host!r}: {error}; give an address of this machine"
            ) from error
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return int(endpoint.rpartition(":")[2])

    async def recv(self) -> tuple[int, list[bytes]]:
        """The next message of any rank: (rank, frames). Waits without bound; the caller's deadlines are its own.

        Raises `WireError` for a peer that is not named after a rank; the next call goes on with the next message.
        """
        identity, *frames = await self._socket.recv_multipart()
        try:
            rank = int(identity.decode("ascii"))
        except ValueError:
            rank = -1
        if rank < 0 or identity != _identity(rank):
            raise WireError(f"a peer with the job's keys calls itself {identity[:64]!r}, which is no rank")
        return rank, frames

    async def send(self, rank: int, frames: Sequence[Buffer]) -> None:
        """Queue a message for a rank. Raises `WireError` (not connected, queue full, too large); nothing is sent then."""
        _check_sizes(f"message to rank {rank}", frames, self._max_message_bytes)
        try:
            await self._socket.send_multipart([_identity(rank), *frames], flags=zmq.NOBLOCK)
        except zmq.Again:
            raise WireError(f"rank {rank} has left {self._max_queued_messages} messages unread") from None
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            raise WireError(f"rank {rank} is not connected") from None

    async def close(self, linger_s: float = 1.0) -> None:
        """Stop listening; queued messages get `linger_s` to leave. May be called twice."""
        await _end(self._gate)
        self._zap.close()
        await _terminate(self._context, self._socket, linger_s)

    async def _keep_gate(self) -> None:
        """Answer libzmq's question whether a peer may come in, for as long as the socket lives."""
        while True:
            (
                version,
                request_id,
                _domain,
                _address,
                _identity,
                mechanism,
                *credentials,
            ) = await self._zap.recv_multipart()
            allowed = mechanism == b"CURVE" and credentials == [self._client_key]
            verdict = (b"200", b"OK", b"worker") if allowed else (b"400", b"unknown key", b"")
            await self._zap.send_multipart([version, request_id, *verdict, b""])


class ClientSocket:
    """A worker's end, named after its rank; `server` is what errors call the other one. To be used from one event loop."""

    def __init__(
        self,
        rank: int,
        *,
        server: str = "the coordinator",
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        max_queued_messages: int = DEFAULT_MAX_QUEUED_MESSAGES,
    ) -> None:
        self._rank = rank
        self._server = server
        self._max_message_bytes = max_message_bytes
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _set_limits(self._socket, max_message_bytes, max_queued_messages)
        self._socket.identity = _identity(rank)
        # An event that nobody will read must not keep the context from ending.
        self._monitor = self._socket.get_monitor_socket(_WATCHED_EVENTS)
        self._monitor.linger = 0
        self._watch: asyncio.Task[None] | None = None
        self._joined: asyncio.Future[str] | None = None
        self._doubt = ""
        self._lost: asyncio.Future[str] | None = None

    async def connect(self, address: str, keys: ClientKeys, *, timeout_s: float, lost_s: float = 60.0) -> None:
        """Join the server at `host:port` and wait until it has accepted the keys.

        A server whose machine is silent for `lost_s` counts as lost. Raises `WireError` if the keys are refused,
        `WaitTimeout` after `timeout_s`.
        """
        loop = asyncio.get_running_loop()
        self._joined, self._lost = loop.create_future(), loop.create_future()
        self._socket.ipv6 = address.startswith("[")
        self._socket.curve_serverkey = keys.server_public.encode()
        self._socket.curve_publickey = keys.client_public.encode()
        self._socket.curve_secretkey = keys.client_secret.encode()
        self._socket.heartbeat_ivl = max(1, int(lost_s * 1000 / 4))
        self._socket.heartbeat_timeout = max(1, int(lost_s * 1000))
        # libzmq would join again by itself after a loss, with a gap in the messages: so it must not try (0 would mean "at once").
        self._socket.reconnect_ivl = _NEVER_MS
        try:
            self._socket.connect(f"tcp://{address}")
        except zmq.ZMQError as error:
            raise WireError(
                f"rank {self._rank} cannot connect to {address!r}, which should be host:port: {error}"
            ) from error
        self._watch = asyncio.create_task(self._watch_connection(f"tcp://{address}"), name="wire-watch")
        await asyncio.wait({self._joined}, timeout=timeout_s)
        if not self._joined.done():
            raise WaitTimeout(
                f"rank {self._rank}", f"{self._server} at {address}{self._doubt}", timeout_s, "timeouts.start_s"
            )
        if self._joined.result() == "refused":
            raise WireError(
                f"{self._server} at {address} refuses the keys of rank {self._rank}: they are of another job"
            )

    async def recv(self) -> list[bytes]:
        """The next message's frames. Waits without bound, but for a connection that is lost: `WireError`."""
        lost = self._require_joined()
        message = asyncio.ensure_future(self._socket.recv_multipart())
        try:
            either: tuple[asyncio.Future[Any], ...] = (message, lost)
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # A future that is done keeps its message; one that is not has taken none.
            message.cancel()
        if not message.cancelled():
            return message.result()
        try:
            # What had arrived before the loss is delivered before the loss is reported.
            return await self._socket.recv_multipart(flags=zmq.NOBLOCK)
        except zmq.Again:
            raise WireError(lost.result()) from None

    async def send(self, frames: Sequence[Buffer], *, timeout_s: float = 60.0) -> None:
        """Queue a message for the server. Raises `WireError` (connection lost, too large) or `WaitTimeout` (queue full)."""
        lost = self._require_joined()
        if lost.done():
            raise WireError(lost.result())
        _check_sizes(f"message of rank {self._rank}", frames, self._max_message_bytes)
        try:
            # Not `wait_for`: Python 3.11's forgets a cancellation that comes while the message goes out.
            async with asyncio.timeout(timeout_s):
                await self._socket.send_multipart(list(frames))
        except TimeoutError:
            raise WaitTimeout(
                f"rank {self._rank}", f"{self._server} to read its messages", timeout_s, "timeouts.lost_s"
            ) from None

    @property
    def lost(self) -> str:
        """Why the connection is lost; empty while it is up."""
        return self._lost.result() if self._lost is not None and self._lost.done() else ""

    async def close(self, linger_s: float = 1.0) -> None:
        """Leave; queued messages get `linger_s` to go out. May be called twice."""
        await _end(self._watch)
        if not self._monitor.closed:
            self._socket.disable_monitor()
            self._monitor.close()
        await _terminate(self._context, self._socket, linger_s)

    def _require_joined(self) -> asyncio.Future[str]:
        if self._lost is None:
            raise WireError(f"rank {self._rank} has not connected to {self._server} yet")
        return self._lost

    async def _watch_connection(self, endpoint: str) -> None:
        """Turn libzmq's events into the two facts that matter: joined (or refused), and lost."""
        joined, lost = self._joined, self._require_joined()
        assert joined is not None
        while not lost.done():
            event = (await recv_monitor_message(self._monitor))["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                joined.set_result("accepted")
            elif event in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
                joined.set_result("refused")
                return
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._doubt = " (which hangs up in the handshake: perhaps it belongs to another job)"
            elif event == zmq.EVENT_DISCONNECTED and joined.done():
                lost.set_result(f"rank {self._rank} has lost its connection to {self._server} at {endpoint}")
            elif event == zmq.EVENT_CONNECT_RETRIED:
                await asyncio.sleep(_RETRY_S)
                self._socket.disconnect(endpoint)
                self._socket.connect(endpoint)


def _identity(rank: int) -> bytes:
    return str(rank).encode("ascii")


def _set_limits(socket: zmq.asyncio.Socket, max_message_bytes: int, max_queued_messages: int) -> None:
    socket.maxmsgsize = max_message_bytes
    socket.sndhwm = max_queued_messages
    socket.rcvhwm = max_queued_messages


def _check_sizes(what: str, frames: Sequence[Buffer], max_message_bytes: int) -> None:
    num_bytes = sum(len(frame) for frame in frames)
    if num_bytes > max_message_bytes:
        raise WireError(f"{what} has {num_bytes} bytes, over the limit of {max_message_bytes} (wire.max_message_bytes)")


async def _end(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait([task])


async def _terminate(context: zmq.asyncio.Context, socket: zmq.asyncio.Socket, linger_s: float) -> None:
    """Close the socket and end the context, which blocks until the linger has passed: on a thread that nobody has to join."""
    socket.close(linger=round(linger_s * 1000))
    ending = threading.Thread(target=context.term, name="wire-term", daemon=True)
    ending.start()
    deadline_s = time.monotonic() + linger_s + _TERM_GRACE_S
    while ending.is_alive():
        if time.monotonic() > deadline_s:
            logger.warning(
                "libzmq did not end its context within %.1f s; its thread is left behind", linger_s + _TERM_GRACE_S
            )
            return
        await asyncio.sleep(_TERM_POLL_S)
