"""Continuous batching without a GPU: which requests run in which step, on which blocks, as vLLM V1 with our `HoldingScheduler`.

Pure: no clock, no threads, no sleeping. Whoever drives it asks for a `plan`, lets the time pass that the plan's load takes, and
calls `commit`; in between it must not be touched, as a GPU is not. The engine sleeps, a simulator advances its own clock.

All decoding requests make one token in every step, so a step costs nothing for those to which nothing happens: what will happen
(a block is full, an answer ends) is in a calendar by the number of the step.

Invariants (tests/unit/test_emulated_core.py; against vLLM itself: tests/conformance/test_emulated_cache_rates.py):

1. Running requests come first: every decoding one makes a token, then goes on whoever is in the middle of its prompt (one at most);
   waiting requests follow in the order of their arrival, while sequences, tokens and blocks allow. A request is admitted when
   its whole context fits.
2. At least the last token of a prompt is computed. What was computed and what was cached add up to the contexts.
3. When a running request lacks a block: held requests lose theirs, longest held first; then those that took blocks over and wait;
   then the youngest running request is preempted, and nobody is admitted in that step.
4. Held requests cost blocks and nothing else. The next prompt under the id takes them over if it goes on, else they are freed.
5. New weights: everybody who runs is computed again, and nothing computed before is found.
6. Every request ends exactly once, and its blocks are then free or held.

Source: paper §2.1, §4.1; vLLM 0.32, v1/core/sched/scheduler.py.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict

import numpy as np

from tiderl.engines.emulated_answers import Answers
from tiderl.engines.emulated_cache import BlockCache, BlockKeys
from tiderl.engines.emulated_request import EmulatedRequest, Limits, Outcome, StepPlan
from tiderl.profiles.costs import StepLoad


class EmulatedCore:
    """See the module docstring. One thread at a time."""

    def __init__(self, limits: Limits, answers: Answers, log_prob: float) -> None:
        assert limits.num_blocks * limits.block_size_tokens >= limits.max_context_tokens, limits
        self._limits = limits
        self._block_size = limits.block_size_tokens
        # As for vLLM, every sequence that may run has a token in a step.
        self._max_batched = max(limits.max_batched_tokens, limits.max_running)
        self._answers = answers
        self._log_prob = np.float32(log_prob)
        self._cache = BlockCache(limits.num_blocks)
        self._keys = BlockKeys(limits.block_size_tokens, limits.max_context_tokens)
        self._version = 0
        self._numbers = itertools.count()
        self._active: dict[str, EmulatedRequest] = {}
        #: By arrival; who left otherwise than by admission stays until it comes to the top.
        self._waiting: list[tuple[int, EmulatedRequest]] = []
        #: Those that took blocks over, by arrival.
        self._taken_over: dict[str, EmulatedRequest] = {}
        #: In the order of admission. All decode, but for `_prefilling`.
        self._running: dict[str, EmulatedRequest] = {}
        self._prefilling: EmulatedRequest | None = None
        #: Longest held first.
        self._held: dict[str, EmulatedRequest] = {}
        self._num_decoding = 0
        #: Of the decoding requests, together.
        self._decoding_tokens = 0
        self._step = 0
        self._short_of_blocks: defaultdict[int, list[tuple[EmulatedRequest, int]]] = defaultdict(list)
        self._ending: defaultdict[int, list[tuple[EmulatedRequest, int]]] = defaultdict(list)
        self._planned = False
        self.total_generated_tokens = 0
        self.total_prefilled_tokens = 0
        self.total_cached_tokens = 0
        self.total_read_tokens = 0
        self.total_preemptions = 0
        #: How often a request lost blocks that it held or had taken over, to one that runs.
        self.total_losses = 0

    # What is asked of it between two steps.

    @property
    def has_work(self) -> bool:
        return bool(self._active)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._active) - len(self._running)

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_used_blocks(self) -> int:
        return self._cache.num_used

    @property
    def total_steps(self) -> int:
        return self._step

    def is_active(self, request_id: str) -> bool:
        return request_id in self._active

    def add(self, request: EmulatedRequest) -> None:
        """Queue a request. Its id must not be in flight."""
        assert not self._planned and request.state == "new" and request.request_id not in self._active
        assert 0 < request.prompt.size < self._limits.max_context_tokens, request.prompt.size
        request.arrival = next(self._numbers)
        request.context = request.prompt
        self._active[request.request_id] = request
        held = self._held.get(request.request_id)
        if held is not None and request.goes_on_from(held):
            del self._held[request.request_id]
            request.blocks, request.keys, request.num_kept = held.blocks, held.keys, held.num_kept
            request.num_computed = held.num_computed
            held.state = "ended"
            request.state = "taken over"
            self._taken_over[request.request_id] = request
        else:
            self.release(request.request_id)
            self._queue(request)
        self._keys.extend(request.keys, request.context)

    def abort(self, request_id: str) -> Outcome | None:
        """End a request with what it has made. None for an id that is not in flight."""
        assert not self._planned
        request = self._active.get(request_id)
        if request is None:
            return None
        if request.state == "taken over":
            del self._taken_over[request_id]
        elif request.state != "waiting":
            self._stop_running(request)
        return self._end(request, "aborted", hold=False)

    def forget(self, request: EmulatedRequest) -> Outcome | None:
        """Nobody waits for this very request: end it, or free what it holds if it has ended."""
        if self._active.get(request.request_id) is request:
            return self.abort(request.request_id)
        if self._held.get(request.request_id) is request:
            self.release(request.request_id)
        return None

    def release(self, request_id: str, discard_from: int | None = None) -> None:
        """As `Engine.release`."""
        assert not self._planned
        held = self._held.pop(request_id, None)
        if held is None:
            return
        held.state = "ended"
        self._cache.free(held.blocks)
        if discard_from is not None:
            self._cache.discard(held.blocks[-(-discard_from // self._block_size) :])

    def update_version(self, version: int) -> None:
        """New weights: held blocks are freed, running requests start again, the prefix cache is forgotten."""
        assert not self._planned
        for request_id in list(self._held):
            self.release(request_id)
        for request in list(self._taken_over.values()):
            self._give_up_blocks(request)
        for request in reversed(list(self._running.values())):
            self._preempt(request)
        self._cache.forget()
        self._version = version

    # A step.

    def plan(self) -> StepPlan | None:
        """What the next step computes; None if no request is in flight. `commit` must follow."""
        assert not self._planned
        if not self._active:
            return None
        preempted_before = self.total_preemptions
        self._give_blocks_to_decoding()
        budget = self._max_batched - self._num_decoding
        chunks = self._go_on_prefilling(budget)
        if self.total_preemptions == preempted_before:
            self._admit(budget - sum(num_tokens for _, num_tokens in chunks), chunks)
        assert chunks or self._num_decoding, "requests are in flight, and none can run"
        loads = tuple((num_tokens, request.num_computed) for request, num_tokens in chunks)
        # The last token of a request that has been computed again makes the next one: that is decoding.
        again = [r.num_tokens for r, num_tokens in chunks if r.num_made and r.num_computed + num_tokens == r.num_tokens]
        plan = StepPlan(
            load=StepLoad(self._num_decoding, self._decoding_tokens, loads),
            chunks=tuple(chunks),
            num_prefilled=sum(num_tokens for num_tokens, _ in loads) - len(again),
            num_decoded=self._num_decoding + len(again),
        )
        self.total_prefilled_tokens += plan.num_prefilled
        self.total_read_tokens += self._decoding_tokens + sum(again)
        self._planned = True
        return plan

    def commit(self, plan: StepPlan) -> list[Outcome]:
        """The step is over: its tokens are there. Returns the requests that have ended with it, in the order of admission."""
        assert self._planned
        self._planned = False
        step = self._step
        self._step += 1
        self.total_generated_tokens += self._num_decoding
        self._decoding_tokens += self._num_decoding
        ended = []
        for request, since in self._ending.pop(step, ()):
            if request.state == "decoding" and request.since == since:
                self._stop_running(request)
                ended.append(request)
        for request, num_tokens in plan.chunks:
            request.num_computed += num_tokens
            if request.num_computed < request.num_tokens:
                self._prefilling = request
                continue
            self._make_token(request)
            if request.num_left == 0:
                self._stop_running(request)
                ended.append(request)
        ended.sort(key=lambda request: request.admission)
        return [self._end(request, request.finish, hold=request.hold) for request in ended]

    # Inside a plan.

    def _give_blocks_to_decoding(self) -> None:
        short = self._short_of_blocks.pop(self._step, None)
        if short is None:
            return
        short.sort(key=lambda entry: entry[0].admission)
        for request, since in short:
            # Not so for one that has left the batch since, or that an earlier one has preempted.
            if request.state == "decoding" and request.since == since and self._grow(request, self._step - since + 1):
                self._note_shortage(request)

    def _go_on_prefilling(self, budget: int) -> list[tuple[EmulatedRequest, int]]:
        request, self._prefilling = self._prefilling, None
        if request is None:
            return []
        # There is a token for it: it is one of the `max_running` itself.
        num_tokens = min(request.num_tokens - request.num_computed, budget)
        return [(request, num_tokens)] if self._grow(request, num_tokens) else []

    def _grow(self, request: EmulatedRequest, num_tokens: int) -> bool:
        """Blocks for so many tokens more than `num_computed`, taken from others if need be; False if it was preempted itself."""
        while True:
            num_blocks = -(-(request.num_computed + num_tokens) // self._block_size) - len(request.blocks)
            if num_blocks <= self._cache.num_free:
                request.blocks += self._cache.take(num_blocks)
                self._keep_full_blocks(request, request.num_computed + num_tokens)
                return True
            if self._take_from_idle(request):
                continue
            youngest = max(self._running.values(), key=lambda running: running.arrival)
            self._preempt(youngest)
            self.total_preemptions += 1
            # vLLM then leaves those behind it in its list out of this one step; here they go on.
            if youngest is request:
                return False

    def _admit(self, budget: int, chunks: list[tuple[EmulatedRequest, int]]) -> None:
        while budget > 0 and len(self._running) < self._limits.max_running:
            request = self._next_waiting()
            if request is None:
                return
            num_tokens = self._start(request, budget)
            if num_tokens == 0:
                return
            budget -= num_tokens
            chunks.append((request, num_tokens))

    def _next_waiting(self) -> EmulatedRequest | None:
        for request in self._taken_over.values():
            return request
        while self._waiting:
            request = self._waiting[0][1]
            if request.state == "waiting":
                return request
            heapq.heappop(self._waiting)
        return None

    def _start(self, request: EmulatedRequest, budget: int) -> int:
        """Let a waiting request run if its whole context fits: how many of its tokens are computed, 0 if it does not fit."""
        num_total = -(-request.num_tokens // self._block_size)
        if request.state == "taken over":
            found = []
        else:
            found = self._cache.lookup(request.keys, (request.num_tokens - 1) // self._block_size)
        num_owned = len(request.blocks) + len(found)
        # Those found that are free are not free any more when it runs.
        while num_total - num_owned + self._cache.num_free_among(found) > self._cache.num_free:
            if not self._take_from_idle(request):
                return 0
        self._cache.share(found)
        if found:
            request.blocks = found
            request.num_kept = len(found)
            request.num_computed = len(found) * self._block_size
        if request.state == "taken over":
            del self._taken_over[request.request_id]
        else:
            heapq.heappop(self._waiting)
        request.state = "prefilling"
        request.admission = next(self._numbers)
        self._running[request.request_id] = request
        self.total_cached_tokens += request.num_computed
        if request.num_cached is None:
            request.num_cached = request.num_computed
        num_tokens = min(request.num_tokens - request.num_computed, budget)
        grown = self._grow(request, num_tokens)
        assert grown, "the whole context was known to fit"
        return num_tokens

    def _take_from_idle(self, request: EmulatedRequest) -> bool:
        """Free some blocks of requests that do not run, for one that runs or will; False if there are none."""
        if self._held:
            self.release(next(iter(self._held)))
        elif request.request_id in self._running or not self._running:
            others = [other for other in self._taken_over.values() if other is not request]
            if not others:
                return False
            self._give_up_blocks(others[-1])
        else:
            return False
        self.total_losses += 1
        return True

    # Changes of state.

    def _queue(self, request: EmulatedRequest) -> None:
        request.state = "waiting"
        heapq.heappush(self._waiting, (request.arrival, request))

    def _give_up_blocks(self, request: EmulatedRequest) -> None:
        """Let a request that has taken blocks over and waits start like one that was never held."""
        del self._taken_over[request.request_id]
        self._free_blocks(request)
        self._queue(request)

    def _preempt(self, request: EmulatedRequest) -> None:
        self._stop_running(request)
        self._free_blocks(request)
        self._queue(request)

    def _make_token(self, request: EmulatedRequest) -> None:
        """All it has is computed: the step makes a token for it, and it decodes from the next step on."""
        if request.answer is None:
            self._draw_answer(request)
        request.num_made += 1
        request.made_under.append((1, self._version))
        request.state = "decoding"
        request.since = self._step
        self.total_generated_tokens += 1
        self._num_decoding += 1
        self._decoding_tokens += request.num_tokens
        if request.num_left:
            self._ending[self._step + request.num_left - 1].append((request, request.since))
            self._note_shortage(request)

    def _note_shortage(self, request: EmulatedRequest) -> None:
        """Put into the calendar when its blocks are full."""
        step = request.since + len(request.blocks) * self._block_size - request.num_computed
        self._short_of_blocks[step].append((request, request.since))

    def _draw_answer(self, request: EmulatedRequest) -> None:
        sampling = request.sampling
        max_tokens = min(sampling.max_new_tokens, self._limits.max_context_tokens - request.prompt.size)
        stop_ids = None if sampling.ignore_stop else sampling.stop_token_ids
        request.answer = self._answers.answer(request.request_id, request.prompt, self._version, max_tokens, stop_ids)
        assert 1 <= request.answer.token_ids.size <= max_tokens
        request.context = np.concatenate([request.prompt, request.answer.token_ids])
        self._keys.extend(request.keys, request.context)

    def _stop_running(self, request: EmulatedRequest) -> None:
        """Out of the batch, with its numbers as of now."""
        del self._running[request.request_id]
        if request.state == "decoding":
            num_steps = self._step - request.since
            request.num_computed += num_steps
            request.num_made += num_steps
            if num_steps:
                request.made_under.append((num_steps, self._version))
            self._num_decoding -= 1
            self._decoding_tokens -= request.num_tokens
        elif request is self._prefilling:
            self._prefilling = None
        self._keep_full_blocks(request, request.num_computed)

    def _keep_full_blocks(self, request: EmulatedRequest, num_computed: int) -> None:
        # vLLM makes a decoding request's block findable with the token that fills it; here it happens with the one after, or
        # when the request stops. Only a twin with the same random tokens could tell.
        num_full = num_computed // self._block_size
        if num_full > request.num_kept:
            self._cache.keep(request.blocks, request.keys, request.num_kept, num_full)
            request.num_kept = num_full

    def _free_blocks(self, request: EmulatedRequest) -> None:
        self._cache.free(request.blocks)
        request.blocks = []
        request.num_kept = request.num_computed = 0

    def _end(self, request: EmulatedRequest, finish: str, *, hold: bool) -> Outcome:
        del self._active[request.request_id]
        if hold:
            request.state = "held"
            self._held[request.request_id] = request
        else:
            request.state = "ended"
            self._free_blocks(request)
        return Outcome(request, request.generation(finish, self._log_prob))
