"""The task stream: which task of the environment a group plays. A pure function of the seed and the group's number.

Training groups walk through all seeds of the split in a shuffled order, shuffled anew in every epoch, so that no task is seen
twice before all were seen once. A resumed job goes on at the number where the old one stopped. Evaluation rounds always play the
same held-out tasks.

Invariants (tests/unit/test_stream.py):

1. Group n is the same task in every process and after every resume.
2. Every epoch holds every seed exactly once.
3. Group ids never repeat within a process.
"""

from __future__ import annotations

import random

from tiderl.types import GroupId, GroupSpec, TaskKind

#: Group ids of evaluation tasks start here; training groups are numbered from 0.
EVAL_BASE = 1 << 40


class TaskStream:
    """Draws groups. `num_train` and `num_eval` are the numbers of tasks to draw from."""

    def __init__(self, *, env: str, train_split: str, num_train: int, eval_split: str, seed: int) -> None:
        self._env = env
        self._train_split = train_split
        self._num_train = num_train
        self._eval_split = eval_split
        self._seed = seed
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
        return GroupSpec(GroupId(number), TaskKind.TRAIN, self._env, self._train_split, seed, self._env)

    def eval_round(self, count: int) -> tuple[GroupSpec, ...]:
        """A new evaluation round: seeds 0 .. count-1 of the evaluation split."""
        first = EVAL_BASE + self._num_eval_drawn
        self._num_eval_drawn += count
        return tuple(
            GroupSpec(GroupId(first + i), TaskKind.EVAL, self._env, self._eval_split, i, self._env)
            for i in range(count)
        )
