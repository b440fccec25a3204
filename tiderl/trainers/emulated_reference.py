"""The emulated reference: it comes and goes, takes its memory and its time; its log-probs are taken to be the engine's.

What takes how long (costs of `profiles.costs.CostModel`, the job's seconds):

    start        nothing: it goes to host memory, and no profile says how fast a disk is
    swap_in      swap_s(weights)
    swap_out     nothing: the device's copy is dropped
    log_probs    forward_s of each part, cut as `HostedReference` cuts it

Invariants (tests/unit/test_emulated_reference.py):

1. The seconds that pass are the cost model's, without drift (`emulated_pace.py`); reported ones are those that passed.
2. It takes memory while it is on the device and at no other time; where it does not fit, that is an error (`emulated_memory.py`).

Source: paper §5.1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tiderl.clock import JobClock
from tiderl.config.schema import Config
from tiderl.errors import TrainerError
from tiderl.profiles.costs import CostModel
from tiderl.rl.packing import pack, split_by_tokens
from tiderl.trainers.base import LogProbs
from tiderl.trainers.emulated_memory import ActorMemory
from tiderl.trainers.emulated_pace import Pace
from tiderl.types import Trajectory


class EmulatedReference:
    """One rank's. `memory` is that of the actor on the same rank (`EmulatedTrainer.memory`); None on a rank of its own, where a
    model without gradients has room."""

    def __init__(
        self,
        config: Config,
        costs: CostModel,
        clock: JobClock,
        memory: ActorMemory | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._config = config
        self._costs = costs
        self._memory = memory
        self._pace = Pace(clock, sleep)
        self._is_started = False
        self._is_on_device = False

    @property
    def is_on_device(self) -> bool:
        return self._is_on_device

    def start(self) -> None:
        """See `base.Reference`. Raises `TrainerError` where it will not fit beside the actor, and every step needs it there."""
        schedule = self._config.schedule
        is_for_emergencies = schedule.mode == "tide" and schedule.pipelining == "decoupled"
        if self._memory is not None and not is_for_emergencies:
            self._memory.check_reference()
        self._is_started = True

    def swap_in(self) -> float:
        """See `base.Reference`. Raises `TrainerError` where it does not fit, and before `start`."""
        if not self._is_started:
            raise TrainerError("swap_in: the reference is not loaded; call start first")
        if self._is_on_device:
            return 0.0
        if self._memory is not None:
            self._memory.take_reference()
        self._is_on_device = True
        self._pace.begin()
        return self._pace.wait(self._costs.swap_s(self._costs.weight_bytes))

    def swap_out(self) -> float:
        """See `base.Reference`."""
        if self._memory is not None:
            self._memory.free_reference()
        self._is_on_device = False
        return 0.0

    def fits_beside(self) -> bool:
        """See `base.Reference`: beside the actor's state and a micro-batch of `trainer.max_micro_batch_tokens`."""
        if self._is_on_device:
            raise TrainerError("fits_beside was asked while the reference is on the device; call swap_out first")
        return self._memory is None or self._memory.reference_fits(self._config.trainer.max_micro_batch_tokens)

    def log_probs(self, trajectories: Sequence[Trajectory]) -> list[LogProbs]:
        """See `base.Reference`: arrays, for there is no device."""
        if not self._is_on_device:
            raise TrainerError("log_probs: the reference is not on the device; call swap_in first")
        self._pace.begin()
        arrays: list[LogProbs] = []
        for part in split_by_tokens([t.num_tokens for t in trajectories], self._config.trainer.max_micro_batch_tokens):
            batch = pack(trajectories[part.start : part.stop])
            if batch.num_targets:
                self._pace.wait(self._costs.forward_s(batch.lengths))
            arrays.extend(batch.unpack(batch.engine_log_probs))
        return arrays
