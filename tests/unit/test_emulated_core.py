"""Invariants of `tiderl.engines.emulated_core`: a state machine with books of its own, and cases worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tiderl.engines.base import Sampling
from tiderl.engines.emulated_answers import Answer
from tiderl.engines.emulated_core import EmulatedCore
from tiderl.engines.emulated_request import EmulatedRequest, Limits, Outcome, StepPlan
from tiderl.profiles.costs import StepLoad

BLOCK = 4


class CountingAnswers:
    """Answers that are as long as the cap, of ids that nobody else uses."""

    def __init__(self) -> None:
        self._next = 1000

    def answer(
        self,
        request_id: str,
        prompt: npt.NDArray[np.int32],
        version: int,
        max_tokens: int,
        stop_ids: tuple[int, ...] | None,
    ) -> Answer:
        self._next += max_tokens
        return Answer(np.arange(self._next - max_tokens, self._next, dtype=np.int32), "length")


def core_of(
    num_blocks: int = 100, max_running: int = 8, max_batched: int = 1000, max_context: int = 40
) -> EmulatedCore:
    return EmulatedCore(Limits(num_blocks, BLOCK, max_running, max_batched, max_context), CountingAnswers(), -1.0)


def request(name: str, prompt: Sequence[int] | int, num_new: int, *, hold: bool = False) -> EmulatedRequest:
    """A number stands for so many tokens that begin with the request's name."""
    ids = [*name.encode() * 40][:prompt] if isinstance(prompt, int) else prompt
    return EmulatedRequest(name, np.array(ids, np.int32), Sampling(1.0, num_new, ()), hold)


def step(core: EmulatedCore) -> tuple[StepPlan, list[Outcome]]:
    plan = core.plan()
    assert plan is not None
    return plan, core.commit(plan)


def run(core: EmulatedCore, num_steps: int) -> list[Outcome]:
    return [outcome for _ in range(num_steps) for outcome in step(core)[1]]


def finish(core: EmulatedCore) -> dict[str, Outcome]:
    ended = {}
    for _ in range(10_000):
        if not core.has_work:
            return ended
        for outcome in step(core)[1]:
            assert outcome.request.request_id not in ended
            ended[outcome.request.request_id] = outcome
    raise AssertionError("requests never end")


class TestSteps:
    def test_an_idle_core_plans_nothing(self) -> None:
        core = core_of()
        assert core.plan() is None
        core.add(request("a", 3, 1))
        step(core)
        assert core.plan() is None

    def test_loads_of_one_request(self) -> None:
        core = core_of()
        core.add(request("a", 6, 3))
        plans = [step(core)[0] for _ in range(3)]
        # Its first token comes with the prompt; the next two read 7 and 8 tokens.
        assert [plan.load for plan in plans] == [StepLoad(0, 0, ((6, 0),)), StepLoad(1, 7), StepLoad(1, 8)]
        assert (core.total_generated_tokens, core.total_prefilled_tokens, core.total_read_tokens) == (3, 6, 15)
        assert (core.total_steps, core.has_work, core.num_used_blocks) == (3, False, 0)

    def test_decodes_first_then_a_chunk_then_the_next_in_order(self) -> None:
        core = core_of(max_batched=8)
        for name, prompt in (("a", 5), ("b", 12), ("c", 3)):
            core.add(request(name, prompt, 5))
        loads = [step(core)[0].load for _ in range(4)]
        assert loads == [
            StepLoad(0, 0, ((5, 0), (3, 0))),
            StepLoad(1, 6, ((7, 3),)),
            # b's last 2, and c although it came later: the budget allows both.
            StepLoad(1, 7, ((2, 10), (3, 0))),
            StepLoad(3, 8 + 13 + 4),
        ]

    def test_no_more_sequences_than_allowed(self) -> None:
        core = core_of(max_running=2)
        for name in "abc":
            core.add(request(name, 3, 2))
        step(core)
        assert (core.num_running, core.num_waiting) == (2, 1)
        outcomes = run(core, 1)
        assert [outcome.request.request_id for outcome in outcomes] == ["a", "b"]
        assert list(finish(core)) == ["c"]

    def test_a_request_waits_until_its_whole_context_fits(self) -> None:
        core = core_of(num_blocks=10, max_batched=8)
        core.add(request("a", 20, 4))  # 5 blocks, 6 in the end, in 3 + 3 steps
        core.add(request("b", 24, 1))  # 6 blocks, although a chunk of it would need 2
        core.add(request("c", 2, 1))  # would fit, but does not overtake
        for _ in range(5):
            step(core)
            assert (core.num_running, core.num_waiting) == (1, 2)
        assert list(finish(core)) == ["a", "b", "c"]

    def test_between_plan_and_commit_nothing_else_is_done(self) -> None:
        core = core_of()
        core.add(request("a", 3, 5))
        plan = core.plan()
        assert plan is not None
        for forbidden in (
            lambda: core.add(request("b", 3, 5)),
            lambda: core.abort("a"),
            lambda: core.release("a"),
            lambda: core.update_version(1),
            core.plan,
        ):
            with pytest.raises(AssertionError):
                forbidden()
        core.commit(plan)


class TestPrefixCache:
    def test_only_full_blocks_are_found_and_the_last_token_is_computed(self) -> None:
        core = core_of()
        for prompt, cached in ((11, 0), (11, 8), (8, 4), (9, 8), (13, 8)):
            core.add(request("a", prompt, 1))
            (outcome,) = step(core)[1]
            assert outcome.generation.cached_tokens == cached
        # The last one has made 12 findable.
        core.add(request("a", 13, 1))
        assert step(core)[0].load == StepLoad(0, 0, ((1, 12),))

    def test_twins_in_one_step_share(self) -> None:
        core = core_of()
        for name in ("one", "two", "three"):
            core.add(request(name, [7] * 10, 6))
        assert step(core)[0].load == StepLoad(0, 0, ((10, 0), (2, 8), (2, 8)))
        assert core.num_used_blocks == 2 + 3

    def test_an_answer_is_found_again(self) -> None:
        core = core_of()
        core.add(request("a", 6, 7))
        first = finish(core)["a"].generation.token_ids
        context = [*b"aaaaaa", *first.tolist()]
        core.add(request("b", [*context, 5, 6], 1))
        # 12 of the 13 tokens have been computed, the last was sampled: three full blocks.
        assert finish(core)["b"].generation.cached_tokens == 12


class TestPreemption:
    def test_the_youngest_gives_its_blocks_and_computes_them_again(self) -> None:
        core = core_of(num_blocks=10)
        core.add(request("old", [1] * 15, 12))
        core.add(request("new", [2] * 15, 12))
        # 4 blocks each, 5 from the third step on; in the seventh both would compute a 21st token, in a sixth block.
        run(core, 6)
        assert (core.total_preemptions, core.num_used_blocks) == (0, 10)
        run(core, 1)
        assert (core.total_preemptions, core.num_running, core.num_waiting) == (1, 1, 1)
        ended = finish(core)
        assert [(name, ended[name].generation.token_ids.size) for name in ended] == [("old", 12), ("new", 12)]
        # Of the 5 full blocks of `new`, `old` takes the last at once and the fourth with its 25th token. 12 of the 21 tokens are
        # found when it comes back, 9 computed, one of which makes its seventh token.
        assert core.total_cached_tokens == 12
        assert core.total_prefilled_tokens == 15 + 15 + 8
        assert core.total_generated_tokens == 24

    def test_nobody_is_admitted_in_a_step_that_preempts(self) -> None:
        core = core_of(num_blocks=10, max_running=2)
        core.add(request("new", 7, 1, hold=True))
        context = [*b"new" * 3][:7] + finish(core)["new"].generation.token_ids.tolist()
        core.add(request("old", 15, 20))
        core.add(request("short", 3, 2))
        step(core)
        # `tiny` comes before the second turn of `new`, which has blocks already and so is admitted when `short` has ended.
        core.add(request("tiny", 3, 1))
        core.add(request("new", [*context, 1, 2, 3, 4, 5, 6], 20))
        run(core, 5)
        assert (core.total_preemptions, core.num_used_blocks, core.num_running, core.num_waiting) == (0, 10, 2, 1)
        # `old` needs a sixth block and gets it from `new`, which frees more than `tiny` needs.
        plan, _ = step(core)
        assert (plan.load, core.total_preemptions, core.num_waiting) == (StepLoad(1, 21), 1, 2)
        assert step(core)[0].load == StepLoad(1, 22, ((3, 0),))


class TestHold:
    def test_the_next_turn_computes_what_is_new(self) -> None:
        core = core_of()
        core.add(request("a", 6, 4, hold=True))
        answer = finish(core)["a"].generation.token_ids.tolist()
        assert (core.num_held, core.num_used_blocks) == (1, 3)
        core.add(request("a", [*b"aaaaaa", *answer, 1, 2, 3], 2))
        plan, _ = step(core)
        assert plan.load == StepLoad(0, 0, ((4, 9),))
        assert finish(core)["a"].generation.cached_tokens == 9
        assert (core.num_held, core.num_used_blocks) == (0, 0)

    def test_a_prompt_that_does_not_go_on_frees_it(self) -> None:
        core = core_of()
        core.add(request("a", 6, 4, hold=True))
        finish(core)
        core.add(request("a", [*b"aaaaaa", 5, 5, 5, 5, 5], 2))
        assert finish(core)["a"].generation.cached_tokens == 4

    def hold(self, core: EmulatedCore, name: str, prompt: int) -> list[int]:
        """A first turn of one token; the context that is held."""
        core.add(request(name, prompt, 1, hold=True))
        return [*name.encode() * prompt, *finish(core)[name].generation.token_ids.tolist()]

    def test_the_longest_held_goes_first(self) -> None:
        core = core_of(num_blocks=10)
        contexts = {name: self.hold(core, name, 15) for name in "xy"}
        assert core.num_used_blocks == 8
        core.add(request("n", 12, 1))
        finish(core)
        assert (core.num_held, core.num_used_blocks, core.total_losses, core.total_preemptions) == (1, 4, 1, 0)
        core.add(request("y", [*contexts["y"], 7, 7], 1))
        assert finish(core)["y"].generation.cached_tokens == 15

    def test_turns_that_go_on_together_do_not_lock_each_other_out(self) -> None:
        core = core_of(num_blocks=15)
        contexts = {name: self.hold(core, name, 19) for name in "xyz"}
        assert core.num_used_blocks == 15
        for name, context in contexts.items():
            core.add(request(name, [*context, 1, 2, 3], 2))
        cached = {name: outcome.generation.cached_tokens for name, outcome in finish(core).items()}
        # The sixth blocks of x and of y come from the five of the last one, which finds what is left of them.
        assert (cached["x"], cached["y"], cached["z"]) == (19, 19, 12)
        assert core.total_losses == 1

    @pytest.mark.parametrize(("discard_from", "cached"), [(None, 24), (8, 8), (5, 8)])
    def test_discarded_blocks_are_given_away_first(self, discard_from: int | None, cached: int) -> None:
        core = core_of(num_blocks=12)
        core.add(request("a", 29, 1, hold=True))  # 8 blocks, 7 of them full; 4 were never used
        finish(core)
        core.release("a", discard_from)
        # 6 blocks: those that are empty, the one that was not full, and the last full one; or the 6 discarded ones.
        core.add(request("taker", 24, 1))
        finish(core)
        core.add(request("a", 29, 1))
        assert finish(core)["a"].generation.cached_tokens == cached


class TestUpdate:
    def test_everybody_is_computed_again_under_the_new_weights(self) -> None:
        core = core_of()
        core.add(request("held", 9, 1, hold=True))
        finish(core)
        core.add(request("a", 6, 8))
        run(core, 3)
        core.update_version(5)
        assert (core.num_held, core.num_used_blocks, core.num_running, core.num_waiting) == (0, 0, 0, 1)
        plan, _ = step(core)
        # 6 + 3 tokens; making the fourth token of its answer would have computed one of them anyway.
        assert (plan.load, plan.num_prefilled, plan.num_decoded) == (StepLoad(0, 0, ((9, 0),)), 8, 1)
        outcome = finish(core)["a"].generation
        assert outcome.weight_versions.tolist() == [0] * 3 + [5] * 5
        assert core.total_preemptions == 0
        core.add(request("held", 9, 1))
        assert finish(core)["held"].generation.cached_tokens == 0


class TestAbort:
    def test_what_was_made_is_kept(self) -> None:
        core = core_of()
        core.add(request("a", 6, 9, hold=True))
        run(core, 4)
        outcome = core.abort("a")
        assert outcome is not None and outcome.generation.finish == "aborted"
        assert outcome.generation.token_ids.size == 4 and outcome.generation.cached_tokens == 0
        assert (core.num_held, core.num_used_blocks, core.has_work) == (0, 0, False)
        assert core.abort("a") is None

    def test_before_its_first_token_nothing_had_to_be_computed(self) -> None:
        core = core_of(max_batched=4, max_running=4)
        core.add(request("running", 30, 9))
        core.add(request("waiting", 7, 9))
        run(core, 2)
        for name, prompt in (("running", 30), ("waiting", 7)):
            outcome = core.abort(name)
            assert outcome is not None
            assert (outcome.generation.token_ids.size, outcome.generation.cached_tokens) == (0, prompt)
        assert (core.has_work, core.num_used_blocks) == (False, 0)

    def test_forget_reaches_only_this_very_request(self) -> None:
        core = core_of()
        old = request("a", 6, 2, hold=True)
        core.add(old)
        finish(core)
        new = request("a", [9] * 5, 8)
        core.add(new)
        step(core)
        assert core.forget(old) is None and core.has_work
        outcome = core.forget(new)
        assert outcome is not None and outcome.request is new
        core.add(held := request("b", 6, 2, hold=True))
        finish(core)
        assert core.forget(held) is None
        assert (core.num_held, core.num_used_blocks) == (0, 0)


class CoreMachine(RuleBasedStateMachine):
    """A narrow cache and everything that can happen to it, against books kept from the outcomes and the plans."""

    NUM_BLOCKS, MAX_CONTEXT = 9, 32

    def __init__(self) -> None:
        super().__init__()
        self.core = core_of(self.NUM_BLOCKS, max_running=3, max_batched=7, max_context=self.MAX_CONTEXT)
        self.in_flight: dict[str, EmulatedRequest] = {}
        self.contexts: dict[str, list[int]] = {}
        self.version = 0
        self.num_prefilled = self.num_generated = self.num_decoded = 0

    @rule(
        name=st.sampled_from("abcdefg"),
        num_new_prompt=st.integers(0, 9),
        num_new=st.integers(1, 14),
        hold=st.booleans(),
        start_over=st.booleans(),
    )
    def send(self, name: str, num_new_prompt: int, num_new: int, hold: bool, start_over: bool) -> None:
        if name in self.in_flight:
            return
        # Contexts of all begin alike, so blocks are shared.
        context = [] if start_over else self.contexts.get(name, [])
        prompt = [*(context or [1, 2, 3, 4, 5, 6]), *range(num_new_prompt)][: self.MAX_CONTEXT - 1]
        sent = request(name, prompt, num_new, hold=hold)
        self.core.add(sent)
        self.in_flight[name] = sent

    @precondition(lambda self: self.in_flight)
    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.in_flight:
                self.take_step()

    def take_step(self) -> None:
        plan = self.core.plan()
        assert plan is not None
        decoding = [r for r in self.core._running.values() if r.state == "decoding"]
        chunk_tokens = sum(num_tokens for _, num_tokens in plan.chunks)
        # What the step computes is what it says, and all of it is in blocks that the requests have.
        assert plan.load.num_decodes == len(decoding)
        assert plan.load.decode_context_tokens == sum(self.tokens_of(r) for r in decoding)
        assert 0 < len(decoding) + chunk_tokens <= 7
        for running in decoding:
            assert len(running.blocks) * BLOCK >= self.tokens_of(running)
        for running, num_tokens in plan.chunks:
            assert len(running.blocks) * BLOCK >= running.num_computed + num_tokens
        made_before = self.core.total_generated_tokens
        outcomes = self.core.commit(plan)
        num_made = self.core.total_generated_tokens - made_before
        assert len(decoding) <= num_made <= len(decoding) + len(plan.chunks)
        assert plan.num_prefilled + plan.num_decoded == len(decoding) + chunk_tokens
        self.num_decoded += plan.num_decoded
        for outcome in outcomes:
            self.ended(outcome, "length")

    def tokens_of(self, running: EmulatedRequest) -> int:
        return running.num_tokens + self.core.total_steps - running.since

    def ended(self, outcome: Outcome, finish: str) -> None:
        name, generation = outcome.request.request_id, outcome.generation
        assert self.in_flight.pop(name) is outcome.request
        assert generation.finish == finish
        prompt, num_made = outcome.request.prompt, generation.token_ids.size
        cap = min(outcome.request.sampling.max_new_tokens, self.MAX_CONTEXT - prompt.size)
        assert num_made == cap if finish == "length" else num_made < cap
        assert generation.log_probs.tolist() == [-1.0] * num_made
        assert generation.weight_versions.size == num_made and (np.diff(generation.weight_versions) >= 0).all()
        assert generation.weight_versions.max(initial=0) <= self.version
        assert 0 <= generation.cached_tokens <= prompt.size - (num_made > 0)
        assert len(set(generation.token_ids.tolist())) == num_made
        self.contexts[name] = [*prompt.tolist(), *generation.token_ids.tolist()]
        self.num_generated += num_made

    @rule(name=st.sampled_from("abcdefg"))
    def abort(self, name: str) -> None:
        outcome = self.core.abort(name)
        assert (outcome is not None) == (name in self.in_flight)
        if outcome is not None:
            self.ended(outcome, "aborted")

    @rule(name=st.sampled_from("abcdefg"), discard_from=st.none() | st.integers(0, 20))
    def release(self, name: str, discard_from: int | None) -> None:
        self.core.release(name, discard_from)
        assert name not in self.core._held

    @rule()
    def update(self) -> None:
        self.version += 1
        self.core.update_version(self.version)
        assert (self.core.num_used_blocks, self.core.num_held, self.core.num_running) == (0, 0, 0)

    @invariant()
    def no_request_is_lost(self) -> None:
        assert self.core.num_running + self.core.num_waiting == len(self.in_flight)
        places = [*self.core._running.values(), *self.core._taken_over.values()]
        places += [r for _, r in self.core._waiting if r.state == "waiting"]
        assert sorted(r.request_id for r in places) == sorted(self.in_flight)

    @invariant()
    def blocks_are_those_of_the_requests(self) -> None:
        cache = self.core._cache
        owners = [*self.in_flight.values(), *self.core._held.values()]
        for block in range(self.NUM_BLOCKS):
            assert cache._counts[block] == sum(r.blocks.count(block) for r in owners)
        assert cache.num_free + cache.num_used == self.NUM_BLOCKS
        assert cache.num_used == len({block for r in owners for block in r.blocks})
        assert all(not r.blocks for r in self.in_flight.values() if r.state == "waiting")

    @invariant()
    def running_sums_are_the_sums(self) -> None:
        decoding = [r for r in self.core._running.values() if r.state == "decoding"]
        assert self.core._num_decoding == len(decoding)
        assert self.core._decoding_tokens == sum(self.tokens_of(r) for r in decoding)
        assert len(self.core._running) - len(decoding) <= 1

    def teardown(self) -> None:
        for _ in range(2_000):
            if not self.in_flight:
                break
            self.take_step()
        assert not self.in_flight
        assert self.core.total_generated_tokens == self.num_generated
        for name in "abcdefg":
            self.core.release(name)
        assert self.core.num_used_blocks == 0


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
