"""The worker's side of a call: what an environment does wrong becomes an error, and its session is closed."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tiderl.envs.host import EnvironmentHost, read_frame, write_frame
from tiderl.envs.protocol import Observation, Started, Stepped

closed: list[str] = []
WAITS = {"max_delay_s": 5.0}


class Puppet:
    """Answers with what its options say; an exception is raised."""

    @staticmethod
    def num_tasks(split: str) -> int:
        if split == "test":
            raise ValueError(split)
        return 5

    @staticmethod
    def task_type(split: str, seed: int) -> str:
        return "t"

    def start(self, split: str, seed: int, options: Mapping[str, Any]) -> Started:
        self._options = options
        return self._do("start", Started("i", Observation("o"), "t"))

    def step(self, action: str) -> Stepped:
        return self._do("step", Stepped(Observation("o"), 1.0, False, False))

    def close(self) -> None:
        closed.append("closed")
        self._do("close", None)

    def _do(self, call: str, default: Any) -> Any:
        answer = self._options.get(call, default)
        if isinstance(answer, BaseException):
            raise answer
        return answer


def host_with(options: Mapping[str, Any]) -> tuple[EnvironmentHost, dict[str, Any]]:
    closed.clear()
    host = EnvironmentHost(Puppet)
    return host, host.handle(
        {"op": "start", "session_id": "s", "split": "train", "seed": 0} | WAITS | {"options": options}
    )


STEP = {"op": "step", "session_id": "s", "action": "a"} | WAITS
BAD_OBSERVATION = Observation(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (ValueError("x"), "bad_request"),
        (KeyError("x"), "env_error"),
        (None, "env_error"),
        (Started("i", BAD_OBSERVATION, "t"), "env_error"),
        (Started(3, Observation("o"), "t"), "env_error"),  # type: ignore[arg-type]
        (Started("i", Observation("o"), "t", 5.1), "env_error"),
        (Started("i", Observation("o"), "t", "long"), "env_error"),  # type: ignore[arg-type]
    ],
)
def test_a_bad_start(answer: object, kind: str) -> None:
    _, error = host_with({"start": answer})
    assert error["error"]["kind"] == kind
    assert closed == ["closed"]


@pytest.mark.parametrize(
    "answer",
    [ValueError("x"), KeyError("x"), None, Stepped(BAD_OBSERVATION, 1.0, False, False)]
    + [Stepped(Observation("o"), reward, False, False) for reward in (float("nan"), float("inf"), None, "high")]  # type: ignore[arg-type]
    + [Stepped(Observation("o"), 1.0, False, False, delay_s) for delay_s in (float("nan"), -0.1, 5.1, None)],  # type: ignore[arg-type]
)
def test_a_bad_step(answer: object) -> None:
    host, started = host_with({"step": answer})
    assert "error" not in started
    assert host.handle(STEP)["error"]["kind"] == "env_error"
    assert closed == ["closed"]


def test_numpys_numbers_become_plain() -> None:
    numbers = Stepped(Observation("o"), np.float32(0.5), np.bool_(True), np.bool_(False))  # type: ignore[arg-type]
    host, _ = host_with({"step": numbers})
    stepped = host.handle(STEP)
    assert [type(stepped[name]) for name in ("reward", "done", "success")] == [float, bool, bool]
    assert (stepped["reward"], stepped["done"], stepped["success"]) == (0.5, True, False)


def test_a_delay_stands_beside_the_answer() -> None:
    host, started = host_with(
        {
            "start": Started("i", Observation("o"), "t", np.float32(0.5)),  # type: ignore[arg-type]
            "step": Stepped(Observation("o"), 1.0, False, False, 5),
        }
    )
    assert started["delay_s"] == 0.5
    assert host.handle(STEP)["delay_s"] == 5.0
    host, started = host_with({})
    assert (started["delay_s"], host.handle(STEP)["delay_s"]) == (0.0, 0.0)


def test_a_close_that_fails_is_logged_and_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    host, _ = host_with({"close": RuntimeError("x")})
    assert host.handle({"op": "end", "session_id": "s"}) == {}
    assert host.handle({"op": "end", "session_id": "s"}) == {}
    assert closed == ["closed"]
    assert "close failed" in caplog.text


def test_splits_are_those_that_the_environment_knows() -> None:
    assert EnvironmentHost(Puppet).splits() == {"train": 5}


def test_frames_arrive_whole_and_the_end_is_none() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            write_frame(ours, {"text": "x" * 50_000})
            write_frame(ours, {})
            ours.sendall(b"\0\0\0\x09{")
        assert read_frame(theirs) == {"text": "x" * 50_000}
        assert read_frame(theirs) == {}
        assert read_frame(theirs) is None
