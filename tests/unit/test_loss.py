"""The losses against values worked out by hand, and against the plain definitions in double precision."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiderl.config.schema import LossConfig
from tiderl.rl.loss import kl_estimate, policy_loss, token_log_probs

LOG_2 = math.log(2.0)


def one_token(
    config: LossConfig, *, current: float, engine: float, advantage: float, reference: float | None = None
) -> tuple[float, float, dict[str, float]]:
    """Loss, its derivative by the current log-prob, and the metric sums of a single token."""
    log_probs = torch.tensor([current], requires_grad=True)
    loss = policy_loss(
        log_probs,
        torch.tensor([engine]),
        torch.tensor([advantage]),
        None if reference is None else torch.tensor([reference]),
        config,
    )
    (gradient,) = torch.autograd.grad(loss.total, log_probs)
    return loss.total.item(), gradient.item(), {name: float(value) for name, value in loss.sums.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clip_low", "clip_high"),
    [
        (1.0, 2.0, -2.0, -2.0, 0, 0),
        (1.2, 2.0, -2.4, -2.4, 0, 0),  # inside 0.8 .. 1.3: -ratio * A, whose derivative by the log-prob is itself
        (1.5, 2.0, -2.6, 0.0, 0, 1),  # above, and better still not rewarded: -1.3 * 2
        (1.5, -2.0, 3.0, 3.0, 0, 0),  # above, but worse: the minimum takes the unclipped 1.5 * -2
        (0.5, -2.0, 1.6, 0.0, 1, 0),  # below, and already pushed down: -(0.8 * -2)
        (0.5, 2.0, -1.0, -1.0, 0, 0),  # below, but wanted: unclipped
    ],
)
def test_clipping(ratio: float, advantage: float, loss: float, gradient: float, clip_low: int, clip_high: int) -> None:
    config = LossConfig(clip_low=0.2, clip_high=0.3)
    got, slope, sums = one_token(config, current=-1.0 + math.log(ratio), engine=-1.0, advantage=advantage)
    assert got == pytest.approx(loss, rel=1e-6)
    assert slope == pytest.approx(gradient, rel=1e-6)
    assert (sums["clip_low"], sums["clip_high"]) == (clip_low, clip_high)


def test_with_the_trainers_own_log_probs_the_ratio_is_one_but_has_a_gradient() -> None:
    config = LossConfig(old_log_probs="trainer")
    loss, gradient, sums = one_token(config, current=-1.0, engine=-1.0 - LOG_2, advantage=3.0)
    assert (loss, gradient) == (-3.0, -3.0)
    assert sums["clip_high"] == 0.0


@pytest.mark.parametrize(("gap", "weight"), [(LOG_2, 1.5), (-LOG_2, 0.5)])
def test_importance_weights_are_capped_from_above_only(gap: float, weight: float) -> None:
    """exp(trainer - engine) is 2 and 1/2; the cap is 1.5. The weight itself has no gradient."""
    config = LossConfig(old_log_probs="trainer", tis_cap=1.5)
    loss, gradient, _ = one_token(config, current=-1.0, engine=-1.0 - gap, advantage=3.0)
    assert loss == pytest.approx(-3.0 * weight, rel=1e-6)
    assert gradient == pytest.approx(-3.0 * weight, rel=1e-6)


def test_importance_weights_are_one_where_the_ratio_already_is_to_the_engine() -> None:
    plain = one_token(LossConfig(), current=-1.0, engine=-1.1, advantage=1.0)
    assert one_token(LossConfig(tis_cap=2.0), current=-1.0, engine=-1.1, advantage=1.0) == plain


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        ("k1", -LOG_2, 1.0),
        ("k2", LOG_2**2 / 2, -LOG_2),
        ("k3", 2.0 - LOG_2 - 1.0, 1.0 - 2.0),  # exp(r - c) = 2; derivative 1 - exp(r - c)
    ],
)
def test_kl_estimators(estimator: str, value: float, slope: float) -> None:
    """The policy gives the token half of the reference's probability: c - r = -log 2."""
    current = torch.tensor([-1.0 - LOG_2], dtype=torch.float64, requires_grad=True)
    estimate = kl_estimate(current, torch.tensor([-1.0], dtype=torch.float64), estimator)
    (gradient,) = torch.autograd.grad(estimate.sum(), current)
    assert estimate.item() == pytest.approx(value, rel=1e-12)
    assert gradient.item() == pytest.approx(slope, rel=1e-12)


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


def test_k1_and_k3_are_unbiased() -> None:
    """Their means under the policy are the exact divergence of two given distributions."""
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    exact = float((policy * (policy / reference).log()).sum())
    for estimator in ("k1", "k3"):
        estimates = kl_estimate(policy.log(), reference.log(), estimator)
        assert float((policy * estimates).sum()) == pytest.approx(exact, rel=1e-12)


def test_the_penalty_is_weighted_and_counted() -> None:
    config = LossConfig(kl_weight=0.5, kl_estimator="k2")
    loss, gradient, sums = one_token(config, current=-1.0, engine=-1.0, advantage=0.0, reference=-3.0)
    assert (loss, gradient, sums["kl"]) == (1.0, 1.0, 2.0)


def test_sums_are_over_tokens() -> None:
    log_probs = torch.tensor([-1.0, -2.0, -3.0])
    engine = torch.tensor([-1.5, -2.0, -2.75])
    sums = policy_loss(log_probs, engine, torch.tensor([1.0, 1.0, -1.0]), None, LossConfig(clip_high=9.0)).sums
    assert float(sums["entropy"]) == 6.0
    assert float(sums["log_prob_gap"]) == 0.75
    assert float(sums["loss"]) == pytest.approx(-math.exp(0.5) - 1.0 + 0.8, rel=1e-6)  # exp(-0.25) < 0.8
    assert float(sums["clip_low"]) == 1.0
    assert "kl" not in sums


@given(st.floats(-1e4, 0.0), st.floats(-1e4, 0.0), st.floats(-1e4, 0.0), st.sampled_from([-1.0, 1.0]))
def test_any_finite_gap_gives_finite_losses_and_gradients(
    current: float, engine: float, reference: float, advantage: float
) -> None:
    for old in ("rollout", "trainer"):
        config = LossConfig(kl_weight=0.1, old_log_probs=old, tis_cap=2.0)
        loss, gradient, sums = one_token(
            config, current=current, engine=engine, advantage=advantage, reference=reference
        )
        assert math.isfinite(loss)
        assert math.isfinite(gradient)
        assert all(math.isfinite(value) for value in sums.values())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
def test_log_probs_and_their_gradients_do_not_depend_on_chunks(recompute: bool, chunk_rows: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 11, (7,))
    factors = torch.randn(7)
    wanted = torch.log_softmax(hidden @ weight.T / 0.7, dim=-1)[torch.arange(7), targets]
    wanted_gradients = torch.autograd.grad((wanted * factors).sum(), (hidden, weight))

    got = token_log_probs(hidden, weight, targets, temperature=0.7, recompute=recompute, chunk_rows=chunk_rows)
    gradients = torch.autograd.grad((got * factors).sum(), (hidden, weight))
    assert got.dtype is torch.float32
    torch.testing.assert_close(got, wanted.float(), rtol=1e-5, atol=1e-6)
    for mine, plain in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-6)


def test_recomputing_keeps_no_logits() -> None:
    """What autograd holds between forward and backward: the inputs, not [num_targets, vocab_size]."""
    hidden, weight = torch.randn(64, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True)
    largest = {}
    for recompute in (False, True):
        sizes: list[int] = []

        def note(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            token_log_probs(hidden, weight, torch.zeros(64, dtype=torch.int64), temperature=1.0, recompute=recompute)
        largest[recompute] = max(sizes, default=0)
    assert largest[False] == 64 * 1000
    assert largest[True] <= 1000 * 8
