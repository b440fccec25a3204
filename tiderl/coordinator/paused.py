"""The tasks between two ranks: their records, and the leases of their environment sessions.

A paused task is on no rank. Whatever happens to it meanwhile happens here: it is handed out to the rank that goes on with it, ended
because nobody waits for it any more, or lost because its environment session is gone. Until then its session hears `/pause` again
and again, so that it lives however long the pause.

The danger is a `/pause` that arrives after the next rank's `/resume`: it would stop the clock of a session that is being played. So
a task whose lease is under renewal when the core resumes it leaves only when that renewal has ended, and the orders that the core
gives about it in the meantime (`after_leaving`) leave behind it.

Invariants (tests/unit/test_paused.py):

1. A kept session is renewed at least every `pause_lease_s / RENEWALS_PER_LEASE`, but for the wait for a free place (invariant 4).
2. A session hears one request at a time, and none from here once its task has been delivered.
3. A kept task leaves in one way: delivered once, ended once, or reported lost once. What the core decides comes first: a task
   that it has resumed or ended before it could hear of the loss is not reported (the rank's `/resume` will say so).
4. At most `MAX_RENEWALS` renewals and `MAX_ENDS` ends are in flight, however many tasks are paused or ended at once.
5. Nothing here waits for an environment server without a bound, and `close` leaves no session, task or timer behind; what a
   server does not answer in time is named in the log and left to its lease.

Source: paper §4.1 (`/pause` and `/resume` of the inactivity clock), Appendix B.1.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from tiderl.errors import EnvironmentFailure
from tiderl.types import PausedTask, SessionHandle, TaskId

logger = logging.getLogger(__name__)

#: Two renewals may fail to arrive before the server ends the session.
RENEWALS_PER_LEASE = 3
#: A server that grants next to no lease is not to be asked in a tight loop.
MIN_INTERVAL_S = 0.05
#: Requests in flight: enough for thousands of sessions, too few to trouble a server that comes back after a break.
MAX_RENEWALS = 16
MAX_ENDS = 32


class PausedSession(Protocol):
    """An environment session that another process has started (`envs.client.EnvSession`)."""

    async def pause(self) -> None:
        """Renew the pause. Raises `EnvironmentFailure` when the session cannot be reached or is gone."""

    async def end(self) -> None:
        """Free the session's place. Never raises for the server."""


class SessionAdopter(Protocol):
    """Where sessions are reached again (`envs.client.EnvClient`)."""

    def adopt(self, handle: SessionHandle) -> PausedSession:
        """Raises `EnvironmentFailure` for a session on a server that this process does not know."""


@dataclass(slots=True, eq=False)
class _Kept:
    """A paused task. `number` tells its pauses apart: it may have been here before."""

    task: PausedTask
    number: int
    renewal: asyncio.Task[None] | None = None
    is_lost: bool = False

    @property
    def interval_s(self) -> float:
        return max(MIN_INTERVAL_S, self.task.session.pause_lease_s / RENEWALS_PER_LEASE)

    def __str__(self) -> str:
        return f"session {self.task.session.session_id} on {self.task.session.url} (task {self.task.task_id})"


class PausedTasks:
    """Owner of every paused task; to be used from one event loop, and closed.

    `request_s` bounds how long a task waits for the renewal in flight, and how long a session's end may take. `on_lost` is told of
    a session that is gone; before the core hears of it, `forget` drops the task and says whether it is still news.
    """

    def __init__(self, sessions: SessionAdopter, request_s: float, on_lost: Callable[[TaskId, str], None]) -> None:
        self._sessions = sessions
        self._request_s = request_s
        self._on_lost = on_lost
        self._kept: dict[TaskId, _Kept] = {}
        #: What is to be done, in this order, when a task that is leaving has left.
        self._leaving: dict[TaskId, list[Callable[[], None]]] = {}
        #: When whose lease is to be renewed: (loop time, number of the pause, task). Entries of tasks that have left go when due.
        self._due: list[tuple[float, int, TaskId]] = []
        self._numbers = itertools.count()
        self._sooner = asyncio.Event()
        self._renewal_places = asyncio.Semaphore(MAX_RENEWALS)
        self._end_places = asyncio.Semaphore(MAX_ENDS)
        self._clockwork: asyncio.Task[None] | None = None
        self._work: set[asyncio.Task[None]] = set()
        self._fault: BaseException | None = None
        self._closing = False

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, task: PausedTask) -> None:
        """Take over a task whose session was paused just now. Once closing, its session is ended instead."""
        kept = _Kept(task, next(self._numbers))
        self._kept[task.task_id] = kept
        if self._closing:
            self.end((task.task_id,))
            return
        if self._clockwork is None:
            self._clockwork = self._spawn(self._renew_when_due())
        self._schedule(kept, asyncio.get_running_loop().time() + kept.interval_s)

    def take(self, task_id: TaskId, deliver: Callable[[PausedTask], None]) -> None:
        """Hand the task out: `deliver` is called with it, at once or right after the renewal in flight."""
        kept = self._kept.pop(task_id)
        if kept.renewal is None:
            deliver(kept.task)
            return
        self._leaving[task_id] = [partial(deliver, kept.task)]
        self._spawn(self._let_go(kept))

    def after_leaving(self, task_id: TaskId, then: Callable[[], None]) -> None:
        """Call `then`: at once, or behind the delivery of a task that is leaving."""
        followers = self._leaving.get(task_id)
        if followers is None:
            then()
        else:
            followers.append(then)

    def end(self, task_ids: Iterable[TaskId]) -> None:
        """Forget these tasks, and end their sessions in the background."""
        for task_id in task_ids:
            self._spawn(self._end(self._kept.pop(task_id)))

    def forget(self, task_id: TaskId) -> bool:
        """Drop a lost task. False if it was taken or ended before: then the core need not hear of its session."""
        kept = self._kept.get(task_id)
        if kept is None or not kept.is_lost:
            return False
        del self._kept[task_id]
        return True

    def check(self) -> None:
        """Raise the bug, if any, that has ended a piece of work here, which nobody awaits."""
        if self._fault is not None:
            raise self._fault

    def end_all(self) -> None:
        """The job is over: end every session that is here, and those that still come."""
        self._closing = True
        if self._clockwork is not None:
            self._clockwork.cancel()
        self.end(tuple(self._kept))

    async def close(self, timeout_s: float) -> None:
        """End all sessions that are left and wait for that, at most `timeout_s`."""
        self.end_all()
        if not self._work:
            return
        _, unfinished = await asyncio.wait(self._work, timeout=timeout_s)
        if unfinished:
            logger.warning("%d requests about paused sessions are unanswered and left to their leases", len(unfinished))
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)

    # --- the leases -----------------------------------------------------------------------------------------------

    def _schedule(self, kept: _Kept, due_s: float) -> None:
        if len(self._due) > 2 * len(self._kept) + MAX_RENEWALS:
            # Most entries are of tasks that have left; each would stay for a third of a lease.
            self._due = [entry for entry in self._due if self._is_here(entry)]
            heapq.heapify(self._due)
        heapq.heappush(self._due, (due_s, kept.number, kept.task.task_id))
        self._sooner.set()

    def _is_here(self, entry: tuple[float, int, TaskId]) -> bool:
        _, number, task_id = entry
        kept = self._kept.get(task_id)
        return kept is not None and kept.number == number

    async def _renew_when_due(self) -> None:
        while True:
            await self._renewal_places.acquire()
            kept = await self._next_due()
            kept.renewal = self._spawn(self._renew(kept))
            kept.renewal.add_done_callback(partial(self._renewed, kept))

    async def _next_due(self) -> _Kept:
        """Wait until the lease of a kept task is to be renewed."""
        loop = asyncio.get_running_loop()
        while True:
            if self._due and self._due[0][0] <= loop.time():
                entry = heapq.heappop(self._due)
                if self._is_here(entry):
                    return self._kept[entry[2]]
                continue
            self._sooner.clear()
            await _wait_for(self._sooner, self._due[0][0] - loop.time() if self._due else None)

    async def _renew(self, kept: _Kept) -> None:
        began_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(kept.interval_s):
                await self._sessions.adopt(kept.task.session).pause()
        except EnvironmentFailure as error:
            kept.is_lost = True
            logger.warning("%s: its lease could not be renewed: %s", kept, error)
            self._on_lost(kept.task.task_id, str(error))
            return
        except TimeoutError:
            logger.warning("%s: no answer to a renewal of its lease in %.1f s; asking again", kept, kept.interval_s)
        self._schedule(kept, began_s + kept.interval_s)

    def _renewed(self, kept: _Kept, renewal: asyncio.Task[None]) -> None:
        kept.renewal = None
        self._renewal_places.release()

    # --- leaving --------------------------------------------------------------------------------------------------

    async def _let_go(self, kept: _Kept) -> None:
        await self._quiet(kept)
        followers = self._leaving.pop(kept.task.task_id)
        if self._closing:  # the rank that it would go to is leaving too
            await self._end(kept)
            return
        for then in followers:
            then()

    async def _end(self, kept: _Kept) -> None:
        async with self._end_places:
            await self._quiet(kept)
            if kept.is_lost:
                return
            try:
                async with asyncio.timeout(self._request_s):
                    await self._sessions.adopt(kept.task.session).end()
            except EnvironmentFailure as error:
                logger.warning("%s is left to its lease: %s", kept, error)
            except TimeoutError:
                bound = f"{self._request_s:g} s (timeouts.env_request_s)"
                logger.warning("%s is left to its lease: no answer to its end in %s", kept, bound)

    async def _quiet(self, kept: _Kept) -> None:
        """Wait until no renewal is in flight; one that is not answered in time is given up."""
        if kept.renewal is None:
            return
        try:
            async with asyncio.timeout(self._request_s):
                await kept.renewal
        except TimeoutError:
            bound = f"{self._request_s:g} s (timeouts.env_request_s)"
            logger.warning("%s: no answer to a renewal of its lease in %s; it leaves without one", kept, bound)

    # --- background work ------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._work.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fault = self._fault or error


async def _wait_for(event: asyncio.Event, timeout_s: float | None) -> None:
    """Until the event is set or the time is over."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
