"""The task stream: which task of the environment a group plays. A pure function of the seed and the group's number.

Training groups walk through all seeds of the split in a shuffled order, shuffled anew in every epoch, so that no task is seen
twice before all were seen once. A resumed job goes on at the number where the old one stopped. Evaluation rounds always play the
same held-out tasks.

Invariants (tests/unit/test_stream.py):

1. Group n is the same task in every process and after every resume.
2. Every epoch holds every seed exactly once.
3. Group ids never repeat within a process.
4. A group's type is the environment's own word for its task.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import accumulate

from tiderl.types import GroupId, GroupSpec, TaskKind

#: Group ids of evaluation tasks start here; training groups are numbered from 0.
EVAL_BASE = 1 << 40


class TaskTypes:
    """The type of every task of a split, kept as runs of equal ones: a split of one type costs one entry, whatever its length."""

    def __init__(self, runs: Iterable[tuple[str, int]]) -> None:
        """`runs`: (type, number of seeds in a row that are of it), from seed 0 on."""
        runs = list(runs)
        self._names = [name for name, _ in runs]
        self._ends = list(accumulate(length for _, length in runs))

    def __getitem__(self, seed: int) -> str:
        """Raises `IndexError` for a seed that was not told of."""
        return self._names[bisect_right(self._ends, seed)]


class TaskStream:
    """Draws groups. `num_train` is the number of tasks to draw from; `types` has those of every split that is drawn from."""

    def __init__(
        self,
        *,
        env: str,
        train_split: str,
        num_train: int,
        eval_split: str,
        seed: int,
        types: Mapping[str, TaskTypes],
    ) -> None:
        self._env = env
        self._train_split = train_split
        self._num_train = num_train
        self._eval_split = eval_split
        self._seed = seed
        self._types = types
        self._epoch = -1
        self._order: list[int] = []
        self._num_eval_drawn = 0

    def train_group(self, number: int) -> GroupSpec:
        """The `number`-th training group of the run, from 0."""
        epoch, place = divmod(number, self._num_train)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = list(range(self._num_train))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
        seed = self._order[place]
        return self._group(number, TaskKind.TRAIN, self._train_split, seed)

    def eval_round(self, count: int) -> tuple[GroupSpec, ...]:
        """A new evaluation round: seeds 0 .. count-1 of the evaluation split."""
        first = EVAL_BASE + self._num_eval_drawn
        self._num_eval_drawn += count
        return tuple(self._group(first + i, TaskKind.EVAL, self._eval_split, i) for i in range(count))

    def _group(self, number: int, kind: TaskKind, split: str, seed: int) -> GroupSpec:
        return GroupSpec(GroupId(number), kind, self._env, split, seed, self._types[split][seed])
