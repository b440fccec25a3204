"""BabyAI as text: the numbered invariants of tiderl/envs/builtin/babyai.py, and the expert."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

pytest.importorskip("minigrid")

from tiderl.envs.builtin.babyai import DEFAULT_MAX_STEPS, NUM_TASKS, SEED_OFFSETS, BabyAI
from tiderl.envs.builtin.babyai_expert import BabyAIExpert
from tiderl.envs.protocol import Stepped

BIG_ROOM = {"level": "BabyAI-GoToLocalS8N7-v0", "max_steps": 40}


def play(split: str, seed: int, actions: list[str]) -> list[Stepped]:
    environment = BabyAI()
    environment.start(split, seed, BIG_ROOM)
    answers = []
    for action in actions:
        answers.append(environment.step(action))
        if answers[-1].done:
            break
    return answers


@pytest.mark.parametrize("seed", range(5))
def test_the_same_task_and_actions_give_the_same_episode(seed: int) -> None:
    actions = random.Random(seed).choices(("left", "right", "forward", "jump"), k=30)
    assert play("train", seed, actions) == play("train", seed, actions)


def test_the_splits_share_no_seed_of_minigrid() -> None:
    ranges = [range(SEED_OFFSETS[split], SEED_OFFSETS[split] + NUM_TASKS[split]) for split in ("train", "test")]
    assert max(ranges[0]) < min(ranges[1])
    assert BabyAI.num_tasks("test") >= 200


def sentences(text: str) -> list[str]:
    assert text.endswith(".")
    return text[:-1].split(". ")


def expected_view(environment: BabyAI) -> set[str]:
    """What the words should say, by vectors in the world's own frame; in one convex room nothing hides anything."""
    world = environment.world
    numbers = ["zero", "one", "two", "three", "four", "five", "six"]
    view = set()
    for x in range(world.width):
        for y in range(world.height):
            thing = world.grid.get(x, y)
            if thing is None or thing.type in ("wall", "door"):
                continue
            offset = (x - world.agent_pos[0], y - world.agent_pos[1])
            ahead = int(offset @ world.dir_vec)
            right = int(offset @ world.right_vec)
            if not (0 <= ahead <= 6 and -3 <= right <= 3) or (ahead, right) == (1, 0):
                continue
            words = [thing.color, thing.type]
            words += [numbers[ahead], "ahead"] if ahead else []
            words += [numbers[abs(right)], "right" if right > 0 else "left"] if right else []
            view.add(" ".join(words))
    return view


@pytest.mark.parametrize("seed", range(10))
def test_the_words_are_the_agents_view(seed: int) -> None:
    environment = BabyAI()
    text = environment.start("train", seed, BIG_ROOM).observation.text
    rng = random.Random(seed)
    for _ in range(20):
        mission, front, *seen = sentences(text)
        assert mission == environment.world.mission
        ahead = environment.world.grid.get(*environment.world.front_pos)
        assert front == "front " + (
            "empty" if ahead is None else f"{ahead.color} {ahead.type}".replace("grey wall", "wall")
        )
        assert set(seen) == expected_view(environment)
        stepped = environment.step(rng.choice(environment.actions))
        if stepped.done:
            break
        text = stepped.observation.text


@pytest.mark.parametrize("action", ["", "jump", "left right", "pickup", "forward!"])
def test_a_malformed_action_changes_nothing_says_so_and_counts(action: str) -> None:
    environment = BabyAI()
    before = environment.start("train", 0, {}).observation.text
    place = (tuple(environment.world.agent_pos), environment.world.agent_dir)
    for step in range(1, DEFAULT_MAX_STEPS + 1):
        stepped = environment.step(action)
        assert stepped.observation.text == f"not an action, use one of: left, right, forward. {before}"
        assert (stepped.done, stepped.success, stepped.reward) == (step == DEFAULT_MAX_STEPS, False, 0.0)
    assert (tuple(environment.world.agent_pos), environment.world.agent_dir) == place


def test_case_and_white_space_of_an_action_do_not_matter() -> None:
    assert play("train", 1, [" LEFT\n"]) == play("train", 1, ["left"])


def test_the_expert_solves_tasks_and_the_reward_is_minigrids() -> None:
    for seed in range(40):
        environment = BabyAI()
        text = environment.start("test", seed, {"max_steps": 20}).observation.text
        expert = BabyAIExpert(environment)
        num_steps, stepped = 0, None
        while stepped is None or not stepped.done:
            action = expert.act(text)
            assert action in environment.actions
            stepped = environment.step(action)
            text = stepped.observation.text
            num_steps += 1
            assert (stepped.reward > 0) == stepped.done
        assert stepped.success
        assert stepped.reward == pytest.approx(1.0 - 0.9 * num_steps / 20)
        goal = environment.world.instrs.desc
        assert sentences(text)[1] == f"front {goal.color} {goal.type}"


def test_a_careless_expert_walks_on_where_it_should_turn() -> None:
    for seed in range(20):
        careful, careless = BabyAI(), BabyAI()
        careful.start("train", seed, {})
        careless.start("train", seed, {})
        advice, word = (
            BabyAIExpert(careful).act(""),
            BabyAIExpert(careless, walk_on_share=1.0, rng=random.Random(0)).act(""),
        )
        assert advice in ("left", "right", "forward")
        assert word == "forward"


def test_a_careless_expert_goes_on_from_where_its_mistakes_lead() -> None:
    num_solved, num_turns, num_steps = 0, 0, 0
    for seed in range(30):
        environment = BabyAI()
        text = environment.start("train", seed, {"max_steps": 200}).observation.text
        expert = BabyAIExpert(environment, walk_on_share=0.5, rng=random.Random(seed))
        done = False
        while not done:
            word = expert.act(text)
            stepped = environment.step(word)
            text, done = stepped.observation.text, stepped.done
            num_turns += word != "forward"
            num_steps += 1
        num_solved += stepped.success
    assert num_solved == 30
    assert 0 < num_turns < num_steps / 2


def test_a_careless_expert_needs_a_source_of_chance() -> None:
    environment = BabyAI()
    environment.start("train", 0, {})
    with pytest.raises(ValueError, match="needs a random.Random"):
        BabyAIExpert(environment, walk_on_share=0.5)


def test_a_random_policy_fails_mostly() -> None:
    rng = random.Random(0)
    num_solved = 0
    for seed in range(200):
        environment = BabyAI()
        environment.start("test", seed, {})
        stepped = environment.step(rng.choice(environment.actions))
        while not stepped.done:
            stepped = environment.step(rng.choice(environment.actions))
        num_solved += stepped.success
    assert num_solved < 40


@pytest.mark.parametrize(
    ("level", "actions"),
    [
        ("BabyAI-GoToObj-v0", "left right forward"),
        ("BabyAI-PickupDist-v0", "left right forward pickup drop"),
        ("BabyAI-GoToObjMaze-v0", "left right forward toggle"),
        ("BabyAI-UnlockLocal-v0", "left right forward pickup drop toggle"),
    ],
)
def test_the_instruction_lists_what_the_level_needs(level: str, actions: str) -> None:
    environment = BabyAI()
    started = environment.start("train", 0, {"level": level})
    assert environment.actions == tuple(actions.split())
    assert started.instruction.endswith(": " + ", ".join(actions.split()) + ".")
    assert started.task_type == BabyAI.task_type("train", 0)


def test_what_is_carried_is_said() -> None:
    environment = BabyAI()
    environment.start("train", 0, {"level": "BabyAI-UnlockLocal-v0", "max_steps": 60})
    expert = BabyAIExpert(environment)
    texts = []
    stepped = None
    while stepped is None or not stepped.done:
        stepped = environment.step(expert.act(""))
        texts.append(stepped.observation.text)
        assert (". carrying " in texts[-1]) == (environment.world.carrying is not None)
    assert stepped.success
    assert any("carrying" in text and "key" in text for text in texts)
    assert any("front locked" in text for text in texts)


@pytest.mark.parametrize(
    ("split", "seed", "options", "message"),
    [
        ("dev", 0, {}, "splits train, test; got 'dev'"),
        ("test", NUM_TASKS["test"], {}, "seeds 0 .. 999; got 1000"),
        ("train", -1, {}, "got -1"),
        ("train", 0, {"size": 3}, "knows the options level and max_steps; got size"),
        ("train", 0, {"level": "MiniGrid-Empty-5x5-v0"}, "minigrid id"),
        ("train", 0, {"level": "BabyAI-Nowhere-v0"}, "no level 'BabyAI-Nowhere-v0'"),
        ("train", 0, {"max_steps": 0}, "whole number from 1; got 0"),
        ("train", 0, {"max_steps": True}, "whole number"),
    ],
)
def test_what_is_wrong_with_a_start_is_said(split: str, seed: int, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BabyAI().start(split, seed, options)


def test_stepping_an_episode_that_does_not_run_is_the_callers_mistake() -> None:
    environment = BabyAI()
    with pytest.raises(RuntimeError, match="not running"):
        environment.step("left")
    environment.start("train", 0, {"max_steps": 1})
    environment.step("left")
    with pytest.raises(RuntimeError, match="not running"):
        environment.step("left")


def test_importing_the_environment_loads_no_minigrid() -> None:
    code = "import sys, tiderl.envs.builtin.babyai as b; b.BabyAI(); print('minigrid' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"]
