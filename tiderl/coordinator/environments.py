"""What the coordinator asks the environment servers itself: which tasks there are, and how many sessions they can hold.

Invariants (tests/unit/test_environments.py):

1. A job that wants a split or tasks that the servers do not have ends with a `ConfigError` that names the setting.
2. The core hears of a capacity when it differs from the last one told; a poll that fails tells nothing, and is one warning until
   polls succeed again.

Source: paper §4.1, constraint 1 (environment capacity).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from tiderl.config.schema import Config
from tiderl.coordinator.stream import TaskStream, TaskTypes
from tiderl.envs.client import EnvClient
from tiderl.errors import ConfigError, EnvironmentFailure, EnvironmentUnreachable
from tiderl.scheduling.events import EnvironmentCapacity

logger = logging.getLogger(__name__)

#: How often the servers are asked for their capacity: it changes when somebody adds or removes a server's places, and tasks take
#: tens of seconds to fill new ones.
CAPACITY_POLL_S = 10.0


async def survey(config: Config, environments: EnvClient) -> tuple[TaskStream, int]:
    """The job's tasks, and the number of sessions that the servers can hold.

    Raises `EnvironmentUnreachable`, or `ConfigError` where there are fewer tasks than the settings ask for.
    """
    try:
        capacity, tasks = await environments.capacity(), await environments.tasks()
        check_tasks(config, tasks)
        num_train = config.env.num_tasks or tasks[config.env.split]
        wanted = {config.env.split: num_train}
        if config.eval.every:
            wanted[config.eval.split] = max(config.eval.num_tasks, wanted.get(config.eval.split, 0))
        types = {split: TaskTypes(await environments.task_types(split, number)) for split, number in wanted.items()}
    except EnvironmentFailure as error:
        raise EnvironmentUnreachable(f"env.urls: {error}; is it a server of this version?") from error
    stream = TaskStream(
        env=config.env.name,
        train_split=config.env.split,
        num_train=num_train,
        eval_split=config.eval.split,
        seed=config.run.seed,
        types=types,
    )
    return stream, capacity


def check_tasks(config: Config, tasks: Mapping[str, int]) -> None:
    """`tasks`: number of tasks by split. Raises `ConfigError`."""
    for path, split in (("env.split", config.env.split), ("eval.split", config.eval.split)):
        if split not in tasks:
            raise ConfigError(path, f"the servers of {config.env.name} have no split {split!r}, but {sorted(tasks)}")
    if tasks[config.env.split] == 0:
        raise ConfigError("env.split", f"the servers of {config.env.name} have no tasks in split {config.env.split!r}")
    for path, wanted, split in (
        ("env.num_tasks", config.env.num_tasks, config.env.split),
        ("eval.num_tasks", config.eval.num_tasks if config.eval.every else 0, config.eval.split),
    ):
        if wanted > tasks[split]:
            raise ConfigError(path, f"is {wanted}, but the servers' split {split!r} has {tasks[split]} tasks")


async def watch_capacity(
    capacity: Callable[[], Awaitable[int]], told: int, tell: Callable[[EnvironmentCapacity], None]
) -> None:
    """Poll `capacity` until cancelled; `told` is what the core knows already. A poll is bounded by the client's own timeouts."""
    failing = False
    while True:
        await asyncio.sleep(CAPACITY_POLL_S)
        try:
            num_sessions = await capacity()
        except EnvironmentFailure as error:
            if not failing:
                logger.warning("the capacity of the environment servers is unknown, taken for %d: %s", told, error)
            failing = True
            continue
        failing = False
        if num_sessions != told:
            logger.info("the environment servers hold %d sessions now, not %d", num_sessions, told)
            tell(EnvironmentCapacity(num_sessions))
            told = num_sessions
