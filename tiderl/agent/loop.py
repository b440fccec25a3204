"""The turn loop: one task, from the environment's first observation to a trajectory.

Token in, token out: the prompt of a turn is the ids recorded so far plus the ids of the new observation; the trajectory holds what
the engine saw and produced, and text is only ever made for the environment to read.

Invariants (tests/unit/test_loop.py):

1. `generated` is True exactly for ids that the engine returned, with its log-probs and versions.
2. Every generation is reported with `TurnStarted` before and `TurnEnded` after it.
3. Whatever goes wrong, the environment session is ended, and the number of generated tokens is known: a generation is never
   thrown away in the middle, but aborted, so that the engine hands over what it has made.
4. No trajectory is longer than `model.max_context_tokens`: an observation that does not fit is left out and ends the episode.

Source: paper §2.1 (turns), §7 (each token records its version).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np

from tiderl.config.schema import Config
from tiderl.engines.base import Engine, Generation, Sampling
from tiderl.envs.protocol import Observation, Started, Stepped
from tiderl.errors import EngineError, EnvironmentFailure, TideError, WaitTimeout
from tiderl.scheduling.actions import StartTask
from tiderl.scheduling.events import TaskFailed, TaskFinished, TurnEnded, TurnStarted
from tiderl.types import FailureKind, Finish, TaskKind, Trajectory, Turn, WeightVersion

T = TypeVar("T")
Report = Callable[[TurnStarted | TurnEnded], None]


class Session(Protocol):
    """One episode behind HTTP (`envs.client`)."""

    started: Started
    last_env_s: float

    async def step(self, action: str) -> Stepped: ...

    async def end(self) -> None: ...


class SessionSource(Protocol):
    """Where sessions come from (`envs.client.EnvClient`)."""

    async def start(self, split: str, seed: int) -> Session: ...


class Chat(Protocol):
    """Prompts in token ids (`agent.chat.ChatFormat`)."""

    stop_token_ids: tuple[int, ...]

    def initial(self, instruction: str, observation: Observation) -> list[int]: ...

    def next_turn(self, generated_ids: list[int], observation: Observation) -> list[int]: ...

    def action_text(self, generated_ids: list[int]) -> str: ...


class PromptTooLong(TideError):
    """The environment's first observation fills the whole context."""


class Stopped(TideError):
    """The coordinator has cancelled the task, or its time is up."""


@dataclass(slots=True)
class Recorder:
    """The tokens of a trajectory as they come."""

    token_ids: list[int] = field(default_factory=list)
    generated: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def observe(self, ids: list[int]) -> None:
        self.token_ids += ids
        self.generated += [False] * len(ids)
        self.log_probs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)

    def generate(self, generation: Generation) -> None:
        self.token_ids += generation.token_ids.tolist()
        self.generated += [True] * len(generation.token_ids)
        self.log_probs += generation.log_probs.tolist()
        self.versions += generation.weight_versions.tolist()

    @property
    def num_generated(self) -> int:
        return sum(self.generated)


class TaskPlayer:
    """Plays one task. `play` returns the outcome; `cancel` ends it early from another coroutine."""

    def __init__(
        self, order: StartTask, config: Config, engine: Engine, sessions: SessionSource, chat: Chat, report: Report
    ) -> None:
        self._order = order
        self._config = config
        self._engine = engine
        self._sessions = sessions
        self._chat = chat
        self._report = report
        self._record = Recorder()
        self._request_id = f"task{order.task_id}.{order.attempt}"
        self._stopped = asyncio.Event()
        self._stopped_as = FailureKind.CANCELLED
        temperature = config.eval.temperature if order.group.kind is TaskKind.EVAL else config.agent.temperature
        self._sampling = Sampling(temperature, config.agent.max_new_tokens, tuple(chat.stop_token_ids))

    def cancel(self) -> None:
        """Stop as soon as possible; tokens made so far are counted."""
        self._stop(FailureKind.CANCELLED)

    def _stop(self, kind: FailureKind) -> None:
        if not self._stopped.is_set():
            self._stopped_as = kind
        self._stopped.set()
        self._engine.abort(self._request_id)

    async def play(self) -> tuple[TaskFinished, Trajectory] | TaskFailed:
        """The task's outcome; never raises for what can go wrong with one task."""
        timeout_s = self._config.rollout.task_timeout_s
        timer = asyncio.get_running_loop().call_later(timeout_s, self._stop, FailureKind.TIMEOUT)
        try:
            return await self._episode()
        except EnvironmentFailure as error:
            return self._failure(FailureKind.ENVIRONMENT, str(error), retryable=error.retryable)
        except PromptTooLong as error:
            return self._failure(FailureKind.NEVER_FITS, str(error), retryable=False)
        except Stopped as error:
            if self._stopped_as is FailureKind.CANCELLED:
                return self._failure(FailureKind.CANCELLED, str(error), retryable=False)
            bound = WaitTimeout("the task", "its end", timeout_s, "rollout.task_timeout_s")
            return self._failure(FailureKind.TIMEOUT, f"{bound}; it was {error}", retryable=True)
        finally:
            timer.cancel()

    async def _episode(self) -> tuple[TaskFinished, Trajectory]:
        session = await self._unless_stopped(self._sessions.start(self._order.group.split, self._order.group.seed))
        try:
            return await self._turns(session)
        finally:
            await session.end()

    async def _turns(self, session: Session) -> tuple[TaskFinished, Trajectory]:
        record, chat, limit = self._record, self._chat, self._config.model.max_context_tokens
        record.observe(chat.initial(session.started.instruction, session.started.observation))
        if len(record.token_ids) >= limit:
            raise PromptTooLong(
                f"the first prompt of {self._order.group.env} seed {self._order.group.seed} has {len(record.token_ids)} "
                f"tokens, model.max_context_tokens is {limit}: raise it, or choose shorter tasks"
            )
        while True:
            start, ids, generate_s, cached_tokens = await self._generate()
            stepped = await self._unless_stopped(session.step(chat.action_text(ids)))
            record.turns.append(Turn(start, start + len(ids), generate_s, session.last_env_s, cached_tokens))
            reward, success = stepped.reward, stepped.success
            if stepped.done:
                return self._outcome(reward, success, Finish.DONE)
            if len(record.turns) >= self._config.agent.max_turns:
                return self._outcome(reward, success, Finish.MAX_TURNS)
            observed = chat.next_turn(ids, stepped.observation)
            if len(record.token_ids) + len(observed) >= limit:
                return self._outcome(reward, success, Finish.MAX_CONTEXT)
            record.observe(observed)

    async def _generate(self) -> tuple[int, list[int], float, int]:
        """One model call: its first index, its ids, its seconds, and how much of the prompt was cached."""
        if self._stopped.is_set():
            raise Stopped("stopped between two turns")
        record, order = self._record, self._order
        start = len(record.token_ids)
        self._report(TurnStarted(order.task_id, order.rank, start))
        began_s = time.monotonic()
        generation = await self._bounded_generation()
        generate_s = time.monotonic() - began_s
        record.generate(generation)
        if generation.finish == "aborted":
            raise Stopped("stopped while it generated")
        self._report(TurnEnded(order.task_id, order.rank, len(record.token_ids), len(record.token_ids) - start))
        return start, record.token_ids[start:], generate_s, generation.cached_tokens

    async def _bounded_generation(self) -> Generation:
        """The engine's answer. One that heeds not even the abort at the task's timeout hangs, and its rank with it."""
        bound_s = self._config.rollout.task_timeout_s + self._config.timeouts.sync_s
        try:
            async with asyncio.timeout(bound_s):
                return await self._engine.generate(self._request_id, self._record.token_ids, self._sampling)
        except TimeoutError:
            raise EngineError(
                f"the engine of rank {self._order.rank} has answered neither a request nor its abort for {bound_s:g} s "
                "(bound: rollout.task_timeout_s + timeouts.sync_s)"
            ) from None

    async def _unless_stopped(self, answer: Awaitable[T]) -> T:
        """Wait for the environment, but not longer than the coordinator wants the task and its time allows."""
        waiting = asyncio.ensure_future(answer)
        stopped = asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait((waiting, stopped), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise Stopped("stopped while the environment worked")
            return waiting.result()
        finally:
            waiting.cancel()
            stopped.cancel()

    def _outcome(self, reward: float, success: bool, finish: Finish) -> tuple[TaskFinished, Trajectory]:
        record, order = self._record, self._order
        versions = np.array(record.versions, np.int32)
        made_by = versions[versions >= 0]
        trajectory = Trajectory(
            task_id=order.task_id,
            group_id=order.group.group_id,
            kind=order.group.kind,
            token_ids=np.array(record.token_ids, np.int32),
            generated=np.array(record.generated, np.bool_),
            log_probs=np.array(record.log_probs, np.float32),
            weight_versions=versions,
            turns=tuple(record.turns),
            images=(),
            reward=reward,
            success=success,
            finish=finish,
        )
        event = TaskFinished(
            task_id=order.task_id,
            rank=order.rank,
            context_tokens=trajectory.num_tokens,
            generated_tokens=trajectory.num_generated,
            num_turns=len(record.turns),
            oldest_version=WeightVersion(int(made_by.min())),
            newest_version=WeightVersion(int(made_by.max())),
            reward=reward,
            success=success,
        )
        return event, trajectory

    def _failure(self, kind: FailureKind, detail: str, *, retryable: bool) -> TaskFailed:
        return TaskFailed(self._order.task_id, self._order.rank, kind, detail, retryable, self._record.num_generated)
