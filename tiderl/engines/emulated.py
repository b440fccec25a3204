"""`EmulatedEngine`: the engine protocol without a GPU. It schedules as vLLM does, answers at random, and takes a GPU's time.

`threaded.py` is its asyncio front and its device thread, `emulated_core.py` decides what runs in a step, `emulated_pace.py` when
the step is over, `emulated_answers.py` what is said; the seconds come from `tiderl.profiles`. Only the weights are real: eight
numbers (`tiderl.rl.emulated_model`).

Invariants beyond those of `threaded.py` (tests/conformance/test_engine_emulated.py):

1. A step takes what the profile says for its load, in the job's seconds; the schedule does not drift.
2. Loading the model and loading weights take their time on the device thread, where no step runs meanwhile.
3. `score` depends on the weights that were received; it takes no time.

Source: design.md, "Backends that tell the truth on a laptop".
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from tiderl.clock import JobClock
from tiderl.config.schema import Config
from tiderl.engines.base import EngineInfo, EngineStats, Sampling
from tiderl.engines.emulated_answers import Answers, EmulatedAnswers
from tiderl.engines.emulated_core import EmulatedCore
from tiderl.engines.emulated_language import NUM_FILLERS
from tiderl.engines.emulated_pace import Pace
from tiderl.engines.emulated_request import EmulatedRequest, Limits, Outcome, StepPlan
from tiderl.engines.threaded import OnEnd, ThreadedEngine
from tiderl.errors import ConfigError, EngineError, WeightMismatch
from tiderl.profiles.costs import CostModel
from tiderl.rl.emulated_model import WEIGHT_LENGTH, WEIGHT_NAME, score, weights_of
from tiderl.types import WeightVersion

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

#: Of every token: an even choice among the fillers.
_LOG_PROB = -math.log(NUM_FILLERS)
#: Least real seconds between two lines about blocks that were taken from held requests.
_LOG_INTERVAL_S = 1.0

logger = logging.getLogger(__name__)


class EmulatedEngine(ThreadedEngine["WaitingRequest"]):
    """See `tiderl.engines.base.Engine`. `sleep` waits for real seconds; `answers` replaces what the emulated model says."""

    def __init__(
        self,
        config: Config,
        costs: CostModel,
        clock: JobClock,
        rank: int,
        *,
        answers: Answers | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(config)
        self._costs = costs
        self._pace = Pace(clock, sleep)
        self._clock = clock
        self._answers = answers or EmulatedAnswers(config.run.seed, rank, config.train.steps)

    async def submit(self, function: Callable[[], T]) -> T:
        def run() -> T:
            with self._pace.other_work():
                return function()

        return await super().submit(run)

    def _make_core(self) -> EmulatedDevice:
        limits = limits_of(self._config, self._costs)
        self._pace.spend(self._costs.swap_s(self._costs.weight_bytes))
        return EmulatedDevice(
            EmulatedCore(limits, self._answers, _LOG_PROB), limits, self._costs, self._clock, self._pace
        )


def limits_of(config: Config, costs: CostModel) -> Limits:
    """What bounds an emulated engine's steps. Raises `ConfigError` where the cache could not hold one context."""
    engine, max_context_tokens = config.engine, config.model.max_context_tokens
    kv_cache_tokens = engine.kv_cache_tokens or costs.kv_cache_tokens(
        engine.gpu_memory_share, num_sequences=engine.max_running
    )
    num_blocks = kv_cache_tokens // engine.block_size
    if num_blocks * engine.block_size < max_context_tokens:
        source = "engine.kv_cache_tokens" if engine.kv_cache_tokens else "engine.gpu_memory_share"
        raise ConfigError(
            source,
            f"the emulated KV cache has {kv_cache_tokens} tokens and cannot hold one context of model.max_context_tokens = "
            f"{max_context_tokens}; raise the one or lower the other",
        )
    return Limits(
        num_blocks=num_blocks,
        block_size_tokens=engine.block_size,
        max_running=engine.max_running,
        max_batched_tokens=engine.max_batched_tokens,
        max_context_tokens=max_context_tokens,
    )


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """A request whose caller waits for it. `came_s`: when it was called for, on the job's clock."""

    request: EmulatedRequest
    on_end: OnEnd
    came_s: float


class EmulatedDevice:
    """The core, made to take its time: a `DeviceCore` for `ThreadedEngine`."""

    def __init__(self, core: EmulatedCore, limits: Limits, costs: CostModel, clock: JobClock, pace: Pace) -> None:
        self.info = EngineInfo(limits.block_size_tokens, limits.num_blocks, limits.max_context_tokens)
        self.expected_weights: Mapping[str, tuple[int, ...]] = {WEIGHT_NAME: (WEIGHT_LENGTH,)}
        self._core = core
        self._costs = costs
        self._clock = clock
        self._pace = pace
        self._weight = weights_of(0)
        #: By id; those in flight.
        self._callers: dict[str, WaitingRequest] = {}
        self._total_prefill_s = self._total_decode_s = 0.0
        self._losses_logged, self._logged_s = 0, float("-inf")
        self._numbers = self._read_numbers()

    @property
    def has_work(self) -> bool:
        return bool(self._callers)

    def new_request(
        self, request_id: str, prompt_token_ids: Sequence[int], sampling: Sampling, on_end: OnEnd, *, hold: bool = False
    ) -> WaitingRequest:
        came_s = self._clock.now_s()
        prompt = self._checked_ids(prompt_token_ids, most=self.info.max_context_tokens - 1)
        if sampling.max_new_tokens < 1 or sampling.temperature < 0:
            raise EngineError(
                f"request {request_id!r}: max_new_tokens must be 1 or more, temperature 0 or more: {sampling}"
            )
        return WaitingRequest(EmulatedRequest(request_id, prompt, sampling, hold), on_end, came_s)

    def admit(self, request: WaitingRequest) -> None:
        request_id = request.request.request_id
        if request_id in self._callers:
            request.on_end(None, EngineError(f"request id {request_id!r} is in use by a request in flight"))
            return
        self._pace.work_came(request.came_s)
        self._callers[request_id] = request
        self._core.add(request.request)

    def abort(self, request_id: str) -> None:
        self._after(self._core.abort(request_id))

    def forget(self, request: WaitingRequest) -> None:
        self._after(self._core.forget(request.request))

    def release(self, request_id: str, discard_from: int | None = None) -> None:
        self._core.release(request_id, discard_from)
        self._after(None)

    def step(self) -> None:
        plan = self._core.plan()
        assert plan is not None, "a step without work"
        duration_s = self._costs.engine_step_s(plan.load)
        self._pace.step(duration_s)
        for outcome in self._core.commit(plan):
            self._tell(outcome)
        self._add_seconds(plan, duration_s)
        self._log_losses()
        self._after(None)

    def staged(self, weights: Iterable[tuple[str, torch.Tensor]]) -> npt.NDArray[np.float32]:
        import torch

        problems, staged = [], None
        for name, tensor in weights:
            if name != WEIGHT_NAME:
                problems.append(f"unexpected: {name}")
            elif staged is not None:
                problems.append(f"sent twice: {name}")
            elif tuple(tensor.shape) != (WEIGHT_LENGTH,):
                problems.append(f"wrong shape: {name} is {list(tensor.shape)}, not {[WEIGHT_LENGTH]}")
            else:
                # A copy: the sender's buffer is used again.
                staged = tensor.detach().to("cpu", torch.float32, copy=True).numpy()
        if staged is None and not problems:
            problems.append(f"missing: {WEIGHT_NAME}")
        if staged is None or problems:
            raise WeightMismatch("weights refused, the engine is unchanged: " + "; ".join(problems))
        return staged

    def load(self, staged: npt.NDArray[np.float32], version: WeightVersion) -> None:
        self._pace.spend(self._costs.load_s())
        self._weight = staged
        self._core.update_version(version)
        self._after(None)

    def score(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        ids = self._checked_ids(token_ids, most=self.info.max_context_tokens)
        if ids.size < 2:
            raise EngineError("score wants at least 2 tokens: the first one has no log-prob")
        return score(self._weight, ids)

    def stats(self) -> EngineStats:
        """The numbers as of the last step; any thread."""
        return EngineStats(*self._numbers)

    def fail_all(self, error: EngineError) -> None:
        callers, self._callers = list(self._callers.values()), {}
        for caller in callers:
            caller.on_end(None, error)

    def close(self) -> None:
        """There is nothing to give back."""

    def _tell(self, outcome: Outcome) -> None:
        self._callers.pop(outcome.request.request_id).on_end(outcome.generation, None)

    def _after(self, outcome: Outcome | None) -> None:
        """Something has changed outside or inside of a step."""
        if outcome is not None:
            self._tell(outcome)
        if not self._core.has_work:
            self._pace.fall_idle()
        self._numbers = self._read_numbers()

    def _add_seconds(self, plan: StepPlan, duration_s: float) -> None:
        prefill_s = duration_s * plan.num_prefilled / (plan.num_prefilled + plan.num_decoded)
        self._total_prefill_s += prefill_s
        self._total_decode_s += duration_s - prefill_s

    def _checked_ids(self, token_ids: Sequence[int], *, most: int) -> npt.NDArray[np.int32]:
        try:
            ids = np.array(token_ids, np.int32)
        except OverflowError as error:
            raise EngineError(f"token ids must fit into int32: {error}") from error
        if not 1 <= ids.size <= most:
            raise EngineError(
                f"{ids.size} tokens don't fit: 1 to {most} do (model.max_context_tokens = {self.info.max_context_tokens})"
            )
        if ids.min() < 0:
            raise EngineError(f"token ids must not be negative, the smallest one is {ids.min()}")
        return ids

    def _log_losses(self) -> None:
        num_lost = self._core.total_losses - self._losses_logged
        if num_lost == 0:
            return
        now_s = time.monotonic()
        if now_s - self._logged_s >= _LOG_INTERVAL_S:
            logger.warning(
                "the KV cache is full: %d request(s) lost the blocks that they held between two turns, and will compute their "
                "context again; fewer tasks at once (rollout.max_tasks_per_rank, rollout.kv_reserve) avoid that",
                num_lost,
            )
            self._losses_logged, self._logged_s = self._core.total_losses, now_s

    def _read_numbers(self) -> tuple[Any, ...]:
        """The fields of `EngineStats`; the object itself is made when somebody asks for it, which is not in every step."""
        core = self._core
        return (
            core.num_running,
            core.num_waiting,
            core.num_held,
            core.num_used_blocks,
            core.total_generated_tokens,
            core.total_prefilled_tokens,
            core.total_cached_tokens,
            core.total_preemptions,
            core.total_steps,
            core.total_read_tokens,
            self._total_prefill_s,
            self._total_decode_s,
            self._pace.late_s,
        )
