"""Who waits, and who is next: Table 1 tier by tier, and both waiting rooms against models that sort everything."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.scheduling.bench import EVAL, make_group
from tiderl.scheduling.lifecycle import Group, Task, TaskState
from tiderl.scheduling.waiting import LOOK_AHEAD, PausedTasks, QueuedTasks, priority
from tiderl.types import Rank, TaskId, TaskKind

TRAIN = TaskKind.TRAIN
G, A = TaskState.GENERATING, TaskState.ACTING

# --- Table 1 ------------------------------------------------------------------------------------------------------------


def ranked(
    kind: TaskKind = TRAIN, finished: int = 0, state: TaskState = A, context: int = 50, task_id: int = 5
) -> Task:
    """A task of a group of four; the defaults are a tie in every tier."""
    task = make_group(0, 4, kind, first_task=task_id).tasks[0]
    task.group.num_finished, task.state, task.context_tokens = finished, state, context
    return task


#: Better in one tier, as bad as can be in all tiers below it.
TIERS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("evaluation", {"kind": EVAL}, {"kind": TRAIN, "finished": 3, "state": G, "context": 10**6, "task_id": 0}),
    ("completion", {"finished": 2}, {"finished": 1, "state": G, "context": 10**6, "task_id": 0}),
    ("execution", {"state": G}, {"state": A, "context": 10**6, "task_id": 0}),
    ("context", {"context": 51}, {"context": 50, "task_id": 0}),
    ("task id", {"task_id": 4}, {"task_id": 5}),
]


@pytest.mark.parametrize(("tier", "better", "worse"), TIERS)
def test_every_tier_beats_all_below_it(tier: str, better: dict[str, Any], worse: dict[str, Any]) -> None:
    assert priority(ranked(**better)) < priority(ranked(**worse)), tier


@pytest.mark.parametrize(("tier", "better", "worse"), TIERS)
def test_every_tier_decides_where_those_above_tie(tier: str, better: dict[str, Any], worse: dict[str, Any]) -> None:
    alone = {name: worse[name] for name in better}
    assert priority(ranked(**better)) < priority(ranked(**alone)), tier
    assert priority(ranked(**alone)) == priority(ranked(**alone))


def test_completion_is_a_share_of_the_group() -> None:
    small, large = make_group(0, 2, first_task=0), make_group(1, 8, first_task=2)
    small.num_finished, large.num_finished = 1, 3
    assert priority(small.tasks[0]) < priority(large.tasks[0]), "1 of 2 is more than 3 of 8"


@pytest.mark.parametrize("state", [state for state in TaskState if state is not G])
def test_only_a_task_that_generates_executes(state: TaskState) -> None:
    assert priority(ranked(state=G)) < priority(ranked(state=state)) == priority(ranked(state=A))


# --- queued tasks -------------------------------------------------------------------------------------------------------


def names(tasks: Any) -> list[int]:
    return [int(task.task_id) for task in tasks]


def offered(queued: QueuedTasks, rank: int = 0, **num_of_type: int) -> list[int]:
    return names(queued.training(Rank(rank), Counter(num_of_type)))


def queue_of(*groups: Group, penalty: float = 0.0) -> QueuedTasks:
    queued = QueuedTasks(penalty)
    for group in groups:
        for task in group.tasks:
            queued.add(task)
    return queued


def test_invariant_1_nothing_of_a_group_is_offered_while_its_probe_plays() -> None:
    group = make_group(0, 3, first_task=0)
    queued = queue_of(group)
    assert offered(queued) == [0]
    queued.take(group.tasks[0], as_probe=True)
    assert (offered(queued), len(queued)) == ([], 2)
    assert queued.probed(group.tasks[0])
    assert not queued.probed(group.tasks[0]), "it has told already"
    assert offered(queued) == [1]
    queued.take(group.tasks[1], as_probe=False)
    assert offered(queued) == [2]
    assert not queued.probed(group.tasks[1]), "it is no probe"
    queued.take(group.tasks[2], as_probe=True)
    assert not queued.probed(group.tasks[2]), "nobody waits for it"
    assert (offered(queued), len(queued)) == ([], 0)


def test_a_probe_that_comes_back_is_replaced() -> None:
    group = make_group(0, 3, first_task=0)
    queued = queue_of(group)
    queued.take(group.tasks[0], as_probe=True)
    queued.add(group.tasks[0])
    assert (offered(queued), len(queued)) == ([0], 3)


def test_invariant_2_the_classes_in_their_order() -> None:
    """Ten groups with one task each that waits; ranks 0 and 1."""
    groups = [make_group(i, 4, first_task=10 * i, num_tasks=1) for i in range(8)]
    for i, num_finished in ((7, 1), (6, 2), (5, 2)):
        groups[i].num_finished = num_finished
    groups[4].home, groups[3].home, groups[6].home = Rank(0), Rank(1), Rank(0)
    queued = queue_of(*groups)
    served = []
    while tasks := list(queued.training(Rank(0), Counter())):
        served.append(int(tasks[0].task_id) // 10)
        queued.take(tasks[0], as_probe=False)
    assert served == [5, 6, 7, 4, 0, 1, 2, 3]


def test_invariant_2_one_candidate_of_every_class() -> None:
    groups = [make_group(i, 4, first_task=10 * i) for i in range(4)]
    groups[3].num_finished = 1
    groups[2].home, groups[1].home = Rank(0), Rank(1)
    queued = queue_of(*groups)
    assert offered(queued, rank=0) == [30, 20, 0, 10]
    assert offered(queued, rank=1) == [30, 10, 0, 20]
    assert offered(queued, rank=2) == [30, 0, 10]


@pytest.mark.parametrize("first_home", [0, 1])
def test_invariant_2_a_group_at_home_on_the_asking_rank_does_not_hide_those_at_home_elsewhere(first_home: int) -> None:
    """The own one may not fit; the other one might."""
    groups = [make_group(i, 4, first_task=10 * i) for i in range(2)]
    groups[0].home, groups[1].home = Rank(first_home), Rank(1 - first_home)
    queued = queue_of(*groups)
    own, other = (0, 10) if first_home == 0 else (10, 0)
    assert offered(queued, rank=0) == [own, other]


def test_evaluation_is_apart_in_the_order_of_its_coming() -> None:
    groups = [make_group(i, 1, kind, first_task=10 - i) for i, kind in ((4, EVAL), (3, TRAIN), (2, EVAL))]
    queued = queue_of(*groups)
    assert (queued.num_evaluation, offered(queued)) == (2, [7])
    first = queued.evaluation()
    assert first is groups[2].tasks[0]
    queued.take(first, as_probe=False)
    assert queued.evaluation() is groups[0].tasks[0]
    assert names(queued.drain(EVAL)) == [6]
    assert (queued.evaluation(), queued.num_evaluation, len(queued)) == (None, 0, 1)


def test_invariant_3_the_penalty_by_hand() -> None:
    groups = [make_group(i, 1, first_task=i, type_=type_) for i, type_ in ((0, "slow"), (1, "slow"), (4, "fast"))]
    queued = queue_of(*groups, penalty=2.0)
    assert offered(queued, slow=1) == [0], "0 + 2 comes before 4"
    assert offered(queued, slow=2) == [0], "0 + 4 is a tie with 4: the older group"
    assert offered(queued, slow=3) == [4], "0 + 6 comes after 4"
    assert offered(queued, slow=3, fast=1) == [0], "4 + 2 is a tie with 0 + 6"


class QueueMachine(RuleBasedStateMachine):
    """Groups come, are admitted with and without probes, finish and fail; the model sorts everything each time."""

    @initialize(penalty=st.sampled_from([0.0, 0.5, 1.0, 3.0]))
    def begin(self, penalty: float) -> None:
        self.queued = QueuedTasks(penalty)
        self.penalty = penalty
        self.groups: list[Group] = []
        self.waiting: set[int] = set()
        self.playing: dict[int, Task] = {}
        self.probes: dict[int, int] = {}
        self.num_tasks = 0

    @rule(kind=st.sampled_from([TRAIN, TRAIN, EVAL]), size=st.integers(2, 3), type_=st.sampled_from("abc"))
    def a_group_comes(self, kind: TaskKind, size: int, type_: str) -> None:
        number = len(self.groups)
        group = make_group(number, 1 if kind is EVAL else size, kind, first_task=self.num_tasks, type_=type_)
        self.groups.append(group)
        self.num_tasks += len(group.tasks)
        for task in group.tasks:
            self.queued.add(task)
            self.waiting.add(task.task_id)

    @rule(
        rank=st.integers(0, 1),
        place=st.integers(0, 3),
        as_probe=st.booleans(),
        counts=st.tuples(*[st.integers(0, 3)] * 3),
    )
    def one_is_admitted(self, rank: int, place: int, as_probe: bool, counts: tuple[int, int, int]) -> None:
        tasks = list(self.queued.training(Rank(rank), Counter(dict(zip("abc", counts, strict=True)))))
        if evaluation := self.queued.evaluation():
            tasks.append(evaluation)
        if place >= len(tasks):
            return
        task = tasks[place]
        task.group.home = Rank(rank)
        self.queued.take(task, as_probe=as_probe)
        self.waiting.remove(task.task_id)
        self.playing[task.task_id] = task
        if as_probe:
            self.probes[task.group.spec.group_id] = task.task_id

    @precondition(lambda self: self.playing)
    @rule(
        data=st.data(), how=st.sampled_from(["tells", "finishes", "is tried again", "is tried again untold", "is out"])
    )
    def one_reports(self, data: st.DataObject, how: str) -> None:
        task = self.playing[data.draw(st.sampled_from(sorted(self.playing)))]
        group = task.group
        if how != "is tried again untold":
            is_probe = self.probes.get(group.spec.group_id) == task.task_id
            siblings = [t for t in group.tasks if t.task_id in self.waiting]
            assert self.queued.probed(task) is (is_probe and bool(siblings))
        if self.probes.get(group.spec.group_id) == task.task_id:
            del self.probes[group.spec.group_id]
        if how == "tells":
            return
        del self.playing[task.task_id]
        if how == "finishes":
            group.num_finished += 1
            self.queued.completion_changed(group)
        elif how != "is out":
            self.queued.add(task)
            self.waiting.add(task.task_id)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def one_is_not_wanted(self, data: st.DataObject) -> None:
        task_id = data.draw(st.sampled_from(sorted(self.waiting)))
        self.queued.discard(next(t for group in self.groups for t in group.tasks if t.task_id == task_id))
        self.waiting.remove(task_id)

    @rule(kind=st.sampled_from(TaskKind), really=st.sampled_from([True, False, False, False]))
    def a_kind_is_over(self, kind: TaskKind, really: bool) -> None:
        if really:
            expected = sorted(
                t.task_id for g in self.groups if g.spec.kind is kind for t in g.tasks if t.task_id in self.waiting
            )
            assert names(self.queued.drain(kind)) == expected
            self.waiting -= set(expected)

    # --- the model ------------------------------------------------------------------------------------------------

    def heads(self, kind: TaskKind) -> list[tuple[Group, int]]:
        """Every group that may be offered, with the first of its tasks that waits."""
        found = []
        for group in self.groups:
            tasks = [t.task_id for t in group.tasks if t.task_id in self.waiting]
            if tasks and group.spec.kind is kind and group.spec.group_id not in self.probes:
                found.append((group, int(min(tasks))))
        return found

    def expected(self, rank: int, counts: Counter[str]) -> list[list[int]]:
        """Class by class, each sorted."""
        begun, own, fresh, elsewhere = [], [], [], []
        for group, task in self.heads(TRAIN):
            gid = group.spec.group_id
            if group.num_finished:
                begun.append((-group.num_finished / group.size, gid, task))
            elif group.home == rank:
                own.append((0.0, gid, task))
            elif group.home is None:
                fresh.append((gid + self.penalty * counts[group.spec.task_type], gid, task))
            else:
                elsewhere.append((0.0, gid, task))
        return [[task for _, _, task in sorted(entries)] for entries in (begun, own, fresh, elsewhere)]

    @invariant()
    def the_queue_says_what_sorting_says(self) -> None:
        if not hasattr(self, "queued"):
            return
        assert len(self.queued) == len(self.waiting)
        evaluation = self.queued.evaluation()
        assert ([int(evaluation.task_id)] if evaluation else []) == [task for _, task in self.heads(EVAL)][:1]
        for rank in (0, 1, 2):
            for counts in (Counter(), Counter(a=2, b=1)):
                expected = [entries[0] for entries in self.expected(rank, counts) if entries]
                assert offered(self.queued, rank, **counts) == expected, rank


TestQueuedTasks = QueueMachine.TestCase
TestQueuedTasks.settings = settings(max_examples=35)


# --- paused tasks -------------------------------------------------------------------------------------------------------


def candidates(paused: PausedTasks, rank: int) -> list[int]:
    return [int(task.task_id) for task, _ in paused.candidates(Rank(rank))]


def test_invariant_4_completion_before_home_before_length() -> None:
    paused = PausedTasks()
    groups = [make_group(i, 4, first_task=10 * i) for i in range(3)]
    for group, num_finished in zip(groups, (0, 0, 2), strict=True):
        group.num_finished = num_finished
    for task, left, context in (
        (groups[0].tasks[0], 1, 90),
        (groups[0].tasks[1], 0, 20),
        (groups[1].tasks[0], 0, 30),
        (groups[2].tasks[0], 1, 10),
        (groups[1].tasks[1], 1, 90),
    ):
        task.state, task.context_tokens = TaskState.PAUSED, context
        paused.add(task, Rank(left))
    assert candidates(paused, 0) == [20, 10, 1, 0, 11]
    # All that left rank 1, and the first four of all by Table 1: task 1, with the shortest context, is the fifth of those.
    assert candidates(paused, 1) == [20, 0, 11, 10]
    assert candidates(paused, 2) == [20, 0, 11, 10]
    groups[1].num_finished = 3
    paused.completion_changed(groups[1])
    assert candidates(paused, 1) == [11, 10, 20, 0]


class PausedMachine(RuleBasedStateMachine):
    """More tasks than are looked at, of groups whose completion moves."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = PausedTasks()
        self.groups = [make_group(i, 6, EVAL if i == 3 else TRAIN, first_task=10 * i) for i in range(4)]
        self.tasks = {t.task_id: t for group in self.groups for t in group.tasks}
        self.left: dict[TaskId, int] = {}

    @rule(number=st.integers(0, 3), place=st.integers(0, 5), left=st.integers(0, 2), context=st.integers(0, 3))
    def one_is_paused(self, number: int, place: int, left: int, context: int) -> None:
        task = self.groups[number].tasks[place]
        if task.task_id not in self.left:
            task.state, task.context_tokens = TaskState.PAUSED, context
            self.paused.add(task, Rank(left))
            self.left[task.task_id] = left

    @rule(context=st.integers(0, 3), left=st.integers(0, 2))
    def many_are_paused(self, context: int, left: int) -> None:
        for number in range(4):
            for place in range(6):
                self.one_is_paused(number, place, (left + place) % 3, (context + place) % 4)

    @precondition(lambda self: self.left)
    @rule(data=st.data())
    def one_leaves(self, data: st.DataObject) -> None:
        task_id = data.draw(st.sampled_from(sorted(self.left)))
        assert self.paused.remove(self.tasks[task_id]) == self.left.pop(task_id)
        self.tasks[task_id].state = G

    @rule(number=st.integers(0, 3), num_finished=st.integers(0, 5))
    def the_group_gets_on(self, number: int, num_finished: int) -> None:
        self.groups[number].num_finished = num_finished
        self.paused.completion_changed(self.groups[number])

    @rule(kind=st.sampled_from(TaskKind), really=st.sampled_from([True, False, False, False]))
    def a_kind_is_over(self, kind: TaskKind, really: bool) -> None:
        if really:
            expected = sorted(task_id for task_id in self.left if self.tasks[task_id].kind is kind)
            assert names(self.paused.drain(kind)) == expected
            for task_id in expected:
                del self.left[task_id]

    @staticmethod
    def tiers(task: Task) -> tuple[bool, int]:
        return task.kind is TRAIN, -task.group.num_finished

    @invariant()
    def the_first_ones_are_what_sorting_says(self) -> None:
        assert len(self.paused) == len(self.left)
        assert {task_id for task_id in self.tasks if task_id in self.paused} == set(self.left)
        for rank in (0, 1, 2):
            everyone = [self.tasks[task_id] for task_id in self.left]
            by_table_1 = sorted(everyone, key=lambda t: (*self.tiers(t), -t.context_tokens, t.task_id))
            own = [t for t in by_table_1 if self.left[t.task_id] == rank]
            looked_at = {t.task_id for t in by_table_1[:LOOK_AHEAD] + own[:LOOK_AHEAD]}

            def order(task: Task, rank: int = rank) -> tuple[object, ...]:
                return (*self.tiers(task), self.left[task.task_id] != rank, -task.context_tokens, task.task_id)

            ordered = sorted(everyone, key=order)
            found = self.paused.candidates(Rank(rank))
            assert names(task for task, _ in found) == [t.task_id for t in ordered if t.task_id in looked_at]
            assert [left for _, left in found] == [self.left[task.task_id] for task, _ in found]
            assert names(task for task, _ in found[:1]) == names(ordered[:1]), "invariant 4"


TestPausedTasks = PausedMachine.TestCase
TestPausedTasks.settings = settings(max_examples=30)
