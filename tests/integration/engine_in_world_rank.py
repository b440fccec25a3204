"""One rank of the world of `test_engine_in_world.py`: a program, started twice as torchrun would.

Rank 1 builds engines, rank 0 never does; both go through the same host collectives. Rank 1 also checks what an engine leaves
behind in its process. A check that fails raises, and the rank ends with a code other than 0.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch._dynamo
import torch.distributed as dist
from transformers import Qwen2ForCausalLM

from tiderl.config.schema import Config, EngineConfig, ModelConfig
from tiderl.engines.base import Generation, Sampling
from tiderl.engines.vllm import VllmEngine
from tiderl.engines.vllm_world import world_of_one
from tiderl.types import WeightVersion

MAX_CONTEXT = 128
NUM_REQUESTS, NUM_NEW_TOKENS = 4, 100


def agree(label: str) -> None:
    """A host collective and a new host group, with a value that only the true world gives."""
    assert dist.get_world_size() == 2
    assert dist.get_rank() == int(os.environ["RANK"])
    value = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(value)
    assert value.item() == 3, (label, value)
    group = dist.new_group([0, 1])
    dist.all_reduce(value, group=group)
    assert value.item() == 6, (label, value)
    print(f"rank {dist.get_rank()}: {label}", flush=True)


def new_weights(folder: Path) -> list[tuple[str, torch.Tensor]]:
    """The folder's weights, the same on both ranks, then changed by what rank 0 alone knows."""
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1 if dist.get_rank() == 0 else float("nan"))
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def host_state() -> dict[str, object]:
    """What an engine must not change, in comparable form."""
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": np.random.get_state(legacy=False)["state"]["key"].tobytes(),
        "python": random.getstate(),
        "environment": {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")},
        "compile": torch._dynamo.config.disable,
        "attributes": (torch.set_num_threads, torch.Event, torch.cuda.Stream, torch.accelerator.synchronize),
        "group": dist.group.WORLD,
    }


def unchanged_since(before: dict[str, object]) -> None:
    after = host_state()
    changed = {name: (before[name], after[name]) for name in after if after[name] != before[name]}
    assert not changed, changed


def rank_0(folder: Path) -> None:
    agree("before")
    agree("while the other builds")
    for _, tensor in new_weights(folder):
        dist.broadcast(tensor, src=0)
    agree("after the first engine")
    agree("after the second engine")


def rank_1(folder: Path) -> None:
    agree("before")
    world_of_one_is_for_its_thread_only()
    config = Config(
        model=ModelConfig(path=str(folder), dtype="float32", max_context_tokens=MAX_CONTEXT),
        engine=EngineConfig(kv_cache_tokens=16 * MAX_CONTEXT),
    )
    before = host_state()
    engine = VllmEngine(config)
    building = threading.Thread(target=engine.start)
    building.start()
    agree("while this one builds")
    building.join(300)
    unchanged_since(before)
    print(asyncio.run(sync_in_flight(engine, folder)))
    engine.shutdown()
    unchanged_since(before)
    agree("after the first engine")
    second = VllmEngine(config)
    second.start()
    assert asyncio.run(generate(second, 0, [3, 4, 5])).finish == "length"
    second.shutdown()
    agree("after the second engine")


def world_of_one_is_for_its_thread_only() -> None:
    seen: list[tuple[int, int]] = []

    def look() -> None:
        seen.append((dist.get_rank(), dist.get_world_size()))

    with world_of_one():
        look()
        dist.destroy_process_group()  # must not reach the host's group
        other = threading.Thread(target=look)
        other.start()
        other.join(60)
        alone = dist.new_group([0])
        value = torch.ones(1)
        dist.all_reduce(value, group=alone)
        dist.destroy_process_group(alone)
    look()
    assert value.item() == 1
    assert seen == [(0, 1), (1, 2), (1, 2)], seen


async def generate(engine: VllmEngine, number: int, prompt: list[int]) -> Generation:
    return await engine.generate(f"r{number}", prompt, Sampling(1.0, NUM_NEW_TOKENS, ()))


async def sync_in_flight(engine: VllmEngine, folder: Path) -> str:
    """Receive rank 0's weights on the device thread while requests are in flight, and check every token against them."""
    prompts = [[3 + number, 4, 5] for number in range(NUM_REQUESTS)]
    tasks = [asyncio.create_task(generate(engine, number, prompt)) for number, prompt in enumerate(prompts)]
    while await engine.submit(lambda: engine.stats().total_generated_tokens) < NUM_REQUESTS * 5:
        pass
    weights = new_weights(folder)  # not yet known to this rank

    def receive() -> None:
        for _, tensor in weights:
            dist.broadcast(tensor, src=0)
        engine.update_weights(weights, WeightVersion(1))

    await engine.submit(receive)
    generations = await asyncio.gather(*tasks)
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(dict(weights), strict=False)
    worst, num_new = 0.0, 0
    for prompt, generation in zip(prompts, generations, strict=True):
        assert generation.weight_versions[0] == 0
        new = generation.weight_versions == 1
        ids = torch.tensor([[*prompt, *generation.token_ids.tolist()]])
        with torch.no_grad():
            log_softmax = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1], -1)
        expected = log_softmax.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
        worst = max(worst, float(np.abs(expected - generation.log_probs)[new].max()))
        num_new += int(new.sum())
    assert num_new > 0
    assert worst < 1e-4, worst
    return f"rank 1: {num_new} tokens under the broadcast weights, worst gap {worst:.1e}"


if __name__ == "__main__":
    dist.init_process_group(
        "gloo",
        init_method=f"file://{sys.argv[2]}",
        rank=int(os.environ["RANK"]),
        world_size=2,
        timeout=timedelta(seconds=120),
    )
    (rank_0 if dist.get_rank() == 0 else rank_1)(Path(sys.argv[1]))
    dist.destroy_process_group()
    print("done", flush=True)
