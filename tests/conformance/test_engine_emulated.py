"""The engine protocol's invariants for the emulated engine, through its front: threads, event loop, weights, time.

What is scheduled when is tested on the core alone (tests/unit/test_emulated_core.py), and against vLLM
(test_emulated_cache_rates.py).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.conformance.emulated_twin import FlatCosts
from tiderl.clock import JobClock
from tiderl.config.schema import Config, EngineConfig, ModelConfig, TrainConfig
from tiderl.engines.base import EngineInfo, Sampling
from tiderl.engines.emulated import EmulatedEngine
from tiderl.engines.emulated_language import END, NUM_FILLERS, call_id, read_act
from tiderl.errors import ConfigError, EngineError, WeightMismatch
from tiderl.profiles.costs import StepLoad
from tiderl.rl.emulated_model import WEIGHT_NAME, score, weights_of
from tiderl.types import WeightVersion

BLOCK, MAX_CONTEXT, BOUND_S = 16, 512, 60.0
STEP_S = 0.001
ASKED = Sampling(1.0, 400, (END,))
PROMPT = list(range(40))


def free(num_tokens: int) -> Sampling:
    """As many tokens, whatever is asked for."""
    return Sampling(1.0, num_tokens, (), ignore_stop=True)


def config_of(kv_cache_tokens: int = 64 * MAX_CONTEXT, *, max_running: int = 64) -> Config:
    return Config(
        model=ModelConfig(max_context_tokens=MAX_CONTEXT),
        engine=EngineConfig(
            kind="emulated", kv_cache_tokens=kv_cache_tokens, block_size=BLOCK, max_running=max_running
        ),
        train=TrainConfig(steps=10),
    )


def weights(version: int, length: int = 8, name: str = WEIGHT_NAME) -> tuple[str, torch.Tensor]:
    return name, torch.from_numpy(weights_of(version)[:length])


async def load(engine: EmulatedEngine, *items: tuple[str, torch.Tensor], version: int) -> None:
    await engine.submit(lambda: engine.update_weights(iter(items), WeightVersion(version)))


async def in_flight(engine: EmulatedEngine, num_tokens: int) -> None:
    goal = engine.stats().total_generated_tokens + num_tokens
    async with asyncio.timeout(BOUND_S):
        while await engine.submit(lambda: engine.stats().total_generated_tokens) < goal:
            pass


def wait_until_held(engine: EmulatedEngine) -> None:
    deadline_s = time.monotonic() + BOUND_S
    while engine.stats().num_held == 0:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


@pytest.fixture
async def engine() -> AsyncIterator[EmulatedEngine]:
    engine = EmulatedEngine(config_of(), FlatCosts(STEP_S), JobClock(), rank=1)
    assert await asyncio.to_thread(engine.start) == EngineInfo(BLOCK, 64 * MAX_CONTEXT // BLOCK, MAX_CONTEXT)
    yield engine
    await asyncio.to_thread(engine.shutdown)


class TestAnswers:
    async def test_a_call_is_answered(self, engine: EmulatedEngine) -> None:
        await load(engine, weights(4), version=4)
        generation = await engine.generate("a", [*PROMPT, call_id(30, exact=True)], ASKED)
        tokens = generation.token_ids.tolist()
        assert (len(tokens), tokens[-1], generation.finish) == (30, END, "stop")
        assert read_act(tokens[0]).skill == pytest.approx(4 / 10)
        np.testing.assert_allclose(generation.log_probs, -np.log(NUM_FILLERS))
        assert generation.token_ids.dtype == generation.weight_versions.dtype == np.int32
        assert generation.log_probs.dtype == np.float32
        assert generation.weight_versions.tolist() == [4] * 30

    async def test_the_context_ends_a_turn(self, engine: EmulatedEngine) -> None:
        prompt = [*[5] * (MAX_CONTEXT - 3), call_id(30, exact=True)]
        generation = await engine.generate("end", prompt, ASKED)
        assert (len(generation.token_ids), generation.finish) == (2, "length")

    async def test_an_aborted_answer_goes_on_where_it_was(self, engine: EmulatedEngine) -> None:
        prompt = [*PROMPT, call_id(300, exact=True)]
        task = asyncio.create_task(engine.generate("a", prompt, ASKED))
        await in_flight(engine, 10)
        engine.abort("unknown")
        engine.abort("a")
        first = await task
        made = len(first.token_ids)
        assert first.finish == "aborted" and 10 <= made < 300
        assert (await engine.submit(engine.stats)).used_blocks == 0
        rest = await engine.generate("a", [*prompt, *first.token_ids.tolist()], ASKED)
        assert (len(rest.token_ids), rest.token_ids[-1], rest.finish) == (300 - made, END, "stop")
        assert rest.cached_tokens == (len(prompt) + made - 1) // BLOCK * BLOCK

    async def test_ranks_answer_differently(self, engine: EmulatedEngine) -> None:
        other = EmulatedEngine(config_of(), FlatCosts(STEP_S), JobClock(), rank=2)
        await asyncio.to_thread(other.start)
        try:
            one, two = [await e.generate("a", PROMPT, free(20)) for e in (engine, other)]
        finally:
            await asyncio.to_thread(other.shutdown)
        assert one.token_ids.tolist() != two.token_ids.tolist()


class TestHold:
    async def test_the_next_turn_takes_over(self, engine: EmulatedEngine) -> None:
        first = await engine.generate("a", PROMPT, free(9), hold=True)
        assert (engine.stats().num_held, engine.stats().used_blocks) == (1, 3)
        context = [*PROMPT, *first.token_ids.tolist()]
        second = await engine.generate("a", [*context, 1, 2], free(3), hold=True)
        assert second.cached_tokens == len(context) - 1
        engine.release("unknown")
        engine.release("a")
        stats = await engine.submit(engine.stats)
        assert (stats.num_held, stats.used_blocks) == (0, 0)

    async def test_a_lack_of_blocks_takes_from_the_longest_held_and_says_so_once(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = EmulatedEngine(config_of(MAX_CONTEXT), FlatCosts(0.0), JobClock(), rank=1)
        await asyncio.to_thread(engine.start)
        try:
            for name in "abcd":
                await engine.generate(name, [ord(name)] * 120, free(8), hold=True)
            assert engine.stats().used_blocks == MAX_CONTEXT // BLOCK
            for name in "ef":
                await engine.generate(name, [ord(name)] * 240, free(8), hold=True)
            assert engine.stats().num_held == 2
        finally:
            await asyncio.to_thread(engine.shutdown)
        # A second line within the interval is put off; "e" took from two.
        lines = [record.message for record in caplog.records if "the KV cache is full" in record.message]
        assert [line.split(" lost")[0] for line in lines] == ["the KV cache is full: 2 request(s)"]

    async def test_cancelling_frees_what_ran_and_what_was_held(self, engine: EmulatedEngine) -> None:
        first = await engine.generate("a", PROMPT, free(9), hold=True)
        task = asyncio.create_task(engine.generate("a", [*PROMPT, *first.token_ids.tolist(), 7], free(400), hold=True))
        await in_flight(engine, 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stats = await engine.submit(engine.stats)
        assert (stats.num_running, stats.num_waiting, stats.num_held, stats.used_blocks) == (0, 0, 0, 0)

    async def test_cancelling_frees_a_turn_that_just_ended(self, engine: EmulatedEngine) -> None:
        task = asyncio.create_task(engine.generate("late", PROMPT, free(3), hold=True))
        await asyncio.sleep(0)
        wait_until_held(engine)  # without letting the event loop learn that the turn has ended
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await engine.submit(engine.stats)).num_held == 0


class TestWeights:
    def test_expected_weights(self) -> None:
        engine = EmulatedEngine(config_of(), FlatCosts(0.0), JobClock(), rank=1)
        engine.start()
        try:
            assert dict(engine.expected_weights()) == {"emulated.weight": (8,)}
        finally:
            engine.shutdown()

    async def test_an_update_reaches_requests_in_flight(self, engine: EmulatedEngine) -> None:
        before = engine.stats()
        tasks = [asyncio.create_task(engine.generate(f"u{n}", [n] * 20, free(100), hold=True)) for n in range(4)]
        await in_flight(engine, 4 * 5)
        await load(engine, weights(3), version=3)
        num_old = 0
        for generation in await asyncio.gather(*tasks):
            versions = generation.weight_versions
            assert sorted(set(versions.tolist())) == [0, 3] and (np.diff(versions) >= 0).all()
            num_old += int((versions == 0).sum())
        after = engine.stats()
        # As for vLLM: each prompt twice, and what had been generated once, but for one token each.
        assert after.total_prefilled_tokens - before.total_prefilled_tokens == 2 * 4 * 20 + num_old - 4
        assert (after.total_cached_tokens, after.total_preemptions, after.num_held) == (0, 0, 4)
        await load(engine, weights(4), version=4)
        assert (engine.stats().num_held, engine.stats().used_blocks) == (0, 0)

    async def test_score_is_that_of_the_received_weights(self, engine: EmulatedEngine) -> None:
        for version in (0, 5):
            if version:
                await load(engine, weights(version), version=version)
            scores = await engine.submit(lambda: engine.score(PROMPT))
            np.testing.assert_array_equal(scores, score(weights_of(version), PROMPT))

    async def test_the_senders_buffer_is_not_kept(self, engine: EmulatedEngine) -> None:
        name, tensor = weights(2)
        await load(engine, (name, tensor), version=2)
        tensor.zero_()
        scores = await engine.submit(lambda: engine.score(PROMPT))
        np.testing.assert_array_equal(scores, score(weights_of(2), PROMPT))

    @pytest.mark.parametrize(
        ("items", "problem"),
        [
            ([], "missing: emulated.weight"),
            ([weights(1, length=7)], r"wrong shape: emulated.weight is \[7\], not \[8\]"),
            ([weights(1), weights(1)], "sent twice: emulated.weight"),
            ([weights(1), weights(1, name="other")], "unexpected: other"),
        ],
    )
    async def test_wrong_weights_are_refused_and_change_nothing(
        self, engine: EmulatedEngine, items: list[tuple[str, torch.Tensor]], problem: str
    ) -> None:
        with pytest.raises(WeightMismatch, match=problem):
            await load(engine, *items, version=1)
        np.testing.assert_array_equal(await engine.submit(lambda: engine.score(PROMPT)), score(weights_of(0), PROMPT))
        assert (await engine.generate("v", PROMPT, free(4))).weight_versions.tolist() == [0] * 4


class TestErrors:
    @pytest.mark.parametrize(
        ("prompt", "sampling", "problem"),
        [
            ([5] * MAX_CONTEXT, ASKED, "don't fit"),
            ([], ASKED, "don't fit"),
            ([-1], ASKED, "negative"),
            ([2**31], ASKED, "int32"),
            ([5], replace(ASKED, max_new_tokens=0), "max_new_tokens"),
            ([5], replace(ASKED, temperature=-1.0), "temperature"),
        ],
    )
    async def test_bad_requests_are_refused(
        self, engine: EmulatedEngine, prompt: list[int], sampling: Sampling, problem: str
    ) -> None:
        with pytest.raises(EngineError, match=problem):
            await engine.generate("bad", prompt, sampling)
        assert (await engine.generate("good", [5], free(3))).finish == "length"

    async def test_an_id_in_flight_cannot_be_used_again(self, engine: EmulatedEngine) -> None:
        first = asyncio.create_task(engine.generate("same", [5], free(50)))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="'same' is in use"):
            await engine.generate("same", [6], free(3))
        assert len((await first).token_ids) == 50

    async def test_score_wants_tokens_that_fit(self, engine: EmulatedEngine) -> None:
        for ids in ([5], [5] * (MAX_CONTEXT + 1), [5, -1]):
            with pytest.raises(EngineError):
                await engine.submit(lambda ids=ids: engine.score(ids))  # type: ignore[misc]
        with pytest.raises(EngineError, match="device thread"):
            engine.score([5, 6])
        with pytest.raises(EngineError, match="device thread"):
            engine.update_weights([], WeightVersion(2))

    async def test_after_an_error_in_a_step_everything_raises(self) -> None:
        class Broken(FlatCosts):
            def engine_step_s(self, load: StepLoad) -> float:
                raise ArithmeticError("invented")

        engine = EmulatedEngine(config_of(), Broken(0.0), JobClock(), rank=1)
        await asyncio.to_thread(engine.start)
        try:
            with pytest.raises(EngineError, match="invented") as caught:
                await engine.generate("a", [5], free(3))
            assert isinstance(caught.value.__cause__, ArithmeticError)
            with pytest.raises(EngineError, match="invented"):
                await engine.submit(lambda: None)
            engine.abort("a")
            engine.release("a")
        finally:
            await asyncio.to_thread(engine.shutdown)
        await asyncio.to_thread(engine.shutdown)

    async def test_shutdown_ends_what_is_pending(self) -> None:
        engine = EmulatedEngine(config_of(), FlatCosts(STEP_S), JobClock(), rank=1)
        await asyncio.to_thread(engine.start)
        with pytest.raises(EngineError, match="starts once"):
            engine.start()
        task = asyncio.create_task(engine.generate("a", [5], free(400)))
        await in_flight(engine, 3)
        await asyncio.to_thread(engine.shutdown)
        await asyncio.to_thread(engine.shutdown)
        with pytest.raises(EngineError, match="shut down"):
            await task

    @pytest.mark.parametrize(
        ("engine_config", "setting"),
        [
            (EngineConfig(kv_cache_tokens=MAX_CONTEXT - 1), "engine.kv_cache_tokens"),
            (EngineConfig(gpu_memory_share=0.005), "engine.gpu_memory_share"),
        ],
    )
    def test_a_cache_that_holds_no_context_is_refused(self, engine_config: EngineConfig, setting: str) -> None:
        engine = EmulatedEngine(replace(config_of(), engine=engine_config), FlatCosts(0.0), JobClock(), rank=1)
        with pytest.raises(ConfigError, match=rf"^{setting}: .*{MAX_CONTEXT}"):
            engine.start()
        engine.shutdown()

    def test_the_cache_is_what_the_profile_leaves(self) -> None:
        config = replace(config_of(), engine=EngineConfig(gpu_memory_share=0.5, block_size=32))
        engine = EmulatedEngine(config, FlatCosts(0.0), JobClock(), rank=1)
        try:
            assert engine.start().num_blocks == 50_000 // 32
        finally:
            engine.shutdown()


class VirtualTime:
    """Time that passes when the device thread sleeps, each time a little more than it asked for."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.real_s, self._late_s = 100.0, late_s

    def read_s(self) -> float:
        return self.real_s

    def sleep(self, seconds: float) -> None:
        self.real_s += seconds + self._late_s


class SlowTime(VirtualTime):
    """Virtual time whose steps take some real time too, so that others get a word in; `inside` is set during one."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = threading.Event()

    def sleep(self, seconds: float) -> None:
        self.inside.set()
        time.sleep(0.002)
        super().sleep(seconds)
        self.inside.clear()


class TestTime:
    """All numbers are sums of powers of two, so that additions are exact."""

    STEP_S, LOAD_S, SWAP_S = 0.25, 2.0, 8.0

    async def run(self, virtual: VirtualTime, scale: float, body: Callable[[EmulatedEngine], object]) -> EmulatedEngine:
        costs = FlatCosts(self.STEP_S, load_s=self.LOAD_S, swap_s=self.SWAP_S)
        engine = EmulatedEngine(config_of(), costs, JobClock(scale, virtual.read_s), rank=1, sleep=virtual.sleep)
        await asyncio.to_thread(engine.start)
        try:
            await body(engine)  # type: ignore[misc]
        finally:
            await asyncio.to_thread(engine.shutdown)
        return engine

    @pytest.mark.parametrize("scale", [1.0, 4.0])
    async def test_start_steps_and_updates_take_their_time(self, scale: float) -> None:
        virtual = VirtualTime()

        async def body(engine: EmulatedEngine) -> None:
            assert virtual.real_s == 100.0 + 8.0 / scale
            # 1 step with the prompt, which makes the first token, and 31 of decoding.
            await engine.generate("a", PROMPT, free(32))
            assert virtual.real_s == 100.0 + (8.0 + 32 * 0.25) / scale
            stats = engine.stats()
            assert (stats.total_steps, stats.total_prefill_s, stats.total_decode_s) == (32, 0.25, 31 * 0.25)
            assert stats.total_late_s == 0.0
            await load(engine, weights(1), version=1)
            assert virtual.real_s == 100.0 + (8.0 + 8.0 + 2.0) / scale

        await self.run(virtual, scale, body)

    async def test_late_wake_ups_do_not_add_up(self) -> None:
        virtual = VirtualTime(late_s=2**-7)

        async def body(engine: EmulatedEngine) -> None:
            began_s = virtual.real_s
            await engine.generate("a", PROMPT, free(400))
            # Only the last one is not caught up.
            assert virtual.real_s - began_s == 400 * 0.25 + 2**-7
            assert engine.stats().total_late_s == 2**-7

        await self.run(virtual, 1.0, body)

    async def test_a_step_of_both_kinds_is_split_by_its_tokens(self) -> None:
        gate = threading.Event()

        async def body(engine: EmulatedEngine) -> None:
            # Both are queued before the first step: they run together, and the second one ends earlier.
            stopped = asyncio.create_task(engine.submit(lambda: gate.wait(BOUND_S)))
            await asyncio.sleep(0)
            tasks = [asyncio.create_task(engine.generate(f"{n}", [n] * 24, free(2))) for n in range(2)]
            await asyncio.sleep(0)
            gate.set()
            assert await stopped
            await asyncio.gather(*tasks)
            task = asyncio.create_task(engine.generate("long", PROMPT, free(MAX_CONTEXT - 40)))
            await in_flight(engine, 1)
            await engine.generate("later", [9] * 3, free(1))
            engine.abort("long")
            await task
            stats = engine.stats()
            # 24 + 24, 40, and 3 prompt tokens beside one decoding request: 2 + 3/4 of a step.
            assert stats.total_prefill_s == (1 + 1 + 0.75) * 0.25
            assert stats.total_prefill_s + stats.total_decode_s == stats.total_steps * 0.25

        await self.run(SlowTime(), 1.0, body)

    async def test_nothing_is_posted_into_a_step(self) -> None:
        virtual, seen = SlowTime(), list[bool]()

        async def body(engine: EmulatedEngine) -> None:
            task = asyncio.create_task(engine.generate("a", PROMPT, free(100)))
            while not task.done():
                await engine.submit(lambda: seen.append(virtual.inside.is_set()))
            await task

        await self.run(virtual, 1.0, body)
        assert len(seen) > 50 and not any(seen)
