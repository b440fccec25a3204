"""The shipped emulated configs fit their number of ranks and their workloads, and the script that runs them reads its arguments."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tiderl.config.load import load
from tiderl.config.validate import validate
from tiderl.engines.emulated_language import NUM_ROLLS, act_id, answer_length, call_id
from tiderl.envs.builtin.emulated import WorkloadEnvironment
from tiderl.envs.builtin.emulated_workloads import Episode
from tiderl.envs.registry import resolve
from tiderl.profiles.files import load as load_profiles

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs" / "emulated").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_fits_its_ranks_and_its_profiles(path: Path) -> None:
    config = load(["--config", str(path)]).config
    num_ranks = int(path.stem.rpartition("_")[2])
    validate(config, num_ranks)
    assert f"launch/emulate.sh {num_ranks} configs/emulated/{path.name}" in path.read_text()
    costs = load_profiles(str(ROOT / config.emulate.hardware), str(ROOT / config.emulate.model))
    resident = costs.trainer_bytes(config.roles.num_actors, reference=config.loss.kl_weight > 0)
    activations = costs.activation_bytes(
        config.trainer.max_micro_batch_tokens, checkpoint_layers=config.trainer.checkpoint_layers
    )
    assert resident + activations < costs.memory_bytes


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_has_its_workloads_limits(path: Path) -> None:
    config = load(["--config", str(path)]).config
    environment = resolve(config.env.name)
    assert isinstance(environment, type) and issubclass(environment, WorkloadEnvironment)
    for workload in environment.workloads:
        assert config.agent.max_turns == workload.max_rounds
        assert config.model.max_context_tokens == workload.max_context_tokens
        for skill in (0.0, 1.0):
            call = Episode(workload, "train", 0).act(skill, 0).observation.answer_tokens
            longest = answer_length(call_id(call, exact=False), act_id(skill, NUM_ROLLS - 1))
            assert longest <= config.agent.max_new_tokens


@pytest.mark.parametrize("arguments", [[], ["8"], ["eight", "x.toml"], ["0", "x.toml"], ["--train.steps", "3"]])
def test_the_script_wants_a_number_of_ranks_and_a_config(arguments: list[str]) -> None:
    script = ROOT / "launch" / "emulate.sh"
    done = subprocess.run(["bash", script, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "expected a number of ranks, a config and flags" in done.stderr
