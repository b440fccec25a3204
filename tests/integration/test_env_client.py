"""The client against real servers, and against one that resets, lies and stalls."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.integration.env_caller import serving
from tests.integration.scripted_env import NAME
from tiderl.envs.client import EnvClient
from tiderl.envs.protocol import ImagePart, Observation, Stepped
from tiderl.envs.retry import RetryPolicy
from tiderl.errors import EnvironmentFailure, EnvironmentUnreachable
from tiderl.types import SessionHandle

STARTED = {
    "session_id": "s1",
    "instruction": "i",
    "observation": {"text": "o", "images": []},
    "task_type": "t",
    "lease_s": 300.0,
    "pause_lease_s": 3600.0,
}
STEPPED = {"observation": {"text": "1", "images": []}, "reward": 0.5, "done": True, "success": False, "env_s": 0.25}
OBSERVED = Stepped(Observation("1"), 0.5, True, False)


def reply(status: int, body: object, headers: str = "") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\nConnection: close\r\n{headers}\r\n"
    return head.encode() + data


def error(status: int, kind: str, retryable: bool, headers: str = "") -> bytes:
    return reply(status, {"error": {"kind": kind, "message": "the message", "retryable": retryable}}, headers)


class FlakyServer:
    """Answers each request with the next item of a script: bytes to send, or None to hang up. Stalls when it has run out."""

    def __init__(self) -> None:
        self.script: list[bytes | None] = []
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.url = ""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.split("content-length: ")[1].split("\r\n")[0]) if "content-length: " in head else 0
            body = await reader.readexactly(length)
            self.requests.append((head.split(" ")[1], json.loads(body) if body else {}))
            if not self.script:
                await reader.read()
            elif (answer := self.script.pop(0)) is not None:
                writer.write(answer)
        finally:
            writer.close()


@pytest.fixture
async def flaky() -> AsyncIterator[FlakyServer]:
    flaky = FlakyServer()
    listener = await asyncio.start_server(flaky, "127.0.0.1", 0)
    flaky.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    yield flaky
    listener.close()
    await listener.wait_closed()


class Pauses(list[float]):
    """Stands in for asyncio.sleep and notes how long it would have been."""

    async def __call__(self, seconds: float) -> None:
        self.append(seconds)
        await asyncio.sleep(0)


@asynccontextmanager
async def client_of(*urls: str, pauses: Pauses | None = None, **settings: Any) -> AsyncIterator[EnvClient]:
    async with EnvClient(urls, env=NAME, sleep=pauses if pauses is not None else Pauses(), **settings) as client:
        yield client


async def test_an_episode() -> None:
    async with serving() as caller, client_of(caller.server.url + "/") as client:
        await client.check(NAME, 5.0)
        assert await client.capacity() == 256
        assert await client.tasks() == {"train": 1000}
        session = await client.start("train", 3, {"word": "x"})
        assert session.started is not None
        assert session.started.instruction == "seed 3 x"
        assert session.started.observation.images == (ImagePart(b"\x00png", "image/png"),)
        handle = session.handle
        assert handle == SessionHandle(caller.server.url, handle.session_id, 0, 300.0, 3600.0)
        assert await session.step("go") == Stepped(Observation("1"), 1.0, False, False)
        assert session.last_env_s > 0.0
        assert session.handle == replace(handle, turn=1)
        await session.pause()
        assert (await caller.get("/capacity"))[1]["paused"] == 1
        await session.resume()
        assert (await caller.get("/capacity"))[1]["paused"] == 0
        assert await session.step("finish") == Stepped(Observation("2"), 2.0, True, True)
        await session.end()
        await session.end()
        assert (await caller.get("/capacity"))[1]["active"] == 0


@pytest.mark.parametrize(
    "trouble",
    [
        None,
        reply(500, b"<html>"),
        reply(502, b""),
        error(503, "unavailable", True),
        reply(200, b"{"),
        reply(200, {}),
        b"?",
    ],
    ids=["reset", "500", "502", "503", "not JSON", "wrong shape", "not HTTP"],
)
async def test_trouble_that_passes_is_waited_out_under_one_request_id(
    flaky: FlakyServer, trouble: bytes | None
) -> None:
    flaky.script = [trouble, reply(200, STARTED), trouble, trouble, reply(200, STEPPED)]
    pauses = Pauses()
    async with client_of(flaky.url, pauses=pauses) as client:
        session = await client.start("train", 0)
        assert await session.step("go") == OBSERVED
    assert session.last_env_s == 0.25
    ids = [body["request_id"] for _, body in flaky.requests]
    assert len(set(ids[:2])) == 1
    assert len(set(ids[2:])) == 1
    assert ids[1] != ids[2]
    assert [path for path, _ in flaky.requests] == ["/start"] * 2 + ["/observation"] * 3
    assert len(pauses) == 3


@pytest.mark.parametrize("trouble", [None, reply(500, b"<html>"), reply(200, b"\xff"), b"\x00"])
async def test_trouble_that_stays_is_a_failure_after_max_attempts(flaky: FlakyServer, trouble: bytes | None) -> None:
    flaky.script = [reply(200, STARTED), *[trouble] * 9]
    async with client_of(flaky.url, retries=RetryPolicy(max_attempts=3)) as client:
        session = await client.start("train", 0)
        with pytest.raises(EnvironmentFailure) as failure:
            await session.step("go")
    assert failure.value.retryable
    for part in (flaky.url, "/observation", "s1", "after 3 attempts"):
        assert part in str(failure.value)
    assert len(flaky.requests) == 4


@pytest.mark.parametrize(
    ("answer", "retryable", "words"),
    [
        (error(424, "env_error", False), False, "HTTP 424: env_error: the message"),
        (error(410, "worker_lost", True), True, "worker_lost"),
        (error(404, "unknown_session", True), True, "unknown_session"),
        (error(401, "unauthorized", False), False, "HTTP 401"),
        (error(418, "a kind of tomorrow", True), True, "a kind of tomorrow"),
        (reply(404, b"<html>nginx"), False, "nginx"),
        (reply(302, b"", "Location: http://127.0.0.1:1/\r\n"), False, "HTTP 302"),
    ],
)
async def test_what_sending_again_cannot_mend_is_sent_once(
    flaky: FlakyServer, answer: bytes, retryable: bool, words: str
) -> None:
    flaky.script = [reply(200, STARTED), answer]
    async with client_of(flaky.url) as client:
        session = await client.start("train", 0)
        with pytest.raises(EnvironmentFailure, match=words) as failure:
            await session.step("go")
    assert failure.value.retryable is retryable
    assert len(flaky.requests) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"reward": "1"},
        {"reward": True},
        {"done": 1},
        {"observation": "text"},
        {"observation": {"text": "x"}},
        {"env_s": None},
        {"observation": {"text": "x", "images": [{"data": "%", "media_type": "image/png"}]}},
    ],
)
async def test_an_answer_of_the_wrong_shape_is_a_failure(flaky: FlakyServer, change: dict[str, Any]) -> None:
    flaky.script = [reply(200, STARTED), reply(200, STEPPED | change)]
    async with client_of(flaky.url, retries=RetryPolicy(max_attempts=1)) as client:
        session = await client.start("train", 0)
        with pytest.raises(EnvironmentFailure, match="cannot be read"):
            await session.step("go")


async def test_a_request_that_takes_too_long_is_a_failure(flaky: FlakyServer) -> None:
    flaky.script = [reply(200, STARTED)]
    async with client_of(flaky.url, request_timeout_s=0.05, retries=RetryPolicy(max_attempts=2)) as client:
        session = await client.start("train", 0)
        with pytest.raises(EnvironmentFailure, match=r"no answer in 0\.05 s") as failure:
            await session.step("go")
    assert failure.value.retryable


async def test_a_step_longer_than_the_timeout_is_played_once() -> None:
    async with serving() as caller, client_of(caller.server.url, request_timeout_s=0.2) as client:
        session = await client.start("train", 0)
        assert (await session.step("sleep 0.4")).observation.text == "1"
        assert (await session.step("go")).observation.text == "2"


async def test_an_answer_without_end_is_a_failure(flaky: FlakyServer) -> None:
    flaky.script = [reply(200, STARTED), reply(200, b" " * 2000)]
    async with client_of(flaky.url, max_answer_bytes=1000) as client:
        session = await client.start("train", 0)
        with pytest.raises(EnvironmentFailure, match="more than 1000 bytes"):
            await session.step("go")


async def test_pauses_grow_within_bounds_and_honour_retry_after(flaky: FlakyServer) -> None:
    policy = RetryPolicy(max_attempts=6, first_pause_s=1.0, max_pause_s=4.0, max_retry_after_s=30.0)
    plain, later, much_later = (error(429, "capacity", True, f"Retry-After: {s}\r\n") for s in ("soon", "7", "999"))
    flaky.script = [plain, plain, plain, later, much_later, reply(200, STARTED)]
    pauses = Pauses()
    async with client_of(flaky.url, pauses=pauses, retries=policy) as client:
        await client.start("train", 0)
    for pause_s, ceiling_s in zip(pauses, (1.0, 2.0, 4.0), strict=False):
        assert ceiling_s / 2 <= pause_s <= ceiling_s
    assert pauses[3:] == [7.0, 30.0]


def test_pauses_differ_between_requests_but_not_between_runs() -> None:
    pauses_s = [RetryPolicy().pause_s(f"request {n}", 3, 0.0) for n in range(100)]
    assert len(set(pauses_s)) == 100
    assert pauses_s == [RetryPolicy().pause_s(f"request {n}", 3, 0.0) for n in range(100)]


async def test_sessions_spread_by_free_capacity_and_stay() -> None:
    async with serving(capacity=10) as small, serving(capacity=30) as large:
        async with client_of(small.server.url, large.server.url) as client:
            sessions = [await client.start("train", n) for n in range(20)]
            for _ in range(2):
                for session in sessions:
                    await session.step("go")
        assert Counter(session.handle.url for session in sessions) == {small.server.url: 5, large.server.url: 15}


async def test_a_server_that_is_gone_is_passed_over() -> None:
    async with serving() as caller, client_of("http://127.0.0.1:9", caller.server.url) as client:
        sessions = [await client.start("train", n) for n in range(3)]
    assert {session.handle.url for session in sessions} == {caller.server.url}


async def test_a_start_that_fails_is_tried_on_another_server(flaky: FlakyServer) -> None:
    counts = {"env": NAME, "capacity": 1000, "active": 0, "paused": 0}
    flaky.script = [reply(200, counts), reply(500, b"")]
    once_more = RetryPolicy(max_attempts=2)
    async with (
        serving() as caller,
        client_of(flaky.url, caller.server.url, retries=once_more, request_timeout_s=5.0) as client,
    ):
        assert (await client.start("train", 0)).handle.url == caller.server.url
    assert [path for path, _ in flaky.requests] == ["/capacity", "/start"]


async def test_a_lost_worker_is_a_retryable_failure_and_a_crash_is_not() -> None:
    patience = RetryPolicy(max_attempts=60)  # until the worker has been replaced
    async with (
        serving(step_timeout_s=0.5) as caller,
        EnvClient([caller.server.url], env=NAME, retries=patience) as client,
    ):
        session = await client.start("train", 0)
        with pytest.raises(EnvironmentFailure, match="worker_lost") as failure:
            await session.step("sleep 30")
        assert failure.value.retryable
        session = await client.start("train", 0)
        with pytest.raises(EnvironmentFailure, match="told to crash") as failure:
            await session.step("crash")
        assert not failure.value.retryable


async def test_end_is_content_with_a_server_that_is_gone(flaky: FlakyServer, caplog: pytest.LogCaptureFixture) -> None:
    flaky.script = [reply(200, STARTED), *[None] * 9]
    async with client_of(flaky.url) as client:
        session = await client.start("train", 0)
        await session.end()
    assert "left to its lease" in caplog.text


async def test_check_waits_for_a_server_that_is_not_up_yet(flaky: FlakyServer) -> None:
    counts = {"env": NAME, "capacity": 1, "active": 0, "paused": 0}
    flaky.script = [None, reply(500, b""), reply(200, {}), reply(200, counts)]
    async with client_of(flaky.url) as client:
        await client.check(NAME, 30.0)
    assert flaky.script == []


@pytest.mark.parametrize(
    ("script", "bound_s", "words"),
    [
        ([reply(200, {}), error(401, "unauthorized", False)], 30.0, "unauthorized.*env.token_file"),
        ([reply(200, {}), reply(200, {"env": "maze", "capacity": 1, "active": 0, "paused": 0})], 30.0, "serves 'maze'"),
        ([reply(404, b"nginx")], 30.0, "nginx.*tiderl env serve"),
        ([None] * 1000, 0.3, "within 0.3 s"),
        ([], 0.1, "within 0.1 s.*no answer"),
    ],
)
async def test_check_says_what_is_wrong(
    flaky: FlakyServer, script: list[bytes | None], bound_s: float, words: str
) -> None:
    flaky.script = list(script)
    async with client_of(flaky.url) as client:
        with pytest.raises(EnvironmentUnreachable, match=words) as failure:
            await client.check(NAME, bound_s)
    assert flaky.url in str(failure.value)


async def test_a_url_that_is_none_is_named() -> None:
    async with client_of("localhost:8300") as client:
        with pytest.raises(EnvironmentUnreachable, match="localhost:8300"):
            await client.check(NAME, 1.0)


def test_no_url_at_all_is_the_users_to_mend() -> None:
    with pytest.raises(EnvironmentUnreachable, match=r"env\.urls"):
        EnvClient([])
