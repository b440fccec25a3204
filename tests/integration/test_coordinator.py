"""The live coordinator over real sockets on loopback, with ranks that are coroutines of the same process: no torch, no engine."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.fake_ranks import TIMEOUTS, Run, config_of
from tiderl.coordinator import checkpoints
from tiderl.scheduling import actions as ac
from tiderl.scheduling import events as ev
from tiderl.types import Pipelining
from tiderl.wire import messages as ms


async def test_invariant_1_a_whole_job_is_in_the_journal_and_decides_the_same_again(tmp_path: Path) -> None:
    config = config_of(steps=3, groups_per_step=2, group_size=2, num_actors=2, eval_every=2, checkpoint_every=1)
    run = Run(tmp_path, config, r3="fail first attempts")
    end = await run.to_the_end()
    assert end == ac.Shutdown(0, "all 3 steps are done")
    events, actions = run.replayed()
    assert actions[-1] == end
    steps = [line for line in run.lines() if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [0, 1, 2]
    assert [line["version"] for line in run.lines() if line["kind"] == "eval"] == [0, 2, 3]
    assert [a.metrics["reward"] for a in actions if isinstance(a, ac.ReportStep)] == [line["reward"] for line in steps]
    # What the ranks said is what the core heard, and nothing was lost at the end.
    made = sum(rank.num_generated for rank in run.ranks)
    balances = run.core.book.ledger.balances()
    assert balances["generated"] == made == run.coordinator.engine_generated_tokens
    assert balances["trained"] == 3 * 2 * 2 * 4
    assert balances["evaluated"] == 3 * 2 * 4
    assert sum(isinstance(e, ev.TaskFailed) for e in events) > 0
    assert sum(line.startswith("step ") for line in run.out.getvalue().splitlines()) == 3


async def test_invariant_2_ranks_get_their_orders_in_the_cores_order(tmp_path: Path) -> None:
    run = Run(tmp_path, config_of(steps=2, num_actors=2, checkpoint_every=1))
    await run.to_the_end()
    _, actions = run.replayed()
    for rank in run.ranks:
        told = [a for a in actions if rank.rank in getattr(a, "ranks", ()) or getattr(a, "rank", None) == rank.rank]
        got = [order.action if isinstance(order, ms.MicroBatchMessage) else order for order in rank.orders]
        assert got == [*told, actions[-1]], "everything, once, in order, and the end"
        if rank.is_actor:
            names = [type(o).__name__ for o in rank.orders]
            assert names.index("OpenStep") < names.index("MicroBatchMessage") < names.index("CloseStep")


async def test_checkpoints_are_complete_and_the_newest_are_kept(tmp_path: Path) -> None:
    config = config_of(steps=5, checkpoint_every=1)
    config = replace(config, checkpoint=replace(config.checkpoint, keep=2))
    await Run(tmp_path, config).to_the_end()
    kept = sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir())
    assert kept[-1] == "step_000005" and len(kept) == 2
    state = checkpoints.read_scheduler_state(checkpoints.find_checkpoint(tmp_path))
    assert (state["version"], state["next_step"], state["open_groups"]) == (5, 5, [])


async def test_a_checkpoint_that_lacks_a_part_is_not_marked_complete(tmp_path: Path) -> None:
    run = Run(tmp_path, config_of(steps=2, num_actors=2, checkpoint_every=1), r1="cannot save")
    assert (await run.to_the_end()).exit_code == 0
    assert not (checkpoints.checkpoint_dir(tmp_path, 1) / "COMPLETE").exists()
    assert checkpoints.find_checkpoint(tmp_path).name == "step_000002"
    assert "rank 1 could not save step 1: disk full" in run.out.getvalue()


async def test_invariant_3_a_silent_rank_is_lost_and_the_others_leave(tmp_path: Path) -> None:
    """It is connected, and takes its orders; but it says nothing, not even that it lives."""
    config = config_of(steps=2)
    config = replace(config, timeouts=replace(TIMEOUTS, lost_s=2.0))
    run = Run(tmp_path, config, r2="freeze")
    end = await run.to_the_end()
    assert end.exit_code == 1
    assert end.reason.startswith("rank 2 (rollout) is lost: silent for")
    assert "timeouts.lost_s = 2" in end.reason and "'busy'" in end.reason
    assert any(isinstance(event, ev.RankLost) for event in run.replayed()[0])
    for rank in run.ranks[:2]:
        assert rank.orders[-1] == end and rank.left


async def test_a_rank_that_beats_but_does_not_come_to_the_sync_is_named_at_the_deadline(tmp_path: Path) -> None:
    config = config_of(steps=2)
    config = replace(config, timeouts=replace(TIMEOUTS, sync_s=0.5))
    run = Run(tmp_path, config, r1="hang at PrepareSync")
    end = await run.to_the_end()
    assert end.exit_code == 1
    assert "ranks [1]" in end.reason and "[timeouts]" in end.reason
    # Afterwards ranks only tell how they spent their time.
    assert isinstance([e for e in run.replayed()[0] if not isinstance(e, ev.SecondsSpent)][-1], ev.Tick)


async def test_invariant_4_the_wait_for_a_farewell_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path, config_of(steps=1), r2="no farewell")
    with caplog.at_level(logging.WARNING):
        end = await run.to_the_end()
    assert end.exit_code == 0
    assert run.ranks[2].orders[-1] == end, "it was told, and did not answer"
    assert "ranks [2] did not say farewell within timeouts.shutdown_s" in caplog.text
    assert [rank.left for rank in run.ranks] == [True, True, False]


async def test_a_stop_saves_what_was_done(tmp_path: Path) -> None:
    run = Run(tmp_path, config_of(steps=100_000))
    async with run.coordinating() as coordinator, asyncio.timeout(30):
        ending = asyncio.ensure_future(coordinator.run())
        await run.ranks[0].third_step.wait()
        coordinator.tell(ev.StopRequested("got SIGTERM"))
        end = await ending
    assert end == ac.Shutdown(0, "got SIGTERM")
    assert not run.errors
    run.replayed()
    state = checkpoints.read_scheduler_state(checkpoints.find_checkpoint(tmp_path))
    assert state["version"] >= 2
    trained_groups = state["num_supplied"] - len(state["open_groups"])
    assert trained_groups == state["version"] * run.config.train.groups_per_step


async def test_a_rank_that_fails_says_why_and_whose_fault_it_is(tmp_path: Path) -> None:
    run = Run(tmp_path, config_of(steps=2), r0="run out of memory")
    end = await run.to_the_end()
    assert end == ac.Shutdown(1, "rank 0 (actor) is lost: out of memory; lower trainer.max_micro_batch_tokens")
    assert run.coordinator.user_error
    assert "! rank 0 (actor) is lost: out of memory" in run.out.getvalue()


async def test_a_rank_that_contradicts_the_scheduler_ends_the_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, config_of(steps=2), r1="lie")
    with caplog.at_level(logging.ERROR):
        end = await run.to_the_end()
    assert end.exit_code == 1
    assert "a rank and the scheduler disagree" in end.reason and "4 generated ones were reported before" in end.reason
    run.replayed()


async def test_a_rank_that_cannot_be_understood_is_lost(tmp_path: Path) -> None:
    """Whatever it meant to say, the core would wait for it without end."""
    end = await Run(tmp_path, config_of(steps=1), r1="talk nonsense").to_the_end()
    assert end.exit_code == 1
    assert "rank 1" in end.reason and "'Nonsense' is not a registered message" in end.reason


async def test_ref_ranks_are_sent_what_they_score_and_are_no_members_of_the_sync(tmp_path: Path) -> None:
    run = Run(tmp_path, config_of(steps=2, num_actors=2, num_ref=1, kl_weight=0.1))
    end = await run.to_the_end()
    assert end == ac.Shutdown(0, "all 2 steps are done")
    orders = run.ranks[2].orders
    scored = [order.action.task_ids for order in orders if isinstance(order, ms.ScoreMessage)]
    trained = [o.action.task_ids for rank in run.ranks[:2] for o in rank.orders if isinstance(o, ms.MicroBatchMessage)]
    assert sorted(scored) == sorted(trained)
    assert {type(order).__name__ for order in orders} == {"ScoreMessage", "Shutdown"}
    run.replayed()


async def test_a_job_goes_on_when_a_ref_rank_is_gone(tmp_path: Path) -> None:
    """It dies in the middle of the first step: the actors finish that and all others by themselves, and nobody waits for it."""
    config = config_of(steps=3, num_actors=2, num_ref=1, kl_weight=0.1)
    run = Run(tmp_path, replace(config, timeouts=replace(TIMEOUTS, lost_s=2.0)), r2="die scoring")
    end = await run.to_the_end()
    assert end == ac.Shutdown(0, "all 3 steps are done")
    lost = [event for event in run.replayed()[0] if isinstance(event, ev.RankLost)]
    assert [event.rank for event in lost] == [2]
    assert "Ref rank 2 is lost" in run.out.getvalue()
    ways = [order.pipelining for order in run.ranks[0].orders if isinstance(order, ac.OpenStep)]
    # Fake actors need no log-probs, so that the death may be found out a step later.
    assert (ways[0], ways[-1]) == (Pipelining.DECOUPLED, Pipelining.COLOCATED)
    for actor in run.ranks[:2]:
        assert [o.ranks for o in actor.orders if isinstance(o, ac.FinishColocated)] == [(0, 1)]
