"""The coordinator process: `python -m tiderl.coordinator.process READY_FD`, started by rank 0's launcher.

Reads the job's description from standard input, checks the environment servers, listens, and writes the description with port
and keys to the file descriptor READY_FD (a pipe, since it holds the keys). Standard output is the job's console. Loads no torch.

Exit codes: 0 finished (or stopped by request with its state saved), 2 the user can mend it, 1 anything else.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import sys
import time

from tiderl.coordinator import checkpoints
from tiderl.coordinator.journal import Header, JournalWriter
from tiderl.coordinator.server import Coordinator
from tiderl.coordinator.stream import TaskStream
from tiderl.coordinator.summary import ledger_report, summarize, write_summary
from tiderl.envs.auth import read_token
from tiderl.envs.client import EnvClient
from tiderl.errors import ConfigError, EnvironmentFailure, EnvironmentUnreachable, UserError
from tiderl.observe.console import Console
from tiderl.observe.metrics import MetricsWriter
from tiderl.scheduling.events import EnvironmentCapacity, StopRequested
from tiderl.wire.job import Job
from tiderl.wire.sockets import CoordinatorSocket, JobKeys


async def coordinate(job: Job, ready_fd: int) -> int:
    """The whole life of the coordinator; returns the exit code. Raises `UserError` before any rank has started."""
    config = job.config
    began_s = time.monotonic()
    async with EnvClient(
        config.env.urls, read_token(config.env.token_file), config.timeouts.env_request_s
    ) as environments:
        await environments.check(config.env.name, config.timeouts.env_start_s)
        try:
            capacity, tasks = await environments.capacity(), await environments.tasks()
        except EnvironmentFailure as error:
            raise EnvironmentUnreachable(f"env.urls: {error}; is it a server of this version?") from error
        stream = _task_stream(job, tasks)
    keys = JobKeys.generate()
    wire = CoordinatorSocket(keys, max_message_bytes=config.wire.max_message_bytes)
    try:
        port = await wire.bind(job.bind_host)
        resumed = checkpoints.read_scheduler_state(job.resume_dir) if job.resume_dir else None
        header = Header(config, job.world_size, resumed)
        core = header.fresh_core()
        metrics = MetricsWriter(job.run_dir / "metrics.jsonl")
        console = Console(config.run.console, config.train.steps)
        with JournalWriter(job.run_dir / "journal.msgpack", header) as journal:
            coordinator = Coordinator(
                config, core, stream, wire, journal, metrics, console, job.run_dir, job.world_size
            )
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, coordinator.tell, StopRequested(f"got {signal.Signals(number).name}"))
            coordinator.tell(EnvironmentCapacity(capacity))
            with os.fdopen(ready_fd, "w") as ready:
                ready.write(dataclasses.replace(job, port=port, keys=keys.public_for_clients()).to_json() + "\n")
            end = await coordinator.run()
        metrics.close()
        generated_before = resumed["ledger"]["generated"] if resumed else 0
        ledger = ledger_report(core.rollout.ledger.balances(), coordinator.engine_generated_tokens, generated_before)
        write_summary(job.run_dir, summarize(metrics, ledger, time.monotonic() - began_s), end.reason, console)
        return 2 if coordinator.user_error else end.exit_code
    finally:
        await wire.close()


def _task_stream(job: Job, tasks: dict[str, int]) -> TaskStream:
    """Raises `ConfigError` where the servers have fewer tasks than the settings ask for."""
    config = job.config
    for path, split in (("env.split", config.env.split), ("eval.split", config.eval.split)):
        if split not in tasks:
            raise ConfigError(path, f"the servers of {config.env.name} have no split {split!r}, but {sorted(tasks)}")
    for path, wanted, split in (
        ("env.num_tasks", config.env.num_tasks, config.env.split),
        ("eval.num_tasks", config.eval.num_tasks if config.eval.every else 0, config.eval.split),
    ):
        if wanted > tasks[split]:
            raise ConfigError(path, f"is {wanted}, but the servers' split {split!r} has {tasks[split]} tasks")
    return TaskStream(
        env=config.env.name,
        train_split=config.env.split,
        num_train=config.env.num_tasks or tasks[config.env.split],
        eval_split=config.eval.split,
        seed=config.run.seed,
    )


def main() -> int:
    # The launcher tells the coordinator to stop with SIGTERM; Ctrl-C on a terminal reaches the launcher alone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    job = Job.from_json(sys.stdin.readline())
    folder = job.run_dir / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        level=logging.INFO,
        filename=folder / "coordinator.log",
        format="%(asctime)s %(levelname).1s %(name)s: %(message)s",
    )
    try:
        return asyncio.run(coordinate(job, int(sys.argv[1])))
    except UserError as error:
        print(f"tiderl: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
