"""The turn loop against scripted engines, sessions and chats: the invariants of `agent.loop`; pauses are in test_loop_pause.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.unit.loop_fakes import CONFIG, PROMPT, STOP_ID, FakeEngine, FakeSession, Player, stepped
from tiderl.config.schema import RolloutConfig, TimeoutsConfig
from tiderl.engines.base import Sampling
from tiderl.envs.protocol import Observation, Started
from tiderl.errors import EngineError, EnvironmentFailure
from tiderl.scheduling.events import TaskFailed, TaskFinished, TurnEnded, TurnStarted
from tiderl.types import FailureKind, Finish, Rank, TaskId, TaskKind, Turn, WeightVersion

# --- a whole episode --------------------------------------------------------------------------------------------------


async def test_invariant_1_and_2_two_turns_by_hand() -> None:
    engine = FakeEngine([([10, 11, STOP_ID], 4), ([12, 13], 5)])
    session = FakeSession([stepped("hm", 0.25), stepped("bye", 1.0, done=True, success=True)])
    player = Player(engine, session)
    event, trajectory = await player.finished()
    assert player.sessions.asked_for == [("train", 77)]
    assert session.actions == ["10 11", "12 13"]
    ids = [*PROMPT, 10, 11, STOP_ID, 3, 3, 12, 13]
    assert trajectory.token_ids.tolist() == ids
    assert engine.prompts == [PROMPT, ids[:24]], "token in, token out: a prompt is what was recorded, and nothing else"
    generated = [False] * 19 + [True] * 3 + [False] * 2 + [True] * 2
    assert trajectory.generated.tolist() == generated
    assert trajectory.weight_versions.tolist() == [-1] * 19 + [4] * 3 + [-1] * 2 + [5] * 2
    expected = [-token / 100 if made else 0.0 for token, made in zip(ids, generated, strict=True)]
    assert trajectory.log_probs.tolist() == pytest.approx(expected, rel=1e-6)
    assert [(t.start, t.end, t.env_s, t.cached_tokens) for t in trajectory.turns] == [
        (19, 22, 0.25, 7),
        (24, 26, 0.5, 7),
    ]
    assert all(isinstance(t, Turn) and t.generate_s >= 0 for t in trajectory.turns)
    assert event == TaskFinished(TaskId(11), Rank(3), 26, 5, 2, WeightVersion(4), WeightVersion(5), 1.0, True)
    assert (trajectory.finish, trajectory.kind, trajectory.group_id, trajectory.task_id) == (
        Finish.DONE,
        TaskKind.TRAIN,
        5,
        11,
    )
    assert player.reports == [
        TurnStarted(TaskId(11), Rank(3), 19),
        TurnEnded(TaskId(11), Rank(3), 22, 3, 19 - 7),
        TurnStarted(TaskId(11), Rank(3), 24),
        TurnEnded(TaskId(11), Rank(3), 26, 2, 24 - 7),
    ]


@pytest.mark.parametrize(("scheduler", "holds"), [("ctb", True), ("fixed", False)])
async def test_only_ctb_holds_blocks_between_turns(scheduler: Any, holds: bool) -> None:
    engine = FakeEngine([([10, STOP_ID], 0), ([11, STOP_ID], 0)])
    config = replace(CONFIG, rollout=RolloutConfig(scheduler=scheduler))
    await Player(engine, FakeSession([stepped(), stepped(done=True)]), config=config).finished()
    assert engine.holds == [holds] * 2
    steps = ["generate", "step", "generate", "step"]
    assert engine.log == [*steps, *(["release task11.2 19"] if holds else []), "end"], "siblings share the 19 ids"


async def test_invariant_6_after_the_last_possible_turn_nothing_is_held_for_the_environment() -> None:
    """By the number of turns, and by a context that is full."""
    engine = FakeEngine([([10, STOP_ID], 0)] * 4)
    await Player(engine, FakeSession([stepped("x")] * 4)).finished()
    assert engine.log[-4:] == ["generate", "release task11.2 19", "step", "end"]
    engine = FakeEngine([([10, STOP_ID], 0), ([11], 0)])
    await Player(engine, FakeSession([stepped("x" * 28), stepped()])).finished()
    assert engine.log[-4:] == ["generate", "release task11.2 19", "step", "end"]


async def test_versions_may_change_within_a_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine([([10, 11, STOP_ID], 4)])
    plain = engine.generation
    mixed = np.array([6, 7, 7])
    monkeypatch.setattr(engine, "generation", lambda *answer: replace(plain(*answer), weight_versions=mixed))
    event, trajectory = await Player(engine, FakeSession([stepped(done=True)])).finished()
    assert trajectory.weight_versions[-3:].tolist() == [6, 7, 7]
    assert (event.oldest_version, event.newest_version) == (6, 7)


@pytest.mark.parametrize(("kind", "temperature"), [(TaskKind.TRAIN, 0.7), (TaskKind.EVAL, 0.1)])
async def test_training_and_evaluation_sample_at_their_own_temperature(kind: TaskKind, temperature: float) -> None:
    engine = FakeEngine([([10, STOP_ID], 0)])
    _, trajectory = await Player(engine, FakeSession([stepped(done=True)]), kind=kind).finished()
    assert engine.samplings == [Sampling(temperature, 6, (STOP_ID,))]
    assert trajectory.kind is kind


# --- ends -------------------------------------------------------------------------------------------------------------


async def test_an_episode_is_cut_after_max_turns_with_the_reward_it_has() -> None:
    engine = FakeEngine([([10, STOP_ID], 0)] * 4)
    session = FakeSession([stepped("x", 0.1), stepped("x", 0.2), stepped("x", 0.3), stepped("x", 0.4, success=True)])
    event, trajectory = await Player(engine, session).finished()
    assert (trajectory.finish, event.num_turns, event.reward, event.success) == (Finish.MAX_TURNS, 4, 0.4, True)
    assert trajectory.token_ids[-1] == STOP_ID, "no observation behind the last action"


@pytest.mark.parametrize(("observation", "num_turns"), [("x" * 29, 1), ("x" * 28, 2), ("x" * 300, 1)])
async def test_invariant_4_an_observation_that_leaves_no_room_ends_the_episode(
    observation: str, num_turns: int
) -> None:
    """19 ids of prompt and 2 generated ones leave 29 of 50: an observation of 29 fills them, and nothing could be said to it."""
    engine = FakeEngine([([10, STOP_ID], 0), ([11], 0)])
    session = FakeSession([stepped(observation, 0.5), stepped("!", 0.75)])
    event, trajectory = await Player(engine, session).finished()
    assert (trajectory.finish, event.num_turns) == (Finish.MAX_CONTEXT, num_turns)
    assert event.reward == (0.5 if num_turns == 1 else 0.75), "the reward that it has counts"
    assert event.context_tokens == (21 if num_turns == 1 else 50)
    assert trajectory.generated[-1], "what ends a trajectory is something that the model said"


async def test_a_first_prompt_that_leaves_no_room_is_a_failure_that_says_what_to_do() -> None:
    session = FakeSession([])
    session.started = Started("do it", Observation("y" * 45), "type")
    player = Player(FakeEngine([]), session)
    failure = await player.failed()
    assert (failure.kind, failure.retryable, failure.generated_tokens) == (FailureKind.NEVER_FITS, False, 0)
    assert "seed 77 has 50 tokens, model.max_context_tokens is 50: raise it" in failure.detail
    assert session.num_ends == 1 and player.reports == []


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("retryable", [True, False])
async def test_invariant_3_an_environment_that_fails_in_a_step(retryable: bool) -> None:
    engine = FakeEngine([([10, 11, STOP_ID], 0), ([12, 13], 0)])
    session = FakeSession([stepped(), EnvironmentFailure("server gone", retryable=retryable)])
    player = Player(engine, session)
    failure = await player.failed()
    assert failure == TaskFailed(TaskId(11), Rank(3), FailureKind.ENVIRONMENT, "server gone", retryable, 5, 0)
    assert session.num_ends == 1
    assert sum(e.generated_tokens for e in player.turns_ended()) == 5


async def test_an_environment_that_does_not_start() -> None:
    player = Player(FakeEngine([]), EnvironmentFailure("no place", retryable=True))
    failure = await player.failed()
    assert (failure.kind, failure.detail, failure.retryable, failure.generated_tokens) == (
        FailureKind.ENVIRONMENT,
        "no place",
        True,
        0,
    )


SHORT = replace(CONFIG, rollout=RolloutConfig(task_timeout_s=0.05))


async def test_invariant_3_a_task_whose_time_is_up_while_the_environment_works() -> None:
    session = FakeSession([stepped(), None])
    failure = await Player(FakeEngine([([10, STOP_ID], 0)] * 2), session, config=SHORT).failed()
    assert (failure.kind, failure.retryable, failure.generated_tokens) == (FailureKind.TIMEOUT, True, 4)
    assert "0.05 s" in failure.detail and "rollout.task_timeout_s" in failure.detail and "environment" in failure.detail
    assert session.num_ends == 1


async def test_invariant_3_a_task_whose_time_is_up_while_it_generates_counts_what_the_engine_made() -> None:
    engine = FakeEngine([([10, STOP_ID], 0), None], partial=([20, 21, 22], 0))
    session = FakeSession([stepped()])
    failure = await Player(engine, session, config=SHORT).failed()
    assert (failure.kind, failure.retryable, failure.generated_tokens) == (FailureKind.TIMEOUT, True, 5)
    assert engine.aborted == ["task11.2"]
    assert failure.prefilled_tokens == (19 + 2 + 2) - 7, "what the turn computed that has not been reported"
    assert session.num_ends == 1


async def test_an_engine_that_heeds_no_abort_ends_the_rank_instead_of_being_waited_for() -> None:
    class Deaf(FakeEngine):
        def abort(self, request_id: str) -> None:
            self.aborted.append(request_id)

    config = replace(SHORT, timeouts=TimeoutsConfig(sync_s=0.05))
    engine, session = Deaf([None]), FakeSession([])
    with pytest.raises(EngineError, match=r"0\.1 s .bound: rollout\.task_timeout_s \+ timeouts\.sync_s"):
        await Player(engine, session, config=config).failed()
    assert engine.aborted == ["task11.2"]
    assert session.num_ends == 1


async def test_a_task_whose_time_is_up_while_it_starts() -> None:
    failure = await Player(FakeEngine([]), None, config=SHORT).failed()
    assert (failure.kind, failure.retryable, failure.generated_tokens) == (FailureKind.TIMEOUT, True, 0)


async def test_a_finished_task_is_not_lost_because_its_session_ends_slowly() -> None:
    class SlowEnd(FakeSession):
        async def end(self) -> None:
            await asyncio.sleep(0.1)
            self.num_ends += 1

    event, _ = await Player(FakeEngine([([10], 0)]), SlowEnd([stepped(done=True)]), config=SHORT).finished()
    assert event.num_turns == 1


# --- cancelling -------------------------------------------------------------------------------------------------------


async def cancelled(player: Player, when: Callable[[], Any]) -> TaskFailed:
    playing = asyncio.ensure_future(player.failed())
    await when()
    player.player.cancel()
    return await playing


async def test_invariant_3_cancelled_while_it_generates() -> None:
    engine = FakeEngine([([10, STOP_ID], 0), None], partial=([20, 21, 22], 0))
    session = FakeSession([stepped()])
    player = Player(engine, session)
    failure = await cancelled(player, engine.hangs.wait)
    assert (failure.kind, failure.retryable, failure.generated_tokens) == (FailureKind.CANCELLED, False, 5)
    assert session.num_ends == 1
    assert [type(r) for r in player.reports] == [TurnStarted, TurnEnded, TurnStarted], (
        "an aborted turn is told by its failure"
    )


async def test_invariant_3_cancelled_while_the_environment_works() -> None:
    engine = FakeEngine([([10, 11], 0)])
    session = FakeSession([None])
    failure = await cancelled(Player(engine, session), session.hangs.wait)
    assert (failure.kind, failure.generated_tokens) == (FailureKind.CANCELLED, 2)
    assert session.num_ends == 1


@pytest.mark.parametrize("session", [None, FakeSession([])])
async def test_cancelled_before_the_session_is_there(session: FakeSession | None) -> None:
    failure = await cancelled(Player(FakeEngine([([10], 0)]), session), lambda: asyncio.sleep(0))
    assert (failure.kind, failure.generated_tokens) == (FailureKind.CANCELLED, 0)


async def test_cancelled_when_the_task_ends_at_the_same_moment() -> None:
    """Whichever is first, there is one outcome and one end of the session."""
    for num_yields in range(12):
        session = FakeSession([stepped(), stepped(done=True)])
        player = Player(FakeEngine([([10], 0), ([11], 0)]), session)
        playing = asyncio.ensure_future(player.play())
        for _ in range(num_yields):
            await asyncio.sleep(0)
        player.player.cancel()
        outcome = await playing
        made = sum(e.generated_tokens for e in player.turns_ended())
        event = outcome if isinstance(outcome, TaskFailed) else outcome[0]
        assert event.generated_tokens == made
        assert session.num_ends == (1 if player.reports else session.num_ends)


async def test_the_first_reason_to_stop_is_the_one_that_is_told() -> None:
    engine = FakeEngine([None], partial=([20], 0))
    player = Player(engine, FakeSession([]), config=replace(CONFIG, rollout=RolloutConfig(task_timeout_s=0.01)))
    playing = asyncio.ensure_future(player.failed())
    await engine.hangs.wait()
    player.player.cancel()
    await asyncio.sleep(0.02)
    assert (await playing).kind is FailureKind.CANCELLED
