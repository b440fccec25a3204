"""vLLM's scheduler with a meter: how many tokens are computed, and how many found in the cache, at the moment they are scheduled.

vLLM's own statistics count the prefill of a request once; what is computed again after a preemption or a weight update does not
appear there, but it is what CTB exists to avoid, so it is counted here.

Invariants (tests/conformance/test_engine.py):

1. Every token that a step computes counts as prefilled, but for the one of each decoding request that its new token needs.
   A prompt's tokens that it does not compute (held, or in the prefix cache) count as cached: the two add up to the prompts.
2. A preemption is counted when the cache is short, not when a weight update restarts the running requests.
3. Requests named in `unmetered` (scoring) count nowhere.

Source: paper §4.1 (token usage is read from the engine itself).
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

from tiderl.engines.vllm_held import HoldingScheduler


class MeteredScheduler(HoldingScheduler):
    """Counters since the start; read them on the device thread."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.total_prefilled_tokens = 0
        self.total_cached_tokens = 0
        self.total_preemptions = 0
        self.total_read_tokens = 0
        #: Tokens that the newest step prefills, and requests that it decodes.
        self.step_prefill_tokens = 0
        self.step_decodes = 0
        self.unmetered: set[str] = set()

    @property
    def used_blocks(self) -> int:
        """Blocks of requests in the engine or held (the reserved one not counted)."""
        pool = self.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        num_restarted = len(self.reset_preempted_req_ids)
        output = super().schedule(*args, **kwargs)
        self._meter(output)
        self.total_preemptions += len(output.preempted_req_ids or ()) - num_restarted
        return output

    def _meter(self, output: SchedulerOutput) -> None:
        self.step_prefill_tokens = self.step_decodes = 0
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            if request_id in self.unmetered:
                continue
            request = self.requests[request_id]
            # `num_computed_tokens` already includes this step.
            decodes = request.num_output_tokens > 0 and request.num_computed_tokens >= request.num_tokens
            self.step_prefill_tokens += num_tokens - decodes
            if decodes:
                self.step_decodes += 1
                self.total_read_tokens += request.num_tokens
        self.total_prefilled_tokens += self.step_prefill_tokens
        for new in output.scheduled_new_reqs:
            if new.req_id not in self.unmetered:
                self.total_cached_tokens += new.num_computed_tokens
        again = output.scheduled_cached_reqs
        if again.resumed_req_ids:
            for request_id, num_cached in zip(again.req_ids, again.num_computed_tokens, strict=True):
                if request_id in again.resumed_req_ids and request_id not in self.unmetered:
                    self.total_cached_tokens += num_cached
