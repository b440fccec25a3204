"""tools/bench_ra2p_steps.py: arrival patterns, a step's figures and the summary, each by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tiderl.config.schema import Config, LossConfig, RolesConfig, TrainConfig, TrainerConfig
from tiderl.scheduling import actions as ac
from tiderl.scheduling.events import MicroBatchTrained, ReferenceScored, StepTrained
from tiderl.scheduling.ra2p import Choice
from tiderl.scheduling.readiness import Signals
from tiderl.scheduling.step import OpenedStep
from tiderl.types import MicroBatchId, Pipelining, Rank, WeightVersion
from tools.bench_ra2p_steps import (
    PATTERNS,
    SPREAD,
    Pattern,
    Predictor,
    StepRun,
    comparison,
    figures,
    micro_batch_s,
    ready_group,
    summary,
    trajectories_of,
)

DECOUPLED, COLOCATED = Pipelining.DECOUPLED, Pipelining.COLOCATED


def trained(rank: int, reference_s: float, forward_s: float, backward_s: float, num_tokens: int = 10) -> Any:
    number = MicroBatchId(0)
    return MicroBatchTrained(Rank(rank), 0, number, num_tokens, reference_s, 0.0, forward_s, backward_s, 0.0)


def scored(rank: int, reference_s: float, num_tokens: int = 10) -> ReferenceScored:
    return ReferenceScored(Rank(rank), 0, MicroBatchId(0), num_tokens, reference_s)


def left(rank: int, *, swap_s: float = 0.0, num_swaps: int = 0, reference_s: float = 0.0) -> StepTrained:
    """`reference_s` is the sum of what the micro-batches said already."""
    return StepTrained(
        step=0,
        rank=Rank(rank),
        updated=True,
        abandoned=False,
        version=WeightVersion(1),
        grad_norm=1.0,
        lr=1e-6,
        num_trained_tokens=1,
        num_padding_tokens=0,
        reference_s=reference_s,
        swap_s=swap_s,
        forward_s=9.0,
        backward_s=9.0,
        waited_s=9.0,
        optimizer_s=9.0,
        num_swaps=num_swaps,
        sums={},
        max_same_version_gap=0.0,
    )


class TestPatterns:
    def test_groups_that_are_ready_and_groups_that_come(self) -> None:
        # A micro-batch takes 4 s, so that a group comes every 2 s; the first of them so long after the opening.
        assert Pattern(0.5, 2).arrivals_s(5, 4.0) == [0.0, 0.0, 2.0, 4.0, 6.0]
        assert Pattern(0.5, 0).arrivals_s(2, 4.0) == [2.0, 4.0]
        assert Pattern(3.0, 8).arrivals_s(2, 4.0) == [0.0, 0.0]

    @pytest.mark.parametrize("pattern", PATTERNS, ids=str)
    def test_the_forecast_is_what_comes(self, pattern: Pattern) -> None:
        tokens = [11, 12, 13, 14, 15, 16, 17, 18]
        forecast = pattern.forecast(tokens, 4.0, num_actors=3, num_ref=1)
        assert [*forecast.ready_tokens, *forecast.coming_tokens] == tokens
        times = [0.0] * len(forecast.ready_tokens)
        times += [(i + 1) * forecast.gap_s for i in range(len(forecast.coming_tokens))]
        assert times == pytest.approx(pattern.arrivals_s(8, 4.0))
        assert (forecast.num_actors, forecast.num_ref) == (3, 1)

    def test_they_cover_what_the_bench_promises(self) -> None:
        assert {quarter / 4 for quarter in range(13)} <= {pattern.tprm_ratio for pattern in PATTERNS}
        assert {pattern.num_ready for pattern in PATTERNS} == set(range(9))
        assert len(set(PATTERNS)) == len(PATTERNS)


class TestTrajectories:
    def test_every_seed_has_its_own_and_always_the_same(self) -> None:
        first, again, other = (trajectories_of(3, 4, 100, 50, seed) for seed in (0, 0, 1))
        assert all(
            (a.token_ids == b.token_ids).all()
            for g, h in zip(first, again, strict=True)
            for a, b in zip(g, h, strict=True)
        )
        assert [t.num_tokens for g in first for t in g] != [t.num_tokens for g in other for t in g]

    def test_groups_fill_a_micro_batch_and_never_two(self) -> None:
        groups = trajectories_of(50, 4, 100, 50, 0)
        assert [t.task_id for group in groups for t in group] == list(range(200))
        assert all(1 - SPREAD <= t.num_tokens / 100 <= 1 + SPREAD for group in groups for t in group)

    def test_only_what_was_generated_carries_loss(self) -> None:
        trajectory = trajectories_of(1, 1, 400, 50, 0)[0][0]
        assert trajectory.num_generated == pytest.approx(0.75 * trajectory.num_tokens, abs=1)
        assert not trajectory.generated[0] and trajectory.generated[-1]
        assert np.array_equal(trajectory.log_probs != 0.0, trajectory.generated)
        assert np.array_equal(trajectory.weight_versions == 0, trajectory.generated)
        assert np.array_equal(trajectory.weight_versions == -1, ~trajectory.generated)

    def test_the_scheduler_takes_them_for_ready_groups(self) -> None:
        groups = trajectories_of(2, 4, 100, 50, 0)
        config = Config(
            train=TrainConfig(groups_per_step=2, group_size=4),
            trainer=TrainerConfig(max_micro_batch_tokens=480),
            roles=RolesConfig(num_actors=2),
        )
        step = OpenedStep(config, 0, (Rank(0), Rank(1)), (), Choice(COLOCATED, {}, ""), Signals(2, None, 0.0), 0.0, 0.0)
        actions = step.feed([ready_group(group) for group in groups], 0.0)
        shares = [action for action in actions if isinstance(action, ac.AssignMicroBatch)]
        assert sorted(task_id for share in shares for task_id in share.task_ids) == list(range(8))
        # Rewards 0 and 1 in turn: half of the trajectories were better than their group.
        assert sum(advantage > 0 for share in shares for advantage in share.advantages) == 4
        assert isinstance(actions[-1], ac.CloseStep)


class TestFigures:
    #: 20 s. Actor 0 computes 6 + 3 and swaps for 2; actor 1 computes 12; the Ref rank 4.
    RUN = StepRun(
        20.0,
        (Rank(0), Rank(1), Rank(2)),
        (
            trained(0, 1.0, 2.0, 3.0),
            trained(1, 0.0, 5.0, 7.0),
            scored(2, 4.0),
            trained(0, 1.0, 1.0, 1.0),
            left(0, swap_s=2.0, num_swaps=2, reference_s=2.0),
            left(1),
        ),
    )

    def test_compute_is_of_micro_batches_and_counts_once(self) -> None:
        assert self.RUN.compute_s() == {0: 9.0, 1: 12.0, 2: 4.0}
        assert self.RUN.busiest_s == 12.0

    def test_a_rank_is_idle_when_it_neither_computes_nor_swaps(self) -> None:
        assert self.RUN.idle_s() == {0: 9.0, 1: 8.0, 2: 16.0}
        assert self.RUN.num_swaps == 2

    def test_figures_are_medians(self) -> None:
        late, later = (StepRun(step_s, self.RUN.ranks, self.RUN.events) for step_s in (21.0, 99.0))
        assert figures([later, self.RUN, late]) == {
            "step_s": 21.0,
            "compute_s": 12.0,
            "overhead_s": 9.0,
            "swaps": 2,
            "idle_s": {"0": 10.0, "1": 9.0, "2": 17.0},
        }

    def test_a_micro_batch_is_a_groups_share_of_all_compute(self) -> None:
        double = StepRun(20.0, self.RUN.ranks, self.RUN.events * 2)
        assert micro_batch_s([self.RUN, double, double], num_groups=5) == 10.0


class TestPredictor:
    CONFIG = Config(
        loss=LossConfig(kl_weight=0.1),
        train=TrainConfig(groups_per_step=1, group_size=1),
        trainer=TrainerConfig(max_micro_batch_tokens=100),
    )

    def predictor(self) -> Predictor:
        predictor = Predictor(self.CONFIG)
        # A token takes the reference 0.3 s on an actor's rank, 0.1 s on a Ref rank; an actor 0.2 and 0.4 s; a swap 5 s.
        events = (
            trained(0, 3.0, 2.0, 4.0),
            left(0, swap_s=5.0, num_swaps=1, reference_s=3.0),
            trained(0, 0.0, 2.0, 4.0),
            scored(1, 1.0),
            left(0),
        )
        predictor.learn(StepRun(9.0, (Rank(0), Rank(1)), events))
        return predictor

    def test_it_predicts_from_what_it_was_told(self) -> None:
        forecast = Pattern(0.0, 1).forecast([100], 90.0, num_actors=1, num_ref=1)
        choice = self.predictor().choose(forecast)
        # Decoupled, the reference is ready before the forward is through.
        assert choice.predicted_s[DECOUPLED] == pytest.approx(100 * (0.2 + 0.4))
        assert choice.predicted_s[COLOCATED] == pytest.approx(5 + 100 * (0.3 + 0.2 + 0.4))
        assert choice.pipelining is DECOUPLED

    def test_asking_changes_nothing(self) -> None:
        predictor = self.predictor()
        forecast = Pattern(0.0, 1).forecast([100], 90.0, num_actors=1, num_ref=1)
        alone = Pattern(0.0, 1).forecast([100], 90.0, num_actors=1, num_ref=0)
        first = predictor.choose(forecast)
        assert predictor.choose(alone).pipelining is COLOCATED
        assert predictor.choose(forecast) == first


class TestSummary:
    LINES = (
        # Right: 10 is the shorter one. Predictions 10 % too low and 25 % too high.
        comparison(Pattern(0.0, 8), DECOUPLED, {DECOUPLED: 9.0, COLOCATED: 25.0}, {DECOUPLED: 10.0, COLOCATED: 20.0}),
        # Right within 5 %: exact, and 4 % too low.
        comparison(
            Pattern(1.0, 2), COLOCATED, {DECOUPLED: 100.0, COLOCATED: 99.84}, {DECOUPLED: 100.0, COLOCATED: 104.0}
        ),
        # Wrong by a half: 40 % too high, 20 % too low.
        comparison(Pattern(2.0, 4), COLOCATED, {DECOUPLED: 14.0, COLOCATED: 12.0}, {DECOUPLED: 10.0, COLOCATED: 15.0}),
    )

    def test_a_line_has_the_ways_that_were_measured(self) -> None:
        predicted_s = {DECOUPLED: 1.0, COLOCATED: 2.0, Pipelining.ALTERNATING: 3.0}
        assert comparison(Pattern(0.5, 3), COLOCATED, predicted_s, {DECOUPLED: 4.0, COLOCATED: 5.0}) == {
            "tprm_ratio": 0.5,
            "num_ready": 3,
            "chosen": "colocated",
            "predicted_s": {"decoupled": 1.0, "colocated": 2.0},
            "measured_s": {"decoupled": 4.0, "colocated": 5.0},
        }

    def test_shares_and_medians(self) -> None:
        result = summary(self.LINES)
        assert result["share_right"] == pytest.approx(2 / 3)
        # The ways differ by 100, 4 and 50 %.
        assert (result["num_decisive"], result["num_decisive_right"]) == (2, 1)
        assert result["max_loss"] == pytest.approx(0.5)
        # Absolute: 0, 4, 10, 20, 25, 40 %.
        assert result["median_abs_error"] == pytest.approx(0.15)
        assert result["max_abs_error"] == pytest.approx(0.4)
        # Decoupled: -10, 0, 40. Colocated: 25, -4, -20.
        assert result["median_error"] == pytest.approx({"decoupled": 0.0, "colocated": -0.04})

    @pytest.mark.parametrize(("chosen_s", "share_right"), [(20.8, 1.0), (21.2, 0.0)])
    def test_a_loss_within_five_percent_is_right(self, chosen_s: float, share_right: float) -> None:
        predicted_s = {DECOUPLED: 1.0, COLOCATED: 2.0}
        line = comparison(Pattern(0.0, 8), DECOUPLED, predicted_s, {DECOUPLED: chosen_s, COLOCATED: 20.0})
        assert summary([line])["share_right"] == share_right
