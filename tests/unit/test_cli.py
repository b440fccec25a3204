"""The command `tiderl`: exit codes, one-paragraph complaints, and that asking for help is cheap."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tiderl import cli
from tiderl.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A command of the test's own: `tiderl odd job NUMBER` raises or returns what the test puts in `run`."""
    module = ModuleType("tests_odd_job")
    module.add_arguments = lambda parser: parser.add_argument("number", type=int)  # type: ignore[attr-defined]
    module.run = lambda arguments: arguments.number  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(cli, "_COMMANDS", ((("odd", "job"), "An odd job.", module.__name__), *cli._COMMANDS))
    return module


def test_a_command_gets_its_arguments_and_its_result_is_the_exit_code(command: ModuleType) -> None:
    assert cli.main(["odd", "job", "7"]) == 7


def test_a_user_error_is_one_paragraph_and_exit_code_2(
    command: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: argparse.Namespace) -> int:
        raise UserError("port: taken; choose another")

    monkeypatch.setattr(command, "run", fail)
    assert cli.main(["odd", "job", "7"]) == 2
    assert capsys.readouterr() == ("", "tiderl: port: taken; choose another\n")


def test_ctrl_c_is_exit_code_130(command: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", interrupt)
    assert cli.main(["odd", "job", "7"]) == 130


def test_a_bug_keeps_its_traceback(command: ModuleType) -> None:
    command.run = lambda arguments: 1 // 0
    with pytest.raises(ZeroDivisionError):
        cli.main(["odd", "job", "7"])


@pytest.mark.parametrize("words", [[], ["nothing"], ["env"], ["odd", "job", "seven"], ["odd", "job", "7", "8"]])
def test_misuse_is_exit_code_2(command: ModuleType, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert "usage: tiderl" in capsys.readouterr().err


@pytest.mark.parametrize("words", [words for words, _, _ in cli._COMMANDS], ids=" ".join)
def test_every_command_has_help(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([*words, "--help"])
    assert caught.value.code == 0
    assert f"usage: tiderl {' '.join(words)}" in capsys.readouterr().out


def test_help_loads_no_command() -> None:
    code = (
        "import sys\nfrom tiderl import cli\n"
        "try: cli.main(['--help'])\nexcept SystemExit: pass\n"
        "sys.exit(sorted(set(sys.modules) & ({'torch', 'aiohttp', 'numpy'} | {m for *_, m in cli._COMMANDS})) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "COMMAND" in done.stdout
