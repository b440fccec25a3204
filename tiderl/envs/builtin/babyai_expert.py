"""The expert for BabyAI: minigrid's own planning bot, speaking our action words. It warm-starts the quickstart's model.

The bot knows only what the agent has seen so far and plans shortest paths, so a policy with the same observations can
imitate it. Made careless, it often walks on where it should turn: what it demonstrates is the way, but not the care to
follow it, which is a start that reinforcement learning can mend.
"""

from __future__ import annotations

import random
from typing import Any

from tiderl.envs.builtin.babyai import BabyAI

TURNS = ("left", "right")


class BabyAIExpert:
    """Plays one started episode: call `act` before each step, and play what it says."""

    def __init__(self, environment: BabyAI, *, walk_on_share: float = 0.0, rng: random.Random | None = None) -> None:
        """`walk_on_share` is how often a turn becomes a step forward (0 .. 1); above 0 it needs `rng`."""
        from minigrid.utils.baby_ai_bot import BabyAIBot

        if walk_on_share > 0 and rng is None:
            raise ValueError("an expert that walks on at times needs a random.Random to do it by")
        self._walk_on_share = walk_on_share
        self._rng = rng
        self._actions = environment.world.actions
        self._bot: Any = BabyAIBot(environment.world)
        self._played: Any = None

    def act(self, observation: str) -> str:
        """The next word. The bot watches the world itself, not the words."""
        del observation
        word = str(self._bot.replan(self._played).name)
        if self._rng is not None and word in TURNS and self._rng.random() < self._walk_on_share:
            word = "forward"
        self._played = self._actions[word]
        return word
