"""Cost functions of RA2P: cases by hand, the timeline against a naive one, bounds, and where the paper's formulas are wrong.

Unless a case says otherwise there are one actor and one Ref rank, micro-batches of 10 tokens, each with t_ref = 10, t_f = 10 and
t_b = 20, a swap pair takes 6, and two micro-batches may be in flight.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduling.naive_timeline import naive_pipeline_s
from tiderl.scheduling.ra2p_costs import (
    Arrival,
    PassCosts,
    Ranks,
    paper_colocated_s,
    paper_decoupled_s,
    paper_s,
    pipeline_s,
)
from tiderl.types import Pipelining

NONE, COLOCATED, DECOUPLED, ALTERNATING = (
    Pipelining.NONE,
    Pipelining.COLOCATED,
    Pipelining.DECOUPLED,
    Pipelining.ALTERNATING,
)

COSTS = PassCosts(1, 1, 1, 2, 6)
RANKS = Ranks(num_actors=1, num_ref=1, max_micro_batch_tokens=10, window_tokens=20, max_wake_tokens=1000)
READY_3 = [Arrival(0, (10, 10, 10))]


# --- Appendix A -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ready_s", "num_actors_per_ref", "expected"),
    [
        # t_ref = 10, t_f + t_b = 30. One actor: nothing to fill, 3 * 30.
        ([0, 0, 0], 1, 90),
        # Four actors: the last one waits for 0 + 1 + 2 + 3 scores before it starts; then one micro-batch.
        ([0], 4, 60 + 30),
        # The same without any micro-batch.
        ([], 4, 60),
        # Ready before the step counts as ready: d_i = 0.
        ([-5, 0], 1, 60),
        # d_(N0+1) counts from the opening: max(0, 30) + max(50, 30).
        ([0, 50], 1, 30 + 50),
        # d_i is the gap after that: 30 + max(50, 30) + max(60 - 50, 30) + max(100 - 60, 30).
        ([0, 50, 60, 100], 1, 30 + 50 + 30 + 40),
        # N0 = 0: the first gap counts from the opening too.
        ([40, 45], 2, 10 + 40 + 30),
    ],
)
def test_paper_decoupled_by_hand(ready_s: list[float], num_actors_per_ref: int, expected: float) -> None:
    predicted_s = paper_decoupled_s(
        ready_s, num_actors_per_ref=num_actors_per_ref, reference_s=10, forward_s=10, backward_s=20
    )
    assert predicted_s == expected


@pytest.mark.parametrize(
    ("ready_s", "max_micro_batches", "expected"),
    [
        ([], 8, 0),
        # t_swap = 3. One wake-up: 3 + 3 * 10, 3 + 3 * 30.
        ([0, 0, 0], 8, 33 + 93),
        # Memory for two: (3 + 20 + 3 + 60) + (3 + 10 + 3 + 30).
        ([0, 0, 0], 2, 86 + 46),
        # One after the other: 46, at which the second is there already; then the third at 100.
        ([0, 25, 100], 8, 100 + 46),
        # Two come while the first is worked on: 46 + (3 + 20 + 3 + 60).
        ([0, 25, 46], 8, 46 + 86),
        # 46.5 is after 46: alone.
        ([0, 25, 46.5], 8, 46 + 46 + 46),
        # Nothing ready: from the first arrival on.
        ([7], 8, 7 + 46),
    ],
)
def test_paper_colocated_by_hand(ready_s: list[float], max_micro_batches: int, expected: float) -> None:
    predicted_s = paper_colocated_s(
        ready_s, max_micro_batches=max_micro_batches, reference_s=10, forward_s=10, backward_s=20, swap_s=3
    )
    assert predicted_s == expected


@given(
    st.lists(st.integers(-20, 200), max_size=12).map(sorted), st.integers(1, 5), st.integers(0, 9), st.integers(1, 9)
)
def test_paper_decoupled_is_the_formula_with_its_indices(
    ready_s: list[int], num_actors_per_ref: int, reference_s: int, pass_s: int
) -> None:
    # Appendix A, read from its symbols: indices from 1, N0 = |{i : a_i <= 0}|.
    a = dict(enumerate(ready_s, start=1))
    n0 = len([i for i in a if a[i] <= 0])
    d = {i: 0 if i <= n0 else max(a[i], 0) if i == n0 + 1 else a[i] - a[i - 1] for i in a}
    expected = sum(i * reference_s for i in range(num_actors_per_ref)) + sum(max(d[i], 2 * pass_s) for i in a)
    predicted_s = paper_decoupled_s(
        ready_s,
        num_actors_per_ref=num_actors_per_ref,
        reference_s=reference_s,
        forward_s=pass_s,
        backward_s=pass_s,
    )
    assert predicted_s == expected


def test_the_papers_micro_batches_are_rounds_of_the_actors() -> None:
    # 50 tokens in rounds of at most 2 * 10: three of 16 2/3, 8 1/3 an actor. The first 20 tokens complete one, the next 20 the
    # second (40 >= 33 1/3), the last 10 the third.
    arrivals = [Arrival(0, (10, 10)), Arrival(40, (10, 10)), Arrival(90, (10,))]
    ranks = replace(RANKS, num_actors=2)
    tokens = 50 / 3 / 2
    # M = 2: one score to fill; then t_f + t_b = 25, and the gaps 0, 40, 50.
    assert paper_s(DECOUPLED, arrivals, COSTS, ranks) == pytest.approx(tokens + 25 + 40 + 50)
    # Each alone: the pair, a score, a training; the last begins at 90.
    assert paper_s(COLOCATED, arrivals, COSTS, ranks) == pytest.approx(90 + 6 + tokens + 25)
    assert paper_s(NONE, arrivals, COSTS, ranks) == pytest.approx(90 + 25)
    assert paper_s(DECOUPLED, [], COSTS, ranks) == 0.0


def test_the_papers_alternation_has_a_pair_for_every_round() -> None:
    assert paper_s(COLOCATED, READY_3, COSTS, RANKS) == 6 + 30 + 90
    assert paper_s(ALTERNATING, READY_3, COSTS, RANKS) == 3 * (6 + 10 + 30)


# --- the timeline by hand ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        # F0 0-10, B0 10-30 (scored at 10), F1 30-40, B1 40-60, F2 60-70, B2 70-90: the scores cost nothing.
        (DECOUPLED, 90),
        (COLOCATED, 6 + 30 + 90),
        (ALTERNATING, 3 * (6 + 10 + 30)),
        (NONE, 90),
    ],
)
def test_three_ready(way: Pipelining, expected: float) -> None:
    assert pipeline_s(way, READY_3, COSTS, RANKS) == expected


@pytest.mark.parametrize("way", list(Pipelining))
def test_nothing_takes_no_time(way: Pipelining) -> None:
    assert pipeline_s(way, [], COSTS, RANKS) == 0.0


def test_a_resident_reference_costs_no_swap() -> None:
    resident = replace(COSTS, swap_s=0)
    assert pipeline_s(COLOCATED, READY_3, resident, RANKS) == 30 + 90
    assert pipeline_s(ALTERNATING, READY_3, resident, RANKS) == 30 + 90


@pytest.mark.parametrize(
    ("max_wake_tokens", "expected"),
    [
        # One a wake-up (6 + 10 + 30); two (6 + 20 + 60), then one; all.
        (1, 3 * 46),
        (19, 3 * 46),
        (20, 86 + 46),
        (29, 86 + 46),
        (30, 6 + 30 + 90),
    ],
)
def test_aggregation_within_memory(max_wake_tokens: int, expected: float) -> None:
    assert pipeline_s(COLOCATED, READY_3, COSTS, replace(RANKS, max_wake_tokens=max_wake_tokens)) == expected
    assert paper_s(COLOCATED, READY_3, COSTS, replace(RANKS, max_wake_tokens=max_wake_tokens)) == expected


def test_one_ref_rank_scores_for_two_actors() -> None:
    # Scores end at 10 and 20. Actor 0: F 0-10, B 10-30. Actor 1: F 0-10, B 20-40.
    two = [Arrival(0, (10, 10))]
    assert pipeline_s(DECOUPLED, two, COSTS, replace(RANKS, num_actors=2)) == 40
    # With one Ref rank each, both are scored at 10.
    assert pipeline_s(DECOUPLED, two, COSTS, replace(RANKS, num_actors=2, num_ref=2)) == 30


def test_the_window_limits_the_forwards() -> None:
    # Lengths 12, 2, 2 make micro-batches of 12 and 4, scored at 36 and 48 (t_ref = 3 a token); t_f = t_b = 1 a token.
    arrivals, costs = [Arrival(0, (12, 2, 2))], PassCosts(3, 3, 1, 1, 0)
    ranks = replace(RANKS, max_micro_batch_tokens=12)
    # Room for both: F0 0-12, F1 12-16, B0 36-48, B1 48-52.
    assert pipeline_s(DECOUPLED, arrivals, costs, replace(ranks, window_tokens=16)) == 52
    # Room for one: F0 0-12, B0 36-48, F1 48-52, B1 52-56.
    assert pipeline_s(DECOUPLED, arrivals, costs, replace(ranks, window_tokens=15)) == 56
    # A single one may always be in flight.
    assert pipeline_s(DECOUPLED, arrivals, costs, replace(ranks, window_tokens=1)) == 56


def test_arrivals() -> None:
    arrivals = [Arrival(0, (10,)), Arrival(25, (10,))]
    # F0 0-10, B0 10-30, F1 30-40 (scored 25-35), B1 40-60.
    assert pipeline_s(DECOUPLED, arrivals, COSTS, RANKS) == 60
    # 6 + 10 + 30, twice.
    assert pipeline_s(COLOCATED, arrivals, COSTS, RANKS) == 92
    # The second comes at 50, to an idle rank.
    arrivals = [Arrival(0, (10,)), Arrival(50, (10,))]
    assert pipeline_s(DECOUPLED, arrivals, COSTS, RANKS) == 50 + 30
    assert pipeline_s(COLOCATED, arrivals, COSTS, RANKS) == 50 + 46


def test_trajectories_wait_for_a_full_micro_batch_while_all_are_busy() -> None:
    # 10 tokens take until 46 (6 + 10 + 30). 4 come at 1 and 5 at 2: not 10 together, so they wait for 46 and make one micro-batch
    # (6 + 9 * 4 = 42); dealt out as they came, they would have made two, with a pair each. The last 3, at 50, take 6 + 12.
    arrivals = [Arrival(0, (10,)), Arrival(1, (4,)), Arrival(2, (5,)), Arrival(50, (3,))]
    assert pipeline_s(ALTERNATING, arrivals, COSTS, RANKS) == 46 + 42 + 18
    # With 6 at 2 there are 10: dealt at once, as one micro-batch too.
    arrivals[2] = Arrival(2, (6,))
    assert pipeline_s(ALTERNATING, arrivals, COSTS, RANKS) == 46 + 46 + 18
    # With 7 at 2 there are 11: two micro-batches (7, and 4 of its own), a pair each: (6 + 28) + (6 + 16).
    arrivals[2] = Arrival(2, (7,))
    assert pipeline_s(ALTERNATING, arrivals, COSTS, RANKS) == 46 + 34 + 22 + 18


# --- the paper and the timeline ---------------------------------------------------------------------------------------


def test_they_agree_where_the_ref_rank_keeps_up() -> None:
    for arrivals in (READY_3, [Arrival(0, (10,)), Arrival(25, (10,))], [Arrival(0, (10,)), Arrival(50, (10,))]):
        for way in (DECOUPLED, COLOCATED):
            assert pipeline_s(way, arrivals, COSTS, RANKS) == paper_s(way, arrivals, COSTS, RANKS)


def test_the_paper_knows_no_bottleneck_at_the_ref_rank() -> None:
    # t_ref = 50 > t_f + t_b = 30. F0 0-10, F1 10-20, B0 50-70 (scored at 50), F2 70-80, B1 100-120, B2 150-170.
    slow = replace(COSTS, decoupled_reference_s=5)
    assert pipeline_s(DECOUPLED, READY_3, slow, RANKS) == 170
    assert paper_s(DECOUPLED, READY_3, slow, RANKS) == 3 * 30
    # So it would prefer decoupled to colocated (126), which is faster.
    assert pipeline_s(COLOCATED, READY_3, slow, RANKS) == paper_s(COLOCATED, READY_3, slow, RANKS) == 126
    # Six actors, t_ref = 10, two rounds: the Ref rank needs 120 for 12 scores, and the last backward 20 more.
    six = replace(RANKS, num_actors=6)
    assert pipeline_s(DECOUPLED, [Arrival(0, (10,) * 12)], COSTS, six) == 140
    # Its fill term, 0 + 1 + … + 5 scores, makes up for it in one round, and not in a growing number of them: 150 + 30 a round.
    assert paper_s(DECOUPLED, [Arrival(0, (10,) * 12)], COSTS, six) == 150 + 60
    assert pipeline_s(DECOUPLED, [Arrival(0, (10,) * 60)], COSTS, six) == 620
    assert paper_s(DECOUPLED, [Arrival(0, (10,) * 60)], COSTS, six) == 150 + 300


def test_the_paper_adds_waits_that_work_hides() -> None:
    # The actor has work until 90, when the one that came at 50 is there.
    arrivals = [*READY_3, Arrival(50, (10,))]
    assert pipeline_s(DECOUPLED, arrivals, COSTS, RANKS) == 120
    assert paper_s(DECOUPLED, arrivals, COSTS, RANKS) == 90 + 50


def test_the_paper_charges_for_no_micro_batch() -> None:
    assert paper_decoupled_s([], num_actors_per_ref=4, reference_s=10, forward_s=10, backward_s=20) == 60
    assert pipeline_s(DECOUPLED, [], COSTS, replace(RANKS, num_actors=4)) == 0


# --- the timeline against a naive one ---------------------------------------------------------------------------------

ARRIVALS = st.lists(
    st.builds(Arrival, st.integers(0, 60), st.lists(st.integers(1, 6), max_size=6).map(tuple)), max_size=6
)
# Passes may take no time, but for the backward: else everything happens at once.
PASS_COSTS = st.builds(
    PassCosts, st.integers(0, 4), st.integers(0, 9), st.integers(0, 3), st.integers(1, 4), st.integers(0, 20)
)
SOME_RANKS = st.builds(
    Ranks, st.integers(1, 4), st.integers(1, 3), st.integers(6, 12), st.integers(1, 40), st.integers(1, 40)
)


@settings(max_examples=300)
@given(st.sampled_from(Pipelining), ARRIVALS, PASS_COSTS, SOME_RANKS)
def test_invariant_2_a_naive_replay_takes_as_long(
    way: Pipelining, arrivals: list[Arrival], costs: PassCosts, ranks: Ranks
) -> None:
    assert pipeline_s(way, arrivals, costs, ranks) == naive_pipeline_s(way, arrivals, costs, ranks)


@given(st.sampled_from(Pipelining), ARRIVALS, PASS_COSTS, SOME_RANKS)
def test_invariant_3_no_way_is_faster_than_the_work(
    way: Pipelining, arrivals: list[Arrival], costs: PassCosts, ranks: Ranks
) -> None:
    predicted_s = pipeline_s(way, arrivals, costs, ranks)
    num_tokens = sum(sum(arrival.lengths) for arrival in arrivals)
    token_s = costs.forward_s + costs.backward_s
    if way in (COLOCATED, ALTERNATING):
        token_s += costs.colocated_reference_s
    assert ranks.num_actors * predicted_s >= num_tokens * token_s
    if way is DECOUPLED:
        assert ranks.num_ref * predicted_s >= num_tokens * costs.decoupled_reference_s
    for arrival in arrivals:
        if arrival.lengths:
            assert predicted_s >= arrival.ready_s + min(arrival.lengths) * token_s


@given(ARRIVALS, PASS_COSTS, SOME_RANKS)
def test_aggregation_is_never_slower_than_alternating_where_all_is_ready(
    arrivals: list[Arrival], costs: PassCosts, ranks: Ranks
) -> None:
    ready = [replace(arrival, ready_s=0) for arrival in arrivals]
    assert pipeline_s(COLOCATED, ready, costs, ranks) <= pipeline_s(ALTERNATING, ready, costs, ranks)
