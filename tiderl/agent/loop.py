"""The turn loop: one task, from the environment's first observation to a trajectory, or to where it is paused.

Token in, token out: the prompt of a turn is the ids recorded so far plus the ids of the new observation; the trajectory holds what
the engine saw and produced, and text is only ever made for the environment to read.

Invariants (tests/unit/test_loop*.py):

1. `generated` is True exactly for ids that the engine returned, with its log-probs and versions.
2. Every call of the engine is reported with `TurnStarted` before it, and with `TurnEnded` after it if it ended by itself; what
   an interrupted one made and computed is in the `TaskPaused` or `TaskFailed` that follows.
3. Whatever goes wrong, the environment session is ended, and the number of generated tokens is known: a generation is never
   thrown away in the middle, but aborted, so that the engine hands over what it has made.
4. No trajectory is longer than `model.max_context_tokens`: an observation that does not fit is left out and ends the episode.
5. However often and wherever a task is paused and resumed, its trajectory is that of the uninterrupted play: a turn that was cut
   goes on as the same turn. A task is only ever held before a call of the engine, its session paused and not ended.
6. As soon as it is known that a rank's engine will not be called again for a task, what it holds of it is released, once.
7. A session whose task waits for the engine does not lose its lease (`agent.lease`).

Source: paper §2.1 (turns), §4.1 (pause and resume of whole tasks), §7 (each token records its version).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol, TypeVar

from tiderl.agent.lease import signs_of_life
from tiderl.agent.recorder import Recorder
from tiderl.clock import JobClock
from tiderl.config.schema import Config
from tiderl.engines.base import Engine, Generation, Sampling
from tiderl.envs.protocol import Observation, Started, Stepped
from tiderl.errors import EngineError, EnvironmentFailure, TideError, WaitTimeout
from tiderl.scheduling.actions import StartTask
from tiderl.scheduling.events import TaskFailed, TaskFinished, TaskPaused, TurnEnded, TurnStarted
from tiderl.types import FailureKind, Finish, PausedTask, SessionHandle, TaskKind, Trajectory, WeightVersion

T = TypeVar("T")
Report = Callable[[TurnStarted | TurnEnded], None]
Finished = tuple[TaskFinished, Trajectory]
Paused = tuple[TaskPaused, PausedTask]


class Session(Protocol):
    """One episode behind HTTP (`envs.client`). One call at a time."""

    #: None where the episode was started by someone else and adopted.
    started: Started | None
    last_env_s: float

    @property
    def handle(self) -> SessionHandle: ...

    async def step(self, action: str) -> Stepped: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def end(self) -> None: ...


class SessionSource(Protocol):
    """Where sessions come from (`envs.client.EnvClient`)."""

    async def start(self, split: str, seed: int) -> Session: ...

    def adopt(self, handle: SessionHandle) -> Session: ...


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


class TaskPlayer:
    """Plays one task, from its beginning or from where it was `paused`.

    `play` returns the outcome; `pause` and `cancel`, from another coroutine, bring it about early. For a paused task `order` says
    on which rank it goes on.
    """

    def __init__(
        self,
        order: StartTask,
        config: Config,
        engine: Engine,
        sessions: SessionSource,
        chat: Chat,
        report: Report,
        clock: JobClock,
        paused: PausedTask | None = None,
    ) -> None:
        self._order = order
        self._config = config
        self._engine = engine
        self._sessions = sessions
        self._chat = chat
        self._report = report
        self._clock = clock
        self._resumed = paused
        self._record = Recorder() if paused is None else Recorder.resumed(paused)
        self._request_id = f"task{order.task_id}.{order.attempt}"
        self._stopped = asyncio.Event()
        self._stopped_as = FailureKind.CANCELLED
        self._pausing = False
        self._generating = False
        #: Whether the engine may hold something of the task.
        self._holding = False
        #: What the engine has computed of prompts since the last report.
        self._prefilled_tokens = 0
        temperature = config.eval.temperature if order.group.kind is TaskKind.EVAL else config.agent.temperature
        self._sampling = Sampling(temperature, config.agent.max_new_tokens, tuple(chat.stop_token_ids))

    def cancel(self) -> None:
        """Stop as soon as possible; tokens made so far are counted."""
        self._stop(FailureKind.CANCELLED)

    def pause(self) -> None:
        """Hold the task before its next call of the engine, one that runs now being cut; `play` then returns it."""
        self._pausing = True
        if self._generating:
            self._engine.abort(self._request_id)
        else:
            self._release()

    async def play(self) -> Finished | Paused | TaskFailed:
        """The task's outcome; never raises for what can go wrong with one task. Raises `EngineError`."""
        timeout_s = self._config.rollout.task_timeout_s
        played_s = self._resumed.played_s if self._resumed else 0.0
        left_s = self._clock.real_s(timeout_s - played_s)
        timer = asyncio.get_running_loop().call_later(left_s, self._stop, FailureKind.TIMEOUT)
        try:
            return await self._episode(self._clock.now_s() - played_s)
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

    def _stop(self, kind: FailureKind) -> None:
        if not self._stopped.is_set():
            self._stopped_as = kind
        self._stopped.set()
        if self._generating:
            self._engine.abort(self._request_id)

    async def _episode(self, began_s: float) -> Finished | Paused:
        """Play until the end or the pause. `began_s`: when the task would have begun, had it never been paused."""
        if self._resumed is None:
            group = self._order.group
            session = await self._unless_stopped(
                self._sessions.start(group.split, group.seed), "the environment started"
            )
        else:
            session = self._sessions.adopt(self._resumed.session)
        handed_over = False
        try:
            if self._resumed is None:
                self._open(session)
            else:
                await self._unless_stopped(session.resume(), "it was being resumed")
            finished = await self._turns(session)
            if finished is not None:
                return finished
            await self._unless_stopped(session.pause(), "it was being paused")
            self._raise_if_stopped("as it was paused")
            handed_over = True
            return self._paused(session.handle, self._clock.now_s() - began_s)
        finally:
            self._release(discard_from=self._record.num_prompt_tokens)
            if not handed_over:
                await session.end()

    def _open(self, session: Session) -> None:
        """Record the first prompt."""
        assert session.started is not None, "an adopted session has begun elsewhere"
        ids = self._chat.initial(session.started.instruction, session.started.observation)
        limit = self._config.model.max_context_tokens
        self._record.observe(ids)
        if len(ids) >= limit:
            raise PromptTooLong(
                f"the first prompt of {self._order.group.env} seed {self._order.group.seed} has {len(ids)} tokens, "
                f"model.max_context_tokens is {limit}: raise it, or choose shorter tasks"
            )

    async def _turns(self, session: Session) -> Finished | None:
        """Turn after turn, until the episode ends or (None) the task is to be held."""
        record, chat = self._record, self._chat
        limit, max_turns = self._config.model.max_context_tokens, self._config.agent.max_turns
        while not self._pausing:
            async with signs_of_life(session):
                if not await self._generate():
                    return None
            ids = record.turn_ids
            stepped = await self._unless_stopped(session.step(chat.action_text(ids)), "the environment worked")
            record.close_turn(session.last_env_s * self._clock.scale)
            if stepped.done:
                return self._finished(stepped, Finish.DONE)
            if len(record.turns) >= max_turns:
                return self._finished(stepped, Finish.MAX_TURNS)
            observed = chat.next_turn(ids, stepped.observation)
            if record.num_tokens + len(observed) >= limit:
                return self._finished(stepped, Finish.MAX_CONTEXT)
            record.observe(observed)
        return None

    async def _generate(self) -> bool:
        """Call the engine once, for a turn or for what is left of it. False: `pause` has cut it."""
        self._raise_if_stopped("between two turns")
        record, order = self._record, self._order
        context_tokens = record.num_tokens
        self._report(TurnStarted(order.task_id, order.rank, context_tokens))
        began_s = self._clock.now_s()
        generation = await self._bounded_generation()
        record.generate(generation, self._clock.now_s() - began_s)
        self._prefilled_tokens = context_tokens - generation.cached_tokens
        if generation.finish == "aborted":
            self._raise_if_stopped("while it generated")
            assert self._pausing, f"the engine has aborted {self._request_id}, and nobody asked it to"
            self._release()
            return False
        num_new = record.num_tokens - context_tokens
        self._report(TurnEnded(order.task_id, order.rank, record.num_tokens, num_new, self._prefilled_tokens))
        self._prefilled_tokens = 0
        full = record.num_tokens >= self._config.model.max_context_tokens
        if full or len(record.turns) + 1 >= self._config.agent.max_turns:
            self._release(discard_from=record.num_prompt_tokens)
        elif self._pausing:
            self._release()
        return True

    async def _bounded_generation(self) -> Generation:
        """The engine's answer. One that heeds not even the abort at the task's timeout hangs, and its rank with it."""
        bound_s = self._clock.real_s(self._config.rollout.task_timeout_s + self._config.timeouts.sync_s)
        hold = self._config.rollout.scheduler == "ctb"
        ids = self._record.token_ids
        sampling = replace(self._sampling, max_new_tokens=self._sampling.max_new_tokens - len(self._record.turn_ids))
        self._generating, self._holding = True, hold
        try:
            async with asyncio.timeout(bound_s):
                # Awaited here and not in a task of its own, so that an abort never overtakes the request.
                return await self._engine.generate(self._request_id, ids, sampling, hold=hold)
        except TimeoutError:
            raise EngineError(
                f"the engine of rank {self._order.rank} has answered neither a request nor its abort for {bound_s:g} s "
                "(bound: rollout.task_timeout_s + timeouts.sync_s)"
            ) from None
        finally:
            self._generating = False

    def _release(self, *, discard_from: int | None = None) -> None:
        """There will be no further call of this rank's engine: let it free what it holds of the task."""
        if self._holding:
            self._holding = False
            self._engine.release(self._request_id, discard_from=discard_from)

    async def _unless_stopped(self, answer: Awaitable[T], doing: str) -> T:
        """Wait for the environment, but not longer than the coordinator wants the task and its time allows."""
        waiting = asyncio.ensure_future(answer)
        stopped = asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait((waiting, stopped), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise Stopped(f"stopped while {doing}")
            return waiting.result()
        finally:
            waiting.cancel()
            stopped.cancel()

    def _raise_if_stopped(self, when: str) -> None:
        if self._stopped.is_set():
            raise Stopped(f"stopped {when}")

    def _finished(self, last: Stepped, finish: Finish) -> Finished:
        record, order = self._record, self._order
        trajectory = record.trajectory(order, last.reward, last.success, finish)
        made_by = trajectory.weight_versions[trajectory.generated]
        event = TaskFinished(
            task_id=order.task_id,
            rank=order.rank,
            context_tokens=trajectory.num_tokens,
            generated_tokens=trajectory.num_generated,
            num_turns=len(record.turns),
            oldest_version=WeightVersion(int(made_by.min())),
            newest_version=WeightVersion(int(made_by.max())),
            reward=last.reward,
            success=last.success,
        )
        return event, trajectory

    def _paused(self, session: SessionHandle, played_s: float) -> Paused:
        record, order = self._record, self._order
        event = TaskPaused(
            task_id=order.task_id,
            rank=order.rank,
            context_tokens=record.num_tokens,
            generated_tokens=record.num_generated,
            prefilled_tokens=self._prefilled_tokens,
        )
        return event, record.paused(order, session, played_s)

    def _failure(self, kind: FailureKind, detail: str, *, retryable: bool) -> TaskFailed:
        return TaskFailed(
            task_id=self._order.task_id,
            rank=self._order.rank,
            kind=kind,
            detail=detail,
            retryable=retryable,
            generated_tokens=self._record.num_generated,
            prefilled_tokens=self._prefilled_tokens,
        )
