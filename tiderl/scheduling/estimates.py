"""How long tasks of a type will get: what was seen of the newest ones, and what to assume before anything was.

Invariants (tests/scheduling/test_estimates.py):

1. A quantile is that of the last `WINDOW` values, by the nearest-rank definition; it is always one of them.
2. `survivors` falls from `whole` at no growth, never rises with growth, and is 0 where `max_context_tokens` is reached.
3. Seen lengths weigh one each. The assumption that a context is as likely to end anywhere up to its limit weighs `PRIOR_WEIGHT`, so
   that it counts alone for an unknown type, and for a context that has outgrown all that were seen. The limit is what `max_turns`
   more turns, of the growth seen of the type, would make of it, at most the cap; the cap while no growth was seen.

Source: paper §4.1 (footprints from a probe); paper.md §8, 5 (footprints must foresee growth).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

#: So many of the newest values of a type count: the lengths of a policy that learns move.
WINDOW = 64
#: A type is known after so many finished tasks.
MIN_FINALS = 4
#: The first tasks of a type to finish are the short ones; the assumption keeps them from counting for everything.
PRIOR_WEIGHT = 8
#: A course is computed anew when so many-th part of the window is new.
RENEWALS_PER_WINDOW = 4
#: Quantile of a turn's growth that stands for all turns.
_TYPICAL = 0.75
#: Shares are whole numbers, so that sums of them are exact and a replay on another machine decides the same.
_SCALE = 1 << 10


@dataclass(frozen=True, slots=True)
class Course:
    """The expected use of a task, and its variance, at several growths. Shared, not to be changed."""

    expected: list[int]
    variance: list[int]


class MovingQuantile:
    """The last `WINDOW` values, sorted."""

    def __init__(self) -> None:
        self._newest: deque[int] = deque()
        self._sorted: list[int] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, value: int) -> None:
        if len(self._newest) == WINDOW:
            del self._sorted[bisect_left(self._sorted, self._newest.popleft())]
        self._newest.append(value)
        insort(self._sorted, value)

    def quantile(self, q: float) -> int | None:
        """The q-quantile, None before the first value."""
        if not self._sorted:
            return None
        return self._sorted[max(0, math.ceil(q * len(self._sorted)) - 1)]

    def num_above(self, value: int) -> int:
        """How many of the values are greater."""
        return len(self._sorted) - bisect_right(self._sorted, value)


class LengthEstimates:
    """Lengths by task type, in tokens."""

    def __init__(self, *, max_context_tokens: int, max_turns: int) -> None:
        self.max_context_tokens = max_context_tokens
        self._max_turns = max_turns
        self._growths: dict[str, MovingQuantile] = {}
        #: By type: what a context may still grow by, as far as that was looked at last.
        self._max_growth: dict[str, int] = {}
        self._prompts: dict[str, MovingQuantile] = {}
        self._first_turns: dict[str, MovingQuantile] = {}
        self._finals: dict[str, MovingQuantile] = {}
        #: Answers of `course` by type, and how many finals have come since they were good.
        self._courses: dict[str, dict[tuple[int, int, int], Course]] = {}
        self._num_newer: dict[str, int] = {}

    # What was seen: each returns True when it makes the type known in this respect, and every other estimate of it out of date.

    def saw_prompt(self, task_type: str, tokens: int) -> bool:
        return self._saw(self._prompts, task_type, tokens, 1)

    def saw_first_turn(self, task_type: str, tokens: int) -> bool:
        return self._saw(self._first_turns, task_type, tokens, 1)

    def saw_growth(self, task_type: str, tokens: int) -> bool:
        """From the start of one turn to the start of the next."""
        is_first = self._saw(self._growths, task_type, tokens, 1)
        num_seen = len(self._growths[task_type])
        if num_seen < WINDOW and num_seen & (num_seen - 1) == 0:
            self._renew(task_type)  # 1, 2, 4, …: the first ones count for much
        return is_first

    def saw_final(self, task_type: str, tokens: int) -> bool:
        makes_known = self._saw(self._finals, task_type, tokens, MIN_FINALS)
        self._num_newer[task_type] = self._num_newer.get(task_type, 0) + 1
        if self._num_newer[task_type] * RENEWALS_PER_WINDOW >= len(self._finals[task_type]):
            self._num_newer[task_type] = 0
            self._renew(task_type)
        return makes_known

    def _renew(self, task_type: str) -> None:
        """What was concluded of the type is out of date."""
        self._courses.pop(task_type, None)
        growths = self._growths.get(task_type)
        growth = None if growths is None else growths.quantile(_TYPICAL)
        if growth is not None:
            self._max_growth[task_type] = self._max_turns * max(1, growth)

    @staticmethod
    def _saw(lengths: dict[str, MovingQuantile], task_type: str, tokens: int, num_to_know: int) -> bool:
        seen = lengths.setdefault(task_type, MovingQuantile())
        seen.add(tokens)
        return len(seen) == num_to_know

    def knows(self, task_type: str) -> bool:
        """Have enough tasks of the type finished to expect something of the next?"""
        return task_type in self._finals and len(self._finals[task_type]) >= MIN_FINALS

    def prompt(self, task_type: str, quantile: float) -> int | None:
        """Length of the first prompt, None for a type that was never seen."""
        seen = self._prompts.get(task_type)
        return None if seen is None else seen.quantile(quantile)

    def first_turn(self, task_type: str, quantile: float) -> int | None:
        """Context after the first turn, None for a type that was never seen."""
        seen = self._first_turns.get(task_type)
        return None if seen is None else seen.quantile(quantile)

    def course(self, task_type: str, context_tokens: int, own_tokens: int, growth: tuple[int, ...]) -> Course:
        """What a task is expected to use when all contexts have grown by so many tokens, if it uses `own_tokens` now."""
        known = self._courses.setdefault(task_type, {})
        key = (context_tokens, own_tokens, growth[0])
        course = known.get(key)
        if course is None:
            course = known[key] = self._course(task_type, context_tokens, own_tokens, growth)
        return course

    def _course(self, task_type: str, context_tokens: int, own_tokens: int, growth: Sequence[int]) -> Course:
        whole, survivors = self.survivors(task_type, context_tokens, growth)
        square = whole * whole
        expected, variance = [], []
        for tokens, alive in zip(growth, survivors, strict=True):
            used = (own_tokens + tokens) * alive
            expected.append(used // whole)
            variance.append(used * (own_tokens + tokens) * (whole - alive) // square)
        return Course(expected, variance)

    def survivors(self, task_type: str, context_tokens: int, growth: Sequence[int]) -> tuple[int, list[int]]:
        """Of `whole` tasks with this context, how many are expected to go on when theirs has grown by so many tokens."""
        left = max(1, self.max_context_tokens - context_tokens)
        left = min(left, self._max_growth.get(task_type, left))
        prior = _SCALE * PRIOR_WEIGHT
        survivors = [prior * (left - tokens) // left if tokens < left else 0 for tokens in growth]
        finals = self._finals.get(task_type)
        if finals is None or (num_seen := finals.num_above(context_tokens)) == 0:
            return prior, survivors
        for i, tokens in enumerate(growth):
            num_longer = finals.num_above(context_tokens + tokens)
            if num_longer == 0:
                break
            survivors[i] += _SCALE * num_longer
        return prior + _SCALE * num_seen, survivors
