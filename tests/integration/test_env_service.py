"""The environment server's endpoints, over real HTTP with real workers: what is answered, refused, replayed and freed."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.env_caller import Caller, advance_clock, kind, serving
from tests.integration.scripted_env import NAME
from tiderl.envs import latency
from tiderl.envs.workers import Worker


@pytest.fixture
async def caller() -> AsyncIterator[Caller]:
    async with serving() as caller:
        yield caller


async def test_an_episode(caller: Caller) -> None:
    status, started = await caller.start(seed=7, options={"word": "hello"})
    assert status == 200
    session_id = started.pop("session_id")
    image = {"media_type": "image/png", "data": base64.b64encode(b"\x00png").decode()}
    assert started == {
        "instruction": "seed 7 hello",
        "observation": {"text": "0", "images": [image]},
        "task_type": "scripted",
        "lease_s": 300.0,
        "pause_lease_s": 3600.0,
    }
    status, stepped = await caller.step(session_id, 0)
    assert stepped.pop("env_s") > 0.0
    assert stepped == {"observation": {"text": "1", "images": []}, "reward": 1.0, "done": False, "success": False}
    status, stepped = await caller.step(session_id, 1, "finish")
    assert (stepped["reward"], stepped["done"], stepped["success"]) == (2.0, True, True)
    assert kind(await caller.step(session_id, 2))[:2] == (400, "bad_request")
    assert await caller.post("/end", session_id=session_id) == (200, {})
    assert await caller.post("/end", session_id=session_id) == (200, {})
    assert kind(await caller.step(session_id, 2)) == (404, "unknown_session", True)


async def test_what_the_server_says_of_itself(caller: Caller) -> None:
    assert await caller.get("/health") == (200, {"status": "ok", "env": NAME})
    assert await caller.get("/tasks") == (200, {"env": NAME, "splits": {"train": 1000}})
    first, _ = await caller.session(), await caller.session()
    await caller.post("/pause", session_id=first)
    assert await caller.get("/capacity") == (200, {"env": NAME, "capacity": 256, "active": 1, "paused": 1})


async def test_a_request_id_steps_once_however_often_it_arrives(caller: Caller) -> None:
    session_id = await caller.session()
    answers = await asyncio.gather(*(caller.step(session_id, 0, "sleep 0.1", request_id="same") for _ in range(5)))
    answers += [await caller.step(session_id, 0, "sleep 0.1", request_id="same")]
    assert all(answer == answers[0] for answer in answers)
    assert (await caller.step(session_id, 1))[1]["observation"]["text"] == "2"


async def test_a_request_id_starts_once_however_often_it_arrives(caller: Caller) -> None:
    starts = [caller.start(request_id="same", options={"start_s": 0.1}) for _ in range(5)]
    answers = await asyncio.gather(*starts)
    assert all(answer == answers[0] for answer in answers)
    assert (await caller.get("/capacity"))[1]["active"] == 1


async def test_a_client_that_hangs_up_finds_its_answer_again(caller: Caller) -> None:
    session_id = await caller.session()
    impatient = asyncio.create_task(caller.step(session_id, 0, "sleep 0.2", request_id="same"))
    await asyncio.sleep(0.05)
    impatient.cancel()
    status, stepped = await caller.step(session_id, 0, "sleep 0.2", request_id="same")
    assert (status, stepped["observation"]["text"]) == (200, "1")


async def test_turns_out_of_order_are_refused(caller: Caller) -> None:
    session_id = await caller.session()
    await caller.step(session_id, 0)
    assert kind(await caller.step(session_id, 0)) == (409, "wrong_turn", False)
    assert kind(await caller.step(session_id, 2)) == (409, "wrong_turn", False)
    assert (await caller.step(session_id, 1))[1]["observation"]["text"] == "2"


@pytest.mark.parametrize("action", ["crash", "value-error", "nan", "none"])
async def test_a_failing_environment_is_an_error_and_no_reward(caller: Caller, action: str) -> None:
    session_id = await caller.session()
    first = await caller.step(session_id, 0, action, request_id="same")
    assert kind(first) == (424, "env_error", False)
    # Asked again, it says the same; its place is free, and the worker lives.
    assert await caller.step(session_id, 0, action, request_id="same") == first
    assert (await caller.get("/capacity"))[1]["active"] == 0
    assert await caller.session()


async def test_starts_that_fail(caller: Caller) -> None:
    assert kind(await caller.start(options={"refuse": 1})) == (400, "bad_request", False)
    assert kind(await caller.start(options={"crash": 1})) == (424, "env_error", False)
    assert kind(await caller.start(env="other")) == (404, "unknown_env", False)
    assert kind(await caller.start(seed=1000)) == (400, "bad_request", False)
    assert kind(await caller.start(seed=-1)) == (400, "bad_request", False)
    assert (await caller.get("/capacity"))[1]["active"] == 0


async def test_capacity() -> None:
    async with serving(capacity=2) as caller:
        first, _ = await caller.session(), await caller.session()
        await caller.post("/pause", session_id=first)
        body = {"request_id": "x", "env": NAME, "split": "train", "seed": 0}
        async with caller.http.post(caller.server.url + "/start", json=body) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) > 0
            assert (await response.json())["error"]["kind"] == "capacity"
        await caller.post("/end", session_id=first)
        assert (await caller.start(request_id="x"))[0] == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"{}", b"\xff", b'{"request_id": NaN}', b"[" * 100_000, b'{"request_id":1,"session_id":"a"}'],
)
async def test_garbage_is_refused(caller: Caller, body: bytes) -> None:
    for path in ("/start", "/observation", "/end", "/pause", "/resume"):
        async with caller.http.post(caller.server.url + path, data=body) as response:
            assert kind((response.status, await response.json())) == (400, "bad_request", False)


async def test_odd_requests_are_refused_with_json() -> None:
    async with serving(max_body_bytes=1000) as caller:
        assert kind(await caller.get("/nowhere"))[1:] == ("bad_request", False)
        assert kind(await caller.get("/start"))[1:] == ("bad_request", False)
        assert kind(await caller.post("/end", session_id="x" * 1000)) == (413, "too_large", False)


async def test_without_the_token_only_health_is_answered(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.touch(mode=0o600)
    token_file.write_text("secret\n")
    async with serving(token_file=str(token_file)) as caller:
        assert (await caller.get("/health"))[0] == 200
        for header in ("", "Bearer", "Bearer secre", "Bearer secret2", "secret", "Bearer s\u00e9cret"):
            async with caller.http.get(caller.server.url + "/tasks", headers={"Authorization": header}) as response:
                assert kind((response.status, await response.json())) == (401, "unauthorized", False)
        async with caller.http.get(
            caller.server.url + "/tasks", headers={"Authorization": "Bearer secret"}
        ) as response:
            assert response.status == 200


async def test_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(lease_s=10.0, pause_lease_s=100.0) as caller:
        advance = advance_clock(caller, monkeypatch)
        silent, paused = await caller.session(), await caller.session()
        await caller.post("/pause", session_id=paused)
        advance(9.9)
        assert (await caller.step(silent, 0))[0] == 200
        advance(9.9)
        assert (await caller.step(silent, 1))[0] == 200
        advance(10.0)
        assert kind(await caller.step(silent, 2)) == (404, "unknown_session", True)
        advance(70.0)
        assert (await caller.post("/pause", session_id=paused))[0] == 200
        advance(99.0)
        assert (await caller.post("/resume", session_id=paused))[0] == 200
        advance(10.0)
        assert kind(await caller.post("/resume", session_id=paused)) == (404, "unknown_session", True)


async def test_no_lease_runs_while_a_request_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(lease_s=10.0) as caller:
        advance = advance_clock(caller, monkeypatch)
        session_id = await caller.session()
        playing = asyncio.create_task(caller.step(session_id, 0, "sleep 0.2"))
        await asyncio.sleep(0.1)
        advance(1000.0)
        assert (await playing)[0] == 200
        advance(9.9)  # the lease starts anew with the answer
        assert (await caller.step(session_id, 1))[0] == 200


async def test_injected_latency_is_the_turns_own_and_blocks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(latency="lognormal:0.04,1.0,0.3", latency_seed=5) as caller:
        first, second = await caller.session(), await caller.session()
        slept = hold_until_slept(caller, monkeypatch, 2)  # the only worker plays both turns, though neither is answered
        answers = await asyncio.gather(*(caller.step(session, 0) for session in (first, second)))
        assert [status for status, _ in answers] == [200, 200]
        assert slept == [latency.parse("lognormal:0.04,1.0,0.3", 5).delay_s(0, 0)] * 2


async def test_an_environments_delay_comes_on_top_of_the_latency_and_blocks_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(latency="constant:0.5") as caller:
        slept = hold_until_slept(caller, monkeypatch, 2)
        starts = await asyncio.gather(*(caller.start(options={"delay_s": seconds}) for seconds in (20.0, 30.0)))
        assert sorted(slept) == [20.0, 30.0]
        # The client sees it pass, and isn't told.
        assert all(set(started) & {"delay_s"} == set() for _, started in starts)
        slept = hold_until_slept(caller, monkeypatch, 2)
        steps = (
            caller.step(started["session_id"], 0, f"delay {seconds}")
            for (_, started), seconds in zip(starts, (2.0, 3.0), strict=True)
        )
        answers = await asyncio.gather(*steps)
        assert sorted(slept) == [2.5, 3.5]
        assert [status for status, _ in answers] == [200, 200]
        assert all("delay_s" not in stepped for _, stepped in answers)


async def test_env_s_and_the_lease_count_a_delay_as_the_environments_work(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(lease_s=10.0) as caller:
        advance = advance_clock(caller, monkeypatch)

        async def sleep(seconds: float) -> None:
            advance(seconds)  # and reaps

        monkeypatch.setattr(caller.server.service, "_sleep", sleep)
        session_id = await caller.session(delay_s=50.0)
        status, stepped = await caller.step(session_id, 0, "delay 40")
        assert (status, stepped["env_s"]) == (200, 40.0)
        assert caller.server.service._table.num_active == 1


async def test_a_session_that_is_paused_or_ended_in_its_delay_is_answered_as_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving() as caller:
        paused, ended = await caller.session(), await caller.session()
        waiting, goes_on = asyncio.Semaphore(0), asyncio.Event()

        async def sleep(seconds: float) -> None:
            waiting.release()
            await goes_on.wait()

        monkeypatch.setattr(caller.server.service, "_sleep", sleep)
        steps = [asyncio.create_task(caller.step(session, 0, "delay 7")) for session in (paused, ended)]
        for _ in steps:
            await waiting.acquire()
        assert await caller.post("/pause", session_id=paused) == (200, {})
        assert await caller.post("/end", session_id=ended) == (200, {})
        goes_on.set()
        assert [(await step)[0] for step in steps] == [200, 200]
        assert (await caller.get("/capacity"))[1]["paused"] == 1
        assert kind(await caller.step(ended, 1)) == (404, "unknown_session", True)
        assert (await caller.step(paused, 1))[1]["observation"]["text"] == "2"


async def test_a_start_whose_worker_is_lost_in_its_delay_may_be_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as caller:

        async def sleep(seconds: float) -> None:
            monkeypatch.undo()
            os.kill(caller.server.pool.pids[0], signal.SIGKILL)
            await lost.wait()

        lost, told = asyncio.Event(), caller.server.pool.on_lost

        def on_lost(worker: Worker) -> None:
            told(worker)
            lost.set()

        caller.server.pool.on_lost = on_lost
        monkeypatch.setattr(caller.server.service, "_sleep", sleep)
        assert kind(await caller.start(request_id="same", options={"delay_s": 1.0})) == (503, "unavailable", True)
        assert (await caller.get("/capacity"))[1]["active"] == 0


@pytest.mark.parametrize("delay_s", ["nan", "inf", "-1", "120.5"])
async def test_a_delay_that_nobody_would_wait_for_is_the_environments_failure(caller: Caller, delay_s: str) -> None:
    session_id = await caller.session()
    answer = await caller.step(session_id, 0, f"delay {delay_s}")
    assert kind(answer) == (424, "env_error", False)
    assert "delay_s" in answer[1]["error"]["message"]
    assert (await caller.get("/capacity"))[1]["active"] == 0


def hold_until_slept(caller: Caller, monkeypatch: pytest.MonkeyPatch, count: int) -> list[float]:
    """The seconds that the service sleeps, none of which passes before `count` sleeps are under way."""
    slept: list[float] = []
    all_sleep = asyncio.Event()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == count:
            all_sleep.set()
        await all_sleep.wait()

    monkeypatch.setattr(caller.server.service, "_sleep", sleep)
    return slept
