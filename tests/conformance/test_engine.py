"""The engine protocol's invariants, held against transformers as the other implementation (float32, tiny random Qwen2 models).

Engines don't coexist in a process: each class has its own, built for the class and shut down after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tests.conformance.engine_twin import (
    BLOCK,
    FREE,
    GREEDY,
    MAX_CONTEXT,
    TOLERANCE,
    VLLM_WARNING,
    VOCAB,
    Reference,
    config_of,
    difference,
    in_flight,
    load,
    random_ids,
    write_model,
)
from tiderl.engines.base import Sampling
from tiderl.engines.vllm import VllmEngine
from tiderl.errors import ConfigError, EngineError, ModelError, WeightMismatch
from tiderl.types import WeightVersion

pytestmark = pytest.mark.filterwarnings(VLLM_WARNING)


class TestEngine:
    """An untied model and a cache with room for 32 contexts."""

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_model(tmp_path_factory.mktemp("untied"), tie=False)

    @pytest.fixture(scope="class")
    @classmethod
    def running(cls, folder: Path) -> Iterator[VllmEngine]:
        engine = VllmEngine(config_of(folder, 32 * MAX_CONTEXT))
        info = engine.start()
        assert (info.block_size_tokens, info.kv_cache_tokens) == (BLOCK, 32 * MAX_CONTEXT)
        yield engine
        engine.shutdown()

    @pytest.fixture
    async def engine(self, running: VllmEngine, reference: Reference) -> VllmEngine:
        """With the reference's weights as version 1, and an empty prefix cache."""
        await load(running, reference.weights(), 1)
        return running

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, folder: Path) -> Reference:
        return Reference(folder)

    @pytest.fixture(scope="class")
    @classmethod
    def other(cls, folder: Path) -> Reference:
        return Reference(folder, seed=1)

    async def test_log_probs_are_those_of_the_distribution_sampled_from(
        self, engine: VllmEngine, reference: Reference
    ) -> None:
        temperatures = [1.0, 0.0, 0.6, 1.7] * 4  # all in one batch
        prompts = [random_ids(seed, 20 + 3 * seed) for seed in range(len(temperatures))]
        generations = await asyncio.gather(
            *(
                engine.generate(f"g{index}", prompt, replace(FREE, temperature=temperature, max_new_tokens=24))
                for index, (prompt, temperature) in enumerate(zip(prompts, temperatures, strict=True))
            )
        )
        for prompt, temperature, generation in zip(prompts, temperatures, generations, strict=True):
            assert reference.gaps(prompt, generation, temperature or 1.0).max() < TOLERANCE
            assert len(generation.token_ids) == 24
            assert generation.finish == "length"
            assert set(generation.weight_versions.tolist()) == {1}

    async def test_tokens_are_drawn_from_the_distribution(self, engine: VllmEngine, reference: Reference) -> None:
        prompt, num_draws = random_ids(5, 40), 3000
        once = replace(FREE, max_new_tokens=1)
        draws = await asyncio.gather(*(engine.generate(f"d{index}", prompt, once) for index in range(num_draws)))
        counts = np.bincount([int(draw.token_ids[0]) for draw in draws], minlength=VOCAB)
        expected = num_draws * reference.log_softmax(prompt)[-1].exp().numpy()
        # Pearson's statistic over the tokens that are not rare; its mean is the number of cells, its variance twice that.
        common = expected >= 5
        cells = int(common.sum())
        assert cells > 20
        statistic = float((((counts - expected) ** 2) / expected)[common].sum())
        assert statistic < cells + 6 * (2 * cells) ** 0.5

    async def test_greedy_is_greedy(self, engine: VllmEngine, reference: Reference) -> None:
        prompt = random_ids(1, 50)
        generation = await engine.generate("greedy", prompt, GREEDY)
        assert generation.token_ids.tolist() == reference.greedy(prompt, 16)

    async def test_a_stop_id_ends_the_turn_and_is_kept(self, engine: VllmEngine, reference: Reference) -> None:
        prompt = random_ids(1, 50)
        tokens = reference.greedy(prompt, 16)
        stop = tokens[7]
        first = tokens.index(stop)
        sampling = replace(GREEDY, stop_token_ids=(stop,))
        stopped = await engine.generate("stop", prompt, sampling)
        assert (stopped.token_ids.tolist(), stopped.finish) == (tokens[: first + 1], "stop")
        ignored = await engine.generate("ignored", prompt, replace(sampling, ignore_stop=True))
        assert (ignored.token_ids.tolist(), ignored.finish) == (tokens, "length")

    async def test_the_context_ends_a_turn(self, engine: VllmEngine) -> None:
        generation = await engine.generate("end", random_ids(2, MAX_CONTEXT - 2), FREE)
        assert (len(generation.token_ids), generation.finish) == (2, "length")

    @pytest.mark.parametrize(
        ("prompt", "sampling", "problem"),
        [
            ([5] * MAX_CONTEXT, FREE, "don't fit"),
            ([], FREE, "don't fit"),
            ([5, VOCAB], FREE, "vocabulary"),
            ([-1], FREE, "vocabulary"),
            ([5], replace(FREE, temperature=-1.0), "temperature"),
            ([5], replace(FREE, max_new_tokens=0), "max_tokens"),
        ],
    )
    async def test_bad_requests_are_refused_before_they_reach_the_engine(
        self, engine: VllmEngine, prompt: list[int], sampling: Sampling, problem: str
    ) -> None:
        with pytest.raises(EngineError, match=problem):
            await engine.generate("bad", prompt, sampling)
        assert (await engine.generate("good", [5], GREEDY)).finish == "length"

    async def test_an_id_in_flight_cannot_be_used_again(self, engine: VllmEngine) -> None:
        first = asyncio.create_task(engine.generate("same", [5], FREE))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="'same' is in use"):
            await engine.generate("same", [6], FREE)
        assert len((await first).token_ids) == 100
        assert len((await engine.generate("same", [6], GREEDY)).token_ids) == 16

    async def test_a_weight_update_reaches_requests_in_flight(
        self, engine: VllmEngine, reference: Reference, other: Reference
    ) -> None:
        prompts = [random_ids(seed, 20) for seed in range(8)]
        before = engine.stats()
        tasks = [asyncio.create_task(engine.generate(f"u{n}", prompt, FREE)) for n, prompt in enumerate(prompts)]
        await in_flight(engine, 8 * 5)
        await load(engine, other.weights(), 2)
        generations = await asyncio.gather(*tasks)
        num_old = 0
        for prompt, generation in zip(prompts, generations, strict=True):
            versions = generation.weight_versions
            assert sorted(set(versions.tolist())) == [1, 2]
            assert (np.diff(versions) >= 0).all()
            num_old += int((versions == 1).sum())
            assert reference.gaps(prompt, generation)[versions == 1].max() < TOLERANCE
            assert other.gaps(prompt, generation)[versions == 2].max() < TOLERANCE
            assert other.gaps(prompt, generation)[versions == 1].max() > 0.1
        # Each prompt is computed twice, and what it had generated once more: the last token would have been anyway.
        assert difference(before, engine.stats()) == {
            "total_generated_tokens": 8 * 100,
            "total_prefilled_tokens": 2 * 8 * 20 + num_old - 8,
            "total_cached_tokens": 0,
            "total_preemptions": 0,
        }

    async def test_the_prefix_cache_is_used_and_forgotten_with_the_weights(
        self, engine: VllmEngine, other: Reference
    ) -> None:
        prompt = random_ids(3, 3 * BLOCK + 5)
        before = engine.stats()
        fresh, again = await engine.generate("1", prompt, GREEDY), await engine.generate("2", prompt, GREEDY)
        assert (fresh.cached_tokens, again.cached_tokens) == (0, 3 * BLOCK)
        assert fresh.token_ids.tolist() == again.token_ids.tolist()
        assert difference(before, engine.stats()) == {
            "total_generated_tokens": 2 * 16,
            "total_prefilled_tokens": len(prompt) + 5,
            "total_cached_tokens": 3 * BLOCK,
            "total_preemptions": 0,
        }
        await load(engine, other.weights(), 2)
        after = await engine.generate("3", prompt, GREEDY)
        assert after.cached_tokens == 0
        assert after.token_ids.tolist() == other.greedy(prompt, 16)

    async def test_wrong_weights_are_refused_and_change_nothing(self, engine: VllmEngine, other: Reference) -> None:
        ids, good = random_ids(4, 60), other.weights()
        scores = await engine.submit(lambda: engine.score(ids))
        name, tensor = good[3]
        wrong = {
            f"missing: {name}": good[:3] + good[4:],
            "unexpected: model.extra.weight": [*good, ("model.extra.weight", tensor)],
            f"wrong shape: {name} is": [*good[:3], (name, tensor[:-1]), *good[4:]],
            f"sent twice: {name}": [*good, (name, tensor)],
        }
        for problem, weights in wrong.items():
            with pytest.raises(WeightMismatch, match=problem.replace(".", r"\.")):
                await load(engine, iter(weights), 2)

        def broken() -> Iterator[tuple[str, torch.Tensor]]:
            yield from good[:5]
            raise ConnectionError("the sender is gone")

        with pytest.raises(ConnectionError):
            await load(engine, broken(), 2)
        np.testing.assert_array_equal(await engine.submit(lambda: engine.score(ids)), scores)
        assert (await engine.generate("v", ids, GREEDY)).weight_versions.tolist() == [1] * 16

    async def test_expected_weights_are_those_of_the_checkpoint(self, running: VllmEngine, folder: Path) -> None:
        assert dict(running.expected_weights()) == shapes_on_disk(folder)

    async def test_abort_keeps_the_tokens_made_so_far(self, engine: VllmEngine, reference: Reference) -> None:
        prompt = random_ids(6, 20)
        task = asyncio.create_task(engine.generate("long", prompt, replace(GREEDY, max_new_tokens=100)))
        await in_flight(engine, 10)
        engine.abort("unknown")
        engine.abort("long")
        generation = await task
        made = len(generation.token_ids)
        assert generation.finish == "aborted"
        assert 10 <= made < 100
        assert generation.token_ids.tolist() == reference.greedy(prompt, made)
        assert reference.gaps(prompt, generation).max() < TOLERANCE
        assert engine.stats().used_blocks == 0

    async def test_cancelling_frees_the_request(self, engine: VllmEngine) -> None:
        task = asyncio.create_task(engine.generate("gone", random_ids(7, 60), FREE))
        await in_flight(engine, 3)
        assert engine.stats().used_blocks >= 2
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stats = await engine.submit(engine.stats)
        assert (stats.num_running, stats.num_waiting, stats.used_blocks) == (0, 0, 0)

    async def test_score_beside_requests_in_flight(self, engine: VllmEngine, reference: Reference) -> None:
        full, hot = random_ids(8, MAX_CONTEXT), random_ids(9, 100)
        await engine.generate("warm the cache", hot, GREEDY)
        prompts = [random_ids(20 + n, 20) for n in range(4)]
        tasks = [asyncio.create_task(engine.generate(f"s{n}", prompt, FREE)) for n, prompt in enumerate(prompts)]
        await in_flight(engine, 4 * 3)
        for ids in (full, hot, full[:2]):
            scores = await engine.submit(lambda ids=ids: engine.score(ids))  # type: ignore[misc]
            assert scores.shape == (len(ids) - 1,)
            np.testing.assert_allclose(scores, reference.log_probs(ids), atol=TOLERANCE, rtol=0)
        for prompt, generation in zip(prompts, await asyncio.gather(*tasks), strict=True):
            assert len(generation.token_ids) == 100
            assert reference.gaps(prompt, generation).max() < TOLERANCE

    async def test_score_counts_nowhere(self, engine: VllmEngine) -> None:
        before = engine.stats()
        await engine.submit(lambda: engine.score(random_ids(10, 90)))
        assert engine.stats() == before

    async def test_score_wants_tokens_that_fit(self, engine: VllmEngine) -> None:
        for ids in ([5], [5] * (MAX_CONTEXT + 1), [5, VOCAB]):
            with pytest.raises(EngineError):
                await engine.submit(lambda ids=ids: engine.score(ids))  # type: ignore[misc]

    async def test_device_thread_methods_refuse_other_threads(self, engine: VllmEngine) -> None:
        with pytest.raises(EngineError, match="device thread"):
            engine.score([5, 6])
        with pytest.raises(EngineError, match="device thread"):
            engine.update_weights([], WeightVersion(2))

    async def test_sampling_leaves_the_hosts_random_state_alone(self, engine: VllmEngine) -> None:
        state = torch.get_rng_state()
        generations = [await engine.generate("r", [5], FREE) for _ in range(2)]
        assert torch.equal(torch.get_rng_state(), state)
        assert generations[0].token_ids.tolist() != generations[1].token_ids.tolist()

    def test_an_engine_starts_once(self, running: VllmEngine) -> None:
        with pytest.raises(EngineError, match="starts once"):
            running.start()


def shapes_on_disk(folder: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a dict


class TestTiedModelAndSmallCache:
    """A tied output head, and a cache that holds one context and not a token more."""

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_model(tmp_path_factory.mktemp("tied"), tie=True)

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, folder: Path) -> Iterator[VllmEngine]:
        engine = VllmEngine(config_of(folder, MAX_CONTEXT))
        assert engine.start().num_blocks == MAX_CONTEXT // BLOCK
        yield engine
        engine.shutdown()

    async def test_the_head_follows_the_embedding(self, engine: VllmEngine, folder: Path) -> None:
        assert "lm_head.weight" not in engine.expected_weights()
        assert dict(engine.expected_weights()) == shapes_on_disk(folder)
        ids = random_ids(1, 90)
        for seed in (0, 1, 2):
            reference = Reference(folder, seed)
            await load(engine, reference.weights(), seed)
            scores = await engine.submit(lambda: engine.score(ids))
            np.testing.assert_allclose(scores, reference.log_probs(ids), atol=TOLERANCE, rtol=0)

    async def test_a_full_context_fits(self, engine: VllmEngine, folder: Path) -> None:
        reference = Reference(folder, 3)
        await load(engine, reference.weights(), 3)
        prompt = random_ids(2, 20)
        generation = await engine.generate("full", prompt, replace(FREE, max_new_tokens=MAX_CONTEXT))
        assert len(generation.token_ids) == MAX_CONTEXT - 20
        assert reference.gaps(prompt, generation).max() < TOLERANCE

    async def test_preempted_requests_come_back(self, engine: VllmEngine, folder: Path) -> None:
        reference = Reference(folder, 3)
        await load(engine, reference.weights(), 4)
        prompts = [random_ids(30 + n, BLOCK + 1) for n in range(3)]
        before = engine.stats()
        # Each grows from 2 to 4 blocks, 4 are there.
        generations = await asyncio.gather(
            *(engine.generate(f"p{n}", prompt, replace(FREE, max_new_tokens=80)) for n, prompt in enumerate(prompts))
        )
        for prompt, generation in zip(prompts, generations, strict=True):
            assert len(generation.token_ids) == 80
            assert reference.gaps(prompt, generation).max() < TOLERANCE
        grown = difference(before, engine.stats())
        assert grown["total_preemptions"] >= 1
        assert grown["total_generated_tokens"] == 3 * 80
        assert grown["total_prefilled_tokens"] + grown["total_cached_tokens"] > 3 * (BLOCK + 1)

    async def test_score_waits_for_room(self, engine: VllmEngine, folder: Path) -> None:
        reference, ids, prompt = Reference(folder, 3), random_ids(3, MAX_CONTEXT), random_ids(4, 3 * BLOCK)
        await load(engine, reference.weights(), 5)
        task = asyncio.create_task(engine.generate("in the way", prompt, replace(FREE, max_new_tokens=20)))
        await in_flight(engine, 3)
        scores = await engine.submit(lambda: engine.score(ids))
        np.testing.assert_allclose(scores, reference.log_probs(ids), atol=TOLERANCE, rtol=0)
        assert len((await task).token_ids) == 20


class TestFailure:
    """What remains of an engine after an error inside vLLM, and what is refused at the start."""

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_model(tmp_path_factory.mktemp("model"), tie=True)

    async def test_after_an_error_in_a_step_everything_raises_engine_error(self, folder: Path) -> None:
        engine = VllmEngine(config_of(folder, 0))
        try:
            await asyncio.to_thread(engine.start)
            tasks = [asyncio.create_task(engine.generate(f"f{n}", [5], FREE)) for n in range(3)]
            await in_flight(engine, 3)
            await engine.submit(lambda: break_steps(engine))
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(outcome, EngineError)
                assert isinstance(outcome.__cause__, ArithmeticError)
            with pytest.raises(EngineError, match="invented"):
                await engine.generate("later", [5], FREE)
            with pytest.raises(EngineError, match="invented"):
                await engine.submit(lambda: None)
            engine.abort("f0")
            engine.release("f0")
        finally:
            engine.shutdown()
        engine.shutdown()  # a second time does nothing
        with pytest.raises(EngineError, match="invented"):
            await engine.generate("after", [5], FREE)

    async def test_shutdown_ends_what_is_pending(self, folder: Path) -> None:
        engine = VllmEngine(config_of(folder, 0))
        try:
            await asyncio.to_thread(engine.start)
            task = asyncio.create_task(engine.generate("pending", [5], FREE))
            await in_flight(engine, 3)
        finally:
            await asyncio.to_thread(engine.shutdown)
        with pytest.raises(EngineError, match="shut down"):
            await task

    def test_a_cache_that_holds_no_context_is_refused(self, folder: Path) -> None:
        engine = VllmEngine(config_of(folder, MAX_CONTEXT - 1))
        with pytest.raises(ConfigError, match=r"^engine\.kv_cache_tokens: "):
            engine.start()
        engine.shutdown()

    @pytest.mark.parametrize(
        ("files", "problem"),
        [({}, "no config.json"), ({"config.json": "{"}, "not JSON"), ({"config.json": "{}"}, "no .*safetensors")],
    )
    def test_a_folder_that_holds_no_model_is_refused(self, tmp_path: Path, files: dict[str, str], problem: str) -> None:
        for name, text in files.items():
            (tmp_path / name).write_text(text, encoding="utf-8")
        engine = VllmEngine(config_of(tmp_path, 0))
        with pytest.raises(ModelError, match=rf"^model\.path: .*{problem}"):
            engine.start()
        engine.shutdown()

    async def test_nothing_works_before_the_start(self, folder: Path) -> None:
        engine = VllmEngine(config_of(folder, 0))
        engine.abort("nobody")
        engine.shutdown()
        with pytest.raises(EngineError, match="start was not called"):
            await engine.generate("early", [5], FREE)


def break_steps(engine: VllmEngine) -> None:
    """Device thread: let the next step fail as vLLM would."""

    def fail() -> Any:
        raise ArithmeticError("invented")

    assert engine._core is not None
    engine._core._core.step_fn = fail
