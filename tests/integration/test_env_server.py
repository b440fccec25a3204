"""The server as a process: what it prints, how it ends, and what it leaves behind (nothing)."""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.scripted_env import NAME
from tiderl.envs import server
from tiderl.envs.client import EnvClient
from tiderl.envs.retry import RetryPolicy
from tiderl.envs.server import EnvServer, EnvServerConfig
from tiderl.errors import ConfigError, EnvironmentFailure, UserError

PROGRAM = """
import argparse, sys
from tiderl.envs import server
from tiderl.envs.client import EnvClient
from tiderl.envs.retry import RetryPolicy
parser = argparse.ArgumentParser()
server.add_arguments(parser)
sys.exit(server.run(parser.parse_args()))
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM, NAME, "--port", "0", "--workers", "2", "--capacity", "9"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def ready_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_its_workers(process: subprocess.Popen[str], number: int) -> None:
    line = ready_line(process)
    assert line.startswith(f"serving {NAME} on http://127.0.0.1:")
    assert line.endswith(", capacity 9, 2 workers\n")
    workers = psutil.Process(process.pid).children()
    assert len(workers) == 2
    process.send_signal(number)
    assert process.wait(timeout=20) == 0
    assert alive(workers) == []
    assert process.stdout is not None
    assert process.stdout.read() == "", "one line, once"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_step_that_hangs_does_not_hold_up_the_end(process: subprocess.Popen[str], number: int) -> None:
    url = ready_line(process).split()[3].rstrip(",")
    workers = psutil.Process(process.pid).children()

    async def play() -> None:
        async with EnvClient([url], env=NAME, retries=RetryPolicy(max_attempts=1)) as client:
            session = await client.start("train", 0)
            await session.step("print")
            stepping = asyncio.create_task(session.step("sleep 600"))
            await asyncio.sleep(0.2)
            process.send_signal(number)
            words = "worker_lost: the server is ending" if number == signal.SIGTERM else "ServerDisconnected"
            with pytest.raises(EnvironmentFailure, match=words) as failure:
                await stepping
            assert failure.value.retryable

    asyncio.run(play())
    assert process.wait(timeout=20) == (0 if number == signal.SIGTERM else -number)
    assert psutil.wait_procs(workers, timeout=20)[1] == []
    assert process.stdout is not None
    assert process.stdout.read() == "", "what environments print goes elsewhere"


def test_a_signal_before_it_serves_ends_it_too(process: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + 20
    while not (workers := psutil.Process(process.pid).children()) and time.monotonic() < deadline_s:
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 0
    assert alive(workers) == []


async def test_a_port_in_use_is_the_users_to_mend() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=rf"127\.0\.0\.1:{port}: the port is in use.*--port"):
            await EnvServer(EnvServerConfig(NAME, port=port)).start()


def test_a_public_address_needs_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDERL_ENV_TOKEN", raising=False)
    with pytest.raises(UserError, match=r"0\.0\.0\.0 without a token"):
        EnvServer(EnvServerConfig(NAME, host="0.0.0.0"))


@pytest.mark.parametrize(
    ("flags", "path"),
    [
        (["--capacity", "0"], "capacity"),
        (["--lease-s", "nan"], "lease_s"),
        (["--workers", "-1"], "workers"),
        (["--port", "70000"], "port"),
        (["--latency", "fast"], "latency"),
        (["--options", "{"], "options"),
        (["--options", "[]"], "options"),
    ],
)
def test_bad_settings_are_refused_by_name(flags: list[str], path: str) -> None:
    parser = argparse.ArgumentParser()
    server.add_arguments(parser)
    with pytest.raises(ConfigError) as error:
        server.run(parser.parse_args([NAME, *flags]))
    assert error.value.path == path


def test_the_parsers_defaults_are_the_settings_defaults() -> None:
    parser = argparse.ArgumentParser()
    server.add_arguments(parser)
    arguments = vars(parser.parse_args(["shop"]))
    assert arguments.pop("options") == "{}"
    assert EnvServerConfig(**arguments) == EnvServerConfig("shop")
