"""The import contract: rooms import only from rooms below them, heavy packages only where their backend lives.

Source: design.md, "Rooms".
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tiderl"

#: From the top to the ground. A room imports from lower floors and from itself, never sideways or up.
FLOORS = (
    ("launch", "cli"),
    ("coordinator", "worker", "sim"),
    # The agent's loop plays an environment with an engine, so it stands on both.
    ("agent",),
    ("engines", "trainers", "envs", "observe"),
    ("rl", "wire", "profiles"),
    ("scheduling",),
    ("config",),
    ("types", "errors", "clock"),
)
FLOOR_OF = {room: number for number, floor in enumerate(FLOORS) for room in floor}

#: Packages that only these files (or the files in these folders) may import at all.
RESERVED = {
    "torch": (
        "tiderl/engines/",
        "tiderl/trainers/",
        "tiderl/rl/",
        "tiderl/worker/",
        "tiderl/agent/tiny_model.py",
    ),
    "zmq": ("tiderl/wire/sockets.py",),
    "vllm": ("tiderl/engines/vllm",),
    "megatron": ("tiderl/trainers/megatron",),
    "transformers": ("tiderl/trainers/", "tiderl/agent/chat.py", "tiderl/agent/tiny_model.py", "tiderl/engines/vllm"),
    "minigrid": ("tiderl/envs/builtin/",),
    "gymnasium": ("tiderl/envs/builtin/",),
    "prometheus_client": ("tiderl/observe/",),
    "tyro": ("tiderl/config/load.py",),
}
#: Packages that are loaded on first use: no module imports them when it is itself imported. (vllm and megatron have files of
#: their own, which are imported on first use themselves.)
ON_FIRST_USE = ("transformers", "minigrid", "gymnasium", "tyro")
#: What the functional core may import from outside.
PURE = {"tiderl.scheduling": {"numpy"}, "tiderl.types": {"numpy"}, "tiderl.errors": set()}
#: Never: code of whoever wrote the bytes would run.
FORBIDDEN = ("pickle", "cloudpickle", "dill", "marshal", "shelve")

WITHOUT_TORCH = (
    "tiderl.cli",
    "tiderl.config.load",
    "tiderl.config.plan",
    "tiderl.config.validate",
    "tiderl.coordinator.process",
    "tiderl.coordinator.server",
    "tiderl.coordinator.replay",
    "tiderl.engines.base",
    "tiderl.engines.emulated",
    "tiderl.envs.client",
    "tiderl.envs.server",
    "tiderl.launch",
    "tiderl.profiles.files",
    "tiderl.scheduling.core",
    "tiderl.trainers.base",
    "tiderl.trainers.model_folder",
    "tiderl.wire.messages",
    "tiderl.wire.sockets",
)

FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(tree: ast.Module) -> Iterator[tuple[str, int, bool]]:
    """(module, line, whether it is imported when the file is), annotations' TYPE_CHECKING blocks left out."""

    def visit(node: ast.AST, top: bool) -> Iterator[tuple[str, int, bool]]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # `from tiderl import types` imports tiderl.types; names of objects do no harm here.
            yield from ((f"{node.module}.{alias.name}", node.lineno, top) for alias in node.names)
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, top and not inside)

    return visit(tree, True)


ALL_IMPORTS = [
    (file, name, line, top)
    for file in FILES
    for name, line, top in imports(ast.parse(file.read_text(encoding="utf-8")))
]


def faults(*lines: str) -> str:
    return "\n".join(("", *lines))


def test_the_package_is_found_and_every_room_has_a_floor() -> None:
    assert len(FILES) > 10
    rooms = {file.relative_to(PACKAGE).parts[0].removesuffix(".py") for file in FILES} - {"__init__"}
    assert rooms <= set(FLOOR_OF), "a new room needs a floor in FLOORS"


def test_imports_point_down_one_way() -> None:
    wrong = []
    for file, name, line, _ in ALL_IMPORTS:
        parts = name.split(".")
        importer = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if parts[0] != "tiderl" or importer == "__init__":
            continue
        imported = parts[1]
        if imported != importer and FLOOR_OF[imported] <= FLOOR_OF[importer]:
            wrong.append(f"{file.relative_to(ROOT)}:{line}: {importer} may not import {imported}")
    assert not wrong, faults(*wrong)


@pytest.mark.parametrize("package", RESERVED)
def test_reserved_packages_stay_in_their_files(package: str) -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: imports {name}"
        for file, name, line, _ in ALL_IMPORTS
        if name.split(".")[0] == package and not file.relative_to(ROOT).as_posix().startswith(RESERVED[package])
    ]
    assert not wrong, faults(*wrong)


def test_backends_are_imported_on_first_use() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: imports {name} when it is imported itself"
        for file, name, line, top in ALL_IMPORTS
        if top and name.split(".")[0] in ON_FIRST_USE
    ]
    assert not wrong, faults(*wrong)


def test_the_functional_core_uses_the_standard_library_and_numpy_alone() -> None:
    wrong = []
    for file, name, line, _ in ALL_IMPORTS:
        package = name.split(".")[0]
        for room, allowed in PURE.items():
            known = package in sys.stdlib_module_names or package == "tiderl" or package in allowed
            if (name_of(file) + ".").startswith(room + ".") and not known:
                wrong.append(f"{file.relative_to(ROOT)}:{line}: {room} may not import {name}")
    assert not wrong, faults(*wrong)


@pytest.mark.parametrize("module", ["time", "random", "logging", "asyncio", "threading", "os", "pathlib", "datetime"])
def test_the_functional_core_has_no_clock_no_dice_and_no_files(module: str) -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: imports {name}"
        for file, name, line, _ in ALL_IMPORTS
        if name_of(file).startswith("tiderl.scheduling") and name.split(".")[0] == module
    ]
    assert not wrong, faults(*wrong)


def test_nothing_unpickles() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{line}" for file, name, line, _ in ALL_IMPORTS if name.split(".")[0] in FORBIDDEN
    ]
    assert not wrong, faults(*wrong)


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_imports_without_torch_or_a_backend(module: str) -> None:
    code = (
        f"import sys, {module}\n"
        "heavy = {'torch', 'vllm', 'transformers', 'megatron', 'tyro', 'minigrid', 'gymnasium'} & set(sys.modules)\n"
        "sys.exit(f'{sorted(heavy)} loaded' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
