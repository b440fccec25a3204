"""One run of `bench_ctb.py`: a workload played through the real scheduling core, the real turn loop and a real engine.

Faked are the ends only: the coordinator's and the worker's messages are a queue, the actor rank is a few events, and a task's
environment, its chat and the lengths of its outputs come from the workload. So admission, pausing and resuming are those of a job.

Invariants (tests/unit/test_bench_replay.py):

1. Every call of the engine generates up to the end of the turn that its prompt's length belongs to, and not further.
2. The tasks of a group send the same first prompt; everything else is random and differs.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tiderl.agent.loop import TaskPlayer
from tiderl.clock import JobClock
from tiderl.config.schema import Config
from tiderl.engines.base import Engine, EngineInfo, Generation, Sampling
from tiderl.envs.protocol import Observation, Started, Stepped
from tiderl.errors import TideError
from tiderl.scheduling import actions as ac
from tiderl.scheduling import events as ev
from tiderl.scheduling.core import Core
from tiderl.types import GroupId, GroupSpec, PausedTask, Rank, Role, SessionHandle, TaskId, WeightVersion
from tools.bench_workload import GroupWork, TaskWork, distinct_prefill_tokens

ACTOR, ROLLOUT = Rank(0), Rank(1)
#: How often the engine's load is told to the core.
LOAD_INTERVAL_S = 1.0
#: No lease of a faked session ever ends.
_LEASE_S = 86_400.0


class ForcedEngine:
    """The engine for one task: how much a call generates is the workload's decision."""

    def __init__(self, engine: Engine, work: TaskWork) -> None:
        self._engine = engine
        self._spans = work.turn_spans
        self.prompt_tokens = 0

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], sampling: Sampling, *, hold: bool = False
    ) -> Generation:
        length = len(prompt_token_ids)
        end = next(end for start, end in self._spans if start <= length < end)
        self.prompt_tokens += length
        forced = replace(sampling, max_new_tokens=end - length, ignore_stop=True)
        return await self._engine.generate(request_id, prompt_token_ids, forced, hold=hold)

    def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    def release(self, request_id: str, *, discard_from: int | None = None) -> None:
        self._engine.release(request_id, discard_from=discard_from)


class ReplayedSession:
    """An environment session that takes its time and says which turn it is."""

    def __init__(self, work: TaskWork, turn: int) -> None:
        self._work = work
        self._turn = turn
        self.started = Started("", Observation(""), "") if turn == 0 else None
        self.last_env_s = 0.0

    @property
    def handle(self) -> SessionHandle:
        return SessionHandle("replay", "session", self._turn, _LEASE_S, _LEASE_S)

    async def step(self, action: str) -> Stepped:
        self.last_env_s = self._work.turns[self._turn].latency_s
        await asyncio.sleep(self.last_env_s)
        observation = Observation(str(self._turn))
        self._turn += 1
        done = self._turn == len(self._work.turns)
        return Stepped(observation, float(done), done, done)

    async def pause(self) -> None:
        await asyncio.sleep(0)

    async def resume(self) -> None:
        await asyncio.sleep(0)

    async def end(self) -> None:
        await asyncio.sleep(0)


class ReplayedEnvironment:
    """The source of one task's session, and the chat that turns its observations into ids of the workload's lengths."""

    stop_token_ids: tuple[int, ...] = ()

    def __init__(self, work: TaskWork, group_number: int, task_id: int, vocab_size: int) -> None:
        self._work = work
        self._group_number = group_number
        self._task_id = task_id
        self._vocab_size = vocab_size

    async def start(self, split: str, seed: int) -> ReplayedSession:
        # Setting an episode up takes what one of its actions takes.
        await asyncio.sleep(self._work.turns[0].latency_s)
        return ReplayedSession(self._work, 0)

    def adopt(self, handle: SessionHandle) -> ReplayedSession:
        return ReplayedSession(self._work, handle.turn)

    def initial(self, instruction: str, observation: Observation) -> list[int]:
        return self._random_ids((0, self._group_number), self._work.prompt_tokens)

    def next_turn(self, generated_ids: list[int], observation: Observation) -> list[int]:
        turn = int(observation.text)
        return self._random_ids((1, self._task_id, turn), self._work.turns[turn].observation_tokens)

    def action_text(self, generated_ids: list[int]) -> str:
        return ""

    def _random_ids(self, seed: tuple[int, ...], num_tokens: int) -> list[int]:
        ids: list[int] = np.random.default_rng(seed).integers(0, self._vocab_size, num_tokens).tolist()
        return ids


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one run measured. Lengths in tokens, times in seconds."""

    hit_rate: float
    tokens_per_s: float
    makespan_s: float
    prefill_first: int
    prefill_repeated: int
    preemptions: int
    p50_trajectory_s: float
    p99_trajectory_s: float
    num_pauses: int
    generated_tokens: int
    #: Most tasks at once on the rank.
    most_tasks: int
    #: Of all threads of this process; on a busy machine its ratio between two modes says more than that of their makespans.
    cpu_s: float


class Replay:
    """Plays all groups once on one rollout rank, as one training step that wants all of them."""

    def __init__(
        self, groups: Sequence[GroupWork], config: Config, engine: Engine, info: EngineInfo, vocab_size: int
    ) -> None:
        self._groups = groups
        self._config = config
        self._engine = engine
        self._info = info
        self._vocab_size = vocab_size
        self._core = Core(config, 2)
        self._began_s = time.monotonic()
        #: Events for the core; or what has gone wrong.
        self._inbox: asyncio.Queue[ev.Event | BaseException] = asyncio.Queue()
        self._players: dict[TaskId, TaskPlayer] = {}
        self._paused: dict[TaskId, PausedTask] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._engines: list[ForcedEngine] = []
        self._started_s: dict[TaskId, float] = {}
        self._trajectory_s: list[float] = []
        self._supplied_s = self._last_s = 0.0
        self._most_tasks = 0
        self._counts: Counter[type] = Counter()
        self._done = False

    async def run(self, timeout_s: float) -> RunResult:
        """Raises `TimeoutError` after `timeout_s`, `TideError` if a task fails or the core gives up."""
        before, cpu_began_s = self._engine.stats(), time.process_time()
        self._inbox.put_nowait(ev.RankJoined(ACTOR, Role.ACTOR, WeightVersion(0), 0, 0))
        blocks, tokens = self._info.num_blocks, self._info.block_size_tokens
        self._inbox.put_nowait(ev.RankJoined(ROLLOUT, Role.ROLLOUT, WeightVersion(0), blocks, tokens))
        self._inbox.put_nowait(ev.EnvironmentCapacity(sum(len(group.tasks) for group in self._groups)))
        self._spawn(self._tell_load())
        try:
            async with asyncio.timeout(timeout_s):
                await self._coordinate()
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
        after = self._engine.stats()
        makespan_s = self._last_s - self._supplied_s
        generated = after.total_generated_tokens - before.total_generated_tokens
        prefilled = after.total_prefilled_tokens - before.total_prefilled_tokens
        expected = sum(task.output_tokens for group in self._groups for task in group.tasks)
        assert generated == expected, f"{generated} tokens were generated, the workload has {expected}"
        first = distinct_prefill_tokens(self._groups)
        times_s = sorted(self._trajectory_s)
        return RunResult(
            hit_rate=1.0 - prefilled / sum(engine.prompt_tokens for engine in self._engines),
            tokens_per_s=generated / makespan_s,
            makespan_s=makespan_s,
            prefill_first=first,
            prefill_repeated=prefilled - first,
            preemptions=after.total_preemptions - before.total_preemptions,
            p50_trajectory_s=times_s[len(times_s) // 2],
            p99_trajectory_s=times_s[len(times_s) * 99 // 100],
            num_pauses=self._counts[ev.TaskPaused],
            generated_tokens=generated,
            most_tasks=self._most_tasks,
            cpu_s=time.process_time() - cpu_began_s,
        )

    # --- the coordinator ------------------------------------------------------------------------------------------

    async def _coordinate(self) -> None:
        """One event after the other, until the core opens the training step."""
        while not self._done:
            event = await self._inbox.get()
            if isinstance(event, BaseException):
                raise event
            self._counts[type(event)] += 1
            for action in self._core.handle(event, time.monotonic() - self._began_s):
                self._perform(action)

    def _perform(self, action: ac.Action) -> None:
        match action:
            case ac.SupplyGroups():
                self._supply(action)
            case ac.StartTask():
                self._started_s[action.task_id] = time.monotonic()
                self._begin(action, None)
            case ac.ResumeTask():
                task = self._paused.pop(action.task_id)
                self._begin(ac.StartTask(action.rank, task.task_id, task.group, task.attempt), task)
            case ac.PauseTask():
                if (player := self._players.get(action.task_id)) is not None:
                    player.pause()
            case ac.PrepareSync():
                for rank in action.ranks:
                    self._inbox.put_nowait(ev.SyncReady(rank, action.version))
            case ac.StartSync():
                for rank in action.ranks:
                    self._inbox.put_nowait(ev.SyncFinished(rank, action.version, True, "", 0.0, 0.0, 0.0))
            case ac.CloseStep():
                self._done = True
            case ac.OpenStep() | ac.AssignMicroBatch() | ac.ReportLedger() | ac.Note(level="info"):
                pass
            case _:
                raise TideError(f"the core says {action}, which has no place in this bench")

    def _supply(self, order: ac.SupplyGroups) -> None:
        assert order.count == len(self._groups)
        specs = (
            GroupSpec(GroupId(number), order.kind, "replay", "train", number, group.task_type)
            for number, group in enumerate(self._groups)
        )
        self._supplied_s = time.monotonic()
        self._inbox.put_nowait(ev.GroupsSupplied(order.kind, tuple(specs)))

    # --- the worker -----------------------------------------------------------------------------------------------

    def _begin(self, order: ac.StartTask, paused: PausedTask | None) -> None:
        group = self._groups[order.group.seed]
        # The core numbers tasks in the order of their groups.
        work = group.tasks[order.task_id - order.group.seed * len(group.tasks)]
        engine = ForcedEngine(self._engine, work)
        self._engines.append(engine)
        environment = ReplayedEnvironment(work, order.group.seed, order.task_id, self._vocab_size)
        player = TaskPlayer(
            order,
            self._config,
            engine,  # type: ignore[arg-type] # the part of an engine that a turn loop needs
            environment,
            environment,
            self._inbox.put_nowait,
            JobClock(),
            paused,
        )
        self._players[order.task_id] = player
        self._most_tasks = max(self._most_tasks, len(self._players))
        self._spawn(self._play(order.task_id, player))

    async def _play(self, task_id: TaskId, player: TaskPlayer) -> None:
        outcome = await player.play()
        del self._players[task_id]
        if isinstance(outcome, ev.TaskFailed):
            raise TideError(f"task {task_id} failed: {outcome}")
        event, record = outcome
        if isinstance(record, PausedTask):
            self._paused[task_id] = record
        else:
            self._last_s = time.monotonic()
            self._trajectory_s.append(self._last_s - self._started_s[task_id])
        self._inbox.put_nowait(event)

    async def _tell_load(self) -> None:
        """As a rank's worker does."""
        while True:
            await asyncio.sleep(LOAD_INTERVAL_S)
            stats = self._engine.stats()
            self._inbox.put_nowait(
                ev.EngineLoad(
                    rank=ROLLOUT,
                    used_tokens=stats.used_blocks * self._info.block_size_tokens,
                    num_running=stats.num_running,
                    num_waiting=stats.num_waiting,
                    total_prefilled_tokens=stats.total_prefilled_tokens,
                    total_cached_tokens=stats.total_cached_tokens,
                    total_preemptions=stats.total_preemptions,
                )
            )

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.ensure_future(coroutine)
        self._running.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._inbox.put_nowait(error)
