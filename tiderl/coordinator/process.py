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
from tiderl.coordinator.environments import survey, watch_capacity
from tiderl.coordinator.journal import Header, JournalWriter
from tiderl.coordinator.load import LoadMeter
from tiderl.coordinator.reports import Reports
from tiderl.coordinator.server import Coordinator
from tiderl.coordinator.summary import emulation_report, ledger_report, seconds_report, summarize, write_summary
from tiderl.envs.auth import read_token
from tiderl.envs.client import EnvClient
from tiderl.errors import UserError
from tiderl.observe.console import Console
from tiderl.observe.metrics import MetricsWriter
from tiderl.observe.prometheus import PrometheusExporter
from tiderl.scheduling.events import EnvironmentCapacity, StopRequested
from tiderl.wire.job import Job
from tiderl.wire.sockets import JobKeys, ServerSocket


async def coordinate(job: Job, ready_fd: int) -> int:
    """The whole life of the coordinator; returns the exit code. Raises `UserError` before any rank has started."""
    config = job.config
    began_s = time.monotonic()
    async with EnvClient(
        config.env.urls, read_token(config.env.token_file), config.timeouts.env_request_s
    ) as environments:
        await environments.check(config.env.name, config.timeouts.env_start_s)
        stream, capacity = await survey(config, environments)
        resumed = checkpoints.read_scheduler_state(job.resume_dir) if job.resume_dir else None
        header = Header(config, job.world_size, resumed)
        core = header.fresh_core()
        reports = _reports(job)
        keys = JobKeys.generate()
        wire = ServerSocket(keys, max_message_bytes=config.wire.max_message_bytes)
        try:
            with JournalWriter(job.run_dir / "journal.msgpack", header) as journal:
                coordinator = Coordinator(
                    config, core, stream, wire, journal, reports, environments, job.run_dir, job.world_size
                )
                loop = asyncio.get_running_loop()
                for number in (signal.SIGINT, signal.SIGTERM):
                    reason = f"got {signal.Signals(number).name}"
                    loop.add_signal_handler(number, coordinator.tell, StopRequested(reason))
                coordinator.tell(EnvironmentCapacity(capacity))
                port = await wire.bind(job.bind_host)
                with os.fdopen(ready_fd, "w") as ready:
                    ready.write(dataclasses.replace(job, port=port, keys=keys.public_for_clients()).to_json() + "\n")
                async with asyncio.TaskGroup() as group:
                    watching = group.create_task(watch_capacity(environments.capacity, capacity, coordinator.tell))
                    probing = group.create_task(reports.load.probe())
                    end = await coordinator.run()
                    watching.cancel()
                    probing.cancel()
        finally:
            await wire.close()
            reports.close()
    generated_before = resumed["ledger"]["generated"] if resumed else 0
    load = reports.load.report()
    summary = summarize(
        reports.metrics,
        tokens=ledger_report(core.book.ledger.balances(), coordinator.engine_generated_tokens, generated_before),
        seconds=seconds_report(core.seconds.final(coordinator.now_s())),
        load=load,
        emulated=emulation_report(config, load, coordinator.gauges),
        wall_s=time.monotonic() - began_s,
    )
    write_summary(job.run_dir, summary, end.reason, reports.console)
    return 2 if coordinator.user_error else end.exit_code


def _reports(job: Job) -> Reports:
    """Where reports go. Raises `UserError` where Prometheus' port is taken."""
    config = job.config
    exporter = None
    if config.run.prometheus_port:
        exporter = PrometheusExporter(config.run.prometheus_host, config.run.prometheus_port, job.run_dir.name)
    emulated = config.emulate.time_scale if config.engine.kind == "emulated" else None
    metrics = MetricsWriter(job.run_dir / "metrics.jsonl", emulated)
    console = Console(config.run.console, config.train.steps, emulated=emulated is not None)
    return Reports(metrics, console, LoadMeter(), exporter)


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
