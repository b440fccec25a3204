"""The part of the vLLM engine that knows vLLM: one `EngineCore` in this process, used from one thread, without queue or asyncio.

vLLM's front end (`LLMEngine`) is left out on purpose: we have ids and want ids back, and it makes objects and dictionaries of every
token's log-prob. What is left is `EngineCore`: add a request, step, abort.

Invariants (tests/conformance/test_engine.py):

1. A token's log-prob is that of the distribution it was sampled from (logits / temperature; the plain logits when greedy).
2. A token carries the version of the weights that the step which produced it ran with.
3. `staged` compares all names and shapes and changes nothing; after `load` no cached block is left from before.
4. `score` never reads a cached block, and requests in flight go on while it runs.

Source: paper §2.1 (rollout), §7 (per-token versions).
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from tiderl.config.schema import Config
from tiderl.engines import vllm_setup
from tiderl.engines.base import EngineInfo, EngineStats, Generation, Sampling
from tiderl.engines.vllm_world import RandomStream, host_state_kept, world_of_one
from tiderl.errors import EngineError, WaitTimeout, WeightMismatch
from tiderl.types import WeightVersion

#: How many names a `WeightMismatch` lists of each kind.
_MAX_NAMES_SHOWN = 5
#: Scoring overtakes generation in vLLM's waiting queue (lower is sooner).
_GENERATE_PRIORITY, _SCORE_PRIORITY = 0, -1

_engines_built = itertools.count()


@dataclass(slots=True)
class ActiveRequest:
    """A request in the engine and what it has produced so far. `on_end` gets its generation or an error, on the engine's thread."""

    request_id: str
    prompt_token_ids: list[int]
    params: Any
    on_end: Callable[[Generation | None, EngineError | None], None]
    hold: bool = False
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    #: None before its first token.
    cached_tokens: int | None = None
    #: Only for `score`: what it returns.
    scores: npt.NDArray[np.float32] | None = None

    def generation(self, finish: str) -> Generation:
        return Generation(
            token_ids=np.array(self.token_ids, np.int32),
            log_probs=np.array(self.log_probs, np.float32),
            weight_versions=np.array(self.weight_versions, np.int32),
            cached_tokens=len(self.prompt_token_ids) if self.cached_tokens is None else self.cached_tokens,
            finish=finish,
        )


class VllmCore:
    """See the module docstring. All methods but `stats` belong to the thread that called the constructor."""

    def __init__(self, config: Config) -> None:
        """Build the engine. Raises `ModelError`, `ConfigError`, or whatever vLLM raises."""
        vllm_setup.check_model_folder(config)
        self._config = config
        self._version = WeightVersion(0)
        self._active: dict[str, ActiveRequest] = {}
        self._score_ids = itertools.count()
        self._total_generated_tokens = 0
        self._total_steps = 0
        self._total_prefill_s = self._total_decode_s = 0.0
        with world_of_one(), host_state_kept():
            vllm_setup.prepare_environment(config)
            model_config = vllm_setup.load_model_config(config)
            self.expected_weights: Mapping[str, tuple[int, ...]] = vllm_setup.expected_weights(model_config)
            self._core = _build_core(config, model_config)
        self._vocab_size = int(model_config.vocab_size)
        self._random = RandomStream.seeded(_sampling_seed(config.run.seed))
        num_blocks = self._core.vllm_config.cache_config.num_gpu_blocks - 1
        self.info = EngineInfo(config.engine.block_size, num_blocks, config.model.max_context_tokens)
        self._stats = self._count()

    @property
    def has_work(self) -> bool:
        return bool(self._active)

    def new_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        on_end: Callable[[Generation | None, EngineError | None], None],
        *,
        hold: bool = False,
    ) -> ActiveRequest:
        """A request that `admit` takes; its cap includes the end of the context. Any thread. Raises `EngineError`."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError

        ids = self._checked_ids(prompt_token_ids, most=self.info.max_context_tokens - 1)
        try:
            params = SamplingParams(
                temperature=sampling.temperature,
                max_tokens=min(sampling.max_new_tokens, self.info.max_context_tokens - len(ids)),
                stop_token_ids=None if sampling.ignore_stop else list(sampling.stop_token_ids),
                logprobs=0,  # of the sampled token only
                detokenize=False,
            )
        except VLLMValidationError as error:
            raise EngineError(f"request {request_id!r}: vLLM refuses {sampling}: {error}") from error
        return ActiveRequest(request_id, ids, params, on_end, hold)

    def admit(self, request: ActiveRequest) -> None:
        """Put a request in the queue. A second one with the id of one in flight ends at once with an `EngineError`."""
        if request.request_id in self._active:
            request.on_end(None, EngineError(f"request id {request.request_id!r} is in use by a request in flight"))
            return
        self._active[request.request_id] = request
        self._enqueue(request, _GENERATE_PRIORITY)

    def abort(self, request_id: str) -> None:
        """End a request with what it has produced. Unknown ids are ignored."""
        if (request := self._active.get(request_id)) is not None:
            self.drop(request)

    def drop(self, request: ActiveRequest) -> None:
        """End this very request, if it is still in flight, with what it has produced."""
        if self._active.get(request.request_id) is request:
            del self._active[request.request_id]
            self._core.abort_requests([request.request_id])
            self._stats = self._count()
            request.on_end(request.generation("aborted"), None)

    def forget(self, request: ActiveRequest) -> None:
        """Nobody waits for this request any more: end it, or free what it holds if it has ended."""
        if request.hold and request.request_id not in self._active:
            self.release(request.request_id)
        else:
            self.drop(request)

    def release(self, request_id: str, discard_from: int | None = None) -> None:
        """See `Engine.release`."""
        self._core.scheduler.release(request_id, discard_from)
        self._stats = self._count()

    def step(self) -> None:
        """One engine step, at most one new token for every request that runs."""
        began_s = time.monotonic()
        with self._random.active():
            outputs, executed = self._core.step_fn()
            self._core.post_step(model_executed=executed)
        if outputs:
            for output in outputs[0].outputs:
                self._take(output)
        self._time(time.monotonic() - began_s)
        self._stats = self._count()

    def staged(self, weights: Iterable[tuple[str, torch.Tensor]]) -> deque[tuple[str, torch.Tensor]]:
        """All the tensors, by reference, if their names and shapes are those of `expected_weights`. Raises `WeightMismatch`."""
        expected = self.expected_weights
        staged: deque[tuple[str, torch.Tensor]] = deque()
        problems: dict[str, list[str]] = {"unexpected": [], "sent twice": [], "wrong shape": [], "missing": []}
        seen: set[str] = set()
        for name, tensor in weights:
            if name not in expected:
                problems["unexpected"].append(name)
            elif name in seen:
                problems["sent twice"].append(name)
            elif tuple(tensor.shape) != expected[name]:
                problems["wrong shape"].append(f"{name} is {list(tensor.shape)}, not {list(expected[name])}")
            else:
                staged.append((name, tensor))
            seen.add(name)
        problems["missing"] = [name for name in expected if name not in seen]
        if any(problems.values()):
            raise WeightMismatch("weights refused, the engine is unchanged: " + _listed(problems))
        return staged

    def load(self, staged: deque[tuple[str, torch.Tensor]], version: WeightVersion) -> None:
        """Replace all weights and forget everything computed under the old ones. After an error the engine is unusable."""
        with host_state_kept():
            self._core.collective_rpc("reload_weights", kwargs={"weights_iterator": _drained(staged)})
            self._core.collective_rpc(_pack_output_heads)
        # All requests lose their blocks. Those in flight are computed again under the new weights.
        self._core.reset_prefix_cache(reset_running_requests=True)
        self._version = version
        self._stats = self._count()

    def score(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Raw log-probs [num_tokens - 1]; takes steps until they are there. Raises `EngineError`, `WaitTimeout`."""
        from vllm import SamplingParams

        ids = self._checked_ids(token_ids, most=self.info.max_context_tokens)
        if len(ids) < 2:
            raise EngineError("score wants at least 2 tokens: the first one has no log-prob")
        outcome: list[EngineError | None] = []
        # Asking for the prompt's log-probs makes vLLM compute the whole prompt, whatever is in the prefix cache. The last
        # token is not part of the prompt: after a context of full length vLLM has no place for the token it must sample.
        params = SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, logprobs=0, logprob_token_ids=ids[-1:], detokenize=False
        )
        request_id = f"\x00score-{next(self._score_ids)}"
        request = ActiveRequest(request_id, ids[:-1], params, lambda _generation, error: outcome.append(error))
        scheduler, bound_s = self._core.scheduler, self._config.timeouts.sync_s
        scheduler.unmetered.add(request_id)
        self._active[request_id] = request
        deadline_s = time.monotonic() + bound_s
        try:
            self._enqueue(request, _SCORE_PRIORITY)
            while not outcome:
                if time.monotonic() > deadline_s:
                    raise WaitTimeout(
                        "score", f"room in the KV cache for {len(ids)} tokens", bound_s, "timeouts.sync_s"
                    )
                self.step()
        finally:
            scheduler.unmetered.discard(request_id)
            self.drop(request)
        if outcome[0] is not None:
            raise outcome[0]
        assert request.scores is not None, "vLLM ended a scoring request without log-probs"
        return request.scores

    def stats(self) -> EngineStats:
        """The numbers as of the last step; any thread."""
        return self._stats

    def fail_all(self, error: EngineError) -> None:
        """End every request in flight with `error`, without asking vLLM, which may be broken."""
        requests, self._active = list(self._active.values()), {}
        for request in requests:
            request.on_end(None, error)

    def close(self) -> None:
        """Shut vLLM down and give its memory back to the machine. The host's process group stays."""
        with world_of_one(), host_state_kept():
            self._core.shutdown()
        del self._core
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        # glibc keeps freed memory for itself; a role switch needs it back.
        ctypes.CDLL(None).malloc_trim(0)

    def _checked_ids(self, token_ids: Sequence[int], *, most: int) -> list[int]:
        """Plain ints, known to fit: an id outside the vocabulary would take the whole engine down in its next step."""
        ids = np.asarray(token_ids, np.int64)
        if not 1 <= ids.size <= most:
            raise EngineError(
                f"{ids.size} tokens don't fit: 1 to {most} do (model.max_context_tokens = {self.info.max_context_tokens})"
            )
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            raise EngineError(
                f"token ids {ids.min()} .. {ids.max()} are not all in the vocabulary of {self._vocab_size}"
            )
        plain: list[int] = ids.tolist()
        return plain

    def _enqueue(self, request: ActiveRequest, priority: int) -> None:
        from vllm.v1.engine import EngineCoreRequest

        core_request = EngineCoreRequest(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            mm_features=None,
            sampling_params=request.params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            priority=priority,
        )
        if request.hold:
            self._core.scheduler.will_hold.add(request.request_id)
        self._core.add_request(*self._core.preprocess_add_request(core_request))

    def _take(self, output: Any) -> None:
        """Add one request's part of a step to what it has."""
        request = self._active.get(output.request_id)
        if request is None:
            return
        if output.prefill_stats is not None:
            request.cached_tokens = output.prefill_stats.num_cached_tokens
        if output.new_prompt_logprobs_tensors is not None:
            # [num_prompt_tokens - 1, 1] of the prompt's own tokens, and [1, 2] of the sampled token and the one asked for
            of_prompt = output.new_prompt_logprobs_tensors.logprobs[:, 0].float().numpy()
            request.scores = np.append(of_prompt, np.float32(output.new_logprobs.logprobs[0, 1]))
        elif output.new_token_ids:
            num_new = len(output.new_token_ids)
            request.token_ids += output.new_token_ids
            request.log_probs += output.new_logprobs.logprobs[:, 0].tolist()
            request.weight_versions += [self._version] * num_new
            self._total_generated_tokens += num_new
        if output.finish_reason is not None:
            del self._active[output.request_id]
            finish = str(output.finish_reason)
            if finish in ("stop", "length"):
                request.on_end(request.generation(finish), None)
            else:
                request.on_end(None, EngineError(f"vLLM ended request {request.request_id!r} with {finish!r}"))

    def _time(self, step_s: float) -> None:
        scheduler = self._core.scheduler
        num_tokens = scheduler.step_prefill_tokens + scheduler.step_decodes
        if num_tokens == 0:
            return  # it scored, and nothing else
        prefill_s = step_s * scheduler.step_prefill_tokens / num_tokens
        self._total_steps += 1
        self._total_prefill_s += prefill_s
        self._total_decode_s += step_s - prefill_s

    def _count(self) -> EngineStats:
        scheduler = self._core.scheduler
        num_running, num_waiting = scheduler.get_request_counts()
        return EngineStats(
            num_running=num_running,
            num_waiting=num_waiting,
            num_held=len(scheduler.held),
            used_blocks=scheduler.used_blocks,
            total_generated_tokens=self._total_generated_tokens,
            total_prefilled_tokens=scheduler.total_prefilled_tokens,
            total_cached_tokens=scheduler.total_cached_tokens,
            total_preemptions=scheduler.total_preemptions,
            total_steps=self._total_steps,
            total_read_tokens=scheduler.total_read_tokens,
            total_prefill_s=self._total_prefill_s,
            total_decode_s=self._total_decode_s,
            total_late_s=0.0,
        )


def _build_core(config: Config, model_config: Any) -> Any:
    """vLLM's `EngineCore`, in this process."""
    from vllm import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    num_blocks = vllm_setup.usable_cache_blocks(config, model_config, on_cpu=current_platform.is_cpu())
    cache_bytes = None
    if num_blocks is not None:
        num_blocks += 1  # vLLM keeps one for itself
        cache_bytes = num_blocks * config.engine.block_size * vllm_setup.cache_bytes_per_token(config, model_config)
    arguments = vllm_setup.engine_arguments(config, num_blocks, cache_bytes)
    vllm_config = EngineArgs(**arguments).create_engine_config()
    return EngineCore(vllm_config, Executor.get_class(vllm_config), log_stats=False)


def _sampling_seed(run_seed: int) -> int:
    """A seed that differs by rank and by engine, so that no two engines of a job draw the same noise."""
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    return int(np.random.SeedSequence([abs(run_seed), rank, next(_engines_built)]).generate_state(1, np.uint64)[0] >> 1)


def _pack_output_heads(worker: Any) -> None:
    """Make the CPU's packed copy of the output head anew (on a GPU there is none). `reload_weights` forgets it where the
    head is tied to the embedding, since no weight arrives in the head's own name: old logits over new hidden states."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in worker.get_model().modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _drained(staged: deque[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The items, dropping each as it is handed over, so that memory shrinks while the engine loads."""
    while staged:
        yield staged.popleft()


def _listed(problems: Mapping[str, Sequence[str]]) -> str:
    parts = []
    for kind, names in problems.items():
        if names:
            more = f" and {len(names) - _MAX_NAMES_SHOWN} more" if len(names) > _MAX_NAMES_SHOWN else ""
            parts.append(f"{kind}: {', '.join(names[:_MAX_NAMES_SHOWN])}{more}")
    return "; ".join(parts)
