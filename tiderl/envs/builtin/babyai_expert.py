"""The expert for BabyAI: minigrid's own planning bot, speaking our action words. It warm-starts the quickstart's model.

The bot sees what the agent has seen so far and plans shortest paths, so its play is a demonstration that a policy with the
same observations can imitate.
"""

from __future__ import annotations

from typing import Any

from tiderl.envs.builtin.babyai import BabyAI


class BabyAIExpert:
    """Plays along with one started episode: ask `act`, play a word (the advised one or another), tell it with `played`."""

    def __init__(self, environment: BabyAI) -> None:
        from minigrid.utils.baby_ai_bot import BabyAIBot

        self._world: Any = environment.world
        self._bot: Any = BabyAIBot(environment.world)
        self._last: Any = None

    def act(self) -> str:
        """The bot's advice for the present state. Call once a step."""
        return str(self._bot.replan(self._last).name)

    def played(self, action: str) -> None:
        """Tell the bot which word was played, so that it can go on from there."""
        self._last = self._world.actions[action]
