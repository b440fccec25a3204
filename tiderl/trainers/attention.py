"""Causal attention over trajectories that lie packed in one sequence, without a mask and without wasted pairs.

Registered with transformers as the attention implementation `PACKED_ATTENTION`. The segment lengths reach it as the
keyword `lengths` of the model's forward. Each segment is one call of PyTorch's fused attention with `is_causal=True`,
which skips the blocks above the diagonal and reads grouped key-value heads in place: so the work is that of the
trajectories alone. A padded batch or a block mask computes all masked pairs too.

Invariants (tests/conformance/test_trainer.py): the outputs of a packed forward equal those of one forward a trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PACKED_ATTENTION = "tiderl_packed"


def packed_attention(
    module: nn.Module,
    query: Tensor,  # [1, num_heads, num_inputs, head_size]
    key: Tensor,  # [1, num_kv_heads, num_inputs, head_size]
    value: Tensor,  # [1, num_kv_heads, num_inputs, head_size]
    attention_mask: Tensor | None,
    *,
    lengths: Sequence[int],
    scaling: float,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attention outputs [1, num_inputs, num_heads, head_size]; `lengths` are positive and sum to num_inputs."""
    assert attention_mask is None, "packed attention takes segment lengths, not a mask"
    grouped = query.shape[1] != key.shape[1]
    sizes = list(lengths)
    outputs = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
        for q, k, v in zip(query.split(sizes, 2), key.split(sizes, 2), value.split(sizes, 2), strict=True)
    ]
    # [1, num_heads, length, head_size] each; joined along tokens after the transpose, so that one copy does for both.
    return torch.cat([out.transpose(1, 2) for out in outputs], dim=1), None


def register_packed_attention() -> None:
    """Make `PACKED_ATTENTION` known to transformers. No mask function is registered, so no mask is ever built."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
