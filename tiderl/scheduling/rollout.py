"""The rollout half of the core: tasks from the stream to a complete group.

Owns tasks, groups, admission, the staleness gate and the token ledger. `core.py` calls it; it returns actions and knows nothing
of training phases.

Invariants (tests/scheduling/test_core_machine.py):

1. Every task that is started ends as finished or out, once; a retryable failure starts a new attempt, up to `max_attempts`.
2. A complete group with at least two trajectories becomes ready; with fewer it is dropped and its tokens count as failed.
3. A failed task never contributes a reward.

Source: paper §2.1, §4.1.
"""

from __future__ import annotations

from collections.abc import Iterable

from tiderl.config.schema import Config
from tiderl.errors import IllegalEvent
from tiderl.scheduling.actions import Action, CancelTask, DropTrajectories, Note, StartTask, SupplyGroups
from tiderl.scheduling.ctb import Admission
from tiderl.scheduling.evaluation import EvaluationRound
from tiderl.scheduling.events import GroupsSupplied, TaskFailed, TaskFinished, TurnEnded, TurnStarted
from tiderl.scheduling.ledger import Account, TokenLedger
from tiderl.scheduling.lifecycle import ON_RANK, Group, GroupState, Task, TaskState
from tiderl.scheduling.readiness import ReadinessBuffer
from tiderl.scheduling.staleness import StalenessGate
from tiderl.types import FailureKind, GroupId, GroupSpec, Rank, TaskId, TaskKind, WeightVersion

#: A group advantage needs something to compare with.
MIN_GROUP_SIZE = 2


class RolloutSide:
    """Tasks and groups, from supply to readiness."""

    def __init__(self, config: Config, version: WeightVersion) -> None:
        self._config = config
        self.ledger = TokenLedger()
        self.gate = StalenessGate(
            config.schedule.max_staleness, config.train.groups_per_step, config.train.steps, version
        )
        self.admission = Admission(
            reserve_per_task_tokens=config.model.max_context_tokens,
            max_tasks_per_rank=config.rollout.max_tasks_per_rank,
        )
        self.ready = ReadinessBuffer()
        self.tasks: dict[TaskId, Task] = {}
        self.groups: dict[GroupId, Group] = {}
        self.round: EvaluationRound | None = None
        #: Groups that the run was interrupted in; they are played again before the stream goes on.
        self.to_restart: list[GroupSpec] = []
        self.num_supplied = 0
        self.num_failures = 0
        self.failures_in_a_row = 0
        self.stopped = False
        self._requested: dict[TaskKind, int] = dict.fromkeys(TaskKind, 0)
        self._next_task_id = 0
        #: Training groups that are still being played: how many of each start version.
        self._open_by_version: dict[WeightVersion, int] = {}
        self._idle_since_s: dict[Rank, float] = {}
        self.rollout_wait_s = 0.0

    # --- supply and admission -------------------------------------------------------------------------------------

    def add_rank(self, rank: Rank, kv_budget_tokens: int, now_s: float) -> None:
        budget = int(kv_budget_tokens * (1.0 - self._config.rollout.kv_reserve))
        self.admission.add_rank(rank, budget)
        self._idle_since_s[rank] = now_s

    def open_round(self, version: WeightVersion, deadline_s: float) -> list[Action]:
        """Start an evaluation of `version`."""
        assert self.round is None
        self.round = EvaluationRound(version, deadline_s)
        count = self._config.eval.num_tasks
        self._requested[TaskKind.EVAL] = count
        return [SupplyGroups(TaskKind.EVAL, count)]

    def request_supply(self) -> list[Action]:
        """Ask for as many training groups as the staleness bound allows."""
        wanted = self.gate.quota - self._requested[TaskKind.TRAIN]
        if self.stopped or wanted <= 0:
            return []
        if self.to_restart:
            again, self.to_restart = self.to_restart[:wanted], self.to_restart[wanted:]
            self._admit(again)
            wanted -= len(again)
        if wanted <= 0:
            return []
        self._requested[TaskKind.TRAIN] += wanted
        return [SupplyGroups(TaskKind.TRAIN, wanted)]

    def supplied(self, event: GroupsSupplied) -> list[Action]:
        if len(event.groups) > self._requested[event.kind]:
            raise IllegalEvent(f"{len(event.groups)} {event.kind.value} groups were supplied, fewer were asked for")
        if event.kind is TaskKind.EVAL and len(event.groups) < self._requested[TaskKind.EVAL]:
            raise IllegalEvent(f"an evaluation of {self._requested[TaskKind.EVAL]} tasks got only {len(event.groups)}")
        group_ids = {spec.group_id for spec in event.groups}
        for spec in event.groups:
            if spec.group_id in self.groups or spec.kind is not event.kind or len(group_ids) < len(event.groups):
                raise IllegalEvent(f"group {spec.group_id} was supplied twice, or is of the wrong kind")
        # Several orders may be on their way at once, each with an answer of its own.
        self._requested[event.kind] -= len(event.groups)
        too_late = self.stopped if event.kind is TaskKind.TRAIN else self.round is None
        if too_late:
            # The run or the round has ended meanwhile. They are not counted, so that a resumed run draws them again.
            return []
        if event.kind is TaskKind.TRAIN:
            self.num_supplied += len(event.groups)
        self._admit(event.groups)
        return []

    def _admit(self, specs: Iterable[GroupSpec]) -> None:
        for spec in specs:
            size = self._config.train.group_size if spec.kind is TaskKind.TRAIN else 1
            group = Group(spec, num_pending=size, start_version=self.gate.version)
            self.groups[spec.group_id] = group
            if spec.kind is TaskKind.TRAIN:
                self.gate.admit(1)
                self._count_open(group.start_version, +1)
            for _ in range(size):
                task = Task(TaskId(self._next_task_id), group)
                self._next_task_id += 1
                group.tasks.append(task)
                self.tasks[task.task_id] = task
                self.admission.enqueue(task)
                if spec.kind is TaskKind.EVAL and self.round is not None:
                    self.round.add(task.task_id)

    def place_tasks(self, now_s: float) -> list[Action]:
        """Start every queued task that fits somewhere."""
        actions: list[Action] = []
        while (placed := self.admission.place()) is not None:
            task, rank = placed
            if len(self.admission.ranks[rank].tasks) == 1:
                self.rollout_wait_s += now_s - self._idle_since_s[rank]
            task.state = TaskState.STARTING
            task.rank = rank
            task.attempt += 1
            actions.append(StartTask(rank, task.task_id, task.group.spec, task.attempt))
        return actions

    def must_wait(self) -> bool:
        """Would a step with the groups that are ready now make one too late that is still being played?"""
        return bool(self._open_by_version) and not self.gate.leaves_time(
            self._open_by_version, self.ready.num_by_version
        )

    # --- what the ranks report ------------------------------------------------------------------------------------

    def turn_started(self, event: TurnStarted) -> list[Action]:
        task = self._task(event.task_id)
        task.require(TaskState.GENERATING, event.rank)
        task.state = TaskState.GENERATING
        task.context_tokens = event.context_tokens
        return []

    def turn_ended(self, event: TurnEnded) -> list[Action]:
        task = self._task(event.task_id)
        task.require(TaskState.ACTING, event.rank)
        total = task.generated_tokens + event.generated_tokens
        self._require_count(task, total)
        task.state = TaskState.ACTING
        task.context_tokens = event.context_tokens
        self._generated(task, total)
        return []

    def finished(self, event: TaskFinished, now_s: float) -> list[Action]:
        task = self._task(event.task_id)
        task.require(TaskState.FINISHED, event.rank)
        self._require_count(task, event.generated_tokens)
        self._generated(task, event.generated_tokens)
        self.failures_in_a_row = 0
        task.state = TaskState.FINISHED
        task.context_tokens = event.context_tokens
        task.num_turns, task.reward, task.success = event.num_turns, event.reward, event.success
        self._leave_rank(task, now_s)
        if task.kind is TaskKind.EVAL:
            self.ledger.settle(task.generated_tokens, Account.EVALUATED)
            if self._is_wanted(task):
                assert self.round is not None
                self.round.finish(task.task_id, event.reward, event.success, event.num_turns)
            self._forget(task.group)
            return [DropTrajectories((task.task_id,), "evaluated")]
        if event.oldest_version < task.group.start_version:
            self._count_open(task.group.start_version, -1)
            task.group.start_version = event.oldest_version
            self._count_open(task.group.start_version, +1)
        return self._one_less_pending(task.group, now_s)

    def failed(self, event: TaskFailed, now_s: float) -> list[Action]:
        task = self._task(event.task_id)
        if task.state not in ON_RANK or task.rank != event.rank:
            raise IllegalEvent(
                f"task {event.task_id} is {task.state.value} on rank {task.rank}, so it cannot fail on {event.rank}"
            )
        self._require_count(task, event.generated_tokens)
        cancelled = event.kind is FailureKind.CANCELLED
        if cancelled and self._is_wanted(task):
            raise IllegalEvent(f"task {event.task_id} was given up by rank {event.rank}, but nobody has cancelled it")
        self._generated(task, event.generated_tokens)
        self._leave_rank(task, now_s)
        if cancelled and task.kind is TaskKind.TRAIN:
            # The run is ending: the tokens stay held, as those of every group that no step will consume.
            task.state = TaskState.OUT
            return []
        self.ledger.settle(task.generated_tokens, Account.FAILED)
        task.generated_tokens = 0
        again = self._is_wanted(task) and event.retryable and task.attempt < self._config.rollout.max_attempts
        spec = task.group.spec
        what = (
            f"task {task.task_id} ({spec.env} {spec.split} seed {spec.seed}, attempt {task.attempt}, rank {event.rank})"
        )
        if not cancelled:
            self.num_failures += 1
            self.failures_in_a_row += 1
        if again:
            task.state = TaskState.QUEUED
            task.rank = None
            self.admission.enqueue(task)
            return [Note("warning", f"{what} failed and will be tried again: {event.kind.value}: {event.detail}")]
        task.state = TaskState.OUT
        note = Note(
            "info" if cancelled else "warning", f"{what} failed and is left out: {event.kind.value}: {event.detail}"
        )
        if task.kind is TaskKind.EVAL:
            self._give_up_evaluation(task)
            return [note]
        return [note, *self._one_less_pending(task.group, now_s)]

    # --- ends -----------------------------------------------------------------------------------------------------

    def close_round(self) -> tuple[EvaluationRound, list[Action]]:
        """End the open round; tasks that it still waited for are cancelled."""
        assert self.round is not None
        closed, self.round = self.round, None
        for task in self.admission.drain(TaskKind.EVAL):
            task.state = TaskState.OUT
            self._forget(task.group)
        return closed, self._cancel_playing(TaskKind.EVAL)

    def stop_training_tasks(self) -> list[Action]:
        """No training task will be consumed any more: empty the queue and cancel what plays."""
        self.stopped = True
        for task in self.admission.drain(TaskKind.TRAIN):
            task.state = TaskState.OUT
        return self._cancel_playing(TaskKind.TRAIN)

    def abandon(self) -> None:
        """The job has failed: whatever the leaving ranks still report is for the ledger only."""
        self.stopped = True
        self.round = None

    def take_late(self) -> list[Action]:
        """Drop ready groups that are too old to train on."""
        actions: list[Action] = []
        while (oldest := self.ready.oldest_start_version()) is not None and self.gate.is_late(oldest):
            group = self.groups[self.ready.take()]
            actions.append(self._drop(group, Account.STALE, f"version {oldest} is more than the staleness bound old"))
        return actions

    def retire(self, group: Group) -> int:
        """The group was trained on; returns its generated tokens, now settled as trained."""
        num_tokens = sum(t.generated_tokens for t in group.finished)
        self.ledger.settle(num_tokens, Account.TRAINED)
        self._forget(group)
        return num_tokens

    def drop_trained(self, group: Group, reason: str) -> Action:
        """The step that held the group made no update: its tokens were for nothing."""
        return self._drop(group, Account.FAILED, reason)

    def open_specs(self) -> list[GroupSpec]:
        """Training groups whose fate is open, for a checkpoint: after a resume they are played again."""
        open_groups = [g.spec for g in self.groups.values() if g.spec.kind is TaskKind.TRAIN]
        return sorted([*open_groups, *self.to_restart], key=lambda spec: spec.group_id)

    def idle_rollout_wait_s(self, now_s: float) -> float:
        """RWT so far, in rank-seconds, with ranks that are idle at this moment counted up to now."""
        idle = sum(now_s - self._idle_since_s[r] for r, b in self.admission.ranks.items() if not b.tasks)
        return self.rollout_wait_s + idle

    # --- inside ---------------------------------------------------------------------------------------------------

    def _task(self, task_id: TaskId) -> Task:
        task = self.tasks.get(task_id)
        if task is None:
            raise IllegalEvent(f"task {task_id} is unknown, or its group is gone")
        return task

    def _is_wanted(self, task: Task) -> bool:
        """Is there still something that waits for the task's trajectory? Otherwise the task has been cancelled."""
        if task.kind is TaskKind.TRAIN:
            return not self.stopped
        return self.round is not None and task.task_id in self.round.open_tasks

    def _require_count(self, task: Task, generated_tokens: int) -> None:
        if generated_tokens < task.generated_tokens:
            raise IllegalEvent(
                f"task {task.task_id} ends with {generated_tokens} generated tokens, {task.generated_tokens} were reported"
            )

    def _generated(self, task: Task, total: int) -> None:
        self.ledger.generate(total - task.generated_tokens)
        task.generated_tokens = total

    def _leave_rank(self, task: Task, now_s: float) -> None:
        assert task.rank is not None
        self.admission.release(task.task_id, task.rank)
        if not self.admission.ranks[task.rank].tasks:
            self._idle_since_s[task.rank] = now_s
        task.rank = None

    def _one_less_pending(self, group: Group, now_s: float) -> list[Action]:
        group.num_pending -= 1
        if not group.is_complete:
            return []
        self._count_open(group.start_version, -1)
        if len(group.finished) >= MIN_GROUP_SIZE:
            group.state = GroupState.READY
            self.ready.add(group.spec.group_id, group.start_version, now_s)
            return []
        self.gate.retire(1)
        return [self._drop(group, Account.FAILED, "fewer than two trajectories of the group are left")]

    def _drop(self, group: Group, account: Account, reason: str) -> Action:
        if group.state is not GroupState.OPEN:
            self.gate.retire(1)
        self.ledger.settle(sum(t.generated_tokens for t in group.finished), account)
        dropped = DropTrajectories(tuple(t.task_id for t in group.finished), reason)
        self._forget(group)
        return dropped

    def _cancel_playing(self, kind: TaskKind) -> list[Action]:
        return [
            CancelTask(rank, task_id)
            for rank in sorted(self.admission.ranks)
            for task_id in sorted(self.admission.ranks[rank].tasks)
            if self.tasks[task_id].kind is kind
        ]

    def _give_up_evaluation(self, task: Task) -> None:
        if self.round is not None and task.task_id in self.round.open_tasks:
            self.round.give_up(task.task_id)
        self._forget(task.group)

    def _forget(self, group: Group) -> None:
        group.state = GroupState.GONE
        for task in group.tasks:
            del self.tasks[task.task_id]
        del self.groups[group.spec.group_id]

    def _count_open(self, version: WeightVersion, delta: int) -> None:
        count = self._open_by_version.get(version, 0) + delta
        if count:
            self._open_by_version[version] = count
        else:
            del self._open_by_version[version]
