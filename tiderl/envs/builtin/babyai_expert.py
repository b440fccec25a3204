"""The expert for BabyAI: minigrid's own planning bot, speaking our action words. It warm-starts the quickstart's model.

The bot knows only what the agent has seen so far and plans shortest paths, so a policy with the same observations can
imitate it. Made careless, it mixes up left and right now and then, and goes on from wherever that leads: what it demonstrates
is when to turn and when to walk, but not which way to turn, which is a start that reinforcement learning can mend.
"""

from __future__ import annotations

import random
from typing import Any

from tiderl.envs.builtin.babyai import BabyAI

MIRRORED = {"left": "right", "right": "left"}


class BabyAIExpert:
    """Plays one started episode: call `act` before each step, and play what it says."""

    def __init__(self, environment: BabyAI, *, mix_up_share: float = 0.0, rng: random.Random | None = None) -> None:
        """`mix_up_share` is the probability with which a turn goes the other way; it needs `rng`."""
        from minigrid.utils.baby_ai_bot import BabyAIBot

        if mix_up_share > 0 and rng is None:
            raise ValueError("an expert that mixes up left and right needs a random.Random to do it by")
        self._mix_up_share = mix_up_share
        self._rng = rng
        self._actions = environment.world.actions
        self._bot: Any = BabyAIBot(environment.world)
        self._played: Any = None

    def act(self, observation: str) -> str:
        """The next word. The bot watches the world itself, not the words."""
        del observation
        word = str(self._bot.replan(self._played).name)
        if self._rng is not None and word in MIRRORED and self._rng.random() < self._mix_up_share:
            word = MIRRORED[word]
        self._played = self._actions[word]
        return word
