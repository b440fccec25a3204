"""The device thread: one thread that owns a device, driven by posted functions and by a step, with asyncio at its door.

The loop is: run what was posted, in order; take one step; tell the event loops what finished. It sleeps when nothing is posted and
the last step said that no work is left. It knows nothing of what a step is: engine and trainer can live behind it alike.

Invariants (tests/unit/test_device_thread.py):

1. Posted functions run on the device thread only, in the order of posting, never during a step.
2. Steps go on while functions are posted: a step waits for those posted before it, never for those that they or others post later.
3. The outcomes of one round reach an event loop in one wake-up, however many there are.
4. `stop` runs what was posted before it and nothing after; whatever comes later raises `EngineError`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from tiderl.errors import EngineError, WaitTimeout

T = TypeVar("T")
Outcome = tuple["asyncio.Future[Any]", Any, BaseException | None]

logger = logging.getLogger(__name__)


class DeviceThread:
    """Owns the thread. `step` does one piece of work and says whether more is left; it must handle its own errors."""

    def __init__(self, name: str, step: Callable[[], bool]) -> None:
        self._step = step
        self._posted: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._stopped = False
        self._outcomes: dict[asyncio.AbstractEventLoop, list[Outcome]] = {}
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def is_running(self) -> bool:
        """Whether it has been started and has not ended."""
        return self._thread.is_alive()

    def is_current(self) -> bool:
        """Whether the caller runs on the device thread."""
        return threading.get_ident() == self._thread.ident

    def post(self, function: Callable[[], object]) -> None:
        """Run `function` between two steps, without waiting for it. It must not raise. Raises `EngineError` after `stop`."""
        with self._gate:
            if self._stopped:
                raise EngineError(f"{self._thread.name} has been stopped: nothing can run on it any more")
            self._posted.put(function)

    async def submit(self, function: Callable[[], T]) -> T:
        """Run `function` between two steps and await its result. Cancelled before it starts, it does not run."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def run() -> None:
            if future.cancelled():
                return
            self._tell_loops()  # the function may take long (a collective): what is finished must not wait for it
            try:
                result = function()
            except Exception as error:  # noqa: BLE001 - whatever the caller's function raises belongs to the caller
                self.resolve(future, error=error)
            else:
                self.resolve(future, result)

        self.post(run)
        return await future

    def call(self, function: Callable[[], T], *, timeout_s: float, waited_for: str, setting: str) -> T:
        """The blocking twin of `submit`, for threads without an event loop. Raises `WaitTimeout` after `timeout_s`."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - as in `submit`
                future.set_exception(error)

        self.post(run)
        concurrent.futures.wait([future], timeout=timeout_s)
        if not future.done():
            raise WaitTimeout(threading.current_thread().name, waited_for, timeout_s, setting)
        return future.result()

    def resolve(self, future: asyncio.Future[Any], result: Any = None, error: BaseException | None = None) -> None:
        """Device thread: give the future its outcome, on its own event loop, at the end of this round."""
        self._outcomes.setdefault(future.get_loop(), []).append((future, result, error))

    def stop(self, *, timeout_s: float, setting: str) -> None:
        """Run what was posted so far, then end the thread. Raises `WaitTimeout` if that takes longer than `timeout_s`."""
        with self._gate:
            self._stopped = True
            self._posted.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise WaitTimeout(threading.current_thread().name, f"the end of {self._thread.name}", timeout_s, setting)

    def _run(self) -> None:
        busy = False
        while self._run_posted(wait=not busy):
            busy = self._step()
            self._tell_loops()
        self._tell_loops()

    def _run_posted(self, *, wait: bool) -> bool:
        """Run what is waiting now; False when told to stop. With `wait`, sleep until something is posted: idleness needs no
        bound, since `stop` posts too."""
        for _ in range(max(self._posted.qsize(), int(wait))):
            function = self._posted.get()
            if function is None:
                return False
            function()
        return True

    def _tell_loops(self) -> None:
        if not self._outcomes:
            return
        batches, self._outcomes = self._outcomes, {}
        for loop, outcomes in batches.items():
            try:
                loop.call_soon_threadsafe(_set_outcomes, outcomes)
            except RuntimeError:  # the loop is closed: nobody is left to be told
                logger.warning(
                    "%s: %d results came after their event loop was closed", self._thread.name, len(outcomes)
                )


def _set_outcomes(outcomes: list[Outcome]) -> None:
    for future, result, error in outcomes:
        if future.done():  # cancelled meanwhile
            continue
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
