"""Which class is behind an environment's name.

Invariants (tests/unit/test_envs_registry.py):

1. A built-in's name, or `module:Class` from the user's own code (the working directory is on the path), gives the class.
2. Whatever else is asked for is a `UserError` that lists the built-in names; an import that fails names what it lacked.
3. Only the module asked for is imported.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import cast

from tiderl.envs.protocol import EnvironmentClass
from tiderl.errors import UserError

BUILTIN: dict[str, str] = {
    "babyai": "tiderl.envs.builtin.babyai:BabyAI",
    "emulated-alfworld": "tiderl.envs.builtin.emulated:EmulatedAlfWorld",
    "emulated-osworld": "tiderl.envs.builtin.emulated:EmulatedOSWorld",
    "emulated-scienceboard": "tiderl.envs.builtin.emulated:EmulatedScienceBoard",
    "emulated-text": "tiderl.envs.builtin.emulated:EmulatedText",
    "emulated-trace": "tiderl.envs.builtin.emulated:EmulatedTrace",
    "emulated-webshop": "tiderl.envs.builtin.emulated:EmulatedWebShop",
    "shop": "tiderl.envs.builtin.shop:Shop",
}


def resolve(name: str) -> EnvironmentClass:
    """The class of the environment `name`. Raises `UserError`."""
    target = BUILTIN.get(name, name)
    module_name, separator, class_name = target.partition(":")
    if not separator or not module_name or not class_name:
        raise UserError(
            f"there is no environment {name!r}: built in are {', '.join(sorted(BUILTIN))}; "
            "one of your own is named module:Class, such as my_envs:Maze"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(
            f"environment {name!r}: cannot import {module_name} from {os.getcwd()} or the Python path: {error} "
            f"(built in are {', '.join(sorted(BUILTIN))})"
        ) from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        raise UserError(f"environment {name!r}: {module_name} has no class {class_name}")
    missing = [part for part in ("start", "step", "close", "num_tasks", "task_type") if not hasattr(found, part)]
    if missing:
        raise UserError(
            f"environment {name!r}: {class_name} lacks {', '.join(missing)}; tiderl/envs/protocol.py says what they do"
        )
    return cast(EnvironmentClass, found)
