"""An environment that does what its actions say: the servers under test serve `tests.integration.scripted_env:Scripted`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from tiderl.envs.protocol import ImagePart, Observation, Started, Stepped

NAME = "tests.integration.scripted_env:Scripted"


class Scripted:
    """Counts its steps; the text of every observation is that count, so that a turn played twice shows."""

    @staticmethod
    def num_tasks(split: str) -> int:
        if split != "train":
            raise ValueError(f"unknown split {split!r}")
        return 1000

    @staticmethod
    def task_type(split: str, seed: int) -> str:
        return "scripted"

    def start(self, split: str, seed: int, options: Mapping[str, Any]) -> Started:
        if "refuse" in options:
            raise ValueError("told to refuse")
        if "crash" in options:
            raise RuntimeError("told to crash")
        if "exit_unless" in options and not os.path.exists(options["exit_unless"]):
            open(options["exit_unless"], "w").close()
            os._exit(3)
        time.sleep(options.get("start_s", 0.0))
        self._num_steps = 0
        return Started(
            f"seed {seed} {options.get('word', '')}",
            Observation("0", (ImagePart(b"\x00png", "image/png"),)),
            "scripted",
            options.get("delay_s", 0.0),
        )

    def step(self, action: str) -> Stepped:
        self._num_steps += 1
        text, delay_s = str(self._num_steps), 0.0
        match action.split():
            case ["crash"]:
                raise RuntimeError("told to crash")
            case ["value-error"]:
                raise ValueError("told to crash")
            case ["nan"]:
                return Stepped(Observation(text), float("nan"), False, False)
            case ["none"]:
                return None  # type: ignore[return-value]
            case ["sleep", seconds]:
                time.sleep(float(seconds))
            case ["delay", seconds]:
                delay_s = float(seconds)
            case ["print"]:
                print("an environment prints")
            case ["pid"]:
                text = str(os.getpid())
        done = action == "finish"
        return Stepped(Observation(text), float(self._num_steps), done, done, delay_s)

    def close(self) -> None:
        pass
