"""The core in chosen situations: what a job does at its start, when something fails, when it is stopped, and when it goes on."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from tests.scheduling.driver import World, small_config, trained
from tiderl.errors import IllegalEvent, UserError
from tiderl.scheduling import actions as ac
from tiderl.scheduling import events as ev
from tiderl.scheduling.core import MAX_SKIPPED_STEPS, Core
from tiderl.types import FailureKind, Rank, Role, TaskId, TaskKind, WeightVersion


def start(world: World, *, sync: bool = True) -> None:
    """All ranks join; with `sync` the first weights reach them, and the first groups are there."""
    for option in [("capacity", 0), *(("join", r) for r in sorted(world.unjoined))]:
        world.deliver(option)
    if sync:
        finish_sync(world)


def finish_sync(world: World) -> None:
    for verb in ("ready", "synced"):
        for option in [o for o in world.options() if o[0] == verb]:
            world.deliver(option)
    while world.supplies:
        world.deliver(("supply", 0))


def finish_task(world: World, task_id: int, *, reward: float = 1.0, tokens: int = 3) -> tuple[ac.Action, ...]:
    """Play a task that has started to its end, in one turn."""
    for verb in ("turn_started", "turn_ended"):
        world.deliver((verb, task_id), tokens=tokens)
    return world.deliver(("finished", task_id), reward=reward)


def kinds(actions: tuple[ac.Action, ...]) -> list[str]:
    return [type(action).__name__ for action in actions]


# --- the start --------------------------------------------------------------------------------------------------------


def test_nothing_starts_before_all_have_joined_and_the_first_weights_are_everywhere() -> None:
    world = World(small_config(num_actors=2), kv_tokens=(400, 400))
    everyone = tuple(Rank(r) for r in range(4))
    for rank in (3, 0, 1):
        assert world.deliver(("join", rank)) == ()
    assert world.deliver(("capacity", 0)) == ()
    assert world.deliver(("join", 2)) == (ac.PrepareSync(everyone, WeightVersion(0)),)
    for rank in (2, 0, 3):
        assert world.deliver(("ready", rank)) == ()
    assert world.deliver(("ready", 1)) == (ac.StartSync(everyone, WeightVersion(0), Rank(0)),)
    for rank in (3, 2, 1):
        assert world.deliver(("synced", rank)) == ()
    # (staleness 1 + 1) * 2 groups.
    assert world.deliver(("synced", 0))[-1] == ac.SupplyGroups(TaskKind.TRAIN, 4)
    # 8 tasks of at most 100 tokens on two ranks of 400, turn and turn about, siblings on the same rank.
    started = world.deliver(("supply", 0))
    assert [(a.rank, a.task_id, a.attempt) for a in started if isinstance(a, ac.StartTask)] == [
        (2, 0, 1), (3, 2, 1), (2, 1, 1), (3, 3, 1), (2, 4, 1), (3, 6, 1), (2, 5, 1), (3, 7, 1),
    ]  # fmt: skip


def test_a_rank_that_does_not_join_ends_the_job_by_name() -> None:
    world = World(small_config(), kv_tokens=(400, 400))
    for option in (("join", 0), ("join", 2), ("capacity", 0)):
        world.deliver(option)
    assert world.core.next_deadline_s() == world.config.timeouts.start_s
    world.tick_at_deadline()
    assert world.shutdown is not None and world.shutdown.exit_code == 1
    assert "[1]" in world.shutdown.reason and "timeouts.start_s" in world.shutdown.reason


def test_a_task_that_no_kv_cache_holds_fails_with_the_numbers() -> None:
    """Its context has grown to 12 + 9 tokens, the cache holds 20; its sibling takes the room at once."""
    world = World(small_config(groups_per_step=1, max_staleness=0), kv_tokens=(20,))
    start(world)
    world.deliver(("turn_started", 0))
    cancelled, started = world.deliver(("turn_ended", 0), tokens=9)
    assert cancelled == ac.CancelTask(Rank(1), TaskId(0))
    assert isinstance(started, ac.StartTask) and started.task_id == 1
    note = world.deliver(("cancelled", 0))[0]
    assert isinstance(note, ac.Note) and note.level == "warning"
    for word in ("task 0", "never_fits", "21 tokens", "holds 20", "engine.kv_cache_tokens"):
        assert word in note.text
    assert world.books["failed"] == 9 and world.core.rollout.num_failures == 1


def test_the_reserve_of_the_kv_cache_is_kept_free() -> None:
    config = small_config()
    config = replace(config, rollout=replace(config.rollout, kv_reserve=0.25))
    world = World(config, kv_tokens=(400,))
    start(world)
    assert len(world.playing) == 3, "400 tokens less a quarter hold three tasks of 100"


def test_a_lost_rank_ends_the_job() -> None:
    world = World(small_config())
    start(world)
    assert kinds(world.tell(ev.RankLost(Rank(1), "silent for 60 s"))) == ["Note", "Shutdown"]
    assert world.shutdown == ac.Shutdown(1, "rank 1 (rollout) is lost: silent for 60 s")
    assert world.core.handle(ev.RankLost(Rank(0), "too"), 99.0) == ()


# --- groups and failures ----------------------------------------------------------------------------------------------


def test_a_retryable_failure_is_tried_again_up_to_max_attempts() -> None:
    """Rollout 1."""
    world = World(small_config(group_size=3, groups_per_step=1, max_staleness=0, max_attempts=2))
    start(world)
    assert sorted(world.playing) == [0, 1, 2]
    assert kinds(world.fail(TaskId(0), retryable=True, tokens=4)) == ["Note", "StartTask"]
    assert world.attempts[TaskId(0)] == 2
    assert kinds(world.fail(TaskId(0), retryable=True)) == ["Note"]
    assert world.attempts[TaskId(0)] == 2
    assert (
        world.notes[-1].level == "warning"
        and "left out" in world.notes[-1].text
        and "env broke" in world.notes[-1].text
    )


def test_a_failure_that_cannot_be_mended_is_not_tried_again() -> None:
    world = World(small_config())
    start(world)
    world.fail(TaskId(0), retryable=False)
    assert world.attempts[TaskId(0)] == 1 and TaskId(0) not in world.playing


def test_failures_in_a_row_without_any_success_end_the_job() -> None:
    config = small_config(steps=9)
    config = replace(config, rollout=replace(config.rollout, max_failures_in_a_row=4))
    world = World(config)
    start(world)

    def fail_some(count: int) -> None:
        for _ in range(count):
            world.fail(min(world.playing), retryable=True)

    fail_some(3)
    finish_task(world, min(world.playing))
    fail_some(3)
    assert world.shutdown is None, "a success in between starts the count anew"
    fail_some(1)
    assert world.shutdown is not None and world.shutdown.exit_code == 2
    assert "rollout.max_failures_in_a_row" in world.shutdown.reason and "env broke" in world.shutdown.reason


def test_a_failed_task_is_no_reward_of_zero() -> None:
    """Rollout 2 and 3: two of three are left, and their advantages are those of a group of two."""
    world = World(small_config(group_size=3, groups_per_step=1, max_staleness=0))
    start(world)
    world.fail(TaskId(1), retryable=False)
    finish_task(world, 0, reward=1.0)
    actions = finish_task(world, 2, reward=3.0)
    (share,) = [a for a in actions if isinstance(a, ac.AssignMicroBatch)]
    assert dict(zip(share.task_ids, share.advantages, strict=True)) == {0: -1.0, 2: 1.0}


def test_a_group_with_one_trajectory_left_is_dropped_and_replaced() -> None:
    """Rollout 2."""
    world = World(small_config(group_size=2, groups_per_step=1, max_staleness=0))
    start(world)
    finish_task(world, 0, tokens=5)
    world.deliver(("turn_started", 1))
    actions = world.fail(TaskId(1), retryable=False, tokens=2)
    assert kinds(actions) == ["Note", "DropTrajectories", "SupplyGroups"]
    assert world.books["failed"] == 7
    world.deliver(("supply", 0))
    assert {p.order.group.group_id for p in world.playing.values()} == {1}


def test_two_orders_for_groups_on_their_way_get_two_answers() -> None:
    world = World(small_config(group_size=2, groups_per_step=1, max_staleness=2))
    start(world)
    for task in (0, 1, 2, 3):
        world.fail(TaskId(task), retryable=False)
    assert [s.count for s in world.supplies] == [1, 1]
    world.deliver(("supply", 0))
    assert [s.count for s in world.supplies] == [1], "what is on its way was ordered again"
    world.deliver(("supply", 0))
    assert not world.supplies
    world.play(random.Random(1))
    assert world.trained_version == world.config.train.steps


# --- staleness --------------------------------------------------------------------------------------------------------


def stale_world(on_late: str) -> World:
    """Staleness 2, one group a step: groups 0, 1 and 2 start at version 0; 1 and 2 hang while newer ones are trained."""
    world = World(
        small_config(steps=6, groups_per_step=1, group_size=2, max_staleness=2, on_late=on_late), kv_tokens=(2000,)
    )
    start(world)
    for _ in range(2):
        finish_group(world, min(group_of(world, t) for t in world.playing if group_of(world, t) not in (1, 2)))
        if world.step is None:
            return world
        world.work_off()
        world.deliver(("trained", 0))
        finish_sync(world)
    return world


def group_of(world: World, task_id: TaskId) -> int:
    return int(world.playing[task_id].order.group.group_id)


def finish_group(world: World, group_id: int) -> None:
    for task in sorted(t for t in world.playing if group_of(world, t) == group_id):
        finish_task(world, task)


def test_wait_a_step_with_newer_groups_does_not_use_up_the_time_of_older_ones() -> None:
    """After the step at version 0 two groups of version 0 are left, and two steps that may train them: none for group 3."""
    world = stale_world("wait")
    assert world.trained_groups == [0] and world.step is None
    finish_group(world, 2)  # now one group and one step: at version 1 group 2 goes first
    assert world.step_groups == [2]
    world.work_off()
    world.deliver(("trained", 0))
    finish_sync(world)
    assert world.step is None, "group 1 has its last chance at version 2"
    finish_group(world, 1)
    assert world.step_groups == [1]
    world.play(random.Random(1))
    assert world.books["stale"] == 0
    assert max(r.metrics["staleness_max"] for r in world.reports) <= 2


def test_drop_newer_groups_are_trained_and_late_ones_dropped() -> None:
    world = stale_world("drop")
    assert world.trained_groups == [0, 3]
    finish_group(world, 4)
    world.work_off()
    world.deliver(("trained", 0))
    finish_sync(world)
    assert world.trained_version == 3
    for group in (1, 2):
        finish_group(world, group)
    assert [d.task_ids for d in world.dropped] == [(2, 3), (4, 5)]
    assert world.books["stale"] == 12
    world.play(random.Random(1))
    assert world.trained_version == 6


# --- the trainer ------------------------------------------------------------------------------------------------------


def play_to_step(world: World) -> None:
    """All of a step is handed out, and worked off."""
    world.play(random.Random(0), until=lambda: world.step_closed)
    world.work_off()


def test_updates_that_are_not_finite_drop_the_batch_and_end_the_job_when_they_go_on() -> None:
    world = World(small_config(steps=5, max_staleness=0))
    for i in range(MAX_SKIPPED_STEPS):
        play_to_step(world)
        assert world.step is not None and world.shutdown is None
        world.num_skipped_in_a_row = 0  # the driver would spare us the third
        lost = [world.buffer[t].event.generated_tokens for t in world.step_tasks]
        before = world.books["failed"]
        actions = world.deliver(("trained", 0), updated=False)
        assert "ReportStep" not in kinds(actions)
        assert world.books["failed"] == before + sum(lost)
        assert (world.shutdown is None) == (i < MAX_SKIPPED_STEPS - 1)
    assert world.shutdown is not None and world.shutdown.exit_code == 1


def test_actors_must_agree_on_the_outcome() -> None:
    """Training 2."""
    world = World(small_config(num_actors=2))
    play_to_step(world)
    world.deliver(("trained", 0))
    with pytest.raises(IllegalEvent, match="rank 1 disagrees with rank 0"):
        world.tell(trained(0, 1, 0, False))
    assert "ReportStep" in kinds(world.deliver(("trained", 1)))


@pytest.mark.parametrize("phase", ["step", "ready", "synced", "final save"])
def test_a_phase_that_lasts_too_long_ends_the_job_and_names_whom_it_waits_for(phase: str) -> None:
    """Training 3."""
    world = World(small_config(num_actors=2, steps=1), kv_tokens=(400, 400))
    if phase in ("ready", "synced"):
        start(world, sync=False)
        if phase == "synced":
            for rank in range(4):
                world.deliver(("ready", rank))
        world.deliver((phase, 2))
        silent = "[0, 1, 3]"
    else:
        play_to_step(world)
        world.deliver(("trained", 0))
        silent = "[1]"
        if phase == "final save":
            world.play(random.Random(0), until=lambda: bool(world.saves))
            world.deliver(("saved", 0))
    world.tick_at_deadline()
    assert world.shutdown is not None and world.shutdown.exit_code == 1
    assert f"ranks {silent}" in world.shutdown.reason and "timeouts" in world.shutdown.reason


def test_a_rank_that_did_not_get_the_weights_ends_the_job() -> None:
    world = World(small_config())
    start(world, sync=False)
    for rank in (0, 1):
        world.deliver(("ready", rank))
    world.tell(ev.SyncFinished(Rank(1), WeightVersion(0), False, "checksum of bucket 3", 0.0, 0.0, 0.0))
    assert world.shutdown == ac.Shutdown(1, "rank 1 did not get weights 0: checksum of bucket 3")


def test_checkpoints_come_every_so_many_steps_and_at_the_end() -> None:
    world = World(small_config(steps=5, checkpoint_every=2))
    world.play(random.Random(3))
    assert [(save.step, save.final) for save, _ in world.states] == [(2, False), (4, False), (5, True)]


def test_a_checkpoint_that_fails_beside_the_training_is_noted_and_a_final_one_ends_the_job() -> None:
    for final in (False, True):
        world = World(small_config(steps=2, checkpoint_every=1))
        world.play(random.Random(3), until=lambda w=world, f=final: any(save.final == f for _, save in w.saves))  # type: ignore[misc]
        (place,) = [i for i, (_, save) in enumerate(world.saves) if save.final == final]
        rank, save = world.saves.pop(place)
        world.tell(ev.CheckpointSaved(save.step, save.final, rank, False, "disk full"))
        assert "disk full" in world.notes[-1].text and world.notes[-1].level == "error"
        assert (world.shutdown is not None) == final


def test_a_checkpoint_that_lacks_a_part_is_never_called_complete() -> None:
    """Neither when the other parts come later, nor for the final save of the same step, which stands for itself."""
    world = World(small_config(steps=3, checkpoint_every=1, num_actors=2))
    world.play(random.Random(0), until=lambda: len(world.saves) == 2 and world.step is None)
    world.saves.remove(world.saves[0])
    world.tell(ev.CheckpointSaved(1, False, Rank(0), False, "disk full"))
    assert world.deliver(("saved", 0)) == ()
    assert not any("is on disk" in note.text for note in world.notes)
    assert world.core.training.on_disk == set()
    world.play(random.Random(0))
    assert world.core.training.on_disk == {2, 3}


def test_a_broken_checkpoint_does_not_keep_the_final_one_from_ending_the_job() -> None:
    world = World(small_config(steps=2, checkpoint_every=1))
    world.play(random.Random(0), until=lambda: len(world.saves) == 1)
    first = world.saves.pop()
    world.play(random.Random(0), until=lambda: any(save.final for _, save in world.saves))
    world.deliver(("saved", 0))
    assert world.shutdown is None, "the first one is still being written"
    assert kinds(world.tell(ev.CheckpointSaved(first[1].step, False, first[0], False, "disk full"))) == [
        "Note",
        "Shutdown",
    ]
    assert world.shutdown is not None and world.shutdown.exit_code == 0


# --- the end ----------------------------------------------------------------------------------------------------------


def test_a_stop_before_the_start_just_ends() -> None:
    world = World(small_config())
    assert world.stop() == (ac.Note("info", "stopping: enough"), ac.Shutdown(0, "enough"))


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_stop_in_a_step_abandons_it_saves_and_ends(is_closed: bool) -> None:
    """Also one that still waits for groups: nothing more will come, and the actors must hear that."""
    world = World(small_config(num_actors=2))
    world.play(random.Random(0), until=lambda: world.step_closed if is_closed else bool(world.step_tasks))
    assert world.step_closed is is_closed
    in_step = {world.buffer[t].order.group.group_id for t in world.step_tasks}
    actions = world.stop()
    assert ac.AbandonStep((Rank(0), Rank(1)), 0) in actions
    assert ("CloseStep" in kinds(actions)) is not is_closed
    assert {a.task_id for a in actions if isinstance(a, ac.CancelTask)} == set(world.playing)
    world.play(random.Random(0))
    assert world.shutdown == ac.Shutdown(0, "enough")
    assert not world.reports
    ((save, state),) = world.states
    assert save.final and save.step == 0
    assert in_step <= {spec[0] for spec in state["open_groups"]}


def test_a_stop_that_cannot_save_in_time_fails() -> None:
    world = World(small_config())
    play_to_step(world)
    world.stop()
    assert world.core.next_deadline_s() == pytest.approx(world.now_s + world.config.timeouts.shutdown_s)
    world.tick_at_deadline()
    assert world.shutdown is not None and world.shutdown.exit_code == 1
    assert "timeouts.shutdown_s" in world.shutdown.reason and "ranks [0]" in world.shutdown.reason


def test_groups_that_arrive_after_a_stop_are_not_played_and_not_counted() -> None:
    world = World(small_config(max_staleness=0))
    start(world, sync=False)
    for verb in ("ready", "synced"):
        for rank in (0, 1):
            world.deliver((verb, rank))
    world.stop()
    assert world.deliver(("supply", 0)) == ()
    world.play(random.Random(0))
    ((_, state),) = world.states
    assert state["num_supplied"] == 0 and state["open_groups"] == []


@pytest.mark.parametrize("seed", range(30))
def test_no_group_is_skipped_or_doubled_over_stops_and_resumes(seed: int) -> None:
    """Without failures every group from 0 to the last is trained exactly once, however often the job was interrupted."""
    rng = random.Random(seed)
    steps = rng.randint(2, 8)
    config = small_config(
        steps=steps,
        groups_per_step=rng.randint(1, 3),
        max_staleness=rng.randint(0, 2),
        num_actors=rng.randint(1, 2),
        eval_every=rng.randint(0, 2),
        checkpoint_every=rng.randint(0, 2),
    )
    state: dict[str, Any] | None = None
    groups: list[int] = []
    versions: list[int] = []
    for is_last in [False] * rng.randint(1, 3) + [True]:
        world = World(config, kv_tokens=(300, 500), saved=state)
        start(world)
        if not is_last:
            left = iter(range(rng.randint(0, 120)))
            world.play(rng, until=lambda left=left: next(left, None) is None)  # type: ignore[misc]
            if world.shutdown is None:
                world.stop()
        world.play(rng)
        assert world.shutdown is not None and world.shutdown.exit_code == 0
        save, state = world.states[-1]
        assert save.final
        groups += world.trained_groups
        versions += [int(e.version) for e in world.evaluations]
    assert sorted(groups) == list(range(steps * config.train.groups_per_step))
    assert state is not None and state["version"] == steps and state["open_groups"] == []
    assert state["ledger"]["generated"] == sum(
        state["ledger"][a] for a in ("trained", "evaluated", "stale", "failed", "held")
    )
    assert state["ledger"]["stale"] == 0, "tokens were made by weights that a resumed rank should not have used"


def test_a_crash_goes_on_from_the_last_checkpoint() -> None:
    config = small_config(steps=4, checkpoint_every=1, max_staleness=1)
    crashed = World(config)
    crashed.play(random.Random(5), until=lambda: len(crashed.reports) == 3)
    save, state = crashed.states[1]
    assert (save.step, save.final) == (2, False)
    world = World(config, saved=state)
    world.play(random.Random(6))
    assert sorted(crashed.trained_groups[: 2 * 2] + world.trained_groups) == list(range(8))


def test_a_state_of_another_format_is_refused() -> None:
    core = Core(small_config(), 2)
    with pytest.raises(UserError, match="format 9, this version reads 2"):
        core.load_state_dict({**core.state_dict(), "format": 9})


def test_an_actor_with_other_weights_than_the_state_is_refused() -> None:
    world = World(small_config(steps=2))
    world.play(random.Random(0))
    resumed = World(small_config(steps=4), saved=world.states[-1][1])
    with pytest.raises(IllegalEvent, match="version 0, the scheduler 2"):
        resumed.tell(ev.RankJoined(Rank(0), Role.ACTOR, WeightVersion(0), 0, 0))


# --- costs ------------------------------------------------------------------------------------------------------------


def num_calls(function: Callable[[], object]) -> int:
    """Python and C calls that `function` makes: a measure of work that no other process disturbs."""
    count = 0

    def profile(frame: FrameType, kind: str, argument: object) -> None:
        nonlocal count
        count += kind in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def calls_per_event(num_tasks: int) -> dict[str, int]:
    """Most calls of one event of each kind, with `num_tasks` tasks playing and as many waiting."""
    num_groups = num_tasks // 4
    config = small_config(steps=50, groups_per_step=num_groups, group_size=4, max_staleness=1)
    config = replace(config, rollout=replace(config.rollout, max_tasks_per_rank=num_tasks))
    world = World(config, kv_tokens=(num_tasks * 25,) * 4, capacity=num_tasks)
    now_s = iter(range(1, 1_000_000))

    def tell(event: ev.Event) -> tuple[ac.Action, ...]:
        # Past the driver, whose own checks scan all tasks.
        return world.core.handle(event, float(next(now_s)))

    tell(ev.EnvironmentCapacity(num_tasks))
    tell(ev.RankJoined(Rank(0), Role.ACTOR, WeightVersion(0), 0, 0))
    for r in range(1, 5):
        tell(ev.RankJoined(Rank(r), Role.ROLLOUT, WeightVersion(0), num_tasks * 25, 1))
    for r in range(5):
        tell(ev.SyncReady(Rank(r), WeightVersion(0)))
    for r in range(5):
        tell(ev.SyncFinished(Rank(r), WeightVersion(0), True, "", 0.0, 0.0, 0.0))
    world.supplies.append(ac.SupplyGroups(TaskKind.TRAIN, 2 * num_groups))
    started = [a for a in tell(world._supply(0)) if isinstance(a, ac.StartTask)]
    assert len(started) == num_tasks
    most: dict[str, int] = {}
    for order in started[:40]:
        task, rank = order.task_id, order.rank
        events: list[ev.Event] = [
            ev.TurnStarted(task, rank, 10),
            ev.TurnEnded(task, rank, 15, 5, 10),
            ev.TaskFinished(task, rank, 15, 5, 1, WeightVersion(0), WeightVersion(0), 1.0, True),
        ]
        if task % 5 == 0:
            events[-1] = ev.TaskFailed(task, rank, FailureKind.ENVIRONMENT, "", False, 5, 0)
        for event in events:
            name = type(event).__name__
            most[name] = max(most.get(name, 0), num_calls(lambda event=event: tell(event)))  # type: ignore[misc]
    return most


def test_the_cost_of_an_event_does_not_grow_with_the_number_of_tasks() -> None:
    """Core 4: ten times the tasks, far less than 1.5 times the calls. Counted, not timed."""
    few, many = calls_per_event(200), calls_per_event(2000)
    assert few.keys() == many.keys() == {"TurnStarted", "TurnEnded", "TaskFinished", "TaskFailed"}
    for name, count in few.items():
        assert many[name] < 1.5 * count + 5, (name, count, many[name])
