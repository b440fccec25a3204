"""What the tests of engines share: a tiny random Qwen2 on disk, and the same model in transformers as the other implementation."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tiderl.config.schema import Config, EngineConfig, ModelConfig
from tiderl.engines.base import EngineStats, Generation, Sampling
from tiderl.engines.vllm import VllmEngine
from tiderl.types import WeightVersion

VOCAB, MAX_CONTEXT, BLOCK = 128, 128, 32
#: float32 on both sides; measured 1e-5.
TOLERANCE = 1e-4
#: Far above what anything here takes: a test that reaches it has hung.
BOUND_S = 120.0
GREEDY = Sampling(temperature=0.0, max_new_tokens=16, stop_token_ids=())
FREE = Sampling(temperature=1.0, max_new_tokens=100, stop_token_ids=())

#: vLLM's kernel registry touches every attribute of torch.distributed.
VLLM_WARNING = "ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning"


class Reference:
    """The model in transformers, with weights that depend on a seed alone."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
        randomize(self.model, seed)

    def weights(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, parameter.detach().clone()) for name, parameter in self.model.named_parameters()]

    @torch.no_grad()
    def log_softmax(self, token_ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
        """[num_tokens, VOCAB]"""
        return torch.log_softmax(self.model(torch.tensor([list(token_ids)])).logits[0] / temperature, -1)

    def log_probs(self, token_ids: Sequence[int], temperature: float = 1.0) -> npt.NDArray[np.float32]:
        """[num_tokens - 1]: of ids 1.. given those before."""
        of_next = self.log_softmax(token_ids, temperature)[:-1]
        gathered: npt.NDArray[np.float32] = of_next.gather(1, torch.tensor(list(token_ids)[1:])[:, None])[:, 0].numpy()
        return gathered

    def gaps(self, prompt: Sequence[int], generation: Generation, temperature: float = 1.0) -> npt.NDArray[np.float32]:
        """[num_new_tokens]: |engine - transformers| of the generated tokens' log-probs."""
        ours = self.log_probs([*prompt, *generation.token_ids.tolist()], temperature)[len(prompt) - 1 :]
        return np.abs(ours - generation.log_probs)

    def greedy(self, prompt: Sequence[int], num_new: int) -> list[int]:
        ids = list(prompt)
        for _ in range(num_new):
            ids.append(int(self.log_softmax(ids)[-1].argmax()))
        return ids[len(prompt) :]


def randomize(model: Qwen2ForCausalLM, seed: int) -> None:
    """Weights large enough that the distributions are far from uniform and depend on the whole context."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if name.endswith("norm.weight") else 0.15 * noise)


def write_model(folder: Path, *, tie: bool, max_context: int = MAX_CONTEXT) -> Path:
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,  # of 32: vLLM's CPU attention has no kernel for heads of 16
        num_key_value_heads=1,
        max_position_embeddings=max_context,
        tie_word_embeddings=tie,
    )
    model = Qwen2ForCausalLM(config)
    randomize(model, 0)
    model.save_pretrained(folder)
    return folder


def config_of(folder: Path, kv_cache_tokens: int, *, max_context: int = MAX_CONTEXT, max_running: int = 64) -> Config:
    return Config(
        model=ModelConfig(path=str(folder), dtype="float32", max_context_tokens=max_context),
        engine=EngineConfig(kv_cache_tokens=kv_cache_tokens, block_size=BLOCK, max_running=max_running),
    )


def random_ids(seed: int, num_tokens: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, VOCAB, num_tokens).tolist()
    return ids


def difference(before: EngineStats, after: EngineStats) -> dict[str, int]:
    """What the totals grew by."""
    return {
        name: getattr(after, name) - getattr(before, name)
        for name in ("total_generated_tokens", "total_prefilled_tokens", "total_cached_tokens", "total_preemptions")
    }


async def load(engine: VllmEngine, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
    await engine.submit(lambda: engine.update_weights(weights, WeightVersion(version)))


async def in_flight(engine: VllmEngine, num_tokens: int) -> None:
    """Until the engine has generated so many more tokens (seen between two steps)."""
    goal = engine.stats().total_generated_tokens + num_tokens
    async with asyncio.timeout(BOUND_S):
        while await engine.submit(lambda: engine.stats().total_generated_tokens) < goal:
            pass
