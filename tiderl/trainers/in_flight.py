"""The forwards of one actor's step whose backward is still to come: each is finished once, or dropped with its step.

The caller gets a ticket; what the backward needs, the graph above all, stays here. So whatever an abandoned step leaves behind
is freed with it, even where somebody still holds the ticket.

Invariants (tests/unit/test_in_flight.py):

1. A ticket is good for one backward, in the step that made it; any other use of it is a `TrainerError`.
2. A backward that fails leaves its forward in flight: the step can only be abandoned then, never closed without its tokens.
3. After a step nothing of its forwards is held.

Source: paper §5.1 (decoupled mode: the loss is built when the backward starts).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from tiderl.errors import TrainerError
from tiderl.trainers.base import InFlight

ForwardT = TypeVar("ForwardT")


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """An `InFlight`; it is itself and equal to no other."""

    num_tokens: int


class InFlightForwards(Generic[ForwardT]):
    """One trainer's."""

    def __init__(self) -> None:
        self._forwards: dict[InFlight, ForwardT] = {}

    def add(self, num_tokens: int, forward: ForwardT) -> InFlight:
        ticket = Ticket(num_tokens)
        self._forwards[ticket] = forward
        return ticket

    @contextmanager
    def finishing(self, in_flight: InFlight) -> Iterator[ForwardT]:
        """What `add` was given; it is in flight until the block has ended well. Raises `TrainerError` for a ticket that is void."""
        if in_flight not in self._forwards:
            raise TrainerError(
                f"backward of a micro-batch of {in_flight.num_tokens} tokens that is not in flight: every forward has one "
                f"backward, within its step; call forward again"
            )
        yield self._forwards[in_flight]
        del self._forwards[in_flight]

    def require_none(self) -> None:
        """Raise `TrainerError` unless all are finished."""
        if self._forwards:
            raise TrainerError(
                f"end_step: {len(self._forwards)} micro-batches have had their forward but not their backward; finish them, or "
                f"abandon the step"
            )

    def drop(self) -> None:
        """Free them all."""
        self._forwards.clear()
