"""The collective calls of emulated actors: nothing to reduce, but an order to keep, as real and as easy to get wrong as ever.

Every call is one tiny all-reduce in which each actor says which call it is in. A real backend would hang there, or mix up tensors.

Invariants (tests/conformance/test_trainer_emulated.py):

1. An actor that is in another call than the others is an error on all of them that names who is in what.
2. An actor that does not come, or is gone, is an error on the others that names the call, within `timeouts.collective_s`.
"""

from __future__ import annotations

import time
from typing import Final

import torch
import torch.distributed as dist

from tiderl.errors import TrainerError, WaitTimeout

CALLS: Final = ("start", "begin_step", "end_step", "full_weights", "score", "save", "wait_saved", "load")
_NUM_VALUES: Final = 2


class ActorCalls:
    """`group` holds the actors and no other rank; its own timeout must be `bound_s`, real seconds."""

    def __init__(self, group: dist.ProcessGroup, bound_s: float) -> None:
        self._group = group
        self._bound_s = bound_s
        self.rank: int = group.rank()
        self.num_actors: int = group.size()

    def meet(self, call: str, *values: int) -> list[list[int]]:
        """(collective) Everybody's values (two at most, the missing ones 0), by rank.

        Raises `WaitTimeout` and `TrainerError`, see the module docstring.
        """
        rows = torch.zeros((self.num_actors, 1 + _NUM_VALUES), dtype=torch.int64)
        rows[self.rank, : 1 + len(values)] = torch.tensor([CALLS.index(call), *values])
        began_s = time.monotonic()
        try:
            dist.all_reduce(rows, group=self._group)
        except RuntimeError as error:
            # gloo has one type for all that can go wrong: the clock tells a wait that passed its bound from a lost connection.
            if time.monotonic() - began_s >= self._bound_s:
                others = f"the other actors in {call}"
                raise WaitTimeout(f"actor {self.rank}", others, self._bound_s, "timeouts.collective_s") from error
            raise TrainerError(
                f"actor {self.rank}: {call} failed, another actor is gone; its log says why ({error})"
            ) from error
        if len(set(rows[:, 0].tolist())) > 1:
            calls = ", ".join(f"actor {rank} {CALLS[code]}" for rank, code in enumerate(rows[:, 0].tolist()))
            raise TrainerError(
                f"the actors make different calls at the same time: {calls}; their order must be the same"
            )
        return rows[:, 1:].tolist()

    def agree(self, call: str, problem: str) -> None:
        """(collective) Raise `TrainerError` on every actor if any of them has a problem."""
        if any(failed for failed, _ in self.meet(call, bool(problem))):
            raise TrainerError(problem or f"{call} failed on another actor; its log says why")
