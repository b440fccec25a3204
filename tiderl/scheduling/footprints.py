"""One rollout rank as a pool of KV-cache tokens: what its active tasks use, what they will need, and what still fits.

Everything is counted in whole blocks of the engine's cache. The budget is the cache less `rollout.kv_reserve`, which is left to the
growth of turns that run between two reports. How a task's footprint is counted is the pool's kind:

- `PresentLengths` (paper): a task uses its present context; it fits if that fits beside the others'.
- `ExpectedGrowth`: the prompt that the tasks of a group share is counted once, and a task fits if the use that is *expected* fits
  now and after every growth in `growth_steps`: all contexts grow at the same pace, and a context that has reached a length is
  still there with the share of its type's tasks that get longer. To the sum of these expected uses comes `growth_safety` times
  its standard deviation (lengths taken as independent). Contexts are rounded to the first step for this.

Invariants (tests/scheduling/test_footprints.py):

1. `usage_tokens` is the sum of the footprints of the active tasks, in blocks, plus what the engine has shown to hold beyond them.
2. A pool without tasks takes any task whose context fits its budget, whatever it will become.
3. `shortfall` is monotone: it does not shrink by adding a task, nor grow by removing one.
4. After a pause a pool takes nothing until its usage is `resume_margin` below its budget.

Source: paper §4.1 (budgets, footprints), paper.md §8, 5 (growth, shared prompts).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import isqrt
from typing import NamedTuple

from tiderl.config.schema import RolloutConfig
from tiderl.scheduling.estimates import Course, LengthEstimates
from tiderl.types import GroupId, TaskId

#: Reports in a row that must say the same before the engine's word counts more than the turn loop's.
LASTING_REPORTS = 3


class Need(NamedTuple):
    """A task as a pool sees it; its context is measured, or estimated before it has started."""

    task_id: TaskId
    group_id: GroupId
    task_type: str
    #: Of the context, what it has in common with its group.
    prompt_tokens: int
    context_tokens: int


@dataclass(slots=True)
class _Shared:
    """The prompt of one group: how many of its tasks take it to be how long. The longest word counts."""

    lengths: Counter[int]
    tokens: int = 0


class RankPool:
    """What both kinds have in common. `num_blocks` blocks of `block_tokens` tokens."""

    def __init__(self, num_blocks: int, block_tokens: int, config: RolloutConfig, estimates: LengthEstimates) -> None:
        self._estimates = estimates
        self.block_tokens = block_tokens
        self.cache_tokens = num_blocks * block_tokens
        self.budget_tokens = int(num_blocks * (1.0 - config.kv_reserve)) * block_tokens
        self._low_mark_tokens = int(self.budget_tokens * (1.0 - config.resume_margin))
        self.needs: dict[TaskId, Need] = {}
        #: Tasks that were told to leave, paused or for good, and have not yet.
        self.leaving: set[TaskId] = set()
        self.num_of_type: Counter[str] = Counter()
        self._own_tokens = 0
        self.unseen_tokens = 0
        self._disagreements: list[int] = []
        self._is_crowded = False

    @property
    def num_on_rank(self) -> int:
        return len(self.needs) + len(self.leaving)

    @property
    def usage_tokens(self) -> int:
        return self._own_tokens + self.unseen_tokens

    @property
    def headroom_tokens(self) -> int:
        return self.budget_tokens - self.usage_tokens

    @property
    def is_over(self) -> bool:
        return self.usage_tokens > self.budget_tokens

    @property
    def takes_tasks(self) -> bool:
        """Not shortly after a pause: what would come in might be paused again at once."""
        if self._is_crowded and (self.usage_tokens <= self._low_mark_tokens or not self.needs):
            self._is_crowded = False
        return not self._is_crowded

    def add(self, need: Need) -> None:
        self.needs[need.task_id] = need
        self.num_of_type[need.task_type] += 1
        self._own_tokens += self._count(need, +1)

    def update(self, need: Need) -> None:
        """The task's context is another one now."""
        old = self.needs[need.task_id]
        self.needs[need.task_id] = need
        self._own_tokens += self._difference(old, need)

    def remove(self, task_id: TaskId) -> None:
        need = self.needs.pop(task_id)
        self.num_of_type[need.task_type] -= 1
        self._own_tokens += self._count(need, -1)

    def dismiss(self, task_id: TaskId) -> None:
        """The task has been told to leave: its tokens are free in a moment, its place when it has left."""
        self.remove(task_id)
        self.leaving.add(task_id)

    def pause(self, task_id: TaskId) -> None:
        """`dismiss` one because there was too little room."""
        self.dismiss(task_id)
        self._is_crowded = True

    def compare(self, engine_tokens: int) -> int | None:
        """Hold the engine's number of tokens in use against ours. A lasting excess is taken over; returns it when it changes.

        Less than ours is no error: after a weight update the contexts of waiting tasks are computed again only when they go on.
        """
        tolerance = self.cache_tokens - self.budget_tokens + self.block_tokens * self.num_on_rank
        excess = engine_tokens - self._own_tokens
        unseen = excess if excess > tolerance else 0
        if self.leaving or abs(unseen - self.unseen_tokens) <= tolerance:
            self._disagreements.clear()
            return None
        if self._disagreements and abs(unseen - self._disagreements[-1]) > tolerance:
            self._disagreements.clear()
        self._disagreements.append(unseen)
        if len(self._disagreements) < LASTING_REPORTS:
            return None
        self.unseen_tokens = min(self._disagreements)
        self._disagreements.clear()
        return self.unseen_tokens

    @property
    def room_tokens(self) -> int:
        """What the tasks that are here leave over: no other one fits into less than its present context."""
        return self.headroom_tokens

    def shortfall(self, need: Need) -> int:
        """By how many tokens the pool is too small for the task beside those it has; 0 or less: it fits."""
        raise NotImplementedError

    def shortfall_now(self, need: Need) -> int:
        """A cheap part of `shortfall`: not more than that."""
        return self.shortfall(need)

    def _alone(self, need: Need) -> int:
        """`shortfall` of a pool without tasks."""
        return self._blocks(need.context_tokens) - self.budget_tokens

    def _blocks(self, tokens: int) -> int:
        """`tokens` rounded up to whole blocks."""
        return -(-tokens // self.block_tokens) * self.block_tokens

    def _count(self, need: Need, sign: int) -> int:
        """By how much the usage changes when the task comes (+1) or goes (-1)."""
        raise NotImplementedError

    def _difference(self, old: Need, new: Need) -> int:
        """By how much the usage changes when a task's need does."""
        return self._count(new, +1) + self._count(old, -1)


class TaskSlots(RankPool):
    """`rollout.scheduler = "fixed"`: the least busy rank is the roomiest, and nothing is ever too much."""

    @property
    def headroom_tokens(self) -> int:
        return -self.usage_tokens

    @property
    def is_over(self) -> bool:
        return False

    @property
    def room_tokens(self) -> int:
        return 1  # always some

    def compare(self, engine_tokens: int) -> int | None:
        return None

    def shortfall(self, need: Need) -> int:
        return 0

    def _count(self, need: Need, sign: int) -> int:
        return sign


class PresentLengths(RankPool):
    """`rollout.footprint = "paper"`."""

    def shortfall(self, need: Need) -> int:
        if not self.needs:
            return self._alone(need)
        return self.usage_tokens + self._blocks(need.context_tokens) - self.budget_tokens

    def _count(self, need: Need, sign: int) -> int:
        return sign * self._blocks(need.context_tokens)


def growth_steps(block_tokens: int, max_context_tokens: int) -> tuple[int, ...]:
    """The growths that are looked at: from a few blocks to the longest context, each twice the one before."""
    steps = [4 * block_tokens]
    while steps[-1] < max_context_tokens:
        steps.append(steps[-1] * 2)
    return tuple(steps)


@dataclass(slots=True)
class _Part:
    """One task's part of a pool: what it uses beside its group's prompt, and what that is expected to become."""

    own_tokens: int
    course_key: tuple[int, int]
    course: Course


class ExpectedGrowth(RankPool):
    """`rollout.footprint = "growth"`."""

    def __init__(self, num_blocks: int, block_tokens: int, config: RolloutConfig, estimates: LengthEstimates) -> None:
        super().__init__(num_blocks, block_tokens, config, estimates)
        self._safety = config.growth_safety
        self._shared: dict[GroupId, _Shared] = {}
        self._shared_tokens = 0
        self._steps = growth_steps(block_tokens, estimates.max_context_tokens)
        self._parts: dict[TaskId, _Part] = {}
        #: The sums of all courses, and the largest use that they come to; None when that has to be looked for.
        self._nothing = Course([0] * len(self._steps), [0] * len(self._steps))
        self._all = self._nothing
        self._peak: int | None = None

    def add(self, need: Need) -> None:
        super().add(need)
        own = self._own(need)
        key = self._course_key(need, own)
        part = self._parts[need.task_id] = _Part(own, key, self._course(need.task_type, key))
        self._replace(self._nothing, part.course)

    def update(self, need: Need) -> None:
        super().update(need)
        part = self._parts[need.task_id]
        part.own_tokens = self._own(need)
        key = self._course_key(need, part.own_tokens)
        if key != part.course_key:
            course = self._course(need.task_type, key)
            self._replace(part.course, course)
            part.course_key, part.course = key, course

    def remove(self, task_id: TaskId) -> None:
        super().remove(task_id)
        self._replace(self._parts.pop(task_id).course, self._nothing)

    @property
    def room_tokens(self) -> int:
        if self._peak is None:
            self._peak = max(
                expected + int(self._safety * isqrt(variance))
                for expected, variance in zip(self._all.expected, self._all.variance, strict=True)
            )
        own = self._own_tokens - self._shared_tokens
        return self.budget_tokens - self.unseen_tokens - self._shared_tokens - max(own, self._peak)

    def shortfall(self, need: Need) -> int:
        if not self.needs:
            return self._alone(need)
        own, prompt = self._own(need), self._new_prompt(need)
        worst = self._own_tokens - self._shared_tokens + own
        course = self._course(need.task_type, self._course_key(need, own))
        for all_expected, all_variance, expected, variance in zip(
            self._all.expected, self._all.variance, course.expected, course.variance, strict=True
        ):
            use = all_expected + expected + int(self._safety * isqrt(all_variance + variance))
            if use > worst:
                worst = use
        return self.unseen_tokens + self._shared_tokens + prompt + worst - self.budget_tokens

    def shortfall_now(self, need: Need) -> int:
        """As if no context grew any more."""
        return self.usage_tokens + self._new_prompt(need) + self._own(need) - self.budget_tokens

    def _new_prompt(self, need: Need) -> int:
        """How much of the task's prompt is not counted for its group yet."""
        shared = self._shared.get(need.group_id)
        return max(0, self._prompt_of(need) - (0 if shared is None else shared.tokens))

    def _course_key(self, need: Need, own_tokens: int) -> tuple[int, int]:
        """Context and own tokens, rounded so that many tasks share an answer and few tokens more need no other one."""
        step = self._steps[0]
        return need.context_tokens // step * step, -(-own_tokens // step) * step

    def _course(self, task_type: str, key: tuple[int, int]) -> Course:
        return self._estimates.course(task_type, *key, self._steps)

    def _replace(self, old: Course, new: Course) -> None:
        expected = zip(self._all.expected, old.expected, new.expected, strict=True)
        variance = zip(self._all.variance, old.variance, new.variance, strict=True)
        self._all = Course([a - b + c for a, b, c in expected], [a - b + c for a, b, c in variance])
        self._peak = None

    def _prompt_of(self, need: Need) -> int:
        """Only whole blocks are shared."""
        return need.prompt_tokens // self.block_tokens * self.block_tokens

    def _own(self, need: Need) -> int:
        block = self.block_tokens
        own = need.context_tokens - need.prompt_tokens // block * block
        return -(-own // block) * block if own > 0 else 0

    def _difference(self, old: Need, new: Need) -> int:
        if old.prompt_tokens == new.prompt_tokens:
            return self._own(new) - self._parts[new.task_id].own_tokens
        return super()._difference(old, new)

    def _count(self, need: Need, sign: int) -> int:
        shared = self._shared.setdefault(need.group_id, _Shared(Counter()))
        before, prompt = shared.tokens, self._prompt_of(need)
        shared.lengths[prompt] += sign
        if not shared.lengths[prompt]:
            del shared.lengths[prompt]
        shared.tokens = max(shared.lengths, default=0)
        if not shared.lengths:
            del self._shared[need.group_id]
        self._shared_tokens += shared.tokens - before
        return shared.tokens - before + sign * self._own(need)
