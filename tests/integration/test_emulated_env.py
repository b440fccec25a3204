"""Emulated environments behind the real server, played by the real client with the emulated agent's chat."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tiderl.agent.emulated_chat import EmulatedChat
from tiderl.engines.emulated_language import END, act_id, is_call
from tiderl.envs.builtin.emulated import NUM_TASKS, TRACE_VARIABLE, EmulatedOSWorld
from tiderl.envs.builtin.emulated_workloads import OSWORLD, Episode
from tiderl.envs.client import EnvClient
from tiderl.envs.server import EnvServer, EnvServerConfig
from tiderl.errors import UserError

SCALE = 50.0


@asynccontextmanager
async def serving(env: str) -> AsyncIterator[tuple[EnvServer, EnvClient]]:
    server = EnvServer(EnvServerConfig(env, port=0, options={"time_scale": SCALE}))
    await server.start()
    try:
        async with EnvClient([server.url], env=env) as client:
            yield server, client
    finally:
        await server.stop()


async def test_an_episode_over_http_waits_as_long_as_its_workload_says(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving("emulated-osworld") as (server, client):
        slept: list[float] = []

        async def sleep(seconds: float) -> None:
            slept.append(seconds)
            await asyncio.sleep(seconds / 100)

        monkeypatch.setattr(server.service, "_sleep", sleep)
        chat, episode = EmulatedChat(SCALE), Episode(OSWORLD, "train", 5)
        session = await client.start("train", 5)
        assert session.started is not None
        assert session.started.delay_s == 0.0  # it has passed, and isn't told
        prompt = chat.initial(session.started.instruction, session.started.observation)
        expected_s = [episode.opening.delay_s / SCALE]
        assert len(prompt) == OSWORLD.instruction_tokens + episode.opening.observation.num_tokens
        for roll in range(OSWORLD.max_rounds):
            answer = [act_id(0.5, roll), 1, 2, END]
            stepped, reply = await session.step(chat.action_text(answer)), episode.act(0.5, roll)
            expected_s.append(reply.delay_s / SCALE)
            assert session.last_env_s >= expected_s[-1] / 100
            assert (stepped.done, stepped.success) == (reply.done, reply.success)
            if stepped.done:
                break
            ids = chat.next_turn(answer, stepped.observation)
            assert len(ids) == reply.observation.num_tokens
            assert is_call(ids[-1])
        assert stepped.done
        assert slept == pytest.approx(expected_s)
        await session.end()


async def test_the_suites_tasks_and_types() -> None:
    async with serving("emulated-text") as (_, client):
        assert await client.tasks() == NUM_TASKS
        types = await client.task_types("test", 1000)
        assert types == [("webshop", 1), ("alfworld", 1)] * 500


async def test_a_trace_is_served_with_its_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [{"prompt_tokens": 9, "output_tokens": 3, "env_latency_s": None}]
    lines = [{"task_type": name, "turns": turns, "reward": 1} for name in ("a", "a", "b")]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setenv(TRACE_VARIABLE, str(path))
    async with serving("emulated-trace") as (_, client):
        assert await client.tasks() == {"train": 3, "test": 3}
        assert await client.task_types("train", 3) == [("a", 2), ("b", 1)]
        session = await client.start("train", 2)
        chat = EmulatedChat(SCALE)
        assert session.started is not None
        prompt = chat.initial(session.started.instruction, session.started.observation)
        assert len(prompt) == 9
        stepped = await session.step(chat.action_text([act_id(0.0, 1), END]))
        assert (stepped.done, stepped.reward, stepped.success) == (True, 1.0, True)
        await session.end()


async def test_a_trace_that_is_not_named_ends_the_server_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRACE_VARIABLE, raising=False)
    with pytest.raises(UserError, match="TIDERL_TRACE_FILE"):
        async with serving("emulated-trace"):
            pass


def test_a_reset_fits_into_the_servers_step_timeout_at_scale_1() -> None:
    # The host refuses longer delays.
    assert OSWORLD.reset.max_s < EnvServerConfig("x").step_timeout_s
    assert EmulatedOSWorld().start("train", 0, {}).delay_s <= OSWORLD.reset.max_s
