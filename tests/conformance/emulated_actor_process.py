"""One emulated actor, as a process of its own: JSON commands on stdin, JSON answers on stdout.

Run as a script by `test_trainer_emulated.py`: `emulated_actor_process.py RANK WORLD_SIZE STORE_FILE`. A command is a list: the name
of a function below and its arguments. The answer is {"result": ...} or {"error": type, "message": text}.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.unit.trainer_fakes import RoundCosts, micro_batch, trajectory
from tiderl.clock import JobClock
from tiderl.config.schema import Config, TimeoutsConfig
from tiderl.errors import TideError
from tiderl.trainers.emulated import EmulatedTrainer

#: The order is tested here, not the time: seconds of the job are over in no time.
SCALE = 1e4
WORLD_TIMEOUT_S = 60.0


class Actor:
    """The commands. Each is made on every rank; arguments that are lists of one entry a rank are picked from by `rank`."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.trainer: EmulatedTrainer

    def start(self, collective_s: float) -> int:
        """A new trainer in a group of its own: what a test before has left hanging in the old one does no harm."""
        group = dist.new_group(timeout=timedelta(seconds=collective_s))
        assert group is not None
        config = Config(timeouts=TimeoutsConfig(collective_s=collective_s))
        self.trainer = EmulatedTrainer(config, group, RoundCosts(), JobClock(SCALE), num_receivers=4)  # type: ignore[arg-type]
        self.trainer.start()
        return self.trainer.version

    def step(self, sizes: list[list[list[int]]], abandon: list[bool]) -> dict[str, Any]:
        """A whole step. `sizes[rank]` are this rank's micro-batches, each the lengths of its trajectories, half of which (the
        later tokens) are generated. All are in flight before the first is finished."""
        self.trainer.begin_step()
        in_flight = [
            self.trainer.forward(micro_batch(*(trajectory(n, range(n // 2, n)) for n in lengths)))
            for lengths in sizes[self.rank]
        ]
        for forward in reversed(in_flight):
            self.trainer.backward(forward, None)
        return {**asdict(self.trainer.end_step(abandon=abandon[self.rank])), "optimizer_s": None}

    def call(self, names: list[str]) -> Any:
        """The call of the protocol that this rank's entry names; "" for none."""
        name = names[self.rank]
        if name == "end_step":
            return self.trainer.end_step(abandon=False).version
        if name == "full_weights":
            return [[name, tensor.tolist()] for name, tensor in self.trainer.full_weights()]
        if name == "score":
            return self.trainer.score([7, 3, 5]).tolist()
        return getattr(self.trainer, name)() if name else None

    def save(self, folder: str) -> None:
        self.trainer.save(Path(folder))
        self.trainer.wait_saved()

    def load(self, folders: list[str]) -> int:
        self.trainer.load(Path(folders[self.rank]))
        return self.trainer.version

    def version(self) -> int:
        return self.trainer.version


def main(rank: int, world_size: int, store_file: str) -> None:
    # Answers own the real stdout; whatever libraries print goes to stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    timeout = timedelta(seconds=WORLD_TIMEOUT_S)
    dist.init_process_group(
        "gloo", init_method=f"file://{store_file}", rank=rank, world_size=world_size, timeout=timeout
    )
    actor = Actor(rank)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"result": getattr(actor, name)(*arguments)}
        except (TideError, ValueError) as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
