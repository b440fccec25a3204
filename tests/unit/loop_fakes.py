"""An engine, a session and a chat that follow a script, and a `TaskPlayer` among them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tiderl.agent.loop import TaskPlayer
from tiderl.clock import JobClock
from tiderl.config.schema import AgentConfig, Config, EvalConfig, ModelConfig, RolloutConfig
from tiderl.engines.base import Generation, Sampling
from tiderl.envs.protocol import Observation, Started, Stepped
from tiderl.errors import EnvironmentFailure
from tiderl.scheduling.actions import StartTask
from tiderl.scheduling.events import TaskFailed, TaskFinished, TaskPaused, TurnEnded, TurnStarted
from tiderl.types import GroupId, GroupSpec, PausedTask, Rank, SessionHandle, TaskId, TaskKind, Trajectory

CONFIG = Config(
    model=ModelConfig(max_context_tokens=50),
    agent=AgentConfig(max_turns=4, max_new_tokens=6, temperature=0.7),
    rollout=RolloutConfig(task_timeout_s=30.0),
    eval=EvalConfig(temperature=0.1),
)
STOP_ID = 99
#: What a fake engine finds in its prefix cache, always.
CACHED_TOKENS = 7
#: "do it" and "you see a door".
PROMPT = [1] * 5 + [2] * 14


def generation(ids: Sequence[int], version: int, finish: str) -> Generation:
    log_probs = np.array([-token / 100 for token in ids], np.float32)
    return Generation(np.array(ids, np.int32), log_probs, np.full(len(ids), version, np.int32), CACHED_TOKENS, finish)


@dataclass
class FakeEngine:
    """Answers the n-th request with the n-th script: ids under a version. `None` hangs until it is aborted or cancelled."""

    script: list[tuple[list[int], int] | None]
    #: Made by a hanging request until it is aborted.
    partial: tuple[list[int], int] = ((), 0)  # type: ignore[assignment]
    prompts: list[list[int]] = field(default_factory=list)
    samplings: list[Sampling] = field(default_factory=list)
    holds: list[bool] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    num_thrown_away: int = 0
    #: What engine and session were asked, in order.
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._abort = asyncio.Event()
        self.hangs = asyncio.Event()

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], sampling: Sampling, *, hold: bool = False
    ) -> Generation:
        self.log.append("generate")
        self.prompts.append(list(prompt_token_ids))
        self.samplings.append(sampling)
        self.holds.append(hold)
        answer = self.script[len(self.prompts) - 1]
        await asyncio.sleep(0)
        if answer is not None:
            return self.generation(*answer, "stop" if answer[0][-1] == STOP_ID else "length")
        self.hangs.set()
        try:
            await self._abort.wait()
        except asyncio.CancelledError:
            self.num_thrown_away += 1
            raise
        return self.generation(*self.partial, "aborted")

    def generation(self, ids: list[int], version: int, finish: str) -> Generation:
        return generation(ids, version, finish)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self._abort.set()

    def release(self, request_id: str, *, discard_from: int | None = None) -> None:
        self.log.append(f"release {request_id} {discard_from}")


@dataclass
class FakeSession:
    """Answers the n-th action with the n-th script: a `Stepped`, an error, or `None` to hang until `answer` is set."""

    script: list[Stepped | EnvironmentFailure | None]
    started: Started | None = field(default_factory=lambda: Started("do it", Observation("you see a door"), "type"))
    last_env_s: float = 0.0
    lease_s: float = 300.0
    #: Raised by the call of that name.
    errors: dict[str, EnvironmentFailure] = field(default_factory=dict)
    actions: list[str] = field(default_factory=list)
    num_ends: int = 0
    num_resumes: int = 0
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hangs = asyncio.Event()
        self.answer = asyncio.Event()
        self.late: Stepped = stepped()
        self._busy = False

    @property
    def handle(self) -> SessionHandle:
        return SessionHandle("http://env", "s1", len(self.actions), self.lease_s, 3600.0)

    async def step(self, action: str) -> Stepped:
        self.actions.append(action)
        await self._called("step")
        self.last_env_s = 0.25 * len(self.actions)
        answer = self.script[len(self.actions) - 1]
        if answer is None:
            self.hangs.set()
            await self.answer.wait()
            return self.late
        if isinstance(answer, EnvironmentFailure):
            raise answer
        return answer

    async def pause(self) -> None:
        await self._called("pause")

    async def resume(self) -> None:
        await self._called("resume")
        self.num_resumes += 1

    async def end(self) -> None:
        self.log.append("end")
        await asyncio.sleep(0)
        self.num_ends += 1

    async def _called(self, name: str) -> None:
        assert not self.num_ends, f"{name} after the end"
        assert not self._busy, f"{name} beside another request"
        self.log.append(name)
        self._busy = True
        await asyncio.sleep(0)
        self._busy = False
        if name in self.errors:
            raise self.errors[name]


@dataclass
class FakeSessions:
    """Starts or adopts the one session; `None` hangs until `answer` is set, an error is raised."""

    session: FakeSession | EnvironmentFailure | None
    late: FakeSession | None = None
    asked_for: list[tuple[str, int]] = field(default_factory=list)
    adopted: list[SessionHandle] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.answer = asyncio.Event()

    async def start(self, split: str, seed: int) -> FakeSession:
        self.asked_for.append((split, seed))
        await asyncio.sleep(0)
        if self.session is None:
            await self.answer.wait()
            assert self.late is not None
            return self.late
        return self._the_session()

    def adopt(self, handle: SessionHandle) -> FakeSession:
        self.adopted.append(handle)
        session = self._the_session()
        session.started = None
        return session

    def _the_session(self) -> FakeSession:
        if isinstance(self.session, EnvironmentFailure):
            raise self.session
        assert self.session is not None
        return self.session


class FakeChat:
    """Ids that show where they are from: prompts are 1s and 2s, one id a letter of the observation."""

    stop_token_ids = (STOP_ID,)

    def initial(self, instruction: str, observation: Observation) -> list[int]:
        return [1] * len(instruction) + [2] * len(observation.text)

    def next_turn(self, generated_ids: list[int], observation: Observation) -> list[int]:
        missing = [] if generated_ids[-1] == STOP_ID else [STOP_ID]
        return [*missing, *[3] * len(observation.text)]

    def action_text(self, generated_ids: list[int]) -> str:
        return " ".join(str(token) for token in generated_ids if token != STOP_ID)


def stepped(text: str = "ok", reward: float = 0.0, *, done: bool = False, success: bool = False) -> Stepped:
    return Stepped(Observation(text), reward, done, success)


def order_of(kind: TaskKind = TaskKind.TRAIN, rank: int = 3) -> StartTask:
    return StartTask(Rank(rank), TaskId(11), GroupSpec(GroupId(5), kind, "env", "train", 77, "type"), attempt=2)


class Player:
    """A `TaskPlayer` among fakes, and all that it says."""

    def __init__(
        self,
        engine: FakeEngine,
        session: FakeSession | EnvironmentFailure | None,
        *,
        config: Config = CONFIG,
        kind: TaskKind = TaskKind.TRAIN,
        paused: PausedTask | None = None,
    ) -> None:
        self.config, self.engine, self.session, self.sessions = config, engine, session, FakeSessions(session)
        if isinstance(session, FakeSession):
            session.log = engine.log
        self.reports: list[TurnStarted | TurnEnded] = []
        chat = FakeChat()
        self.player = TaskPlayer(
            order_of(kind),
            config,
            engine,  # type: ignore[arg-type]
            self.sessions,
            chat,
            self.reports.append,
            JobClock(),
            paused,
        )

    async def play(self) -> Any:
        async with asyncio.timeout(20):
            outcome = await self.player.play()
        if isinstance(self.session, FakeSession):
            assert self.session.num_ends <= 1
        assert self.engine.num_thrown_away == 0, "tokens were thrown away that the engine has counted"
        self.check_release()
        return outcome

    def check_release(self) -> None:
        """What the engine holds is released once: after the last call of the engine, before the session's end or pause."""
        log = self.engine.log
        at = [i for i, entry in enumerate(log) if entry.startswith("release")]
        if "generate" not in log or self.config.rollout.scheduler == "fixed":
            assert at == []
            return
        assert len(at) == 1
        assert "generate" not in log[at[0] :]
        assert not {"pause", "end"} & set(log[: at[0]])

    async def finished(self) -> tuple[TaskFinished, Trajectory]:
        outcome = await self.play()
        assert not isinstance(outcome, TaskFailed), outcome
        event, trajectory = outcome
        assert isinstance(event, TaskFinished)
        assert self.session.num_ends == 1  # type: ignore[union-attr]
        assert event.generated_tokens == trajectory.num_generated
        if not self.sessions.adopted:
            assert sum(report.generated_tokens for report in self.turns_ended()) == event.generated_tokens
        assert event.context_tokens == trajectory.num_tokens <= CONFIG.model.max_context_tokens
        assert event.num_turns == len(trajectory.turns)
        assert (event.reward, event.success) == (trajectory.reward, trajectory.success)
        return event, trajectory

    async def paused(self) -> tuple[TaskPaused, PausedTask]:
        outcome = await self.play()
        assert not isinstance(outcome, TaskFailed), outcome
        event, task = outcome
        assert isinstance(event, TaskPaused)
        assert self.engine.log[-1] == "pause"
        session = self.session if isinstance(self.session, FakeSession) else self.sessions.late
        assert session is not None and session.num_ends == 0
        assert (event.task_id, event.rank) == (task.task_id, 3) == (11, 3)
        assert (event.context_tokens, event.generated_tokens) == (len(task.token_ids), int(task.generated.sum()))
        assert (task.group, task.attempt, task.session) == (order_of().group, 2, session.handle)
        assert task.turn_start <= len(task.token_ids) < CONFIG.model.max_context_tokens
        assert task.generated[task.turn_start :].all(), "from the open turn's start on, all is the model's"
        return event, task

    async def failed(self) -> TaskFailed:
        outcome = await self.play()
        assert isinstance(outcome, TaskFailed), outcome
        assert (outcome.task_id, outcome.rank) == (11, 3)
        return outcome

    def turns_ended(self) -> list[TurnEnded]:
        return [report for report in self.reports if isinstance(report, TurnEnded)]


def assert_same_record(one: Trajectory | PausedTask, other: Trajectory | PausedTask) -> None:
    for name in ("token_ids", "generated", "log_probs", "weight_versions"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), strict=True)
    bounds = [[(turn.start, turn.end, turn.env_s) for turn in record.turns] for record in (one, other)]
    assert bounds[0] == bounds[1]
