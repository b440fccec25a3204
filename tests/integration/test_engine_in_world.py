"""An engine inside a torchrun world of two ranks over gloo, of which one has none: both worlds go on undisturbed.

The ranks are processes (`engine_in_world_rank.py`), because what is tested is what an engine does to its process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

RANK_PROGRAM = Path(__file__).parent / "engine_in_world_rank.py"
PROJECT = Path(__file__).parents[2]
BOUND_S = 240.0


def test_host_collectives_go_on_around_an_engine(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    environment = {
        **os.environ,
        "PYTHONPATH": str(PROJECT),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    outcomes = run_ranks(tmp_path, environment)
    for rank, (code, output) in enumerate(outcomes):
        assert code == 0, f"rank {rank}:\n{output}"
        assert "done" in output
    assert "tokens under the broadcast weights" in outcomes[1][1]
    # Nothing of vLLM's may reach the terminal's standard output.
    strange = [line for line in outcomes[1][1].splitlines() if not line.startswith(("rank 1: ", "done"))]
    assert not strange, strange


def run_ranks(folder: Path, environment: dict[str, str]) -> list[tuple[int, str]]:
    """Exit code and standard output of both ranks; on failure the error output too."""
    with (folder / "errors_0").open("w") as errors_0, (folder / "errors_1").open("w") as errors_1:
        ranks = [
            subprocess.Popen(
                [sys.executable, str(RANK_PROGRAM), str(folder / "model"), str(folder / "rendezvous")],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            for rank, errors in enumerate((errors_0, errors_1))
        ]
        try:
            outputs = [rank.communicate(timeout=BOUND_S)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    return [
        (rank.returncode, output if rank.returncode == 0 else output + (folder / f"errors_{number}").read_text())
        for number, (rank, output) in enumerate(zip(ranks, outputs, strict=True))
    ]


def write_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
