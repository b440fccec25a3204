"""Names of environments."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tiderl.envs.builtin.shop import Shop
from tiderl.envs.registry import BUILTIN, resolve
from tiderl.errors import UserError


def test_a_built_in() -> None:
    assert resolve("shop") is Shop


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_every_built_in_has_its_class(name: str) -> None:
    assert resolve(name).__module__.startswith("tiderl.envs.builtin.")


def test_a_class_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_envs_of_this_test.py").write_text(
        "from tiderl.envs.builtin.shop import Shop\nclass Mine(Shop):\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert type(resolve("my_envs_of_this_test:Mine")()).__name__ == "Mine"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "babyai, emulated-alfworld"),
        ("webshop", "there is no environment 'webshop'.*babyai, .*emulated-webshop, shop.*module:Class"),
        ("module:", "babyai, emulated-alfworld"),
        (":Class", "babyai, emulated-alfworld"),
        ("no_such_module:Class", "cannot import no_such_module.*babyai, .*shop"),
        ("tiderl.errors:Nothing", "no class Nothing"),
        ("tiderl.envs.registry:resolve", "no class resolve"),
        ("tiderl.errors:UserError", "UserError lacks start, step, close, num_tasks, task_type"),
    ],
)
def test_what_does_not_resolve(name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        resolve(name)


def test_importing_server_client_and_shop_loads_no_torch() -> None:
    program = (
        "import sys; from tiderl.envs import client, server; from tiderl.envs.registry import resolve; resolve('shop');"
        "resolve('emulated-text');"
        "print([m for m in ('torch', 'vllm', 'transformers', 'minigrid', 'tiderl.envs.builtin.babyai') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
