"""The token losses of GRPO, as pure functions of tensors: log-probs, clipped surrogate, KL penalty, importance weights.

With c = the trainer's log-prob of a token, e = the engine's, r = the reference's, A = the trajectory's advantage:

    o      = e ("rollout") or c without gradient ("trainer")         loss.old_log_probs
    ratio  = exp(c - o)
    weight = min(exp(o - e), tis_cap), without gradient; 1 if off     loss.tis_cap
    kl     = k1: c - r     k2: (c - r)^2 / 2     k3: exp(r - c) - (r - c) - 1
    loss   = -weight * min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) + kl_weight * kl

Under "rollout" o = e, so the weight is 1: the ratio already corrects for the engine.

Invariants (tests/unit/test_loss.py):

1. Everything is a sum over tokens; the division by the global number of trained tokens happens once, at the end of the step.
2. Log-probs are those of the distribution sampled from: softmax(logits / temperature), in fp32.
3. Chunking and checkpointing change neither values nor gradients.
4. A log-ratio of any finite size gives finite losses and gradients.

Source: paper §2.1, §3 (the loss is built when the backward starts); Schulman 2020 (estimators).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tiderl.config.schema import LossConfig

#: Rows of logits that exist at a time: 1024 rows of a 152k vocabulary are 0.6 GB in fp32.
HEAD_CHUNK_ROWS = 1024
#: exp of a larger difference overflows, and the clipped branch would then multiply inf by a zero gradient.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The sum of the token losses (with gradient), and detached sums over tokens by metric name (fp32 scalars)."""

    total: Tensor
    sums: dict[str, Tensor]


def token_log_probs(
    hidden: Tensor,  # [num_targets, hidden_size]
    head_weight: Tensor,  # [vocab_size, hidden_size]
    targets: Tensor,  # [num_targets]
    *,
    temperature: float,
    recompute: bool,
    chunk_rows: int = HEAD_CHUNK_ROWS,
) -> Tensor:
    """Log-probs [num_targets] (fp32) of `targets` under softmax(hidden @ head_weight.T / temperature).

    `recompute`: keep no logits for the backward pass, compute them again there, chunk by chunk.
    """
    chunks = []
    for rows, ids in zip(torch.split(hidden, chunk_rows), torch.split(targets, chunk_rows), strict=True):
        if recompute and torch.is_grad_enabled():
            chunk = checkpoint(_chunk_log_probs, rows, head_weight, ids, temperature, use_reentrant=False)
        else:
            chunk = _chunk_log_probs(rows, head_weight, ids, temperature)
        chunks.append(chunk)
    return torch.cat(chunks)


def _chunk_log_probs(hidden: Tensor, head_weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
    logits = (hidden @ head_weight.T).float() / temperature  # [rows, vocab_size]
    return -F.cross_entropy(logits, targets, reduction="none")


def policy_loss(
    log_probs: Tensor,  # [num_targets], with gradient
    engine_log_probs: Tensor,  # [num_targets]
    advantages: Tensor,  # [num_targets]
    reference_log_probs: Tensor | None,  # [num_targets]; None: no KL penalty
    config: LossConfig,
) -> PolicyLoss:
    """The summed loss and its metrics, by the formulas of the module docstring."""
    current = log_probs.detach()
    old = engine_log_probs if config.old_log_probs == "rollout" else current
    ratio = _exp(log_probs - old)
    clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    if config.tis_cap > 0.0:
        surrogate = surrogate * _exp(old - engine_log_probs).clamp(max=config.tis_cap)
    losses = -surrogate
    sums = {
        "clip_low": ((ratio < 1.0 - config.clip_low) & (advantages < 0.0)).sum(),
        "clip_high": ((ratio > 1.0 + config.clip_high) & (advantages > 0.0)).sum(),
        "entropy": -current.sum(),
        "log_prob_gap": (current - engine_log_probs).abs().sum(),
    }
    if reference_log_probs is not None:
        kl = kl_estimate(log_probs, reference_log_probs, config.kl_estimator)
        losses = losses + config.kl_weight * kl
        sums["kl"] = kl.sum()
    total = losses.sum()
    sums["loss"] = total
    return PolicyLoss(total, {name: value.detach().float() for name, value in sums.items()})


def kl_estimate(log_probs: Tensor, reference_log_probs: Tensor, estimator: str) -> Tensor:
    """Per-token estimate [num_targets] of KL(policy || reference), differentiable in `log_probs`."""
    gap = log_probs - reference_log_probs
    if estimator == "k1":
        return gap
    if estimator == "k2":
        return gap.square() / 2.0
    if estimator == "k3":
        return _exp(-gap) + gap - 1.0
    raise ValueError(f"loss.kl_estimator: {estimator!r} is not one of k1, k2, k3")


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
