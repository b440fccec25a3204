"""The worker processes of an environment server, as seen from its event loop: start, call, lose, replace.

Environment code is synchronous and may be slow, so it runs in processes of its own (`host.py`), each reached over a socket
pair. A session lives in one worker; a worker holds many sessions and plays their calls one after the other.

Invariants (tests/integration/test_env_workers.py, tests/integration/test_env_server.py):

1. A worker that dies, or takes longer over a call than `call_timeout_s`, is lost: it is killed, the call in progress and
   all that wait for it raise `WorkerLost`, and another takes its place.
2. A new session goes to the worker with the fewest.
3. `close` leaves no process behind, and takes `CLOSE_S` at most for workers that are stuck.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tiderl.envs import payload
from tiderl.envs.host import HEADER_BYTES, MAX_FRAME_BYTES
from tiderl.errors import UserError

logger = logging.getLogger(__name__)

#: How long workers get to close their environments when the server ends.
CLOSE_S = 3.0
#: Longest pause between attempts to replace a worker that doesn't come up.
MAX_REPLACE_PAUSE_S = 10.0


class WorkerLost(Exception):
    """The process that held the session is gone."""


class Worker:
    """One process. Make it with `Worker.start`."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process = process
        self.splits: dict[str, int] = {}
        self.num_sessions = 0
        #: Why the worker is lost; empty while it is not.
        self.lost = ""
        self.on_lost: Callable[[Worker], None] = lambda worker: None
        self._reader = reader
        self._writer = writer
        self._turn = asyncio.Lock()
        self._answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read())

    @property
    def pid(self) -> int:
        return self.process.pid

    @classmethod
    async def start(cls, env: str, start_timeout_s: float) -> Worker:
        """Start a process and wait until its environment is imported. Raises `UserError` if that fails."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = _spawn(env, theirs.fileno())
        reader, writer = await asyncio.open_connection(sock=ours)
        worker = cls(process, reader, writer)
        try:
            async with asyncio.timeout(start_timeout_s):
                hello = await worker._answer
        except TimeoutError:
            await worker.close(0.0)
            raise UserError(
                f"environment {env!r}: a worker did not come up in {start_timeout_s:g} s (start_timeout_s)"
            ) from None
        except WorkerLost as error:
            await worker.close(0.0)
            raise UserError(
                f"environment {env!r}: a worker ended at its start ({error}); its output is above"
            ) from error
        except asyncio.CancelledError:
            await worker.close(0.0)
            raise
        if "user_error" in hello:
            await worker.close(0.0)
            raise UserError(hello["user_error"])
        worker.splits = hello["splits"]
        return worker

    async def call(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Have the worker do `message`, after those that were called before. Raises `WorkerLost`.

        Not to be cancelled before the server ends: the worker's answer would be taken for the next call's.
        """
        async with self._turn:
            if self.lost:
                raise WorkerLost(self.lost)
            self._answer = asyncio.get_running_loop().create_future()
            data = payload.dump(message)
            self._writer.write(len(data).to_bytes(HEADER_BYTES, "big") + data)
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._answer
            except TimeoutError:
                self._lose(f"{message['op']} took longer than {timeout_s:g} s (step_timeout_s)")
                raise WorkerLost(self.lost) from None

    async def close(self, grace_s: float = CLOSE_S) -> None:
        """End the process: it sees the end of its socket; after `grace_s` it is killed."""
        self._reading.cancel()
        self.lost = self.lost or "the server is ending"
        self._fail_call()
        self._writer.close()
        with contextlib.suppress(ConnectionError):  # the other end may be dead already
            await self._writer.wait_closed()
        if not await _ended(self.process, grace_s):
            self.process.kill()
            await _ended(self.process, CLOSE_S)

    async def _read(self) -> None:
        try:
            while True:
                num_bytes = int.from_bytes(await self._reader.readexactly(HEADER_BYTES), "big")
                if num_bytes > MAX_FRAME_BYTES:
                    raise payload.PayloadError(f"an answer of {num_bytes} bytes")
                fields = payload.load(await self._reader.readexactly(num_bytes))
                if not self._answer.done():
                    self._answer.set_result(fields)
        except (asyncio.IncompleteReadError, ConnectionError):
            self._lose("its process died")
        except payload.PayloadError as error:
            self._lose(f"it sent nonsense: {error}")

    def _lose(self, why: str) -> None:
        if self.lost:
            return
        self.lost = f"environment worker {self.pid}: {why}"
        self._fail_call()
        self.process.kill()
        self.on_lost(self)

    def _fail_call(self) -> None:
        if not self._answer.done():
            self._answer.set_exception(WorkerLost(self.lost))
            self._answer.exception()  # seen: there may be no call in progress to see it


class WorkerPool:
    """`num_workers` workers of one environment, replaced when lost."""

    def __init__(self, env: str, num_workers: int, start_timeout_s: float) -> None:
        self._env = env
        self._num_workers = num_workers
        self._start_timeout_s = start_timeout_s
        self._workers: list[Worker] = []
        self._splits: dict[str, int] = {}
        self._chores: set[asyncio.Task[None]] = set()
        self._closing = False
        #: Told of every lost worker before its replacement is started.
        self.on_lost: Callable[[Worker], None] = lambda worker: None

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    @property
    def splits(self) -> dict[str, int]:
        """Number of tasks by split, as a worker said at the start."""
        return self._splits

    async def start(self) -> None:
        """Start all workers. Raises `UserError`, and then leaves none behind."""
        starting = (self._start_worker() for _ in range(self._num_workers))
        results = await asyncio.gather(*starting, return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            await self.close()
            raise failures[0]
        self._splits = self._workers[0].splits
        for worker in list(self._workers):
            self._watch(worker)

    def pick(self) -> Worker | None:
        """The worker for a new session, or None while all are lost."""
        return min(self._workers, key=lambda worker: worker.num_sessions, default=None)

    async def close(self) -> None:
        self._closing = True
        for chore in self._chores:
            chore.cancel()
        await asyncio.gather(*self._chores, return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in self._workers))
        self._workers = []

    async def _start_worker(self) -> None:
        # Into the list at once: a start that is cancelled must find the workers that are up already.
        self._workers.append(await Worker.start(self._env, self._start_timeout_s))

    def _watch(self, worker: Worker) -> None:
        worker.on_lost = self._lost
        if worker.lost:  # between its start and now
            self._lost(worker)

    def _lost(self, worker: Worker) -> None:
        if self._closing:
            return
        logger.error("%s; it had %d sessions, another takes its place", worker.lost, worker.num_sessions)
        self._workers.remove(worker)
        self.on_lost(worker)
        chore = asyncio.create_task(self._replace(worker))
        self._chores.add(chore)
        chore.add_done_callback(self._chores.discard)

    async def _replace(self, lost: Worker) -> None:
        pause_s = 0.1
        try:
            while True:
                try:
                    worker = await Worker.start(self._env, self._start_timeout_s)
                    break
                except UserError as error:
                    logger.error("cannot replace a worker, next attempt in %.1f s: %s", pause_s, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2.0 * pause_s, MAX_REPLACE_PAUSE_S)
        finally:
            await lost.close(0.0)
        self._workers.append(worker)
        self._watch(worker)


def _spawn(env: str, fd: int) -> subprocess.Popen[bytes]:
    environ = dict(os.environ)
    # The worker must find what this process finds, however it came onto the path.
    environ["PYTHONPATH"] = os.pathsep.join(part for part in sys.path if part)
    # Workers are many and small; libraries that start a thread per core would fight over them.
    environ.setdefault("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", "tiderl.envs.host", "--fd", str(fd), "--parent", str(os.getpid()), "--env", env]
    # Standard output belongs to the server's ready line: what environments print goes to standard error.
    stderr_fd = 2
    return subprocess.Popen(command, pass_fds=(fd,), env=environ, stdin=subprocess.DEVNULL, stdout=stderr_fd)


async def _ended(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Whether the process ends in that time (and is reaped)."""
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    while process.poll() is None:
        if asyncio.get_running_loop().time() >= deadline_s:
            return False
        await asyncio.sleep(0.02)
    return True
