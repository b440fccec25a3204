"""The environment server: `tiderl env serve NAME`. One listening process (the front), N workers, until it is told to stop.

Invariants (tests/integration/test_env_server.py):

1. What the user can mend (a port in use, no token on a public address, an unknown environment, a bad number) is a `UserError`
   before anything is served.
2. The line `serving …` is printed once, when requests are answered.
3. SIGTERM and SIGINT end it in seconds. Whatever ends it, SIGKILL included, no worker is left behind.

Source: paper Appendix B.1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tiderl.envs import latency
from tiderl.envs.auth import check_bind, read_token
from tiderl.envs.registry import BUILTIN
from tiderl.envs.service import EnvService
from tiderl.envs.session import SessionTable
from tiderl.envs.workers import WorkerPool
from tiderl.errors import ConfigError, UserError

REAP_INTERVAL_S = 1.0
#: How long open connections get when the server ends.
DRAIN_S = 2.0


@dataclass(frozen=True)
class EnvServerConfig:
    """Settings of one environment server. `validate` raises `ConfigError`."""

    env: str
    host: str = "127.0.0.1"
    port: int = 8300
    """0: any free port (the ready line names it)."""
    workers: int = 1
    """Processes that run the environments. 0: one per CPU core."""
    capacity: int = 256
    """Most sessions at once, paused ones included."""
    lease_s: float = 300.0
    """A session that hears nothing for this long is ended."""
    pause_lease_s: float = 3600.0
    """The same for a paused session; repeating /pause renews it."""
    step_timeout_s: float = 120.0
    """A worker that takes longer over a start or a step is killed and replaced."""
    start_timeout_s: float = 120.0
    """From the start of a worker until its environment is imported."""
    token_file: str = ""
    """File with the bearer token (0600). Empty: the variable TIDERL_ENV_TOKEN, or no token."""
    latency: str = "none"
    """Seconds added to each step: none, constant:S or lognormal:MEDIAN_S,SIGMA,MAX_S."""
    latency_seed: int = 0
    """Seed of the added seconds."""
    max_body_bytes: int = 1024 * 1024
    """Larger requests are refused."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Given to every start of the environment, below the client's own."""

    def validate(self) -> None:
        for name in ("capacity", "lease_s", "pause_lease_s", "step_timeout_s", "start_timeout_s", "max_body_bytes"):
            if not getattr(self, name) > 0:
                raise ConfigError(name, f"must be more than 0, got {getattr(self, name)}")
        if self.workers < 0:
            raise ConfigError("workers", f"must be 0 (one per core) or more, got {self.workers}")
        if not 0 <= self.port <= 65535:
            raise ConfigError("port", f"must be between 0 and 65535, got {self.port}")

    @property
    def num_workers(self) -> int:
        return self.workers or os.cpu_count() or 1


class EnvServer:
    """A server inside a running event loop: `await start()`, `url`, `await stop()`."""

    def __init__(self, config: EnvServerConfig) -> None:
        config.validate()
        self.config = config
        self.url = ""
        token = read_token(config.token_file)
        check_bind(config.host, token)
        self.pool = WorkerPool(config.env, config.num_workers, config.start_timeout_s)
        self.service = EnvService(
            config.env,
            self.pool,
            SessionTable(config.capacity, config.lease_s, config.pause_lease_s),
            latency=latency.parse(config.latency, config.latency_seed),
            step_timeout_s=config.step_timeout_s,
            options=dict(config.options),
            token=token,
        )
        self.pool.on_lost = self.service.worker_lost
        self._runner = web.AppRunner(
            self.service.application(config.max_body_bytes), access_log=None, shutdown_timeout=DRAIN_S
        )

    async def start(self) -> None:
        """Start the workers, then listen. Raises `UserError`, and then leaves nothing behind."""
        config = self.config
        try:
            await self.pool.start()
            await self._runner.setup()
            try:
                await web.TCPSite(self._runner, config.host, config.port).start()
            except OSError as error:
                raise UserError(_why_not_listening(config, error)) from error
        except BaseException:
            await self.stop()
            raise
        host = f"[{config.host}]" if ":" in config.host else config.host
        self.url = f"http://{host}:{self._runner.addresses[0][1]}"
        self._reaping = asyncio.create_task(self._reap())

    async def stop(self) -> None:
        """Stop listening, close the environments, end the workers; in seconds, whatever an environment is doing."""
        if self.url:
            self._reaping.cancel()
            await asyncio.gather(self._reaping, return_exceptions=True)
        # Together: the end of the workers is what ends the requests that wait for them.
        await asyncio.gather(self._runner.cleanup(), self.pool.close())
        await self.service.close()

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(min(REAP_INTERVAL_S, self.config.lease_s / 4.0))
            self.service.reap()


def _why_not_listening(config: EnvServerConfig, error: OSError) -> str:
    where = f"cannot listen on {config.host}:{config.port}"
    if error.errno == errno.EADDRINUSE:
        return f"{where}: the port is in use; end the other server, or choose another with --port (0: any free one)"
    return f"{where}: {error.strerror or error}; check --host and --port"


async def _serve(config: EnvServerConfig, announce: Callable[[str], None]) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    server = EnvServer(config)
    starting = asyncio.create_task(server.start())
    told = asyncio.create_task(stopping.wait())
    await asyncio.wait((starting, told), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        return
    try:
        await starting
        workers = f"{config.num_workers} worker{'s' if config.num_workers != 1 else ''}"
        announce(f"serving {config.env} on {server.url}, capacity {config.capacity}, {workers}")
        await told
        await server.stop()
    finally:
        told.cancel()


def serve(config: EnvServerConfig) -> None:
    """Serve until SIGTERM or SIGINT. Raises `UserError` if it cannot start."""
    asyncio.run(_serve(config, lambda line: print(line, flush=True)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tiderl env serve`."""
    default = EnvServerConfig("")
    parser.add_argument("env", metavar="NAME", help=f"{', '.join(sorted(BUILTIN))}, or module:Class of your own")
    parser.add_argument("--host", default=default.host, help="address to listen on; others than loopback need a token")
    parser.add_argument("--port", type=int, default=default.port, help="0: any free port")
    parser.add_argument(
        "--workers", type=int, default=default.workers, help="processes that run environments; 0: one per core"
    )
    parser.add_argument(
        "--capacity", type=int, default=default.capacity, help="most sessions at once, paused ones included"
    )
    parser.add_argument("--lease-s", type=float, default=default.lease_s, help="a session silent for longer is ended")
    parser.add_argument(
        "--pause-lease-s", type=float, default=default.pause_lease_s, help="the same for a paused session"
    )
    parser.add_argument(
        "--step-timeout-s", type=float, default=default.step_timeout_s, help="a worker stuck for longer is replaced"
    )
    parser.add_argument(
        "--start-timeout-s", type=float, default=default.start_timeout_s, help="a worker must be up in this time"
    )
    parser.add_argument("--token-file", default="", help="file with the bearer token, mode 0600")
    parser.add_argument("--latency", default=default.latency, help=f"seconds added to each step: {latency.FORMS}")
    parser.add_argument("--latency-seed", type=int, default=default.latency_seed, help="seed of the added seconds")
    parser.add_argument(
        "--max-body-bytes", type=int, default=default.max_body_bytes, help="larger requests are refused"
    )
    parser.add_argument("--options", default="{}", metavar="JSON", help="options for every start of the environment")


def run(arguments: argparse.Namespace) -> int:
    """`tiderl env serve` with the arguments of `add_arguments`. Raises `UserError`."""
    try:
        options = json.loads(arguments.options)
    except ValueError as error:
        raise ConfigError("options", f"not JSON: {error}") from error
    if not isinstance(options, dict):
        raise ConfigError("options", 'must be a JSON object, such as {"max_turns": 10}')
    logging.basicConfig(format="%(asctime)s env server %(levelname)s %(message)s")
    settings = {name: getattr(arguments, name) for name in EnvServerConfig.__dataclass_fields__}
    serve(EnvServerConfig(**settings | {"options": options}))
    return 0
