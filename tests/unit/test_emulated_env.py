"""The emulated environments: what they say, when they end, what they refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tiderl.envs.builtin.emulated import (
    NUM_TASKS,
    TRACE_VARIABLE,
    EmulatedAlfWorld,
    EmulatedEnvironment,
    EmulatedOSWorld,
    EmulatedScienceBoard,
    EmulatedText,
    EmulatedTrace,
    EmulatedWebShop,
)
from tiderl.envs.builtin.emulated_sizes import ActionSizes, InstructionSizes, ObservationSizes
from tiderl.envs.builtin.emulated_workloads import WEBSHOP, Episode
from tiderl.envs.protocol import Stepped
from tiderl.errors import UserError

CLASSES = (EmulatedWebShop, EmulatedAlfWorld, EmulatedText, EmulatedOSWorld, EmulatedScienceBoard)
SESSION = {
    "task_type": "recorded",
    "turns": [{"prompt_tokens": 9, "output_tokens": 3, "env_latency_s": 4.0}],
    "reset_s": 6.0,
    "reward": 1.0,
}


def play(environment: EmulatedEnvironment, skill: float = 0.5) -> list[Stepped]:
    steps = [environment.step(ActionSizes(skill, 3).text())]
    while not steps[-1].done:
        steps.append(environment.step(ActionSizes(skill, 3).text()))
    return steps


@pytest.mark.parametrize("kind", CLASSES)
def test_an_episode_from_start_to_end(kind: type[EmulatedEnvironment]) -> None:
    first, second = kind(), kind()
    started = first.start("train", 7, {})
    assert started == second.start("train", 7, {})
    assert started.task_type == kind.task_type("train", 7)
    assert InstructionSizes.read(started.instruction).num_tokens > 0
    assert ObservationSizes.read(started.observation.text).num_tokens >= 1
    steps = play(first)
    assert steps == play(second)
    assert [step.done for step in steps] == [False] * (len(steps) - 1) + [True]
    assert {step.reward for step in steps[:-1]} <= {0.0}
    assert steps[-1].reward == float(steps[-1].success)
    assert all(ObservationSizes.read(step.observation.text) for step in steps)


def test_what_is_said_is_the_workloads_episode() -> None:
    environment, episode = EmulatedWebShop(), Episode(WEBSHOP, "test", 5)
    started = environment.start("test", 5, {"time_scale": 4})
    assert started.instruction == '{"filler":1,"tokens":700,"time_scale":4.0}'
    assert started.observation.text == episode.opening.observation.text()
    assert started.delay_s == episode.opening.delay_s / 4
    stepped, reply = environment.step('{"skill": 0.25, "roll": 17}'), episode.act(0.25, 17)
    assert stepped.observation.text == reply.observation.text()
    assert stepped.delay_s == reply.delay_s / 4


def test_the_suite_has_both_types_in_turn_and_one_instruction_each() -> None:
    assert [EmulatedText.task_type("train", seed) for seed in range(4)] == ["webshop", "alfworld"] * 2
    instructions = [EmulatedText().start("train", seed, {}).instruction for seed in range(4)]
    assert instructions[:2] == instructions[2:]
    assert instructions[0] != instructions[1]


@pytest.mark.parametrize("action", ["", "go north", '{"skill": 2, "roll": 0}', '{"skill": 0.5}', "{}", "\ud800"])
def test_a_malformed_action_changes_nothing_and_the_observation_says_so(action: str) -> None:
    environment, undisturbed = EmulatedWebShop(), EmulatedWebShop()
    for one in (environment, undisturbed):
        one.start("train", 0, {})
    proper = ActionSizes(0.5, 1).text()
    assert environment.step(proper) == undisturbed.step(proper)
    refused = environment.step(action)
    assert (refused.reward, refused.done, refused.success, refused.delay_s) == (0.0, False, False, 0.0)
    observation = ObservationSizes.read(refused.observation.text)
    assert observation.error.startswith("not an emulated action: ")
    assert observation.num_tokens == 1
    assert environment.step(proper) == undisturbed.step(proper)


@pytest.mark.parametrize(
    ("split", "seed", "options", "words"),
    [
        ("dev", 0, {}, "splits train, test; got 'dev'"),
        ("train", NUM_TASKS["train"], {}, "seeds 0 .. 9999; got 10000"),
        ("test", -1, {}, "seeds 0 .. 999; got -1"),
        ("train", 0, {"speed": 2}, "know the option time_scale; got speed"),
        ("train", 0, {"time_scale": "2"}, "must be a number, got '2'"),
        ("train", 0, {"time_scale": True}, "must be a number, got True"),
        ("train", 0, {"time_scale": 0}, "finite and more than 0, got 0"),
        ("train", 0, {"time_scale": float("inf")}, "finite and more than 0"),
    ],
)
def test_starts_that_are_refused(split: str, seed: int, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EmulatedText().start(split, seed, options)


def test_steps_before_the_start_and_after_the_end_are_the_callers_mistake() -> None:
    environment = EmulatedWebShop()
    with pytest.raises(RuntimeError, match="not running"):
        environment.step(ActionSizes(0.5, 0).text())
    environment.start("train", 0, {})
    play(environment)
    with pytest.raises(RuntimeError, match="not running"):
        environment.step(ActionSizes(0.5, 0).text())


def test_a_trace_file_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(SESSION | {"task_type": name}) + "\n" for name in ("a", "b", "c")))
    monkeypatch.setenv(TRACE_VARIABLE, str(path))
    assert [EmulatedTrace.num_tasks(split) for split in ("train", "test")] == [3, 3]
    assert [EmulatedTrace.task_type("train", seed) for seed in range(3)] == ["a", "b", "c"]
    with pytest.raises(ValueError, match="splits train, test"):
        EmulatedTrace.num_tasks("dev")
    environment = EmulatedTrace()
    started = environment.start("train", 1, {"time_scale": 2})
    assert (started.task_type, started.delay_s) == ("b", 3.0)
    assert InstructionSizes.read(started.instruction) == InstructionSizes(0, 0, 2.0)
    (step,) = play(environment)
    assert (step.reward, step.success, step.delay_s) == (1.0, True, 2.0)


def test_a_trace_that_is_not_named_is_the_users_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRACE_VARIABLE, raising=False)
    with pytest.raises(UserError, match="name it in the variable TIDERL_TRACE_FILE"):
        EmulatedTrace.num_tasks("train")


def test_neither_torch_nor_numpy_is_imported() -> None:
    program = (
        "import sys, tiderl.envs.builtin.emulated; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
