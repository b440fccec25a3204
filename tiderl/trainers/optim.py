"""The update rule around AdamW: which parameters decay, the learning rate of an update, the global gradient norm.

Invariants (tests/unit/test_optim.py):

1. The learning rate is a function of the number of updates made, so a resumed run continues its schedule.
2. Weight decay acts on matrices only; biases and norm weights keep theirs.
3. The norm is that of the whole gradient, however it is sharded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tiderl.config.schema import OptimConfig


def learning_rate(config: OptimConfig, num_steps: int, version: int) -> float:
    """Learning rate of the update that turns `version` into `version + 1`, in a run of `num_steps` updates."""
    if version < config.warmup_steps:
        return config.lr * (version + 1) / config.warmup_steps
    if config.decay == "constant":
        return config.lr
    progress = min(1.0, (version - config.warmup_steps) / max(1, num_steps - config.warmup_steps))
    cosine = (1.0 + math.cos(math.pi * progress)) / 2.0
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * cosine)


def build_optimizer(parameters: Iterable[nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over sharded fp32 parameters; the learning rate is set before every update."""
    everything = list(parameters)
    groups = [
        {"params": [p for p in everything if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in everything if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )
    for parameter in everything:
        # AdamW would do this at its first update; done here, memory is known from the start and a checkpoint can be read in place.
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    return optimizer


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's shards of the gradients (views: writing to them changes the gradients)."""
    gradients = []
    for parameter in parameters:
        assert isinstance(parameter.grad, DTensor), "gradients are reduced before they are used"
        gradients.append(parameter.grad.to_local())
    return gradients


def global_norm(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> float:
    """(collective) L2 norm over the shards of all ranks. Not finite if any element of any rank isn't."""
    norms = torch.stack([torch.linalg.vector_norm(g) for g in gradients])
    total = norms.double().square().sum()
    dist.all_reduce(total, group=group)
    return float(total.sqrt())
