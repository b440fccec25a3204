"""What an actor did in a training step: of every micro-batch (the cost model learns from it), and of the whole step.

Invariants (tests/unit/test_actor_worker.py):

1. The step's seconds are the sums over its micro-batches.
2. A swap is charged to the micro-batch that comes first after it: how long one takes can be read off, whatever the number that it
   was made for.

Source: paper §5.1 (all times are measured online).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from tiderl.scheduling.events import MicroBatchTrained, StepTrained
from tiderl.trainers.base import MicroBatchResult, StepResult
from tiderl.types import MicroBatch, MicroBatchId, Rank


@dataclass(slots=True)
class StepTally:
    """Of one rank and one step. Seconds are the job's."""

    rank: Rank
    step: int
    num_swaps: int = 0
    _swap_s: defaultdict[MicroBatchId, float] = field(default_factory=lambda: defaultdict(float))
    _reference_s: defaultdict[MicroBatchId, float] = field(default_factory=lambda: defaultdict(float))
    _waited_s: defaultdict[MicroBatchId, float] = field(default_factory=lambda: defaultdict(float))
    _results: list[MicroBatchResult] = field(default_factory=list)

    @property
    def num_micro_batches(self) -> int:
        """Those that are done."""
        return len(self._results)

    def swapped(self, micro_batch_id: MicroBatchId, seconds: float, *, is_new: bool) -> None:
        """The reference came to the device (`is_new`: it was not there), or left it, for this micro-batch and those after it."""
        self._swap_s[micro_batch_id] += seconds
        self.num_swaps += is_new

    def scored(self, micro_batch_id: MicroBatchId, seconds: float) -> None:
        self._reference_s[micro_batch_id] += seconds

    def waited(self, micro_batch_id: MicroBatchId, seconds: float) -> None:
        """The device had nothing to do but to wait for these log-probs."""
        self._waited_s[micro_batch_id] += seconds

    def trained(self, micro_batch: MicroBatch, result: MicroBatchResult) -> MicroBatchTrained:
        self._results.append(result)
        number = micro_batch.micro_batch_id
        return MicroBatchTrained(
            rank=self.rank,
            step=self.step,
            micro_batch_id=number,
            num_tokens=micro_batch.num_tokens,
            reference_s=self._reference_s[number],
            swap_s=self._swap_s[number],
            forward_s=result.forward_s,
            backward_s=result.backward_s,
            waited_s=self._waited_s[number],
        )

    def closed(self, result: StepResult) -> StepTrained:
        """The whole step; what was begun for micro-batches that were abandoned counts too."""
        sums: Counter[str] = Counter()
        for micro_batch in self._results:
            sums.update(micro_batch.sums)
        return StepTrained(
            step=self.step,
            rank=self.rank,
            updated=result.updated,
            abandoned=result.abandoned,
            version=result.version,
            grad_norm=result.grad_norm,
            lr=result.lr,
            num_trained_tokens=sum(r.num_trained_tokens for r in self._results),
            num_padding_tokens=sum(r.num_padding_tokens for r in self._results),
            reference_s=sum(self._reference_s.values()),
            swap_s=sum(self._swap_s.values()),
            forward_s=sum(r.forward_s for r in self._results),
            backward_s=sum(r.backward_s for r in self._results),
            waited_s=sum(self._waited_s.values()),
            optimizer_s=result.optimizer_s,
            num_swaps=self.num_swaps,
            sums=dict(sums),
            max_same_version_gap=max((r.max_same_version_gap for r in self._results), default=0.0),
        )
