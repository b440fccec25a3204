"""One step that is fed group by group: what is handed out when, to whom, and what closes it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scheduling.driver import small_config, spec_of
from tiderl.errors import IllegalEvent
from tiderl.scheduling import actions as ac
from tiderl.scheduling import events as ev
from tiderl.scheduling.lifecycle import Group, GroupState, Task, TaskState
from tiderl.scheduling.ra2p import Choice
from tiderl.scheduling.readiness import Signals
from tiderl.scheduling.step import OpenedStep
from tiderl.types import MicroBatchId, Pipelining, Rank, TaskId, WeightVersion

SIGNALS = Signals(1, None, 0.0)


class Fed:
    """A step of three groups of two on two actors; a micro-batch holds 100 tokens."""

    def __init__(self, *ref_ranks: int, **settings: Any) -> None:
        config = small_config(groups_per_step=3, num_actors=2, max_micro_batch_tokens=100, **settings)
        way = Pipelining.DECOUPLED if ref_ranks else Pipelining.COLOCATED
        refs = tuple(Rank(r) for r in ref_ranks)
        self.step = OpenedStep(config, 4, (Rank(0), Rank(1)), refs, Choice(way, {}, ""), SIGNALS, 10.0, 1.5)
        self.num_tasks = 0

    def group(self, *lengths: int) -> Group:
        """A ready group whose trajectories have these lengths; the first one was the best."""
        group = Group(spec_of(self.num_tasks), len(lengths), 0, WeightVersion(0), state=GroupState.READY)
        for place, length in enumerate(lengths):
            task = Task(
                TaskId(self.num_tasks), group, TaskState.FINISHED, context_tokens=length, reward=float(place == 0)
            )
            group.tasks.append(task)
            self.num_tasks += 1
        return group

    def feed(self, *groups: Group, now_s: float = 10.0) -> list[ac.Action]:
        return self.step.feed(list(groups), now_s)

    def done(self, action: ac.Action, now_s: float = 20.0) -> list[ac.Action]:
        assert isinstance(action, ac.AssignMicroBatch)
        event = ev.MicroBatchTrained(action.rank, 4, action.micro_batch_id, 10, 0.0, 0.0, 1.0, 2.0, 0.0)
        return self.step.trained(event, now_s)


def assigned(actions: list[ac.Action]) -> dict[int, list[int]]:
    """Tasks by actor."""
    tasks: dict[int, list[int]] = {}
    for action in actions:
        if isinstance(action, ac.AssignMicroBatch):
            tasks.setdefault(action.rank, []).extend(action.task_ids)
    return tasks


def test_a_step_that_has_all_of_its_groups_at_once_hands_them_out_and_closes() -> None:
    fed = Fed()
    actions = fed.feed(fed.group(30, 20), fed.group(30, 20), fed.group(30, 20))
    assert sorted(task for tasks in assigned(actions).values() for task in tasks) == [0, 1, 2, 3, 4, 5]
    # 30 30 30 20 20 20 in a zig-zag: 30 + 20 + 20 and 30 + 30 + 20; both fit into one micro-batch.
    shares = [a for a in actions if isinstance(a, ac.AssignMicroBatch)]
    assert sorted(len(a.task_ids) for a in shares) == [3, 3]
    assert actions[-1] == ac.CloseStep((Rank(0), Rank(1)), 4, 2)
    assert fed.step.is_closed and fed.step.room == 0


def test_advantages_go_with_the_trajectories() -> None:
    fed = Fed()
    actions = fed.feed(fed.group(30, 20), fed.group(30, 20), fed.group(30, 20))
    advantages = {
        task: advantage
        for a in actions
        if isinstance(a, ac.AssignMicroBatch)
        for task, advantage in zip(a.task_ids, a.advantages, strict=True)
    }
    # Rewards 1 and 0: mean 1/2, standard deviation 1/2.
    assert advantages == pytest.approx({0: 1.0, 1: -1.0, 2: 1.0, 3: -1.0, 4: 1.0, 5: -1.0}, abs=1e-4)


def test_idle_actors_get_the_first_group_and_the_second_waits_for_a_full_round_or_an_idle_actor() -> None:
    fed = Fed()
    first = fed.feed(fed.group(30, 20))
    assert assigned(first) == {0: [0], 1: [1]}
    assert not fed.step.is_closed
    # Both actors are busy, and 50 tokens are no full micro-batch for each.
    assert fed.feed(fed.group(30, 20)) == []
    # The first one is through: it would be idle beside work.
    second = fed.done(first[0])
    assert sorted(task for tasks in assigned(second).values() for task in tasks) == [2, 3]
    assert 0 in assigned(second)


def test_busy_actors_get_a_round_that_saturates_them() -> None:
    fed = Fed()
    fed.feed(fed.group(30, 20))
    actions = fed.feed(fed.group(100, 100))
    assert {rank: len(tasks) for rank, tasks in assigned(actions).items()} == {0: 1, 1: 1}
    assert not fed.step.is_closed


def test_the_last_group_closes_the_step_whoever_is_busy() -> None:
    fed = Fed()
    fed.feed(fed.group(30, 20), fed.group(10, 10))
    actions = fed.feed(fed.group(5, 5))
    assert sorted(task for tasks in assigned(actions).values() for task in tasks) == [4, 5]
    assert isinstance(actions[-1], ac.CloseStep)
    assert fed.step.waits_for() == [0, 1]


def test_decoupled_every_micro_batch_is_scored_by_the_ref_rank_with_the_fewest_tokens() -> None:
    fed = Fed(2, 3)
    actions = fed.feed(fed.group(90, 40))
    assert [type(a) for a in actions] == [ac.AssignMicroBatch, ac.ScoreMicroBatch] * 2
    for share, score in zip(actions[::2], actions[1::2], strict=True):
        assert isinstance(share, ac.AssignMicroBatch) and isinstance(score, ac.ScoreMicroBatch)
        assert (score.micro_batch_id, score.actor, score.task_ids) == (share.micro_batch_id, share.rank, share.task_ids)
    scores = [a for a in actions if isinstance(a, ac.ScoreMicroBatch)]
    assert {(score.rank, score.task_ids) for score in scores} == {(2, (0,)), (3, (1,))}
    # Rank 3 has 40 tokens, rank 2 has 90.
    fed.done(actions[0])
    (next_score, *_) = [a for a in fed.feed(fed.group(10, 10), fed.group(10, 10)) if isinstance(a, ac.ScoreMicroBatch)]
    assert next_score.rank == 3


def test_after_a_ref_rank_is_gone_the_actors_score_the_rest() -> None:
    fed = Fed(2)
    fed.feed(fed.group(30, 20))
    assert fed.step.finish_colocated("gone") == [ac.FinishColocated((Rank(0), Rank(1)), 4, "gone")]
    assert fed.step.finish_colocated("again") == []
    actions = fed.feed(fed.group(30, 20), fed.group(30, 20))
    assert not [a for a in actions if isinstance(a, ac.ScoreMicroBatch)]


def test_a_colocated_step_has_nothing_to_finish_when_a_ref_rank_is_gone() -> None:
    fed = Fed()
    fed.feed(fed.group(30, 20))
    assert fed.step.finish_colocated("gone") == []


def test_what_an_actor_does_not_have_it_cannot_be_through_with() -> None:
    fed = Fed()
    (share, *_) = fed.feed(fed.group(30, 20))
    assert isinstance(share, ac.AssignMicroBatch)
    done = ev.MicroBatchTrained(Rank(1 - share.rank), 4, share.micro_batch_id, 10, 0.0, 0.0, 1.0, 2.0, 0.0)
    with pytest.raises(IllegalEvent, match="which it does not have"):
        fed.step.trained(done, 20.0)
    fed.done(share)
    with pytest.raises(IllegalEvent, match="which it does not have"):
        fed.done(share)
    unknown = ev.MicroBatchTrained(Rank(7), 4, MicroBatchId(0), 10, 0.0, 0.0, 1.0, 2.0, 0.0)
    with pytest.raises(IllegalEvent, match="which it does not have"):
        fed.step.trained(unknown, 20.0)


def test_waiting_in_a_step_counts_while_no_actor_has_anything_to_do() -> None:
    """1.5 s before it opened at 10 s; nothing until 12 s; idle from 20 s on, until 23 s."""
    fed = Fed()
    first = fed.feed(fed.group(30, 20), now_s=12.0)
    fed.done(first[0], 18.0)
    fed.done(first[1], 20.0)
    fed.feed(fed.group(30, 20), fed.group(30, 20), now_s=23.0)
    assert fed.step.waited_s == pytest.approx(1.5 + 2.0 + 3.0)


def test_an_abandoned_step_is_closed_once_and_takes_nothing_more() -> None:
    fed = Fed()
    fed.feed(fed.group(30, 20))
    assert fed.step.close(15.0) == [ac.CloseStep((Rank(0), Rank(1)), 4, 2)]
    assert fed.step.close(15.0) == []
    assert fed.step.room == 0
