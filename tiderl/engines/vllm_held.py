"""vLLM's scheduler, where a request that ended can hold its KV blocks until the next turn under its id takes them over.

vLLM's own way (`resumable` requests) keeps the request itself: it stays in a waiting queue that every step scans, and counts
against the sequences that may run. Here the request ends as any other, for the model runner too, and only its blocks stay behind
under its id. The next request with that id starts with its first tokens computed, as vLLM's requests do whose blocks came over
a network.

Invariants (tests/conformance/test_engine_holding.py):

1. A request whose prompt begins with all tokens of the held one computes its last token (sampled, never computed) and what is new.
2. A held request costs blocks and nothing else: no place among the running ones, no work in a step.
3. While requests are held, none that runs is preempted and none waits for blocks: the longest held gives its blocks away first.
4. Requests that took blocks over and wait never lock each other out: who runs, or would be the only one to run, takes blocks from
   those that wait.
5. The prefix cache is forgotten as a whole: held blocks, and those taken over and not yet computed on, are freed with it.

Source: paper §4.1 (a task keeps its context in the KV cache between its turns).
"""

from __future__ import annotations

import logging
import time
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

#: Least seconds between two lines about blocks that were taken from held requests.
_LOG_INTERVAL_S = 1.0
_ENDED_BY_ITSELF = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)

logger = logging.getLogger(__name__)


class HoldingScheduler(Scheduler):
    """Call it on the device thread, between two steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: Requests that ended and hold their blocks, longest held first.
        self.held: dict[str, Request] = {}
        #: Ids of requests in flight that will hold their blocks when they end by themselves.
        self.will_hold: set[str] = set()
        self._num_taken = 0
        self._logged_s = float("-inf")
        # Here vLLM learns that blocks are short, before it preempts or stops admitting: nobody has to guess what a step needs.
        self._allocate_slots = self.kv_cache_manager.allocate_slots
        self.kv_cache_manager.allocate_slots = self._allocate_or_take

    def add_request(self, request: Request) -> None:
        """Queue a request; it takes over the blocks held under its id if its prompt goes on from there, else they are freed."""
        held = self.held.get(request.request_id)
        if held is not None:
            if _goes_on(request, held):
                del self.held[request.request_id]
                request.num_computed_tokens = held.num_computed_tokens
                assert request.prefill_stats is not None
                request.prefill_stats.set(request.num_prompt_tokens, held.num_computed_tokens, 0)
            else:
                self.release(request.request_id)
        super().add_request(request)

    def release(self, request_id: str, discard_from: int | None = None) -> None:
        """Free what a held request holds, as `Engine.release`."""
        held = self.held.pop(request_id, None)
        if held is None:
            return
        unwanted = [] if discard_from is None else self._blocks_from(held, discard_from)
        self.kv_cache_manager.free(held)
        self._move_to_front(unwanted)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        for request_id in list(self.held):
            self.release(request_id)
        for request in list(self.kv_holding_waiting):
            self._give_up_blocks(request)
        return bool(super().reset_prefix_cache(*args, **kwargs))

    def _free_blocks(self, request: Request) -> None:
        request_id = request.request_id
        holds = request_id in self.will_hold and request.status in _ENDED_BY_ITSELF
        self.will_hold.discard(request_id)
        if holds:
            del self.requests[request_id]
            self.held[request_id] = request
        else:
            super()._free_blocks(request)

    def _allocate_or_take(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """vLLM's `allocate_slots`, repeated until there are blocks enough or nobody is left to take them from (None)."""
        while True:
            blocks = self._allocate_slots(request, *args, **kwargs)
            if blocks is not None or not self._take_blocks_for(request):
                return blocks

    def _take_blocks_for(self, request: Request) -> bool:
        if self.held:
            self.release(next(iter(self.held)))
        elif request.status == RequestStatus.RUNNING or not self.running:
            others = [waiting for waiting in self.kv_holding_waiting if waiting is not request]
            if not others:
                return False
            self._give_up_blocks(others[-1])
        else:
            return False
        self._log_taken()
        return True

    def _give_up_blocks(self, request: Request) -> None:
        """Let a request that has taken blocks over and waits start like one that was never held."""
        self.kv_cache_manager.free(request)
        request.num_computed_tokens = 0
        self.kv_holding_waiting.remove_request(request)
        self.waiting.add_request(request)

    def _blocks_from(self, request: Request, first_token: int) -> list[KVCacheBlock]:
        """Blocks of a request whose tokens all lie at index `first_token` or after it."""
        blocks: list[KVCacheBlock] = []
        for manager in self.kv_cache_manager.coordinator.single_type_managers:
            first_block = -(-first_token // manager.block_size)
            blocks += manager.req_to_blocks[request.request_id][first_block:]
        return blocks

    def _move_to_front(self, blocks: list[KVCacheBlock]) -> None:
        """Let those of the blocks that are free be the next to be given away, the end of a context before its beginning."""
        pool = self.kv_cache_manager.block_pool
        free = [block for block in reversed(blocks) if block.ref_cnt == 0 and not block.is_null and block.pool is pool]
        for block in free:
            pool.free_block_queue.remove(block)
        pool.free_block_queue.prepend_n(free)

    def _log_taken(self) -> None:
        self._num_taken += 1
        now_s = time.monotonic()
        if now_s - self._logged_s >= _LOG_INTERVAL_S:
            logger.warning(
                "the KV cache is full: %d request(s) lost the blocks that they held between two turns, and will compute their "
                "context again; fewer tasks at once (rollout.max_tasks_per_rank, rollout.kv_reserve) avoid that",
                self._num_taken,
            )
            self._num_taken, self._logged_s = 0, now_s


def _goes_on(request: Request, held: Request) -> bool:
    """Whether the prompt begins with all tokens of the held request."""
    assert request.prompt_token_ids is not None
    tokens = held._all_token_ids
    return request.prompt_token_ids[: len(tokens)] == tokens
