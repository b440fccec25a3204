"""The engine protocol: what rollout asks of a generation engine. It names nothing of any particular engine.

One thread, the *device thread* of the rank, owns the engine; everything below may be called from any thread, but what is
marked "device thread" runs there (`submit` brings a function there and awaits its result on the caller's event loop).

Invariants (tests/conformance/test_engine.py, every implementation):

1. Token in, token out: `generate` takes ids and returns the ids that were sampled, with one log-prob and one weight version each.
2. `update_weights` may come while requests are in flight: they go on under the new weights, and no cached block computed
   under older weights is used again. Tokens made before carry the old version, those after the new one.
3. `abort` keeps the tokens made so far.
4. Names and shapes are checked before anything is changed; a mismatch raises `WeightMismatch` and leaves the engine usable.

Source: paper §4.1 (token usage is read from the engine itself), §7 (each token records its version).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from tiderl.types import WeightVersion

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Fixed facts of a started engine."""

    block_size_tokens: int
    num_blocks: int
    max_context_tokens: int

    @property
    def kv_cache_tokens(self) -> int:
        return self.block_size_tokens * self.num_blocks


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request is sampled. `temperature` 0 is greedy. Generation ends at a stop id (which is kept) or at the cap."""

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    ignore_stop: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """What a request produced. The arrays have length [num_new_tokens]."""

    token_ids: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float32]
    weight_versions: npt.NDArray[np.int32]
    #: Prompt tokens found in the prefix cache when the request first ran.
    cached_tokens: int
    #: "stop" (a stop id was sampled), "length" (the cap or the context's end), "aborted".
    finish: str


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start (`total_`) and the present load."""

    num_running: int
    num_waiting: int
    used_blocks: int
    total_generated_tokens: int
    total_prefilled_tokens: int
    total_cached_tokens: int
    total_preemptions: int


class Engine(Protocol):
    """See the module docstring for the invariants."""

    def start(self) -> EngineInfo:
        """Load the model and build the engine; called once, blocking. Raises `ModelError` or `EngineError`."""

    async def generate(self, request_id: str, prompt_token_ids: Sequence[int], sampling: Sampling) -> Generation:
        """Generate one turn. Cancelling the coroutine aborts the request. Raises `EngineError` (prompt too long, engine dead)."""

    def abort(self, request_id: str) -> None:
        """End a request early: its `generate` returns what was made so far, with finish "aborted". Unknown ids are ignored."""

    async def submit(self, function: Callable[[], T]) -> T:
        """Run `function` on the device thread between two engine steps (collectives of a weight sync belong there)."""

    def expected_weights(self) -> Mapping[str, tuple[int, ...]]:
        """Hugging Face parameter names and shapes that `update_weights` wants, tied duplicates left out."""

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: WeightVersion) -> None:
        """Device thread: replace all weights, clear the prefix cache, set the version. Raises `WeightMismatch`."""

    def score(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Device thread: raw log-probs [num_tokens - 1] of ids 1.. given those before, under the present weights."""

    def stats(self) -> EngineStats:
        """Present numbers; cheap, any thread."""

    def shutdown(self) -> None:
        """Free everything; the process group of the host stays as it is."""
