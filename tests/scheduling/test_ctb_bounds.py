"""Continuous Task Batching by hand: environments' capacity, what no rank can hold, and the scheduler that thinks of no cache."""

from __future__ import annotations

import pytest

from tests.scheduling.bench import BLOCK, EVAL, Bench, full_with_one_paused, settled, starts
from tiderl.types import Rank

# --- other bounds -------------------------------------------------------------------------------------------------------


def test_environments_hold_paused_tasks_too() -> None:
    bench = full_with_one_paused(capacity=3)
    bench.queue(8)
    bench.queue(9)
    bench.finish(0)
    assert bench.decide() == [("resume", 1, 0), ("start", 2, 0), ("start", 3, 0)]
    bench = full_with_one_paused(capacity=2)
    bench.queue(8)
    bench.queue(9)
    assert bench.decide() == [], "ten tokens are free, but no session"
    bench.batching.forget(bench.tasks[1])
    assert starts(bench.decide()) == [2]


def test_fewer_environments_throw_nobody_out() -> None:
    bench = settled(10, 10, 10)
    bench.queue(8)
    bench.batching.set_capacity(1)
    assert bench.decide() == []
    for task_id in (0, 1):
        bench.finish(task_id)
        assert bench.decide() == []
    bench.finish(2)
    assert starts(bench.decide()) == [3]


def test_max_tasks_per_rank_counts_those_that_leave() -> None:
    bench = settled(80, 10, max_tasks_per_rank=2)
    bench.queue(8)
    bench.turn(0, 95)
    assert bench.decide() == [("pause", 1, 0)]
    bench.finish(0)
    assert starts(bench.decide()) == [2]
    bench.queue(9)
    assert bench.decide() == [], "task 1 has not left"
    bench.hand_over(1)
    assert bench.decide() == [("resume", 1, 0)]
    assert bench.on(0) == {1, 2}


# --- what never fits ----------------------------------------------------------------------------------------------------


def test_an_active_task_that_no_rank_can_hold() -> None:
    bench = settled(60, 20, blocks=(10,), max_context=500)
    bench.turn(0, 110)
    assert bench.decide() == [("pause", 1, 0), ("never_fits", 0, 0)]


def test_a_queued_task_whose_prompt_no_rank_can_hold() -> None:
    bench = Bench(10, 15, max_context=500)
    group = bench.queue(0, 2)
    other = bench.queue(1)
    group.prompt_tokens = 151
    assert [(verb, task_id) for verb, task_id, _ in bench.decide()] == [
        ("never_fits", 0),
        ("never_fits", 1),
        ("start", int(other.tasks[0].task_id)),
    ]


def test_a_paused_task_that_no_rank_can_hold() -> None:
    bench = settled(60, 20, max_context=500)
    bench.turn(0, 85)
    assert bench.decide() == [("pause", 1, 0)]
    bench.turn(1, 101)
    bench.hand_over(1)
    assert [(verb, task_id) for verb, task_id, _ in bench.decide()] == [("never_fits", 1)]
    assert bench.decide() == []


def alone_on_the_small_rank(*blocks: int, kv_reserve: float) -> Bench:
    """Task 0 plays alone on rank 0; larger ranks come later."""
    bench = Bench(blocks[0], kv_reserve=kv_reserve, max_context=500)
    bench.knows("a")
    bench.queue(0)
    assert bench.decide() == [("start", 0, 0)]
    for rank, number in enumerate(blocks[1:], 1):
        bench.batching.add_rank(Rank(rank), number, BLOCK)
    bench.play(0, 50)
    assert bench.decide() == []
    return bench


@pytest.mark.parametrize("context", [95, 150])
def test_a_task_that_has_outgrown_its_rank_moves_to_a_larger_one_and_stays_there(context: int) -> None:
    bench = alone_on_the_small_rank(10, 20, kv_reserve=0.1)  # budgets 90 and 180
    bench.turn(0, context)
    assert bench.decide() == [("pause", 0, 0)]
    bench.hand_over(0)
    assert bench.decide() == [("resume", 0, 1)]
    bench.play(0, context + 1)
    assert bench.decide() == []


def test_a_task_that_only_the_largest_cache_holds_is_played_there_alone() -> None:
    bench = alone_on_the_small_rank(10, 20, kv_reserve=0.1)
    bench.turn(0, 195)
    assert bench.decide() == [("pause", 0, 0)]
    bench.hand_over(0)
    assert bench.decide() == [("resume", 0, 1)]
    bench.play(0, 196)
    bench.queue(1)
    assert bench.decide() == [("start", 1, 0)]
    bench.turn(0, 201)
    assert bench.decide() == [("never_fits", 0, 1)]


def test_a_task_alone_may_use_the_reserve_where_no_rank_is_larger() -> None:
    bench = alone_on_the_small_rank(10, 10, kv_reserve=0.1)
    bench.turn(0, 95)
    assert bench.decide() == []
    bench.queue(1)
    assert bench.decide() == [("start", 1, 1)], "and nothing comes in beside it"


# --- the other scheduler ------------------------------------------------------------------------------------------------


def test_fixed_fills_every_rank_evenly_and_never_pauses() -> None:
    bench = Bench(2, 200, scheduler="fixed", max_tasks_per_rank=4)
    bench.queue(0, 5)
    bench.queue(1, 5)
    bench.queue(2, 1, EVAL)
    assert len(bench.decide()) == 8
    assert len(bench.on(0)) == len(bench.on(1)) == 4
    for task_id in sorted(bench.on(0) | bench.on(1)):
        bench.play(task_id, 50, 100)
    assert bench.decide() == []
    bench.finish(next(iter(bench.on(0))))
    assert [rank for _, _, rank in bench.decide()] == [0]


def test_fixed_takes_the_least_busy_rank_whatever_its_cache() -> None:
    bench = Bench(1000, 10, 500, scheduler="fixed", max_tasks_per_rank=100)
    for number in range(9):
        bench.queue(number)
    bench.decide()
    assert [len(bench.on(rank)) for rank in range(3)] == [3, 3, 3]
