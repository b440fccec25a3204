"""`ContinuousTaskBatching` on a test bench: driven as `scheduling.rollout` drives it, without ranks, groups' books or a core.

A block has `BLOCK` tokens, and nothing is held in reserve unless a test asks for it, so that budgets can be worked out by hand.
"""

from __future__ import annotations

from typing import Any

from tiderl.config.schema import Config, ModelConfig, RolloutConfig, TrainConfig
from tiderl.scheduling.ctb import ContinuousTaskBatching, Decision
from tiderl.scheduling.lifecycle import ACTIVE, ON_RANK, Group, Task, TaskState
from tiderl.types import GroupId, GroupSpec, Rank, TaskId, TaskKind, WeightVersion

BLOCK = 10
EVAL = TaskKind.EVAL
#: What a test says of a decision: ("start", task id, rank).
Said = tuple[str, int, int]


def make_group(
    group_id: int, size: int, kind: TaskKind = TaskKind.TRAIN, *, first_task: int, num_tasks: int = 0, type_: str = "a"
) -> Group:
    """A group with tasks from `first_task` on; `num_tasks` 0: as many as its size."""
    spec = GroupSpec(GroupId(group_id), kind, "env", "split", group_id, type_)
    group = Group(spec, size, num_pending=num_tasks or size, start_version=WeightVersion(0))
    group.tasks = [Task(TaskId(first_task + i), group) for i in range(num_tasks or size)]
    return group


class Bench:
    """Ranks of so many blocks each, their tasks by id, and what they report."""

    def __init__(
        self, *num_blocks: int, capacity: int = 1000, max_context: int = 100, group_size: int = 4, **rollout: Any
    ) -> None:
        settings = {"kv_reserve": 0.0, "resume_margin": 0.0, "footprint": "paper", **rollout}
        self.batching = ContinuousTaskBatching(
            Config(
                model=ModelConfig(max_context_tokens=max_context),
                rollout=RolloutConfig(**settings),
                train=TrainConfig(group_size=group_size),
            )
        )
        self.tasks: dict[int, Task] = {}
        self.batching.set_capacity(capacity)
        for rank, blocks in enumerate(num_blocks):
            self.batching.add_rank(Rank(rank), blocks, BLOCK)

    def knows(self, type_: str, *, prompt: int = 10, first_turn: int = 10, final: int = 10) -> None:
        """Many tasks of the type were seen, all of the same lengths."""
        for _ in range(64):
            self.batching.estimates.saw_prompt(type_, prompt)
            self.batching.estimates.saw_first_turn(type_, first_turn)
            self.batching.estimates.saw_final(type_, final)

    def queue(self, group_id: int, size: int = 1, kind: TaskKind = TaskKind.TRAIN, type_: str = "a") -> Group:
        """A new group waits; tasks are numbered in the order of their coming."""
        group = make_group(group_id, size, kind, first_task=len(self.tasks), type_=type_)
        for task in group.tasks:
            self.tasks[task.task_id] = task
            self.batching.enqueue(task)
        return group

    def decide(self) -> list[Said]:
        return [(d.verb, int(d.task.task_id), int(d.rank)) for d in self.decide_raw()]

    def decide_raw(self) -> list[Decision]:
        decisions = self.batching.decide()
        for decision in decisions:
            if decision.verb == "never_fits" and decision.task.state in ON_RANK:
                self.batching.dismissed(decision.task)
            elif decision.verb == "never_fits":
                decision.task.state = TaskState.OUT
        return decisions

    # --- what ranks report ----------------------------------------------------------------------------------------

    def turn(self, task_id: int, context: int) -> None:
        """The task generates now, with this context."""
        task = self.tasks[task_id]
        if task.state in ACTIVE:
            task.state = TaskState.GENERATING
        task.in_turn, task.context_tokens = True, context
        self.batching.turn_started(task)

    def act(self, task_id: int, context: int) -> None:
        """The turn is over; the environment works."""
        task = self.tasks[task_id]
        if task.state in ACTIVE:
            task.state = TaskState.ACTING
        task.in_turn, task.context_tokens = False, context
        task.num_turns += 1
        self.batching.turn_ended(task)

    def play(self, task_id: int, *contexts: int) -> None:
        """Whole turns: it ends with each of these contexts, and begins with them as well."""
        for context in contexts:
            self.turn(task_id, context)
            self.act(task_id, context)

    def finish(self, task_id: int) -> None:
        task = self.tasks[task_id]
        rank, task.state = self._rank(task), TaskState.FINISHED
        task.in_turn = False
        task.group.num_finished += 1
        self.batching.finished(task, rank)
        task.rank = None

    def fail(self, task_id: int, *, retry: bool) -> None:
        task = self.tasks[task_id]
        self.batching.failed(task, self._rank(task))
        task.forget_attempt()
        task.state = TaskState.QUEUED if retry else TaskState.OUT
        if retry:
            self.batching.enqueue(task)

    def hand_over(self, task_id: int, context: int | None = None, *, is_wanted: bool = True) -> None:
        """The answer to a pause; tokens that the interrupted turn has made already are kept in `context`."""
        task = self.tasks[task_id]
        task.context_tokens = context or task.context_tokens
        assert task.state is TaskState.PAUSING
        rank, task.rank, task.in_turn, task.state = self._rank(task), None, False, TaskState.PAUSED
        self.batching.handed_over(task, rank, is_wanted=is_wanted)
        if not is_wanted:
            task.state = TaskState.OUT

    @staticmethod
    def _rank(task: Task) -> Rank:
        assert task.rank is not None
        return task.rank

    # --- what can be seen -----------------------------------------------------------------------------------------

    def usage(self, rank: int) -> int:
        return self.batching.pools[Rank(rank)].usage_tokens

    def on(self, rank: int) -> set[int]:
        """Tasks that are active on the rank."""
        return {int(task_id) for task_id in self.batching.pools[Rank(rank)].needs}


def starts(said: list[Said]) -> list[int]:
    """Tasks that were started, where nothing else was decided."""
    assert all(verb == "start" for verb, _, _ in said)
    return [task_id for _, task_id, _ in said]


def settled(*contexts: int, blocks: tuple[int, ...] = (10,), **rollout: Any) -> Bench:
    """The paper's footprints; a task of each of these lengths acts on a rank, all of them groups of their own."""
    bench = Bench(*blocks, **rollout)
    bench.knows("a", prompt=BLOCK, first_turn=BLOCK, final=100)
    for number in range(len(contexts)):
        bench.queue(number)
    assert len(starts(bench.decide())) == len(contexts)
    for number, context in enumerate(contexts):
        bench.play(number, context)
    assert bench.decide() == []
    return bench


def full_with_one_paused(**rollout: Any) -> Bench:
    """One rank of ten blocks: task 0 uses nine of them, task 1 (two blocks) is paused."""
    bench = settled(80, 20, **rollout)
    bench.turn(0, 90)
    assert bench.decide() == [("pause", 1, 0)]
    bench.hand_over(1)
    assert bench.decide() == []
    return bench
