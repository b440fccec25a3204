"""`ContinuousTaskBatching` against random worlds: the six invariants of its docstring after every `decide`, and that all tasks end.

The world has ranks of different sizes, groups of three types with lengths of their own, tasks that grow, fail and finish, reports
that cross a pause order, answers that come late, environments that come and go, and engines that hold more than they should. It
keeps its own books: which task is where, and what a rank uses in blocks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.scheduling.bench import BLOCK, EVAL, Bench
from tiderl.scheduling.ctb import Decision
from tiderl.scheduling.footprints import LASTING_REPORTS, Need, RankPool
from tiderl.scheduling.lifecycle import Task, TaskState
from tiderl.types import Rank, TaskId, TaskKind

TRAIN = TaskKind.TRAIN
#: The active tasks of every rank.
Needs = dict[Rank, dict[TaskId, Need]]
MAX_CONTEXT = 120
#: Tokens that a turn of a task of the type adds: from the environment, then from the model.
TURNS = {"short": (0, 5), "long": (10, 20), "steep": (0, 60)}


def up(tokens: int) -> int:
    return math.ceil(tokens / BLOCK) * BLOCK


class BatchingMachine(RuleBasedStateMachine):
    """Subclasses say which scheduler."""

    rollout: ClassVar[dict[str, str]] = {}

    @initialize(
        blocks=st.lists(st.integers(4, 20), min_size=1, max_size=3),
        capacity=st.integers(1, 12),
        max_tasks=st.integers(1, 6),
        reserve=st.sampled_from([0.0, 0.2]),
        margin=st.sampled_from([0.0, 0.2]),
        penalty=st.sampled_from([0.0, 2.0]),
    )
    def begin(
        self, blocks: list[int], capacity: int, max_tasks: int, reserve: float, margin: float, penalty: float
    ) -> None:
        self.bench = Bench(
            *blocks,
            capacity=capacity,
            max_context=MAX_CONTEXT,
            group_size=3,
            max_tasks_per_rank=max_tasks,
            kv_reserve=reserve,
            resume_margin=margin,
            diversity_penalty=penalty,
            **self.rollout,
        )
        self.capacity, self.max_tasks, self.penalty = capacity, max_tasks, penalty
        self.pools = self.bench.batching.pools
        self.prompts: dict[int, int] = {}
        #: Where a group's prefix most likely is; which tasks have failed leaves it there.
        self.home: dict[int, int] = {}
        self.is_broken = False
        #: Where every task is that has not ended: "queued", "active", "leaving", "doomed" (leaving for good) or "paused".
        self.where: dict[int, str] = {}
        self.rank: dict[int, int] = {}
        #: The rank that a paused task has left.
        self.left: dict[int, int] = {}

    # --- what happens ---------------------------------------------------------------------------------------------

    @rule(
        kind=st.sampled_from([TRAIN, TRAIN, TRAIN, EVAL]),
        size=st.integers(1, 4),
        type_=st.sampled_from(sorted(TURNS)),
        prompt=st.integers(1, 60),
    )
    def a_group_comes(self, kind: TaskKind, size: int, type_: str, prompt: int) -> None:
        group_id = len(self.prompts)
        self.prompts[group_id] = prompt
        for task in self.bench.queue(group_id, 1 if kind is EVAL else size, kind, type_).tasks:
            self.where[task.task_id] = "queued"
        self.decide()

    def some(self, *places: str) -> list[int]:
        return [task_id for task_id, place in sorted(self.where.items()) if place in places]

    @precondition(lambda self: self.some("active", "leaving"))
    @rule(data=st.data(), share=st.floats(0, 1))
    def a_task_goes_on(self, data: st.DataObject, share: float) -> None:
        self.go_on(data.draw(st.sampled_from(self.some("active", "leaving"))), share)
        self.decide()

    @precondition(lambda self: self.some("active"))
    @rule(rounds=st.integers(1, 3), share=st.floats(0, 1))
    def all_tasks_go_on(self, rounds: int, share: float) -> None:
        for _ in range(rounds):
            for task_id in self.some("active"):
                if self.where[task_id] == "active":
                    self.go_on(task_id, share)
                    self.decide()

    def go_on(self, task_id: int, share: float) -> None:
        """Half a turn: what the environment said, or what the model did."""
        task = self.bench.tasks[task_id]
        context = max(task.context_tokens, self.prompts[task.group.spec.group_id])
        added = round(share * TURNS[task.group.spec.task_type][task.in_turn])
        if task.in_turn:
            self.bench.act(task_id, min(MAX_CONTEXT, context + added))
        else:
            self.bench.turn(task_id, context if not task.context_tokens else min(MAX_CONTEXT, context + added))

    def may_finish(self) -> list[int]:
        tasks = self.bench.tasks
        return [t for t in self.some("active", "leaving") if tasks[t].num_turns and not tasks[t].in_turn]

    @precondition(lambda self: self.may_finish())
    @rule(data=st.data())
    def a_task_finishes(self, data: st.DataObject) -> None:
        """Maybe before the order to pause has reached it."""
        task_id = data.draw(st.sampled_from(self.may_finish()))
        self.bench.finish(task_id)
        self.gone(task_id)
        self.decide()

    @precondition(lambda self: self.some("active", "leaving", "doomed"))
    @rule(data=st.data(), retry=st.booleans())
    def a_task_fails(self, data: st.DataObject, retry: bool) -> None:
        task_id = data.draw(st.sampled_from(self.some("active", "leaving", "doomed")))
        self.fail(task_id, retry=retry and self.where[task_id] != "doomed")
        self.decide()

    def fail(self, task_id: int, *, retry: bool) -> None:
        self.bench.fail(task_id, retry=retry)
        self.gone(task_id)
        if retry:
            self.where[task_id] = "queued"

    @precondition(lambda self: self.some("leaving"))
    @rule(data=st.data(), added=st.integers(0, 9), is_wanted=st.sampled_from([True, True, True, False]))
    def a_pause_is_answered(self, data: st.DataObject, added: int, is_wanted: bool) -> None:
        self.hand_over(data.draw(st.sampled_from(self.some("leaving"))), added, is_wanted=is_wanted)
        self.decide()

    def hand_over(self, task_id: int, added: int = 0, *, is_wanted: bool = True) -> None:
        task = self.bench.tasks[task_id]
        self.left[task_id] = self.rank[task_id]
        context = min(MAX_CONTEXT, task.context_tokens + added) if task.in_turn else task.context_tokens
        self.bench.hand_over(task_id, context, is_wanted=is_wanted)
        self.gone(task_id)
        if is_wanted:
            self.where[task_id] = "paused"

    def gone(self, task_id: int) -> None:
        del self.where[task_id]
        self.rank.pop(task_id, None)

    @precondition(lambda self: self.some("queued", "paused"))
    @rule(data=st.data())
    def a_waiting_task_is_not_wanted(self, data: st.DataObject) -> None:
        task_id = data.draw(st.sampled_from(self.some("queued", "paused")))
        self.bench.batching.forget(self.bench.tasks[task_id])
        self.bench.tasks[task_id].state = TaskState.OUT
        self.gone(task_id)
        self.decide()

    @rule(capacity=st.integers(0, 12))
    def environments_come_and_go(self, capacity: int) -> None:
        self.capacity = capacity
        self.bench.batching.set_capacity(capacity)
        self.decide()

    @rule(data=st.data(), excess=st.sampled_from([0, 0, 30, 100]))
    def an_engine_reports(self, data: st.DataObject, excess: int) -> None:
        rank = data.draw(st.sampled_from(sorted(self.pools)))
        for _ in range(LASTING_REPORTS):
            self.bench.batching.engine_says(rank, self.use(self.pools[rank].needs.values()) + excess)
            self.decide()

    # --- what must hold -------------------------------------------------------------------------------------------

    def use(self, needs: Iterable[Need]) -> int:
        """Tokens that active tasks use on a rank, by the block."""
        needs = list(needs)
        if self.rollout["footprint"] == "paper":
            return sum(up(need.context_tokens) for need in needs)
        shared: Counter[int] = Counter()
        for need in needs:
            shared[need.group_id] = max(shared[need.group_id], need.prompt_tokens // BLOCK * BLOCK)
        own = (need.context_tokens - need.prompt_tokens // BLOCK * BLOCK for need in needs)
        return sum(shared.values()) + sum(up(max(0, tokens)) for tokens in own)

    def decide(self) -> None:
        #: Ranks with a task that never fits, which is told so only after the decisions: its room is nobody's before.
        self.dismissing: set[int] = set()
        # A look inside: a rank that could take nothing is not asked again before it has more room.
        self.closed = set(self.bench.batching._closed)
        self.is_broken = True  # until all checks have passed
        before = {rank: dict(pool.needs) for rank, pool in self.pools.items()}
        unseen = {rank: pool.unseen_tokens for rank, pool in self.pools.items()}
        for decision in self.bench.decide_raw():
            self.check(decision, before, unseen)
        self.check_all()
        self.is_broken = False

    def check(self, decision: Decision, needs: Needs, unseen: dict[Rank, int]) -> None:
        """One decision, at the moment that it was made."""
        task, rank = decision.task, decision.rank
        place = self.where[task.task_id]
        if decision.verb == "pause":
            assert self.rollout["scheduler"] == "ctb"
            assert place == "active" and self.rank[task.task_id] == rank and task.state is TaskState.PAUSING
            assert self.use(needs[rank].values()) + unseen[rank] > self.pools[rank].budget_tokens, "no more than needed"
            self.check_lowest(task, needs[rank])
            del needs[rank][task.task_id]
            self.where[task.task_id] = "leaving"
        elif decision.verb == "never_fits":
            largest = max(pool.cache_tokens for pool in self.pools.values())
            assert max(task.context_tokens, task.group.prompt_tokens or 0) > largest, "invariant 6"
            if place == "active":
                del needs[rank][task.task_id]
                self.where[task.task_id] = "doomed"
                self.dismissing.add(rank)
            else:
                self.gone(task.task_id)
        else:
            assert place == {"start": "queued", "resume": "paused"}[decision.verb], "invariant 3"
            self.check_placed(task, rank, place, needs, unseen)
            needs[rank][task.task_id] = self.pools[rank].needs[task.task_id]
            self.where[task.task_id], self.rank[task.task_id] = "active", rank

    def check_lowest(self, task: Task, needs: dict[TaskId, Need]) -> None:
        """Invariant 3."""

        def importance(other: Task) -> tuple[object, ...]:
            done = sum(t.state is TaskState.FINISHED for t in other.group.tasks) / other.group.size
            return (other.kind is EVAL, done, other.in_turn, other.context_tokens, -other.task_id)

        assert importance(task) == min(importance(self.bench.tasks[task_id]) for task_id in needs)

    def check_placed(self, task: Task, rank: Rank, place: str, needs: Needs, unseen: dict[Rank, int]) -> None:
        """Invariants 2, 4 and 5. What has room after all decisions had room before: pauses come first."""
        if place == "queued":
            assert len(self.some("active", "leaving", "doomed", "paused")) < self.capacity, "invariant 2"
        need = self.pools[rank].needs[task.task_id]
        headroom = {r: pool.budget_tokens - unseen[r] - self.use(needs[r].values()) for r, pool in self.pools.items()}
        if self.rollout["scheduler"] == "fixed":
            headroom = {r: -len(needs[r]) for r in self.pools}
        group_id = task.group.spec.group_id
        prefix = self.left[task.task_id] if place == "paused" else self.home.get(group_id)
        if prefix != rank:
            assert prefix is None or not self.has_room(prefix, need), "invariant 5: its prefix is elsewhere"
        if prefix != rank and self.is_same_for_all(task, place, prefix):
            better = [r for r in self.pools if r not in self.closed and (headroom[r], -r) > (headroom[rank], -rank)]
            roomier = [r for r in better if self.has_room(r, need)]
            assert not roomier, f"invariant 5: {place} {need} on {rank} though {roomier} are roomier ({headroom})"
        self.home[group_id] = rank
        if task.kind is TRAIN and self.rollout["scheduler"] == "ctb":
            for waiting in map(self.bench.tasks.__getitem__, self.some("paused")):
                if waiting.kind is EVAL:
                    context = waiting.context_tokens
                    assert not self.has_room(rank, Need(waiting.task_id, waiting.group.spec.group_id, "", 0, context))
                    if self.rollout["footprint"] == "paper" and needs[rank]:
                        assert up(context) > headroom[rank], "invariant 4"

    def is_same_for_all(self, task: Task, place: str, prefix: int | None) -> bool:
        """Would any rank have been offered the task? What is at home, and what is too many of its type, differ."""
        is_begun = any(t.state is TaskState.FINISHED for t in task.group.tasks)
        return place == "paused" or task.kind is EVAL or is_begun or (prefix is None and self.penalty == 0)

    def has_room(self, rank: int, need: Need) -> bool:
        pool: RankPool = self.pools[Rank(rank)]
        # A look inside: asking whether it takes tasks may change the answer.
        may_take = rank not in self.dismissing and not pool._is_crowded and pool.num_on_rank < self.max_tasks
        return may_take and pool.shortfall(need) <= 0

    def check_all(self) -> None:
        """After a `decide`, in every world."""
        assert len(self.bench.batching.queued) == len(self.some("queued"))
        assert {t for t in self.where if TaskId(t) in self.bench.batching.paused} == set(self.some("paused"))
        for rank, pool in self.pools.items():
            on = [t for t in self.some("active", "leaving", "doomed") if self.rank[t] == rank]
            assert {t for t in on if self.where[t] == "active"} == set(pool.needs)
            assert {t for t in on if self.where[t] != "active"} == pool.leaving
            assert len(on) <= self.max_tasks, "invariant 2"
            if self.rollout["scheduler"] == "ctb":
                self.check_budget(pool)
        if self.capacity and self.some("queued", "paused"):
            assert self.some("active", "leaving", "doomed"), "invariant 6: everything waits, nothing plays"
        if self.rollout["scheduler"] == "fixed" and self.some("queued"):
            sessions = len(self.some("active", "leaving", "doomed", "paused"))
            assert sessions >= min(self.capacity, self.max_tasks * len(self.pools)), "always full"

    def check_budget(self, pool: RankPool) -> None:
        """Invariant 1."""
        for task_id, need in pool.needs.items():
            context = self.bench.tasks[task_id].context_tokens
            assert not context or need.context_tokens == context
        assert pool.usage_tokens == self.use(pool.needs.values()) + pool.unseen_tokens
        if pool.usage_tokens <= pool.budget_tokens or not pool.needs:
            return
        assert len(pool.needs) == 1, "invariant 1"
        ((task_id, need),) = pool.needs.items()
        if pool.unseen_tokens and need.context_tokens <= pool.budget_tokens:
            return  # its own use is within the budget; what else the engine holds is nobody's
        assert need.context_tokens > max(p.budget_tokens for p in self.pools.values()), "it fits a larger rank"
        assert up(need.context_tokens) <= pool.cache_tokens, "its rank cannot hold it"

    def teardown(self) -> None:
        """Invariant 6: if tasks end, all of them are admitted, resumed and over."""
        if not hasattr(self, "bench") or self.is_broken:
            return
        self.environments_come_and_go(max(1, self.capacity))
        for _ in range(10 * len(self.where) + 10):
            for task_id in self.some("leaving", "doomed", "active"):
                if self.where.get(task_id) == "doomed":
                    self.fail(task_id, retry=False)
                elif self.where[task_id] == "leaving":
                    self.hand_over(task_id)
                elif task_id in self.may_finish():
                    self.bench.finish(task_id)
                    self.gone(task_id)
                else:
                    self.go_on(task_id, 0.0)
                self.decide()
        assert not self.where, f"{self.where} never ended"


class PaperMachine(BatchingMachine):
    rollout: ClassVar[dict[str, str]] = {"scheduler": "ctb", "footprint": "paper"}


class GrowthMachine(BatchingMachine):
    rollout: ClassVar[dict[str, str]] = {"scheduler": "ctb", "footprint": "growth"}


class FixedMachine(BatchingMachine):
    rollout: ClassVar[dict[str, str]] = {"scheduler": "fixed", "footprint": "paper"}


LONG = settings(max_examples=30, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow])
TestPaper, TestGrowth, TestFixed = PaperMachine.TestCase, GrowthMachine.TestCase, FixedMachine.TestCase
TestPaper.settings = TestGrowth.settings = TestFixed.settings = LONG
