"""A small environment of the tests' own: say the next number. Some tasks crash it, on purpose. No package is needed for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiderl.envs.protocol import Observation, Started, Stepped

NUM_TURNS = 3
#: Every training task whose seed leaves this remainder fails with an exception in its second turn.
CRASH_EVERY, CRASH_REMAINDER = 8, 5


class Counting:
    """Three turns. Half of the reward is for right numbers, half for digits, so that even a random model's rewards differ."""

    def start(self, split: str, seed: int, options: Mapping[str, Any]) -> Started:
        self._crashes = split == "train" and seed % CRASH_EVERY == CRASH_REMAINDER
        self._next = seed % 7
        self._turn = 0
        self._right = self._num_digits = self._num_characters = 0
        return Started("say the next number", Observation(f"count on from {self._next}"), "counting")

    def step(self, action: str) -> Stepped:
        if self._crashes and self._turn == 1:
            raise RuntimeError("this task crashes on purpose")
        self._turn += 1
        self._next += 1
        self._right += str(self._next) in action
        self._num_digits += sum(character.isdigit() for character in action)
        self._num_characters += len(action)
        done = self._turn == NUM_TURNS
        reward = self._right / NUM_TURNS / 2 + self._num_digits / max(1, self._num_characters) / 2
        observation = Observation(f"the number was {self._next}")
        return Stepped(observation, reward, done, done and self._right == NUM_TURNS)

    def close(self) -> None:
        """Holds nothing."""

    @staticmethod
    def num_tasks(split: str) -> int:
        return 64 if split in ("train", "test") else 0

    @staticmethod
    def task_type(split: str, seed: int) -> str:
        return "counting"
