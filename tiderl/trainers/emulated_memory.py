"""Would it fit on the rank's GPU? What a real actor would run out of, an emulated one must not have for nothing.

Resident in a step are weights, gradients and the actor's shard of the optimizer; on top come the reference while it is on the
device, and the activations of every micro-batch between its forward and its backward. Passes without gradients keep none.

What is in flight counts as one micro-batch of all its tokens: the logits of one chunk once, however many forwards wait. (With
recomputed layers that is more than a real actor holds: the layer at work is counted for all tokens, not for one micro-batch's.)

Invariants (tests/unit/test_emulated_memory.py):

1. Exactly what fits passes; one byte more is a `TrainerError` that says how much, of what, and which settings help; then nothing
   has been taken.
2. No setting is named that is already set, or that would change nothing.
3. What was taken can be given back, and then taken again.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiderl.config.schema import Config
from tiderl.errors import TrainerError
from tiderl.profiles.costs import CostModel

_GB = 1e9


class ActorMemory:
    """One actor's, of `num_actors`."""

    def __init__(self, config: Config, costs: CostModel, num_actors: int) -> None:
        self._trainer = config.trainer
        self._costs = costs
        self._num_actors = num_actors
        self._resident_bytes = costs.trainer_bytes(num_actors, reference=False)
        self._reference_bytes = 0
        self._in_flight: list[int] = []

    def check_resident(self) -> None:
        """Raise `TrainerError` where not even an empty step would fit."""
        self._check(0, [])

    def check_reference(self) -> None:
        """Raise `TrainerError` where the reference would not fit beside an actor without micro-batches."""
        self._check(self._costs.weight_bytes, [])

    def reference_fits(self, num_tokens: int) -> bool:
        """Beside an actor with one micro-batch of `num_tokens`."""
        return self._needed_bytes(self._costs.weight_bytes, [num_tokens]) <= self._costs.memory_bytes

    def take_reference(self) -> None:
        """Raises `TrainerError` where it does not fit beside what is there."""
        self._check(self._costs.weight_bytes, self._in_flight)
        self._reference_bytes = self._costs.weight_bytes

    def free_reference(self) -> None:
        self._reference_bytes = 0

    def take_activations(self, num_tokens: int) -> None:
        """Of a micro-batch of `num_tokens` computed tokens. Raises `TrainerError` where they do not fit beside what is there."""
        self._check(self._reference_bytes, [*self._in_flight, num_tokens])
        self._in_flight.append(num_tokens)

    def free_activations(self, num_tokens: int) -> None:
        self._in_flight.remove(num_tokens)

    def free_all_activations(self) -> None:
        self._in_flight.clear()

    def _activation_bytes(self, in_flight: Sequence[int]) -> int:
        if not in_flight:
            return 0
        return self._costs.activation_bytes(sum(in_flight), checkpoint_layers=self._trainer.checkpoint_layers)

    def _needed_bytes(self, reference_bytes: int, in_flight: Sequence[int]) -> int:
        return self._resident_bytes + reference_bytes + self._activation_bytes(in_flight)

    def _check(self, reference_bytes: int, in_flight: Sequence[int]) -> None:
        needed_bytes = self._needed_bytes(reference_bytes, in_flight)
        if needed_bytes <= self._costs.memory_bytes:
            return
        parts = [f"{self._resident_bytes / _GB:.1f} GB resident (weights, gradients, its share of the optimizer)"]
        helps = []
        if in_flight:
            activations_gb = self._activation_bytes(in_flight) / _GB
            which = (
                f"micro-batch of {in_flight[0]}"
                if len(in_flight) == 1
                else f"{len(in_flight)} micro-batches in flight, {sum(in_flight)}"
            )
            parts.append(f"{activations_gb:.1f} GB of activations ({which} tokens)")
            if not self._trainer.checkpoint_layers:
                helps.append("trainer.checkpoint_layers = true")
            if len(in_flight) > 1:
                helps.append(f"a smaller trainer.window_tokens ({self._trainer.window_tokens})")
            helps.append(f"a smaller trainer.max_micro_batch_tokens ({self._trainer.max_micro_batch_tokens})")
        if reference_bytes:
            parts.append(f"{reference_bytes / _GB:.1f} GB of the reference")
            if in_flight and self._trainer.swap != "offload":
                helps.append('trainer.swap = "offload"')
            helps.append("a reference on ranks of its own (roles.num_ref, schedule.pipelining)")
            helps.append("loss.kl_weight = 0, which needs no reference")
        helps.append(f"more actors (roles.num_actors, {self._num_actors})")
        raise TrainerError(
            f"an actor needs {needed_bytes / _GB:.1f} GB, {' and '.join(parts)}, but the emulated GPU has "
            f"{self._costs.memory_bytes / _GB:.1f} GB (emulate.hardware); what helps: {', or '.join(helps)}"
        )
