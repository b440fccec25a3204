"""Invariants 4 and 5 of the engine protocol (what is held, what is freed), with transformers as the other implementation.

A context of n tokens that ended a turn takes ceil((n - 1) / block) blocks: its last token was sampled and never computed. Expected
numbers of blocks and of cached tokens are worked out from that by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from tests.conformance.engine_twin import (
    BLOCK,
    BOUND_S,
    FREE,
    GREEDY,
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
from tiderl.engines.base import EngineStats, Generation, Sampling
from tiderl.engines.vllm import VllmEngine
from tiderl.types import WeightVersion

MAX_CONTEXT = 8 * BLOCK
#: Of the narrow engine: blocks (a context and a half) and sequences in a step.
NUM_BLOCKS, MAX_RUNNING = 12, 3

pytestmark = pytest.mark.filterwarnings(VLLM_WARNING)


def free(max_new_tokens: int) -> Sampling:
    return replace(FREE, max_new_tokens=max_new_tokens)


@dataclass
class Session:
    """A task's context over several turns; each generation is held against the reference."""

    engine: VllmEngine
    request_id: str
    reference: Reference
    ids: list[int] = field(default_factory=list)

    async def turn(self, new: Sequence[int], sampling: Sampling, *, hold: bool = True) -> Generation:
        prompt = [*self.ids, *new]
        generation = await self.engine.generate(self.request_id, prompt, sampling, hold=hold)
        if len(generation.token_ids):
            gaps = self.reference.gaps(prompt, generation, sampling.temperature or 1.0)
            assert gaps.max() < TOLERANCE, (self.request_id, len(prompt), gaps)
        self.ids = [*prompt, *generation.token_ids.tolist()]
        return generation

    async def hold_blocks(self, num_blocks: int) -> None:
        """A first turn after which exactly so many full blocks are held, and a token that is not computed."""
        await self.turn(random_ids(sum(self.request_id.encode()), num_blocks * BLOCK - 9), free(10))
        assert self.num_blocks == num_blocks

    @property
    def num_blocks(self) -> int:
        return -(-(len(self.ids) - 1) // BLOCK)


def sessions(engine: VllmEngine, reference: Reference, names: Sequence[str]) -> list[Session]:
    return [Session(engine, name, reference) for name in names]


@contextlib.asynccontextmanager
async def device_thread_stopped(engine: VllmEngine) -> AsyncIterator[None]:
    """What is asked of the engine inside comes to it all at once afterwards."""
    gate = threading.Event()
    stopped = asyncio.create_task(engine.submit(lambda: gate.wait(BOUND_S)))
    await asyncio.sleep(0)
    try:
        yield
    finally:
        gate.set()
    assert await stopped


def wait_until_held(engine: VllmEngine) -> None:
    deadline_s = time.monotonic() + BOUND_S
    while engine.stats().num_held == 0:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), tie=False, max_context=MAX_CONTEXT)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="module")
def other(folder: Path) -> Reference:
    return Reference(folder, seed=1)


class TestRoomyCache:
    """Room for 32 contexts: nobody takes anything from anybody."""

    @pytest.fixture(scope="class")
    @classmethod
    def running(cls, folder: Path) -> Iterator[VllmEngine]:
        engine = VllmEngine(config_of(folder, 32 * MAX_CONTEXT, max_context=MAX_CONTEXT))
        engine.start()
        yield engine
        engine.shutdown()

    @pytest.fixture
    async def engine(self, running: VllmEngine, reference: Reference) -> VllmEngine:
        """Version 1, nothing cached, nothing held."""
        await load(running, reference.weights(), 1)
        assert (running.stats().num_held, running.stats().used_blocks) == (0, 0)
        return running

    async def test_a_turn_that_goes_on_computes_only_what_is_new(
        self, engine: VllmEngine, reference: Reference
    ) -> None:
        rng, num_turns = np.random.default_rng(0), 4
        played = sessions(engine, reference, [f"s{number}" for number in range(6)])
        before = engine.stats()
        prompt_tokens, computed_tokens = 0, 0

        async def play(session: Session, temperature: float) -> None:
            nonlocal prompt_tokens, computed_tokens
            for turn in range(num_turns):
                new: list[int] = rng.integers(0, VOCAB, rng.integers(1, 45)).tolist()
                sampling = replace(FREE, temperature=temperature, max_new_tokens=int(rng.integers(1, 20)))
                held = len(session.ids)
                generation = await session.turn(new, sampling)
                # Not computed: all that was held but the token sampled last.
                assert generation.cached_tokens == max(held - 1, 0), (session.request_id, turn)
                prompt_tokens += held + len(new)
                computed_tokens += held + len(new) - generation.cached_tokens

        # Sessions are at different turns in one batch, sampled in different ways.
        await asyncio.gather(*(play(session, [1.0, 0.0, 0.7][n % 3]) for n, session in enumerate(played)))
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_held) == (0, 0, 6)
        assert stats.used_blocks == sum(session.num_blocks for session in played)
        grown = difference(before, stats)
        assert grown["total_prefilled_tokens"] == computed_tokens
        assert grown["total_cached_tokens"] == prompt_tokens - computed_tokens
        assert grown["total_preemptions"] == 0

    async def test_a_greedy_turn_that_goes_on_is_greedy(self, engine: VllmEngine, reference: Reference) -> None:
        (session,) = sessions(engine, reference, ["greedy"])
        for seed in range(3):
            prompt = [*session.ids, *random_ids(seed, 21)]
            generation = await session.turn(prompt[len(session.ids) :], GREEDY)
            assert generation.token_ids.tolist() == reference.greedy(prompt, 16)

    async def test_a_turn_may_go_on_without_anything_new(self, engine: VllmEngine, reference: Reference) -> None:
        (session,) = sessions(engine, reference, ["on"])
        await session.turn(random_ids(0, 40), free(5))
        generation = await session.turn([], free(5))
        assert (generation.cached_tokens, len(generation.token_ids)) == (44, 5)

    async def test_a_turn_that_was_stopped_goes_on_after_the_stop_id(
        self, engine: VllmEngine, reference: Reference
    ) -> None:
        (session,) = sessions(engine, reference, ["stop"])
        stop = reference.greedy(random_ids(1, 50), 4)[3]
        stopped = await session.turn(random_ids(1, 50), replace(GREEDY, stop_token_ids=(stop,)))
        assert (stopped.finish, session.ids[-1]) == ("stop", stop)
        generation = await session.turn(random_ids(2, 10), GREEDY)
        assert generation.cached_tokens == len(session.ids) - 16 - 10 - 1

    async def test_the_last_turn_frees_what_was_held(self, engine: VllmEngine, reference: Reference) -> None:
        (session,) = sessions(engine, reference, ["last"])
        await session.turn(random_ids(0, 70), free(5))
        generation = await session.turn(random_ids(1, 5), free(5), hold=False)
        assert generation.cached_tokens == 74
        assert (engine.stats().num_held, engine.stats().used_blocks) == (0, 0)

    async def test_release_frees_and_leaves_full_blocks_in_the_prefix_cache(
        self, engine: VllmEngine, reference: Reference
    ) -> None:
        one, two = sessions(engine, reference, ["one", "two"])
        await one.turn(random_ids(0, 100), free(12))
        await two.turn(random_ids(1, 60), free(12))
        engine.release("unknown")
        engine.release("one")
        stats = await engine.submit(engine.stats)
        assert (stats.num_held, stats.used_blocks) == (1, two.num_blocks)
        engine.release("one")
        again = await one.turn(random_ids(2, 9), free(3))
        assert again.cached_tokens == 3 * BLOCK  # of 111 computed tokens
        assert (await two.turn(random_ids(3, 9), free(3))).cached_tokens == 71

    async def test_release_reaches_no_request_in_flight(self, engine: VllmEngine, reference: Reference) -> None:
        (session,) = sessions(engine, reference, ["busy"])
        await session.turn(random_ids(0, 40), free(5))
        task = asyncio.create_task(session.turn(random_ids(1, 10), free(100)))
        await in_flight(engine, 5)
        engine.release("busy")
        assert (await task).finish == "length"
        assert engine.stats().num_held == 1

    @pytest.mark.parametrize("kept", [150, 97, 20], ids=["a late token differs", "shorter", "much shorter"])
    async def test_a_prompt_that_does_not_go_on_frees_and_starts_fresh(
        self, engine: VllmEngine, reference: Reference, kept: int
    ) -> None:
        (session,) = sessions(engine, reference, ["turned"])
        await session.turn(random_ids(0, 150), free(30))
        if kept == 150:
            session.ids[160] = (session.ids[160] + 1) % VOCAB
        else:
            session.ids = session.ids[:kept]
        before = engine.stats()
        generation = await session.turn([], free(4))
        # The prefix cache knows full blocks, and the prompt's last token is always computed.
        cached = (min(len(session.ids) - 4 - 1, 160) // BLOCK) * BLOCK
        assert generation.cached_tokens == cached
        assert difference(before, engine.stats())["total_prefilled_tokens"] == len(session.ids) - 4 - cached
        assert (engine.stats().num_held, engine.stats().used_blocks) == (1, session.num_blocks)

    async def test_a_weight_update_frees_what_is_held(
        self, engine: VllmEngine, reference: Reference, other: Reference
    ) -> None:
        (session,) = sessions(engine, reference, ["stale"])
        await session.turn(random_ids(0, 80), free(10))
        await load(engine, other.weights(), 2)
        assert (engine.stats().num_held, engine.stats().used_blocks) == (0, 0)
        session.reference = other
        generation = await session.turn(random_ids(1, 10), free(20))
        assert generation.cached_tokens == 0
        assert set(generation.weight_versions.tolist()) == {2}

    async def test_abort_frees_a_turn_that_went_on(self, engine: VllmEngine, reference: Reference) -> None:
        (session,) = sessions(engine, reference, ["paused"])
        await session.turn(random_ids(0, 70), free(10))
        task = asyncio.create_task(session.turn(random_ids(1, 20), free(100)))
        await in_flight(engine, 10)
        engine.abort("paused")
        generation = await task
        assert generation.finish == "aborted"
        assert 10 <= len(generation.token_ids) < 100
        assert (engine.stats().num_held, engine.stats().used_blocks) == (0, 0)
        num_full = (len(session.ids) - 1) // BLOCK
        assert (await session.turn([], free(3))).cached_tokens == num_full * BLOCK

    async def test_cancelling_frees_a_turn_that_went_on(self, engine: VllmEngine, reference: Reference) -> None:
        (session,) = sessions(engine, reference, ["gone"])
        await session.turn(random_ids(0, 70), free(10))
        task = asyncio.create_task(session.turn(random_ids(1, 20), free(100)))
        await in_flight(engine, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stats = await engine.submit(engine.stats)
        assert (stats.num_held, stats.used_blocks, stats.num_running) == (0, 0, 0)

    async def test_cancelling_frees_a_turn_that_just_ended(self, engine: VllmEngine) -> None:
        task = asyncio.create_task(engine.generate("late", random_ids(0, 40), free(5), hold=True))
        await asyncio.sleep(0)
        wait_until_held(engine)  # without letting the event loop learn that the turn has ended
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stats = await engine.submit(engine.stats)
        assert (stats.num_held, stats.used_blocks) == (0, 0)

    async def test_score_beside_held_requests(self, engine: VllmEngine, reference: Reference) -> None:
        (session,) = sessions(engine, reference, ["beside"])
        await session.turn(random_ids(0, 70), free(10))
        before = engine.stats()
        for ids in (session.ids, random_ids(1, MAX_CONTEXT)):
            scores = await engine.submit(lambda ids=ids: engine.score(ids))  # type: ignore[misc]
            np.testing.assert_allclose(scores, reference.log_probs(ids), atol=TOLERANCE, rtol=0)
        assert engine.stats() == before
        assert (await session.turn(random_ids(2, 5), free(5))).cached_tokens == 79


class TestNarrowCache:
    """12 blocks, 3 sequences in a step: those that run take what others hold."""

    @pytest.fixture(scope="class")
    @classmethod
    def running(cls, folder: Path) -> Iterator[VllmEngine]:
        config = config_of(folder, NUM_BLOCKS * BLOCK, max_context=MAX_CONTEXT, max_running=MAX_RUNNING)
        engine = VllmEngine(config)
        assert engine.start().num_blocks == NUM_BLOCKS
        yield engine
        engine.shutdown()

    @pytest.fixture
    async def engine(self, running: VllmEngine, reference: Reference) -> VllmEngine:
        """Version 1, nothing cached, nothing held."""
        await load(running, reference.weights(), 1)
        return running

    async def test_held_requests_take_no_place_among_those_that_run(
        self, engine: VllmEngine, reference: Reference
    ) -> None:
        held = sessions(engine, reference, "abcdefgh")
        for session in held:
            await session.turn(random_ids(len(session.request_id), 10), free(3))
        runners = sessions(engine, reference, ["r1", "r2", "r3", "r4"])
        tasks = [asyncio.create_task(runner.turn([5], free(30), hold=False)) for runner in runners]
        await in_flight(engine, 3 * 5)
        stats = engine.stats()
        assert (stats.num_held, stats.num_running, stats.num_waiting) == (8, 3, 1)
        await asyncio.gather(*tasks)
        assert engine.stats().num_held == 8

    async def test_a_new_request_takes_from_the_longest_held(
        self,
        engine: VllmEngine,
        reference: Reference,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr("tiderl.engines.vllm_held._LOG_INTERVAL_S", 0.0)
        first, second, third = sessions(engine, reference, ["first", "second", "third"])
        for session in (second, first, third):
            await session.hold_blocks(4)
        caplog.clear()
        # `second` was held first, and again last: the block more that it needs comes from `first`.
        await second.turn([7], free(2))
        assert (engine.stats().num_held, engine.stats().used_blocks) == (2, 4 + 5)
        # 6 blocks wanted, 3 free: the 4 of `third` go, the 5 of `second` stay.
        generation = await engine.generate("new", random_ids(9, 6 * BLOCK), free(1))
        assert (len(generation.token_ids), generation.cached_tokens) == (1, 0)
        assert (engine.stats().num_held, engine.stats().used_blocks) == (1, 5)
        assert (await second.turn([8], free(2))).cached_tokens == len(second.ids) - 2 - 1 - 1
        assert [record.message.split(" lost")[0] for record in caplog.records] == 2 * [
            "the KV cache is full: 1 request(s)"
        ]

    async def test_every_block_held_and_a_full_context_still_runs(
        self,
        engine: VllmEngine,
        reference: Reference,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr("tiderl.engines.vllm_held._LOG_INTERVAL_S", float("inf"))
        held = sessions(engine, reference, "abcdef")
        for session in held:
            await session.hold_blocks(2)
        assert engine.stats().used_blocks == NUM_BLOCKS
        before = engine.stats()
        caplog.clear()
        (full,) = sessions(engine, reference, ["full"])
        await full.turn(random_ids(1, 20), free(MAX_CONTEXT), hold=False)
        assert len(full.ids) == MAX_CONTEXT
        # It needs 8 blocks: 4 of the 6 lose theirs, one after the other, and nobody is preempted.
        assert (engine.stats().num_held, engine.stats().used_blocks) == (2, 4)
        assert difference(before, engine.stats())["total_preemptions"] == 0
        assert len(caplog.records) <= 1  # no second line within the interval

    async def test_those_that_lost_their_blocks_start_fresh(self, engine: VllmEngine, reference: Reference) -> None:
        one, two = sessions(engine, reference, ["one", "two"])
        await one.hold_blocks(6)
        await two.turn(random_ids(1, MAX_CONTEXT - 5), free(5))  # takes the 6 free ones, and 2 of 6
        assert engine.stats().num_held == 1
        generation = await one.turn(random_ids(2, 5), free(5))
        assert generation.cached_tokens == 4 * BLOCK  # found in the prefix cache: the context's beginning
        assert len(generation.token_ids) == 5

    async def test_turns_that_go_on_together_do_not_lock_each_other_out(
        self, engine: VllmEngine, reference: Reference
    ) -> None:
        together = sessions(engine, reference, "abc")
        for session in together:
            await session.hold_blocks(4)
        assert engine.stats().used_blocks == NUM_BLOCKS
        # Each needs a fifth block, none is free, none is held by somebody idle: all three are there before the next step.
        async with device_thread_stopped(engine):
            tasks = [asyncio.create_task(session.turn(random_ids(5, 9), free(5))) for session in together]
            await asyncio.sleep(0)
        generations = await asyncio.gather(*tasks)
        assert generations[0].cached_tokens == 4 * BLOCK
        assert [len(generation.token_ids) for generation in generations] == [5, 5, 5]

    async def test_who_runs_takes_from_who_waits_before_anybody_is_preempted(
        self, engine: VllmEngine, reference: Reference
    ) -> None:
        *runners, waiter = sessions(engine, reference, "abcd")
        for session in (*runners, waiter):
            await session.hold_blocks(2)
        before = engine.stats()
        # From 2 to 4 blocks each: all 12.
        tasks = [asyncio.create_task(runner.turn([5], free(4 * BLOCK - 66))) for runner in runners]
        await in_flight(engine, 3)
        tasks.append(asyncio.create_task(waiter.turn([5], free(4))))
        await in_flight(engine, 3)
        assert (engine.stats().num_waiting, engine.stats().used_blocks) == (1, 2 + 3 * 3)
        await asyncio.gather(*tasks)
        assert [runner.num_blocks for runner in runners] == [4, 4, 4]
        assert difference(before, engine.stats())["total_preemptions"] == 0

    async def test_a_weight_update_reaches_a_turn_that_waits_with_held_blocks(
        self, engine: VllmEngine, reference: Reference, other: Reference
    ) -> None:
        waiter, idle = sessions(engine, reference, ["waiter", "idle"])
        await waiter.hold_blocks(2)
        await idle.hold_blocks(2)
        blockers = [
            asyncio.create_task(engine.generate(f"b{n}", [5 + n], free(60), hold=True)) for n in range(MAX_RUNNING)
        ]
        await in_flight(engine, 3)
        waiter.reference = other
        task = asyncio.create_task(waiter.turn(random_ids(3, 5), free(10)))
        await in_flight(engine, 3)
        assert engine.stats().num_waiting == 1

        def update() -> EngineStats:
            engine.update_weights(other.weights(), WeightVersion(2))
            return engine.stats()  # before the next step

        stats = await engine.submit(update)
        assert (stats.num_held, stats.used_blocks) == (0, 0)
        generation = await task
        assert (generation.cached_tokens, set(generation.weight_versions.tolist())) == (0, {2})
        for blocker in await asyncio.gather(*blockers):
            assert sorted(set(blocker.weight_versions.tolist())) == [1, 2]

    async def test_score_takes_what_is_held(self, engine: VllmEngine, reference: Reference) -> None:
        held = sessions(engine, reference, "abc")
        for session in held:
            await session.hold_blocks(4)
        ids = random_ids(1, MAX_CONTEXT)
        scores = await engine.submit(lambda: engine.score(ids))
        np.testing.assert_allclose(scores, reference.log_probs(ids), atol=TOLERANCE, rtol=0)
        assert (engine.stats().num_held, engine.stats().used_blocks) == (1, 4)

    @pytest.mark.parametrize(("discard_from", "cached"), [(None, 6 * BLOCK), (2 * BLOCK, 2 * BLOCK), (33, 2 * BLOCK)])
    async def test_discarded_blocks_are_given_away_first(
        self, engine: VllmEngine, reference: Reference, discard_from: int | None, cached: int
    ) -> None:
        (session,) = sessions(engine, reference, ["over"])
        await session.hold_blocks(7)
        engine.release("over", discard_from=discard_from)
        # 5 blocks were never used. Who takes 6 takes those and the context's last one, or the 5 discarded and one of those.
        await engine.generate("taker", random_ids(1, 6 * BLOCK), free(1))
        assert (await session.turn([], free(1))).cached_tokens == cached

    async def test_blocks_that_others_use_are_not_discarded(self, engine: VllmEngine, reference: Reference) -> None:
        one, two = sessions(engine, reference, ["one", "two"])
        shared = random_ids(0, 3 * BLOCK)
        await one.turn([*shared, *random_ids(1, 40)], free(5))
        assert (await two.turn([*shared, *random_ids(2, 20)], free(5))).cached_tokens == 3 * BLOCK
        assert engine.stats().used_blocks == 3 + 2 + 1
        engine.release("one", discard_from=0)
        assert (await engine.submit(engine.stats)).used_blocks == 4
        await engine.generate("taker", random_ids(3, 8 * BLOCK - 1), free(1))
        assert engine.stats().num_held == 1
        assert (await two.turn(random_ids(4, 5), free(5))).cached_tokens == len(two.ids) - 5 - 5 - 1

    async def test_many_more_tasks_than_fit_all_come_to_their_end(
        self, engine: VllmEngine, reference: Reference
    ) -> None:
        rng = np.random.default_rng(1)

        async def play(session: Session) -> None:
            for turn in range(4):
                new: list[int] = rng.integers(0, VOCAB, rng.integers(1, 40)).tolist()
                task = asyncio.create_task(session.turn(new, free(int(rng.integers(1, 22)))))
                if rng.random() < 0.2:
                    await in_flight(engine, 3)
                    engine.abort(session.request_id)
                await task
                if turn == 3 or rng.random() < 0.1:
                    engine.release(session.request_id, discard_from=int(rng.integers(0, 100)))

        async with asyncio.timeout(BOUND_S):
            await asyncio.gather(
                *(play(session) for session in sessions(engine, reference, [f"m{n}" for n in range(14)]))
            )
        stats = await engine.submit(engine.stats)
        assert (stats.num_running, stats.num_waiting, stats.num_held, stats.used_blocks) == (0, 0, 0, 0)


class TestEnd:
    async def test_shutdown_with_held_requests(self, folder: Path, reference: Reference) -> None:
        engine = VllmEngine(config_of(folder, 0, max_context=MAX_CONTEXT))
        try:
            engine.release("before the start")
            await asyncio.to_thread(engine.start)
            await load(engine, reference.weights(), 1)
            (session,) = sessions(engine, reference, ["left"])
            await session.hold_blocks(2)
        finally:
            await asyncio.to_thread(engine.shutdown)
        engine.release("left")
