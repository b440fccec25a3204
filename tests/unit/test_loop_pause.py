"""Tasks that are paused and resumed: invariants 5 to 7 of `agent.loop`, rule by example (the whole: test_loop_equivalence.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.loop_fakes import (
    CACHED_TOKENS,
    CONFIG,
    PROMPT,
    STOP_ID,
    FakeEngine,
    FakeSession,
    Player,
    assert_same_record,
    generation,
    stepped,
)
from tiderl.agent import lease
from tiderl.config.schema import RolloutConfig
from tiderl.engines.base import Generation
from tiderl.envs.protocol import Observation, Started, Stepped
from tiderl.errors import EnvironmentFailure
from tiderl.scheduling.events import TaskFailed, TaskFinished, TaskPaused, TurnEnded, TurnStarted
from tiderl.types import FailureKind, Finish, PausedTask, Rank, TaskId, Turn

KEEP = "release task11.2 None"
DISCARD = "release task11.2 19"


async def paused_when(
    player: Player, when: Callable[[], Awaitable[Any]], then: Callable[[], None] = lambda: None
) -> asyncio.Future[Any]:
    """Start to play, pause when `when` has come, and do `then`."""
    playing = asyncio.ensure_future(player.play())
    await when()
    player.player.pause()
    then()
    return playing


# --- paused while it generates ----------------------------------------------------------------------------------------


async def paused_in_second_turn(partial: list[int]) -> tuple[Player, TaskPaused, PausedTask]:
    engine = FakeEngine([([10, STOP_ID], 4), None], partial=(partial, 5))
    player = Player(engine, FakeSession([stepped()]))
    playing = asyncio.ensure_future(player.paused())
    await engine.hangs.wait()
    player.player.pause()
    player.player.pause()  # which is one pause
    return player, *await playing


async def test_a_generation_that_is_cut_keeps_its_tokens() -> None:
    player, event, task = await paused_in_second_turn([20, 21])
    context = 19 + 2 + 2  # the first prompt, an answer, an observation
    assert event == TaskPaused(TaskId(11), Rank(3), context + 2, 4, prefilled_tokens=context - CACHED_TOKENS)
    assert task.token_ids.tolist() == [*PROMPT, 10, STOP_ID, 3, 3, 20, 21]
    assert task.weight_versions.tolist() == [-1] * 19 + [4, 4, -1, -1, 5, 5]
    assert task.log_probs[-2:].tolist() == pytest.approx([-0.20, -0.21], rel=1e-6)
    assert (task.turn_start, task.cached_tokens) == (context, CACHED_TOKENS)
    assert [(turn.start, turn.end) for turn in task.turns] == [(19, 21)]
    assert task.generate_s >= 0 and task.played_s >= task.generate_s
    assert player.engine.log == ["generate", "step", "generate", KEEP, "pause"]
    assert [type(report) for report in player.reports] == [TurnStarted, TurnEnded, TurnStarted]


async def test_a_turn_that_was_cut_goes_on_as_the_same_turn() -> None:
    _, _, task = await paused_in_second_turn([20, 21])
    task = replace(task, generate_s=100.0)
    engine, session = FakeEngine([([22, STOP_ID], 6)]), FakeSession([stepped(), stepped("bye", 1.0, done=True)])
    session.actions = ["10"]  # what the first rank has played
    player = Player(engine, session, paused=task)
    event, trajectory = await player.finished()
    assert player.sessions.asked_for == [] and player.sessions.adopted == [task.session]
    assert engine.prompts == [task.token_ids.tolist()], "token in, token out"
    assert engine.samplings[0].max_new_tokens == 6 - 2, "the cap is the turn's"
    assert session.actions == ["10", "20 21 22"]
    first, second = trajectory.turns
    assert (second.start, second.end, second.cached_tokens) == (23, 27, 2 * CACHED_TOKENS)
    assert 100.0 <= second.generate_s < 200.0
    assert first == task.turns[0]
    assert (event.generated_tokens, event.oldest_version, event.newest_version) == (6, 4, 6)
    assert player.reports == [
        TurnStarted(TaskId(11), Rank(3), 25),
        TurnEnded(TaskId(11), Rank(3), 27, 2, 25 - CACHED_TOKENS),
    ], "what this rank has made and computed"
    assert engine.log == ["resume", "generate", "step", DISCARD, "end"], "siblings share the first 19 ids, no more"


async def test_a_generation_that_ends_before_the_abort_arrives_has_ended_its_turn() -> None:
    class TooLate(FakeEngine):
        def generation(self, ids: list[int], version: int, finish: str) -> Generation:
            return generation([20, STOP_ID], 5, "stop")

    engine = TooLate([None])
    player = Player(engine, FakeSession([stepped()]))
    playing = asyncio.ensure_future(player.paused())
    await engine.hangs.wait()
    player.player.pause()
    event, task = await playing
    assert player.reports[1:] == [TurnEnded(TaskId(11), Rank(3), 21, 2, 19 - CACHED_TOKENS)]
    assert event == TaskPaused(TaskId(11), Rank(3), 23, 2, prefilled_tokens=0)
    assert (task.turn_start, len(task.turns)) == (23, 1), "held before the next turn"
    assert engine.log == ["generate", KEEP, "step", "pause"]


# --- paused while the environment works -------------------------------------------------------------------------------


async def test_a_step_is_waited_for_and_its_observation_recorded() -> None:
    engine, session = FakeEngine([([10, STOP_ID], 4)]), FakeSession([None])
    player = Player(engine, session)
    playing = asyncio.ensure_future(player.paused())
    await session.hangs.wait()
    player.player.pause()
    assert engine.log == ["generate", "step", KEEP], "at once: the environment may take its time"
    session.answer.set()
    event, task = await playing
    assert engine.aborted == []
    assert task.token_ids.tolist() == [*PROMPT, 10, STOP_ID, 3, 3]
    assert (task.turn_start, task.generate_s, task.cached_tokens) == (23, 0.0, 0)
    assert task.turns == (Turn(19, 21, task.turns[0].generate_s, 0.25, CACHED_TOKENS),)
    assert (event.generated_tokens, event.prefilled_tokens) == (2, 0)


@pytest.mark.parametrize(
    ("late", "num_turns_before", "finish"),
    [
        (stepped("bye", 1.0, done=True), 0, Finish.DONE),
        (stepped("x" * 300, 0.5), 0, Finish.MAX_CONTEXT),
        (stepped("x", 0.5), 3, Finish.MAX_TURNS),
    ],
)
async def test_a_step_that_ends_the_episode_finishes_the_task(
    late: Stepped, num_turns_before: int, finish: Finish
) -> None:
    engine = FakeEngine([([10, STOP_ID], 4)] * (num_turns_before + 1))
    session = FakeSession([*[stepped("x")] * num_turns_before, None])
    session.late = late
    player = Player(engine, session)
    playing = asyncio.ensure_future(player.finished())
    await session.hangs.wait()
    player.player.pause()
    session.answer.set()
    event, trajectory = await playing
    assert (trajectory.finish, event.reward) == (finish, late.reward)
    assert "pause" not in engine.log


async def test_paused_before_the_first_turn() -> None:
    engine = FakeEngine([])
    player = Player(engine, None)
    player.sessions.late = FakeSession([], log=engine.log)
    playing = asyncio.ensure_future(player.paused())
    await asyncio.sleep(0)
    player.player.pause()
    player.sessions.answer.set()
    event, task = await playing
    assert event == TaskPaused(TaskId(11), Rank(3), 19, 0, 0)
    assert task.token_ids.tolist() == PROMPT and not task.generated.any()
    assert (task.turn_start, task.turns) == (19, ())
    assert engine.log == ["pause"] and player.reports == []


async def test_a_first_prompt_that_never_fits_is_no_task_to_hold() -> None:
    session = FakeSession([], started=Started("do it", Observation("y" * 45), "type"))
    player = Player(FakeEngine([]), session)
    player.player.pause()
    assert (await player.failed()).kind is FailureKind.NEVER_FITS
    assert player.engine.log == ["end"]


async def test_paused_again_before_it_has_gone_on() -> None:
    _, first, task = await paused_in_second_turn([20, 21])
    player = Player(FakeEngine([]), FakeSession([]), paused=task)
    player.session.actions = ["10"]  # type: ignore[union-attr]
    player.player.pause()
    event, again = await player.paused()
    assert event == replace(first, prefilled_tokens=0), "nothing was computed since"
    assert player.engine.log == ["resume", "pause"]
    assert_same_record(again, task)
    assert (again.turn_start, again.cached_tokens) == (task.turn_start, task.cached_tokens)


async def test_a_pause_after_the_end_is_decided_does_nothing() -> None:
    class SlowEnd(FakeSession):
        async def end(self) -> None:
            self.hangs.set()
            await self.answer.wait()
            await super().end()

    session = SlowEnd([stepped(done=True)])
    player = Player(FakeEngine([([10], 0)]), session)
    playing = asyncio.ensure_future(player.finished())
    await session.hangs.wait()
    player.player.pause()
    session.answer.set()
    await playing
    assert player.engine.log == ["generate", "step", DISCARD, "end"] and player.engine.aborted == []


async def test_wherever_the_pause_comes_there_is_one_outcome() -> None:
    """Whichever is first: one outcome, one end or one pause of the session, and every token in it."""
    kinds = set()
    for num_yields in range(24):
        session = FakeSession([stepped(), stepped(done=True)])
        player = Player(FakeEngine([([10], 0), ([11], 0)]), session)
        playing = asyncio.ensure_future(player.play())
        for _ in range(num_yields):
            await asyncio.sleep(0)
        player.player.pause()
        event, _ = await playing
        kinds.add(type(event))
        assert event.generated_tokens == sum(e.generated_tokens for e in player.turns_ended())
        assert (session.num_ends, session.log.count("pause")) == ((1, 0) if isinstance(event, TaskFinished) else (0, 1))
    assert kinds == {TaskFinished, TaskPaused}


# --- what ends a task that is being paused or resumed -----------------------------------------------------------------


async def test_a_cancellation_wins_over_a_pause_while_it_generates() -> None:
    engine = FakeEngine([None], partial=([20, 21], 5))
    player = Player(engine, FakeSession([]))
    failure = await (await paused_when(player, engine.hangs.wait, player.player.cancel))
    assert failure == TaskFailed(
        TaskId(11), Rank(3), FailureKind.CANCELLED, failure.detail, False, 2, 19 - CACHED_TOKENS
    )
    assert engine.log == ["generate", DISCARD, "end"]


async def test_a_cancellation_wins_over_a_pause_that_is_under_way() -> None:
    """At every point between the pause and the outcome."""
    outcomes = []
    for num_yields in range(8):
        engine = FakeEngine([None], partial=([20, 21], 5))
        player = Player(engine, FakeSession([]))
        playing = await paused_when(player, engine.hangs.wait)
        for _ in range(num_yields):
            await asyncio.sleep(0)
        player.player.cancel()
        outcome = await playing
        outcomes.append(type(outcome) is TaskFailed)
        assert player.session.num_ends == int(outcomes[-1])  # type: ignore[union-attr]
    assert outcomes[0] and not outcomes[-1] and outcomes == sorted(outcomes, reverse=True)


async def test_a_cancellation_wins_over_a_pause_that_is_answered_at_the_same_moment() -> None:
    class CancelledMeanwhile(FakeSession):
        async def pause(self) -> None:
            self.log.append("pause")
            player.player.cancel()

    player = Player(FakeEngine([]), CancelledMeanwhile([]))
    player.player.pause()
    assert (await player.failed()).kind is FailureKind.CANCELLED
    assert player.engine.log == ["pause", "end"]


async def test_the_time_may_be_up_while_the_session_is_being_paused() -> None:
    class SlowPause(FakeSession):
        async def pause(self) -> None:
            self.log.append("pause")
            await asyncio.Event().wait()

    config = replace(CONFIG, rollout=RolloutConfig(task_timeout_s=0.05))
    player = Player(FakeEngine([]), SlowPause([]), config=config)
    player.player.pause()
    failure = await player.failed()
    assert (failure.kind, failure.retryable) == (FailureKind.TIMEOUT, True)
    assert player.engine.log == ["pause", "end"]


@pytest.mark.parametrize("retryable", [True, False])
async def test_a_session_that_cannot_be_paused_is_a_failed_environment(retryable: bool) -> None:
    engine = FakeEngine([None], partial=([20, 21], 5))
    session = FakeSession([], errors={"pause": EnvironmentFailure("no such session", retryable=retryable)})
    player = Player(engine, session)
    failure = await (await paused_when(player, engine.hangs.wait))
    expected = (FailureKind.ENVIRONMENT, "no such session", retryable, 2, 19 - CACHED_TOKENS)
    assert failure == TaskFailed(TaskId(11), Rank(3), *expected)
    assert engine.log == ["generate", KEEP, "pause", "end"]


async def test_a_session_that_cannot_be_resumed_is_a_failed_environment() -> None:
    _, _, task = await paused_in_second_turn([20, 21])
    session = FakeSession([], errors={"resume": EnvironmentFailure("no such session", retryable=True)})
    player = Player(FakeEngine([]), session, paused=task)
    failure = await player.failed()
    assert failure == TaskFailed(TaskId(11), Rank(3), FailureKind.ENVIRONMENT, "no such session", True, 4, 0)
    assert player.engine.log == ["resume", "end"]


async def test_a_session_that_cannot_be_adopted_is_a_failed_environment() -> None:
    _, _, task = await paused_in_second_turn([20, 21])
    player = Player(FakeEngine([]), EnvironmentFailure("unknown server", retryable=True), paused=task)
    failure = await player.failed()
    assert failure == TaskFailed(TaskId(11), Rank(3), FailureKind.ENVIRONMENT, "unknown server", True, 4, 0)


async def test_the_time_that_was_played_before_the_pause_counts() -> None:
    _, _, task = await paused_in_second_turn([20, 21])
    config = replace(CONFIG, rollout=RolloutConfig(task_timeout_s=1000.0))
    engine = FakeEngine([None], partial=([22], 6))
    player = Player(engine, FakeSession([]), config=config, paused=replace(task, played_s=999.98))
    failure = await player.failed()
    assert (failure.kind, failure.generated_tokens) == (FailureKind.TIMEOUT, 5)
    assert failure.prefilled_tokens == 25 - CACHED_TOKENS
    assert engine.aborted == ["task11.2"]


async def test_the_time_that_was_played_adds_up_over_pauses() -> None:
    _, _, task = await paused_in_second_turn([20, 21])
    player = Player(FakeEngine([]), FakeSession([]), paused=replace(task, played_s=7.0))
    player.session.actions = ["10"]  # type: ignore[union-attr]
    player.player.pause()
    _, again = await player.paused()
    assert 7.0 < again.played_s < 7.0 + 20.0, "20 s is the bound of this test"


async def test_in_fixed_mode_nothing_is_held_and_nothing_released() -> None:
    engine = FakeEngine([None], partial=([20, 21], 5))
    config = replace(CONFIG, rollout=RolloutConfig(scheduler="fixed"))
    player = Player(engine, FakeSession([]), config=config)
    playing = await paused_when(player, engine.hangs.wait)
    await playing
    assert engine.log == ["generate", "pause"]


# --- signs of life ----------------------------------------------------------------------------------------------------


@pytest.fixture
def hasty_lease(monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(lease, "MIN_INTERVAL_S", 0.001)
    return 0.006


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(20_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come true in 20 s")


@pytest.mark.parametrize("errors", [{}, {"resume": EnvironmentFailure("busy", retryable=True)}])
async def test_invariant_7_a_session_hears_of_its_task_while_the_engine_is_busy(
    hasty_lease: float, errors: dict[str, EnvironmentFailure], caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it answers or not: the next step will tell."""

    class Patient(FakeEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Generation:
            await until(lambda: self.log.count("resume") >= 3)
            return await super().generate(*args, **kwargs)

    engine = Patient([([10, STOP_ID], 0)])
    session = FakeSession([stepped(done=True)], lease_s=hasty_lease, errors=errors)
    await Player(engine, session).finished()
    assert engine.log[-3:] == ["step", DISCARD, "end"]
    assert "a sign of life failed: busy" in caplog.text if errors else caplog.text == ""


async def test_invariant_7_a_sign_on_its_way_is_waited_for_before_anything_else_is_asked(hasty_lease: float) -> None:
    """`FakeSession` allows one request at a time; this sign is answered only when the engine has been."""

    class SlowSign(FakeSession):
        async def resume(self) -> None:
            self.log.append("sign begins")
            await answered.wait()
            await asyncio.sleep(0.001)
            self.log.append("sign ends")

    class Patient(FakeEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Generation:
            await until(lambda: "sign begins" in self.log)
            answered.set()
            return await super().generate(*args, **kwargs)

    answered = asyncio.Event()
    engine = Patient([([10, STOP_ID], 0)])
    await Player(engine, SlowSign([stepped(done=True)], lease_s=60.0 * hasty_lease)).finished()
    assert engine.log.index("sign ends") < engine.log.index("step")


async def test_invariant_7_a_server_that_never_answers_a_sign_is_not_waited_for_long(
    hasty_lease: float, caplog: pytest.LogCaptureFixture
) -> None:
    class Deaf(FakeSession):
        async def resume(self) -> None:
            self.log.append("sign begins")
            await asyncio.Event().wait()

    class Patient(FakeEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Generation:
            await until(lambda: "sign begins" in self.log)
            return await super().generate(*args, **kwargs)

    await Player(Patient([([10, STOP_ID], 0)]), Deaf([stepped(done=True)], lease_s=hasty_lease)).finished()
    assert "session s1 on http://env: no answer in 0.002 s to a sign of life" in caplog.text
