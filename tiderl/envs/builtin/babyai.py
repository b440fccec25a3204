"""BabyAI as text: one grid-world episode, seen through the agent's own 7x7 view and played with single words.

Owns how a BabyAI level becomes words and what its reward is; the levels themselves are minigrid's. The system message holds
the rules and the words that count as actions; every observation repeats the mission, then says what is directly in front of
the agent and where the other objects in view are, nearest first:

    go to the red ball. front empty. grey key two ahead. red ball three ahead one left.

Invariants (tests/unit/test_babyai.py):

1. Same split, seed, options and actions: same episode, word for word. The splits never share a minigrid seed.
2. An observation holds only what the agent's partial view shows.
3. An action that is not one of the listed words changes nothing in the world, says so, and counts as a step.
4. The episode ends by itself: at success, at failure, or after `max_steps` steps.
5. The reward is 0 until success, then 1 - 0.9 * steps / max_steps (minigrid's rule with this episode's bound).

minigrid and gymnasium are imported when the first episode starts; a step takes 0.4 ms, a start 1 ms.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tiderl.envs.protocol import Observation, Started, Stepped

logger = logging.getLogger(__name__)

DEFAULT_LEVEL = "BabyAI-GoToObj-v0"
DEFAULT_MAX_STEPS = 12
NUM_TASKS = {"train": 1_000_000, "test": 1_000}
#: Added to a task's seed to get minigrid's: wider apart than any split is long.
SEED_OFFSETS = {"train": 0, "test": 1_000_000}

MOVES = ("left", "right", "forward")
HANDS = ("pickup", "drop")
DOORS = ("toggle",)
#: Distances in words, since tokenizers split a digit from the space before it; minigrid's view is 7 cells deep and wide.
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six")


class BabyAI:
    """One episode. Options: `level` (a minigrid id that starts with "BabyAI-") and `max_steps` (1 or more)."""

    def __init__(self) -> None:
        self.world: Any = None
        self.actions: tuple[str, ...] = ()
        self._max_steps = DEFAULT_MAX_STEPS
        self._num_steps = 0
        self._ended = False

    @staticmethod
    def num_tasks(split: str) -> int:
        """How many seeds the split has. Raises `ValueError` for an unknown split."""
        if split not in NUM_TASKS:
            raise ValueError(f"babyai has the splits {', '.join(NUM_TASKS)}; got {split!r}")
        return NUM_TASKS[split]

    @staticmethod
    def task_type(split: str, seed: int) -> str:
        """One type: every task of a server is of one level."""
        del split, seed
        return "babyai"

    def start(self, split: str, seed: int, options: Mapping[str, Any]) -> Started:
        """Set the level up. Raises `ValueError` for an unknown split, seed, option or level."""
        if not 0 <= seed < self.num_tasks(split):
            raise ValueError(f"babyai's split {split} has the seeds 0 .. {NUM_TASKS[split] - 1}; got {seed}")
        level, max_steps = _read_options(options)
        self.world = _make_world(level)
        self.world.reset(seed=SEED_OFFSETS[split] + seed)
        self.actions = _needed_actions(self.world)
        self._max_steps, self._num_steps, self._ended = max_steps, 0, False
        instruction = f"Find your way in a grid world. Answer with one word: {', '.join(self.actions)}."
        return Started(instruction, Observation(self._describe()), self.task_type(split, seed))

    def step(self, action: str) -> Stepped:
        """Play one word. Raises `RuntimeError` before `start` and after the end (the caller's mistake)."""
        if self.world is None or self._ended:
            raise RuntimeError("this BabyAI episode is not running: start it first, and start a new one after its end")
        word = action.strip().lower()
        self._num_steps += 1
        terminated, success, note = False, False, ""
        if word in self.actions:
            _, minigrid_reward, terminated, _, _ = self.world.step(self.world.actions[word])
            success = terminated and minigrid_reward > 0
        else:
            note = f"not an action, use one of: {', '.join(self.actions)}. "
        self._ended = terminated or self._num_steps >= self._max_steps
        reward = 1.0 - 0.9 * self._num_steps / self._max_steps if success else 0.0
        return Stepped(Observation(note + self._describe()), reward, self._ended, success)

    def close(self) -> None:
        """Let go of the world."""
        self.world = None

    def _describe(self) -> str:
        """The mission and what the agent sees, one fact a sentence (a name always follows a space: one token each)."""
        grid, visible = self.world.gen_obs_grid()
        agent_i, agent_j = grid.width // 2, grid.height - 1
        front = grid.get(agent_i, agent_j - 1)
        facts = [self.world.mission, f"front {_name(front) if front else 'empty'}"]
        if self.world.carrying:
            facts.append(f"carrying {_name(self.world.carrying)}")
        seen = []
        for i in range(grid.width):
            for j in range(grid.height):
                thing, ahead, right = grid.get(i, j), agent_j - j, i - agent_i
                if thing is None or thing.type == "wall" or not visible[i, j] or (ahead, right) in ((0, 0), (1, 0)):
                    continue
                seen.append((ahead + abs(right), ahead, right, _name(thing)))
        facts.extend(name + _offset(ahead, right) for _, ahead, right, name in sorted(seen))
        return ". ".join(facts) + "."


def _read_options(options: Mapping[str, Any]) -> tuple[str, int]:
    """`(level, max_steps)`, checked. Raises `ValueError`."""
    unknown = set(options) - {"level", "max_steps"}
    if unknown:
        raise ValueError(f"babyai knows the options level and max_steps; got {', '.join(sorted(unknown))}")
    level, max_steps = options.get("level", DEFAULT_LEVEL), options.get("max_steps", DEFAULT_MAX_STEPS)
    if not isinstance(level, str) or not level.startswith("BabyAI-"):
        raise ValueError(f"babyai's option level must be a minigrid id such as {DEFAULT_LEVEL}; got {level!r}")
    if isinstance(max_steps, bool) or not isinstance(max_steps, int) or max_steps < 1:
        raise ValueError(f"babyai's option max_steps must be a whole number from 1; got {max_steps!r}")
    return level, max_steps


def _make_world(level: str) -> Any:
    """minigrid's own object of a level, without gymnasium's wrappers. Raises `ValueError` for an unknown level."""
    import gymnasium
    import minigrid.envs.babyai.core.roomgrid_level as roomgrid_level

    # Level generation prints each rejected sample; a server's standard output is no place for it.
    roomgrid_level.print = logger.debug
    if level not in gymnasium.registry:
        raise ValueError(f"minigrid has no level {level!r}; {DEFAULT_LEVEL} is one that it has")
    return gymnasium.make(level, disable_env_checker=True).unwrapped


def _needed_actions(world: Any) -> tuple[str, ...]:
    """The words that a level can need: hands where something must be carried, `toggle` where there is a door."""
    from minigrid.envs.babyai.core.verifier import GoToInstr

    doors = [thing for thing in world.grid.grid if thing is not None and thing.type == "door"]
    hands = any(door.is_locked for door in doors) or not isinstance(world.instrs, GoToInstr)
    return MOVES + (HANDS if hands else ()) + (DOORS if doors else ())


def _name(thing: Any) -> str:
    """A thing in words: "red ball", "locked blue door", "wall"."""
    if thing.type == "wall":
        return "wall"
    if thing.type == "door":
        state = "open" if thing.is_open else "locked" if thing.is_locked else "closed"
        return f"{state} {thing.color} door"
    return f"{thing.color} {thing.type}"


def _offset(ahead: int, right: int) -> str:
    """Where a thing is as seen by the agent, zeros left out: " two ahead one left"."""
    forward = f" {NUMBERS[ahead]} ahead" if ahead else ""
    side = f" {NUMBERS[abs(right)]} {'right' if right > 0 else 'left'}" if right else ""
    return forward + side
