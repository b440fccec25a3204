"""The types of tasks, from the environment's class in its worker over HTTP to the client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.integration.env_caller import Caller, kind
from tiderl.envs import client as env_client
from tiderl.envs.client import EnvClient
from tiderl.envs.protocol import Started, Stepped
from tiderl.envs.server import EnvServer, EnvServerConfig
from tiderl.errors import EnvironmentFailure

NAME = "tests.integration.test_env_task_types:Typed"
LENGTHS = ("short", "short", "long")


class Typed:
    """Types in a cycle of three; what task_type does for seeds from 20 on is not right."""

    @staticmethod
    def num_tasks(split: str) -> int:
        if split != "train":
            raise ValueError(f"unknown split {split!r}")
        return 30

    @staticmethod
    def task_type(split: str, seed: int) -> str:
        if seed == 20:
            raise RuntimeError("no type today")
        return LENGTHS[seed % 3] if seed < 20 else 5  # type: ignore[return-value]

    def start(self, split: str, seed: int, options: Mapping[str, Any]) -> Started:
        raise ValueError("nobody plays this")

    def step(self, action: str) -> Stepped:
        raise ValueError("nobody plays this")

    def close(self) -> None: ...


@asynccontextmanager
async def serving() -> AsyncIterator[Caller]:
    server = EnvServer(EnvServerConfig(NAME, port=0))
    await server.start()
    try:
        async with aiohttp.ClientSession() as http:
            yield Caller(http, server)
    finally:
        await server.stop()


async def test_the_endpoint() -> None:
    async with serving() as caller:
        runs = {"runs": [["long", 1], ["short", 2], ["long", 1]]}
        assert await caller.get("/task_types?split=train&first=2&count=4") == (200, runs)
        for query in ("first=2&count=0", "first=-1&count=2", "first=x&count=2", "count=2", "first=1&count=99999"):
            assert kind(await caller.get(f"/task_types?split=train&{query}")) == (400, "bad_request", False), query
        assert kind(await caller.get("/task_types?split=test&first=0&count=1")) == (400, "bad_request", False)
        assert kind(await caller.get("/task_types?split=train&first=28&count=3")) == (400, "bad_request", False)
        assert kind(await caller.get("/task_types?split=train&first=19&count=2")) == (424, "env_error", False)
        assert kind(await caller.get("/task_types?split=train&first=21&count=2")) == (424, "env_error", False)
        assert (await caller.get("/task_types?split=train&first=0&count=1"))[0] == 200, "the worker lives"


@pytest.mark.parametrize("per_request", [1, 2, 7, 100])
async def test_the_client_asks_in_parts_and_joins_the_runs(per_request: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_client, "TYPES_PER_REQUEST", per_request)
    async with serving() as caller, EnvClient([caller.server.url]) as client:
        expected = [("short", 2), ("long", 1)] * 6 + [("short", 2)]
        assert await client.task_types("train", 20) == expected
        assert await client.task_types("train", 0) == []
        with pytest.raises(EnvironmentFailure, match="no type today"):
            await client.task_types("train", 30)


@pytest.mark.parametrize("runs", [None, [["a", 1]], [["a", 3]], [["a", "2"]], [[1, 2]], ["ab"], [["a", 3], ["b", -1]]])
async def test_an_answer_that_is_none(runs: Any) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"runs": runs})

    application = web.Application()
    application.router.add_get("/task_types", answer)
    async with TestServer(application) as server:
        retries = env_client.RetryPolicy(max_attempts=1)
        async with EnvClient([str(server.make_url(""))], retries=retries) as client:
            with pytest.raises(EnvironmentFailure, match="runs: "):
                await client.task_types("train", 2)
