"""How the tests of the environment server run one and talk to it: numbered JSON requests over real HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from tests.integration.scripted_env import NAME
from tiderl.envs.server import EnvServer, EnvServerConfig

Answer = tuple[int, dict[str, Any]]


class Caller:
    """Posts JSON and numbers its requests."""

    def __init__(self, http: aiohttp.ClientSession, server: EnvServer) -> None:
        self.http, self.server, self.count = http, server, 0

    async def post(self, path: str, **fields: Any) -> Answer:
        self.count += 1
        body = {"request_id": f"r{self.count}", **fields}
        async with self.http.post(self.server.url + path, json=body) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> Answer:
        async with self.http.get(self.server.url + path) as response:
            return response.status, await response.json()

    async def start(self, **fields: Any) -> Answer:
        return await self.post("/start", **{"env": NAME, "split": "train", "seed": 0, **fields})

    async def session(self, **options: Any) -> str:
        status, answer = await self.start(options=options)
        assert status == 200, answer
        return str(answer["session_id"])

    async def step(self, session_id: str, turn: int, action: str = "go", **fields: Any) -> Answer:
        return await self.post("/observation", session_id=session_id, turn=turn, action=action, **fields)


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[Caller]:
    server = EnvServer(EnvServerConfig(NAME, port=0, **settings))
    await server.start()
    try:
        async with aiohttp.ClientSession() as http:
            yield Caller(http, server)
    finally:
        await server.stop()


def kind(answer: Answer) -> tuple[int, str, bool]:
    status, body = answer
    return status, body["error"]["kind"], body["error"]["retryable"]


def advance_clock(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Puts the service on a clock that only the test moves."""
    now = [0.0]
    monkeypatch.setattr(caller.server.service, "_clock", lambda: now[0])

    def advance(seconds: float) -> None:
        now[0] += seconds
        caller.server.service.reap()

    return advance
