"""What passes cost, as measured on the newest micro-batches. A part of the core's state: it depends on the events alone.

Invariants (tests/scheduling/test_ra2p_estimates.py):

1. An estimate is the median, by tokens, of the seconds a token in the newest `WINDOW` micro-batches: half of their tokens took at
   most so long. What is far off (a first call that compiles, a machine that stalls) counts no more than what is just above.
2. A swap pair costs the median over the newest `WINDOW` steps and actors of what a pair took there: nothing where the reference
   scored without being moved (`trainer.swap`: resident).
3. A reference that was measured on Ref ranks only is taken to cost the same on the actors', and the other way round. A swap that
   was never measured is taken to cost nothing: colocated looks better than it is, is tried where that decides, and is known then.

Source: paper §5.1 ("measured online").
"""

from __future__ import annotations

from collections import deque

from tiderl.scheduling.events import MicroBatchTrained, ReferenceScored, StepTrained
from tiderl.scheduling.ra2p_costs import PassCosts

#: So many of the newest measurements count.
WINDOW = 64


class MovingMedian:
    """The weighted median of the last `WINDOW` values."""

    def __init__(self) -> None:
        self._newest: deque[tuple[float, int]] = deque(maxlen=WINDOW)

    def add(self, value: float, weight: int) -> None:
        self._newest.append((value, weight))

    @property
    def value(self) -> float | None:
        """The smallest value that, with those below it, holds half of the weight; None before the first."""
        left = sum(weight for _, weight in self._newest)
        total = left
        for value, weight in sorted(self._newest, reverse=True):
            left -= weight
            if 2 * left < total:
                return value
        return None


class CostEstimates:
    """Seconds a token of every pass, and of a swap pair."""

    def __init__(self) -> None:
        self._forward_s = MovingMedian()
        self._backward_s = MovingMedian()
        self._colocated_reference_s = MovingMedian()
        self._decoupled_reference_s = MovingMedian()
        self._swap_s = MovingMedian()

    def trained(self, event: MicroBatchTrained) -> None:
        _add(self._forward_s, event.forward_s, event.num_tokens)
        _add(self._backward_s, event.backward_s, event.num_tokens)
        if event.reference_s > 0:  # else somebody else scored it, or nobody
            _add(self._colocated_reference_s, event.reference_s, event.num_tokens)

    def scored(self, event: ReferenceScored) -> None:
        _add(self._decoupled_reference_s, event.reference_s, event.num_tokens)

    def stepped(self, event: StepTrained) -> None:
        if event.reference_s > 0:  # else the reference was not used on this rank
            self._swap_s.add(event.swap_s / max(1, event.num_swaps), 1)

    def costs(self, *, use_reference: bool) -> PassCosts | None:
        """None before everything was measured that a step needs."""
        forward_s, backward_s = self._forward_s.value, self._backward_s.value
        if forward_s is None or backward_s is None:
            return None
        if not use_reference:
            return PassCosts(0.0, 0.0, forward_s, backward_s, 0.0)
        colocated_s, decoupled_s = self._colocated_reference_s.value, self._decoupled_reference_s.value
        colocated_s = decoupled_s if colocated_s is None else colocated_s
        decoupled_s = colocated_s if decoupled_s is None else decoupled_s
        if colocated_s is None or decoupled_s is None:
            return None
        return PassCosts(colocated_s, decoupled_s, forward_s, backward_s, self._swap_s.value or 0.0)


def _add(estimate: MovingMedian, seconds: float, num_tokens: int) -> None:
    estimate.add(seconds / num_tokens, num_tokens)
