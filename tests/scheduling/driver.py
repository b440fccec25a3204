"""A tiny fake world around the scheduling core: it answers actions as real ranks and the real shell would, and keeps its own books.

`World.options()` names every fact that could be reported next, `World.deliver(option)` reports it. Whatever can be checked of the
core's answers without a look inside it is checked on the way (`_absorb`), so every test that drives a world makes these checks:
capacity, budgets, who is started where, the order of steps and syncs, staleness, advantages, anchored evaluation, the token ledger.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tiderl.config.schema import (
    CheckpointConfig,
    Config,
    EvalConfig,
    LossConfig,
    ModelConfig,
    RolesConfig,
    RolloutConfig,
    ScheduleConfig,
    TrainConfig,
    TrainerConfig,
)
from tiderl.scheduling import actions as ac
from tiderl.scheduling import events as ev
from tiderl.scheduling.core import Core
from tiderl.scheduling.ledger import Activity
from tiderl.types import (
    FailureKind,
    GroupId,
    GroupSpec,
    MicroBatchId,
    Pipelining,
    Rank,
    Role,
    TaskId,
    TaskKind,
    WeightVersion,
)

MAX_CONTEXT_TOKENS = 100
MAX_TURNS = 3
PROMPT_TOKENS = 12
EVAL_BASE = 1_000_000
SETTLED = ("trained", "evaluated", "stale", "failed", "dropped")
#: What can be reported next, and of whom (a rank, a task, a place in a queue).
Option = tuple[str, int]


def small_config(
    *,
    steps: int = 3,
    groups_per_step: int = 2,
    group_size: int = 2,
    max_staleness: int = 1,
    on_late: str = "wait",
    num_actors: int = 1,
    eval_every: int = 0,
    num_eval_tasks: int = 2,
    checkpoint_every: int = 0,
    max_tasks_per_rank: int = 256,
    max_attempts: int = 3,
    num_ref: int = 0,
    kl_weight: float = 0.0,
    mode: str = "tide",
    pipelining: str = "auto",
    max_micro_batch_tokens: int = 2 * MAX_CONTEXT_TOKENS,
    **rollout: Any,
) -> Config:
    """A job small enough to think through; no share of the KV cache is kept free, so that budgets are what they say."""
    return Config(
        model=ModelConfig(max_context_tokens=MAX_CONTEXT_TOKENS),
        roles=RolesConfig(num_actors=num_actors, num_ref=num_ref),
        rollout=RolloutConfig(
            **{"max_tasks_per_rank": max_tasks_per_rank, "kv_reserve": 0.0, "max_attempts": max_attempts, **rollout}
        ),
        train=TrainConfig(steps=steps, groups_per_step=groups_per_step, group_size=group_size),
        trainer=TrainerConfig(max_micro_batch_tokens=max_micro_batch_tokens),
        loss=LossConfig(kl_weight=kl_weight),
        schedule=ScheduleConfig(
            max_staleness=max_staleness,
            on_late=on_late,  # type: ignore[arg-type]
            mode=mode,  # type: ignore[arg-type]
            pipelining=pipelining,  # type: ignore[arg-type]
        ),
        eval=EvalConfig(every=eval_every, num_tasks=num_eval_tasks),
        checkpoint=CheckpointConfig(every=checkpoint_every),
    )


@dataclass
class Playing:
    """An attempt at a task, as its rank sees it."""

    order: ac.StartTask
    rank: Rank
    state: str = "starting"
    #: The order to pause is on its way.
    pausing: bool = False
    context_tokens: int = PROMPT_TOKENS - 2
    generated_tokens: int = 0
    #: Tokens that the rank's cache holds of it.
    held_tokens: int = 0
    versions: list[WeightVersion] = field(default_factory=list)
    num_turns: int = 0

    @property
    def kind(self) -> TaskKind:
        return self.order.group.kind


@dataclass
class Kept:
    """A finished training task in the shell's buffer."""

    order: ac.StartTask
    event: ev.TaskFinished


class World:
    """Drives `core` until it shuts down. `kv_tokens` has one entry a rollout rank; `saved` is a state to go on from."""

    def __init__(
        self,
        config: Config,
        kv_tokens: tuple[int, ...] = (400,),
        capacity: int = 64,
        saved: Mapping[str, Any] | None = None,
        block_tokens: int = 1,
    ) -> None:
        self.config, self.kv_tokens, self.capacity, self.block_tokens = config, kv_tokens, capacity, block_tokens
        self.num_actors = config.roles.num_actors
        self.ref_ranks = [Rank(self.num_actors + i) for i in range(config.roles.num_ref)]
        self.first_rollout = self.num_actors + len(self.ref_ranks)
        self.world_size = self.first_rollout + len(kv_tokens)
        self.core = Core(config, self.world_size)
        if saved is not None:
            self.core.load_state_dict(saved)
        self.now_s = 0.0
        self.history: list[tuple[float, ev.Event, tuple[ac.Action, ...]]] = []
        # What the ranks and the shell know.
        self.unjoined = {Rank(r) for r in range(self.world_size)}
        self.capacity_told = False
        self.trained_version = self.synced_version = WeightVersion(saved["version"] if saved else 0)
        self.rank_versions = {Rank(self.first_rollout + i): WeightVersion(0) for i in range(len(kv_tokens))}
        self.supplies: deque[ac.SupplyGroups] = deque()
        self.next_train_group = saved["num_supplied"] if saved else 0
        self.next_eval_group = EVAL_BASE
        self.playing: dict[TaskId, Playing] = {}
        self.paused: dict[TaskId, Playing] = {}
        #: Tasks that were told to end, and in which account their tokens will be (none: they stay held).
        self.cancelled: dict[TaskId, str | None] = {}
        self.num_finished: Counter[GroupId] = Counter()
        self.num_pauses = 0
        self.prompt_tokens = self.prefilled_tokens = 0
        self.attempts: Counter[TaskId] = Counter()
        self.buffer: dict[TaskId, Kept] = {}
        self.step: ac.OpenStep | None = None
        self.step_tasks: list[TaskId] = []
        self.step_outcome: str | None = None
        self.step_left: set[Rank] = set()
        self.step_closed = False
        self.step_shares: list[ac.AssignMicroBatch] = []
        #: Micro-batches of the open step that are not trained on, and those whose log-probs a Ref rank owes.
        self.to_train: dict[MicroBatchId, ac.AssignMicroBatch] = {}
        self.to_score: dict[MicroBatchId, ac.ScoreMicroBatch] = {}
        self.lost: set[Rank] = set()
        self.abandon = False
        self.num_skipped_in_a_row = 0
        self.sync: ac.PrepareSync | None = None
        self.sync_started = False
        self.sync_answers: set[Rank] = set()
        self.saves: list[tuple[Rank, ac.SaveCheckpoint]] = []
        #: What each rank has told of its time, and when; the sum of both at the last weight sync.
        self.spent: dict[Rank, tuple[float, dict[str, float]]] = {}
        self.spent_at_sync = 0.0
        self.round_version: WeightVersion | None = None
        self.closes_round = False
        # What came of it.
        self.stopped = False
        self.shutdown: ac.Shutdown | None = None
        self.reports: list[ac.ReportStep] = []
        self.evaluations: list[ac.ReportEvaluation] = []
        self.trained_groups: list[GroupId] = []
        self.started_groups: set[GroupId] = set()
        self.dropped: list[ac.DropTrajectories] = []
        self.notes: list[ac.Note] = []
        self.states: list[tuple[ac.SaveCheckpoint, dict[str, Any]]] = []
        self.outcomes: Counter[tuple[TaskId, int]] = Counter()
        saved_ledger = saved["ledger"] if saved else dict.fromkeys(("generated", *SETTLED, "held"), 0)
        self.books = Counter({name: saved_ledger[name] for name in ("generated", *SETTLED)})
        self.books["failed"] = saved_ledger["failed"] + saved_ledger["held"]

    # --- what can happen next -------------------------------------------------------------------------------------

    def options(self) -> list[Option]:
        """Everything that could be reported next, in a fixed order; empty only if nothing ever comes again by itself."""
        options: list[Option] = [("join", r) for r in sorted(self.unjoined)]
        options += [] if self.capacity_told else [("capacity", 0)]
        options += [("supply", 0)] if self.supplies else []
        for task_id, task in sorted(self.playing.items()):
            if task_id in self.cancelled:
                options.append(("cancelled", task_id))
            elif task.pausing and (task.state != "acting" or task.num_turns < MAX_TURNS):
                options.append(("paused", task_id))
            if task.state == "generating":
                options.append(("turn_ended", task_id))
            elif task.num_turns < MAX_TURNS:
                options.append(("turn_started", task_id))
            if task.state == "acting":
                options.append(("finished", task_id))
        options += [("scored", number) for number in self.to_score]
        # Leaving a step is collective: where one actor has left it with an update, all had trained on all that was theirs.
        gives_up = self.abandon and self.step_outcome in (None, "abandoned")
        for rank in range(self.num_actors):
            # An actor works its micro-batches off in order; decoupled, each needs its log-probs.
            mine = [number for number, share in self.to_train.items() if share.rank == rank]
            if mine and mine[0] not in self.to_score and not gives_up:
                options.append(("micro_batch", mine[0]))
            if self.step_closed and rank not in self.step_left and (not mine or gives_up):
                options.append(("trained", rank))
        # The shell answers an evaluation's order for groups long before the next sync is called.
        if self.sync is not None and not any(s.kind is TaskKind.EVAL for s in self.supplies):
            verb = "synced" if self.sync_started else "ready"
            options += [(verb, r) for r in self.sync.ranks if r not in self.sync_answers]
        return options + [("saved", i) for i in range(len(self.saves))]

    @property
    def waits_for_a_rank(self) -> bool:
        working = self.step_closed or bool(self.to_train)
        return self.shutdown is None and bool(self.unjoined or working or self.sync or self.saves_to_wait_for)

    @property
    def saves_to_wait_for(self) -> list[ac.SaveCheckpoint]:
        return [save for _, save in self.saves if save.final]

    @property
    def may_tick(self) -> bool:
        """Is there a deadline that may pass without the job failing: that of an evaluation?"""
        started = self.capacity_told and not self.unjoined
        return started and not self.waits_for_a_rank and not self.stopped and self.core.next_deadline_s() is not None

    def deliver(
        self, option: Option, *, reward: float = 1.0, tokens: int = 3, updated: bool = True
    ) -> tuple[ac.Action, ...]:
        """Report the fact behind `option` to the core."""
        verb, number = option
        report: Callable[..., ev.Event] = getattr(self, f"_{verb}")
        if verb == "finished":
            return self.tell(report(TaskId(number), reward))
        if verb in ("turn_ended", "paused"):
            return self.tell(report(TaskId(number), tokens))
        if verb == "trained":
            return self.tell(report(Rank(number), updated))
        return self.tell(report(number))

    def fail(self, task_id: TaskId, *, retryable: bool, tokens: int = 0) -> tuple[ac.Action, ...]:
        """The environment of a playing task fails, `tokens` into a turn that nobody was told of."""
        task = self.playing.pop(task_id)
        tokens = tokens if task.state == "generating" else 0
        self._account("generated", tokens)
        lost = task.generated_tokens + tokens
        self._account("dropped" if self.cancelled.get(task_id) == "dropped" else "failed", lost)
        prefilled = self._prefill(task) if task.state == "generating" else 0
        self._leave(task)
        event = ev.TaskFailed(task_id, task.rank, FailureKind.ENVIRONMENT, "env broke", retryable, lost, prefilled)
        return self.tell(event)

    def lose_paused(self, task_id: TaskId) -> tuple[ac.Action, ...]:
        """The environment session of a paused task is gone."""
        task = self.paused.pop(task_id)
        self._account("failed", task.generated_tokens)
        self._leave(task)
        return self.tell(ev.PausedTaskLost(task_id, "the lease ran out"))

    def tell_seconds(self, rank: Rank, activity: Activity) -> tuple[ac.Action, ...]:
        """A rank whose clock is the core's says that it did one thing since its last word (or since it began, at 0.0)."""
        then_s, before = self.spent.get(rank, (0.0, {}))
        now_s = self.now_s + 0.125
        self.spent[rank] = (now_s, before | {activity.value: before.get(activity.value, 0.0) + now_s - then_s})
        return self.tell(ev.SecondsSpent(rank, self.spent[rank][1]))

    def stop(self) -> tuple[ac.Action, ...]:
        self.stopped = True
        return self.tell(ev.StopRequested("enough"))

    def tick_at_deadline(self) -> tuple[ac.Action, ...]:
        deadline_s = self.core.next_deadline_s()
        assert deadline_s is not None
        self.now_s = max(self.now_s, deadline_s)
        return self.tell(ev.Tick())

    def tell(self, event: ev.Event) -> tuple[ac.Action, ...]:
        """Hand any event to the core and act on the answer; what the core refuses, it raises."""
        now_s = self.now_s + 0.125
        actions = self.core.handle(event, now_s)
        self.now_s = now_s
        self.history.append((now_s, event, actions))
        self.closes_round = any(isinstance(a, ac.ReportEvaluation) for a in actions) or self.stopped
        for action in actions:
            self._absorb(action)
        self._check()
        return actions

    def play(self, rng: random.Random, *, until: Callable[[], bool] = lambda: False, max_events: int = 50_000) -> None:
        """Deliver whatever can happen, in random order, until the job ends or `until` says so."""
        for _ in range(max_events):
            if self.shutdown is not None or until():
                return
            options = self.options()
            assert options, f"nothing will ever happen again; the core waits for {self.core.training.waits_for()}"
            self.deliver(rng.choice(options), reward=float(rng.randint(0, 2)), tokens=rng.randint(1, 9))
        raise AssertionError(f"the job did not end within {max_events} events")

    # --- facts ----------------------------------------------------------------------------------------------------

    def _join(self, rank: Rank) -> ev.Event:
        self.unjoined.remove(rank)
        if rank < self.num_actors:
            return ev.RankJoined(rank, Role.ACTOR, self.trained_version, 0, 0)
        if rank < self.first_rollout:
            return ev.RankJoined(rank, Role.REF, WeightVersion(0), 0, 0)
        num_blocks = self.kv_tokens[rank - self.first_rollout] // self.block_tokens
        return ev.RankJoined(rank, Role.ROLLOUT, WeightVersion(0), num_blocks, self.block_tokens)

    def _capacity(self, _: int) -> ev.Event:
        self.capacity_told = True
        return ev.EnvironmentCapacity(self.capacity)

    def _supply(self, _: int) -> ev.Event:
        order = self.supplies.popleft()
        is_train = order.kind is TaskKind.TRAIN
        first = self.next_train_group if is_train else self.next_eval_group
        if is_train:
            self.next_train_group += order.count
        else:
            self.next_eval_group += order.count
        groups = tuple(spec_of(first + i, order.kind) for i in range(order.count))
        return ev.GroupsSupplied(order.kind, groups)

    def _turn_started(self, task_id: TaskId) -> ev.Event:
        task = self.playing[task_id]
        task.context_tokens += 0 if task.state == "interrupted" else 2
        task.state = "generating"
        task.versions.append(self.rank_versions[task.rank])
        return ev.TurnStarted(task_id, task.rank, task.context_tokens)

    def _turn_ended(self, task_id: TaskId, tokens: int) -> ev.Event:
        task = self.playing[task_id]
        task.state = "acting"
        task.num_turns += 1
        prefilled = self._generate(task, tokens)
        return ev.TurnEnded(task_id, task.rank, task.context_tokens, tokens, prefilled)

    def _paused(self, task_id: TaskId, tokens: int) -> ev.Event:
        """The task leaves its rank; a generation is interrupted after `tokens`."""
        task = self.playing.pop(task_id)
        prefilled = 0
        if task.state == "generating":
            prefilled = self._generate(task, tokens)
            task.state = "interrupted"
        elif task.state == "acting":
            task.state = "waiting"
        task.pausing, task.held_tokens = False, 0
        self.paused[task_id] = task
        return ev.TaskPaused(task_id, task.rank, task.context_tokens, task.generated_tokens, prefilled)

    def _generate(self, task: Playing, tokens: int) -> int:
        """The rank computes the prompt and makes `tokens`; returns how much of the prompt it had to compute."""
        prefilled = self._prefill(task)
        task.context_tokens += tokens
        task.generated_tokens += tokens
        task.held_tokens = task.context_tokens - 1
        task.versions.append(self.rank_versions[task.rank])
        self._account("generated", tokens)
        return prefilled

    def _prefill(self, task: Playing) -> int:
        prefilled = task.context_tokens - task.held_tokens
        self.prompt_tokens += task.context_tokens
        self.prefilled_tokens += prefilled
        return prefilled

    def _finished(self, task_id: TaskId, reward: float) -> ev.Event:
        task = self.playing.pop(task_id)
        self._leave(task)
        oldest, newest = min(task.versions), max(task.versions)
        event = ev.TaskFinished(
            task_id,
            task.rank,
            task.context_tokens,
            task.generated_tokens,
            task.num_turns,
            oldest,
            newest,
            reward,
            reward > 0,
        )
        if self.cancelled.get(task_id) == "dropped":
            self._account("dropped", task.generated_tokens)
        elif task.kind is TaskKind.TRAIN:
            self.buffer[task_id] = Kept(task.order, event)
            self.num_finished[task.order.group.group_id] += 1
            if self.num_finished[task.order.group.group_id] == self.config.train.group_size:
                # One that was told to end before, because it is too long, is spare now.
                for other in self.cancelled.keys() & self.playing.keys():
                    if self.playing[other].order.group == task.order.group:
                        self.cancelled[other] = "dropped"
        else:
            self._account("evaluated", task.generated_tokens)
            if self.round_version is not None and task_id not in self.cancelled:
                assert {oldest, newest} == {self.round_version}, "an evaluation was played by two versions"
        return event

    def _cancelled(self, task_id: TaskId) -> ev.Event:
        task = self.playing.pop(task_id)
        self._leave(task)
        if (account := self.cancelled[task_id]) is not None:
            self._account(account, task.generated_tokens)
        prefilled = self._prefill(task) if task.state == "generating" else 0
        total = task.generated_tokens
        return ev.TaskFailed(task_id, task.rank, FailureKind.CANCELLED, "told to", False, total, prefilled)

    def _micro_batch(self, number: int) -> ev.Event:
        share = self.to_train.pop(MicroBatchId(number))
        tokens = sum(self.buffer[t].event.context_tokens for t in share.task_ids)
        return ev.MicroBatchTrained(share.rank, share.step, share.micro_batch_id, tokens, 0.5, 0.125, 1.0, 2.0, 0.0)

    def _scored(self, number: int) -> ev.Event:
        share = self.to_score.pop(MicroBatchId(number))
        tokens = sum(self.buffer[t].event.context_tokens for t in share.task_ids)
        return ev.ReferenceScored(share.rank, share.step, share.micro_batch_id, tokens, 0.5)

    def work_off(self) -> None:
        """The actors are through with all micro-batches that they have."""
        while done := [o for o in self.options() if o[0] in ("scored", "micro_batch")]:
            self.deliver(done[0])

    def lose(self, rank: Rank) -> tuple[ac.Action, ...]:
        """A Ref rank dies, and with it all that it owes."""
        self.lost.add(rank)
        return self.tell(ev.RankLost(rank, "killed"))

    def _trained(self, rank: Rank, updated: bool) -> ev.Event:
        step = self.step
        assert step is not None
        if self.step_outcome is None:
            # Three updates in a row that are not finite would end the job.
            skip = not updated and self.num_skipped_in_a_row < 2
            self.step_outcome = "abandoned" if self.abandon else "skipped" if skip else "updated"
        self.step_left.add(rank)
        updated = self.step_outcome == "updated"
        event = trained(
            step.step, rank, WeightVersion(step.version + updated), updated, self.step_outcome == "abandoned"
        )
        if len(self.step_left) == self.num_actors:
            self._leave_step(updated)
        return event

    def _ready(self, rank: Rank) -> ev.Event:
        assert self.sync is not None
        self.sync_answers.add(rank)
        return ev.SyncReady(rank, self.sync.version)

    def _synced(self, rank: Rank) -> ev.Event:
        assert self.sync is not None
        version = self.sync.version
        self.sync_answers.add(rank)
        if rank in self.rank_versions:
            self.rank_versions[rank] = version
        if len(self.sync_answers) == len(self.sync.ranks):
            self.sync, self.sync_answers, self.synced_version = None, set(), version
        return ev.SyncFinished(rank, version, True, "", 0.5, 0.25, 0.0)

    def _saved(self, place: int) -> ev.Event:
        rank, save = self.saves.pop(place)
        return ev.CheckpointSaved(save.step, save.final, rank, True, "")

    # --- what the core answers ------------------------------------------------------------------------------------

    def _absorb(self, action: ac.Action) -> None:
        absorb = getattr(self, f"_on_{type(action).__name__}")
        assert self.shutdown is None, f"{action} after the job's end"
        absorb(action)

    def _on_SupplyGroups(self, action: ac.SupplyGroups) -> None:
        assert action.count > 0
        assert not self.stopped
        if action.kind is TaskKind.EVAL:
            assert action.count == self.config.eval.num_tasks
            assert self.round_version is None, "two evaluation rounds at once"
            self.round_version = self.synced_version
        self.supplies.append(action)

    def _on_StartTask(self, action: ac.StartTask) -> None:
        task_id = action.task_id
        assert action.rank in self.rank_versions
        assert task_id not in self.playing and task_id not in self.paused
        assert action.attempt == self.attempts[task_id] + 1 <= self.config.rollout.max_attempts
        assert not self.stopped, "a task starts although the job is ending"
        if action.group.kind is TaskKind.EVAL:
            assert self.round_version == self.synced_version, "an evaluation task starts outside of its round"
        else:
            self.started_groups.add(action.group.group_id)
        self.attempts[task_id] += 1
        self.playing[task_id] = Playing(action, action.rank)

    def _on_PauseTask(self, action: ac.PauseTask) -> None:
        task = self.playing[action.task_id]
        assert task.rank == action.rank and not task.pausing and action.task_id not in self.cancelled
        task.pausing = True
        self.num_pauses += 1

    def _on_ResumeTask(self, action: ac.ResumeTask) -> None:
        assert not self.stopped and action.rank in self.rank_versions
        task = self.playing[action.task_id] = self.paused.pop(action.task_id)
        task.rank = action.rank

    def _on_EndPaused(self, action: ac.EndPaused) -> None:
        for task_id in action.task_ids:
            task = self.paused.pop(task_id)
            self._leave(task)
            if (account := self._fate(task)) is not None:
                self._account(account, task.generated_tokens)

    def _on_CancelTask(self, action: ac.CancelTask) -> None:
        task = self.playing[action.task_id]
        assert task.rank == action.rank and action.task_id not in self.cancelled
        self.cancelled[action.task_id] = self._fate(task)

    def _fate(self, task: Playing) -> str | None:
        """Where the tokens of a task that is ended from above belong."""
        if self.num_finished[task.order.group.group_id] >= self.config.train.group_size:
            return "dropped"
        if task.kind is TaskKind.TRAIN and self.stopped:
            return None
        if task.kind is TaskKind.EVAL and self.closes_round:
            return "failed"
        over = self.trained_version >= self.config.train.steps and task.kind is TaskKind.TRAIN
        if over:
            return None
        # Nobody has lost interest, so it must be too long for any rank.
        assert task.context_tokens > max(k // self.block_tokens * self.block_tokens for k in self.kv_tokens)
        return "failed"

    def _on_DropTrajectories(self, action: ac.DropTrajectories) -> None:
        self.dropped.append(action)
        is_stale = "staleness" in action.reason
        assert not (is_stale and self.config.schedule.on_late == "wait"), (
            "a group came too late although steps wait for it"
        )
        for task_id in action.task_ids:
            if (kept := self.buffer.pop(task_id, None)) is not None:
                self._account("stale" if is_stale else "failed", kept.event.generated_tokens)

    def _on_OpenStep(self, action: ac.OpenStep) -> None:
        assert self.step is None and self.sync is None, "a step opens while another step or a sync is in progress"
        assert self.trained_version == self.synced_version == action.version < self.config.train.steps
        assert action.ranks == tuple(range(self.num_actors))
        self.step, self.step_tasks, self.step_outcome, self.step_left, self.abandon = action, [], None, set(), False
        self.step_closed, self.step_shares, self.to_train, self.to_score = False, [], {}, {}
        self.scores_decoupled = action.pipelining is Pipelining.DECOUPLED
        assert (action.pipelining is Pipelining.NONE) == (self.config.loss.kl_weight == 0.0)
        assert not self.scores_decoupled or set(self.ref_ranks) - self.lost

    def _on_AssignMicroBatch(self, action: ac.AssignMicroBatch) -> None:
        assert self.step is not None and action.step == self.step.step and action.rank < self.num_actors
        assert action.task_ids and len(action.task_ids) == len(action.advantages)
        tokens = sum(self.buffer[t].event.context_tokens for t in action.task_ids)
        assert tokens <= self.config.trainer.max_micro_batch_tokens
        assert not self.step_closed and action.micro_batch_id not in self.to_train
        self.step_tasks += action.task_ids
        self.step_shares.append(action)
        self.to_train[action.micro_batch_id] = action

    def _on_ScoreMicroBatch(self, action: ac.ScoreMicroBatch) -> None:
        """Right after the actor's order, which it repeats; never in a step that the actors finish by themselves."""
        share = self.step_shares[-1]
        assert self.scores_decoupled and action.rank in self.ref_ranks and action.rank not in self.lost
        ours = (share.step, share.micro_batch_id, share.rank, share.task_ids)
        assert (action.step, action.micro_batch_id, action.actor, action.task_ids) == ours
        self.to_score[action.micro_batch_id] = action

    def _on_FinishColocated(self, action: ac.FinishColocated) -> None:
        assert self.step is not None and action.step == self.step.step and self.scores_decoupled
        self.scores_decoupled, self.to_score = False, {}

    def _on_CloseStep(self, action: ac.CloseStep) -> None:
        """The batch is complete: whole groups, each trajectory once, none too stale, advantages that sum to zero."""
        assert self.step is not None and action.num_micro_batches == len(self.step_shares) and not self.step_closed
        self.step_closed = True
        if self.abandon:
            return
        assert len(set(self.step_tasks)) == len(self.step_tasks)
        groups: dict[GroupId, list[TaskId]] = {}
        for task_id in self.step_tasks:
            groups.setdefault(self.buffer[task_id].order.group.group_id, []).append(task_id)
            oldest = self.buffer[task_id].event.oldest_version
            assert self.step.version - oldest <= self.config.schedule.max_staleness, "trained too late"
        assert len(groups) == self.config.train.groups_per_step
        advantages = {t: a for share in self.step_shares for t, a in zip(share.task_ids, share.advantages, strict=True)}
        for group_id, members in groups.items():
            assert len(members) >= 2
            alive = [t for t, p in (*self.playing.items(), *self.paused.items()) if p.order.group.group_id == group_id]
            assert all(self.cancelled.get(t) == "dropped" for t in alive), "the group is not complete"
            assert len(members) <= self.config.train.group_size
            assert math.isclose(sum(advantages[t] for t in members), 0.0, abs_tol=1e-9)
        self.step_groups = sorted(groups)

    def _on_AbandonStep(self, action: ac.AbandonStep) -> None:
        assert self.stopped and self.step is not None and action.step == self.step.step
        self.abandon = True

    def _on_PrepareSync(self, action: ac.PrepareSync) -> None:
        assert self.step is None and self.sync is None
        assert self.round_version is None, "the sync does not wait for the evaluation"
        assert action.version == self.trained_version
        assert list(action.ranks) == [*range(self.num_actors), *self.rank_versions]
        self.sync, self.sync_started, self.sync_answers = action, False, set()

    def _on_StartSync(self, action: ac.StartSync) -> None:
        assert self.sync is not None and not self.sync_started and action.ranks == self.sync.ranks
        assert self.sync_answers == set(self.sync.ranks), "the sync starts before all its members are ready"
        assert action.leader == 0
        self.sync_started, self.sync_answers = True, set()

    def _on_SaveCheckpoint(self, action: ac.SaveCheckpoint) -> None:
        assert action.step == self.trained_version
        self.saves += [(rank, action) for rank in action.ranks]
        # The shell takes the state in this moment.
        self.states.append((action, self.core.state_dict()))

    def _on_ReportStep(self, action: ac.ReportStep) -> None:
        self.reports.append(action)
        assert action.metrics["trained_tokens"] == self.last_trained_tokens

    def _on_ReportEvaluation(self, action: ac.ReportEvaluation) -> None:
        assert action.version == self.round_version
        assert action.complete == (action.num_missing == 0)
        self.evaluations.append(action)
        self.round_version = None

    def _on_ReportLedger(self, action: ac.ReportLedger) -> None:
        told_s = sum(then_s for then_s, _ in self.spent.values())
        assert action.version == self.synced_version
        assert action.elapsed_s == pytest.approx(told_s - self.spent_at_sync)
        assert sum(action.seconds.values()) == pytest.approx(action.elapsed_s)
        assert action.error < 1e-9
        # What the same answer decides later (tasks that are given up) may settle more.
        assert action.tokens["generated"] == self.books["generated"]
        assert action.tokens["generated"] == sum(action.tokens[a] for a in SETTLED) + action.tokens["held"]
        self.spent_at_sync = told_s

    def _on_Note(self, action: ac.Note) -> None:
        self.notes.append(action)

    def _on_Shutdown(self, action: ac.Shutdown) -> None:
        self.shutdown = action

    # --- books ----------------------------------------------------------------------------------------------------

    def _leave_step(self, updated: bool) -> None:
        """The last actor leaves: what was in the step is trained, or stays open (abandoned), or the core drops it (skipped)."""
        assert self.step is not None
        if updated:
            self.trained_version = WeightVersion(self.step.version + 1)
            self.last_trained_tokens = sum(self.buffer.pop(t).event.generated_tokens for t in self.step_tasks)
            self._account("trained", self.last_trained_tokens)
            self.trained_groups += self.step_groups
        self.num_skipped_in_a_row = 0 if updated else self.num_skipped_in_a_row + 1
        self.step, self.step_closed, self.to_train = None, False, {}

    def _leave(self, task: Playing) -> None:
        key = (task.order.task_id, task.order.attempt)
        self.outcomes[key] += 1
        assert self.outcomes[key] == 1

    def _account(self, account: str, num_tokens: int) -> None:
        self.books[account] += num_tokens

    def _check(self) -> None:
        """After every event: the ledger closes and agrees with ours; a wait for a rank has a deadline."""
        ledger = self.core.book.ledger
        balances = ledger.balances()
        assert balances["generated"] == sum(balances[a] for a in SETTLED) + balances["held"]
        ours = {name: self.books[name] for name in ("generated", *SETTLED)}
        assert {name: balances[name] for name in ours} == ours
        assert ledger.prefill_first + ledger.prefill_repeated == self.prefilled_tokens
        assert ledger.prefill_cached == self.prompt_tokens - self.prefilled_tokens
        assert self.core.rollout.num_paused == len(self.paused)
        self._check_places()
        if self.stopped:
            self.round_version = None
        if self.waits_for_a_rank:
            assert self.core.next_deadline_s() is not None, f"no bound on the wait for {self.core.training.waits_for()}"

    def _check_places(self) -> None:
        """Capacity, tasks a rank, and budgets: whatever the reported contexts add up to, once for what a group shares."""
        assert len(self.playing) + len(self.paused) <= self.capacity or self.shutdown is not None
        for rank, kv_tokens in zip(self.rank_versions, self.kv_tokens, strict=True):
            on_rank = [t for t in self.playing.values() if t.rank == rank]
            assert len(on_rank) <= self.config.rollout.max_tasks_per_rank
            active = [t for t in on_rank if not t.pausing and t.versions and t.order.task_id not in self.cancelled]
            if len(active) < 2 or self.config.rollout.scheduler == "fixed" or self.shutdown is not None:
                continue
            shared = len({t.order.group.group_id for t in active}) * PROMPT_TOKENS
            own = sum(t.context_tokens - PROMPT_TOKENS for t in active)
            assert shared + own <= kv_tokens, (rank, [(t.order.task_id, t.context_tokens) for t in active])


def spec_of(number: int, kind: TaskKind = TaskKind.TRAIN) -> GroupSpec:
    """The `number`-th group of a stream without end."""
    return GroupSpec(GroupId(number), kind, "env", "train" if kind is TaskKind.TRAIN else "test", number, "type")


def trained(
    step: int, rank: int, version: int, updated: bool, abandoned: bool = False, **changes: Any
) -> ev.StepTrained:
    """What an actor says at the end of a step."""
    event = ev.StepTrained(
        step=step,
        rank=Rank(rank),
        updated=updated,
        abandoned=abandoned,
        version=WeightVersion(version),
        grad_norm=1.0,
        lr=1e-3,
        num_trained_tokens=10,
        num_padding_tokens=0,
        reference_s=0.0,
        swap_s=0.0,
        forward_s=1.0,
        backward_s=2.0,
        waited_s=0.0,
        optimizer_s=0.5,
        num_swaps=0,
        sums={"loss": 5.0},
        max_same_version_gap=0.0,
    )
    return replace(event, **changes)
