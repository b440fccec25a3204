"""A request of the emulated engine, from its arrival to its end, and what a step and an ending look like from outside.

Plain data: `emulated_core.py` decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from tiderl.engines.base import Generation, Sampling
from tiderl.engines.emulated_answers import Answer
from tiderl.profiles.costs import StepLoad

State = Literal["new", "waiting", "taken over", "prefilling", "decoding", "held", "ended"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a step. The cache must hold a whole context."""

    num_blocks: int
    block_size_tokens: int
    max_running: int
    max_batched_tokens: int
    max_context_tokens: int


@dataclass(slots=True, eq=False)
class EmulatedRequest:
    """A request and what has become of it. `prompt` [num_prompt_tokens] must leave room for one token in the context."""

    request_id: str
    prompt: npt.NDArray[np.int32]
    sampling: Sampling
    hold: bool = False
    state: State = "new"
    #: Place in the order of arrivals, and of admissions.
    arrival: int = -1
    admission: int = -1
    #: Drawn with the first token.
    answer: Answer | None = None
    #: Prompt and answer, the answer up to its end, and the keys of the full blocks of that.
    context: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    keys: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    #: Blocks that are found under their keys.
    num_kept: int = 0
    #: While it decodes, both are as of the step `since`: they grow by one in every step.
    num_computed: int = 0
    num_made: int = 0
    since: int = 0
    #: (tokens, version) in the order of generation.
    made_under: list[tuple[int, int]] = field(default_factory=list)
    #: Tokens that were not computed when it first ran.
    num_cached: int | None = None

    @property
    def num_tokens(self) -> int:
        return self.prompt.size + self.num_made

    @property
    def num_left(self) -> int:
        """Tokens of the answer that are still to be made."""
        assert self.answer is not None
        return self.answer.token_ids.size - self.num_made

    @property
    def finish(self) -> str:
        """How the answer ends, once all of it is made."""
        assert self.answer is not None
        return self.answer.finish

    def goes_on_from(self, held: EmulatedRequest) -> bool:
        """Whether the prompt begins with all tokens of the held request."""
        # As bytes: many times faster than `np.array_equal`.
        return self.prompt[: held.context.size].tobytes() == held.context.tobytes()

    def generation(self, finish: str, log_prob: np.float32) -> Generation:
        """What it has made so far, for a request that does not run any more."""
        num_made = self.num_made
        log_probs, versions = np.empty(num_made, np.float32), np.empty(num_made, np.int32)
        log_probs.fill(log_prob)
        end = 0
        for num_tokens, version in self.made_under:
            versions[end : end + num_tokens] = version
            end += num_tokens
        assert end == num_made, (end, num_made)
        return Generation(
            token_ids=self.context[self.prompt.size :][:num_made],
            log_probs=log_probs,
            weight_versions=versions,
            cached_tokens=self.num_cached if num_made and self.num_cached is not None else self.prompt.size,
            finish=finish,
        )


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the next step computes. `chunks`: requests whose prompt goes on, and how many of its tokens are computed."""

    load: StepLoad
    chunks: tuple[tuple[EmulatedRequest, int], ...]
    #: Tokens that are computed, as `EngineStats` counts them: in a prompt (or again), and one for each request that decodes.
    num_prefilled: int
    num_decoded: int


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """A request that has ended."""

    request: EmulatedRequest
    generation: Generation
