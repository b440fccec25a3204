"""A fake world around the scheduling core for `bench_scheduler.py`: whole lifecycles in virtual time, at next to no cost.

Groups are supplied, tasks start, generate, wait for their environments, are paused and resumed, finish; steps train on them and
weights are synced, so that new groups follow. The ranks say what their engines hold, with a group's prompt counted once.

It keeps no books of its own: that the core decides well is what tests/scheduling is for. A complaint of the core ends it.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tiderl.errors import TideError
from tiderl.scheduling import actions as ac
from tiderl.scheduling import events as ev
from tiderl.types import GroupId, GroupSpec, MicroBatchId, Rank, Role, TaskId, WeightVersion
from tools.bench_workload import GroupWork, TaskWork

Handle = Callable[[ev.Event, float], tuple[ac.Action, ...]]

BLOCK_TOKENS = 32
#: What things take, in seconds: a token, an order on its way, drawing groups, a training step, a weight sync, an episode's start.
TOKEN_S, ORDER_S, SUPPLY_S, STEP_S, SYNC_S, START_S = 0.02, 0.02, 0.1, 5.0, 2.0, 0.5
#: From the order to its end; shorter than a step, so that an actor leaves a step after its last one.
MICRO_BATCH_S = 3.0
ENGINE_LOAD_EVERY_S = 2.0


@dataclass(slots=True)
class Playing:
    """A started task, as its rank (or, while it is paused, the shell) knows it."""

    spec: GroupSpec
    work: TaskWork
    rank: Rank
    version: WeightVersion
    context_tokens: int = 0
    generated_tokens: int = 0
    #: What the present engine holds of it, computed.
    computed_tokens: int = 0
    turn: int = 0
    #: Tokens of the open turn that are still to be made, and when it was sent to the engine.
    left_tokens: int = 0
    sent_s: float = 0.0
    is_generating: bool = False
    must_pause: bool = False
    #: Number of the fact that was planned last for the task; others are outdated.
    plan: int = 0


class World:
    """Answers the core's actions in virtual time; `handle` is the core's. `num_sessions` is the environments' capacity."""

    def __init__(
        self,
        handle: Handle,
        works: Iterator[GroupWork],
        *,
        num_actors: int,
        num_ranks: int,
        num_blocks: int,
        num_sessions: int,
    ) -> None:
        self._handle = handle
        self.now_s = 0.0
        self.num_finished = 0
        self._rng = random.Random(0)
        self._plans: list[tuple[float, int, str, int]] = []
        self._num_plans = 0
        self._works = works
        self._num_groups = 0
        #: Of every group the trajectories that no task plays yet.
        self._unplayed: dict[GroupId, list[TaskWork]] = {}
        self._playing: dict[TaskId, Playing] = {}
        self._version = WeightVersion(0)
        self._supplies: list[ac.SupplyGroups] = []
        self._step: ac.OpenStep | None = None
        self._micro_batches: dict[MicroBatchId, ac.AssignMicroBatch] = {}
        self._sync_version = WeightVersion(0)
        #: What each rank's engine holds: contexts, of which a group's prompt counts once.
        self._used_tokens: Counter[int] = Counter()
        self._members: Counter[tuple[int, int]] = Counter()
        self._facts: dict[str, Callable[[int], ev.Event]] = {
            name: getattr(self, f"_fact_{name}")
            for name in ("answer", "cut", "supply", "micro_batch", "trained", "ready", "synced", "load")
        }
        self._absorb: dict[type, Callable[[Any], None]] = {
            ac.SupplyGroups: self._on_supply,
            ac.StartTask: self._on_start,
            ac.PauseTask: self._on_pause,
            ac.ResumeTask: self._on_resume,
            ac.OpenStep: self._on_open_step,
            ac.CloseStep: self._on_close_step,
            ac.PrepareSync: self._on_prepare_sync,
            ac.StartSync: self._on_start_sync,
            ac.AssignMicroBatch: self._on_assign_micro_batch,
            ac.ReportStep: lambda action: None,
            ac.ReportLedger: lambda action: None,
            ac.Note: self._on_note,
        }
        for rank in range(num_actors):
            self._tell(ev.RankJoined(Rank(rank), Role.ACTOR, self._version, 0, 0))
        for rank in range(num_actors, num_actors + num_ranks):
            self._tell(ev.RankJoined(Rank(rank), Role.ROLLOUT, self._version, num_blocks, BLOCK_TOKENS))
            self._plan(self._rng.uniform(0.0, ENGINE_LOAD_EVERY_S), "load", rank)
        self._tell(ev.EnvironmentCapacity(num_sessions))

    def step(self) -> None:
        """Report the next fact."""
        while True:
            self.now_s, number, name, key = heapq.heappop(self._plans)
            if name not in ("answer", "cut"):
                break
            task = self._playing.get(TaskId(key))
            if task is not None and task.plan == number:
                break
        self._tell(self._facts[name](key))

    def _tell(self, event: ev.Event) -> None:
        actions = self._handle(event, self.now_s)
        for action in actions:
            self._absorb[type(action)](action)

    def _plan(self, delay_s: float, name: str, key: int) -> int:
        self._num_plans += 1
        heapq.heappush(self._plans, (self.now_s + delay_s, self._num_plans, name, key))
        return self._num_plans

    # --- tasks ----------------------------------------------------------------------------------------------------

    def _on_start(self, action: ac.StartTask) -> None:
        unplayed = self._unplayed[action.group.group_id]
        work = unplayed.pop()
        if not unplayed:
            del self._unplayed[action.group.group_id]
        task = self._playing[action.task_id] = Playing(action.group, work, action.rank, self._version)
        task.left_tokens = work.turns[0].output_tokens
        self._next(action.task_id, START_S * self._rng.uniform(0.5, 1.5))

    def _on_resume(self, action: ac.ResumeTask) -> None:
        task = self._playing[action.task_id]
        task.rank, task.must_pause = action.rank, False
        task.computed_tokens = 0
        self._enter(task)
        self._next(action.task_id, ORDER_S)

    def _on_pause(self, action: ac.PauseTask) -> None:
        task = self._playing[action.task_id]
        task.must_pause = True
        done_s = task.sent_s + task.left_tokens * TOKEN_S
        if task.is_generating and self.now_s + ORDER_S < done_s:
            task.plan = self._plan(ORDER_S, "cut", action.task_id)

    def _next(self, task_id: TaskId, delay_s: float) -> None:
        self._playing[task_id].plan = self._plan(delay_s, "answer", task_id)

    def _fact_cut(self, task_id: int) -> ev.Event:
        """The order to pause has reached a generating task: its tokens are kept."""
        task = self._playing[TaskId(task_id)]
        made = min(task.left_tokens - 1, int((self.now_s - task.sent_s) / TOKEN_S))
        prefilled = self._generated(task, made)
        task.left_tokens -= made
        return self._paused(TaskId(task_id), task, prefilled)

    def _fact_answer(self, task_id: int) -> ev.Event:
        """The engine, or the environment, has answered."""
        task = self._playing[TaskId(task_id)]
        if task.is_generating:
            return self._end_turn(TaskId(task_id), task)
        if task.context_tokens == 0:
            task.context_tokens = task.work.prompt_tokens
            self._enter(task)
        elif task.left_tokens == 0:
            if task.turn == len(task.work.turns) - 1:
                return self._finish(TaskId(task_id), task)
            self._grow(task, task.work.turns[task.turn].observation_tokens)
            task.turn += 1
            task.left_tokens = task.work.turns[task.turn].output_tokens
        if task.must_pause:
            return self._paused(TaskId(task_id), task, 0)
        task.is_generating, task.sent_s = True, self.now_s
        self._next(TaskId(task_id), task.left_tokens * TOKEN_S)
        return ev.TurnStarted(TaskId(task_id), task.rank, task.context_tokens)

    def _end_turn(self, task_id: TaskId, task: Playing) -> ev.Event:
        made, task.left_tokens = task.left_tokens, 0
        prefilled = self._generated(task, made)
        self._next(task_id, task.work.turns[task.turn].latency_s)
        return ev.TurnEnded(task_id, task.rank, task.context_tokens, made, prefilled)

    def _generated(self, task: Playing, made: int) -> int:
        """A call of the engine is over; returns what it had to compute of the prompt."""
        prefilled = task.context_tokens - task.computed_tokens
        self._grow(task, made)
        task.generated_tokens += made
        task.computed_tokens = task.context_tokens - 1
        task.is_generating = False
        return prefilled

    def _paused(self, task_id: TaskId, task: Playing, prefilled: int) -> ev.Event:
        self._leave(task)
        return ev.TaskPaused(task_id, task.rank, task.context_tokens, task.generated_tokens, prefilled)

    def _finish(self, task_id: TaskId, task: Playing) -> ev.Event:
        self._leave(task)
        del self._playing[task_id]
        self.num_finished += 1
        reward = float(self._rng.random() < 0.5)
        return ev.TaskFinished(
            task_id=task_id,
            rank=task.rank,
            context_tokens=task.context_tokens,
            generated_tokens=task.generated_tokens,
            num_turns=len(task.work.turns),
            oldest_version=task.version,
            newest_version=self._version,
            reward=reward,
            success=reward > 0,
        )

    # --- what the engines hold ------------------------------------------------------------------------------------

    def _enter(self, task: Playing) -> None:
        key = (task.rank, task.spec.group_id)
        self._members[key] += 1
        shared = 0 if self._members[key] == 1 else task.work.prompt_tokens
        self._used_tokens[task.rank] += task.context_tokens - shared

    def _leave(self, task: Playing) -> None:
        if task.context_tokens == 0:
            return
        key = (task.rank, task.spec.group_id)
        self._members[key] -= 1
        shared = task.work.prompt_tokens if self._members[key] else 0
        if not shared:
            del self._members[key]
        self._used_tokens[task.rank] -= task.context_tokens - shared

    def _grow(self, task: Playing, tokens: int) -> None:
        task.context_tokens += tokens
        self._used_tokens[task.rank] += tokens

    def _fact_load(self, rank: int) -> ev.Event:
        self._plan(ENGINE_LOAD_EVERY_S, "load", rank)
        return ev.EngineLoad(Rank(rank), self._used_tokens[rank], 0, 0, 0, 0, 0)

    # --- groups, steps, syncs -------------------------------------------------------------------------------------

    def _on_supply(self, action: ac.SupplyGroups) -> None:
        self._supplies.append(action)
        self._plan(SUPPLY_S, "supply", 0)

    def _fact_supply(self, _: int) -> ev.Event:
        order = self._supplies.pop(0)
        specs = []
        for _number in range(order.count):
            group_id = GroupId(self._num_groups)
            self._num_groups += 1
            work = next(self._works)
            self._unplayed[group_id] = list(work.tasks)
            specs.append(GroupSpec(group_id, order.kind, "env", "train", group_id, work.task_type))
        return ev.GroupsSupplied(order.kind, tuple(specs))

    def _on_open_step(self, action: ac.OpenStep) -> None:
        self._step = action

    def _on_assign_micro_batch(self, action: ac.AssignMicroBatch) -> None:
        self._micro_batches[action.micro_batch_id] = action
        self._plan(MICRO_BATCH_S * self._rng.uniform(0.9, 1.1), "micro_batch", action.micro_batch_id)

    def _fact_micro_batch(self, number: int) -> ev.Event:
        share = self._micro_batches.pop(MicroBatchId(number))
        return ev.MicroBatchTrained(share.rank, share.step, share.micro_batch_id, 1000, 1.0, 0.0, 1.0, 2.0, 0.0)

    def _on_close_step(self, action: ac.CloseStep) -> None:
        for rank in action.ranks:
            self._plan(STEP_S * self._rng.uniform(0.9, 1.1), "trained", rank)

    def _fact_trained(self, rank: int) -> ev.Event:
        assert self._step is not None
        return ev.StepTrained(
            step=self._step.step,
            rank=Rank(rank),
            updated=True,
            abandoned=False,
            version=WeightVersion(self._step.version + 1),
            grad_norm=1.0,
            lr=1e-6,
            num_trained_tokens=1,
            num_padding_tokens=0,
            reference_s=1.0,
            swap_s=0.0,
            forward_s=1.0,
            backward_s=2.0,
            waited_s=0.0,
            optimizer_s=0.1,
            num_swaps=0,
            sums={"loss": 0.1},
            max_same_version_gap=0.0,
        )

    def _on_prepare_sync(self, action: ac.PrepareSync) -> None:
        self._sync_version = action.version
        for rank in action.ranks:
            self._plan(ORDER_S * self._rng.uniform(1.0, 5.0), "ready", rank)

    def _fact_ready(self, rank: int) -> ev.Event:
        return ev.SyncReady(Rank(rank), self._sync_version)

    def _on_start_sync(self, action: ac.StartSync) -> None:
        self._version = action.version
        for rank in action.ranks:
            self._plan(SYNC_S * self._rng.uniform(0.9, 1.1), "synced", rank)

    def _fact_synced(self, rank: int) -> ev.Event:
        return ev.SyncFinished(Rank(rank), self._sync_version, True, "", 1.0, 0.5, 0.0)

    def _on_note(self, action: ac.Note) -> None:
        if action.level != "info":
            raise TideError(f"the core complains, so the world is wrong: {action.text}")
