"""The JSON that environment client and server exchange: how each shape is written, and how it is checked when read.

Invariants (tests/unit/test_envs_payload.py):

1. What `to_json` writes, `from_json` reads back as an equal value.
2. Reading is strict: a missing field, an unknown field of a request, a wrong type, NaN or infinity is a `PayloadError` that
   names the field; no other exception leaves this file, whatever the bytes.
3. The kind of a refusal decides its HTTP status and whether the task may be tried again in a fresh session.

Source: paper Appendix B.1.
"""

from __future__ import annotations

import base64
import binascii
import enum
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tiderl.envs.protocol import ImagePart, Observation, Started, Stepped

T = TypeVar("T")

MAX_ID_CHARACTERS = 128
MAX_SEED = 2**63 - 1


class PayloadError(ValueError):
    """Bytes that are not the JSON they should be. The message names the field."""


class ErrorKind(enum.Enum):
    """Why a server refuses or fails a request: the wire's word, the HTTP status, and whether a fresh session may succeed.

    The client sends a request again by itself on 429 and 5xx only, so what sending again cannot mend is a 4xx.
    """

    BAD_REQUEST = ("bad_request", 400, False)
    UNAUTHORIZED = ("unauthorized", 401, False)
    UNKNOWN_ENV = ("unknown_env", 404, False)
    UNKNOWN_SESSION = ("unknown_session", 404, True)
    WRONG_TURN = ("wrong_turn", 409, False)
    WORKER_LOST = ("worker_lost", 410, True)
    TOO_LARGE = ("too_large", 413, False)
    ENV_ERROR = ("env_error", 424, False)
    CAPACITY = ("capacity", 429, True)
    UNAVAILABLE = ("unavailable", 503, True)

    def __init__(self, word: str, status: int, retryable: bool) -> None:
        self.word = word
        self.status = status
        self.retryable = retryable


class Refusal(Exception):
    """The server's answer to a request that it cannot fulfil."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message

    def to_json(self) -> dict[str, Any]:
        return {"error": {"kind": self.kind.word, "message": self.message, "retryable": self.kind.retryable}}


@dataclass(frozen=True, slots=True)
class WireError:
    """An error as the client reads it; `kind` stays a word, so that a newer server may know more of them."""

    kind: str
    message: str
    retryable: bool

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> WireError:
        error = take(fields, "error", dict)
        return cls(take(error, "kind", str), take(error, "message", str), take(error, "retryable", bool))


@dataclass(frozen=True, slots=True)
class StartRequest:
    request_id: str
    env: str
    split: str
    seed: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "request_id": self.request_id,
            "env": self.env,
            "split": self.split,
            "seed": self.seed,
            "options": dict(self.options),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> StartRequest:
        _only(fields, "request_id", "env", "split", "seed", "options")
        seed = take(fields, "seed", int)
        if not 0 <= seed <= MAX_SEED:
            raise PayloadError(f"seed: must be between 0 and {MAX_SEED}, got {seed}")
        options = take(fields, "options", dict) if "options" in fields else {}
        return cls(_take_id(fields, "request_id"), take(fields, "env", str), take(fields, "split", str), seed, options)


@dataclass(frozen=True, slots=True)
class ActionRequest:
    """One turn. `turn` counts from 0: the number of actions that the session has taken before this one."""

    request_id: str
    session_id: str
    turn: int
    action: str

    def to_json(self) -> dict[str, Any]:
        return {"request_id": self.request_id, "session_id": self.session_id, "turn": self.turn, "action": self.action}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> ActionRequest:
        _only(fields, "request_id", "session_id", "turn", "action")
        ids = (_take_id(fields, "request_id"), _take_id(fields, "session_id"))
        return cls(*ids, take(fields, "turn", int), take(fields, "action", str))


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """`/pause`, `/resume` and `/end` say no more than which session they mean."""

    request_id: str
    session_id: str

    def to_json(self) -> dict[str, Any]:
        return {"request_id": self.request_id, "session_id": self.session_id}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> SessionRequest:
        _only(fields, "request_id", "session_id")
        return cls(_take_id(fields, "request_id"), _take_id(fields, "session_id"))


@dataclass(frozen=True, slots=True)
class StartAnswer:
    """The session ends if the server hears nothing for `lease_s` (> 0), or for `pause_lease_s` while it is paused."""

    session_id: str
    started: Started
    lease_s: float
    pause_lease_s: float

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> StartAnswer:
        leases = (_take_lease(fields, "lease_s"), _take_lease(fields, "pause_lease_s"))
        return cls(take(fields, "session_id", str), started_from_json(fields), *leases)


@dataclass(frozen=True, slots=True)
class ActionAnswer:
    """`env_s`: seconds from the request's arrival until its answer was ready: queueing, the step, injected latency."""

    stepped: Stepped
    env_s: float

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> ActionAnswer:
        return cls(stepped_from_json(fields), take(fields, "env_s", float))


@dataclass(frozen=True, slots=True)
class CapacityAnswer:
    """`active` and `paused` sessions both hold an environment: a start is refused when they add up to `capacity`."""

    env: str
    capacity: int
    active: int
    paused: int

    def to_json(self) -> dict[str, Any]:
        return {"env": self.env, "capacity": self.capacity, "active": self.active, "paused": self.paused}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> CapacityAnswer:
        counts = (take(fields, "capacity", int), take(fields, "active", int), take(fields, "paused", int))
        return cls(take(fields, "env", str), *counts)


def started_to_json(started: Started) -> dict[str, Any]:
    return {
        "instruction": started.instruction,
        "observation": observation_to_json(started.observation),
        "task_type": started.task_type,
    }


def started_from_json(fields: Mapping[str, Any]) -> Started:
    observation = observation_from_json(take(fields, "observation", dict))
    return Started(take(fields, "instruction", str), observation, take(fields, "task_type", str))


def stepped_to_json(stepped: Stepped) -> dict[str, Any]:
    return {
        "observation": observation_to_json(stepped.observation),
        "reward": stepped.reward,
        "done": stepped.done,
        "success": stepped.success,
    }


def stepped_from_json(fields: Mapping[str, Any]) -> Stepped:
    observation = observation_from_json(take(fields, "observation", dict))
    ends = (take(fields, "done", bool), take(fields, "success", bool))
    return Stepped(observation, take(fields, "reward", float), *ends)


def observation_to_json(observation: Observation) -> dict[str, Any]:
    images = [
        {"media_type": image.media_type, "data": base64.b64encode(image.data).decode("ascii")}
        for image in observation.images
    ]
    return {"text": observation.text, "images": images}


def observation_from_json(fields: Mapping[str, Any]) -> Observation:
    images = []
    for image in take(fields, "images", list):
        if not isinstance(image, dict):
            raise PayloadError(f"images: expected objects, got {type(image).__name__}")
        try:
            data = base64.b64decode(take(image, "data", str), validate=True)
        except (binascii.Error, ValueError) as error:
            raise PayloadError(f"images: data is not base64: {error}") from error
        images.append(ImagePart(data, take(image, "media_type", str)))
    return Observation(take(fields, "text", str), tuple(images))


def task_types_from_json(fields: Mapping[str, Any], *, count: int) -> list[tuple[str, int]]:
    """The types of `count` tasks in a row, as runs of equal ones (type, length)."""
    runs = take(fields, "runs", list)
    for run in runs:
        if not (isinstance(run, list) and len(run) == 2 and type(run[0]) is str and type(run[1]) is int and run[1] > 0):
            raise PayloadError(f"runs: expected pairs of a type and a positive number, got {run!r:.80}")
    if sum(length for _, length in runs) != count:
        raise PayloadError(f"runs: expected the types of {count} tasks")
    return [(task_type, length) for task_type, length in runs]


def dump(fields: Mapping[str, Any]) -> bytes:
    """One JSON object as bytes. Raises `ValueError` for NaN and infinity, `TypeError` for what JSON does not know."""
    return json.dumps(fields, separators=(",", ":"), allow_nan=False).encode("ascii")


def load(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`. Raises `PayloadError`."""
    try:
        fields = json.loads(data, parse_constant=_refuse_constant)
    except RecursionError:
        raise PayloadError("the JSON is nested too deeply") from None
    except ValueError as error:
        raise PayloadError(f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise PayloadError(f"expected a JSON object, got {type(fields).__name__}")
    return fields


def take(fields: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """The field `name`, which must be exactly a `kind` (an integer passes for a float). Raises `PayloadError`."""
    if name not in fields:
        raise PayloadError(f"{name}: is missing")
    value = fields[name]
    if kind is float and type(value) is int:
        try:
            value = float(value)
        except OverflowError:
            raise PayloadError(f"{name}: is out of range") from None
    if type(value) is not kind:
        raise PayloadError(f"{name}: expected {kind.__name__}, got {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise PayloadError(f"{name}: must be finite")
    return value


def _take_id(fields: Mapping[str, Any], name: str) -> str:
    value = take(fields, name, str)
    if not 0 < len(value) <= MAX_ID_CHARACTERS:
        raise PayloadError(f"{name}: must have 1 to {MAX_ID_CHARACTERS} characters, got {len(value)}")
    return value


def _take_lease(fields: Mapping[str, Any], name: str) -> float:
    value = take(fields, name, float)
    if value <= 0:
        raise PayloadError(f"{name}: must be more than 0, got {value:g}")
    return value


def _only(fields: Mapping[str, Any], *names: str) -> None:
    unknown = sorted(set(fields) - set(names))
    if unknown:
        raise PayloadError(f"{unknown[0][:80]!r}: no such field here; there are {', '.join(names)}")


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not allowed")
