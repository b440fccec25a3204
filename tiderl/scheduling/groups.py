"""Groups from their supply to their end: who is in them, when they are complete, and where their tokens go.

Owns the tasks, the groups, the ready buffer, the staleness gate and the ledger; it starts and stops nothing.

Invariants (tests/scheduling/test_core_machine.py, tests/scheduling/test_groups.py):

1. A complete group with at least two trajectories becomes ready; with fewer it is dropped and its tokens count as failed.
2. A failed task never contributes a reward; nor does a spare one (its group was complete without it), whose tokens are dropped.
3. A task is known until its rank has reported its end, however long its group is gone.

Source: paper §2.1; over-provisioned groups: paper.md §8, 8.
"""

from __future__ import annotations

from collections import Counter

from tiderl.config.schema import Config
from tiderl.errors import IllegalEvent
from tiderl.scheduling.actions import Action, DropTrajectories
from tiderl.scheduling.ledger import Account, TokenLedger
from tiderl.scheduling.lifecycle import ON_RANK, Group, GroupState, Task, TaskState
from tiderl.scheduling.readiness import ReadinessBuffer
from tiderl.scheduling.staleness import StalenessGate
from tiderl.types import GroupId, GroupSpec, TaskId, TaskKind, WeightVersion

#: A group advantage needs something to compare with.
MIN_GROUP_SIZE = 2


class GroupBook:
    """All tasks and groups of a job."""

    def __init__(self, config: Config, version: WeightVersion) -> None:
        self._config = config
        self.ledger = TokenLedger()
        self.gate = StalenessGate(
            config.schedule.max_staleness, config.train.groups_per_step, config.train.steps, version
        )
        self.ready = ReadinessBuffer()
        self.tasks: dict[TaskId, Task] = {}
        self.groups: dict[GroupId, Group] = {}
        self._next_task_id = 0
        #: Training groups that are still being played: how many of each start version.
        self._open_by_version: dict[WeightVersion, int] = {}

    def task(self, task_id: TaskId) -> Task:
        """Raises `IllegalEvent` for one that nobody knows, or that is over."""
        task = self.tasks.get(task_id)
        if task is None:
            raise IllegalEvent(f"task {task_id} is unknown, or its group is gone")
        return task

    def open(self, spec: GroupSpec) -> Group:
        """A new group with its tasks, spare ones included."""
        is_train = spec.kind is TaskKind.TRAIN
        size = self._config.train.group_size if is_train else 1
        num_tasks = size + self._config.rollout.spare_trajectories if is_train else 1
        group = Group(spec, size, num_pending=num_tasks, start_version=self.gate.version)
        self.groups[spec.group_id] = group
        if is_train:
            self.gate.admit(1)
            self._count_open(group.start_version, +1)
        for _ in range(num_tasks):
            task = Task(TaskId(self._next_task_id), group)
            self._next_task_id += 1
            group.tasks.append(task)
            self.tasks[task.task_id] = task
        return group

    def generated(self, task: Task, total: int) -> None:
        """The task has made `total` tokens so far."""
        self.ledger.generate(total - task.generated_tokens)
        task.generated_tokens = total

    def prefilled(self, task: Task, prompt_tokens: int, prefilled_tokens: int) -> None:
        """An engine has computed `prefilled_tokens` of a prompt that the task has sent."""
        known = max(task.computed_tokens, task.group.computed_prompt_tokens)
        self.ledger.prefill(prompt_tokens, prefilled_tokens, num_new=max(0, prompt_tokens - known))

    def count_finished(self, task: Task, oldest_version: WeightVersion, now_s: float) -> list[Action]:
        """The task has left a trajectory, the oldest of whose tokens is of `oldest_version`."""
        group = task.group
        group.num_finished += 1
        if oldest_version < group.start_version:
            self._count_open(group.start_version, -1)
            group.start_version = oldest_version
            self._count_open(group.start_version, +1)
        return self._one_less_pending(group, now_s)

    def count_out(self, task: Task, now_s: float) -> list[Action]:
        """The task will never leave a trajectory."""
        return self._one_less_pending(task.group, now_s)

    def drop_spare(self, task: Task) -> None:
        """A spare task is over."""
        task.state = TaskState.OUT
        self.ledger.settle(task.generated_tokens, Account.DROPPED)
        if task.group.state is GroupState.GONE:
            del self.tasks[task.task_id]

    def surplus(self, group: Group) -> list[Task]:
        """Tasks of a group that has just become complete which are still waiting or playing: they are spare now."""
        if not group.is_complete:
            return []
        spare = [t for t in group.tasks if t.state not in (TaskState.FINISHED, TaskState.OUT)]
        for task in spare:
            task.is_spare = True
        return spare

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
        self.forget(group)
        return num_tokens

    def drop_trained(self, group: Group, reason: str) -> Action:
        """The step that held the group made no update: its tokens were for nothing."""
        return self._drop(group, Account.FAILED, reason)

    def forget(self, group: Group) -> None:
        group.state = GroupState.GONE
        for task in group.tasks:
            if task.state not in ON_RANK:
                self.tasks.pop(task.task_id, None)
        del self.groups[group.spec.group_id]

    def may_take(self, num_groups: int, room: int) -> bool:
        """Are so many groups ready, and is none too late if a step with `room` places left takes the oldest of them now?"""
        if not num_groups <= min(room, len(self.ready)):
            return False
        others = Counter(self._open_by_version)
        left = num_groups
        for version in sorted(self.ready.num_by_version):
            taken = min(left, self.ready.num_by_version[version])
            left -= taken
            others[version] += self.ready.num_by_version[version] - taken
        return self.gate.leaves_time(others, room - num_groups)

    def _one_less_pending(self, group: Group, now_s: float) -> list[Action]:
        if group.state is not GroupState.OPEN:
            return []
        group.num_pending -= 1
        if not group.is_complete:
            return []
        self._count_open(group.start_version, -1)
        if group.num_finished >= MIN_GROUP_SIZE:
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
        self.forget(group)
        return dropped

    def _count_open(self, version: WeightVersion, delta: int) -> None:
        count = self._open_by_version.get(version, 0) + delta
        if count:
            self._open_by_version[version] = count
        else:
            del self._open_by_version[version]
