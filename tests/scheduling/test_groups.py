"""The groups' book: what becomes of a group and of its tokens, by hand and against a book kept beside it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tiderl.config.schema import Config, RolloutConfig, ScheduleConfig, TrainConfig
from tiderl.errors import IllegalEvent
from tiderl.scheduling.actions import Action, DropTrajectories
from tiderl.scheduling.groups import GroupBook
from tiderl.scheduling.ledger import Account
from tiderl.scheduling.lifecycle import Group, GroupState, Task, TaskState
from tiderl.types import GroupId, GroupSpec, Rank, TaskId, TaskKind, WeightVersion

V0 = WeightVersion(0)


def book_of(group_size: int = 3, spares: int = 0, groups_per_step: int = 2, max_staleness: int = 1) -> GroupBook:
    config = Config(
        rollout=RolloutConfig(spare_trajectories=spares),
        train=TrainConfig(steps=100, groups_per_step=groups_per_step, group_size=group_size),
        schedule=ScheduleConfig(max_staleness=max_staleness),
    )
    return GroupBook(config, V0)


def spec(group_id: int, kind: TaskKind = TaskKind.TRAIN) -> GroupSpec:
    return GroupSpec(GroupId(group_id), kind, "env", "split", group_id, "type")


def play(task: Task) -> None:
    """Somewhere on a rank."""
    task.state, task.rank = TaskState.GENERATING, Rank(1)


def finish(book: GroupBook, task: Task, tokens: int, version: int = 0) -> list[tuple[int, ...]]:
    """The rank reports a trajectory that still counts; returns the task ids of what is dropped for it."""
    book.generated(task, tokens)
    task.state, task.rank = TaskState.FINISHED, None
    return dropped_by(book.count_finished(task, WeightVersion(version), now_s=1.0))


def fail(book: GroupBook, task: Task) -> list[tuple[int, ...]]:
    """The task is given up; its own tokens are not the book's business."""
    task.state, task.rank = TaskState.OUT, None
    return dropped_by(book.count_out(task, now_s=1.0))


def dropped_by(actions: list[Action]) -> list[tuple[int, ...]]:
    dropped = [action for action in actions if isinstance(action, DropTrajectories)]
    assert dropped == actions
    return [tuple(int(task_id) for task_id in action.task_ids) for action in dropped]


def test_a_group_opens_with_all_its_tasks() -> None:
    book = book_of(group_size=3, spares=2)
    group = book.open(spec(7))
    assert (group.size, group.num_pending, len(group.tasks), group.start_version) == (3, 5, 5, V0)
    evaluation = book.open(spec(8, TaskKind.EVAL))
    assert (evaluation.size, len(evaluation.tasks)) == (1, 1), "spares are for training"
    assert [t.task_id for t in [*group.tasks, *evaluation.tasks]] == list(range(6))
    assert all(book.task(t.task_id) is t for t in group.tasks)
    assert book.gate.outstanding == 1, "evaluation is not bounded by staleness"


def test_nobody_knows_a_task_that_was_never_opened() -> None:
    with pytest.raises(IllegalEvent, match="task 5 is unknown"):
        book_of().task(TaskId(5))


def test_invariant_1_a_complete_group_becomes_ready_with_the_oldest_version() -> None:
    book = book_of(group_size=3)
    group = book.open(spec(0))
    book.gate.advance(WeightVersion(1))
    assert finish(book, group.tasks[0], 10, version=1) == []
    assert fail(book, group.tasks[1]) == []
    assert len(book.ready) == 0
    assert finish(book, group.tasks[2], 5, version=1) == []
    assert (group.state, len(book.ready), book.ready.oldest_start_version()) == (GroupState.READY, 1, 0)
    assert book.ready.take() == 0
    assert book.retire(group) == 15
    assert book.ledger.balances()["trained"] == 15
    assert group.state is GroupState.GONE and not book.groups and not book.tasks


def test_a_trajectory_with_an_older_token_makes_its_group_older() -> None:
    book = book_of(group_size=2)
    book.gate.advance(WeightVersion(2))
    group = book.open(spec(0))
    finish(book, group.tasks[0], 10, version=1)
    finish(book, group.tasks[1], 10, version=2)
    assert book.ready.oldest_start_version() == 1


@pytest.mark.parametrize("num_finished", [0, 1])
def test_invariant_1_a_group_with_nothing_to_compare_is_dropped_as_failed(num_finished: int) -> None:
    book = book_of(group_size=3)
    group = book.open(spec(0))
    done, failed = group.tasks[:num_finished], group.tasks[num_finished:]
    for task in done:
        assert finish(book, task, 10) == []
    dropped = [drop for task in failed for drop in fail(book, task)]
    assert dropped == [tuple(int(t.task_id) for t in done)]
    assert (group.state, len(book.ready), book.gate.outstanding) == (GroupState.GONE, 0, 0)
    assert book.ledger.balances()["failed"] == 10 * num_finished
    assert book.ledger.held == 0


def test_invariant_2_a_group_is_ready_without_its_spares_whose_tokens_are_dropped() -> None:
    book = book_of(group_size=2, spares=2)
    group = book.open(spec(0))
    first, second, playing, queued = group.tasks
    play(playing)
    finish(book, first, 10)
    assert book.surplus(group) == [] and not group.is_complete
    finish(book, second, 20)
    assert group.state is GroupState.READY
    assert book.surplus(group) == [playing, queued]
    assert [t.is_spare for t in group.tasks] == [False, False, True, True]
    book.generated(playing, 7)
    book.drop_spare(queued)
    book.drop_spare(playing)
    assert [t.state for t in group.tasks] == [TaskState.FINISHED] * 2 + [TaskState.OUT] * 2
    assert [t.task_id for t in group.finished] == [0, 1]
    book.ready.take()
    assert book.retire(group) == 30
    balances = book.ledger.balances()
    assert (balances["trained"], balances["dropped"], balances["held"]) == (30, 7, 0)


def test_a_spare_may_take_the_place_of_one_that_failed() -> None:
    book = book_of(group_size=2, spares=1)
    group = book.open(spec(0))
    assert fail(book, group.tasks[0]) == []
    finish(book, group.tasks[1], 10)
    finish(book, group.tasks[2], 10)
    assert group.state is GroupState.READY
    assert book.surplus(group) == []


def test_invariant_3_a_task_is_known_until_its_rank_has_reported_its_end() -> None:
    book = book_of(group_size=2, spares=1)
    group = book.open(spec(0))
    spare = group.tasks[2]
    play(spare)
    finish(book, group.tasks[0], 10)
    finish(book, group.tasks[1], 10)
    book.surplus(group)
    book.ready.take()
    book.retire(group)
    assert group.state is GroupState.GONE
    assert book.task(spare.task_id) is spare
    book.generated(spare, 4)
    book.drop_spare(spare)
    with pytest.raises(IllegalEvent):
        book.task(spare.task_id)
    assert book.ledger.balances()["dropped"] == 4


def test_groups_that_have_waited_too_long_are_dropped_as_stale() -> None:
    book = book_of(group_size=2, max_staleness=1)
    group = book.open(spec(0))
    for task in group.tasks:
        finish(book, task, 10)
    book.gate.advance(WeightVersion(1))
    assert book.take_late() == []
    book.gate.advance(WeightVersion(2))
    assert dropped_by(book.take_late()) == [(0, 1)]
    assert book.ledger.balances()["stale"] == 20
    assert (len(book.ready), book.gate.outstanding, book.tasks) == (0, 0, {})


def test_a_step_without_an_update_fails_its_groups_tokens() -> None:
    book = book_of(group_size=2)
    group = book.open(spec(0))
    for task in group.tasks:
        finish(book, task, 10)
    book.ready.take()
    group.state = GroupState.TRAINING
    assert dropped_by([book.drop_trained(group, "no update")]) == [(0, 1)]
    assert book.ledger.balances()["failed"] == 20
    assert book.gate.outstanding == 0


def test_prefilled_tokens_are_new_once_for_a_task_and_once_for_a_groups_prompt() -> None:
    book = book_of(group_size=2)
    first, second = book.open(spec(0)).tasks
    book.prefilled(first, 50, 50)
    first.computed_tokens = 50
    first.group.computed_prompt_tokens = 50
    book.prefilled(second, 50, 10)  # five sixths are found; the rest is computed again
    book.prefilled(first, 80, 40)  # 30 are new since its last turn
    ledger = book.ledger
    assert (ledger.prefill_first, ledger.prefill_repeated, ledger.prefill_cached) == (50 + 30, 10 + 10, 40 + 40)


class BookMachine(RuleBasedStateMachine):
    """Groups open, are played, finish, fail, are trained or grow stale, in any order; a second book is kept by plain counting."""

    @initialize(group_size=st.integers(2, 3), spares=st.integers(0, 2), max_staleness=st.integers(0, 2))
    def begin(self, group_size: int, spares: int, max_staleness: int) -> None:
        self.book = book_of(group_size, spares, groups_per_step=2, max_staleness=max_staleness)
        self.group_size, self.max_staleness = group_size, max_staleness
        self.all: list[Group] = []
        self.tokens: Counter[str] = Counter()
        self.versions: dict[int, list[int]] = {}

    @precondition(lambda self: self.book.gate.quota > 0)
    @rule()
    def open(self) -> None:
        self.all.append(self.book.open(spec(len(self.all))))
        self.versions[len(self.all) - 1] = [self.book.gate.version]

    def waiting(self) -> list[Task]:
        return [t for group in self.all for t in group.tasks if t.state is TaskState.QUEUED]

    def playing(self) -> list[Task]:
        return [t for group in self.all for t in group.tasks if t.state is TaskState.GENERATING]

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        play(data.draw(st.sampled_from(self.waiting())))

    @precondition(lambda self: self.playing())
    @rule(data=st.data(), tokens=st.integers(0, 9))
    def generate(self, data: st.DataObject, tokens: int) -> None:
        task = data.draw(st.sampled_from(self.playing()))
        self.book.generated(task, task.generated_tokens + tokens)
        self.tokens["generated"] += tokens

    @precondition(lambda self: self.playing())
    @rule(data=st.data(), age=st.integers(0, 1), succeeds=st.booleans())
    def end(self, data: st.DataObject, age: int, succeeds: bool) -> None:
        task = data.draw(st.sampled_from(self.playing()))
        group = task.group
        assert self.book.task(task.task_id) is task, "invariant 3"
        if task.is_spare:
            self.tokens["dropped"] += task.generated_tokens
            self.book.drop_spare(task)
        elif succeeds:
            version = max(0, self.book.gate.version - age)
            self.versions[group.spec.group_id].append(version)
            dropped = finish(self.book, task, task.generated_tokens, version)
            assert dropped == [] or not self.could_compare(group)
            self.after_an_end(group)
        else:
            self.tokens["failed"] += task.generated_tokens
            self.book.ledger.settle(task.generated_tokens, Account.FAILED)
            task.forget_attempt()
            fail(self.book, task)
            self.after_an_end(group)

    @staticmethod
    def could_compare(group: Group) -> bool:
        return len(group.finished) >= 2

    def after_an_end(self, group: Group) -> None:
        pending = [t for t in group.tasks if t.state in (TaskState.QUEUED, TaskState.GENERATING)]
        num_finished = len(group.finished)
        if num_finished < self.group_size and pending:
            assert group.state is GroupState.OPEN
            return
        assert group.state is (GroupState.READY if num_finished >= 2 else GroupState.GONE), "invariant 1"
        if num_finished < 2:
            self.tokens["failed"] += sum(t.generated_tokens for t in group.finished)
        assert self.book.surplus(group) == pending
        for task in pending:
            if task.state is TaskState.QUEUED:
                self.book.drop_spare(task)

    @precondition(lambda self: len(self.book.ready) >= 1)
    @rule()
    def train(self) -> None:
        """Late groups go first; then the oldest ready one is trained on."""
        late = [g for g in self.ready() if self.book.gate.version - self.start_version(g) > self.max_staleness]
        tokens = {g.spec.group_id: sum(t.generated_tokens for t in g.finished) for g in self.ready()}
        self.tokens["stale"] += sum(tokens[g.spec.group_id] for g in late)
        dropped = dropped_by(self.book.take_late())
        assert sorted(dropped) == sorted(tuple(int(t.task_id) for t in g.finished) for g in late)
        if not self.book.ready:
            return
        oldest = min(self.start_version(g) for g in self.ready())
        group = self.book.groups[self.book.ready.take()]
        assert self.start_version(group) == oldest
        self.tokens["trained"] += tokens[group.spec.group_id]
        assert self.book.retire(group) == tokens[group.spec.group_id]
        self.book.gate.retire(1)

    @rule()
    def sync(self) -> None:
        self.book.gate.advance(WeightVersion(self.book.gate.version + 1))

    def ready(self) -> list[Group]:
        return [group for group in self.all if group.state is GroupState.READY]

    def start_version(self, group: Group) -> int:
        return min(self.versions[group.spec.group_id])

    @invariant()
    def the_books_agree(self) -> None:
        if not hasattr(self, "all"):
            return
        balances = self.book.ledger.balances()
        for account, tokens in self.tokens.items():
            assert balances[account] == tokens, account
        open_groups = [g for g in self.all if g.state is not GroupState.GONE]
        assert list(self.book.groups.values()) == open_groups
        assert self.book.gate.outstanding == len(open_groups)
        assert len(self.book.ready) == len(self.ready())
        known = {t.task_id for g in open_groups for t in g.tasks} | {t.task_id for t in self.playing()}
        assert set(self.book.tasks) == known, "invariant 3"
        held = sum(t.generated_tokens for g in open_groups for t in g.finished)
        assert balances["held"] == held + sum(t.generated_tokens for t in self.playing())


TestGroupBook = BookMachine.TestCase
TestGroupBook.settings = settings(max_examples=40)
