"""The end of a job as the parent of a dead Ref rank sees it: through torchrun's store, in real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

PROJECT = Path(__file__).parents[2]
BOUND_S = 60.0
ENDED = "ended"


@pytest.fixture
def torchrun_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=BOUND_S))


def job_store(torchrun_store: TCPStore) -> PrefixStore:
    """As the second start of a job sees it."""
    return PrefixStore("tiderl/1", torchrun_store)


@contextmanager
def started(port: int, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`python ARGUMENTS` in torchrun's environment of rank 2; its store is at `port`."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(PROJECT),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "1",
        "RANK": "2",
    }
    child = subprocess.Popen(
        [sys.executable, *arguments], cwd=PROJECT, env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        assert child.stderr is not None
        child.stderr.close()


def first_line(child: subprocess.Popen[str]) -> str:
    assert child.stderr is not None
    return child.stderr.readline()


EPILOGUE = ("-m", "tiderl.worker.epilogue", "exit code -9")


def test_it_says_what_happened_and_stays_until_the_job_has_ended(torchrun_store: TCPStore) -> None:
    PrefixStore("tiderl/0", torchrun_store).set(ENDED, "of the start before this one")
    with started(torchrun_store.port, *EPILOGUE) as epilogue:
        line = first_line(epilogue)
        assert line == "tiderl: Ref rank 2 has died (exit code -9); the job goes on without it\n"
        time.sleep(1.5)  # longer than it sleeps between two looks
        assert epilogue.poll() is None
        job_store(torchrun_store).set(ENDED, "all steps are done")
        assert epilogue.wait(BOUND_S) == 0


def test_it_is_silent_where_the_job_has_ended_already(torchrun_store: TCPStore) -> None:
    job_store(torchrun_store).set(ENDED, "a fault")
    with started(torchrun_store.port, *EPILOGUE) as epilogue:
        assert epilogue.wait(BOUND_S) == 0
        assert first_line(epilogue) == ""


def test_it_ends_when_nobody_can_ask_any_more() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=BOUND_S))
    with started(store.port, *EPILOGUE) as epilogue:
        first_line(epilogue)
        del store
        assert epilogue.wait(BOUND_S) == 0
        assert epilogue.stderr is not None
        assert "torchrun's store is gone, and so is the job" in epilogue.stderr.read()


#: The launcher of rank 2: how its worker ends, and the number of Ref ranks behind the one actor. Prints its exit codes.
PARENT = """
import subprocess, sys
from tiderl import launch
from tiderl.config.load import load
def start(config, job_text, early_log):
    command = [sys.executable, "-c", worker]
    return subprocess.Popen(command, stdout=early_log, stderr=early_log, text=True, start_new_session=True)
launch._start_worker = start
for worker, num_ref in zip(sys.argv[1::2], sys.argv[2::2]):
    loaded = load(["--roles.num-actors", "1", "--roles.num-ref", num_ref, "--timeouts.shutdown-s", "1"], prog="test")
    print("exit code", launch._run(loaded, 2, 4, None), file=sys.stderr)
"""
DIES = "import os, signal; print('log: rank.log', flush=True); os.kill(os.getpid(), signal.SIGKILL)"


def test_the_parent_of_a_dead_ref_rank_stays_and_leaves_well(torchrun_store: TCPStore) -> None:
    with started(torchrun_store.port, "-c", PARENT, DIES, "2") as parent:
        assert "Ref rank 2 has died (exit code -9: rank 2 failed; see rank.log)" in first_line(parent)
        assert parent.poll() is None
        job_store(torchrun_store).set(ENDED, "all steps are done")
        assert first_line(parent) == "exit code 0\n"


def test_the_parent_of_a_dead_ref_rank_leaves_when_torchrun_says_so(torchrun_store: TCPStore) -> None:
    with started(torchrun_store.port, "-c", PARENT, DIES, "2") as parent:
        first_line(parent)
        parent.terminate()
        assert first_line(parent) == "exit code 0\n"


def test_in_every_other_case_the_parent_leaves_as_its_worker_did(torchrun_store: TCPStore) -> None:
    cases = (
        (DIES, "1", 1),  # rank 2 is a rollout rank
        ("raise SystemExit('no such module')", "2", 1),  # before it had found its job: nobody else would know
        ("print('log: rank.log'); raise SystemExit(2)", "2", 2),  # the user can mend it
        ("print('log: rank.log')", "2", 0),
    )
    arguments = [text for worker, num_ref, _ in cases for text in (worker, num_ref)]
    with started(torchrun_store.port, "-c", PARENT, *arguments) as parent:
        assert [first_line(parent) for _ in cases] == [f"exit code {code}\n" for _, _, code in cases]
