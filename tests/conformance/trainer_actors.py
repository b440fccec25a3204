"""What tests of the real trainer share: actors in processes of their own, tiny models, and what they should compute.

What the actors should have computed is computed here: one trajectory at a time, by plain autograd through a Hugging Face model,
without packing, sharding or chunking.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

TEMPERATURE = 0.8
VOCAB = 37  # odd, so that shards are unequal
BETA1 = 0.9
ANSWER_S = 90.0

PlainTrajectory = dict[str, Any]
PlainMicroBatch = dict[str, Any]


class Actors:
    """The processes of one world. `run` sends a command to all and returns their answers by rank."""

    def __init__(self, world_size: int, folder: Path, script_name: str = "actor_process.py") -> None:
        script = Path(__file__).with_name(script_name)
        root = str(Path(__file__).parents[2])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root, "HF_HUB_OFFLINE": "1"}
        self.world_size = world_size
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(script), str(rank), str(world_size), str(folder / f"store{world_size}")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
            for rank in range(world_size)
        ]

    def run(self, *command: Any) -> list[Any]:
        answers = self.ask(*command)
        assert not any("error" in a for a in answers), answers
        return [a["result"] for a in answers]

    def ask(self, *command: Any) -> list[dict[str, Any]]:
        line = (json.dumps(command) + "\n").encode()
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()
        return [self._answer(rank, command[0]) for rank in range(self.world_size)]

    def _answer(self, rank: int, name: str) -> dict[str, Any]:
        stream = self.processes[rank].stdout
        assert stream is not None
        ready, _, _ = select.select([stream], [], [], ANSWER_S)
        assert ready, f"actor {rank} of {self.world_size} did not answer {name} within {ANSWER_S} s"
        line = stream.readline()
        assert line, f"actor {rank} of {self.world_size} died in {name}; its traceback is above"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


def make_model(folder: Path, kind: str, tied: bool) -> None:
    import transformers

    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "initializer_range": 0.3,
        "tie_word_embeddings": tied,
    }
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    # Biases and norms start as zeros and ones, which would hide one that is left out or swapped.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)


def settings(folder: Path, **sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    plain: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder), "dtype": "float32"},
        "agent": {"temperature": TEMPERATURE},
        "optim": {"lr": 1e-2, "betas": [BETA1, 0.95], "max_grad_norm": 0.0},
    }
    for name, values in sections.items():
        plain[name] = {**plain.get(name, {}), **values}
    return plain


def make_trajectories(seed: int, lengths: tuple[int, ...], vocab_size: int = VOCAB) -> list[PlainTrajectory]:
    rng = np.random.default_rng(seed)
    made = []
    for length in lengths:
        generated = rng.random(length) < 0.3
        generated[0] = False
        generated[-2] = True
        made.append(
            {
                "token_ids": rng.integers(0, vocab_size, length).tolist(),
                "generated": generated.tolist(),
                "log_probs": np.where(generated, rng.normal(-3.5, 0.5, length), 0.0).tolist(),
                "weight_versions": np.where(generated, rng.integers(0, 2, length), -1).tolist(),
            }
        )
    return made


def micro_batch(seed: int, *lengths: int) -> PlainMicroBatch:
    rng = np.random.default_rng(seed + 1000)
    return {"trajectories": make_trajectories(seed, lengths), "advantages": rng.normal(0, 1, len(lengths)).tolist()}


#: Four micro-batches of unequal trajectories.
FOUR = [micro_batch(1, 9, 14), micro_batch(2, 30), micro_batch(3, 5, 5, 21), micro_batch(4, 12, 3)]


def spread(
    micro_batches: list[PlainMicroBatch], world_size: int, counts: tuple[int, int]
) -> list[list[PlainMicroBatch]]:
    if world_size == 1:
        return [micro_batches]
    return [micro_batches[: counts[0]], micro_batches[counts[0] :]]


def plain_model(folder: Path) -> Any:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def plain_log_probs(model: Any, trajectory: PlainTrajectory, temperature: float) -> torch.Tensor:
    """Log-probs [num_tokens - 1] of tokens 1.., from one forward over the whole trajectory."""
    ids = torch.tensor(trajectory["token_ids"])
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1] / temperature
    return torch.log_softmax(logits, dim=-1)[torch.arange(len(ids) - 1), ids[1:]]


def plain_gradients(
    folder: Path, micro_batches: list[PlainMicroBatch], kl_weight: float, reference_folder: Path | None = None
) -> tuple[dict[str, npt.NDArray[np.float32]], float, int]:
    """Gradients by name of the mean token loss, the summed loss, and the number of tokens. The reference is the model itself, or
    that of another folder."""
    model, reference = plain_model(folder), plain_model(reference_folder or folder)
    total, num_tokens = torch.zeros(()), 0
    for batch in micro_batches:
        for trajectory, advantage in zip(batch["trajectories"], batch["advantages"], strict=True):
            mask = torch.tensor(trajectory["generated"])[1:]
            current = plain_log_probs(model, trajectory, TEMPERATURE)[mask]
            ratio = torch.exp(current - torch.tensor(trajectory["log_probs"])[1:][mask])
            total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()
            if kl_weight:
                gap = current - plain_log_probs(reference, trajectory, TEMPERATURE).detach()[mask]
                total = total + kl_weight * (torch.exp(-gap) + gap - 1.0).sum()
            num_tokens += int(mask.sum())
    (total / num_tokens).backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}
    return gradients, float(total.detach()), num_tokens


def assert_gradients(state_file: Path, wanted: dict[str, npt.NDArray[np.float32]]) -> None:
    """After one update from scratch, AdamW's first moment is (1 - beta1) times the gradient."""
    with np.load(state_file) as state:
        got = {name.removeprefix("exp_avg."): state[name] for name in state if name.startswith("exp_avg.")}
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        error = np.linalg.norm(got[name] / (1 - BETA1) - gradient) / np.linalg.norm(gradient)
        assert error < 1e-5, (name, error)
