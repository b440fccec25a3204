"""Loading: the order of precedence, what is refused and how it is said, and the way to JSON and back."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiderl.config.load import from_dict, from_json, load, overlay, settings_paths, to_dict, to_json
from tiderl.config.schema import Config
from tiderl.errors import ConfigError, UserError


@pytest.fixture
def toml(tmp_path: Path) -> Any:
    def write(text: str, name: str = "a.toml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_nothing_given_is_the_defaults() -> None:
    loaded = load([])
    assert (loaded.config, loaded.sources, loaded.dry_run) == (Config(), (), False)


def test_files_are_laid_over_the_defaults_left_to_right_and_flags_over_the_files(toml: Any) -> None:
    first = toml("[train]\nsteps = 1\ngroup_size = 4\n[optim]\nlr = 1e-4", "first.toml")
    second = toml("[train]\nsteps = 2\n[env]\nurls = ['http://a', 'http://b']", "second.toml")
    loaded = load(["--config", first, second, "--optim.lr", "1e-3", "--dry-run"])
    expected = Config()
    expected = dataclasses.replace(
        expected,
        train=dataclasses.replace(expected.train, steps=2, group_size=4),
        optim=dataclasses.replace(expected.optim, lr=1e-3),
        env=dataclasses.replace(expected.env, urls=("http://a", "http://b")),
    )
    assert loaded.config == expected
    assert loaded.sources == (first, second)
    assert loaded.dry_run
    assert load(["--config", second, first]).config.train.steps == 1


def test_config_may_come_several_times_and_with_an_equals_sign(toml: Any) -> None:
    first, second = toml("[train]\nsteps = 1", "first.toml"), toml("[train]\ngroup_size = 3", "second.toml")
    loaded = load(["--config", first, "--run.seed", "5", f"--config={second}"])
    assert (loaded.config.train.steps, loaded.config.train.group_size, loaded.config.run.seed) == (1, 3, 5)
    assert loaded.sources == (first, second)


def test_flags_take_all_forms() -> None:
    flags = (
        "--train.steps=7 --train.group_size 9 --train.groups-per-step 3 --agent.no-system-prompt --model.dtype float32"
    )
    config = load([*flags.split(), "--env.urls", "http://a", "http://b", "--optim.betas", "0.5", "0.75"]).config
    assert dataclasses.astuple(config.train) == (7, 3, 9)
    assert config.agent.system_prompt is False
    assert config.env.urls == ("http://a", "http://b")
    assert config.optim.betas == (0.5, 0.75)
    assert config.model.dtype == "float32"


def test_values_arrive_in_the_types_of_the_schema(toml: Any) -> None:
    config = load(["--config", toml("[optim]\nlr = 1\nbetas = [0, 1]\n[env]\nurls = []")]).config
    assert type(config.optim.lr) is float
    assert config.optim.betas == (0.0, 1.0)
    assert all(type(beta) is float for beta in config.optim.betas)
    assert config.env.urls == ()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[train]\nstepz = 3", "train.stepz: unknown setting in {file}; did you mean train.steps?"),
        ("[train]\nlr = 3", "train.lr: unknown setting in {file}; did you mean optim.lr?"),
        ("[modle]\npath = 'x'", "modle: unknown setting in {file}; did you mean model?"),
        ("steps = 3", "steps: unknown setting in {file}; did you mean train.steps?"),
        ("zzz = 3", "zzz: unknown setting in {file}; --help lists all settings"),
        ("'train.steps' = 3", "train.steps: unknown setting in {file}; train.steps is a key in quotes here"),
        ("train = 3", "train: is a section of settings, not 3 (int) in {file}"),
        ("[train]\nsteps = true", "train.steps: expected an integer, got true (bool) in {file}"),
        ("[train]\nsteps = 1.5", "train.steps: expected an integer, got 1.5 (float) in {file}"),
        ("[train]\nsteps = '5'", "train.steps: expected an integer, got '5' (str) in {file}"),
        ("[train.steps]\nx = 1", "train.steps: expected an integer, got a section in {file}"),
        ("[agent]\nsystem_prompt = 1", "agent.system_prompt: expected true or false, got 1 (int) in {file}"),
        ("[optim]\nlr = false", "optim.lr: expected a finite number, got false (bool) in {file}"),
        ("[optim]\nlr = nan", "optim.lr: expected a finite number, got nan (float) in {file}"),
        ("[timeouts]\nsync_s = inf", "timeouts.sync_s: expected a finite number, got inf (float) in {file}"),
        ("[optim]\nbetas = [0.9]", "optim.betas: expected a list of 2 float values, got [0.9] (list) in {file}"),
        ("[env]\nurls = 'http://a'", "env.urls: expected a list of str values, got 'http://a' (str) in {file}"),
        ("[env]\nurls = ['a', 3]", "env.urls[1]: expected a string, got 3 (int) in {file}"),
        ("[model]\ndtype = 'fp32'", 'model.dtype: expected one of "float32", "bfloat16", got \'fp32\' (str) in {file}'),
        ("[model]\npath = 2026-01-01", "model.path: expected a string, got datetime.date(2026, 1, 1) (date) in {file}"),
    ],
)
def test_a_wrong_setting_in_a_file_is_refused(toml: Any, text: str, complaint: str) -> None:
    file = toml(text)
    with pytest.raises(ConfigError) as caught:
        load(["--config", file])
    assert str(caught.value).startswith(complaint.format(file=file))


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--train.stepz", "3"], "train.stepz: unknown setting on the command line; did you mean train.steps?"),
        (["--train.lr=3"], "train.lr: unknown setting on the command line; did you mean optim.lr?"),
        (
            ["--agent.no-system-promt"],
            "agent.no_system_promt: unknown setting on the command line; did you mean agent.",
        ),
        (["--train.steps", "five"], "command line: Error parsing --train.steps: invalid literal for int()"),
        (["--model.dtype", "fp32"], "command line: invalid choice 'fp32' for argument '--model.dtype'."),
        (["--optim.betas", "1"], "command line: Missing value for argument '--optim.betas'. Expected 2 values."),
        (["stray"], "command line: Unrecognized options: stray"),
        (["--config"], "--config needs at least one TOML file"),
        (["--config", "--dry-run"], "--config needs at least one TOML file"),
        (["--config", "/nowhere/x.toml"], "config file /nowhere/x.toml: No such file or directory"),
        (["--config", "/"], "config file /: Is a directory"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_sentence(flags: list[str], complaint: str) -> None:
    with pytest.raises(UserError) as caught:
        load(flags)
    assert str(caught.value).startswith(complaint)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_toml_is_refused_with_its_line(toml: Any) -> None:
    file = toml("[train]\nsteps = \n")
    with pytest.raises(UserError, match=f"config file {file} is not TOML: .*line 2"):
        load(["--config", file])
    Path(file).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not TOML"):
        load(["--config", file])


def test_help_shows_every_setting_with_its_help_text(capsys: pytest.CaptureFixture[str], toml: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        load(["--config", toml("[train]\nsteps = 4711"), "--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert caught.value.code == 0
    assert [path for path in settings_paths() if f"--{path.replace('_', '-')}" not in shown] == []
    assert "Trajectories per group (G)." in shown
    assert "--config FILE" in shown
    assert "4711" in shown  # the defaults shown are those of the files


def test_loading_files_needs_no_torch_and_checks_flags_without_it() -> None:
    code = (
        "import sys; from tiderl.config.load import load; load(['--run.seed', '1']); sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60, check=False).returncode == 0


# One strategy a kind of value, so that configurations of every setting at once are made.
def values_like(value: Any) -> st.SearchStrategy[Any]:
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, int):
        return st.integers(-(2**70), 2**70)
    if isinstance(value, float):
        return st.floats(allow_nan=False, allow_infinity=False)
    if isinstance(value, list) and value:
        return st.tuples(*(values_like(entry) for entry in value)).map(list)
    return st.lists(st.text(max_size=5), max_size=3)


TREE = {
    section: {
        name: st.just(value) if isinstance(value, str) else values_like(value) for name, value in settings.items()
    }
    for section, settings in to_dict(Config()).items()
}
trees = st.fixed_dictionaries({section: st.fixed_dictionaries(settings) for section, settings in TREE.items()})


@given(trees)
def test_dict_and_json_round_trip(tree: dict[str, Any]) -> None:
    config = from_dict(tree)
    assert to_dict(config) == tree
    assert from_dict(to_dict(config)) == config
    assert from_json(to_json(config)) == config
    assert overlay(Config(), json.loads(to_json(config))) == config


def test_from_dict_wants_every_setting_and_no_other() -> None:
    tree = to_dict(Config())
    del tree["train"]["steps"]
    with pytest.raises(ConfigError, match="^train.steps: is missing"):
        from_dict(tree)
    tree["train"] |= {"steps": 3, "pace": 1}
    with pytest.raises(ConfigError, match="^train.pace: unknown setting"):
        from_dict(tree)


@pytest.mark.parametrize("text", ["", "[]", "3", "{"])
def test_what_is_no_resolved_configuration_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="the resolved configuration is"):
        from_json(text)


def test_numbers_that_are_not_finite_do_not_become_json() -> None:
    config = Config()
    config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=float("nan")))
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json(config)
