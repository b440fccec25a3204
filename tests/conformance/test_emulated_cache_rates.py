"""The emulated engine against vLLM: the same token-exact sessions, the same number of blocks, the same use of the cache.

Both cores are driven without threads, so that every turn comes to the same step in every run. Then they agree to the token, not
only in their hit rates. The cache has room for some nine of the tasks: up to there most of a prompt is found, with many more next
to nothing. A step has room for no more than three observations and for 24 sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conformance.emulated_twin import FlatCosts, ScriptedAnswers, Sessions
from tests.conformance.engine_twin import VLLM_WARNING, VOCAB, Reference, config_of, write_model
from tiderl.clock import JobClock
from tiderl.config.schema import Config
from tiderl.engines.base import EngineStats, Generation
from tiderl.engines.emulated import EmulatedDevice, limits_of
from tiderl.engines.emulated_core import EmulatedCore
from tiderl.engines.emulated_pace import Pace
from tiderl.engines.threaded import DeviceCore
from tiderl.types import WeightVersion

MAX_CONTEXT, CACHE_TOKENS = 1024, 8192
SESSIONS = Sessions(32, 8, prompt_tokens=40, most_output_tokens=31, observation_tokens=100, vocab_size=VOCAB)

pytestmark = pytest.mark.filterwarnings(VLLM_WARNING)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = write_model(tmp_path_factory.mktemp("model"), tie=False, max_context=MAX_CONTEXT)
    config = config_of(folder, CACHE_TOKENS, max_context=MAX_CONTEXT, max_running=24)
    return replace(config, engine=replace(config.engine, max_batched_tokens=340))


@pytest.fixture(scope="module")
def vllm_core(config: Config) -> Iterator[DeviceCore[Any]]:
    from tiderl.engines.vllm_core import VllmCore

    core = VllmCore(config)
    yield core
    core.close()


@pytest.fixture(scope="module")
def reference(config: Config) -> Reference:
    return Reference(Path(config.model.path))


def emulated_core(config: Config, answers: dict[tuple[str, int], Generation]) -> DeviceCore[Any]:
    costs, clock = FlatCosts(0.0), JobClock()
    limits = limits_of(config, costs)
    core = EmulatedCore(limits, ScriptedAnswers(answers), log_prob=-1.0)
    return EmulatedDevice(core, limits, costs, clock, Pace(clock))


def counted(before: EngineStats, after: EngineStats) -> dict[str, int]:
    """What the counters grew by."""
    names = ["total_steps", "total_generated_tokens", "total_prefilled_tokens", "total_cached_tokens"]
    names += ["total_preemptions", "total_read_tokens"]
    return {name: getattr(after, name) - getattr(before, name) for name in names}


def hit_rate(counts: dict[str, int]) -> float:
    return counts["total_cached_tokens"] / (counts["total_cached_tokens"] + counts["total_prefilled_tokens"])


@pytest.mark.parametrize(
    ("num_at_once", "hold", "meant"),
    [(8, False, 0.76), (14, False, 0.64), (20, False, 0.37), (32, False, 0.06), (32, True, 0.71)],
)
def test_the_cache_is_used_as_vllm_uses_it(
    vllm_core: DeviceCore[Any], reference: Reference, config: Config, num_at_once: int, hold: bool, meant: float
) -> None:
    vllm_core.load(vllm_core.staged(reference.weights()), WeightVersion(1))  # forgets what was cached
    before = vllm_core.stats()
    answers = SESSIONS.play(vllm_core, num_at_once, hold=hold)
    by_vllm = counted(before, vllm_core.stats())
    assert hit_rate(by_vllm) == pytest.approx(meant, abs=0.04), "the level of concurrency is another one than was meant"

    emulated = emulated_core(config, answers)
    before = emulated.stats()
    again = SESSIONS.play(emulated, num_at_once, hold=hold)
    assert counted(before, emulated.stats()) == by_vllm
    for key, generation in answers.items():
        np.testing.assert_array_equal(again[key].token_ids, generation.token_ids)
        assert again[key].cached_tokens == generation.cached_tokens, key
