"""Group-relative advantages (GRPO): how much better a trajectory did than its siblings.

Invariants (tests/scheduling/test_advantages.py):

1. The advantages of a group sum to zero.
2. A group whose rewards are all equal gets zeros, never NaN.
3. With `by_std` they have unit (population) standard deviation, and scaling all rewards changes nothing.

Source: paper §2.1, `A_i = (r_i - mean(r)) / std(r)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

#: Rewards closer together than this are equal: their spread is rounding, and dividing by it would train on noise.
MIN_STD = 1e-6


def group_advantages(rewards: Sequence[float], *, by_std: bool) -> tuple[float, ...]:
    """One advantage a reward, in order. `by_std` False only subtracts the mean (Dr. GRPO)."""
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    std = math.sqrt(math.fsum(c * c for c in centred) / len(centred))
    if std < MIN_STD:
        return (0.0,) * len(rewards)
    scale = std if by_std else 1.0
    return tuple(c / scale for c in centred)
