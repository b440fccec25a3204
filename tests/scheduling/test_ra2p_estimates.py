"""Estimates of pass costs: medians against NumPy's, and the three sentences of `scheduling.ra2p_estimates`."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tiderl.scheduling.events import MicroBatchTrained, ReferenceScored, StepTrained
from tiderl.scheduling.ra2p_costs import PassCosts
from tiderl.scheduling.ra2p_estimates import WINDOW, CostEstimates, MovingMedian
from tiderl.types import MicroBatchId, Rank, WeightVersion

SAMPLES = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=2 * WINDOW)


def trained(
    num_tokens: int = 10, reference_s: float = 0.0, forward_s: float = 10.0, backward_s: float = 20.0
) -> MicroBatchTrained:
    return MicroBatchTrained(
        rank=Rank(0),
        step=0,
        micro_batch_id=MicroBatchId(0),
        num_tokens=num_tokens,
        reference_s=reference_s,
        swap_s=0.0,
        forward_s=forward_s,
        backward_s=backward_s,
        waited_s=0.0,
    )


def scored(num_tokens: int, reference_s: float) -> ReferenceScored:
    return ReferenceScored(Rank(1), 0, MicroBatchId(0), num_tokens, reference_s)


def stepped(*, reference_s: float, swap_s: float, num_swaps: int) -> StepTrained:
    return StepTrained(
        rank=Rank(0),
        step=0,
        version=WeightVersion(1),
        updated=True,
        abandoned=False,
        grad_norm=1.0,
        lr=1.0,
        num_trained_tokens=10,
        num_padding_tokens=0,
        reference_s=reference_s,
        swap_s=swap_s,
        forward_s=1.0,
        backward_s=1.0,
        waited_s=0.0,
        optimizer_s=1.0,
        num_swaps=num_swaps,
        sums={},
        max_same_version_gap=0.0,
    )


# --- medians ----------------------------------------------------------------------------------------------------------


@given(SAMPLES)
def test_invariant_1_the_median_by_weight_is_numpys(samples: list[tuple[int, int]]) -> None:
    seen = MovingMedian()
    for value, weight in samples:
        seen.add(value, weight)
    values, weights = zip(*samples[-WINDOW:], strict=True)
    assert seen.value == np.quantile(np.repeat(values, weights), 0.5, method="inverted_cdf")


@given(st.lists(st.integers(0, 50), min_size=1, max_size=2 * WINDOW).filter(lambda v: min(len(v), WINDOW) % 2 == 1))
def test_invariant_1_of_an_odd_number_of_equals_it_is_the_plain_median(values: list[int]) -> None:
    seen = MovingMedian()
    for value in values:
        seen.add(value, 7)
    assert seen.value == np.median(values[-WINDOW:])


def test_invariant_1_by_hand() -> None:
    assert MovingMedian().value is None
    seen = MovingMedian()
    seen.add(3.0, 4)
    assert seen.value == 3.0
    seen.add(1.0, 4)  # half of the weight is at most 1
    assert seen.value == 1.0
    seen.add(2.0, 1)  # 4 of 9 are not half, 5 are more
    assert seen.value == 2.0
    seen.add(9.0, 100)  # most tokens took so long, whatever the others did
    assert seen.value == 9.0


def test_invariant_1_one_outlier_counts_for_little() -> None:
    estimates = CostEstimates()
    estimates.trained(trained(forward_s=1000.0))
    for _ in range(2):
        estimates.trained(trained(forward_s=10.0))
    costs = estimates.costs(use_reference=False)
    assert costs is not None and costs.forward_s == 1.0


def test_estimates_are_per_token_so_that_the_size_does_not_matter() -> None:
    estimates = CostEstimates()
    estimates.trained(trained(num_tokens=100, reference_s=50.0, forward_s=100.0, backward_s=200.0))
    estimates.trained(trained(num_tokens=10, reference_s=5.0, forward_s=10.0, backward_s=20.0))
    estimates.scored(scored(40, 10.0))
    assert estimates.costs(use_reference=True) == PassCosts(0.5, 0.25, 1.0, 2.0, 0.0)


def test_old_measurements_are_forgotten() -> None:
    estimates = CostEstimates()
    for _ in range(WINDOW):
        estimates.trained(trained(forward_s=10.0))
    for _ in range(WINDOW // 2):
        estimates.trained(trained(forward_s=30.0))
    costs = estimates.costs(use_reference=False)
    assert costs is not None and costs.forward_s == 1.0
    estimates.trained(trained(forward_s=30.0))
    costs = estimates.costs(use_reference=False)
    assert costs is not None and costs.forward_s == 3.0


# --- swaps ------------------------------------------------------------------------------------------------------------


def test_invariant_2_a_pair_is_the_median_over_steps_of_what_a_pair_took() -> None:
    estimates = CostEstimates()
    estimates.trained(trained(reference_s=5.0))
    for swap_s, num_swaps in ((12.0, 2), (9.0, 1), (20.0, 4)):  # pairs of 6, 9, 5
        estimates.stepped(stepped(reference_s=5.0, swap_s=swap_s, num_swaps=num_swaps))
    costs = estimates.costs(use_reference=True)
    assert costs is not None and costs.swap_s == 6.0


def test_invariant_2_a_resident_reference_costs_nothing() -> None:
    estimates = CostEstimates()
    estimates.trained(trained(reference_s=5.0))
    estimates.stepped(stepped(reference_s=5.0, swap_s=12.0, num_swaps=1))  # how it got there
    for _ in range(2):
        estimates.stepped(stepped(reference_s=5.0, swap_s=0.0, num_swaps=0))
    costs = estimates.costs(use_reference=True)
    assert costs is not None and costs.swap_s == 0.0


def test_invariant_2_steps_that_others_scored_say_nothing_of_swaps() -> None:
    estimates = CostEstimates()
    estimates.trained(trained(reference_s=5.0))
    estimates.stepped(stepped(reference_s=5.0, swap_s=12.0, num_swaps=2))
    for _ in range(3):
        estimates.stepped(stepped(reference_s=0.0, swap_s=0.0, num_swaps=0))
    costs = estimates.costs(use_reference=True)
    assert costs is not None and costs.swap_s == 6.0


# --- what is known ----------------------------------------------------------------------------------------------------


def test_nothing_is_known_before_every_pass_was_measured() -> None:
    estimates = CostEstimates()
    assert estimates.costs(use_reference=False) is None
    estimates.scored(scored(10, 5.0))
    assert estimates.costs(use_reference=True) is None
    estimates.trained(trained())
    assert estimates.costs(use_reference=True) is not None
    estimates = CostEstimates()
    estimates.trained(trained())
    assert estimates.costs(use_reference=True) is None
    assert estimates.costs(use_reference=False) == PassCosts(0.0, 0.0, 1.0, 2.0, 0.0)


def test_invariant_3_one_kind_of_rank_stands_in_for_the_other_until_it_is_measured() -> None:
    estimates = CostEstimates()
    estimates.trained(trained())
    estimates.scored(scored(10, 5.0))
    assert estimates.costs(use_reference=True) == PassCosts(0.5, 0.5, 1.0, 2.0, 0.0)
    estimates.trained(trained(reference_s=8.0))
    assert estimates.costs(use_reference=True) == PassCosts(0.8, 0.5, 1.0, 2.0, 0.0)
    estimates = CostEstimates()
    estimates.trained(trained(reference_s=8.0))
    assert estimates.costs(use_reference=True) == PassCosts(0.8, 0.8, 1.0, 2.0, 0.0)
