"""Paused sessions over real HTTP: handed from client to client, renewed or left to their lease; answers lost, requests late."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import pytest
from aiohttp import web

from tests.integration.env_caller import Caller, advance_clock, serving
from tests.integration.scripted_env import NAME
from tests.unit.loop_fakes import CONFIG, STOP_ID, FakeChat, FakeEngine, order_of
from tiderl.agent.loop import TaskPlayer
from tiderl.clock import JobClock
from tiderl.envs.client import EnvClient
from tiderl.errors import EnvironmentFailure
from tiderl.scheduling.events import TaskFailed
from tiderl.types import PausedTask, SessionHandle, Trajectory


class Relay:
    """Stands between client and server. Loses the answers to the paths in `lose`: the server acts, and the connection breaks."""

    def __init__(self, server_url: str, http: aiohttp.ClientSession) -> None:
        self._server_url = server_url
        self._http = http
        self.lose: Counter[str] = Counter()
        self.seen: list[tuple[str, bytes]] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.seen.append((request.path, body))
        status, answer = await self.send(request.path, body)
        if self.lose[request.path]:
            self.lose[request.path] -= 1
            assert request.transport is not None
            request.transport.abort()
        return web.Response(body=answer, status=status, content_type="application/json")

    async def send(self, path: str, body: bytes) -> tuple[int, bytes]:
        async with self._http.post(self._server_url + path, data=body) as response:
            return response.status, await response.read()

    def paths(self) -> list[str]:
        return [path for path, _ in self.seen]


@asynccontextmanager
async def relay_to(caller: Caller) -> AsyncIterator[Relay]:
    relay = Relay(caller.server.url, caller.http)
    application = web.Application()
    application.router.add_post("/{path}", relay.handle)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    relay.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield relay
    finally:
        await runner.cleanup()


@asynccontextmanager
async def client_of(*urls: str) -> AsyncIterator[EnvClient]:
    async with EnvClient(urls, env=NAME, sleep=lambda seconds: asyncio.sleep(0)) as client:
        yield client


async def counts(caller: Caller) -> tuple[int, int]:
    """Active and paused sessions."""
    answer = (await caller.get("/capacity"))[1]
    return answer["active"], answer["paused"]


async def test_a_session_is_handed_from_client_to_client() -> None:
    async with serving() as caller, client_of(caller.server.url) as first, client_of(caller.server.url + "/") as second:
        session = await first.start("train", 3)
        assert (await session.step("go")).observation.text == "1"
        await session.pause()
        assert await counts(caller) == (0, 1)
        adopted = second.adopt(session.handle)
        assert adopted.handle == session.handle
        assert (adopted.started, adopted.last_env_s) == (None, 0.0)
        await adopted.resume()
        assert await counts(caller) == (1, 0)
        assert (await adopted.step("go")).observation.text == "2"
        assert adopted.handle == replace(session.handle, turn=2)
        await adopted.end()
        assert await counts(caller) == (0, 0)


@pytest.mark.parametrize("num_lost", [1, 3])
async def test_answers_to_pause_and_resume_may_be_lost(num_lost: int) -> None:
    async with serving() as caller, relay_to(caller) as relay, client_of(relay.url) as client:
        session = await client.start("train", 0)
        await session.step("go")
        for _ in range(2):
            relay.lose.update({"/pause": num_lost, "/resume": num_lost})
            await session.pause()
            assert await counts(caller) == (0, 1)
            await session.resume()
            assert await counts(caller) == (1, 0)
        assert not +relay.lose, "the answers were lost"
        assert relay.paths()[2:] == (["/pause"] * (num_lost + 1) + ["/resume"] * (num_lost + 1)) * 2
        assert (await session.step("go")).observation.text == "2"


async def test_a_pause_that_comes_late_does_not_pause_again() -> None:
    """The client gave up on the first attempt and the second was answered; then the network delivers the first."""
    async with serving() as caller, relay_to(caller) as relay, client_of(relay.url) as client:
        session = await client.start("train", 0)
        await session.pause()
        late = relay.seen[-1]
        await client.adopt(session.handle).pause()  # a renewal
        await session.resume()
        assert await relay.send(*late) == (200, b"{}")
        assert await counts(caller) == (1, 0)
        late = relay.seen[-1]
        await session.pause()
        assert await relay.send(*late) == (200, b"{}")
        assert await counts(caller) == (0, 1), "nor does a late resume start the clock again"


async def test_a_paused_session_lives_as_long_as_its_pause_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(lease_s=10.0, pause_lease_s=90.0) as caller, client_of(caller.server.url) as client:
        advance = advance_clock(caller, monkeypatch)
        session = await client.start("train", 0)
        await session.step("go")
        await session.pause()
        handle = session.handle
        assert (handle.lease_s, handle.pause_lease_s) == (10.0, 90.0)
        for _ in range(10):
            advance(handle.pause_lease_s / 3)
            await client.adopt(handle).pause()
        adopted = client.adopt(handle)
        await adopted.resume()
        advance(9.9)
        assert (await adopted.step("go")).observation.text == "2"


@pytest.mark.parametrize("resumed", [False, True])
async def test_a_session_that_nobody_renews_ends(monkeypatch: pytest.MonkeyPatch, resumed: bool) -> None:
    """A paused one by its pause lease, a resumed one by the shorter one again."""
    async with serving(lease_s=10.0, pause_lease_s=90.0) as caller, client_of(caller.server.url) as client:
        advance = advance_clock(caller, monkeypatch)
        session = await client.start("train", 0)
        await session.pause()
        advance(89.9)
        assert await counts(caller) == (0, 1)
        if resumed:
            await session.resume()
        advance(10.0)
        assert await counts(caller) == (0, 0)
        words = r"10 s \(--lease-s\)" if resumed else r"90 s \(--pause-lease-s\)"
        for call in (session.pause, session.resume):
            with pytest.raises(EnvironmentFailure, match=f"heard nothing for {words}") as failure:
                await call()
            assert failure.value.retryable, "a fresh session may succeed"


async def test_a_session_of_an_unknown_server_is_refused_by_name() -> None:
    handle = SessionHandle("http://10.0.0.9:8300", "s1", 0, 300.0, 3600.0)
    async with client_of("http://10.0.0.1:8300", "http://10.0.0.2:8300") as client:
        words = "session s1 is on http://10.0.0.9:8300.*http://10.0.0.1:8300, http://10.0.0.2:8300.*env.urls"
        with pytest.raises(EnvironmentFailure, match=words) as failure:
            client.adopt(handle)
    assert failure.value.retryable, "a fresh session may succeed"


async def test_a_task_goes_on_from_another_ranks_client() -> None:
    """The turn loop over real sessions: cut within its second turn, and played on by another client and engine."""
    async with serving() as caller, client_of(caller.server.url) as first, client_of(caller.server.url) as second:
        engine = FakeEngine([([10, STOP_ID], 0), None], partial=([11], 0))
        player = TaskPlayer(order_of(), CONFIG, engine, first, FakeChat(), lambda report: None, JobClock())  # type: ignore[arg-type]
        playing = asyncio.ensure_future(player.play())
        await engine.hangs.wait()
        player.pause()
        paused = await playing
        assert not isinstance(paused, TaskFailed)
        assert await counts(caller) == (0, 1)
        task = paused[1]
        assert isinstance(task, PausedTask)
        engine = FakeEngine([([12, STOP_ID], 0)] * 3)
        player = TaskPlayer(order_of(), CONFIG, engine, second, FakeChat(), lambda report: None, JobClock(), task)  # type: ignore[arg-type]
        finished = await player.play()
        assert not isinstance(finished, TaskFailed)
        trajectory = finished[1]
        assert isinstance(trajectory, Trajectory)
        assert trajectory.reward == 4.0, "the environment counts its steps: four turns, none of them played twice"
        assert [turn.end - turn.start for turn in trajectory.turns] == [2, 3, 2, 2]
        assert await counts(caller) == (0, 0)


async def test_places_are_counted_right_however_sessions_are_handed_over() -> None:
    """The client's estimate, on a clock that stands still so that it never asks again, is what the servers would say."""
    async with serving(capacity=8) as left, serving(capacity=8) as right:
        urls = (left.server.url, right.server.url)
        async with EnvClient(urls, env=NAME, clock=lambda: 0.0) as client:
            handles = []
            for seed in range(6):
                session = await client.start("train", seed)
                await session.pause()
                handles.append(session.handle)

            async def check(num_left: int, num_right: int) -> None:
                assert [sum(await counts(caller)) for caller in (left, right)] == [num_left, num_right]
                assert [server.in_use for server in client._servers] == [num_left, num_right]

            await check(3, 3)
            adopted = [client.adopt(handle) for handle in handles if handle.url == left.server.url]
            for session in adopted:
                await session.resume()
            await check(3, 3)
            for session in adopted[:2]:
                await session.end()
                await session.end()
            await check(1, 3)
            placed = [(await client.start("train", 7)).handle.url for _ in range(2)]
            assert placed == [left.server.url] * 2, "the places that were freed are taken first"
            await check(3, 3)
