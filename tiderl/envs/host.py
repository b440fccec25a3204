"""The worker process of an environment server: holds environments and runs their synchronous code, one call at a time.

It reads one frame from the socket that it was given, does what it says, and answers with one frame. A frame is a length
(4 bytes, big-endian) and that many bytes of JSON. Environments need not be thread-safe: a process has one thread.

Invariants (tests/unit/test_envs_host.py, tests/integration/test_env_server.py):

1. Whatever an environment raises becomes an error answer, never a reward; a `ValueError` of `start` is the client's mistake,
   everything else the environment's. Its session is closed.
2. An answer that is not what the protocol promises (a reward that is NaN, a delay beyond `max_delay_s`) is an error of the
   environment too.
3. The process ends when its parent does, even in the middle of a call: at the end of the socket, and by PR_SET_PDEATHSIG.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

from tiderl.envs import payload
from tiderl.envs.payload import ErrorKind
from tiderl.envs.protocol import Environment, EnvironmentClass, Observation, Started, Stepped
from tiderl.envs.registry import resolve
from tiderl.errors import UserError

logger = logging.getLogger(__name__)

HEADER_BYTES = 4
MAX_FRAME_BYTES = 256 * 1024 * 1024
SPLITS = ("train", "test")


class BadEnvironment(Exception):
    """The environment broke its protocol."""


class EnvironmentHost:
    """The environments of one worker, by session id."""

    def __init__(self, environment_class: EnvironmentClass) -> None:
        self._class = environment_class
        self._environments: dict[str, Environment] = {}

    def splits(self) -> dict[str, int]:
        """Number of tasks of each split that the environment knows."""
        sizes = {}
        for split in SPLITS:
            try:
                sizes[split] = int(self._class.num_tasks(split))
            except ValueError:
                continue  # an environment need not have both
        return sizes

    def handle(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Do one call: `op` is start, step, end or task_types. The answer is the environment's, or a refusal's JSON.

        Answers to start and step say beside it how long the server is to wait (`delay_s`), at most the call's `max_delay_s`.
        """
        match call["op"]:
            case "start":
                return self._start(
                    call["session_id"], call["split"], call["seed"], call["options"], call["max_delay_s"]
                )
            case "step":
                return self._step(call["session_id"], call["action"], call["max_delay_s"])
            case "end":
                self._close(call["session_id"])
                return {}
            case "task_types":
                return self._task_types(call["split"], call["first"], call["count"])
        raise AssertionError(f"no such call: {call['op']}")

    def close(self) -> None:
        for session_id in list(self._environments):
            self._close(session_id)

    def _start(
        self, session_id: str, split: str, seed: int, options: Mapping[str, Any], max_delay_s: float
    ) -> dict[str, Any]:
        # Environments are foreign code: here, and in _step and _close, any exception is theirs and must not end the process.
        try:
            environment = self._class()
        except Exception as error:  # noqa: BLE001 - foreign code
            return self._failed(session_id, "its constructor", error)
        self._environments[session_id] = environment
        try:
            started = _checked_start(environment.start(split, seed, options))
            return payload.started_to_json(started) | {"delay_s": _checked_delay(started, max_delay_s)}
        except ValueError as error:
            self._close(session_id)
            return payload.Refusal(ErrorKind.BAD_REQUEST, f"start({split!r}, {seed}): {error}").to_json()
        except Exception as error:  # noqa: BLE001 - foreign code
            return self._failed(session_id, f"start({split!r}, {seed})", error)

    def _step(self, session_id: str, action: str, max_delay_s: float) -> dict[str, Any]:
        try:
            stepped = _checked_step(self._environments[session_id].step(action))
            return payload.stepped_to_json(stepped) | {"delay_s": _checked_delay(stepped, max_delay_s)}
        except Exception as error:  # noqa: BLE001 - foreign code
            return self._failed(session_id, "step", error)

    def _task_types(self, split: str, first: int, count: int) -> dict[str, Any]:
        """The types of seeds `first` .. `first + count - 1`, as runs of equal ones: `[[type, length], …]`."""
        runs: list[list[Any]] = []
        try:
            for seed in range(first, first + count):
                task_type = self._class.task_type(split, seed)
                if not isinstance(task_type, str):
                    raise BadEnvironment(f"task_type must be text, not {type(task_type).__name__}")
                if not runs or runs[-1][0] != task_type:
                    runs.append([task_type, 0])
                runs[-1][1] += 1
        except Exception as error:
            logger.exception("task_type failed")
            message = f"task_type({split!r}, {seed}) raised {type(error).__name__}: {error}"
            return payload.Refusal(ErrorKind.ENV_ERROR, message).to_json()
        return {"runs": runs}

    def _failed(self, session_id: str, where: str, error: Exception) -> dict[str, Any]:
        logger.error("session %s: %s failed", session_id, where, exc_info=error)
        self._close(session_id)
        return payload.Refusal(ErrorKind.ENV_ERROR, f"{where} raised {type(error).__name__}: {error}").to_json()

    def _close(self, session_id: str) -> None:
        environment = self._environments.pop(session_id, None)
        if environment is None:
            return
        try:
            environment.close()
        except Exception:
            logger.exception("session %s: close failed", session_id)


def _checked_start(started: Started) -> Started:
    _check_observation(started.observation)
    if not isinstance(started.instruction, str) or not isinstance(started.task_type, str):
        raise BadEnvironment("instruction and task_type must be text")
    return started


def _checked_step(stepped: Stepped) -> Stepped:
    """The same with plain numbers: environments like to return NumPy's."""
    _check_observation(stepped.observation)
    reward = float(stepped.reward)
    if not math.isfinite(reward):
        raise BadEnvironment(f"the reward is {reward}")
    return Stepped(stepped.observation, reward, bool(stepped.done), bool(stepped.success), stepped.delay_s)


def _checked_delay(answer: Started | Stepped, max_delay_s: float) -> float:
    try:
        delay_s = float(answer.delay_s)
    except (TypeError, ValueError) as error:  # of `start`, a ValueError would be taken for the client's mistake
        raise BadEnvironment(f"delay_s is {answer.delay_s!r}, not a number") from error
    if not 0.0 <= delay_s <= max_delay_s:  # NaN neither
        raise BadEnvironment(
            f"delay_s is {delay_s:g}; it must be between 0 and the server's step timeout, {max_delay_s:g} s (--step-timeout-s)"
        )
    return delay_s


def _check_observation(observation: Observation) -> None:
    if not isinstance(observation, Observation) or not isinstance(observation.text, str):
        raise BadEnvironment(f"the observation is {type(observation).__name__}, not an Observation with text")


def write_frame(connection: socket.socket, fields: Mapping[str, Any]) -> None:
    data = payload.dump(fields)
    connection.sendall(len(data).to_bytes(HEADER_BYTES, "big") + data)


def read_frame(connection: socket.socket) -> dict[str, Any] | None:
    """The next frame, or None where the socket ends."""
    header = _read_exactly(connection, HEADER_BYTES)
    if header is None:
        return None
    data = _read_exactly(connection, int.from_bytes(header, "big"))
    return None if data is None else payload.load(data)


def _read_exactly(connection: socket.socket, num_bytes: int) -> bytes | None:
    data = bytearray()
    while len(data) < num_bytes:
        chunk = connection.recv(min(num_bytes - len(data), 1 << 20))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


def end_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies (Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the kernel knew
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--env", required=True)
    arguments = parser.parse_args()
    end_with_parent(arguments.parent)
    # Ctrl-C reaches the whole process group; the server decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(format="%(asctime)s env worker %(process)d %(levelname)s %(message)s")
    with socket.socket(fileno=arguments.fd) as connection:
        try:
            host = EnvironmentHost(resolve(arguments.env))
            write_frame(connection, {"splits": host.splits()})
        except UserError as error:
            write_frame(connection, {"user_error": str(error)})
            return
        try:
            while (call := read_frame(connection)) is not None:
                write_frame(connection, host.handle(call))
        except ConnectionError:
            logger.warning("the server is gone")
        host.close()


if __name__ == "__main__":
    main()
