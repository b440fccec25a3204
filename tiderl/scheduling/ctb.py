"""Continuous Task Batching: which task starts, pauses and resumes, and on which rollout rank.

Algorithm 1, run for the ranks that an event has changed: while a rank's usage is above its budget, pause its active task of the
lowest priority; while there is room, resume the paused task of the highest priority that fits, else admit a new one, else stop.
`footprints.py` says what fits, `waiting.py` who is next, `estimates.py` how long a task will get. Evaluation comes before all
training tasks, paused or new: it blocks the weight sync (Table 1's first tier above Algorithm 1's order of the two lists).

A rank that could take nothing is *closed*, until something makes more room on it: a task leaves, or (with foresight) its tasks have
come so much nearer to their ends as the last try was short of.

Invariants (tests/scheduling/test_ctb.py):

1. After `decide` no rank's usage is above its budget: beyond it only running turns grow, into the reserve, until their next report.
   The exception is a task that is alone: one that no rank's budget holds is played in a whole cache, and what an engine holds
   beyond its tasks' contexts cannot be paused.
2. Active and paused tasks together never exceed the environments' capacity, and the tasks on a rank never `max_tasks_per_rank`.
3. The task that is paused is the last of its rank by `waiting.priority`; a pause is answered before the task is resumed.
4. No evaluation task waits where a training task is admitted or resumed on a rank that would have had room for it.
5. Resumed and admitted tasks go to the rank with their prefix if it has room, else to the roomiest one.
6. Every task that fits the largest rank is admitted in the end, and every paused one resumed, if tasks end; a task that fits no
   rank is reported as such.

Source: paper §4.1, §4.2, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tiderl.config.schema import Config
from tiderl.scheduling.estimates import LengthEstimates
from tiderl.scheduling.footprints import ExpectedGrowth, Need, PresentLengths, RankPool, TaskSlots
from tiderl.scheduling.lifecycle import ACTIVE, Group, Task, TaskState
from tiderl.scheduling.room import RoomOrder
from tiderl.scheduling.waiting import PausedTasks, QueuedTasks, priority
from tiderl.types import Rank, TaskId, TaskKind

#: A sibling follows its group's prefix to a rank that has so many more tasks than the roomiest one, but not further.
AFFINITY_SLACK = 8
#: A closed rank's tasks must grow by at least this part of its budget before another try.
TRIES_PER_BUDGET = 64


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done with a task now; its state has changed already, but for `never_fits`: no rank's cache is large enough."""

    verb: Literal["start", "resume", "pause", "never_fits"]
    task: Task
    rank: Rank


class ContinuousTaskBatching:
    """See the module docstring. Every method that reports something is followed by `decide`."""

    def __init__(self, config: Config) -> None:
        rollout = config.rollout
        self._config = rollout
        self._max_context = config.model.max_context_tokens
        self._group_size = config.train.group_size + rollout.spare_trajectories
        self.estimates = LengthEstimates(max_context_tokens=self._max_context, max_turns=config.agent.max_turns)
        self._pool_kind: type[RankPool] = TaskSlots
        if rollout.scheduler == "ctb":
            self._pool_kind = ExpectedGrowth if rollout.footprint == "growth" else PresentLengths
        self._foresees = self._pool_kind is ExpectedGrowth
        self.pools: dict[Rank, RankPool] = {}
        self.largest_cache_tokens = 0
        self._largest_budget = 0
        self.queued = QueuedTasks(rollout.diversity_penalty)
        self.paused = PausedTasks()
        self._capacity = 0
        self._num_sessions = 0
        self._tasks: dict[TaskId, Task] = {}
        #: All ranks with a place for another task, and those of them (and others) that have to be looked at.
        self._all_ranks = RoomOrder(self._headroom)
        self._open_ranks = RoomOrder(self._headroom)
        #: Ranks that could take nothing, and how many more tokens their tasks must have grown by before another try.
        self._closed: dict[Rank, int] = {}
        self._over: set[Rank] = set()

    # --- what happens ---------------------------------------------------------------------------------------------

    def set_capacity(self, num_sessions: int) -> None:
        """How many sessions the environments can hold at once, paused ones included."""
        self._capacity = num_sessions
        self._open_all()

    def add_rank(self, rank: Rank, num_blocks: int, block_tokens: int) -> None:
        """A rollout rank takes tasks from now on."""
        self.pools[rank] = self._pool_kind(num_blocks, block_tokens, self._config, self.estimates)
        self.largest_cache_tokens = max(self.largest_cache_tokens, self.pools[rank].cache_tokens)
        self._largest_budget = max(self._largest_budget, self.pools[rank].budget_tokens)
        self._open(rank)

    def enqueue(self, task: Task) -> None:
        self.queued.add(task)
        self._open_roomiest()

    def turn_started(self, task: Task) -> None:
        """The task's context has its real length, its own or after an observation; `in_turn` and `context_tokens` are set."""
        group, task_type = task.group, task.group.spec.task_type
        is_news = False
        if task.num_turns == 0 and group.prompt_tokens is None:
            group.prompt_tokens = task.context_tokens
            is_news = self.estimates.saw_prompt(task_type, task.context_tokens)
        if task.turn_seen < task.num_turns:  # else it goes on with a turn that a pause had cut
            if task.turn_seen >= 0:
                is_news |= self.estimates.saw_growth(task_type, task.context_tokens - task.turn_context_tokens)
            task.turn_seen, task.turn_context_tokens = task.num_turns, task.context_tokens
        if is_news:
            self._open_all()
        self._grew(task)

    def turn_ended(self, task: Task) -> None:
        """The task's context has grown by what was generated; `num_turns` counts the turn."""
        group = task.group
        if task.num_turns == 1 and group.first_turn_tokens is None:
            group.first_turn_tokens = task.context_tokens
            if self.estimates.saw_first_turn(group.spec.task_type, task.context_tokens):
                self._open_all()
        self._grew(task)
        self._probed(task)

    def finished(self, task: Task, rank: Rank) -> None:
        """The task has left `rank` with a trajectory; its group counts it already."""
        self._leave(task, rank)
        if self.estimates.saw_final(task.group.spec.task_type, task.context_tokens):
            self._open_all()
        self.completion_changed(task.group)

    def failed(self, task: Task, rank: Rank) -> None:
        """The task has left `rank` without one."""
        self._leave(task, rank)

    def handed_over(self, task: Task, rank: Rank, *, is_wanted: bool) -> None:
        """The task has left `rank` paused; it waits for a place if it `is_wanted`."""
        pool = self.pools[rank]
        pool.leaving.remove(task.task_id)
        self._open(rank)
        if is_wanted:
            self.paused.add(task, rank)
            self._open_roomiest()
        else:
            self._gone(task)

    def dismissed(self, task: Task) -> None:
        """A task on a rank has been told to end."""
        assert task.rank is not None
        if task.task_id not in self.pools[task.rank].leaving:
            self.pools[task.rank].dismiss(task.task_id)
            task.state = TaskState.PAUSING
            self._open(task.rank)

    def forget(self, task: Task) -> None:
        """A queued or paused task is not wanted any more."""
        if task.task_id in self.paused:
            self.paused.remove(task)
            self._gone(task)
        else:
            self.queued.discard(task)

    def drain(self, kind: TaskKind) -> tuple[list[Task], list[Task]]:
        """Take out all queued and all paused tasks of a kind."""
        paused = self.paused.drain(kind)
        for task in paused:
            self._gone(task)
        return self.queued.drain(kind), paused

    def completion_changed(self, group: Group) -> None:
        self.queued.completion_changed(group)
        self.paused.completion_changed(group)

    def engine_says(self, rank: Rank, used_tokens: int) -> int | None:
        """Hold the engine's use against the turn loop's; returns the correction in tokens when it changes."""
        pool = self.pools[rank]
        correction = pool.compare(used_tokens)
        if correction is not None:
            self._open(rank)
            self._watch(rank)
        return correction

    # --- Algorithm 1 ----------------------------------------------------------------------------------------------

    def decide(self) -> list[Decision]:
        """Everything that follows from what has happened since the last call."""
        decisions: list[Decision] = []
        for rank in sorted(self._over):
            self._relieve(rank, decisions)
        self._over.clear()
        while (placed := self._place()) is not None:
            decisions.append(placed)
        return decisions

    def _relieve(self, rank: Rank, decisions: list[Decision]) -> None:
        """While usage > budget: pause the active task of the lowest priority."""
        pool = self.pools[rank]
        while pool.is_over and pool.needs:
            lowest = max((self._tasks[task_id] for task_id in pool.needs), key=priority)
            if len(pool.needs) == 1:
                if self._never_fits(lowest.context_tokens):
                    decisions.append(Decision("never_fits", lowest, rank))
                    return
                if self._may_stay(lowest.context_tokens, pool):
                    return
            pool.pause(lowest.task_id)
            lowest.state = TaskState.PAUSING
            decisions.append(Decision("pause", lowest, rank))

    def _place(self) -> Decision | None:
        """The next task that is started or resumed somewhere, or None if nothing waits or nothing has room."""
        while self.paused or (self.queued and self._num_sessions < self._capacity):
            rank = self._open_ranks.top()
            if rank is None:
                return None
            if (decision := self._place_on(rank)) is not None:
                return decision
        return None

    def _place_on(self, asking: Rank) -> Decision | None:
        """The first of the waiting tasks that the rank may take and has room for; without one it is closed."""
        pool = self.pools[asking]
        missing = self._max_context
        if pool.needs and pool.room_tokens <= 0:
            # Most tries end here: what plays already has claims on all the room.
            missing = -pool.room_tokens
        elif self._may_take(asking):
            for task, left in self._candidates(asking):
                if self._never_fits(max(task.context_tokens, task.group.prompt_tokens or 0)):
                    self.forget(task)
                    return Decision("never_fits", task, asking)
                need = self._need(task)
                rank, shortfall = self._choose(asking, left, need)
                if shortfall <= 0:
                    return self._admit(task, rank, need)
                missing = min(missing, shortfall)
                if task.kind is TaskKind.EVAL and need.context_tokens <= pool.budget_tokens:
                    break  # the rank runs empty for it
        self._closed[asking] = max(missing, pool.budget_tokens // TRIES_PER_BUDGET)
        self._open_ranks.remove(asking)
        return None

    def _candidates(self, asking: Rank) -> Iterator[tuple[Task, Rank | None]]:
        """What the rank may take, in order, each with the rank whose prefix cache may hold its prompt or context."""
        may_start = self._num_sessions < self._capacity
        paused = self.paused.candidates(asking) if self.paused else []
        yield from ((task, left) for task, left in paused if task.kind is TaskKind.EVAL)
        if may_start and (evaluation := self.queued.evaluation()) is not None:
            yield evaluation, evaluation.group.home
        yield from ((task, left) for task, left in paused if task.kind is TaskKind.TRAIN)
        if may_start:
            for task in self.queued.training(asking, self.pools[asking].num_of_type):
                yield task, task.group.home

    def _choose(self, asking: Rank, prefix: Rank | None, need: Need) -> tuple[Rank, int]:
        """The rank with the task's prefix if it has room, else the one that asks; and by how much that is too small."""
        if prefix is not None and prefix != asking and prefix in self.pools and self._may_take(prefix):
            crowd = self.pools[prefix].num_on_rank - self.pools[asking].num_on_rank
            if crowd <= AFFINITY_SLACK and self._shortfall(prefix, need) <= 0:
                return prefix, 0
        return asking, self._shortfall(asking, need)

    def _admit(self, task: Task, rank: Rank, need: Need) -> Decision:
        resumes = task.task_id in self.paused
        task.group.home = rank
        if resumes:
            self.paused.remove(task)
        else:
            self.queued.take(task, as_probe=self._must_probe(task, rank))
            self._num_sessions += 1
            self._tasks[task.task_id] = task
        task.state = TaskState.RESUMING if resumes else TaskState.STARTING
        task.rank = rank
        self.pools[rank].add(need)
        self._open(rank)
        if not resumes:
            self._open_roomiest()  # a closed rank may have room for what is next in line now
        return Decision("resume" if resumes else "start", task, rank)

    def _may_take(self, rank: Rank) -> bool:
        pool = self.pools[rank]
        return pool.takes_tasks and pool.num_on_rank < self._config.max_tasks_per_rank

    def _must_probe(self, task: Task, rank: Rank) -> bool:
        """Must the task's siblings wait for its first turn? Not where that tells nothing new, or where room is no question."""
        group = task.group
        if self._pool_kind is TaskSlots or group.first_turn_tokens is not None or group.size == 1:
            return False
        if any(sibling.state not in (TaskState.QUEUED, TaskState.OUT) for sibling in group.tasks):
            return False
        if not self._foresees:
            return True
        pool = self.pools[rank]
        plenty = pool.usage_tokens + self._group_size * self._max_context <= pool.budget_tokens
        return not plenty and not self.estimates.knows(group.spec.task_type)

    def _need(self, task: Task) -> Need:
        """The task's footprint: measured, or that of its group's probe, or that of its type."""
        group, task_type = task.group, task.group.spec.task_type
        prompt = group.prompt_tokens
        context = task.context_tokens
        if context == 0:
            quantile = self._config.length_quantile
            known = group.first_turn_tokens or self.estimates.first_turn(task_type, quantile)
            if prompt is None:
                prompt = self.estimates.prompt(task_type, quantile)
            if known is None:
                known = self._max_context
            elif self._foresees and prompt is not None:
                known = prompt
            # An estimate must not keep a task out that may well be shorter.
            context = min(known, self._largest_budget)
        return Need(task.task_id, group.spec.group_id, task_type, min(prompt or 0, context), context)

    # --- room -----------------------------------------------------------------------------------------------------

    def _grew(self, task: Task) -> None:
        if task.state not in ACTIVE:
            return  # told to pause: its tokens are not counted any more
        assert task.rank is not None
        rank = task.rank
        pool = self.pools[rank]
        before, usage = pool.needs[task.task_id].context_tokens, pool.usage_tokens
        pool.update(self._need(task))
        if rank in self._closed and self._foresees:
            self._closed[rank] -= max(0, task.context_tokens - before)
        if pool.usage_tokens < usage or self._closed.get(rank, 1) <= 0:
            self._open(rank)  # its estimate was too high, or enough of it has come true
        self._watch(rank)

    def _watch(self, rank: Rank) -> None:
        if self.pools[rank].is_over:
            self._over.add(rank)

    def _probed(self, task: Task) -> None:
        if self.queued.probed(task):
            self._open_roomiest()
            if task.rank is not None:
                self._open(task.rank)

    def _leave(self, task: Task, rank: Rank) -> None:
        pool = self.pools[rank]
        if task.task_id in pool.leaving:
            pool.leaving.remove(task.task_id)
        else:
            pool.remove(task.task_id)
        self._open(rank)
        self._gone(task)

    def _gone(self, task: Task) -> None:
        """The task has no environment session any more."""
        self._probed(task)
        del self._tasks[task.task_id]
        if self._num_sessions >= self._capacity:
            self._open_roomiest()
        self._num_sessions -= 1

    def _never_fits(self, context_tokens: int) -> bool:
        return context_tokens > self.largest_cache_tokens

    def _may_stay(self, context_tokens: int, pool: RankPool) -> bool:
        """May a task be alone on a rank, with such a context? In the reserve only if no rank's budget holds it."""
        limit = pool.budget_tokens if context_tokens <= self._largest_budget else pool.cache_tokens
        return context_tokens <= limit

    def _shortfall(self, rank: Rank, need: Need) -> int:
        """By how much, at least, the rank is too small for the task; 0 or less: it fits."""
        pool = self.pools[rank]
        if not pool.needs and self._may_stay(need.context_tokens, pool):
            return 0
        missing = pool.shortfall_now(need)
        return missing if missing > 0 else pool.shortfall(need)

    def _headroom(self, rank: Rank) -> int:
        return self.pools[rank].headroom_tokens

    def _open(self, rank: Rank) -> None:
        """There may be more room on the rank than before: look at it again."""
        self._closed.pop(rank, None)
        self._open_ranks.raised(rank)
        if self.pools[rank].num_on_rank < self._config.max_tasks_per_rank:
            self._all_ranks.raised(rank)
        else:
            self._all_ranks.remove(rank)

    def _open_all(self) -> None:
        for rank in self.pools:
            self._open(rank)

    def _open_roomiest(self) -> None:
        """Something new waits, of which the closed ranks know nothing: if it fits anywhere, then there."""
        if (rank := self._all_ranks.top()) is not None:
            self._open(rank)
