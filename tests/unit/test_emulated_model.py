"""Invariants of `tiderl.rl.emulated_model`."""

from __future__ import annotations

import numpy as np
import pytest

from tiderl.rl.emulated_model import WEIGHT_LENGTH, score, weights_of

IDS = np.random.default_rng(0).integers(0, 32_000, 32).tolist()
#: The largest one that the worker uses (bfloat16).
TOLERANCE = 0.3


def test_weights_depend_on_the_version_alone() -> None:
    first, again = weights_of(3), weights_of(3)
    assert first.shape == (WEIGHT_LENGTH,) and first.dtype == np.float32
    np.testing.assert_array_equal(first, again)
    # Written down once: ranks on other machines must agree.
    assert weights_of(0)[:2] == pytest.approx([0.8393564, 0.01226295])


def test_any_other_version_shows() -> None:
    scores = np.stack([score(weights_of(version), IDS) for version in range(200)])
    gaps = np.abs(scores[:, None] - scores[None]).max(axis=2)
    assert gaps[~np.eye(200, dtype=bool)].min() > TOLERANCE


def test_every_element_counts() -> None:
    weight = weights_of(1)
    for element in range(WEIGHT_LENGTH):
        changed = weight.copy()
        changed[element] += 0.2
        assert np.abs(score(changed, IDS) - score(weight, IDS)).max() > TOLERANCE


def test_token_predecessor_and_place_count() -> None:
    weight = weights_of(1)
    scores = score(weight, IDS)
    assert scores.shape == (len(IDS) - 1,) and scores.dtype == np.float32 and scores.max() < -1
    changed = [*IDS[:10], IDS[10] + 1, *IDS[11:]]
    # The token itself and the one after it.
    assert np.flatnonzero(score(weight, changed) != scores).tolist() == [9, 10]
    shifted = score(weight, IDS[1:])
    assert (shifted != scores[1:]).mean() > 0.9


def test_by_hand() -> None:
    # One element is 1: -1 - 4 * ((5 * 3 + 7 * 18 + 1 * 31) % 997) / 997, with 7 before 5 at place 1.
    weight = np.eye(WEIGHT_LENGTH, dtype=np.float32)[0]
    assert score(weight, [7, 5])[0] == pytest.approx(-1 - 4 * 172 / 997)


def test_one_token_has_no_score() -> None:
    with pytest.raises(ValueError, match="at least 2 tokens"):
        score(weights_of(0), [5])
