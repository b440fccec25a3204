"""RA2P's choice: which ways are open, the lower prediction with hysteresis, what is said of it.

Passes cost 1 s (reference), 1 s (forward) and 2 s (backward) a token unless a test says otherwise; groups have four trajectories,
micro-batches at most 10 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduling.test_ra2p_estimates import scored, stepped, trained
from tiderl.config.schema import Config, LossConfig, ScheduleConfig, TrainConfig, TrainerConfig
from tiderl.scheduling.ra2p import MIN_GAIN, Choice, Ra2p, StepForecast
from tiderl.types import Pipelining

NONE, COLOCATED, DECOUPLED, ALTERNATING = (
    Pipelining.NONE,
    Pipelining.COLOCATED,
    Pipelining.DECOUPLED,
    Pipelining.ALTERNATING,
)

#: One group of four full micro-batches, everything there; one actor, and a Ref rank if there is one.
READY = StepForecast(ready_tokens=(40,), coming_tokens=(), gap_s=0.0, num_actors=1, num_ref=1)
NO_REF = replace(READY, num_ref=0)


def config(*, kl_weight: float = 0.1, window_tokens: int = 0, **schedule: Any) -> Config:
    return Config(
        train=TrainConfig(group_size=4),
        trainer=TrainerConfig(max_micro_batch_tokens=10, window_tokens=window_tokens),
        loss=LossConfig(kl_weight=kl_weight),
        schedule=ScheduleConfig(**schedule),
    )


def measured(config: Config, *, reference_s: float = 1.0, swap_s: float = 0.0) -> Ra2p:
    """`reference_s` a token on Ref ranks."""
    ra2p = Ra2p(config)
    ra2p.trained(trained(num_tokens=10, reference_s=10.0, forward_s=10.0, backward_s=20.0))
    ra2p.scored(scored(10, 10 * reference_s))
    ra2p.stepped(stepped(reference_s=10.0, swap_s=swap_s, num_swaps=1))
    return ra2p


# --- invariant 1: which ways are open ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "forecast", "expected"),
    [
        ({"kl_weight": 0.0}, NO_REF, NONE),
        ({"kl_weight": 0.0, "mode": "stream"}, NO_REF, NONE),
        ({"kl_weight": 0.0, "mode": "async"}, NO_REF, NONE),
        ({"mode": "stream"}, NO_REF, ALTERNATING),
        ({"mode": "async"}, NO_REF, COLOCATED),
        ({"pipelining": "colocated"}, NO_REF, COLOCATED),
        ({"pipelining": "decoupled"}, READY, DECOUPLED),
        ({"pipelining": "decoupled"}, NO_REF, COLOCATED),  # the Ref ranks were lost
        ({"pipelining": "auto"}, NO_REF, COLOCATED),
    ],
)
@pytest.mark.parametrize("is_measured", [False, True])
def test_the_only_way_open(
    settings: dict[str, Any], forecast: StepForecast, expected: Pipelining, is_measured: bool
) -> None:
    # Where there is a choice, decoupled would take 120 s (pure compute) against 160 s.
    ra2p = measured(config(**settings)) if is_measured else Ra2p(config(**settings))
    choice = ra2p.choose(forecast)
    assert choice.pipelining is expected
    assert choice.reason.startswith(f"{expected.value}: ")
    assert bool(choice.predicted_s) is is_measured


def test_every_way_that_there_are_ranks_for_is_predicted() -> None:
    # Decoupled: 4 * 30; colocated: a pair of 6 more, and 4 * 10; alternating: four pairs.
    with_ref = measured(config(pipelining="decoupled"), swap_s=6.0).choose(READY)
    assert with_ref.predicted_s == {DECOUPLED: 120.0, COLOCATED: 166.0, ALTERNATING: 184.0}
    without = measured(config(), swap_s=6.0).choose(NO_REF)
    assert without.predicted_s == {COLOCATED: 166.0, ALTERNATING: 184.0}
    without = measured(config(mode="stream"), swap_s=6.0).choose(NO_REF)
    assert without.predicted_s == {COLOCATED: 166.0, ALTERNATING: 184.0}
    no_reference = measured(config(kl_weight=0.0), swap_s=6.0).choose(NO_REF)
    assert no_reference.predicted_s == {NONE: 120.0}


def test_the_papers_model_where_the_settings_say_so() -> None:
    # t_ref = 50 a micro-batch: the timeline has the Ref rank score until 200 and one backward after that; the paper sees 4 * 30.
    timeline = measured(config(pipelining="decoupled"), reference_s=5.0).choose(READY)
    paper = measured(config(pipelining="decoupled", cost_model="paper"), reference_s=5.0).choose(READY)
    assert timeline.predicted_s[DECOUPLED] == 220.0
    assert paper.predicted_s[DECOUPLED] == 120.0
    # So that they choose differently: colocated takes 160.
    assert measured(config(), reference_s=5.0).choose(READY).pipelining is COLOCATED
    assert measured(config(cost_model="paper"), reference_s=5.0).choose(READY).pipelining is DECOUPLED


# --- what the forecast says -------------------------------------------------------------------------------------------


def test_coming_groups_arrive_one_gap_after_the_other() -> None:
    # Three groups of 4 * 10 tokens, which take 160 s each: the last one comes 600 s after the opening, to an idle rank.
    forecast = replace(NO_REF, ready_tokens=(40,), coming_tokens=(40, 40), gap_s=300.0)
    assert measured(config()).choose(forecast).predicted_s[COLOCATED] == 2 * 300.0 + 160.0


def test_an_unknown_gap_is_none() -> None:
    forecast = replace(NO_REF, ready_tokens=(40,), coming_tokens=(40,), gap_s=0.0)
    assert measured(config()).choose(forecast).predicted_s[COLOCATED] == 320.0


def test_a_groups_tokens_are_spread_over_its_trajectories() -> None:
    # 7 are 2 2 2 1, all in one micro-batch.
    ra2p = measured(config(mode="stream"), swap_s=6.0)
    assert ra2p.choose(replace(NO_REF, ready_tokens=(7,))).predicted_s[ALTERNATING] == 6.0 + 4 * 7
    # 22 are 6 6 5 5: in micro-batches of 10, both 6 are alone.
    assert ra2p.choose(replace(NO_REF, ready_tokens=(22,))).predicted_s[ALTERNATING] == 3 * 6.0 + 4 * 22
    # 3 are 1 1 1: nobody trains on nothing.
    assert ra2p.choose(replace(NO_REF, ready_tokens=(3,))).predicted_s[ALTERNATING] == 6.0 + 4 * 3


@pytest.mark.parametrize(("window_tokens", "expected"), [(0, 144.0), (20, 144.0), (19, 154.0), (10, 154.0), (1, 154.0)])
def test_the_window_is_two_micro_batches_if_unset(window_tokens: int, expected: float) -> None:
    # Four micro-batches of 10 tokens and one of 8, scored at 20, 40, 60, 80, 96. The Ref rank is ahead from the third on; the
    # second's forward is made while the first one is scored, or, with room for one, after its backward.
    forecast = replace(READY, ready_tokens=(40, 8))
    choice = measured(config(window_tokens=window_tokens), reference_s=2.0).choose(forecast)
    assert choice.predicted_s[DECOUPLED] == expected


# --- invariants 2 and 3: auto -----------------------------------------------------------------------------------------


def test_invariant_3_decoupled_before_anything_was_measured() -> None:
    choice = Ra2p(config()).choose(READY)
    assert choice == Choice(DECOUPLED, {}, "decoupled: nothing measured yet, and there are Ref ranks")


def auto(last: Pipelining | None, decoupled_s: float, colocated_s: float) -> Choice:
    """What a job chooses that had chosen `last` before, with these predictions."""
    ra2p = Ra2p(config())
    if last is not None:
        predictions = {DECOUPLED: 2.0, COLOCATED: 2.0} | {last: 1.0}
        assert choose(ra2p, predictions).pipelining is last
    return choose(ra2p, {DECOUPLED: decoupled_s, COLOCATED: colocated_s, ALTERNATING: 99.0})


def choose(ra2p: Ra2p, predicted_s: dict[Pipelining, float]) -> Choice:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ra2p, "_predict", lambda forecast: predicted_s)
        return ra2p.choose(READY)


@pytest.mark.parametrize(
    ("last", "decoupled_s", "colocated_s", "expected"),
    [
        # Nothing to stay with: the lower one; decoupled if equal.
        (None, 8.0, 9.0, DECOUPLED),
        (None, 8.9, 8.8, COLOCATED),
        (None, 8.0, 8.0, DECOUPLED),
        # 5 % of 100 are 5.
        (DECOUPLED, 100.0, 95.5, DECOUPLED),
        (DECOUPLED, 100.0, 95.0, COLOCATED),
        (COLOCATED, 95.5, 100.0, COLOCATED),
        (COLOCATED, 95.0, 100.0, DECOUPLED),
        # The lower one, if it was the last one.
        (DECOUPLED, 99.0, 100.0, DECOUPLED),
        (COLOCATED, 100.0, 99.0, COLOCATED),
        (COLOCATED, 100.0, 100.0, COLOCATED),
    ],
)
def test_invariant_2_the_lower_one_with_hysteresis(
    last: Pipelining | None, decoupled_s: float, colocated_s: float, expected: Pipelining
) -> None:
    assert MIN_GAIN == 0.05
    assert auto(last, decoupled_s, colocated_s).pipelining is expected


def test_reasons_have_the_numbers() -> None:
    assert auto(None, 8.1, 9.6).reason == "decoupled: 8.1 s against 9.6 s colocated"
    assert auto(DECOUPLED, 8.1, 7.9).reason == "decoupled: 8.1 s against 7.9 s colocated, which is not 5% less"
    assert auto(None, 0.0321, 12.34).reason == "decoupled: 0.032 s against 12.3 s colocated"
    alone = measured(config(mode="stream"), swap_s=6.0).choose(NO_REF)
    assert alone.reason == "alternating: schedule.mode is stream; 184.0 s against 166.0 s colocated"
    alone = measured(config(kl_weight=0.0)).choose(NO_REF)
    assert alone.reason == "none: no KL penalty (loss.kl_weight is 0); 120.0 s"
    alone = measured(config(pipelining="decoupled"), swap_s=6.0).choose(READY)
    assert (
        alone.reason
        == "decoupled: schedule.pipelining is decoupled; 120.0 s against 166.0 s colocated and 184.0 s alternating"
    )


def test_noise_around_equality_does_not_flap() -> None:
    ra2p = Ra2p(config())
    ways = [
        choose(ra2p, {DECOUPLED: 10.0 + noise, COLOCATED: 10.0 - noise}).pipelining
        for noise in (0.1, -0.2, 0.2, -0.1, 0.24, -0.24)
    ]
    assert ways == [COLOCATED] * 6


def test_a_swap_that_was_never_measured_is_found_out_and_left_again() -> None:
    # t_ref = 45 a micro-batch: decoupled takes 4 * 45 + 20 = 200 s, colocated 160 s and the pair, of which nothing is known.
    ra2p = Ra2p(config())
    ra2p.trained(trained(num_tokens=10, reference_s=10.0, forward_s=10.0, backward_s=20.0))
    ra2p.scored(scored(10, 45.0))
    assert ra2p.choose(READY).pipelining is COLOCATED
    ra2p.stepped(stepped(reference_s=40.0, swap_s=60.0, num_swaps=1))
    choice = ra2p.choose(READY)
    assert choice.pipelining is DECOUPLED
    assert choice.predicted_s[COLOCATED] == 220.0


# --- invariant 4 ------------------------------------------------------------------------------------------------------

EVENTS = st.lists(
    st.tuples(st.sampled_from(["trained", "scored", "stepped", "choose"]), st.integers(1, 30)), max_size=20
)


@given(EVENTS, st.sampled_from(["pipeline", "paper"]))
def test_invariant_4_the_same_events_give_the_same_choices(
    events: Sequence[tuple[str, int]], cost_model: Literal["pipeline", "paper"]
) -> None:
    def play() -> list[Choice]:
        ra2p, choices = Ra2p(config(cost_model=cost_model)), []
        for kind, number in events:
            if kind == "trained":
                ra2p.trained(trained(number, reference_s=number % 3, forward_s=number / 7, backward_s=number / 3))
            elif kind == "scored":
                ra2p.scored(scored(number, number / 5))
            elif kind == "stepped":
                ra2p.stepped(stepped(reference_s=1.0, swap_s=number / 3, num_swaps=number % 4))
            else:
                tokens = (number,) * (number % 3)
                choices.append(
                    ra2p.choose(replace(READY, ready_tokens=(number,), coming_tokens=tokens, gap_s=number / 9))
                )
        return choices

    assert play() == play()
