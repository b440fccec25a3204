"""The engine protocol: what rollout asks of a generation engine. It names nothing of any particular engine.

One thread, the *device thread* of the rank, owns the engine; everything below may be called from any thread, but what is
marked "device thread" runs there (`submit` brings a function there and awaits its result on the caller's event loop).

Invariants (tests/conformance/test_engine.py, test_engine_holding.py, every implementation):

1. Token in, token out: `generate` takes ids and returns the ids that were sampled, with one log-prob and one weight version each.
2. `update_weights` may come while requests are in flight: they go on under the new weights, and no cached block computed
   under older weights is used again. Tokens made before carry the old version, those after the new one.
3. Names and shapes are checked before anything is changed; a mismatch raises `WeightMismatch` and leaves the engine usable.
4. `abort` keeps the tokens made so far, and frees the request's blocks.
5. A request that is generated with `hold` keeps its blocks when it ends by itself: the next `generate` under the same id, with a
   longer prompt that begins with all of its tokens, computes only what is new. `release` frees them; so does a weight update,
   a `generate` whose prompt does not go on, and a lack of blocks for requests that run (longest held first; one logged line).

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
    #: Prompt tokens that were not computed when the request first ran: held, or found in the prefix cache. All of them for a
    #: request that was aborted before its first token.
    cached_tokens: int
    #: "stop" (a stop id was sampled), "length" (the cap or the context's end), "aborted".
    finish: str


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start (`total_`) and the present load.

    `prefilled` counts prompt tokens, and what a preemption or a weight update makes the engine compute again; `cached` those that
    it did not have to compute. The hit rate is cached / (cached + prefilled). Seconds are the job's (`tiderl.clock`).
    """

    num_running: int
    num_waiting: int
    #: Requests that have ended and hold their blocks.
    num_held: int
    #: Blocks of requests that run, wait with a part computed, or are held.
    used_blocks: int
    total_generated_tokens: int
    total_prefilled_tokens: int
    total_cached_tokens: int
    total_preemptions: int
    total_steps: int
    #: Sum, over all steps, of the tokens in the KV cache that its decoding requests read.
    total_read_tokens: int
    #: Seconds inside steps. A step that prefills and decodes is split in proportion to its tokens of either kind.
    total_prefill_s: float
    total_decode_s: float
    #: Seconds that steps took beyond their schedule and that were never caught up: 0.0 unless time itself is emulated.
    total_late_s: float


class Engine(Protocol):
    """See the module docstring for the invariants."""

    def start(self) -> EngineInfo:
        """Load the model and build the engine; called once, blocking. Raises `ModelError` or `EngineError`."""

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], sampling: Sampling, *, hold: bool = False
    ) -> Generation:
        """Generate one turn. Cancelling the coroutine aborts the request. Raises `EngineError` (prompt too long, engine dead)."""

    def abort(self, request_id: str) -> None:
        """End a request early: its `generate` returns what was made so far, with finish "aborted". Unknown ids are ignored."""

    def release(self, request_id: str, *, discard_from: int | None = None) -> None:
        """Free what a held request holds. Unknown ids are ignored.

        Its full blocks stay in the prefix cache until others need their place, like those of any request that ended; with
        `discard_from`, those whose tokens all lie at that index or after it are given away first: nobody will ask for them.
        """

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
