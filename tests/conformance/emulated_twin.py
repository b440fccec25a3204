"""What the tests of the emulated engine share: costs that are easy to add up, and the same sessions for any engine."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tiderl.engines.base import Generation, Sampling
from tiderl.engines.emulated_answers import Answer
from tiderl.engines.threaded import DeviceCore
from tiderl.errors import EngineError
from tiderl.profiles.costs import CostModel, StepLoad


class FlatCosts(CostModel):
    """Every step takes the same time, and everything else its own."""

    weight_bytes = 1_000

    def __init__(self, step_s: float, *, load_s: float = 0.0, swap_s: float = 0.0) -> None:
        self._step_s, self._load_s, self._swap_s = step_s, load_s, swap_s

    def engine_step_s(self, load: StepLoad) -> float:
        return self._step_s

    def load_s(self) -> float:
        return self._load_s

    def swap_s(self, num_bytes: int) -> float:
        assert num_bytes == self.weight_bytes
        return self._swap_s

    def kv_cache_tokens(self, gpu_memory_share: float, *, num_sequences: int = 0) -> int:
        return int(100_000 * gpu_memory_share)


class ScriptedAnswers:
    """What another engine has answered, by request and length of the prompt."""

    def __init__(self, recorded: dict[tuple[str, int], Generation]) -> None:
        self._recorded = recorded

    def answer(
        self,
        request_id: str,
        prompt: npt.NDArray[np.int32],
        version: int,
        max_tokens: int,
        stop_ids: tuple[int, ...] | None,
    ) -> Answer:
        generation = self._recorded[request_id, prompt.size]
        assert generation.finish == "length" and generation.token_ids.size <= max_tokens
        return Answer(generation.token_ids, "length")


@dataclass(frozen=True, slots=True)
class Sessions:
    """Tasks that start from prompts of their own and see observations that are the same for every engine."""

    num_tasks: int
    num_turns: int
    prompt_tokens: int
    #: A turn generates 1 to so many.
    most_output_tokens: int
    observation_tokens: int
    vocab_size: int

    def play(self, core: DeviceCore[Any], num_at_once: int, *, hold: bool) -> dict[tuple[str, int], Generation]:
        """All tasks to their end, so many at once, without threads: a turn that a step ends goes on in the next one. Returns what
        was answered."""
        recorded: dict[tuple[str, int], Generation] = {}
        left = iter(range(self.num_tasks))
        ready: deque[tuple[int, int, list[int]]] = deque()

        def send(number: int, turn: int, context: list[int]) -> None:
            def on_end(generation: Generation | None, error: EngineError | None) -> None:
                assert generation is not None, error
                recorded[f"task{number}", len(context)] = generation
                if not is_last:
                    new = self._ids(number, turn + 1, self.observation_tokens)
                    ready.append((number, turn + 1, [*context, *generation.token_ids.tolist(), *new]))
                elif (following := next(left, None)) is not None:
                    ready.append((following, 0, self._ids(following, 0, self.prompt_tokens)))

            is_last = turn == self.num_turns - 1
            (num_new,) = np.random.default_rng((number, turn)).integers(1, self.most_output_tokens + 1, 1).tolist()
            sampling = Sampling(1.0, num_new, (), ignore_stop=True)
            core.admit(core.new_request(f"task{number}", context, sampling, on_end, hold=hold and not is_last))

        for number in itertools.islice(left, num_at_once):
            ready.append((number, 0, self._ids(number, 0, self.prompt_tokens)))
        while ready or core.has_work:
            while ready:
                send(*ready.popleft())
            core.step()
        return recorded

    def _ids(self, *seed_and_size: int) -> list[int]:
        *seed, size = seed_and_size
        ids: list[int] = np.random.default_rng(seed).integers(0, self.vocab_size, size).tolist()
        return ids
