"""Would the actor fit on its GPU? What a real trainer would run out of, an emulated one must not have for nothing.

Resident in a step are weights, gradients, the actor's shard of the optimizer, and the reference where there is one; on top come the
activations of the micro-batch between its forward and its backward. Passes without gradients keep none.

Invariants (tests/unit/test_emulated_trainer.py):

1. Exactly what fits passes; one byte more is a `TrainerError` that says how much, of what, and which settings help.
2. No setting is named that is already set, or that would change nothing.
"""

from __future__ import annotations

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
        self._has_reference = config.loss.kl_weight > 0.0
        self._resident_bytes = costs.trainer_bytes(num_actors, reference=self._has_reference)

    def check_resident(self) -> None:
        """Raise `TrainerError` where not even an empty step would fit."""
        self._check(0, 0)

    def check_micro_batch(self, num_tokens: int) -> None:
        """Raise `TrainerError` where a micro-batch of `num_tokens` computed tokens would not fit."""
        checkpoint_layers = self._trainer.checkpoint_layers
        self._check(self._costs.activation_bytes(num_tokens, checkpoint_layers=checkpoint_layers), num_tokens)

    def _check(self, activation_bytes: int, num_tokens: int) -> None:
        needed_bytes = self._resident_bytes + activation_bytes
        if needed_bytes <= self._costs.memory_bytes:
            return
        resident = "weights, gradients, its share of the optimizer" + (", reference" if self._has_reference else "")
        parts = [f"{self._resident_bytes / _GB:.1f} GB resident ({resident})"]
        helps = []
        if activation_bytes:
            parts.append(f"{activation_bytes / _GB:.1f} GB of activations (micro-batch of {num_tokens} tokens)")
            if not self._trainer.checkpoint_layers:
                helps.append("trainer.checkpoint_layers = true")
            helps.append(f"a smaller trainer.max_micro_batch_tokens ({self._trainer.max_micro_batch_tokens})")
        helps.append(f"more actors (roles.num_actors, {self._num_actors})")
        if self._has_reference:
            helps.append("loss.kl_weight = 0, which needs no reference")
        raise TrainerError(
            f"an actor needs {needed_bytes / _GB:.1f} GB, {' and '.join(parts)}, but the emulated GPU has "
            f"{self._costs.memory_bytes / _GB:.1f} GB (emulate.hardware); what helps: {', or '.join(helps)}"
        )
