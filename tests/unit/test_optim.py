"""The learning rate by hand, the decay by AdamW's formula, the norm by definition."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tiderl.config.schema import OptimConfig
from tiderl.trainers.optim import build_optimizer, global_norm, learning_rate


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_warm_up_then_constant() -> None:
    config = OptimConfig(lr=8.0, warmup_steps=4)
    assert [learning_rate(config, 100, v) for v in range(6)] == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_warm_up_then_cosine() -> None:
    """Six updates after two of warm-up: a third of the way is cos(60 degrees) = 1/2, so 3/4 of the way down is left."""
    config = OptimConfig(lr=10.0, warmup_steps=2, decay="cosine", min_lr_ratio=0.2)
    rates = [learning_rate(config, 8, v) for v in range(10)]
    assert rates[:3] == [5.0, 10.0, 10.0]
    assert rates[4] == pytest.approx(10.0 * (0.2 + 0.8 * 0.75))
    assert rates[5] == pytest.approx(10.0 * (0.2 + 0.8 * 0.5))
    assert rates[8] == rates[9] == pytest.approx(2.0)


def test_no_schedule_divides_by_zero() -> None:
    assert learning_rate(OptimConfig(lr=1.0, decay="cosine"), 0, 0) == 1.0
    assert learning_rate(OptimConfig(lr=1.0, decay="cosine", warmup_steps=5), 3, 5) == 1.0


def test_decay_acts_on_matrices_only() -> None:
    """With zero gradients AdamW only decays: by lr * weight_decay = 0.05 of the value."""
    matrix, vector = nn.Parameter(torch.full((2, 3), 4.0)), nn.Parameter(torch.full((3,), 4.0))
    optimizer = build_optimizer([matrix, vector], OptimConfig(lr=0.1, weight_decay=0.5))
    matrix.grad, vector.grad = torch.zeros(2, 3), torch.zeros(3)
    optimizer.step()
    torch.testing.assert_close(matrix.detach(), torch.full((2, 3), 3.8))
    torch.testing.assert_close(vector.detach(), torch.full((3,), 4.0))


def test_moments_made_at_the_start_are_those_that_adamw_would_make() -> None:
    mine, plain = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    config = OptimConfig(lr=0.1)
    optimizers = [
        build_optimizer([mine], config),
        torch.optim.AdamW([plain], lr=0.1, betas=config.betas, eps=config.eps, weight_decay=0.0, fused=True),
    ]
    for parameter, optimizer in zip((mine, plain), optimizers, strict=True):
        parameter.grad = torch.tensor([[1.0, -2.0], [0.5, 0.0]])
        optimizer.step()
    assert optimizers[0].state[mine].keys() == optimizers[1].state[plain].keys()
    for name, value in optimizers[1].state[plain].items():
        torch.testing.assert_close(optimizers[0].state[mine][name], value)
    torch.testing.assert_close(mine, plain)


def test_the_norm_is_over_all_elements(group: dist.ProcessGroup) -> None:
    """2-3-6-7: sqrt(4 + 9 + 36) = 7. An empty shard adds nothing."""
    gradients = [torch.tensor([2.0, -3.0]), torch.tensor([[6.0]]), torch.zeros(0, 4)]
    assert global_norm(gradients, group) == pytest.approx(7.0, rel=1e-7)
    assert global_norm([torch.tensor([float("inf")])], group) == float("inf")
    assert global_norm([torch.tensor([float("nan"), 1.0])], group) != global_norm([torch.tensor([1.0])], group)
