"""What engines in the rank's process share: a device thread that owns the engine's core, and its asyncio front.

A subclass says how its core is built. `device_thread.py` is the thread.

Invariants beyond those of `base.py` (tests/conformance/test_engine.py, test_engine_emulated.py):

1. An idle engine sleeps. A step that produced tokens wakes each event loop once.
2. When a step raises, every pending and every later call raises `EngineError` with the first error as its cause.
3. A cancelled `generate` frees its request's blocks, those held before included.
4. `shutdown` closes the engine and ends the thread, each within `timeouts.shutdown_s`, or raises `WaitTimeout`; calls that are
   pending raise `EngineError`. It may be called twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from tiderl.config.schema import Config
from tiderl.engines.base import EngineInfo, EngineStats, Generation, Sampling
from tiderl.engines.device_thread import DeviceThread
from tiderl.errors import EngineError, TideError
from tiderl.types import WeightVersion

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

logger = logging.getLogger(__name__)


OnEnd = Callable[[Generation | None, EngineError | None], None]


class CoreRequest(Protocol):
    """A request as its core sees it. `on_end` takes its generation or an error, on the device thread, once."""

    @property
    def on_end(self) -> OnEnd: ...


R = TypeVar("R", bound=CoreRequest)


class DeviceCore(Protocol[R]):
    """An engine without threads. What is not marked "any thread" belongs to the device thread."""

    @property
    def info(self) -> EngineInfo:
        """Any thread."""

    @property
    def expected_weights(self) -> Mapping[str, tuple[int, ...]]:
        """Any thread."""

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do."""

    def new_request(
        self, request_id: str, prompt_token_ids: Sequence[int], sampling: Sampling, on_end: OnEnd, *, hold: bool = False
    ) -> R:
        """A request that `admit` takes. Any thread. Raises `EngineError` for one that cannot be generated."""

    def admit(self, request: R) -> None:
        """Queue a request. One with the id of another in flight ends at once with an `EngineError`."""

    def abort(self, request_id: str) -> None:
        """End a request with what it has made. Unknown ids are ignored."""

    def forget(self, request: R) -> None:
        """Nobody waits for this request any more: end it, or free what it holds if it has ended."""

    def release(self, request_id: str, discard_from: int | None = None) -> None:
        """See `Engine.release`."""

    def step(self) -> None:
        """At most one new token for every request that runs."""

    def staged(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """The weights as `load` wants them; nothing is changed. Raises `WeightMismatch`."""

    def load(self, staged: Any, version: WeightVersion) -> None:
        """Replace all weights and forget what was computed under the old ones. After an error the engine is unusable."""

    def score(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """See `Engine.score`."""

    def stats(self) -> EngineStats:
        """Any thread."""

    def fail_all(self, error: EngineError) -> None:
        """End every request in flight with `error`."""

    def close(self) -> None:
        """Give everything back."""


class ThreadedEngine(Generic[R]):
    """See `tiderl.engines.base.Engine`. `start` once, `shutdown` at the end; a new engine for a new start."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._thread = DeviceThread("engine device thread", self._step)
        self._started = False
        self._core: DeviceCore[R] | None = None
        #: Why nothing works any more; the first reason stays.
        self._cause: BaseException | None = None

    def _make_core(self) -> DeviceCore[R]:
        """Device thread: build the engine. Raises `TideError`."""
        raise NotImplementedError

    def start(self) -> EngineInfo:
        if self._started:
            raise EngineError("start was called before: an engine starts once, build a new one instead")
        self._started = True
        self._thread.start()
        bound_s = self._config.timeouts.start_s
        return self._thread.call(
            self._build, timeout_s=bound_s, waited_for="the engine to start", setting="timeouts.start_s"
        )

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], sampling: Sampling, *, hold: bool = False
    ) -> Generation:
        core = self._usable_core()
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()

        def on_end(generation: Generation | None, error: EngineError | None) -> None:
            self._thread.resolve(future, generation, error)

        request = core.new_request(request_id, prompt_token_ids, sampling, on_end, hold=hold)
        self._thread.post(lambda: self._admit(request))
        try:
            return await future
        except asyncio.CancelledError:
            self._post_to_core(lambda core: core.forget(request))
            raise

    def abort(self, request_id: str) -> None:
        self._post_to_core(lambda core: core.abort(request_id))

    def release(self, request_id: str, *, discard_from: int | None = None) -> None:
        self._post_to_core(lambda core: core.release(request_id, discard_from))

    async def submit(self, function: Callable[[], T]) -> T:
        self._usable_core()
        return await self._thread.submit(function)

    def expected_weights(self) -> Mapping[str, tuple[int, ...]]:
        return self._usable_core().expected_weights

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: WeightVersion) -> None:
        core = self._core_here("update_weights")
        staged = core.staged(weights)
        try:
            core.load(staged, version)
        except Exception as error:  # half-loaded weights would generate nonsense without a sound
            self._fail(error)
            raise self._dead() from error

    def score(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        core = self._core_here("score")
        try:
            return core.score(token_ids)
        except TideError:
            raise
        except Exception as error:  # a step failed, as in `_step`
            self._fail(error)
            raise self._dead() from error

    def stats(self) -> EngineStats:
        return self._usable_core().stats()

    def shutdown(self) -> None:
        if not self._started or not self._thread.is_running():
            return
        bound_s, setting = self._config.timeouts.shutdown_s, "timeouts.shutdown_s"
        try:
            self._thread.call(self._close, timeout_s=bound_s, waited_for="the engine to close", setting=setting)
        finally:
            self._thread.stop(timeout_s=bound_s, setting=setting)

    # Below: on the device thread.

    def _build(self) -> EngineInfo:
        self._core = self._make_core()
        logger.info("engine started: %s", self._core.info)
        return self._core.info

    def _step(self) -> bool:
        core = self._core
        if core is None or not core.has_work:
            return False
        try:
            core.step()
        except Exception as error:  # noqa: BLE001 - the core's state is unknown after any error in a step
            self._fail(error)
        return core.has_work

    def _admit(self, request: R) -> None:
        if self._core is None or self._cause is not None:
            request.on_end(None, self._dead())
            return
        try:
            self._core.admit(request)
        except Exception as error:  # noqa: BLE001 - as in `_step`
            self._fail(error)

    def _fail(self, cause: Exception) -> None:
        """Remember why, and end every request with it."""
        assert self._core is not None
        if self._cause is None:
            self._cause = cause
            logger.error("the generation engine failed and takes no more requests", exc_info=cause)
        self._core.fail_all(self._dead())

    def _close(self) -> None:
        core, self._core = self._core, None
        if core is not None:
            core.fail_all(self._dead())
            core.close()

    # Below: any thread.

    def _dead(self) -> EngineError:
        if self._cause is None:
            return EngineError("the engine is not running: it was shut down, or start was not called")
        error = EngineError(f"the engine has failed and takes no more requests; first error: {self._cause!r}")
        error.__cause__ = self._cause
        return error

    def _usable_core(self) -> DeviceCore[R]:
        if (core := self._core) is None or self._cause is not None:
            raise self._dead()
        return core

    def _core_here(self, method: str) -> DeviceCore[R]:
        if not self._thread.is_current():
            raise EngineError(
                f"{method} belongs on the device thread: await engine.submit(lambda: engine.{method}(...))"
            )
        return self._usable_core()

    def _post_to_core(self, function: Callable[[DeviceCore[R]], None]) -> None:
        """Let the device thread do something that only frees, unless by then nothing is left to be freed."""

        def free() -> None:
            if (core := self._core) is not None and self._cause is None:
                function(core)

        if self._core is not None:
            with contextlib.suppress(EngineError):  # the thread has been stopped
                self._thread.post(free)
