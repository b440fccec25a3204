"""A rank's pool of KV-cache tokens: block arithmetic by hand, expected growth against the formula in floating point."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiderl.config.schema import RolloutConfig
from tiderl.scheduling.estimates import LengthEstimates
from tiderl.scheduling.footprints import (
    LASTING_REPORTS,
    ExpectedGrowth,
    Need,
    PresentLengths,
    RankPool,
    TaskSlots,
    growth_steps,
)
from tiderl.types import GroupId, TaskId

BLOCK = 10
MAX_CONTEXT = 1000
KINDS = [PresentLengths, ExpectedGrowth, TaskSlots]
COUNTING = [PresentLengths, ExpectedGrowth]


def pool_of(
    kind: type[RankPool], num_blocks: int = 100, estimates: LengthEstimates | None = None, **rollout: Any
) -> RankPool:
    settings = RolloutConfig(**{"kv_reserve": 0.0, "resume_margin": 0.0, **rollout})
    return kind(num_blocks, BLOCK, settings, estimates or LengthEstimates(max_context_tokens=MAX_CONTEXT, max_turns=20))


def need(task_id: int, context: int, group_id: int = 0, prompt: int = 0, type_: str = "a") -> Need:
    return Need(TaskId(task_id), GroupId(group_id), type_, prompt, context)


def up(tokens: int) -> int:
    """To whole blocks."""
    return math.ceil(tokens / BLOCK) * BLOCK


def down(tokens: int) -> int:
    return tokens - tokens % BLOCK


# --- usage and budget by hand -------------------------------------------------------------------------------------------


def test_the_budget_is_the_cache_less_the_reserve_in_whole_blocks() -> None:
    pool = pool_of(PresentLengths, 30, kv_reserve=0.05)
    assert (pool.cache_tokens, pool.budget_tokens) == (300, 280)  # 28.5 blocks


def test_invariant_1_present_lengths_in_whole_blocks() -> None:
    pool = pool_of(PresentLengths)
    pool.add(need(0, 21, prompt=20))
    pool.add(need(1, 30, prompt=20))
    assert pool.usage_tokens == 30 + 30, "each for itself, a shared prompt too"
    pool.update(need(0, 31, prompt=20))
    assert pool.usage_tokens == 40 + 30
    pool.remove(TaskId(1))
    assert pool.usage_tokens == 40
    pool.remove(TaskId(0))
    assert (pool.usage_tokens, pool.num_on_rank, pool.num_of_type["a"]) == (0, 0, 0)


def test_invariant_1_a_shared_prompt_counts_once_in_whole_blocks() -> None:
    pool = pool_of(ExpectedGrowth)
    pool.add(need(0, 41, group_id=1, prompt=27))
    assert pool.usage_tokens == 20 + up(41 - 20), "only whole blocks are shared: two of the prompt's three"
    pool.add(need(1, 30, group_id=1, prompt=27))
    assert pool.usage_tokens == 20 + 30 + 10
    pool.add(need(2, 30, group_id=2, prompt=27))
    assert pool.usage_tokens == 20 + 30 + 10 + (20 + 10), "another group shares nothing with it"
    pool.remove(TaskId(0))
    assert pool.usage_tokens == 20 + 10 + 30
    pool.remove(TaskId(1))
    assert pool.usage_tokens == 30, "the last of a group takes the prompt with it"


def test_the_longest_word_on_a_groups_prompt_counts() -> None:
    pool = pool_of(ExpectedGrowth)
    pool.add(need(0, 40, prompt=0))  # not known yet
    pool.add(need(1, 40, prompt=30))
    assert pool.usage_tokens == 40 + (30 + 10)
    pool.update(need(0, 40, prompt=30))
    assert pool.usage_tokens == 30 + 10 + 10


def test_a_prompt_that_was_taken_for_too_long_is_counted_right_when_all_know_better() -> None:
    pool = pool_of(ExpectedGrowth)
    for number in (0, 1):
        pool.add(need(number, 60, prompt=60))
    pool.update(need(0, 45, prompt=40))
    assert pool.usage_tokens >= 40 + 10, "one still says 60"
    pool.update(need(1, 45, prompt=40))
    assert pool.usage_tokens == 40 + 10 + 10


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_that_must_go_frees_its_tokens_at_once_and_its_place_later(kind: type[RankPool]) -> None:
    pool = pool_of(kind)
    pool.add(need(0, 50))
    pool.add(need(1, 50, group_id=1))
    alone = pool_of(kind)
    alone.add(need(0, 50))
    pool.pause(TaskId(1))
    assert pool.usage_tokens == alone.usage_tokens
    assert (pool.num_on_rank, set(pool.needs), pool.leaving) == (2, {0}, {1})
    assert pool.num_of_type["a"] == 1


def test_over_is_above_the_budget_not_at_it() -> None:
    pool = pool_of(PresentLengths, 10)
    pool.add(need(0, 60))
    pool.add(need(1, 40))
    assert not pool.is_over
    pool.update(need(1, 41))
    assert pool.is_over


# --- what fits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", COUNTING)
@pytest.mark.parametrize(("context", "fits"), [(80, True), (81, False)])
def test_invariant_2_alone_a_task_fits_whatever_it_will_become(kind: type[RankPool], context: int, fits: bool) -> None:
    estimates = LengthEstimates(max_context_tokens=MAX_CONTEXT, max_turns=20)
    for _ in range(20):
        estimates.saw_final("a", MAX_CONTEXT)
    pool = pool_of(kind, 10, estimates, kv_reserve=0.2)
    assert (pool.shortfall(need(0, context)) <= 0) is fits
    pool.add(need(9, 10))
    assert pool.shortfall(need(0, context, group_id=1)) > 0, "beside another one it does not"
    pool.pause(TaskId(9))
    assert pool.takes_tasks
    assert (pool.shortfall(need(0, context)) <= 0) is fits


def test_present_lengths_fit_up_to_the_budget() -> None:
    pool = pool_of(PresentLengths, 10, kv_reserve=0.1)
    pool.add(need(0, 35))
    assert [pool.shortfall(need(1, context)) for context in (41, 50, 51, 65)] == [0, 0, 10, 20]


def test_task_slots_think_of_no_cache() -> None:
    pool = pool_of(TaskSlots, 1)
    usage = [pool.usage_tokens]
    for number in range(5):
        assert pool.shortfall(need(number, MAX_CONTEXT)) <= 0
        pool.add(need(number, MAX_CONTEXT))
        pool.update(need(number, 2 * MAX_CONTEXT))
        usage.append(pool.usage_tokens)
        assert pool.takes_tasks
        assert not pool.is_over
        assert pool.compare(10**9) is None
    steps = {later - sooner for sooner, later in pairwise(usage)}
    assert len(steps) == 1 and steps.pop() > 0, "busier by the same for every task, however long"


@pytest.mark.parametrize(("block", "longest"), [(10, 1000), (32, 8192), (16, 10)])
def test_growth_is_looked_at_up_to_the_longest_context(block: int, longest: int) -> None:
    steps = growth_steps(block, longest)
    assert steps[0] == 4 * block
    assert steps[-1] >= longest and all(step < longest for step in steps[:-1])
    assert all(later == 2 * sooner for sooner, later in pairwise(steps))


TYPES = ("short", "long", "unknown")


@st.composite
def mixes(draw: st.DrawFn) -> tuple[LengthEstimates, list[Need], float]:
    """Estimates, tasks whose groups share a prompt, and a safety factor."""
    estimates = LengthEstimates(max_context_tokens=MAX_CONTEXT, max_turns=20)
    for type_, lengths in (("short", st.integers(20, 200)), ("long", st.integers(300, MAX_CONTEXT))):
        for final in draw(st.lists(lengths, max_size=12)):
            estimates.saw_final(type_, final)
    prompts = draw(st.lists(st.integers(0, 90), min_size=3, max_size=3))
    needs = []
    for number in range(draw(st.integers(2, 8))):
        group = draw(st.integers(0, 2))
        context = prompts[group] + draw(st.integers(0, 400))
        needs.append(need(number, context, group, prompts[group], TYPES[group]))
    return estimates, needs, draw(st.sampled_from([0.0, 0.5, 1.5, 3.0]))


def expected_use(estimates: LengthEstimates, needs: list[Need], safety: float) -> tuple[float, float]:
    """The docstring's formula: the largest of the present use and the use foreseen at every step; and how inexact integers are.

    What a task may still become is looked at in units of the first step: its context rounded down, its own use rounded up.
    """
    shared = sum({n.group_id: down(n.prompt_tokens) for n in needs}.values())
    own = {n.task_id: up(n.context_tokens - down(n.prompt_tokens)) for n in needs}
    uses = [float(sum(own.values()))]
    steps = growth_steps(BLOCK, MAX_CONTEXT)
    unit = steps[0]
    for i, step in enumerate(steps):
        mean = variance = 0.0
        for n in needs:
            whole, survivors = estimates.survivors(n.task_type, n.context_tokens // unit * unit, steps)
            share = survivors[i] / whole
            then = math.ceil(own[n.task_id] / unit) * unit + step
            mean += share * then
            variance += share * (1 - share) * then**2
        uses.append(mean + safety * math.sqrt(variance))
    # Every mean and variance is rounded down once per task, the deviation once more.
    return shared + max(uses), len(needs) + safety * (math.sqrt(len(needs)) + 1) + 1


@given(mix=mixes())
def test_expected_growth_is_the_formula(mix: tuple[LengthEstimates, list[Need], float]) -> None:
    estimates, (asking, *others), safety = mix
    pool = pool_of(ExpectedGrowth, 100, estimates, growth_safety=safety)
    for other in others:
        # Reports came in between: only the last one counts.
        pool.add(need(other.task_id, other.context_tokens + 90, other.group_id, other.prompt_tokens, other.task_type))
        pool.update(other)
    use, tolerance = expected_use(estimates, [asking, *others], safety)
    assert pool.shortfall(asking) == pytest.approx(use - 1000, abs=tolerance)


def test_expected_growth_by_hand() -> None:
    """Two tasks of a known type that all end at 500: of eight seen and eight assumed, how much is there after 90 tokens?"""
    estimates = LengthEstimates(max_context_tokens=1000, max_turns=20)
    for _ in range(8):
        estimates.saw_final("a", 500)
    pool = pool_of(ExpectedGrowth, 100, estimates, growth_safety=0.0)
    pool.add(need(0, 200, group_id=0, prompt=80))
    # Share that goes on at growth g < 300: (8 + 8 * (1 - g / 800)) / 16; two tasks, a prompt each, 120 + g beside it.
    # Steps 40 80 160 320: at 160 2 * 280 * 0.9 = 504, at 320 only the assumption is left: 2 * 440 * 0.3.
    assert pool.shortfall(need(1, 200, group_id=1, prompt=80)) == pytest.approx(2 * 80 + 504 - 1000, abs=3)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=50)
@given(mix=mixes())
def test_invariant_3_shortfall_is_monotone(
    kind: type[RankPool], mix: tuple[LengthEstimates, list[Need], float]
) -> None:
    estimates, (asking, *others), safety = mix
    pool = pool_of(kind, 100, estimates, growth_safety=safety)
    shortfalls = [pool.shortfall(asking)]
    for other in others:
        pool.add(other)
        shortfalls.append(pool.shortfall(asking))
    assert shortfalls == sorted(shortfalls)
    for other, before in zip(reversed(others), reversed(shortfalls[:-1]), strict=True):
        pool.remove(other.task_id)
        assert pool.shortfall(asking) == before, "as if the task had never been there"
    assert pool.usage_tokens == 0


@pytest.mark.parametrize("kind", COUNTING)
@settings(max_examples=50)
@given(mix=mixes())
def test_what_fits_beside_others_leaves_the_pool_within_its_budget(
    kind: type[RankPool], mix: tuple[LengthEstimates, list[Need], float]
) -> None:
    estimates, needs, safety = mix
    pool = pool_of(kind, 100, estimates, growth_safety=safety, kv_reserve=0.2)
    pool.add(need(99, 1, group_id=99))
    for one in needs:
        if pool.shortfall(one) <= 0:
            pool.add(one)
        assert not pool.is_over


def test_a_prompt_that_is_longer_than_its_groups_first_estimate_is_counted_when_it_is_asked_about() -> None:
    """Two siblings come under two estimates of the prompt that they share. No context can grow: only present use counts."""
    pool = pool_of(ExpectedGrowth, 9, LengthEstimates(max_context_tokens=60, max_turns=20))
    pool.add(need(0, 30, group_id=0, prompt=30))
    pool.add(need(1, 40, group_id=1))
    sibling = need(2, 60, group_id=0, prompt=60)
    shortfall = pool.shortfall(sibling)
    pool.add(sibling)
    assert pool.usage_tokens == 60 + 40
    assert shortfall == 100 - 90


# --- two watermarks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", COUNTING)
def test_invariant_4_after_a_pause_nothing_comes_in_before_the_low_mark(kind: type[RankPool]) -> None:
    pool = pool_of(kind, 100, kv_reserve=0.1, resume_margin=0.2)  # budget 900, low mark 720
    for number, context in enumerate((500, 230, 170)):
        pool.add(need(number, context, group_id=number))
    assert pool.takes_tasks, "without a pause before only the budget counts"
    pool.pause(TaskId(2))
    assert (pool.usage_tokens, pool.takes_tasks) == (730, False)
    pool.update(need(1, 231, group_id=1))
    assert (pool.usage_tokens, pool.takes_tasks) == (740, False)
    pool.remove(TaskId(1))
    pool.add(need(3, 220, group_id=3))
    assert (pool.usage_tokens, pool.takes_tasks) == (720, True)
    pool.add(need(4, 100, group_id=4))
    assert pool.takes_tasks, "it has been below: that counts until the next pause"
    pool.pause(TaskId(4))
    assert pool.takes_tasks
    pool.update(need(3, 221, group_id=3))
    pool.add(need(5, 100, group_id=5))
    pool.pause(TaskId(5))
    assert not pool.takes_tasks


# --- the engine's word ----------------------------------------------------------------------------------------------


def disagreeing() -> RankPool:
    """A pool that knows of 300 of its 10 000 tokens, with little reserve."""
    pool = pool_of(PresentLengths, 1000, kv_reserve=0.01)
    pool.add(need(0, 300))
    return pool


def test_a_lasting_excess_is_taken_over_and_given_back() -> None:
    pool = disagreeing()
    reports = [pool.compare(5300) for _ in range(LASTING_REPORTS)]
    assert reports == [None] * (LASTING_REPORTS - 1) + [5000]
    assert pool.usage_tokens == 5300
    assert pool.shortfall(need(1, 5000)) == 5300 + 5000 - 9900
    assert [pool.compare(5300) for _ in range(5)] == [None] * 5, "no change, no word"
    reports = [pool.compare(300) for _ in range(LASTING_REPORTS)]
    assert reports == [None] * (LASTING_REPORTS - 1) + [0]
    assert pool.usage_tokens == 300


def test_invariant_1_what_is_unseen_stays_beside_what_tasks_use() -> None:
    pool = disagreeing()
    for _ in range(LASTING_REPORTS):
        pool.compare(5300)
    pool.update(need(0, 400))
    pool.add(need(1, 100))
    assert pool.usage_tokens == 5000 + 400 + 100


def test_one_report_that_agrees_begins_the_count_anew() -> None:
    pool = disagreeing()
    for engine_tokens in (5300, 5300, 300, 5300, 5300, 320):
        assert pool.compare(engine_tokens) is None
    assert pool.usage_tokens == 300


def test_of_an_excess_only_what_all_reports_said_is_taken() -> None:
    pool = disagreeing()
    assert [pool.compare(tokens) for tokens in (5350, 5300, 5380)] == [None, None, 5000]


def test_less_than_ours_is_no_error() -> None:
    pool = disagreeing()
    pool.update(need(0, 8000))
    assert [pool.compare(0) for _ in range(10)] == [None] * 10
    assert pool.usage_tokens == 8000


def test_while_a_task_leaves_the_engine_may_still_hold_it() -> None:
    pool = disagreeing()
    pool.add(need(1, 5000))
    pool.pause(TaskId(1))
    assert [pool.compare(5300) for _ in range(10)] == [None] * 10
    pool.leaving.remove(TaskId(1))
    assert [pool.compare(5300) for _ in range(LASTING_REPORTS)][-1] == 5000


def test_what_the_reserve_can_hold_is_no_disagreement() -> None:
    pool = disagreeing()
    assert [pool.compare(300 + 100) for _ in range(10)] == [None] * 10


def test_reports_that_contradict_each_other_change_nothing() -> None:
    pool = disagreeing()
    for _ in range(LASTING_REPORTS):
        pool.compare(5300)
    # More, none, more, and so on: no three in a row say the same.
    assert [pool.compare(tokens) for tokens in (9300, 300, 9300, 300, 9300, 9300)] == [None] * 6
    assert pool.usage_tokens == 5300
