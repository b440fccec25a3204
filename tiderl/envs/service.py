"""What an environment server answers: the HTTP application, between the session table and the workers.

Every request that changes something is played in a task of its own, which the session records: a client that hangs up
loses nothing, and its next attempt, under the same request id, waits for the same task.

Invariants (tests/integration/test_env_service.py):

1. A request id is played once, however often and however concurrently it arrives.
2. Environment code never runs here. Injected latency, and the delay that an environment asks for beside its answer, block no
   worker and no other session; clients aren't told of either, they see them pass.
3. An environment's failure is an error, never a reward; it ends the session. So does the loss of its worker.
4. Without the token nothing but `/health` is answered.

Source: paper Appendix B.1.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from aiohttp import web

from tiderl.envs import payload
from tiderl.envs.auth import is_authorized
from tiderl.envs.latency import Latency
from tiderl.envs.payload import (
    ActionRequest,
    CapacityAnswer,
    ErrorKind,
    PayloadError,
    Refusal,
    SessionRequest,
    StartRequest,
)
from tiderl.envs.session import Session, SessionTable
from tiderl.envs.workers import Worker, WorkerLost, WorkerPool

logger = logging.getLogger(__name__)

Fields = dict[str, Any]
EnvSession = Session[Worker, "asyncio.Task[Fields]"]
EnvTable = SessionTable[Worker, "asyncio.Task[Fields]"]

RETRY_AFTER_S = 1
#: Seeds whose types one request may ask for: they are worked out between two steps of somebody's session.
MAX_TASK_TYPES = 10_000


class EnvService:
    """The endpoints of one environment."""

    def __init__(
        self,
        env: str,
        pool: WorkerPool,
        table: EnvTable,
        *,
        latency: Latency,
        step_timeout_s: float,
        options: Fields,
        token: str,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._env = env
        self._pool = pool
        self._table = table
        self._latency = latency
        self._step_timeout_s = step_timeout_s
        self._options = options
        self._token = token
        self._clock = clock
        self._sleep = sleep
        self._tasks: set[asyncio.Task[Any]] = set()

    def application(self, max_body_bytes: int) -> web.Application:
        app = web.Application(client_max_size=max_body_bytes, middlewares=[self._guard])
        app.add_routes(
            [
                web.post("/start", self._post_start),
                web.post("/observation", self._post_observation),
                web.post("/pause", self._post_pause),
                web.post("/resume", self._post_resume),
                web.post("/end", self._post_end),
                web.get("/health", self._get_health),
                web.get("/capacity", self._get_capacity),
                web.get("/tasks", self._get_tasks),
                web.get("/task_types", self._get_task_types),
            ]
        )
        return app

    def reap(self) -> None:
        """End the sessions whose lease has run out. Call it every second or so."""
        for session in self._table.expire(self._clock()):
            logger.warning("session %s: its lease ran out", session.session_id)
            self._free(session)

    def worker_lost(self, worker: Worker) -> None:
        """The sessions of a lost worker end."""
        for session in self._table.of_worker(worker):
            self._table.depart(session, Refusal(ErrorKind.WORKER_LOST, worker.lost))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # The endpoints.

    async def _post_start(self, request: web.Request) -> web.Response:
        wanted = StartRequest.from_json(payload.load(await request.read()))
        task = self._table.recall_start(wanted)
        if task is None:
            self._check_task(wanted)
            task = self._spawn(self._start(wanted))
            self._table.record_start(wanted, task)
        return _answer(await asyncio.shield(task))

    async def _post_observation(self, request: web.Request) -> web.Response:
        began_s = self._clock()
        wanted = ActionRequest.from_json(payload.load(await request.read()))
        session = self._table.get(wanted.session_id)
        session.heard_s = began_s
        task = session.recall(wanted.request_id, wanted.turn, wanted.action)
        if task is None:
            task = self._spawn(self._play(session, wanted, began_s))
            session.record(wanted.request_id, wanted.turn, wanted.action, task)
        return _answer(await asyncio.shield(task))

    async def _post_pause(self, request: web.Request) -> web.Response:
        return await self._set_paused(request, True)

    async def _post_resume(self, request: web.Request) -> web.Response:
        return await self._set_paused(request, False)

    async def _set_paused(self, request: web.Request, paused: bool) -> web.Response:
        wanted = SessionRequest.from_json(payload.load(await request.read()))
        self._table.get(wanted.session_id).set_paused(paused, wanted.request_id, self._clock())
        return _answer({})

    async def _post_end(self, request: web.Request) -> web.Response:
        wanted = SessionRequest.from_json(payload.load(await request.read()))
        try:
            session = self._table.get(wanted.session_id)
        except Refusal:
            return _answer({})  # ended already: by an earlier attempt, its lease, or a failure
        self._table.depart(
            session, Refusal(ErrorKind.UNKNOWN_SESSION, f"session {session.session_id} was ended by /end")
        )
        self._free(session)
        return _answer({})

    async def _get_health(self, request: web.Request) -> web.Response:
        if self._pool.pick() is None:
            raise Refusal(ErrorKind.UNAVAILABLE, "all workers are lost and are being replaced")
        return _answer({"status": "ok", "env": self._env})

    async def _get_capacity(self, request: web.Request) -> web.Response:
        counts = CapacityAnswer(self._env, self._table.capacity, self._table.num_active, self._table.num_paused)
        return _answer(counts.to_json())

    async def _get_tasks(self, request: web.Request) -> web.Response:
        return _answer({"env": self._env, "splits": self._pool.splits})

    async def _get_task_types(self, request: web.Request) -> web.Response:
        split, first, count = _read_seeds(request.query)
        num_tasks = self._pool.splits.get(split, 0)
        if first + count > num_tasks:
            raise Refusal(
                ErrorKind.BAD_REQUEST,
                f"split {split} has {num_tasks} tasks, not the seeds {first} to {first + count - 1}",
            )
        worker = self._pool.pick()
        if worker is None:
            raise Refusal(ErrorKind.UNAVAILABLE, "all workers are lost and are being replaced")
        call = {"op": "task_types", "split": split, "first": first, "count": count}
        try:
            answer = await asyncio.shield(self._spawn(worker.call(call, self._step_timeout_s)))
        except WorkerLost as error:
            raise Refusal(ErrorKind.UNAVAILABLE, str(error)) from error
        _raise_if_failed(answer)
        return _answer(answer)

    # What they set going.

    def _check_task(self, wanted: StartRequest) -> None:
        if wanted.env != self._env:
            raise Refusal(ErrorKind.UNKNOWN_ENV, f"this server serves {self._env}, not {wanted.env}")
        num_tasks = self._pool.splits.get(wanted.split)
        if num_tasks is not None and wanted.seed >= num_tasks:
            raise Refusal(
                ErrorKind.BAD_REQUEST, f"split {wanted.split} has seeds 0 to {num_tasks - 1}, not {wanted.seed}"
            )

    async def _start(self, wanted: StartRequest) -> Fields:
        try:
            worker = self._pool.pick()
            if worker is None:
                raise Refusal(ErrorKind.UNAVAILABLE, "all workers are lost and are being replaced")
            session_id = secrets.token_hex(8)
            message = {
                "op": "start",
                "session_id": session_id,
                "split": wanted.split,
                "seed": wanted.seed,
                "options": {**self._options, **wanted.options},
                "max_delay_s": self._step_timeout_s,
            }
            worker.num_sessions += 1
            try:
                started = await worker.call(message, self._step_timeout_s)
                _raise_if_failed(started)
                await self._sleep(started.pop("delay_s"))
                if worker.lost:  # meanwhile, and with it the environment
                    raise WorkerLost(worker.lost)
            except BaseException:
                worker.num_sessions -= 1
                raise
        except WorkerLost as error:
            self._table.abandon_start(wanted)
            # No session was made, so that the client may simply ask again.
            raise Refusal(ErrorKind.UNAVAILABLE, str(error)) from error
        except BaseException:
            self._table.abandon_start(wanted)
            raise
        self._table.add(Session(session_id, wanted.request_id, wanted.seed, worker, self._clock()))
        leases = {"lease_s": self._table.lease_s, "pause_lease_s": self._table.pause_lease_s}
        return {"session_id": session_id, **started, **leases}

    async def _play(self, session: EnvSession, wanted: ActionRequest, began_s: float) -> Fields:
        session.num_in_progress += 1
        try:
            message = {
                "op": "step",
                "session_id": session.session_id,
                "action": wanted.action,
                "max_delay_s": self._step_timeout_s,
            }
            stepped = await session.worker.call(message, self._step_timeout_s)
            _raise_if_failed(stepped)
            await self._sleep(stepped.pop("delay_s") + self._latency.delay_s(session.seed, wanted.turn))
        except WorkerLost as error:
            lost = Refusal(ErrorKind.WORKER_LOST, str(error))
            self._table.depart(session, lost)
            raise lost from error
        except Refusal as failure:
            if self._table.depart(session, failure):
                self._free(session)
            raise
        finally:
            session.num_in_progress -= 1
            session.heard_s = self._clock()
        session.done = stepped["done"]
        return {**stepped, "env_s": self._clock() - began_s}

    def _free(self, session: EnvSession) -> None:
        """Close the environment of a session that has left the table, without making anyone wait for it."""
        session.worker.num_sessions -= 1
        if not session.worker.lost:
            self._spawn(self._close(session))

    async def _close(self, session: EnvSession) -> None:
        try:
            await session.worker.call({"op": "end", "session_id": session.session_id}, self._step_timeout_s)
        except WorkerLost as error:
            logger.warning("session %s: its environment could not be closed: %s", session.session_id, error)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Check the token; turn everything that goes wrong into the error JSON."""
        try:
            if request.path != "/health" and not is_authorized(request.headers.get("Authorization", ""), self._token):
                raise Refusal(
                    ErrorKind.UNAUTHORIZED,
                    "the bearer token is missing or wrong; give the server's token file to the client",
                )
            return await handler(request)
        except Refusal as refusal:
            return _refuse(refusal)
        except PayloadError as error:
            return _refuse(Refusal(ErrorKind.BAD_REQUEST, str(error)))
        except web.HTTPRequestEntityTooLarge as error:
            return _refuse(Refusal(ErrorKind.TOO_LARGE, f"the request body is too large: {error.text}"))
        except web.HTTPClientError as error:
            return _refuse(Refusal(ErrorKind.BAD_REQUEST, f"{request.method} {request.path}: {error.reason}"))


def _raise_if_failed(answer: Fields) -> None:
    if "error" in answer:
        kind = {kind.word: kind for kind in ErrorKind}[answer["error"]["kind"]]
        raise Refusal(kind, answer["error"]["message"])


def _read_seeds(query: Mapping[str, str]) -> tuple[str, int, int]:
    """`split`, `first` and `count` of a request for task types. Raises `PayloadError`."""
    numbers = {}
    for name in ("first", "count"):
        text = query.get(name, "")
        # Longer ones are no seeds, and cost more to read than they are worth.
        if not (text.isascii() and text.isdigit() and len(text) <= 19):
            raise PayloadError(f"{name}: expected a number of seeds, got {text[:40]!r}")
        numbers[name] = int(text)
    if not 1 <= numbers["count"] <= MAX_TASK_TYPES:
        raise PayloadError(f"count: must be between 1 and {MAX_TASK_TYPES}, got {numbers['count']}")
    return query.get("split", ""), numbers["first"], numbers["count"]


def _answer(fields: Fields) -> web.Response:
    return web.Response(body=payload.dump(fields), content_type="application/json")


def _refuse(refusal: Refusal) -> web.Response:
    headers = {"Retry-After": str(RETRY_AFTER_S)} if refusal.kind.status in (429, 503) else {}
    body = payload.dump(refusal.to_json())
    return web.Response(body=body, status=refusal.kind.status, headers=headers, content_type="application/json")
