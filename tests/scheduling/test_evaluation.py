"""Evaluation rounds: reports by hand, and the invariants of `scheduling.evaluation` inside a whole job."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduling.driver import World, small_config
from tiderl.scheduling import actions as ac
from tiderl.scheduling.evaluation import EvaluationRound
from tiderl.types import TaskId, TaskKind, WeightVersion


def round_of(num_tasks: int) -> EvaluationRound:
    opened = EvaluationRound(WeightVersion(7), 60.0)
    for task in range(num_tasks):
        opened.add(TaskId(task))
    return opened


def test_report_by_hand() -> None:
    """Five tasks: three finish, one is given up, one is still open. Means are over the three (invariant 2)."""
    opened = round_of(5)
    opened.finish(TaskId(0), 1.0, True, 4)
    opened.finish(TaskId(3), 0.5, False, 9)
    opened.finish(TaskId(1), 0.0, False, 20)
    opened.give_up(TaskId(4))
    assert opened.open_tasks == {2}
    assert opened.report() == ac.ReportEvaluation(
        version=WeightVersion(7), num_tasks=5, num_missing=2, success=1 / 3, reward=0.5, turns=11.0, complete=False
    )


def test_a_round_without_any_result_reports_zeros() -> None:
    report = round_of(2).report()
    assert (report.num_missing, report.success, report.reward, report.turns, report.complete) == (
        2,
        0.0,
        0.0,
        0.0,
        False,
    )


def test_a_task_ends_once() -> None:
    opened = round_of(2)
    opened.finish(TaskId(0), 1.0, True, 1)
    with pytest.raises(KeyError):
        opened.give_up(TaskId(0))
    with pytest.raises(KeyError):
        opened.finish(TaskId(0), 1.0, True, 1)


@given(st.lists(st.sampled_from(["won", "lost", "given up", "open"]), max_size=20))
def test_invariant_2_for_any_outcomes(outcomes: list[str]) -> None:
    opened = round_of(len(outcomes))
    for task, outcome in enumerate(outcomes):
        if outcome == "given up":
            opened.give_up(TaskId(task))
        elif outcome != "open":
            opened.finish(TaskId(task), 1.0, outcome == "won", 1)
    report = opened.report()
    num_finished = outcomes.count("won") + outcomes.count("lost")
    assert report.num_tasks == num_finished + report.num_missing == len(outcomes)
    assert report.success == (outcomes.count("won") / num_finished if num_finished else 0.0)


# --- in a job ---------------------------------------------------------------------------------------------------------


def test_rounds_come_at_the_start_every_so_many_steps_and_at_the_end() -> None:
    world = World(small_config(steps=5, eval_every=2))
    world.play(random.Random(1))
    assert [e.version for e in world.evaluations] == [0, 2, 4, 5]
    assert all(e.complete and e.num_tasks == 2 for e in world.evaluations)


def test_invariant_1_the_next_sync_waits_for_the_round_up_to_its_deadline() -> None:
    world = World(small_config(steps=2, eval_every=1, num_eval_tasks=2))
    rng = random.Random(2)
    world.play(rng, until=lambda: any(t.order.group.kind is TaskKind.EVAL for t in world.playing.values()))
    eval_tasks = [i for i, t in world.playing.items() if t.order.group.kind is TaskKind.EVAL]
    assert len(eval_tasks) == 2
    # Everybody else goes on until the update is made; the two evaluation tasks hang.
    of_tasks = ("turn_started", "turn_ended", "finished")
    while not world.may_tick or world.trained_version == 0:
        world.deliver(rng.choice([o for o in world.options() if o[0] not in of_tasks or o[1] not in eval_tasks]))
    assert world.sync is None
    actions = world.tick_at_deadline()
    assert world.now_s >= world.config.eval.max_wait_s
    cancelled = [a.task_id for a in actions if isinstance(a, ac.CancelTask)]
    assert sorted(cancelled) == sorted(eval_tasks)
    (report,) = [a for a in actions if isinstance(a, ac.ReportEvaluation)]
    assert (report.version, report.num_tasks, report.num_missing, report.complete) == (0, 2, 2, False)
    assert any(isinstance(a, ac.PrepareSync) for a in actions)
    # Of the two cancelled tasks one fails on its own at that moment: nobody wants it any more, so it isn't tried again.
    retried = world.fail(eval_tasks[0], retryable=True)
    assert not any(isinstance(a, ac.StartTask) and a.task_id == eval_tasks[0] for a in retried)
    world.play(rng)
    assert world.attempts[eval_tasks[0]] == 1
    assert [e.version for e in world.evaluations] == [0, 1, 2]


def test_a_stop_before_the_groups_of_the_round_arrive_is_no_disagreement() -> None:
    world = World(small_config(steps=3, eval_every=1))
    rng = random.Random(3)
    world.play(rng, until=lambda: any(s.kind is TaskKind.EVAL for s in world.supplies))
    world.stop()
    while world.supplies:
        assert world.deliver(("supply", 0)) == ()
    world.play(rng)
    assert world.shutdown == ac.Shutdown(0, "enough")
    assert not world.evaluations


def test_evaluation_tasks_start_before_waiting_training_tasks() -> None:
    world = World(small_config(steps=2, eval_every=1, num_eval_tasks=3), kv_tokens=(200,), capacity=2)
    rng = random.Random(4)
    world.play(rng, until=lambda: not world.supplies and len(world.evaluations) == 1)
    started = [a for _, _, actions in world.history for a in actions if isinstance(a, ac.StartTask)]
    kinds = [a.group.kind for a in started]
    # Two places, filled by whatever was there first; the freed ones go to evaluation as long as it has tasks.
    last_eval = max(i for i, kind in enumerate(kinds) if kind is TaskKind.EVAL)
    assert kinds[: last_eval + 1].count(TaskKind.TRAIN) <= 2
