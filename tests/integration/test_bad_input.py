"""What the user can get wrong: one paragraph that says what, where and what to do, and exit code 2, before any rank has started.

Each case starts rank 0's launcher alone, as torchrun would; none of them gets as far as a worker.
"""

from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration import jobs


def launch(config: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Rank 0 of four, whose torchrun's store nobody serves: a worker could not even start."""
    torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    command = [sys.executable, "-m", "tiderl.launch", "--config", str(config), *flags]
    environ = {**os.environ, "PYTHONPATH": str(jobs.PROJECT), **torchrun}
    environ.pop("TORCHELASTIC_ERROR_FILE", None)
    return subprocess.run(command, cwd=jobs.PROJECT, env=environ, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    jobs.write_model(folder / "model")
    text = jobs.CONFIG.format(folder=folder / "runs", model=folder / "model", url="http://127.0.0.1:9")
    (folder / "job.toml").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model.path", "/nowhere"], ["model.path", "/nowhere"]),
        (["--train.stepz", "5"], ["train.stepz", "train.steps"]),
        (["--train.steps", "many"], ["train.steps", "many"]),
        (["--roles.num-actors", "4"], ["roles.num_actors", "4"]),
        (["--trainer.max-micro-batch-tokens", "100"], ["trainer.max_micro_batch_tokens", "256"]),
        (["--engine.kv-cache-tokens", "128"], ["engine.kv_cache_tokens", "256"]),
        (["--run.resume", "/nowhere"], ["run.resume", "/nowhere"]),
        (["--timeouts.env-start-s", "1"], ["127.0.0.1:9", "tiderl env serve"]),
    ],
)
def test_a_wrong_setting_is_one_paragraph_and_exit_code_2(folder: Path, flags: list[str], words: list[str]) -> None:
    """The last case is an environment server that is not there."""
    ended = launch(folder / "job.toml", *flags)
    assert_one_paragraph(ended, words)


def test_a_config_file_with_an_unknown_setting(folder: Path) -> None:
    (folder / "wrong.toml").write_text("[train]\nbatch = 3\n")
    ended = launch(folder / "wrong.toml")
    assert_one_paragraph(ended, ["train.batch", "wrong.toml"])


def test_a_broken_model(folder: Path) -> None:
    broken = folder / "broken"
    broken.mkdir(exist_ok=True)
    (broken / "config.json").write_text("{")
    assert_one_paragraph(launch(folder / "job.toml", "--model.path", str(broken)), [str(broken), "config.json"])


def test_a_server_that_answers_500(folder: Path) -> None:
    with failing_server() as url:
        ended = launch(folder / "job.toml", "--env.urls", url, "--timeouts.env-start-s", "2")
    assert_one_paragraph(ended, [url, "500"])


def test_a_server_of_another_environment(folder: Path) -> None:
    with jobs.environment_server() as url:
        ended = launch(folder / "job.toml", "--env.urls", url, "--env.name", "shop", "--timeouts.env-start-s", "5")
        assert_one_paragraph(ended, ["shop", jobs.ENVIRONMENT])
        ended = launch(folder / "job.toml", "--env.urls", url, "--eval.num-tasks", "1000")
        assert_one_paragraph(ended, ["eval.num_tasks", "1000", "64"])
        ended = launch(folder / "job.toml", "--env.urls", url, "--env.split", "nonsense")
        assert_one_paragraph(ended, ["env.split", "nonsense"])


def test_an_unknown_environment_and_a_port_in_use() -> None:
    serve = [sys.executable, "-m", "tiderl.cli", "env", "serve"]
    ended = subprocess.run([*serve, "chess"], cwd=jobs.PROJECT, capture_output=True, text=True, timeout=60)
    assert_one_paragraph(ended, ["chess", "babyai", "shop"])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [*serve, jobs.ENVIRONMENT, "--port", port, "--workers", "1"]
        ended = subprocess.run(command, cwd=jobs.PROJECT, capture_output=True, text=True, timeout=60)
    assert_one_paragraph(ended, [port, "in use"])


def test_a_run_folder_is_never_overwritten(folder: Path) -> None:
    run_dir = folder / "runs" / "taken"
    run_dir.mkdir(parents=True)
    (run_dir / "journal.msgpack").write_bytes(b"")
    assert_one_paragraph(launch(folder / "job.toml", "--run.name", "taken"), ["run.name", str(run_dir), "--run.resume"])


def test_torchrun_finds_the_cause_in_its_error_file(folder: Path) -> None:
    error_file = folder / "error.json"
    environ = {**os.environ, "PYTHONPATH": str(jobs.PROJECT), "TORCHELASTIC_ERROR_FILE": str(error_file)}
    environ |= {"RANK": "1", "WORLD_SIZE": "4"}
    command = [sys.executable, "-m", "tiderl.launch", "--config", str(folder / "job.toml"), "--model.path", "/nowhere"]
    ended = subprocess.run(command, cwd=jobs.PROJECT, env=environ, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (2, "")  # rank 0 alone speaks
    assert "/nowhere" in json.loads(error_file.read_text())["message"]["message"]


def assert_one_paragraph(ended: subprocess.CompletedProcess[str], words: list[str]) -> None:
    assert ended.returncode == 2, (ended.returncode, ended.stdout, ended.stderr)
    lines = ended.stderr.strip().splitlines()
    assert len(lines) == 1, ended.stderr
    assert lines[0].startswith("tiderl: ")
    for word in words:
        assert word in lines[0], (word, lines[0])


@contextmanager
def failing_server() -> Iterator[str]:
    class Failing(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(500)

        def log_message(self, format: str, *arguments: object) -> None:
            """Say nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Failing)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
