"""The core against random worlds: every invariant of `scheduling.core`, `scheduling.rollout` and `scheduling.training`.

The driver (`driver.py`) checks each answer (core 3 and 5, rollout 1-3, training 1-3); the machine chooses what happens next, and
mixes in what must not happen.
"""

from __future__ import annotations

import random
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.scheduling.driver import World, small_config, spec_of, trained
from tiderl.coordinator.journal import journal_codec
from tiderl.errors import IllegalEvent
from tiderl.scheduling import events as ev
from tiderl.scheduling.core import Core
from tiderl.scheduling.ledger import Activity
from tiderl.scheduling.training import Phase
from tiderl.types import FailureKind, MicroBatchId, Rank, Role, TaskId, TaskKind, WeightVersion

UNKNOWN_TASK = TaskId(1 << 40)


def freeze(value: Any, seen: dict[int, int] | None = None) -> Any:
    """All that an object holds, down to plain values: equal before and after means that nothing was changed."""
    seen = {} if seen is None else seen
    if isinstance(value, Enum | str | int | float | None):
        return value
    if id(value) in seen:
        return ("seen", seen[id(value)])
    seen[id(value)] = len(seen)
    if isinstance(value, dict):
        return [(freeze(k, seen), freeze(v, seen)) for k, v in value.items()]
    if isinstance(value, set | frozenset):
        return sorted(freeze(v, seen) for v in value)
    if callable(value):
        return "code"
    if isinstance(value, list | tuple) or type(value).__name__ == "deque":
        return [freeze(v, seen) for v in value]
    names = [f.name for f in fields(value)] if is_dataclass(value) else sorted(vars(value))
    return [type(value).__name__, *((name, freeze(getattr(value, name), seen)) for name in names)]


def illegal_events(world: World) -> list[ev.Event]:
    """What no rank could truly report in the present state."""
    rollout_rank, actor = Rank(world.first_rollout), Rank(0)
    beyond = WeightVersion(world.trained_version + 7)
    finished = ev.TaskFinished(UNKNOWN_TASK, rollout_rank, 9, 3, 1, WeightVersion(0), WeightVersion(0), 1.0, True)
    failed = ev.TaskFailed(UNKNOWN_TASK, rollout_rank, FailureKind.ENVIRONMENT, "", True, 0, 0)
    events: list[ev.Event] = [
        ev.RankLost(Rank(99), "no such rank"),
        ev.RankJoined(Rank(99), Role.ROLLOUT, WeightVersion(0), 1000, 1),
        ev.RankJoined(rollout_rank, Role.ACTOR, WeightVersion(0), 0, 0),
        ev.RankJoined(actor, Role.ACTOR, beyond, 0, 0),
        ev.TurnStarted(UNKNOWN_TASK, rollout_rank, 10),
        ev.TurnEnded(UNKNOWN_TASK, rollout_rank, 10, 1, 0),
        ev.TaskPaused(UNKNOWN_TASK, rollout_rank, 10, 1, 0),
        ev.PausedTaskLost(UNKNOWN_TASK, "gone"),
        ev.EngineLoad(Rank(99), 10, 1, 0, 10, 0, 0),
        ev.SecondsSpent(Rank(99), {"decode": 1.0}),
        ev.SecondsSpent(actor, {"napping": 1.0}),
        finished,
        failed,
        trained(99, actor, world.trained_version + 1, True),
        ev.SyncReady(actor, beyond),
        ev.SyncFinished(actor, beyond, True, "", 0.0, 0.0, 0.0),
        ev.SyncReady(Rank(99), world.trained_version),
        ev.CheckpointSaved(99, False, actor, True, ""),
        ev.GroupsSupplied(TaskKind.TRAIN, tuple(spec_of(500_000 + i) for i in range(99))),
        ev.GroupsSupplied(TaskKind.EVAL, tuple(spec_of(600_000 + i, TaskKind.EVAL) for i in range(99))),
    ]
    if rollout_rank not in world.unjoined:
        events.append(ev.RankJoined(rollout_rank, Role.ROLLOUT, WeightVersion(0), 1000, 1))
    if (order := next((s for s in world.supplies if s.kind is TaskKind.TRAIN), None)) is not None:
        events.append(ev.GroupsSupplied(TaskKind.TRAIN, (spec_of(700_000, TaskKind.EVAL),)))
        if order.count > 1:
            events.append(ev.GroupsSupplied(TaskKind.TRAIN, (spec_of(700_000),) * order.count))
    if world.sync is not None and world.sync_started:
        events.append(ev.SyncReady(actor, world.sync.version))
    if world.sync is not None and not world.sync_started:
        events.append(ev.SyncFinished(actor, world.sync.version, True, "", 0.0, 0.0, 0.0))
    for rank in sorted(world.lost):
        events.append(ev.RankLost(rank, "once more"))
    events.append(ev.ReferenceScored(actor, 0, MicroBatchId(0), 10, 1.0))
    not_theirs = MicroBatchId(99)
    events.append(
        ev.MicroBatchTrained(actor, world.step.step if world.step else 0, not_theirs, 10, 0.0, 0.0, 1.0, 1.0, 0.0)
    )
    for share in list(world.to_train.values())[:1]:
        done = ev.MicroBatchTrained(share.rank, share.step, share.micro_batch_id, 10, 0.0, 0.0, 1.0, 1.0, 0.0)
        events += [replace(done, step=share.step + 1), replace(done, rank=Rank(share.rank + 1))]
    for rank in sorted(world.spent):
        events.append(ev.SecondsSpent(rank, dict.fromkeys(world.spent[rank][1], 0.0)))
    for rank in sorted(world.sync_answers):
        assert world.sync is not None
        events.append(ev.SyncReady(rank, world.sync.version))
    for task_id, task in sorted(world.playing.items())[:2]:
        rank, elsewhere = task.rank, Rank(task.rank + 1)
        total, context = task.generated_tokens, task.context_tokens
        events.append(ev.PausedTaskLost(task_id, "it plays"))
        if not task.pausing and task_id not in world.cancelled:
            events.append(ev.TaskPaused(task_id, rank, context, total, 0))
        if task.versions:
            events.append(ev.TurnStarted(task_id, rank, context - 3))
        events += [ev.TurnStarted(task_id, elsewhere, 10), replace(failed, task_id=task_id, rank=elsewhere)]
        if total:
            events.append(replace(failed, task_id=task_id, rank=rank, generated_tokens=total - 1))
        if task.state == "generating":
            events += [ev.TurnStarted(task_id, rank, context + 1), ev.TurnEnded(task_id, rank, context, -1, 0)]
            events.append(ev.TurnEnded(task_id, rank, context + 1, 1, -1))
            events.append(replace(finished, task_id=task_id, rank=rank, context_tokens=99, generated_tokens=total))
        else:
            events.append(ev.TurnEnded(task_id, rank, context + 1, 1, 0))
        if task.state == "starting":
            events.append(replace(finished, task_id=task_id, rank=rank))
        if task.state == "acting" and total:
            events.append(replace(finished, task_id=task_id, rank=rank, generated_tokens=total - 1))
        if task_id not in world.cancelled:
            events.append(ev.TaskFailed(task_id, rank, FailureKind.CANCELLED, "of its own accord", False, total, 0))
    for task_id, task in sorted(world.paused.items())[:1]:
        events += [
            ev.TurnStarted(task_id, task.rank, task.context_tokens),
            ev.TaskPaused(task_id, task.rank, task.context_tokens, task.generated_tokens, 0),
            replace(failed, task_id=task_id, rank=task.rank, generated_tokens=task.generated_tokens),
        ]
    for task_id in sorted(world.buffer)[:1]:
        events.append(replace(finished, task_id=task_id))
    if (step := world.step) is not None and not world.step_closed:
        events.append(trained(step.step, actor, step.version + 1, True))
    elif step is not None:
        number, version = step.step, step.version
        events += [
            trained(number, world.num_actors, version + 1, True),
            trained(number, actor, version + 2, True),
            trained(number, actor, version + 1, False),
            trained(number, actor, version + 2, False),
            trained(number, actor, version + 1, True, abandoned=True),
        ]
        if not world.abandon:
            events.append(trained(number, actor, version, False, abandoned=True))
        for rank in sorted(world.step_left):
            events.append(trained(number, rank, version + 1, True))
    return events


class CoreMachine(RuleBasedStateMachine):
    """One job in a random world."""

    world: World

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        def draw(low: int, high: int) -> int:
            return data.draw(st.integers(low, high))

        num_ref = data.draw(st.sampled_from([0, 0, 1, 2]))
        config = small_config(
            steps=draw(1, 6),
            groups_per_step=draw(1, 3),
            group_size=draw(2, 4),
            max_staleness=draw(0, 2),
            on_late=data.draw(st.sampled_from(["wait", "drop"])),
            num_actors=draw(1, 3),
            num_ref=num_ref,
            kl_weight=0.1 if num_ref else data.draw(st.sampled_from([0.0, 0.1])),
            mode="tide" if num_ref else data.draw(st.sampled_from(["tide", "stream", "async"])),
            max_micro_batch_tokens=data.draw(st.sampled_from([100, 200, 1000])),
            eval_every=draw(0, 3),
            num_eval_tasks=draw(1, 3),
            checkpoint_every=draw(0, 2),
            max_tasks_per_rank=data.draw(st.sampled_from([1, 3, 256])),
            max_attempts=draw(1, 3),
            scheduler=data.draw(st.sampled_from(["ctb", "ctb", "fixed"])),
            footprint=data.draw(st.sampled_from(["growth", "paper"])),
            spare_trajectories=draw(0, 2),
            growth_safety=data.draw(st.sampled_from([0.0, 1.0])),
        )
        kv_tokens = data.draw(st.lists(st.sampled_from([30, 44, 60, 100, 400]), min_size=1, max_size=3))
        block_tokens = data.draw(st.sampled_from([1, 4]))
        self.world = World(config, tuple(kv_tokens), capacity=draw(1, 12), block_tokens=block_tokens)

    def running(self) -> bool:
        return self.world.shutdown is None

    @precondition(running)
    @rule(seed=st.integers(0, 2**32), num_events=st.integers(1, 30))
    def a_while(self, seed: int, num_events: int) -> None:
        """Many facts in a random order: without this the machine would rarely get past the first step."""
        left = iter(range(num_events))
        self.world.play(random.Random(seed), until=lambda: next(left, None) is None)

    @precondition(running)
    @rule(data=st.data(), reward=st.sampled_from([0.0, 0.5, 1.0]), tokens=st.integers(1, 9), updated=st.booleans())
    def something_happens(self, data: st.DataObject, reward: float, tokens: int, updated: bool) -> None:
        option = data.draw(st.sampled_from(self.world.options()))
        self.world.deliver(option, reward=reward, tokens=tokens, updated=updated)

    @precondition(lambda self: self.running() and self.world.playing)
    @rule(data=st.data(), retryable=st.booleans(), tokens=st.integers(0, 5))
    def an_environment_fails(self, data: st.DataObject, retryable: bool, tokens: int) -> None:
        self.world.fail(data.draw(st.sampled_from(sorted(self.world.playing))), retryable=retryable, tokens=tokens)

    @precondition(lambda self: self.running() and self.world.paused)
    @rule(data=st.data())
    def a_paused_session_is_lost(self, data: st.DataObject) -> None:
        self.world.lose_paused(data.draw(st.sampled_from(sorted(self.world.paused))))

    @precondition(lambda self: self.running() and not self.world.unjoined)
    @rule(data=st.data(), excess=st.sampled_from([0, 0, 50]))
    def an_engine_tells_its_load(self, data: st.DataObject, excess: int) -> None:
        rank = data.draw(st.sampled_from(sorted(self.world.rank_versions)))
        held = sum(t.held_tokens for t in self.world.playing.values() if t.rank == rank)
        self.world.tell(ev.EngineLoad(rank, held + excess, 1, 0, 100, 50, 0))

    @rule(data=st.data(), activity=st.sampled_from(Activity))
    def a_rank_tells_of_its_time(self, data: st.DataObject, activity: Activity) -> None:
        ranks = range(self.world.world_size)
        self.world.tell_seconds(Rank(data.draw(st.sampled_from(ranks))), activity)

    @precondition(
        lambda self: self.running() and set(self.world.ref_ranks) - self.world.lost and not self.world.unjoined
    )
    @rule(data=st.data(), sure=st.integers(0, 3))
    def a_ref_rank_dies(self, data: st.DataObject, sure: int) -> None:
        ranks = sorted(set(self.world.ref_ranks) - self.world.lost)
        if sure == 0 and self.world.core.training.phase is not Phase.JOINING:
            self.world.lose(data.draw(st.sampled_from(ranks)))

    @precondition(lambda self: self.running() and self.world.may_tick)
    @rule()
    def an_evaluation_is_late(self) -> None:
        self.world.tick_at_deadline()

    @rule()
    def a_tick_is_early(self) -> None:
        assert self.world.tell(ev.Tick()) == ()

    @precondition(lambda self: not self.running())
    @rule(data=st.data())
    def a_rank_reports_a_task_after_the_end(self, data: st.DataObject) -> None:
        """The ledger must still hear of its tokens; nothing else follows."""
        of_tasks = [o for o in self.world.options() if o[0] in ("turn_ended", "finished", "cancelled", "paused")]
        if of_tasks:
            assert self.world.deliver(data.draw(st.sampled_from(of_tasks))) == ()

    @precondition(lambda self: self.running() and len(self.world.history) > 20)
    @rule(sure=st.integers(0, 5))
    def somebody_stops_the_job(self, sure: int) -> None:
        if sure == 0:
            self.world.stop()

    @precondition(running)
    @rule(data=st.data())
    def something_impossible_is_reported(self, data: st.DataObject) -> None:
        """Core 1: an illegal event raises `IllegalEvent` and changes nothing."""
        event = data.draw(st.sampled_from(illegal_events(self.world)))
        before = freeze(self.world.core)
        with pytest.raises(IllegalEvent):
            self.world.core.handle(event, self.world.now_s)
        assert freeze(self.world.core) == before

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.play(random.Random(0))
        assert world.shutdown is not None and world.shutdown.exit_code == 0, world.shutdown
        assert world.core.next_deadline_s() is None
        if not world.stopped:
            # Every version was made once, in order, and was announced with its metrics.
            assert len(world.reports) == world.config.train.steps == world.trained_version
            assert len(set(world.trained_groups)) == world.config.train.steps * world.config.train.groups_per_step
            # An evaluation whose groups never came is closed at its deadline.
            assert all(order.kind is TaskKind.EVAL for order in world.supplies)
            assert set(world.playing) <= world.cancelled.keys(), "a task was never finished, and never cancelled"
            assert not world.paused, "a task was paused and never resumed"
        assert_same_answers_again(world)


def assert_same_answers_again(world: World) -> None:
    """Core 2: the same events at the same times give the same actions, byte for byte, also after a trip over the wire."""
    codec = journal_codec()
    fresh = Core(world.config, world.world_size)
    for now_s, event, actions in world.history:
        again = fresh.handle(codec.unpack(codec.pack(event)), now_s)
        assert [codec.pack(a) for a in again] == [codec.pack(a) for a in actions]
    assert freeze(fresh) == freeze(world.core)


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(
    max_examples=60, stateful_step_count=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
