"""Tasks that wait for a place: queued ones group by group, paused ones one by one, each in the order of Table 1.

`P(t) = w1*I_eval + w2*G_completion + w3*I_active + w4*L_context`, strictly tiered: `priority` is the one place that says so, for
what waits and for what plays. Ties are broken by task id. Queued tasks have no context yet, so among groups that wait the first two
tiers decide; among groups of which nothing is finished affinity does (the rank that holds the group's prefix), then the diversity
penalty, then age.

A waiting group is in one class at a time: evaluation, begun (some of its trajectories are finished), at home on a rank, fresh, or
out of sight (its probe is playing, or none of its tasks waits). Heaps keep outdated entries (`lazy_heap.py`); a stamp tells them.

Invariants (tests/scheduling/test_waiting.py):

1. A queued task is offered once, and never while its group's probe plays.
2. Evaluation before begun groups, those with more finished trajectories first; then groups at home on the asking rank; then fresh
   groups, then groups at home elsewhere.
3. Among fresh groups the lowest `group id + penalty * (tasks of its type on the rank)` is next: a type waits at most
   `penalty * (tasks on the rank)` groups longer than its age says, so none starves.
4. A rank that asks for a paused task gets the first of those with most finished siblings that fits, its own before others.

Source: paper §4.1 (probing, diversity), §4.2 Table 1 and Algorithm 1 (affinity).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tiderl.scheduling.lazy_heap import LazyHeap
from tiderl.scheduling.lifecycle import Group, Task, TaskState
from tiderl.types import GroupId, Rank, TaskId, TaskKind

#: How many tasks are looked at, in order, for one that fits: an exhaustive search would cost more than it finds.
LOOK_AHEAD = 4

#: Smaller is more important: (training, -completion, not executing, -context, task id).
Priority = tuple[bool, float, bool, int, TaskId]


def priority(task: Task) -> Priority:
    """Table 1 as a sort key, the most important first. A task executes while its rank generates for it."""
    executes = task.state is TaskState.GENERATING
    return (
        task.kind is not TaskKind.EVAL,
        -task.group.completion,
        not executes,
        -task.context_tokens,
        task.task_id,
    )


@dataclass(slots=True)
class _Line:
    """The queued tasks of one group."""

    group: Group
    tasks: list[TaskId] = field(default_factory=list)
    #: The task whose first turn the others wait for.
    probe: TaskId | None = None
    #: The heap that offers the group and the key that it has there, None while it is out of sight; and the number of that entry.
    place: tuple[str, float, Rank | None] | None = None
    stamp: int = 0


_Entry = tuple[tuple[float, int], GroupId, int]


class QueuedTasks:
    """Everything that has not been admitted, or must start again."""

    def __init__(self, diversity_penalty: float) -> None:
        self._penalty = diversity_penalty
        self._lines: dict[GroupId, _Line] = {}
        self._tasks: dict[TaskId, Task] = {}
        self._evaluation = self._heap()
        self._begun = self._heap()
        self._at_home: defaultdict[Rank, LazyHeap[_Entry]] = defaultdict(self._heap)
        self._homed = self._heap()
        self._fresh: defaultdict[str, LazyHeap[_Entry]] = defaultdict(self._heap)
        #: The oldest fresh group of every type that has one, sorted.
        self._heads: list[tuple[GroupId, str]] = []
        self._head_of: dict[str, tuple[GroupId, str]] = {}
        self._num_eval = 0
        self._num_entries = 0

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def num_evaluation(self) -> int:
        return self._num_eval

    def add(self, task: Task) -> None:
        line = self._lines.setdefault(task.group.spec.group_id, _Line(task.group))
        insort(line.tasks, task.task_id)
        self._tasks[task.task_id] = task
        self._num_eval += task.kind is TaskKind.EVAL
        if line.probe == task.task_id:
            # It failed before it could tell: another one tries.
            line.probe = None
        self._classify(line)

    def take(self, task: Task, *, as_probe: bool) -> None:
        """The task is admitted; `as_probe`: the rest of its group waits for `probed`."""
        line = self._lines[task.group.spec.group_id]
        self._remove(line, task)
        if as_probe:
            line.probe = task.task_id
        self._classify(line)

    def discard(self, task: Task) -> None:
        """The task is not wanted any more."""
        line = self._lines[task.group.spec.group_id]
        self._remove(line, task)
        self._classify(line)

    def probed(self, task: Task) -> bool:
        """The task has told what it uses, or never will; True if siblings were waiting for that."""
        line = self._lines.get(task.group.spec.group_id)
        if line is None or line.probe != task.task_id:
            return False
        line.probe = None
        self._classify(line)
        return bool(line.tasks)

    def completion_changed(self, group: Group) -> None:
        if (line := self._lines.get(group.spec.group_id)) is not None:
            self._classify(line)

    def drain(self, kind: TaskKind) -> list[Task]:
        """Take out all tasks of a kind, in the order of their ids."""
        drained = [self._tasks[task_id] for task_id in sorted(self._tasks) if self._tasks[task_id].kind is kind]
        for task in drained:
            self.discard(task)
        return drained

    def evaluation(self) -> Task | None:
        """The next evaluation task."""
        return self._first(self._evaluation)

    def training(self, rank: Rank, num_of_type: Counter[str]) -> Iterator[Task]:
        """What `rank` may start next, best first: one candidate of each class that has one."""
        candidates = (
            self._first(self._begun),
            self._first(self._at_home[rank]) if rank in self._at_home else None,
            self._freshest(num_of_type),
            self._at_home_elsewhere(rank),
        )
        yield from (task for task in candidates if task is not None)

    def _remove(self, line: _Line, task: Task) -> None:
        line.tasks.remove(task.task_id)
        del self._tasks[task.task_id]
        self._num_eval -= task.kind is TaskKind.EVAL

    def _classify(self, line: _Line) -> None:
        """Put the group where it belongs now; what stands elsewhere is outdated."""
        group, spec = line.group, line.group.spec
        place = self._place_of(line)
        if place != line.place:
            self._num_entries += 1
            line.place, line.stamp = place, self._num_entries
            entry: _Entry = ((-group.completion, spec.group_id), spec.group_id, line.stamp)
            for heap in self._heaps(place, spec.task_type):
                heap.push(entry)
        if not line.tasks and line.probe is None:
            del self._lines[spec.group_id]
        self._refresh_head(spec.task_type)

    @staticmethod
    def _place_of(line: _Line) -> tuple[str, float, Rank | None] | None:
        group = line.group
        if not line.tasks or line.probe is not None:
            return None
        if group.spec.kind is TaskKind.EVAL:
            return ("evaluation", 0.0, None)
        if group.num_finished:
            return ("begun", group.completion, None)
        if group.home is not None:
            return ("home", 0.0, group.home)
        return ("fresh", 0.0, None)

    def _heaps(self, place: tuple[str, float, Rank | None] | None, task_type: str) -> tuple[LazyHeap[_Entry], ...]:
        if place is None:
            return ()
        name, _, home = place
        if name == "evaluation":
            return (self._evaluation,)
        if name == "begun":
            return (self._begun,)
        if home is not None:
            return (self._at_home[home], self._homed)
        return (self._fresh[task_type],)

    def _refresh_head(self, task_type: str) -> None:
        """Keep `_heads` true for one type."""
        task = self._first(self._fresh[task_type])
        head = None if task is None else (task.group.spec.group_id, task_type)
        old = self._head_of.get(task_type)
        if head == old:
            return
        if old is not None:
            del self._heads[bisect_left(self._heads, old)]
            del self._head_of[task_type]
        if head is not None:
            insort(self._heads, head)
            self._head_of[task_type] = head

    def _freshest(self, num_of_type: Counter[str]) -> Task | None:
        best: tuple[float, GroupId] | None = None
        for group_id, task_type in self._heads:
            if best is not None and group_id >= best[0]:
                break
            score = (group_id + self._penalty * num_of_type[task_type], group_id)
            if best is None or score < best:
                best = score
        return None if best is None else self._tasks[self._lines[best[1]].tasks[0]]

    def _at_home_elsewhere(self, rank: Rank) -> Task | None:
        """The oldest group at home on another rank, among the first `LOOK_AHEAD`."""
        passed: list[_Entry] = []
        found = None
        while found is None and len(passed) < LOOK_AHEAD and (first := self._first(self._homed)) is not None:
            if first.group.home != rank:
                found = first
            elif (entry := self._homed.pop()) is not None:
                passed.append(entry)
        for entry in passed:
            self._homed.push(entry)
        return found

    def _first(self, heap: LazyHeap[_Entry]) -> Task | None:
        entry = heap.top()
        return None if entry is None else self._tasks[self._lines[entry[1]].tasks[0]]

    def _heap(self) -> LazyHeap[_Entry]:
        return LazyHeap(self._is_valid)

    def _is_valid(self, entry: _Entry) -> bool:
        line = self._lines.get(entry[1])
        return line is not None and line.stamp == entry[2]


class _PausedLine:
    """Paused tasks in the order of their priority; the first few stand sorted in front, so that a look at them is cheap."""

    def __init__(self, stamps: Mapping[TaskId, int]) -> None:
        #: The number of every task's valid entry; others are outdated.
        self._stamps = stamps
        self._front: list[tuple[Priority, int]] = []
        self._rest: LazyHeap[tuple[Priority, int]] = LazyHeap(self._is_valid)

    def add(self, entry: tuple[Priority, int]) -> None:
        if self._front and entry < self._front[-1]:
            insort(self._front, entry)
            entry = self._front.pop()
        self._rest.push(entry)

    def first(self) -> list[Priority]:
        """The first `LOOK_AHEAD` tasks."""
        self._front = [entry for entry in self._front if self._is_valid(entry)]
        while len(self._front) < LOOK_AHEAD and (entry := self._rest.pop()) is not None:
            self._front.append(entry)
        return [entry[0] for entry in self._front]

    def _is_valid(self, entry: tuple[Priority, int]) -> bool:
        return self._stamps.get(entry[0][-1]) == entry[1]


class PausedTasks:
    """Tasks between two ranks."""

    def __init__(self) -> None:
        #: Of every paused task: the rank that it left, whose prefix cache may still hold its context.
        self._left: dict[TaskId, tuple[Task, Rank]] = {}
        self._stamps: dict[TaskId, int] = {}
        self._num_entries = 0
        self._all = _PausedLine(self._stamps)
        self._by_rank: dict[Rank, _PausedLine] = {}

    def __len__(self) -> int:
        return len(self._left)

    def __contains__(self, task_id: TaskId) -> bool:
        return task_id in self._left

    def add(self, task: Task, left: Rank) -> None:
        self._left[task.task_id] = (task, left)
        self._offer(task)

    def remove(self, task: Task) -> Rank:
        """Take the task out; returns the rank that it had left."""
        del self._stamps[task.task_id]
        return self._left.pop(task.task_id)[1]

    def completion_changed(self, group: Group) -> None:
        for task in group.tasks:
            if task.task_id in self._left:
                self._offer(task)

    def drain(self, kind: TaskKind) -> list[Task]:
        """Take out all tasks of a kind, in the order of their ids."""
        drained = [self._left[task_id][0] for task_id in sorted(self._left) if self._left[task_id][0].kind is kind]
        for task in drained:
            self.remove(task)
        return drained

    def candidates(self, rank: Rank) -> list[tuple[Task, Rank]]:
        """What `rank` may resume, best first, each with the rank that it had left."""
        own = self._by_rank[rank].first() if rank in self._by_rank else []
        others = [important for important in self._all.first() if self._left[important[-1]][1] != rank]
        # Within the tiers of evaluation and completion those that left this very rank come first.
        found = sorted([(*key[:2], 0, key) for key in own] + [(*key[:2], 1, key) for key in others])
        return [self._left[entry[-1][-1]] for entry in found]

    def _offer(self, task: Task) -> None:
        self._num_entries += 1
        self._stamps[task.task_id] = self._num_entries
        entry = (priority(task), self._num_entries)
        left = self._left[task.task_id][1]
        self._all.add(entry)
        if left not in self._by_rank:
            self._by_rank[left] = _PausedLine(self._stamps)
        self._by_rank[left].add(entry)
