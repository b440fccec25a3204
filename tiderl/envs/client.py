"""The environment client: sessions on one or several environment servers, with retries that never play a turn twice.

Invariants (tests/integration/test_env_client.py):

1. A request that may be sent again (no connection, a reset, a timeout, 5xx, 429, an answer that cannot be read) is, with the
   same request id, after a bounded pause that grows and honours Retry-After, `max_attempts` times at most. Others are not.
2. Whatever remains is an `EnvironmentFailure` that names server, session, status and message; garbage never crashes a caller.
3. `retryable` says whether a fresh session may succeed: the server's word for it, True where no server answered.
4. A session starts where the share of free places is largest, and stays there, whoever goes on with it: to adopt one or to hand
   one over takes and frees no place, for the server has counted it all along.
5. Pausing and resuming survive a lost answer, and a /pause that comes late, after the /resume, does nothing.

Source: paper Appendix B.1.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import quote

import aiohttp

from tiderl.envs import payload
from tiderl.envs.payload import (
    ActionAnswer,
    ActionRequest,
    CapacityAnswer,
    PayloadError,
    SessionRequest,
    StartAnswer,
    StartRequest,
    WireError,
)
from tiderl.envs.protocol import Started, Stepped
from tiderl.envs.retry import AttemptFailed, RetryPolicy
from tiderl.errors import EnvironmentFailure, EnvironmentUnreachable
from tiderl.types import SessionHandle

T = TypeVar("T")

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
CHECK_PAUSE_S = 0.2
#: How old a server's count of sessions may be when the next session is placed.
CAPACITY_AGE_S = 1.0
#: A server that just failed is passed over for this long, if there is another.
AVOID_S = 5.0
#: Seeds whose types are asked for at once; the server's bound (`service.MAX_TASK_TYPES`).
TYPES_PER_REQUEST = 10_000


@dataclass(slots=True)
class _Server:
    url: str
    capacity: int = 0
    #: Places taken by sessions of all clients: the server's count, and what this client has started and ended since.
    in_use: int = 0
    counted_s: float = float("-inf")
    avoid_until_s: float = float("-inf")

    def count(self, counts: CapacityAnswer, now_s: float) -> None:
        self.capacity, self.in_use, self.counted_s = counts.capacity, counts.active + counts.paused, now_s


class EnvSession:
    """One episode on one server. One call at a time. Made by `EnvClient.start` and `EnvClient.adopt`.

    A session that is left without `end` lives on until its lease runs out, for whoever adopts its `handle`.
    """

    def __init__(self, client: EnvClient, server: _Server, handle: SessionHandle, started: Started | None) -> None:
        #: How the episode began; None for a session that was adopted.
        self.started = started
        #: Seconds that the last step took on the server (0.0 before the first).
        self.last_env_s = 0.0
        self._handle = handle
        self._client = client
        self._server = server
        self._stepping = False
        self._ended = False

    @property
    def handle(self) -> SessionHandle:
        """All that another client of the same servers needs to go on from here. Not while a step is under way."""
        return self._handle

    async def step(self, action: str) -> Stepped:
        """Play one action. Raises `EnvironmentFailure`; then the session is of no more use than for `end`."""
        handle = self._handle
        assert not self._stepping, f"session {handle.session_id}: one step at a time"
        self._stepping = True
        try:
            request = ActionRequest(secrets.token_hex(8), handle.session_id, handle.turn, action)
            answer = await self._client.send(handle, "/observation", request, ActionAnswer.from_json)
        finally:
            self._stepping = False
        self._handle = replace(handle, turn=handle.turn + 1)
        self.last_env_s = answer.env_s
        return answer.stepped

    async def pause(self) -> None:
        """Hold the session: `handle.pause_lease_s` applies. Repeat it to renew a long pause. Raises `EnvironmentFailure`."""
        await self._control("/pause")

    async def resume(self) -> None:
        """Go on: `handle.lease_s` applies, from now. A sign of life for an active session. Raises `EnvironmentFailure`."""
        await self._control("/resume")

    async def end(self) -> None:
        """Free the session's place; harmless if it has ended. Never raises for the server: its lease would free it too."""
        if not self._ended:
            self._server.in_use -= 1
            self._ended = True
        try:
            await self._control("/end")
        except EnvironmentFailure as error:
            logger.warning("a session is left to its lease: %s", error)

    async def _control(self, path: str) -> None:
        request = SessionRequest(secrets.token_hex(8), self._handle.session_id)
        await self._client.send(self._handle, path, request, _nothing)


class EnvClient:
    """A client of the servers `urls`, which all serve the same environment. Use as `async with`, or `close` it.

    `env` may be left out where `check` is called first. `request_timeout_s` bounds one attempt; a step that takes longer is
    asked for again and joins the same play on the server.
    """

    def __init__(
        self,
        urls: Sequence[str],
        token: str = "",
        request_timeout_s: float = 60.0,
        *,
        env: str = "",
        retries: RetryPolicy | None = None,
        max_answer_bytes: int = 64 * 1024 * 1024,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not urls:
            raise EnvironmentUnreachable(
                "env.urls: is empty; start a server with `tiderl env serve NAME` and name its URL here"
            )
        self.env = env
        self._servers = [_Server(url.rstrip("/")) for url in urls]
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._request_timeout_s = request_timeout_s
        self._retries = retries or RetryPolicy()
        self._max_answer_bytes = max_answer_bytes
        self._sleep = sleep
        self._clock = clock
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> EnvClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; sessions are not ended."""
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def check(self, env_name: str, start_timeout_s: float) -> None:
        """Wait until every server answers and serves `env_name`. Raises `EnvironmentUnreachable`."""
        deadline_s = self._clock() + start_timeout_s
        await asyncio.gather(*(self._check(server, env_name, deadline_s, start_timeout_s) for server in self._servers))
        self.env = env_name

    async def capacity(self) -> int:
        """Sessions that all servers together can hold. Raises `EnvironmentFailure`."""
        await asyncio.gather(*(self._count(server) for server in self._servers))
        return sum(server.capacity for server in self._servers)

    async def tasks(self) -> dict[str, int]:
        """Number of tasks by split: what every server has. Raises `EnvironmentFailure`."""
        answers = await asyncio.gather(*(self._get(server.url, "/tasks", _splits) for server in self._servers))
        common = set.intersection(*(set(answer) for answer in answers))
        return {split: min(answer[split] for answer in answers) for split in sorted(common)}

    async def task_types(self, split: str, num_tasks: int) -> list[tuple[str, int]]:
        """The types of seeds 0 .. num_tasks-1, as runs of equal ones (type, length). Raises `EnvironmentFailure`."""
        runs: list[tuple[str, int]] = []
        for first in range(0, num_tasks, TYPES_PER_REQUEST):
            count = min(TYPES_PER_REQUEST, num_tasks - first)
            path = f"/task_types?split={quote(split)}&first={first}&count={count}"
            read = partial(payload.task_types_from_json, count=count)
            for task_type, length in await self._get(self._servers[0].url, path, read):
                if runs and runs[-1][0] == task_type:
                    length += runs.pop()[1]
                runs.append((task_type, length))
        return runs

    async def start(self, split: str, seed: int, options: Mapping[str, Any] | None = None) -> EnvSession:
        """Start an episode on the server with most room. Raises `EnvironmentFailure`.

        If a server takes the start but its answer is lost, the next attempt may go to another server; the orphan ends by its lease.
        """
        assert self.env, "EnvClient: give env=…, or call check first"
        request = StartRequest(secrets.token_hex(8), self.env, split, seed, options or {})
        what = f"start of {self.env} {split} {seed}"
        attempt = 0
        while True:
            server = await self._place()
            server.in_use += 1
            try:
                answer = await self._attempt("POST", server.url, "/start", request.to_json(), StartAnswer.from_json)
            except AttemptFailed as error:
                server.in_use -= 1
                server.avoid_until_s = self._clock() + AVOID_S
                await self._pause_or_raise(error, server.url, what, request.request_id, attempt)
            except asyncio.CancelledError:
                server.in_use -= 1
                raise
            else:
                handle = SessionHandle(server.url, answer.session_id, 0, answer.lease_s, answer.pause_lease_s)
                return EnvSession(self, server, handle, answer.started)
            attempt += 1

    def adopt(self, handle: SessionHandle) -> EnvSession:
        """Go on with a session that any client of the same servers has started. Raises `EnvironmentFailure`."""
        for server in self._servers:
            if server.url == handle.url:
                return EnvSession(self, server, handle, None)
        known = ", ".join(server.url for server in self._servers)
        raise EnvironmentFailure(
            f"session {handle.session_id} is on {handle.url}, which is none of this client's servers ({known}): "
            "give all ranks the same env.urls",
            retryable=True,
        )

    async def send(
        self,
        session: SessionHandle,
        path: str,
        request: ActionRequest | SessionRequest,
        read: Callable[[Mapping[str, Any]], T],
    ) -> T:
        """A session's request to its server. Raises `EnvironmentFailure`."""
        what = f"{path} of session {session.session_id}"
        return await self._persist("POST", session.url, path, request.to_json(), read, what, request.request_id)

    async def _persist(
        self,
        method: str,
        url: str,
        path: str,
        body: Mapping[str, Any] | None,
        read: Callable[[Mapping[str, Any]], T],
        what: str,
        request_id: str,
    ) -> T:
        attempt = 0
        while True:
            try:
                return await self._attempt(method, url, path, body, read)
            except AttemptFailed as error:
                await self._pause_or_raise(error, url, what, request_id, attempt)
            attempt += 1

    async def _pause_or_raise(self, error: AttemptFailed, url: str, what: str, request_id: str, attempt: int) -> None:
        if not error.again or attempt + 1 >= self._retries.max_attempts:
            tried = f" (after {attempt + 1} attempts)" if attempt else ""
            raise EnvironmentFailure(f"{url}: {what}: {error}{tried}", retryable=error.retryable) from error
        pause_s = self._retries.pause_s(request_id, attempt, error.retry_after_s)
        logger.info("%s: %s: %s; again in %.2f s", url, what, error, pause_s)
        await self._sleep(pause_s)

    async def _attempt(
        self, method: str, url: str, path: str, body: Mapping[str, Any] | None, read: Callable[[Mapping[str, Any]], T]
    ) -> T:
        """Send one request and read its answer. Raises `AttemptFailed`."""
        try:
            async with self._connection().request(
                method,
                url + path,
                data=None if body is None else payload.dump(body),
                headers={"Content-Type": "application/json"},
                allow_redirects=False,
            ) as response:
                data = await self._body(response)
                status, retry_after_s = response.status, _seconds(response.headers.get("Retry-After", ""))
        except TimeoutError:
            message = f"no answer in {self._request_timeout_s:g} s (timeouts.env_request_s)"
            raise AttemptFailed(0, message, again=True, retryable=True) from None
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            raise AttemptFailed(0, f"not a URL: {error}", again=False, retryable=False) from error
        except (aiohttp.ClientError, OSError) as error:
            message = f"{type(error).__name__}: {error}"
            raise AttemptFailed(0, message, again=True, retryable=True) from error
        if status == 200:
            try:
                return read(payload.load(data))
            except PayloadError as error:
                message = f"the answer cannot be read: {error}; is this an environment server of this version?"
                raise AttemptFailed(status, message, again=True, retryable=True) from error
        again = status == 429 or status >= 500
        try:
            refusal = WireError.from_json(payload.load(data))
        except PayloadError:
            message = f"{data[:200].decode('utf-8', 'replace')!r}, which no environment server says"
            raise AttemptFailed(status, message, again=again, retryable=again, retry_after_s=retry_after_s) from None
        message = f"{refusal.kind}: {refusal.message}"
        raise AttemptFailed(status, message, again=again, retryable=refusal.retryable, retry_after_s=retry_after_s)

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        data = bytearray()
        async for chunk in response.content.iter_any():
            data += chunk
            if len(data) > self._max_answer_bytes:
                message = f"the answer has more than {self._max_answer_bytes} bytes (max_answer_bytes)"
                raise AttemptFailed(response.status, message, again=False, retryable=False)
        return bytes(data)

    def _connection(self) -> aiohttp.ClientSession:
        if self._http is None:  # not in __init__: it belongs to the loop that runs now
            timeout = aiohttp.ClientTimeout(total=self._request_timeout_s, sock_connect=CONNECT_TIMEOUT_S)
            # The servers' capacity bounds the connections, not the client.
            connector = aiohttp.TCPConnector(limit=0)
            self._http = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
        return self._http

    async def _get(self, url: str, path: str, read: Callable[[Mapping[str, Any]], T]) -> T:
        return await self._persist("GET", url, path, None, read, path, "get")

    async def _check(self, server: _Server, env_name: str, deadline_s: float, bound_s: float) -> None:
        while True:
            remaining_s = deadline_s - self._clock()
            try:
                async with asyncio.timeout(max(remaining_s, 0.001)):
                    await self._attempt("GET", server.url, "/health", None, _nothing)
                    counts = await self._attempt("GET", server.url, "/capacity", None, CapacityAnswer.from_json)
                break
            except AttemptFailed as error:
                last, again = str(error), error.again
            except TimeoutError:
                last, again = "no answer", True
            if not again or self._clock() + CHECK_PAUSE_S >= deadline_s:
                waited = f" within {bound_s:g} s (timeouts.env_start_s)" if again else ""
                raise EnvironmentUnreachable(
                    f"environment server {server.url} does not answer as it should{waited}: {last}. "
                    f"Start it with `tiderl env serve {env_name}`, or correct env.urls and env.token_file"
                )
            await self._sleep(CHECK_PAUSE_S)
        if counts.env != env_name:
            raise EnvironmentUnreachable(
                f"environment server {server.url} serves {counts.env!r}, the job wants {env_name!r}: correct env.name or env.urls"
            )

    async def _count(self, server: _Server) -> None:
        server.count(await self._get(server.url, "/capacity", CapacityAnswer.from_json), self._clock())

    async def _place(self) -> _Server:
        """The server for the next session: the largest free share, servers that just failed last."""
        if len(self._servers) == 1:
            return self._servers[0]
        now_s = self._clock()
        stale = [s for s in self._servers if now_s - s.counted_s > CAPACITY_AGE_S and now_s >= s.avoid_until_s]
        await asyncio.gather(*(self._recount(server) for server in stale))

        def preference(server: _Server) -> tuple[bool, float]:
            free_share = (server.capacity - server.in_use) / server.capacity if server.capacity else 0.0
            return (self._clock() < server.avoid_until_s, -free_share)

        return min(self._servers, key=preference)

    async def _recount(self, server: _Server) -> None:
        try:
            counts = await self._attempt("GET", server.url, "/capacity", None, CapacityAnswer.from_json)
        except AttemptFailed as error:
            logger.warning("%s: %s; new sessions go elsewhere for %g s", server.url, error, AVOID_S)
            server.avoid_until_s = self._clock() + AVOID_S
        else:
            server.count(counts, self._clock())


def _nothing(fields: Mapping[str, Any]) -> None:
    """The reader of answers that say no more than yes."""


def _splits(fields: Mapping[str, Any]) -> dict[str, int]:
    splits = payload.take(fields, "splits", dict)
    return {split: payload.take(splits, split, int) for split in splits}


def _seconds(header: str) -> float:
    """A Retry-After in seconds; its other form, a date, is taken for 0."""
    return float(header) if header.isascii() and header.isdigit() else 0.0
