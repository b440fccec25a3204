"""What the coordinator asks the environment servers: tasks that are there, and a capacity that changes."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from tests.unit.virtual_time import run
from tiderl.config.schema import Config, EnvConfig, EvalConfig
from tiderl.coordinator.environments import CAPACITY_POLL_S, check_tasks, survey, watch_capacity
from tiderl.errors import ConfigError, EnvironmentFailure, EnvironmentUnreachable
from tiderl.scheduling.events import EnvironmentCapacity

CONFIG = Config(env=EnvConfig(name="shop", split="train"), eval=EvalConfig(every=5, num_tasks=20, split="test"))
TASKS = {"train": 100, "test": 50}


class Servers:
    """An `EnvClient` that remembers which types it was asked for."""

    def __init__(self, tasks: dict[str, int]) -> None:
        self._tasks = tasks
        self.asked: list[tuple[str, int]] = []

    async def capacity(self) -> int:
        return 7

    async def tasks(self) -> dict[str, int]:
        return self._tasks

    async def task_types(self, split: str, num_tasks: int) -> list[tuple[str, int]]:
        self.asked.append((split, num_tasks))
        return [(f"{split} type", num_tasks)]


@pytest.mark.parametrize(
    ("env", "evaluation", "path", "problem"),
    [
        (EnvConfig(split="nonsense"), EvalConfig(), "env.split", "no split 'nonsense', but ['empty', 'test', 'train']"),
        (EnvConfig(), EvalConfig(split="nonsense"), "eval.split", "no split 'nonsense'"),
        (EnvConfig(split="empty"), EvalConfig(num_tasks=50), "env.split", "no tasks in split 'empty'"),
        (EnvConfig(num_tasks=101), EvalConfig(num_tasks=50), "env.num_tasks", "is 101, but the servers' split 'train' has"),
        (EnvConfig(), EvalConfig(num_tasks=51), "eval.num_tasks", "is 51, but the servers' split 'test' has 50 tasks"),
    ],
)  # fmt: skip
def test_invariant_1_tasks_that_are_not_there(env: EnvConfig, evaluation: EvalConfig, path: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_tasks(Config(env=env, eval=evaluation), {**TASKS, "empty": 0})
    assert caught.value.path == path and problem in caught.value.problem


def test_invariant_1_what_is_not_evaluated_need_not_be_there() -> None:
    check_tasks(Config(eval=EvalConfig(every=0, num_tasks=10**6)), TASKS)


@pytest.mark.parametrize(
    ("num_tasks", "every", "eval_split", "asked"),
    [
        (0, 5, "test", [("train", 100), ("test", 20)]),
        (30, 5, "test", [("train", 30), ("test", 20)]),
        (30, 0, "test", [("train", 30)]),
        (10, 5, "train", [("train", 20)]),
        (30, 5, "train", [("train", 30)]),
    ],
)
async def test_the_types_of_all_tasks_that_the_job_may_draw_and_of_no_others(
    num_tasks: int, every: int, eval_split: str, asked: list[tuple[str, int]]
) -> None:
    config = replace(
        CONFIG,
        env=replace(CONFIG.env, num_tasks=num_tasks),
        eval=replace(CONFIG.eval, every=every, split=eval_split),
    )
    servers = Servers(TASKS)
    stream, capacity = await survey(config, servers)  # type: ignore[arg-type]
    assert servers.asked == asked and capacity == 7
    num_train = num_tasks or 100
    groups = [stream.train_group(n) for n in range(num_train)]
    assert sorted(group.seed for group in groups) == list(range(num_train))
    assert {group.task_type for group in groups} == {"train type"}
    if every:
        assert {group.task_type for group in stream.eval_round(20)} == {f"{eval_split} type"}


async def test_servers_that_cannot_say_what_tasks_there_are() -> None:
    class Old(Servers):
        async def task_types(self, split: str, num_tasks: int) -> list[tuple[str, int]]:
            raise EnvironmentFailure("http://a: HTTP 404", retryable=False)

    with pytest.raises(EnvironmentUnreachable, match="env.urls: http://a: HTTP 404; is it a server of this version?"):
        await survey(CONFIG, Old(TASKS))  # type: ignore[arg-type]


def test_invariant_2_a_capacity_is_told_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    polls = iter([64, 64, 96, None, None, 96, None, 64, 64])
    told: list[tuple[float, int]] = []

    async def capacity() -> int:
        number = next(polls, 64)
        if number is None:
            raise EnvironmentFailure("http://a: no connection", retryable=True)
        return number

    async def watch() -> None:
        loop = asyncio.get_running_loop()

        def tell(event: EnvironmentCapacity) -> None:
            told.append((loop.time(), event.num_sessions))

        watching = asyncio.create_task(watch_capacity(capacity, 64, tell))
        await asyncio.sleep(12.5 * CAPACITY_POLL_S)
        assert not watching.done()
        watching.cancel()
        await asyncio.wait((watching,))

    with caplog.at_level(logging.WARNING):
        run(watch())
    assert told == [(3 * CAPACITY_POLL_S, 96), (8 * CAPACITY_POLL_S, 64)]
    assert caplog.text.count("http://a: no connection") == 2, "one line for each time that polls began to fail"
    assert "taken for 96" in caplog.text
