"""The expert for BabyAI: minigrid's own planning bot, speaking our action words. It warm-starts the quickstart's model.

The bot knows only what the agent has seen so far and plans shortest paths, so a policy with the same observations can
imitate it. A *distracted* expert walks just as well, but to an object that the mission does not name, and stays there: what
it demonstrates is competent walking and poor listening, which is a start that reinforcement learning can mend.
"""

from __future__ import annotations

from typing import Any

from tiderl.envs.builtin.babyai import BabyAI

#: Steps that a distracted expert insists on the wrong object before it gives up.
INSISTENCE = 2


class BabyAIExpert:
    """Plays one started episode: call `act` before each step, and play what it says."""

    def __init__(self, environment: BabyAI, *, distracted: bool = False) -> None:
        """With `distracted`, head for another object, if the level is of the "go to" kind and has another."""
        from minigrid.utils.baby_ai_bot import BabyAIBot

        self._done_words = ["forward"] * INSISTENCE
        world = environment.world
        mission = world.instrs
        try:
            # The bot reads its mission once, when it is made.
            world.instrs = (_other_mission(world) if distracted else None) or mission
            self._bot: Any = BabyAIBot(world)
        finally:
            world.instrs = mission

    def act(self, observation: str) -> str | None:
        """The next word; None when there is nothing left to show. The bot watches the world itself, not the words."""
        del observation
        word = str(self._bot.replan().name)
        if word != "done":
            return word
        return self._done_words.pop() if self._done_words else None


def _other_mission(world: Any) -> Any:
    """A mission to the first object that does not fulfil the true one, or None."""
    from minigrid.envs.babyai.core.verifier import GoToInstr, ObjDesc

    if not isinstance(world.instrs, GoToInstr):
        return None
    wanted = world.instrs.desc
    for thing in world.grid.grid:
        if thing is None or thing.type not in ("ball", "box", "key"):
            continue
        if (thing.type, thing.color) != (wanted.type, wanted.color):
            other = GoToInstr(ObjDesc(thing.type, thing.color))
            other.reset_verifier(world)
            return other
    return None
