"""`torchrun … -m tiderl.launch --config FILE`: the thin parent of one rank. Loads no torch.

    torchrun ── per GPU ──▶ launch (this) ──▶ worker process
                            on rank 0 also ─▶ coordinator process

It checks the settings before anything is started, starts its children, and watches them: when one ends, so does the other, and when
it is told to stop it lets the coordinator end the job in order, for a bounded time. Children die with it (`PR_SET_PDEATHSIG`).
A job goes on without a Ref rank that has died, but torchrun would end it: the parent of such a rank stays until the job's end.

Exit codes: 0 done, 2 the user can mend it (one paragraph on standard error), 1 anything else.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from tiderl.config.load import LoadedConfig, load, to_json
from tiderl.config.plan import describe
from tiderl.config.schema import Config
from tiderl.config.validate import validate
from tiderl.coordinator.checkpoints import find_checkpoint
from tiderl.errors import TideError, UserError, WaitTimeout
from tiderl.profiles.files import load as load_profiles
from tiderl.trainers.model_folder import check_model_folder, num_parameters
from tiderl.types import Role
from tiderl.wire.job import Job

#: How often the parent looks at its children and at its signals.
POLL_S = 0.1
#: What children get beyond their own bounds, to write their last lines.
GRACE_S = 3.0
_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    rank = int(os.environ.get("RANK", "0"))
    try:
        loaded = load(arguments, prog="tiderl.launch")
        config = loaded.config
        world_size = _world_size(loaded)
        validate(config, world_size)
        size = _checked_model_size(config)
        if loaded.dry_run:
            if rank == 0:
                print(describe(config, world_size, size))
            return 0
        resume_dir = find_checkpoint(Path(config.run.resume)) if config.run.resume else None
        return _run(loaded, rank, world_size, resume_dir)
    except UserError as error:
        _complain(str(error), rank)
        return 2
    except TideError as error:
        _complain(str(error), rank)
        return 1


def _checked_model_size(config: Config) -> int:
    """The model's number of parameters. Raises `UserError` where its folder, or the profiles that stand for it, cannot be used."""
    if config.engine.kind == "emulated":
        return load_profiles(config.emulate.hardware, config.emulate.model).num_parameters
    check_model_folder(config.model.path)
    return num_parameters(config.model.path)


def _world_size(loaded: LoadedConfig) -> int:
    """Of torchrun; a dry run outside of torchrun gets the size that `TIDERL_WORLD_SIZE` says, or the smallest that works."""
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    if loaded.dry_run:
        return int(os.environ.get("TIDERL_WORLD_SIZE", loaded.config.roles.num_actors + 1))
    raise UserError(
        "WORLD_SIZE is not set: start the job with torchrun, such as "
        "`torchrun --standalone --nproc-per-node 4 -m tiderl.launch --config FILE`, or add --dry-run"
    )


def _complain(text: str, rank: int) -> None:
    """Rank 0 says it on standard error; every rank writes it where torchrun looks for the cause of a failure."""
    if rank == 0:
        print(f"tiderl: {text}", file=sys.stderr, flush=True)
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        message = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            Path(error_file).write_text(json.dumps({"message": message}))


def _run(loaded: LoadedConfig, rank: int, world_size: int, resume_dir: Path | None) -> int:
    config = loaded.config
    stop = _StopSignal()
    _die_with_parent()
    # Trajectories and weights are the user's own: whatever the job writes, no one else may read.
    os.umask(0o077)
    children: dict[str, subprocess.Popen[str]] = {}
    with tempfile.TemporaryFile("w+") as early_log:
        try:
            job_text = ""
            if rank == 0:
                bind_host, connect_host = _hosts(config, world_size)
                job = Job(config, world_size, _make_run_dir(loaded), resume_dir, bind_host, connect_host)
                children["coordinator"], job_text = _start_coordinator(job, stop)
                if not job_text:
                    return _wait_bounded(children["coordinator"])
            children["worker"] = _start_worker(config, job_text, early_log)
            code = _watch(children, config, stop)
        finally:
            for child in children.values():
                _end(child)
        if code != 1 or stop.requested:
            return code
        last_words = _last_words(early_log, rank)
        if config.roles.first_role(rank) is Role.REF and _had_started(early_log):
            return _await_end(f"exit code {children['worker'].returncode}: {last_words}", stop)
        _complain(last_words, rank)
        return code


def _hosts(config: Config, world_size: int) -> tuple[str, str]:
    """Where the coordinator listens, and where workers look for it: on this machine only, if all ranks are here."""
    bind_host = config.wire.bind_host
    if bind_host not in ("0.0.0.0", "::"):
        return bind_host, bind_host
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world_size):
        return "127.0.0.1", "127.0.0.1"
    return bind_host, os.environ["MASTER_ADDR"]


def _make_run_dir(loaded: LoadedConfig) -> Path:
    """A new folder for the run, with the resolved settings. Raises `UserError` where it exists or cannot be made."""
    run = loaded.config.run
    stem = Path(loaded.sources[-1]).stem if loaded.sources else "run"
    name = run.name or f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    run_dir = (Path(run.folder) / name).resolve()
    if (run_dir / "journal.msgpack").exists():
        raise UserError(
            f"run.name: {run_dir} holds a run already; choose another name, or go on from it with --run.resume {run_dir}"
        )
    try:
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        (run_dir / "config.json").write_text(to_json(loaded.config) + "\n")
    except OSError as error:
        raise UserError(f"run.folder: {run_dir} cannot be written: {error.strerror}") from error
    return run_dir


def _start_coordinator(job: Job, stop: _StopSignal) -> tuple[subprocess.Popen[str], str]:
    """The process, and the job's description with its port and keys; empty if it ended before it was ready."""
    read_end, write_end = os.pipe()
    command = [sys.executable, "-m", "tiderl.coordinator.process", str(write_end)]
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        text=True,
        pass_fds=(write_end,),
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )
    os.close(write_end)
    assert child.stdin is not None
    child.stdin.write(job.to_json() + "\n")
    child.stdin.close()
    bound_s = job.config.timeouts.start_s
    deadline_s = time.monotonic() + bound_s
    with os.fdopen(read_end) as ready:
        while not select.select([ready], [], [], POLL_S)[0]:
            if stop.requested:
                child.terminate()
                return child, ""
            if time.monotonic() > deadline_s:
                child.kill()
                raise WaitTimeout("rank 0's launcher", "the coordinator", bound_s, "timeouts.start_s")
        return child, ready.readline()


def _start_worker(config: Config, job_text: str, early_log: IO[str]) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "TIDERL_START_TIMEOUT_S": str(config.timeouts.start_s),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    child = subprocess.Popen(
        [sys.executable, "-m", "tiderl.worker.process"],
        stdin=subprocess.PIPE,
        stdout=early_log,
        stderr=early_log,
        text=True,
        env=environment,
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )
    assert child.stdin is not None
    child.stdin.write(job_text)
    child.stdin.close()
    return child


def _watch(children: dict[str, subprocess.Popen[str]], config: Config, stop: _StopSignal) -> int:
    """Wait for the children; the first failure among them is the rank's. Bounded once one has ended or a stop was asked for."""
    bound_s = 2 * config.timeouts.shutdown_s + GRACE_S
    deadline_s: float | None = None
    told = False
    while True:
        codes = {name: child.poll() for name, child in children.items()}
        ended = [code for code in codes.values() if code is not None]
        if len(ended) == len(children):
            return max((_exit_code(code) for code in ended), default=0)
        if stop.requested and not told:
            told = True
            if "coordinator" in children:
                children["coordinator"].send_signal(stop.number)
            else:
                # Ends a worker that has not reached the coordinator; one that has is told by it when to leave.
                children["worker"].terminate()
        if (ended or stop.requested) and deadline_s is None:
            deadline_s = time.monotonic() + bound_s
        if deadline_s is not None and time.monotonic() > deadline_s:
            left = [name for name, code in codes.items() if code is None]
            print(
                f"tiderl: {' and '.join(left)} did not end within 2 x timeouts.shutdown_s and is killed",
                file=sys.stderr,
            )
            return max(1, *(_exit_code(code) for code in ended))
        time.sleep(POLL_S)


def _wait_bounded(child: subprocess.Popen[str]) -> int:
    """The exit code of a child that is about to end; 1 if it does not."""
    try:
        return _exit_code(child.wait(timeout=GRACE_S))
    except subprocess.TimeoutExpired:
        return 1


def _exit_code(code: int) -> int:
    """Of a child: a signal's death counts as a failure."""
    return code if code >= 0 else 1


def _end(child: subprocess.Popen[str]) -> None:
    """Make sure that the child and what it started are gone."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _last_words(early_log: IO[str], rank: int) -> str:
    """Why this rank failed, as far as its parent can tell: what it printed before it had a log, or where its log is."""
    lines = _lines(early_log)
    if _had_started(early_log):
        return f"rank {rank} failed; see {lines[-1].removeprefix('log: ')}"
    return f"rank {rank} failed at its start: " + " | ".join(lines[-5:])


def _had_started(early_log: IO[str]) -> bool:
    """Had the worker found its job? From there on the coordinator knows that it should be there, and judges what its loss means."""
    return any(line.startswith("log: ") for line in _lines(early_log)[-1:])


def _lines(early_log: IO[str]) -> list[str]:
    early_log.seek(0)
    return early_log.read().strip().splitlines()


def _await_end(what_happened: str, stop: _StopSignal) -> int:
    """In the place of a Ref rank's dead worker: stay until the job has ended, or until torchrun ends us; the exit code of a rank
    that left in order."""
    command = [sys.executable, "-m", "tiderl.worker.epilogue", what_happened]
    environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}  # it has one line to say
    child = subprocess.Popen(command, env=environment, text=True, start_new_session=True, preexec_fn=_die_with_parent)
    try:
        while child.poll() is None and not stop.requested:
            time.sleep(POLL_S)
    finally:
        _end(child)
    return 0


class _StopSignal:
    """Remembers that SIGINT or SIGTERM came; torchrun and a terminal may both send them, more than once."""

    def __init__(self) -> None:
        self.requested = False
        self.number = signal.SIGTERM
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        self.requested, self.number = True, signal.Signals(number)


def _die_with_parent() -> None:
    """Linux: be killed when the parent dies, however it dies, so that nothing of a job outlives it."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
