"""Continuous Task Batching by hand: one scenario a rule, on ranks small enough to count blocks (of ten tokens) on fingers.

`test_ctb_bounds.py` has those for capacity, for what never fits and for the other scheduler; `test_ctb_machine.py` holds the
invariants of `scheduling.ctb` against random worlds.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.scheduling.bench import BLOCK, EVAL, Bench, full_with_one_paused, settled, starts
from tiderl.scheduling.ctb import AFFINITY_SLACK
from tiderl.types import Rank, TaskKind

TRAIN = TaskKind.TRAIN
CTB: list[dict[str, Any]] = [{"footprint": "paper"}, {"footprint": "growth"}]


# --- probing (§4.1) -----------------------------------------------------------------------------------------------------


def test_paper_a_group_is_probed_whatever_is_known_and_the_probes_use_is_the_estimate() -> None:
    bench = Bench(1000, footprint="paper", group_size=3)
    bench.knows("a", first_turn=70)
    bench.queue(0, 3)
    assert bench.decide() == [("start", 0, 0)]
    assert bench.usage(0) == 70, "before the probe has told, the type's"
    bench.turn(0, 20)
    assert bench.decide() == []
    bench.act(0, 35)
    assert starts(bench.decide()) == [1, 2]
    assert bench.usage(0) == 3 * 40


def test_growth_a_group_of_an_unknown_type_is_probed_where_room_is_tight() -> None:
    bench = Bench(29, footprint="growth", group_size=3)  # one block less than three contexts of 100
    bench.queue(0, 3)
    assert bench.decide() == [("start", 0, 0)]
    bench.turn(0, 20)
    assert bench.decide() == []
    bench.act(0, 35)
    assert starts(bench.decide()) == [1, 2]
    assert bench.usage(0) == 20 + 20, (
        "siblings begin with the prompt that they share; the probe has two blocks of its own"
    )


@pytest.mark.parametrize(("blocks", "group_size", "spares"), [(30, 3, 0), (50, 3, 2)])
def test_growth_nothing_is_probed_where_room_is_plentiful(blocks: int, group_size: int, spares: int) -> None:
    bench = Bench(blocks, footprint="growth", group_size=group_size, spare_trajectories=spares)
    bench.queue(0, 3)
    assert starts(bench.decide()) == [0, 1, 2]


def test_growth_nothing_is_probed_of_a_known_type() -> None:
    bench = Bench(20, footprint="growth", group_size=3)
    bench.knows("a", prompt=20, first_turn=30, final=40)
    bench.queue(0, 3)
    bench.queue(1, 3, type_="unknown")
    assert starts(bench.decide()) == [0, 1, 2, 3], "of the other type only a probe"


@pytest.mark.parametrize("rollout", CTB)
@pytest.mark.parametrize(("retry", "next_probe"), [(True, 0), (False, 1)])
def test_a_probe_that_fails_is_replaced(rollout: dict[str, Any], retry: bool, next_probe: int) -> None:
    bench = Bench(20, **rollout)
    bench.queue(0, 3)
    assert starts(bench.decide()) == [0]
    bench.turn(0, 20)
    bench.fail(0, retry=retry)
    assert starts(bench.decide()) == [next_probe], "another probe, and no sibling before it has told"
    bench.play(next_probe, 20)
    assert len(bench.decide()) == (2 if retry else 1)


def test_a_probe_that_is_paused_still_keeps_its_siblings_waiting() -> None:
    """Its first turn is over when it has been resumed."""
    bench = settled(10)
    bench.queue(1, 2)
    assert starts(bench.decide()) == [1]
    bench.turn(1, 10)
    bench.turn(0, 100)
    assert bench.decide() == [("pause", 1, 0)]
    bench.hand_over(1)
    bench.finish(0)
    assert bench.decide() == [("resume", 1, 0)]
    bench.play(1, 20)
    assert starts(bench.decide()) == [2]


@pytest.mark.parametrize("rollout", CTB)
def test_a_first_task_that_needs_less_than_was_feared_makes_room_for_others(rollout: dict[str, Any]) -> None:
    """Nothing is known of the type, so a whole context is kept free for it; once it has told, nobody waits for its end."""
    bench = Bench(20, max_context=200, growth_safety=0.0, **rollout)
    for number in range(2):
        bench.queue(number, 1, EVAL)
    assert starts(bench.decide()) == [0]
    bench.play(0, 20)
    assert starts(bench.decide()) == [1]


# --- where to (affinity, room, diversity) -------------------------------------------------------------------------------


def test_siblings_go_where_their_prefix_is_while_there_is_room() -> None:
    bench = Bench(10, 10, footprint="paper")
    bench.queue(0, 3)
    assert bench.decide() == [("start", 0, 0)]
    bench.play(0, 35)
    assert bench.decide() == [("start", 1, 0), ("start", 2, 1)], "40 + 40 fit on rank 0; another 40 do not"


@pytest.mark.parametrize(("num_more", "rank"), [(AFFINITY_SLACK, 0), (AFFINITY_SLACK + 1, 1)])
def test_a_prefix_is_not_followed_to_a_rank_that_is_much_busier(num_more: int, rank: int) -> None:
    bench = settled(*[10] * num_more, blocks=(100,))
    bench.batching.add_rank(Rank(1), 100, BLOCK)
    bench.queue(50).home = Rank(0)
    assert bench.decide() == [("start", num_more, rank)]


def test_new_groups_go_to_the_roomiest_rank_ties_by_rank() -> None:
    bench = Bench(3, 5, 5, footprint="paper")
    bench.knows("a", first_turn=10)
    for number in range(13):
        bench.queue(number)
    assert [rank for _, _, rank in bench.decide()] == [1, 2, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(("room_at_home", "rank"), [(True, 0), (False, 1)])
def test_a_paused_task_goes_back_to_its_rank_if_there_is_room_else_to_the_roomiest(
    room_at_home: bool, rank: int
) -> None:
    bench = settled(50, 10, 30, 10, 20, blocks=(10, 10))
    assert [bench.on(0), bench.on(1)] == [{0, 2, 4}, {1, 3}]
    bench.turn(0, 60)
    assert bench.decide() == [("pause", 4, 0)]
    if room_at_home:
        bench.finish(2)
    bench.hand_over(4)
    assert bench.usage(0) > bench.usage(1), "the other rank is the roomier one in any case"
    assert bench.decide() == [("resume", 4, rank)]


@pytest.mark.parametrize(("penalty", "expected"), [(0.0, [(7, 0), (6, 1)]), (2.0, [(6, 0), (7, 1)])])
def test_slow_types_spread_over_the_ranks(penalty: float, expected: list[tuple[int, int]]) -> None:
    """Rank 0 plays three slow tasks, rank 1 three fast ones; a slow group is next, a fast one after it."""
    bench = Bench(10, 10, footprint="paper", diversity_penalty=penalty)
    for type_ in ("slow", "fast"):
        bench.knows(type_)
    for number in range(6):
        bench.queue(number, type_="fast" if number % 2 else "slow")
        bench.decide()
    assert [bench.batching.pools[Rank(0)].num_of_type[t] for t in ("slow", "fast")] == [3, 0]
    bench.queue(11, type_="fast")  # task 6
    bench.queue(10, type_="slow")  # task 7: the older group
    assert [(task_id, rank) for _, task_id, rank in bench.decide()] == expected


@pytest.mark.parametrize("penalty", [0.5, 1.0, 3.0])
def test_no_type_starves(penalty: float) -> None:
    """One slow group, and a stream of younger fast ones; the rank is full of slow tasks and gets a place again and again."""
    bench = Bench(8, footprint="paper", diversity_penalty=penalty)
    for type_ in ("slow", "fast"):
        bench.knows(type_)
    for number in range(8):
        bench.queue(number, type_="slow")
    assert len(bench.decide()) == 8
    bench.queue(8, type_="slow")
    for number in range(9, 60):
        bench.queue(number, type_="fast")
    overtaken = 0
    playing_fast: list[int] = []
    while True:
        bench.finish(playing_fast.pop() if playing_fast else 0)
        ((_, task_id, _),) = bench.decide()
        if task_id == 8:
            break
        playing_fast.append(task_id)
        overtaken += 1
    assert overtaken <= penalty * 8


# --- who first (Table 1, Algorithm 1) -----------------------------------------------------------------------------------


def test_evaluation_comes_before_paused_training_tasks() -> None:
    bench = full_with_one_paused()
    bench.queue(7, 1, EVAL)
    bench.queue(1_000, 1)
    bench.finish(0)
    assert bench.decide() == [("start", 2, 0), ("resume", 1, 0), ("start", 3, 0)]


def test_a_rank_runs_empty_for_evaluation() -> None:
    bench = settled(60, 20)
    bench.knows("eval", first_turn=40)
    bench.queue(6, 1, EVAL, type_="eval")  # task 2
    bench.queue(5)  # task 3: would fit
    assert bench.decide() == []
    bench.finish(1)
    assert bench.decide() == [("start", 2, 0)]


def test_paused_evaluation_comes_before_everything_else() -> None:
    bench = Bench(10)
    bench.knows("a")
    for number, kind in enumerate((EVAL, EVAL, TRAIN)):
        bench.queue(number, 1, kind)
    assert len(bench.decide()) == 3
    for task_id, context in enumerate((20, 40, 30)):
        bench.play(task_id, context)
    bench.turn(1, 70)
    assert bench.decide() == [("pause", 2, 0)], "training gives way, though its context is longer"
    bench.turn(1, 90)
    assert bench.decide() == [("pause", 0, 0)]
    for task_id in (2, 0):
        bench.hand_over(task_id)
    bench.queue(9, 1, EVAL)
    assert bench.decide() == [], "the new one would fit; the paused one is next"
    bench.finish(1)
    assert bench.decide() == [("resume", 0, 0), ("start", 3, 0), ("resume", 2, 0)]


def test_begun_groups_come_before_fresh_ones_the_most_complete_first() -> None:
    bench = Bench(100)
    groups = [bench.queue(number, 3) for number in range(4)]
    for group, num_finished in zip(groups, (0, 1, 2, 0), strict=True):
        group.first_turn_tokens = group.prompt_tokens = 10
        group.num_finished = num_finished
        bench.batching.completion_changed(group)
    assert starts(bench.decide()) == [6, 7, 8, 3, 4, 5, 0, 1, 2, 9, 10, 11]


def test_resume_comes_before_admission() -> None:
    bench = full_with_one_paused()
    bench.queue(0)
    bench.finish(0)
    assert bench.decide() == [("resume", 1, 0), ("start", 2, 0)]


def test_the_paused_task_that_fits_is_resumed_where_a_better_one_does_not() -> None:
    bench = settled(40, 20, 30, 10)
    bench.turn(0, 80)
    assert bench.decide() == [("pause", 3, 0), ("pause", 1, 0), ("pause", 2, 0)]
    for task_id in (1, 2, 3):
        bench.hand_over(task_id)
    assert bench.decide() == [("resume", 1, 0)], "20 are free: not for 30, and 10 are the shorter ones"


@pytest.mark.parametrize("kind", [TRAIN, EVAL])
def test_who_held_up_the_line_holds_it_up_no_longer_when_it_is_placed(kind: TaskKind) -> None:
    """Rank 0 was too small for the first in line, and rank 1 is full with it then."""
    bench = Bench(10, 20, max_context=200)
    for type_, tokens in (("mid", 100), ("big", 200), ("small", 10)):
        bench.knows(type_, first_turn=tokens)
    bench.queue(0, type_="mid")
    assert bench.decide() == [("start", 0, 1)]
    bench.play(0, 100)
    bench.queue(1, 1, kind, type_="big")
    bench.queue(2, type_="small")
    bench.decide()
    bench.finish(0)
    bench.decide()
    assert (bench.on(1), bench.on(0)) == ({1}, {2})


# --- over budget --------------------------------------------------------------------------------------------------------


def test_the_lowest_priority_is_paused_as_many_as_needed_and_no_more() -> None:
    bench = settled(30, 30, 30)
    for task_id in (1, 2):
        bench.turn(task_id, 30)
    bench.turn(0, 41)
    assert bench.decide() == [("pause", 2, 0)], "110 > 100: one of two equals goes, the younger"
    assert bench.usage(0) == 80
    bench = settled(30, 30, 30)
    bench.turn(0, 80)
    assert bench.decide() == [("pause", 2, 0), ("pause", 1, 0)], "140, 110, 80"


def test_a_task_that_generates_stays_before_a_longer_one_that_waits_for_its_environment() -> None:
    bench = settled(30, 10, 60)
    bench.turn(1, 20)
    assert bench.decide() == [("pause", 0, 0)]


def test_exactly_the_budget_is_not_over() -> None:
    bench = settled(30, 30, 30)
    bench.turn(0, 40)
    assert bench.decide() == []


def test_two_watermarks() -> None:
    """Budget 100, resume margin 0.2: after a pause nothing comes in above 80."""
    bench = settled(50, 30, 10, 10, resume_margin=0.2)
    bench.turn(0, 60)
    assert bench.decide() == [("pause", 3, 0)]
    bench.hand_over(3)
    bench.queue(0)
    bench.queue(1, 1, EVAL)
    bench.finish(2)
    assert (bench.usage(0), bench.decide()) == (90, [])
    bench.finish(1)
    assert (bench.usage(0), bench.decide()) == (60, [("start", 5, 0), ("resume", 3, 0), ("start", 4, 0)])


def test_a_pause_is_answered_before_the_task_is_resumed() -> None:
    bench = settled(80, 20)
    bench.turn(0, 90)
    assert bench.decide() == [("pause", 1, 0)]
    bench.finish(0)
    assert bench.decide() == []
    bench.play(1, 25)  # what it was doing meanwhile
    assert (bench.usage(0), bench.decide()) == (0, [])
    bench.hand_over(1)
    assert bench.decide() == [("resume", 1, 0)]
    assert bench.usage(0) == 30


def test_a_task_that_ends_before_the_order_reaches_it_is_gone() -> None:
    bench = settled(80, 20)
    bench.turn(0, 90)
    assert bench.decide() == [("pause", 1, 0)]
    bench.finish(1)
    assert (bench.decide(), bench.usage(0), len(bench.batching.paused)) == ([], 90, 0)


def test_a_pause_that_nobody_waits_for_ends_the_task() -> None:
    bench = settled(80, 20, capacity=2)
    bench.turn(0, 90)
    bench.decide()
    bench.hand_over(1, is_wanted=False)
    bench.finish(0)
    bench.queue(8)
    bench.queue(9)
    assert starts(bench.decide()) == [2, 3], "its session is free"


# --- foresight (paper.md §8, 5) -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("footprint", "num_admitted"), [("paper", 10), ("growth", 1)])
def test_foresight_refuses_what_present_lengths_admit(footprint: str, num_admitted: int) -> None:
    """All tasks of the type begin with 20 tokens and end with 190: of 200, one can become what it will, not two."""
    bench = Bench(20, max_context=200, footprint=footprint, growth_safety=0.0)
    bench.knows("a", prompt=20, first_turn=20, final=190)
    for number in range(12):
        bench.queue(number)
    assert len(bench.decide()) == num_admitted


def test_what_a_finished_task_held_is_given_out_in_the_same_decide() -> None:
    bench = settled(50, 50)
    bench.queue(8)
    assert bench.decide() == []
    bench.finish(0)
    assert bench.decide() == [("start", 2, 0)]


@pytest.mark.parametrize(("retry", "next_task"), [(False, 2), (True, 0)])
def test_what_a_failed_task_held_is_given_out_too(retry: bool, next_task: int) -> None:
    bench = settled(50, 50)
    bench.queue(8)
    bench.fail(0, retry=retry)
    assert bench.decide() == [("start", next_task, 0)], (
        "another attempt of an old group needs what it needed, and comes first"
    )
