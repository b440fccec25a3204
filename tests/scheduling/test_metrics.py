"""The metrics of one step, all of them by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.scheduling.driver import small_config, spec_of, trained
from tiderl.scheduling import actions as ac
from tiderl.scheduling import events as ev
from tiderl.scheduling.core import Core
from tiderl.types import FailureKind, Rank, Role, TaskId, TaskKind, WeightVersion


class Told:
    """A core with one actor pair (ranks 0, 1) and one rollout rank (2), told by hand what happens when."""

    def __init__(self, **settings: Any) -> None:
        config = small_config(steps=9, groups_per_step=2, group_size=2, max_staleness=1, num_actors=2, **settings)
        self.core = Core(config, 3)
        self.shares: list[ac.AssignMicroBatch] = []
        self.tell(0.0, ev.EnvironmentCapacity(64))
        for rank, role in ((0, Role.ACTOR), (1, Role.ACTOR), (2, Role.ROLLOUT)):
            self.tell(1.0, ev.RankJoined(Rank(rank), role, WeightVersion(0), 0 if role is Role.ACTOR else 800, 1))

    def tell(self, now_s: float, event: ev.Event) -> tuple[ac.Action, ...]:
        actions = self.core.handle(event, now_s)
        self.shares += [a for a in actions if isinstance(a, ac.AssignMicroBatch)]
        return actions

    def work(self, now_s: float) -> None:
        """The actors are through with all that they were given."""
        shares, self.shares = self.shares, []
        for share in shares:
            done = ev.MicroBatchTrained(share.rank, share.step, share.micro_batch_id, 10, 0.0, 0.0, 1.0, 2.0, 0.0)
            self.tell(now_s, done)

    def sync(self, now_s: float, version: int) -> None:
        for rank in range(3):
            self.tell(now_s, ev.SyncReady(Rank(rank), WeightVersion(version)))
        for rank in range(3):
            self.tell(now_s, ev.SyncFinished(Rank(rank), WeightVersion(version), True, "", 0.1, 0.1, 0.0))

    def supply(self, now_s: float, *group_ids: int) -> None:
        self.tell(now_s, ev.GroupsSupplied(TaskKind.TRAIN, tuple(spec_of(i) for i in group_ids)))

    def finish(
        self,
        now_s: float,
        task: int,
        *,
        tokens: int,
        context: int,
        reward: float,
        turns: int = 1,
        version: int = 0,
        prefilled: int = 0,
    ) -> tuple[ac.Action, ...]:
        self.tell(now_s, ev.TurnStarted(TaskId(task), Rank(2), 10))
        self.tell(now_s, ev.TurnEnded(TaskId(task), Rank(2), context, tokens, prefilled))
        made_by = WeightVersion(version)
        return self.tell(
            now_s,
            ev.TaskFinished(TaskId(task), Rank(2), context, tokens, turns, made_by, made_by, reward, reward > 0.5),
        )


def report_of(actions: tuple[ac.Action, ...]) -> ac.ReportStep:
    (report,) = [a for a in actions if isinstance(a, ac.ReportStep)]
    return report


def test_the_first_step_by_hand() -> None:
    told = Told(mode="async")
    told.sync(4.0, 0)  # the trainer is free at 4 s
    told.supply(6.0, 0, 1, 2, 3)  # the rollout rank has waited 5 s, since it joined at 1 s
    told.finish(10.0, 0, tokens=10, context=30, reward=1.0, turns=2, prefilled=20)
    told.finish(
        11.0, 1, tokens=20, context=50, reward=0.0, turns=4, prefilled=30
    )  # group 0 is ready: 7 s after the start
    told.finish(12.0, 2, tokens=30, context=70, reward=0.5, turns=1, prefilled=40)
    opened = told.finish(14.0, 3, tokens=40, context=90, reward=0.5, turns=1)  # group 1: 3 s later, and the step opens
    assert isinstance(opened[0], ac.OpenStep)
    told.work(18.0)
    told.tell(
        19.0,
        trained(
            0, 0, 1, True, num_trained_tokens=70, num_padding_tokens=40, reference_s=1.0, swap_s=0.2,
            waited_s=0.4, num_swaps=1, forward_s=2.0, backward_s=3.0,
            optimizer_s=0.5, sums={"loss": 7.0, "kl": 1.0}, grad_norm=2.5, lr=1e-4, max_same_version_gap=0.01,
        ),
    )  # fmt: skip
    report = report_of(
        told.tell(
            20.0,
            trained(
                0, 1, 1, True, num_trained_tokens=30, num_padding_tokens=20, reference_s=3.0, swap_s=0.4,
                waited_s=0.0, num_swaps=2, forward_s=4.0, backward_s=6.0,
                optimizer_s=0.7, sums={"loss": 5.0}, grad_norm=2.5, lr=1e-4, max_same_version_gap=0.03,
            ),
        )
    )  # fmt: skip
    assert report.step == 0
    expected = {
        "reward": 0.5,  # (1 + 0 + 0.5 + 0.5) / 4
        "success": 0.25,
        "turns": 2.0,
        "context_tokens": 60.0,
        "num_trajectories": 4.0,
        "zero_variance_share": 0.5,  # group 1
        "trained_tokens": 100.0,
        "step_s": 16.0,  # from 4 s, when the first step began to wait, to 20 s
        "goodput": 100 / 16,
        "train_s": 6.0,
        "twt_s": 10.0,
        "rwt_s": 5.0,  # then groups 2 and 3 kept the rank busy
        "ras": 0.0,
        "tprm_s": 5.0,  # gaps of 7 and 3 s
        "head_of_line_s": 3.0,  # group 0 at 14 s
        "staleness_mean": 0.0,
        "staleness_max": 0.0,
        "actual_s": 4.0,  # 14 s to 18 s
        "swap_s": 0.3,
        "ref_wait_s": 0.2,
        "num_swaps": 1.5,
        "reference_s": 2.0,
        "forward_s": 3.0,
        "backward_s": 4.5,
        "optimizer_s": 0.6,
        "grad_norm": 2.5,
        "lr": 1e-4,
        "log_prob_gap_max": 0.03,
        "padding_share": 60 / (60 + 240),
        "loss": 0.12,  # 12 over 100 trained tokens
        "kl": 0.01,
        "num_failures": 0.0,
        "num_pauses": 0.0,
        "num_resumes": 0.0,
        "num_paused": 0.0,
        "prefill_first": 80.0,  # 20 + 20 + 40
        "prefill_repeated": 10.0,  # the shared prompt of 10, which task 0 had computed
        "prefix_hit_rate": 50 / 140,  # the prompts are the contexts less what was generated
    }
    assert report.metrics == pytest.approx(expected, rel=1e-12)


def test_the_second_step_counts_from_the_end_of_the_first() -> None:
    told = Told(mode="async")
    told.sync(4.0, 0)
    told.supply(4.0, 0, 1, 2, 3)
    for task in range(4):
        told.finish(8.0, task, tokens=5, context=20, reward=1.0)
    told.work(9.0)
    for rank in (0, 1):
        told.tell(10.0, trained(0, rank, 1, True))
    # During the sync group 2 (played by version 0) becomes ready, one task of it only at the second attempt.
    told.tell(11.0, ev.TaskFailed(TaskId(4), Rank(2), FailureKind.ENVIRONMENT, "", True, 2, 0))
    told.finish(11.0, 4, tokens=6, context=20, reward=0.0)
    told.finish(11.5, 5, tokens=6, context=20, reward=1.0)
    told.sync(12.0, 1)
    told.supply(12.0, 4, 5)
    # Tasks 8 and 9 are of group 4, played by version 1.
    told.finish(14.0, 8, tokens=7, context=20, reward=0.0, version=1)
    told.finish(15.0, 9, tokens=7, context=20, reward=1.0, version=1)
    # The trainer still waits: group 3 has its last chance in this step.
    opened = told.finish(16.0, 6, tokens=8, context=20, reward=0.0)
    assert not opened
    opened = told.finish(17.0, 7, tokens=8, context=20, reward=1.0)
    assert [a.step for a in opened if isinstance(a, ac.OpenStep)] == [1]
    told.work(19.0)
    told.tell(20.0, trained(1, 0, 2, True))
    metrics = report_of(told.tell(21.0, trained(1, 1, 2, True))).metrics
    assert metrics["step_s"] == 11.0  # 10 s to 21 s, the sync included
    assert metrics["twt_s"] == 5.0  # 12 s to 17 s
    assert metrics["train_s"] == 4.0
    assert metrics["ras"] == 1.0  # group 2
    assert metrics["tprm_s"] == 2.5  # groups 4 and 3 at 15 and 17 s, from 12 s
    assert metrics["head_of_line_s"] == 5.5  # group 2, since 11.5 s
    assert metrics["trained_tokens"] == 2 * 6 + 2 * 8  # groups 2 and 3, the oldest; group 4 stays
    assert metrics["goodput"] == pytest.approx(28 / 11)
    assert (metrics["staleness_mean"], metrics["staleness_max"]) == (1.0, 1.0)
    assert metrics["num_failures"] == 1.0


def test_without_arrivals_there_is_no_tprm_and_odd_values_do_not_hide() -> None:
    told = Told()
    told.sync(4.0, 0)
    told.supply(4.0, 0, 1, 2, 3)
    for task in range(8):
        told.finish(8.0, task, tokens=5, context=20, reward=1.0)
    told.work(9.0)
    for rank in (0, 1):
        told.tell(10.0, trained(0, rank, 1, True))
    told.sync(12.0, 1)  # groups 2 and 3 are there: the next step opens at once
    told.work(12.5)
    told.tell(13.0, trained(1, 0, 2, True, num_trained_tokens=0, sums={"loss": math.inf}))
    metrics = report_of(told.tell(13.0, trained(1, 1, 2, True, num_trained_tokens=0, sums={}))).metrics
    assert "tprm_s" not in metrics
    assert metrics["ras"] == 2.0
    assert metrics["twt_s"] == 0.0
    assert metrics["loss"] == math.inf


def test_a_step_that_is_fed_as_groups_become_ready_counts_its_waits() -> None:
    told = Told()
    told.sync(4.0, 0)
    told.supply(4.0, 0, 1, 2, 3)
    told.finish(6.0, 0, tokens=5, context=20, reward=1.0)
    opened = told.finish(
        7.0, 1, tokens=5, context=20, reward=0.0
    )  # the step opens with group 0, 3 s after the trainer was free
    assert [a.step for a in opened if isinstance(a, ac.OpenStep)] == [0]
    assert not [a for a in opened if isinstance(a, ac.CloseStep)]
    told.work(9.0)
    told.finish(10.0, 2, tokens=5, context=20, reward=1.0)
    closed = told.finish(11.0, 3, tokens=5, context=20, reward=0.0)  # both actors have waited 2 s for group 1
    assert [a.num_micro_batches for a in closed if isinstance(a, ac.CloseStep)] == [4]
    told.work(14.0)
    told.tell(15.0, trained(0, 0, 1, True))
    metrics = report_of(told.tell(15.0, trained(0, 1, 1, True))).metrics
    assert metrics["twt_s"] == 3.0 + 2.0
    assert metrics["actual_s"] == 7.0  # 7 s to 14 s
    assert metrics["train_s"] == 8.0
    assert metrics["tprm_s"] == 3.5  # groups at 7 and 11 s, from 4 s
