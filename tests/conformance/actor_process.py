"""One actor of a trainer under test, as a process of its own: JSON commands on stdin, JSON answers on stdout.

Run as a script by the trainer's tests: `actor_process.py RANK WORLD_SIZE STORE_FILE`. A command is a list: the name of a
function below and its arguments. The answer is {"result": ...} or {"error": type, "message": text}.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tiderl.config.schema import AgentConfig, Config, LossConfig, ModelConfig, OptimConfig, TrainConfig, TrainerConfig
from tiderl.errors import TideError
from tiderl.rl.loss import policy_loss
from tiderl.rl.packing import pack
from tiderl.trainers import checkpoint
from tiderl.trainers.base import InFlight, LogProbs, MicroBatchResult
from tiderl.trainers.fsdp import FsdpTrainer
from tiderl.trainers.packed_pass import gather, packed_log_probs
from tiderl.trainers.reference import HostedReference
from tiderl.types import Finish, GroupId, MicroBatch, MicroBatchId, TaskId, TaskKind, Trajectory

CPU = torch.device("cpu")
SECTIONS = {
    "agent": AgentConfig,
    "model": ModelConfig,
    "loss": LossConfig,
    "optim": OptimConfig,
    "train": TrainConfig,
    "trainer": TrainerConfig,
}


def to_trajectory(plain: dict[str, Any]) -> Trajectory:
    """The trajectory of a JSON object of four arrays."""
    return Trajectory(
        task_id=TaskId(plain.get("task_id", 0)),
        group_id=GroupId(0),
        kind=TaskKind.TRAIN,
        token_ids=np.array(plain["token_ids"], dtype=np.int32),
        generated=np.array(plain["generated"], dtype=np.bool_),
        log_probs=np.array(plain["log_probs"], dtype=np.float32),
        weight_versions=np.array(plain["weight_versions"], dtype=np.int32),
        turns=(),
        images=(),
        reward=0.0,
        success=False,
        finish=Finish.DONE,
    )


def to_micro_batch(plain: list[dict[str, Any]], advantages: list[float]) -> MicroBatch:
    return MicroBatch(MicroBatchId(0), 0, tuple(to_trajectory(t) for t in plain), tuple(advantages))


def to_plain(result: MicroBatchResult) -> dict[str, Any]:
    return {
        "num_tokens": result.num_tokens,
        "num_trained_tokens": result.num_trained_tokens,
        "num_padding_tokens": result.num_padding_tokens,
        "sums": dict(result.sums),
        "max_same_version_gap": result.max_same_version_gap,
    }


def alternating(num_micro_batches: int) -> list[tuple[str, int]]:
    """Reference and actor in turn for every micro-batch."""
    return [(name, i) for i in range(num_micro_batches) for name in ("score", "forward", "backward")]


class Actor:
    """The commands. Each is made on every rank; arguments that are lists of one entry a rank are picked from by `rank`."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.storage_group = dist.new_group(backend="gloo")
        self.config: Config
        self.trainer: FsdpTrainer
        self.reference: HostedReference

    def start(self, settings: dict[str, dict[str, Any]], reference_folder: str = "") -> int:
        """`reference_folder`: of a reference that is not the model that the trainer starts from, so that a KL penalty tells."""
        config = Config(**{name: SECTIONS[name](**values) for name, values in settings.items()})
        assert dist.group.WORLD is not None
        self.config = config
        self.trainer = FsdpTrainer(config, dist.group.WORLD, self.storage_group, CPU)
        self.trainer.start()
        if config.loss.kl_weight > 0.0:
            model = replace(config.model, path=reference_folder or config.model.path)
            self.reference = HostedReference(replace(config, model=model), CPU)
            self.reference.start()
        return self.trainer.version

    def step(
        self,
        micro_batches: list[list[dict[str, Any]]],
        abandon: list[bool],
        orders: list[list[tuple[str, int]]] | None = None,
    ) -> dict[str, Any]:
        """A whole step; `micro_batches[rank]` are this rank's, each {"trajectories", "advantages"}, and `orders[rank]` says what
        is done with them in what order (see `work`)."""
        self.trainer.begin_step()
        own = micro_batches[self.rank]
        results = self.work(own, orders[self.rank] if orders else alternating(len(own)))
        done = self.trainer.end_step(abandon=abandon[self.rank])
        return {
            "results": results,
            "updated": done.updated,
            "abandoned": done.abandoned,
            "version": done.version,
            "grad_norm": done.grad_norm,
            "lr": done.lr,
            "num_trained_tokens": done.num_trained_tokens,
        }

    def work(self, plain: list[dict[str, Any]], order: list[tuple[str, int]]) -> list[dict[str, Any]]:
        """Each entry is something to do and the micro-batch to do it with. `score`: the reference on this rank, handed over as it
        is; `receive`: as it comes from another rank; `ordinary`: loss and backward in one, straight through the graph."""
        micro_batches = [to_micro_batch(p["trajectories"], p["advantages"]) for p in plain]
        has_reference = self.config.loss.kl_weight > 0.0
        references: dict[int, Sequence[LogProbs]] = {}
        in_flight: dict[int, InFlight] = {}
        results = []
        for name, i in order:
            if name == "forward":
                in_flight[i] = self.trainer.forward(micro_batches[i])
            elif name == "backward":
                results.append(to_plain(self.trainer.backward(in_flight.pop(i), references.get(i))))
            elif name == "ordinary":
                self.train_ordinarily(micro_batches[i], references.get(i))
            elif has_reference:
                references[i] = self.score_reference(micro_batches[i], name == "receive")
        if has_reference:
            self.reference.swap_out()
        return results

    def score_reference(self, micro_batch: MicroBatch, receive: bool) -> Sequence[LogProbs]:
        self.reference.swap_in()
        log_probs = self.reference.log_probs(micro_batch.trajectories)
        if not receive:
            return log_probs
        # A message's arrays lie in its frames, which nobody may write to.
        return [np.frombuffer(np.asarray(own).tobytes(), dtype=np.float32) for own in log_probs]

    def train_ordinarily(self, micro_batch: MicroBatch, reference: Sequence[LogProbs] | None) -> None:
        batch = pack(micro_batch.trajectories)
        log_probs = packed_log_probs(self.trainer._model, batch, self.config.agent.temperature, CPU)
        advantages = np.asarray(micro_batch.advantages, dtype=np.float32)[batch.owners]
        loss = policy_loss(
            log_probs,
            torch.from_numpy(batch.engine_log_probs),
            torch.from_numpy(advantages),
            gather(batch, reference, CPU) if reference is not None else None,
            self.config.loss,
        )
        loss.total.backward()
        self.trainer._num_trained_tokens += batch.num_targets

    def forward(self, plain: list[dict[str, Any]], advantages: list[float]) -> int:
        return self.trainer.forward(to_micro_batch(plain, advantages)).num_tokens

    def begin(self) -> None:
        self.trainer.begin_step()

    def score(self, token_ids: Sequence[int]) -> list[float]:
        scores: list[float] = self.trainer.score(token_ids).tolist()
        return scores

    def version(self) -> int:
        return self.trainer.version

    def weights(self, file: str) -> list[str]:
        """Write `full_weights` to an .npz (rank 0); returns the names in order, which every rank must agree on."""
        weights = [(name, tensor.float().numpy()) for name, tensor in self.trainer.full_weights()]
        if self.rank == 0:
            np.savez(file, **dict(weights))  # type: ignore[arg-type]
        return [name for name, _ in weights]

    def state(self, file: str) -> str:
        """Write weights and moments, whole, to an .npz (rank 0); returns a checksum."""
        tensors = {name: tensor.full_tensor().numpy() for name, tensor in self.trainer._state().items()}  # type: ignore[attr-defined]
        if self.rank == 0:
            np.savez(file, **tensors)
        digest = hashlib.sha256()
        for name in sorted(tensors):
            digest.update(name.encode() + tensors[name].tobytes())
        return digest.hexdigest()

    def save(self, folder: str, wait: bool) -> None:
        self.trainer.save(Path(folder))
        if wait:
            self.trainer.wait_saved()

    def write_late(self, seconds: float) -> None:
        """Rank 1's part of the next checkpoint takes this much longer."""
        writer = checkpoint.HuggingFaceStorageWriter
        write_data = writer.write_data

        def slow(*arguments: Any) -> Any:
            writer.write_data = write_data  # type: ignore[method-assign]
            time.sleep(seconds)
            return write_data(*arguments)

        if self.rank == 1:
            writer.write_data = slow  # type: ignore[method-assign]

    def wait_saved(self) -> None:
        self.trainer.wait_saved()

    def load(self, folder: str) -> int:
        self.trainer.load(Path(folder))
        return self.trainer.version

    def export(self, folder: str) -> None:
        self.trainer.export_hf(Path(folder))


def main(rank: int, world_size: int, store_file: str) -> None:
    # Answers own the real stdout; whatever libraries print goes to stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store_file}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
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
