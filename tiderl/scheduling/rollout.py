"""The rollout half of the core: what ranks and environments report of tasks, and what follows from it.

Owns the evaluation round and the tasks' states; `supply.py` knows which groups come, `groups.py` what becomes of them, and `ctb.py`
decides which task plays where. `core.py` calls it; it returns actions and knows nothing of training phases.

Invariants (tests/scheduling/test_core_machine.py):

1. Every task that is started ends as finished or out, once; a retryable failure starts a new attempt, up to `max_attempts`.
2. A pause is followed by a resume, or by the end of the task; a paused task is on no rank.
3. A task is cancelled only when nothing waits for its trajectory: its round or the run is over, its group is complete, or it can
   never fit.

Source: paper §2.1, §4.1, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterable

from tiderl.config.schema import Config
from tiderl.errors import IllegalEvent
from tiderl.scheduling.actions import (
    Action,
    CancelTask,
    DropTrajectories,
    EndPaused,
    Note,
    PauseTask,
    ResumeTask,
    StartTask,
)
from tiderl.scheduling.ctb import ContinuousTaskBatching, Decision
from tiderl.scheduling.evaluation import EvaluationRound
from tiderl.scheduling.events import (
    EngineLoad,
    GroupsSupplied,
    PausedTaskLost,
    TaskFailed,
    TaskFinished,
    TaskPaused,
    TurnEnded,
    TurnStarted,
)
from tiderl.scheduling.groups import GroupBook
from tiderl.scheduling.ledger import Account
from tiderl.scheduling.lifecycle import ON_RANK, Group, Task, TaskState
from tiderl.scheduling.supply import GroupSupply
from tiderl.types import FailureKind, GroupSpec, Rank, TaskId, TaskKind, WeightVersion


class RolloutSide:
    """Tasks, from supply to a trajectory."""

    def __init__(self, config: Config, book: GroupBook) -> None:
        self._config = config
        self.book = book
        self.supply = GroupSupply()
        self.batching = ContinuousTaskBatching(config)
        self.round: EvaluationRound | None = None
        self.num_failures = 0
        self.failures_in_a_row = 0
        self.num_pauses = 0
        self.num_resumes = 0
        self.stopped = False
        #: Tasks on a rank that were told to end, and those of them that no rank can hold.
        self._cancelled: set[TaskId] = set()
        self._never_fits: set[TaskId] = set()
        self._idle_since_s: dict[Rank, float] = {}
        self._rollout_wait_s = 0.0

    @property
    def num_paused(self) -> int:
        return len(self.batching.paused)

    # --- supply and placement -------------------------------------------------------------------------------------

    def add_rank(self, rank: Rank, num_kv_blocks: int, kv_block_tokens: int, now_s: float) -> None:
        self.batching.add_rank(rank, num_kv_blocks, kv_block_tokens)
        self._idle_since_s[rank] = now_s

    def open_round(self, version: WeightVersion, deadline_s: float) -> list[Action]:
        """Start an evaluation of `version`."""
        assert self.round is None
        self.round = EvaluationRound(version, deadline_s)
        return [self.supply.order_round(self._config.eval.num_tasks)]

    def request_supply(self) -> list[Action]:
        """Take as many training groups as the staleness bound allows."""
        if self.stopped:
            return []
        again, orders = self.supply.fill(self.book.gate.quota)
        self._admit(again)
        return [*orders]

    def supplied(self, event: GroupsSupplied) -> list[Action]:
        is_wanted = not self.stopped if event.kind is TaskKind.TRAIN else self.round is not None
        self._admit(self.supply.arrived(event, self.book.groups, is_wanted=is_wanted))
        return []

    def _admit(self, specs: Iterable[GroupSpec]) -> None:
        for spec in specs:
            for task in self.book.open(spec).tasks:
                self.batching.enqueue(task)
                if spec.kind is TaskKind.EVAL and self.round is not None:
                    self.round.add(task.task_id)

    def place_tasks(self, now_s: float) -> list[Action]:
        """Start, pause and resume what Algorithm 1 says."""
        actions: list[Action] = []
        for decision in self.batching.decide():
            actions += self._carry_out(decision, now_s)
        return actions

    def _carry_out(self, decision: Decision, now_s: float) -> list[Action]:
        task, rank = decision.task, decision.rank
        if decision.verb == "pause":
            self.num_pauses += 1
            return [PauseTask(rank, task.task_id)]
        if decision.verb == "never_fits":
            return self._refuse(task, rank, now_s)
        if rank in self._idle_since_s:
            self._rollout_wait_s += now_s - self._idle_since_s.pop(rank)
        if decision.verb == "resume":
            self.num_resumes += 1
            return [ResumeTask(rank, task.task_id)]
        task.attempt += 1
        return [StartTask(rank, task.task_id, task.group.spec, task.attempt)]

    def _refuse(self, task: Task, rank: Rank, now_s: float) -> list[Action]:
        """No rank's cache is large enough for the task."""
        if task.state in ON_RANK:
            self._never_fits.add(task.task_id)
            return [self._cancel(task)]
        ended = [EndPaused((task.task_id,), "no rank can hold it")] if task.state is TaskState.PAUSED else []
        return [*ended, *self._out(task, FailureKind.NEVER_FITS, self._why_never(task), now_s)]

    def _why_never(self, task: Task) -> str:
        needed = max(task.context_tokens, task.group.prompt_tokens or 0)
        return (
            f"its context has {needed} tokens, the largest KV cache of a rank holds {self.batching.largest_cache_tokens}: "
            "lower model.max_context_tokens, or give the engines more (engine.kv_cache_tokens, engine.gpu_memory_share)"
        )

    # --- what the ranks report ------------------------------------------------------------------------------------

    def turn_started(self, event: TurnStarted) -> list[Action]:
        task = self.book.task(event.task_id)
        if task.state is TaskState.PAUSING and not task.in_turn:
            task.require_rank(event.rank)
        else:
            task.require(TaskState.GENERATING, event.rank)
        self._require_growth(task, event.context_tokens)
        if task.state is not TaskState.PAUSING:
            task.state = TaskState.GENERATING
        task.in_turn = True
        task.context_tokens = event.context_tokens
        self.batching.turn_started(task)
        return []

    def turn_ended(self, event: TurnEnded) -> list[Action]:
        task = self.book.task(event.task_id)
        if task.state is TaskState.PAUSING and task.in_turn:
            task.require_rank(event.rank)
        else:
            task.require(TaskState.ACTING, event.rank)
        total = task.generated_tokens + event.generated_tokens
        self._require_count(task, total, event.prefilled_tokens)
        self._require_growth(task, event.context_tokens)
        if task.state is not TaskState.PAUSING:
            task.state = TaskState.ACTING
        self._took(task, event.context_tokens, event.generated_tokens, event.prefilled_tokens)
        task.in_turn = False
        task.num_turns += 1
        self.batching.turn_ended(task)
        return []

    def paused(self, event: TaskPaused) -> list[Action]:
        task = self.book.task(event.task_id)
        task.require(TaskState.PAUSED, event.rank)
        self._require_count(task, event.generated_tokens, event.prefilled_tokens)
        self._require_growth(task, event.context_tokens)
        self._took(task, event.context_tokens, event.generated_tokens - task.generated_tokens, event.prefilled_tokens)
        task.in_turn = False
        task.state = TaskState.PAUSED
        task.rank = None
        self._cancelled.discard(task.task_id)
        self._never_fits.discard(task.task_id)
        is_wanted = self._is_wanted(task)
        self.batching.handed_over(task, event.rank, is_wanted=is_wanted)
        return [] if is_wanted else self._end_paused([task], "cancelled while it paused")

    def paused_lost(self, event: PausedTaskLost, now_s: float) -> list[Action]:
        task = self.book.task(event.task_id)
        if task.state is not TaskState.PAUSED:
            raise IllegalEvent(f"task {task.task_id} is {task.state.value}, so it cannot be lost while paused")
        self.batching.forget(task)
        self.num_failures += 1
        return self._end_attempt(task, None, FailureKind.ENVIRONMENT, event.detail, retryable=True, now_s=now_s)

    def finished(self, event: TaskFinished, now_s: float) -> list[Action]:
        task = self.book.task(event.task_id)
        task.require(TaskState.FINISHED, event.rank)
        if task.in_turn:
            raise IllegalEvent(f"task {task.task_id} cannot finish in the middle of a turn")
        if task.turn_seen < 0:
            raise IllegalEvent(f"task {task.task_id} cannot finish before its first turn")
        self._require_count(task, event.generated_tokens, 0)
        self._require_growth(task, event.context_tokens)
        self.book.generated(task, event.generated_tokens)
        self.failures_in_a_row = 0
        task.context_tokens = event.context_tokens
        task.num_turns, task.reward, task.success = event.num_turns, event.reward, event.success
        if task.is_spare:
            self._leave_rank(task, event.rank, now_s)
            self.book.drop_spare(task)
            return [DropTrajectories((task.task_id,), "its group was complete without it")]
        task.state = TaskState.FINISHED
        actions = [] if task.kind is TaskKind.EVAL else self.book.count_finished(task, event.oldest_version, now_s)
        self._leave_rank(task, event.rank, now_s, has_finished=True)
        if task.kind is TaskKind.EVAL:
            return self._evaluated(task, event)
        return actions + self._release_spares(task.group)

    def _evaluated(self, task: Task, event: TaskFinished) -> list[Action]:
        self.book.ledger.settle(task.generated_tokens, Account.EVALUATED)
        if self._is_wanted(task):
            assert self.round is not None
            self.round.finish(task.task_id, event.reward, event.success, event.num_turns)
        self.book.forget(task.group)
        return [DropTrajectories((task.task_id,), "evaluated")]

    def failed(self, event: TaskFailed, now_s: float) -> list[Action]:
        task = self.book.task(event.task_id)
        task.require_rank(event.rank)
        self._require_count(task, event.generated_tokens, event.prefilled_tokens)
        cancelled = event.kind is FailureKind.CANCELLED
        never_fits = task.task_id in self._never_fits
        if cancelled and not never_fits and self._is_wanted(task):
            raise IllegalEvent(f"task {event.task_id} was given up by rank {event.rank}, but nobody has cancelled it")
        generated = event.generated_tokens - task.generated_tokens
        self._took(task, task.context_tokens + generated, generated, event.prefilled_tokens)
        self._leave_rank(task, event.rank, now_s)
        if task.is_spare:
            self.book.drop_spare(task)
            return []
        if never_fits:
            self.num_failures += 1
            return self._out(task, FailureKind.NEVER_FITS, self._why_never(task), now_s)
        if cancelled and task.kind is TaskKind.TRAIN:
            # The run is ending: the tokens stay held, as those of every group that no step will consume.
            task.state = TaskState.OUT
            return []
        if not cancelled:
            self.num_failures += 1
            self.failures_in_a_row += 1
        return self._end_attempt(
            task, event.rank, event.kind, event.detail, retryable=event.retryable and not cancelled, now_s=now_s
        )

    def engine_load(self, event: EngineLoad) -> list[Action]:
        if event.rank not in self.batching.pools:
            raise IllegalEvent(f"rank {event.rank} reports an engine's load, but it is no rollout rank")
        correction = self.batching.engine_says(event.rank, event.used_tokens)
        if correction is None:
            return []
        if correction == 0:
            return [Note("info", f"rank {event.rank}: engine and turn loop agree on the KV cache's use again")]
        return [
            Note(
                "warning",
                f"rank {event.rank}: the engine holds {correction} tokens more than its tasks' contexts explain; "
                "they are taken off its budget",
            )
        ]

    # --- ends -----------------------------------------------------------------------------------------------------

    def close_round(self) -> tuple[EvaluationRound, list[Action]]:
        """End the open round; tasks that it still waited for are cancelled."""
        assert self.round is not None
        closed, self.round = self.round, None
        queued, paused = self.batching.drain(TaskKind.EVAL)
        for task in queued:
            task.state = TaskState.OUT
            self.book.forget(task.group)
        return closed, [*self._end_paused(paused, "the evaluation is over"), *self._cancel_playing(TaskKind.EVAL)]

    def stop_training_tasks(self) -> list[Action]:
        """No training task will be consumed any more: empty the queue and cancel what plays."""
        self.stopped = True
        queued, paused = self.batching.drain(TaskKind.TRAIN)
        for task in queued:
            task.state = TaskState.OUT
        return [*self._end_paused(paused, "the run is over"), *self._cancel_playing(TaskKind.TRAIN)]

    def abandon(self) -> None:
        """The job has failed: whatever the leaving ranks still report is for the ledger only."""
        self.stopped = True
        self.round = None

    def open_specs(self) -> list[GroupSpec]:
        """Training groups whose fate is open, for a checkpoint: after a resume they are played again."""
        open_groups = [g.spec for g in self.book.groups.values() if g.spec.kind is TaskKind.TRAIN]
        return sorted([*open_groups, *self.supply.to_restart], key=lambda spec: spec.group_id)

    def idle_rollout_wait_s(self, now_s: float) -> float:
        """RWT so far, in rank-seconds, with ranks that are idle at this moment counted up to now."""
        return self._rollout_wait_s + sum(now_s - since_s for since_s in self._idle_since_s.values())

    # --- inside ---------------------------------------------------------------------------------------------------

    def _is_wanted(self, task: Task) -> bool:
        """Is there still something that waits for the task's trajectory? Otherwise the task has been cancelled."""
        if task.kind is TaskKind.TRAIN:
            return not self.stopped and not task.is_spare
        return self.round is not None and task.task_id in self.round.open_tasks

    @staticmethod
    def _require_count(task: Task, generated_tokens: int, prefilled_tokens: int) -> None:
        if generated_tokens < task.generated_tokens or prefilled_tokens < 0:
            raise IllegalEvent(
                f"task {task.task_id} reports {generated_tokens} generated and {prefilled_tokens} prefilled tokens; "
                f"{task.generated_tokens} generated ones were reported before"
            )

    @staticmethod
    def _require_growth(task: Task, context_tokens: int) -> None:
        if context_tokens < task.context_tokens:
            raise IllegalEvent(
                f"the context of task {task.task_id} shrinks from {task.context_tokens} to {context_tokens} tokens"
            )

    def _took(self, task: Task, context_tokens: int, generated_tokens: int, prefilled_tokens: int) -> None:
        """An engine call of the task is over: it made `generated_tokens` and has computed `prefilled_tokens` of the prompt."""
        if task.in_turn:
            self.book.prefilled(task, context_tokens - generated_tokens, prefilled_tokens)
            if generated_tokens:
                # The newest token was sampled, but nothing was computed from it yet.
                task.computed_tokens = context_tokens - 1
                task.group.computed_prompt_tokens = task.group.prompt_tokens or 0
        task.context_tokens = context_tokens
        self.book.generated(task, task.generated_tokens + generated_tokens)

    def _end_attempt(
        self, task: Task, rank: Rank | None, kind: FailureKind, detail: str, *, retryable: bool, now_s: float
    ) -> list[Action]:
        """The attempt has left nothing: try again, or give the task up."""
        where = "paused" if rank is None else f"rank {rank}"
        what = f"{self._named(task)}, attempt {task.attempt}, {where})"
        self.book.ledger.settle(task.generated_tokens, Account.FAILED)
        task.forget_attempt()
        if self._is_wanted(task) and retryable and task.attempt < self._config.rollout.max_attempts:
            task.state = TaskState.QUEUED
            self.batching.enqueue(task)
            return [Note("warning", f"{what} failed and will be tried again: {kind.value}: {detail}")]
        level = "info" if kind is FailureKind.CANCELLED else "warning"
        note = Note(level, f"{what} failed and is left out: {kind.value}: {detail}")
        return [note, *self._give_up(task, now_s)]

    def _out(self, task: Task, kind: FailureKind, detail: str, now_s: float) -> list[Action]:
        """The task can't be played at all."""
        self.book.ledger.settle(task.generated_tokens, Account.FAILED)
        task.generated_tokens = 0
        note = Note("warning", f"{self._named(task)}) is left out: {kind.value}: {detail}")
        return [note, *self._give_up(task, now_s)]

    @staticmethod
    def _named(task: Task) -> str:
        spec = task.group.spec
        return f"task {task.task_id} ({spec.env} {spec.split} seed {spec.seed}"

    def _give_up(self, task: Task, now_s: float) -> list[Action]:
        task.state = TaskState.OUT
        if task.kind is TaskKind.EVAL:
            if self.round is not None and task.task_id in self.round.open_tasks:
                self.round.give_up(task.task_id)
            self.book.forget(task.group)
            return []
        return [*self.book.count_out(task, now_s), *self._release_spares(task.group)]

    def _release_spares(self, group: Group) -> list[Action]:
        """A complete group needs no more trajectories: end what still waits or plays for it."""
        actions: list[Action] = []
        for task in self.book.surplus(group):
            if task.state in ON_RANK:
                actions += [] if task.task_id in self._cancelled else [self._cancel(task)]
                continue
            self.batching.forget(task)
            if task.state is TaskState.PAUSED:
                actions += self._end_paused([task], "its group is complete without it")
            else:
                self.book.drop_spare(task)
        return actions

    def _leave_rank(self, task: Task, rank: Rank, now_s: float, *, has_finished: bool = False) -> None:
        if has_finished:
            self.batching.finished(task, rank)
        else:
            self.batching.failed(task, rank)
        task.rank = None
        self._cancelled.discard(task.task_id)
        self._never_fits.discard(task.task_id)
        if not self.batching.pools[rank].num_on_rank:
            self._idle_since_s[rank] = now_s

    def _end_paused(self, tasks: list[Task], reason: str) -> list[Action]:
        """These paused tasks are over."""
        for task in tasks:
            if task.is_spare:
                self.book.drop_spare(task)
                continue
            task.state = TaskState.OUT
            if task.kind is TaskKind.EVAL:
                self.book.ledger.settle(task.generated_tokens, Account.FAILED)
                task.generated_tokens = 0
                self.book.forget(task.group)
        return [EndPaused(tuple(task.task_id for task in tasks), reason)] if tasks else []

    def _cancel_playing(self, kind: TaskKind) -> list[Action]:
        playing = [
            self.book.tasks[task_id]
            for _, pool in sorted(self.batching.pools.items())
            for task_id in sorted([*pool.needs, *pool.leaving])
        ]
        return [self._cancel(task) for task in playing if task.kind is kind and task.task_id not in self._cancelled]

    def _cancel(self, task: Task) -> Action:
        assert task.rank is not None
        self.batching.dismissed(task)
        self._cancelled.add(task.task_id)
        return CancelTask(task.rank, task.task_id)
