"""Workers that die, hang or never come up; what their sessions hear, and that others take their place."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from tests.integration.env_caller import Caller, kind, serving
from tests.integration.scripted_env import NAME
from tiderl.envs.server import EnvServer, EnvServerConfig
from tiderl.envs.workers import WorkerPool
from tiderl.errors import UserError


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - the pool has no event for it, and needs none
            await asyncio.sleep(0.005)


async def until_replaced(caller: Caller, num_workers: int, lost_pid: int) -> None:
    pool = caller.server.pool
    await until(lambda: lost_pid not in pool.pids and len(pool.pids) == num_workers)


async def test_a_killed_worker_fails_its_sessions_only_and_is_replaced() -> None:
    async with serving(workers=2) as caller:
        pids = caller.server.pool.pids
        sessions = [await caller.session() for _ in range(4)]
        homes = [int((await caller.step(session, 0, "pid"))[1]["observation"]["text"]) for session in sessions]
        assert sorted(homes) == sorted(pids * 2), "each worker has its half"
        os.kill(pids[0], signal.SIGKILL)
        await until_replaced(caller, 2, pids[0])
        for session, home in zip(sessions, homes, strict=True):
            answer = await caller.step(session, 1)
            if home == pids[0]:
                assert kind(answer) == (410, "worker_lost", True)
            else:
                assert answer[0] == 200
        assert (await caller.get("/capacity"))[1]["active"] == 2
        # The new worker is empty, so the next session is its.
        newcomer = await caller.session()
        home = int((await caller.step(newcomer, 0, "pid"))[1]["observation"]["text"])
        assert home not in pids
        assert home in caller.server.pool.pids


async def test_a_new_session_goes_where_one_has_ended() -> None:
    async with serving(workers=2) as caller:
        sessions = [await caller.session() for _ in range(4)]
        _, answer = await caller.step(sessions[3], 0, "pid")
        await caller.post("/end", session_id=sessions[3])
        assert (await caller.step(await caller.session(), 0, "pid"))[1]["observation"] == answer["observation"]
        # A failed episode makes room too.
        await caller.step(sessions[0], 0, "crash")
        _, other = await caller.step(await caller.session(), 0, "pid")
        assert other["observation"] != answer["observation"]


async def test_a_start_that_fails_takes_no_room() -> None:
    async with serving(workers=2) as caller:
        assert kind(await caller.start(options={"crash": 1}))[1] == "env_error"
        _, answer = await caller.step(await caller.session(), 0, "pid")
        assert int(answer["observation"]["text"]) == caller.server.pool.pids[0]


async def test_a_worker_killed_in_the_middle_of_a_step_fails_all_that_wait_for_it() -> None:
    async with serving() as caller:
        (pid,) = caller.server.pool.pids
        first, second = await caller.session(), await caller.session()
        playing = [asyncio.create_task(caller.step(session, 0, "sleep 30")) for session in (first, second)]
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        assert [kind(answer) for answer in await asyncio.gather(*playing)] == [(410, "worker_lost", True)] * 2
        await until_replaced(caller, 1, pid)
        assert await caller.session()


async def test_a_stuck_worker_is_killed_and_replaced() -> None:
    async with serving(step_timeout_s=0.3) as caller:
        (pid,) = caller.server.pool.pids
        session_id = await caller.session()
        status, answer = await caller.step(session_id, 0, "sleep 30")
        assert kind((status, answer)) == (410, "worker_lost", True)
        assert "step_timeout_s" in answer["error"]["message"]
        await until_replaced(caller, 1, pid)
        assert await caller.session()


async def test_a_start_that_loses_its_worker_may_be_sent_again() -> None:
    async with serving() as caller:
        (pid,) = caller.server.pool.pids
        starting = asyncio.create_task(caller.start(request_id="same", options={"start_s": 30}))
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        assert kind(await starting) == (503, "unavailable", True)
        await until_replaced(caller, 1, pid)
        assert (await caller.start(request_id="same", options={}))[0] == 200


async def test_without_any_worker_the_server_is_not_healthy() -> None:
    async with serving() as caller:
        (pid,) = caller.server.pool.pids
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not caller.server.pool.pids)
        assert kind(await caller.get("/health")) == (503, "unavailable", True)
        await until_replaced(caller, 1, pid)
        assert (await caller.get("/health"))[0] == 200


async def test_what_an_environment_prints_harms_nothing() -> None:
    async with serving() as caller:
        assert (await caller.step(await caller.session(), 0, "print"))[0] == 200


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ("nosuch", "babyai, .*shop"),
        ("no_such_module:Env", "no_such_module"),
        ("tests.integration.scripted_env:Nothing", "no class Nothing"),
        ("tiderl.errors:UserError", "lacks start"),
    ],
)
async def test_an_environment_that_cannot_be_served_is_the_users_to_mend(env: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        await EnvServer(EnvServerConfig(env, port=0, workers=2)).start()


async def test_a_worker_that_does_not_come_up_in_time_is_the_users_to_mend() -> None:
    pool = WorkerPool(NAME, 2, start_timeout_s=0.001)
    with pytest.raises(UserError, match="start_timeout_s"):
        await pool.start()
    assert pool.pids == []
