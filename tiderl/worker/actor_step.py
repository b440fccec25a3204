"""One training step on one actor: what its device does next, given what has arrived. No device, no clock, no waiting in here.

A micro-batch waits, then goes forward (its graph is *in flight*), then backward, for which the reference's log-probs must be there.
Where they come from is the step's `Pipelining`: nowhere, from this rank, or from a Ref rank.

Invariants (tests/unit/test_actor_step.py):

1. Micro-batches go forward and backward in the order of assignment, each once, in whatever order log-probs arrive.
2. Where there is a reference, no backward comes before the micro-batch's log-probs, and it gets the very objects that were
   handed in: colocated, nothing is copied between reference and actor.
3. Decoupled, forwards go on without log-probs while those in flight are within `window_tokens`; a single one always may.
4. Colocated, one scoring takes whatever waits, up to `max_scored_tokens`, and the next comes when all of that has been trained on;
   alternating, a scoring takes one micro-batch.
5. After `finish_colocated` the step waits for no other rank, and what other ranks still send is ignored.
6. After `abandon` there is nothing left to do but to close the step.

Source: paper §5.1 (decoupled streaming, ready-batch aggregation).
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tiderl.errors import WireError
from tiderl.trainers.base import InFlight, LogProbs
from tiderl.types import MicroBatch, MicroBatchId, Pipelining

#: Most tokens that one scoring takes: their log-probs (4 bytes each) are held until they are trained on.
MAX_SCORED_TOKENS = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Score:
    """Bring the reference to the device and compute the log-probs of these."""

    micro_batches: tuple[MicroBatch, ...]


@dataclass(frozen=True, slots=True)
class Forward:
    micro_batch: MicroBatch


@dataclass(frozen=True, slots=True)
class Backward:
    """`log_probs`: one a trajectory, None where there is no reference."""

    micro_batch: MicroBatch
    in_flight: InFlight
    log_probs: Sequence[LogProbs] | None


@dataclass(frozen=True, slots=True)
class AwaitLogProbs:
    """Nothing to do before another rank has sent the log-probs of this micro-batch, or there is room for another forward."""

    micro_batch_id: MicroBatchId


class Idle(enum.Enum):
    #: Nothing to do before something is assigned, or the step is closed.
    AWAIT_ORDERS = "await orders"
    #: All is done, or given up: leave the step.
    CLOSE = "close"


Next: TypeAlias = Score | Forward | Backward | AwaitLogProbs | Idle


class ActorStep:
    """See the module docstring. `next` says what to do and changes nothing; the caller does it and says so."""

    def __init__(
        self, number: int, pipelining: Pipelining, *, window_tokens: int, max_scored_tokens: int = MAX_SCORED_TOKENS
    ) -> None:
        self.number = number
        self.is_closed = False
        self.is_abandoned = False
        self._has_reference = pipelining is not Pipelining.NONE
        self._scores_itself = pipelining in (Pipelining.COLOCATED, Pipelining.ALTERNATING)
        self._window_tokens = window_tokens
        #: A single micro-batch is always taken, so that 0 means "one at a time".
        self._max_scored_tokens = 0 if pipelining is Pipelining.ALTERNATING else max_scored_tokens
        self._waiting: deque[MicroBatch] = deque()
        self._in_flight: deque[tuple[MicroBatch, InFlight]] = deque()
        self._log_probs: dict[MicroBatchId, Sequence[LogProbs]] = {}

    # --- what arrives ---------------------------------------------------------------------------------------------

    def add(self, micro_batch: MicroBatch) -> None:
        assert not self.is_closed, f"micro-batch {micro_batch.micro_batch_id} was assigned to a closed step"
        if not self.is_abandoned:
            self._waiting.append(micro_batch)

    def deliver(self, micro_batch_id: MicroBatchId, log_probs: Sequence[LogProbs]) -> None:
        """From another rank; may come before the micro-batch itself."""
        if self._has_reference and not self._scores_itself and not self.is_abandoned:
            self._log_probs[micro_batch_id] = log_probs

    def finish_colocated(self) -> None:
        """Whatever has no log-probs by now, or is still to come, is scored here."""
        self._scores_itself = self._has_reference

    def abandon(self) -> None:
        """Give up what is left of the step, its graphs included."""
        self.is_abandoned = True
        self._waiting.clear()
        self._in_flight.clear()
        self._log_probs.clear()

    def close(self) -> None:
        """Nothing more will be assigned."""
        self.is_closed = True

    # --- what to do -----------------------------------------------------------------------------------------------

    def next(self) -> Next:
        """Raises `WireError` where another rank's log-probs do not fit their micro-batch."""
        if self._in_flight:
            micro_batch, in_flight = self._in_flight[0]
            if not self._lacks_log_probs(micro_batch):
                return Backward(micro_batch, in_flight, self._fitting_log_probs(micro_batch))
        if self._scores_itself and (unscored := self._to_score()):
            return Score(unscored)
        if self._waiting and self._may_forward(self._waiting[0]):
            return Forward(self._waiting[0])
        if self._in_flight:
            return AwaitLogProbs(self._in_flight[0][0].micro_batch_id)
        return Idle.CLOSE if self.is_closed else Idle.AWAIT_ORDERS

    # --- what was done --------------------------------------------------------------------------------------------

    def scored(self, log_probs: Mapping[MicroBatchId, Sequence[LogProbs]]) -> None:
        """Of a `Score`, or of a part of it where the step was abandoned meanwhile."""
        if not self.is_abandoned:
            self._log_probs.update(log_probs)

    def forwarded(self, in_flight: InFlight) -> None:
        """Of the newest `Forward`."""
        if not self.is_abandoned:
            self._in_flight.append((self._waiting.popleft(), in_flight))

    def trained(self) -> None:
        """Of the newest `Backward`."""
        if not self.is_abandoned:
            micro_batch, _ = self._in_flight.popleft()
            self._log_probs.pop(micro_batch.micro_batch_id, None)

    def _lacks_log_probs(self, micro_batch: MicroBatch) -> bool:
        return self._has_reference and micro_batch.micro_batch_id not in self._log_probs

    def _to_score(self) -> tuple[MicroBatch, ...]:
        """What a scoring takes now: nothing, as long as the oldest micro-batch has its log-probs."""
        taken: list[MicroBatch] = []
        num_tokens = 0
        for micro_batch in (*(micro_batch for micro_batch, _ in self._in_flight), *self._waiting):
            if not self._lacks_log_probs(micro_batch):
                if not taken:
                    break
                continue
            num_tokens += micro_batch.num_tokens
            if taken and num_tokens > self._max_scored_tokens:
                break
            taken.append(micro_batch)
        return tuple(taken)

    def _may_forward(self, micro_batch: MicroBatch) -> bool:
        held_tokens = sum(in_flight.num_tokens for _, in_flight in self._in_flight)
        return not self._in_flight or held_tokens + micro_batch.num_tokens <= self._window_tokens

    def _fitting_log_probs(self, micro_batch: MicroBatch) -> Sequence[LogProbs] | None:
        if not self._has_reference:
            return None
        log_probs = self._log_probs[micro_batch.micro_batch_id]
        lengths = [len(values) for values in log_probs]
        wanted = [trajectory.num_tokens for trajectory in micro_batch.trajectories]
        if lengths != wanted:
            raise WireError(
                f"reference log-probs of micro-batch {micro_batch.micro_batch_id} have lengths {lengths}, its trajectories "
                f"{wanted}: the Ref rank has scored something else"
            )
        return log_probs
