"""Invariant 5 of `agent.loop` as a property: however often a task is paused and resumed, it is played like one that is not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.loop_fakes import CONFIG, PROMPT, STOP_ID, FakeChat, assert_same_record, generation, order_of, stepped
from tiderl.agent.loop import TaskPlayer
from tiderl.clock import JobClock
from tiderl.engines.base import Generation, Sampling
from tiderl.envs.protocol import Observation, Started, Stepped
from tiderl.scheduling.events import TaskFailed, TaskPaused, TurnEnded, TurnStarted
from tiderl.types import PausedTask, SessionHandle, Trajectory


@dataclass(frozen=True)
class ScriptedTurn:
    """What the model says and the environment answers, and how often and where the task is paused meanwhile."""

    ids: list[int]
    observation: str
    #: The n-th call of the engine for this turn is cut after so many ids; further calls are not.
    cuts: list[int]
    pause_in_step: bool


@dataclass
class World:
    """One engine and one session that follow a script whichever player asks, and pause the one that plays."""

    turns: list[ScriptedTurn]
    #: Whether the n-th start or resume is paused: before it is asked for, while it works.
    opening_pauses: list[tuple[bool, bool]]
    player: TaskPlayer | None = None
    turn: int = 0
    num_made: int = 0
    num_calls: int = 0
    prefilled_tokens: int = 0
    is_paused: bool = False
    num_ends: int = 0
    held: bool = False
    started: Started | None = field(default_factory=lambda: Started("do it", Observation("you see a door"), "type"))
    last_env_s: float = 0.0

    def __post_init__(self) -> None:
        self._made_of_turn = 0
        self._cuts = [list(turn.cuts) for turn in self.turns]
        self._openings = list(self.opening_pauses)
        self._aborted = False

    def pause_player(self) -> None:
        assert self.player is not None
        self.player.pause()

    # the engine

    async def generate(self, request_id: str, prompt: Sequence[int], sampling: Sampling, *, hold: bool) -> Generation:
        assert hold and not self.is_paused
        script, done = self.turns[self.turn], self._made_of_turn
        assert list(prompt)[len(prompt) - done :] == script.ids[:done], "what was made of the turn is in the prompt"
        assert sampling.max_new_tokens == CONFIG.agent.max_new_tokens - done
        self.held, self._aborted = True, False
        self.num_calls += 1
        cached = min(len(prompt), 3 * self.num_calls)
        self.prefilled_tokens += len(prompt) - cached
        await asyncio.sleep(0)
        end = len(script.ids)
        if self._cuts[self.turn]:
            self.pause_player()
            end = min(end, done + self._cuts[self.turn].pop(0))
        made = script.ids[done:end]
        self.num_made += len(made)
        self._made_of_turn = end
        finish = "aborted" if end < len(script.ids) else "stop" if made[-1] == STOP_ID else "length"
        assert self._aborted or finish != "aborted"
        versions = np.array([token % 5 for token in made], np.int32)
        return replace(generation(made, 0, finish), weight_versions=versions, cached_tokens=cached)

    def abort(self, request_id: str) -> None:
        self._aborted = True

    def release(self, request_id: str, *, discard_from: int | None = None) -> None:
        assert self.held and discard_from in (None, len(PROMPT))
        self.held = False

    # the session

    async def start(self, split: str, seed: int) -> World:
        await self._opening()
        return self

    def adopt(self, handle: SessionHandle) -> World:
        assert handle == self.handle
        self.started = None
        return self

    @property
    def handle(self) -> SessionHandle:
        return SessionHandle("http://env", "s1", self.turn, 300.0, 3600.0)

    async def resume(self) -> None:
        assert self.is_paused
        self.is_paused = False
        await self._opening()

    async def pause(self) -> None:
        assert not self.is_paused and not self.held
        self.is_paused = True

    async def step(self, action: str) -> Stepped:
        assert not self.is_paused and not self.num_ends
        script = self.turns[self.turn]
        assert action == " ".join(str(token) for token in script.ids if token != STOP_ID)
        await asyncio.sleep(0)
        if script.pause_in_step:
            self.pause_player()
        self.turn += 1
        self._made_of_turn = 0
        self.last_env_s = 0.5 * self.turn
        done = self.turn == len(self.turns)
        return stepped(script.observation, self.turn / 8, done=done, success=done)

    async def end(self) -> None:
        self.num_ends += 1

    async def _opening(self) -> None:
        await asyncio.sleep(0)
        if self._openings and self._openings.pop(0)[1]:
            self.pause_player()

    # the task

    async def play(self) -> tuple[Trajectory, list[PausedTask], list[TurnStarted | TurnEnded | TaskPaused]]:
        """Play to the end, resuming whenever the task was paused; checks what is reported on the way."""
        pauses: list[PausedTask] = []
        events: list[TurnStarted | TurnEnded | TaskPaused] = []
        while True:
            order = order_of(rank=len(pauses))
            task = pauses[-1] if pauses else None
            self.player = TaskPlayer(order, CONFIG, self, self, FakeChat(), events.append, JobClock(), task)  # type: ignore[arg-type]
            if self._openings and self._openings[0][0]:
                self.pause_player()
            outcome = await self.player.play()
            assert not isinstance(outcome, TaskFailed), outcome
            event, record = outcome
            assert not self.held, "a task that has left holds nothing"
            assert event.generated_tokens == self.num_made
            if isinstance(record, Trajectory):
                return record, pauses, events
            assert isinstance(event, TaskPaused) and self.is_paused and not self.num_ends
            events.append(event)
            pauses.append(record)


turns = st.builds(
    ScriptedTurn,
    ids=st.lists(st.integers(10, 20), min_size=1, max_size=5).flatmap(
        lambda ids: st.sampled_from([ids, [*ids, STOP_ID]])
    ),
    observation=st.text("x", min_size=1, max_size=8),
    cuts=st.lists(st.integers(0, 6), max_size=3),
    pause_in_step=st.booleans(),
)
worlds = st.builds(
    World,
    turns=st.lists(turns, min_size=1, max_size=5),
    opening_pauses=st.lists(st.tuples(st.booleans(), st.booleans()), max_size=6),
)


@given(worlds)
def test_invariant_5_a_task_that_is_paused_and_resumed_is_played_like_one_that_is_not(world: World) -> None:
    calm = World([replace(turn, cuts=[], pause_in_step=False) for turn in world.turns], [])
    expected, no_pauses, _ = asyncio.run(calm.play())
    assert no_pauses == []
    trajectory, pauses, events = asyncio.run(world.play())
    assert_same_record(trajectory, expected)
    assert (trajectory.reward, trajectory.success, trajectory.finish) == (
        expected.reward,
        expected.success,
        expected.finish,
    )
    assert world.num_ends == 1
    for pause in pauses:
        size = len(pause.token_ids)
        np.testing.assert_array_equal(pause.token_ids, expected.token_ids[:size])

    generated_tokens = prefilled_tokens = 0
    for event in events:
        if isinstance(event, TurnEnded):
            generated_tokens += event.generated_tokens
            prefilled_tokens += event.prefilled_tokens
        elif isinstance(event, TaskPaused):
            assert event.generated_tokens >= generated_tokens
            generated_tokens = event.generated_tokens
            prefilled_tokens += event.prefilled_tokens
    assert generated_tokens == trajectory.num_generated == world.num_made
    assert prefilled_tokens == world.prefilled_tokens
    assert sum(isinstance(event, TurnStarted) for event in events) == world.num_calls
    assert sum(turn.cached_tokens for turn in trajectory.turns) == sum(
        event.context_tokens for event in events if isinstance(event, TurnStarted)
    ) - sum(event.prefilled_tokens for event in events if not isinstance(event, TurnStarted))
