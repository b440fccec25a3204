"""Paused tasks against a real environment server: a lease lives as long as its pause, and then the session is another client's."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from tests.integration.env_caller import serving
from tests.unit.test_paused import task_of
from tiderl.coordinator.paused import PausedTasks
from tiderl.envs.client import EnvClient
from tiderl.types import PausedTask, SessionHandle, TaskId

PAUSE_LEASE_S = 3.0


def paused_on(handle: SessionHandle, number: int) -> PausedTask:
    return replace(task_of(number), session=handle)


async def test_a_pause_of_more_than_a_lease_and_the_ends_of_the_others() -> None:
    lost: list[TaskId] = []
    out: list[PausedTask] = []
    async with serving(pause_lease_s=PAUSE_LEASE_S) as caller:
        urls = [caller.server.url]
        async with EnvClient(urls, env=caller.server.config.env) as here, EnvClient(urls) as there:
            tasks = PausedTasks(here, 10.0, lambda task_id, detail: lost.append(task_id))
            sessions = [await here.start("train", seed) for seed in range(3)]
            await sessions[0].step("go")
            await sessions[2].end()  # gone, as after a restart of its server
            for number, session in enumerate(sessions):
                if number != 2:
                    await session.pause()
                tasks.keep(paused_on(session.handle, number))
            await asyncio.sleep(1.5 * PAUSE_LEASE_S)
            assert lost == [2] and tasks.forget(TaskId(2))
            assert (await caller.get("/capacity"))[1]["paused"] == 2
            tasks.take(TaskId(0), out.append)
            resumed = there.adopt(out[0].session)
            await resumed.resume()
            assert (await resumed.step("go")).observation.text == "2"
            await tasks.close(10.0)
            tasks.check()
            counts = (await caller.get("/capacity"))[1]
            assert (counts["active"], counts["paused"]) == (1, 0), "the one that is played is left"
