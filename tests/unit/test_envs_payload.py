"""The JSON between environment client and server: round trips, and nothing but `PayloadError` for bad bytes."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiderl.envs import payload
from tiderl.envs.payload import (
    ActionAnswer,
    ActionRequest,
    CapacityAnswer,
    ErrorKind,
    PayloadError,
    Refusal,
    SessionRequest,
    StartAnswer,
    StartRequest,
    WireError,
)
from tiderl.envs.protocol import ImagePart, Observation, Started, Stepped

# Lone surrogates included: models and web pages produce them.
texts = st.text(st.characters(exclude_categories=()), max_size=20)
ids = st.text(min_size=1, max_size=128)
finite = st.floats(allow_nan=False, allow_infinity=False)
images = st.builds(ImagePart, st.binary(max_size=20), texts)
observations = st.builds(Observation, texts, st.lists(images, max_size=3).map(tuple))
scalars = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | finite | texts
options = st.dictionaries(
    texts, st.recursive(scalars, lambda inner: st.lists(inner, max_size=3), max_leaves=5), max_size=3
)
starteds = st.builds(Started, texts, observations, texts)
steppeds = st.builds(Stepped, observations, finite, st.booleans(), st.booleans())
REQUESTS = st.one_of(
    st.builds(StartRequest, ids, texts, texts, st.integers(0, payload.MAX_SEED), options),
    st.builds(ActionRequest, ids, ids, st.integers(), texts),
    st.builds(SessionRequest, ids, ids),
    st.builds(CapacityAnswer, texts, st.integers(), st.integers(), st.integers()),
)
READERS = [
    StartRequest.from_json,
    ActionRequest.from_json,
    SessionRequest.from_json,
    StartAnswer.from_json,
    ActionAnswer.from_json,
    CapacityAnswer.from_json,
    WireError.from_json,
]
START = {"request_id": "r", "env": "e", "split": "s", "seed": 1}


def through_the_wire(fields: dict[str, Any]) -> dict[str, Any]:
    return payload.load(payload.dump(fields))


@given(REQUESTS)
def test_requests_come_back_equal(request: StartRequest | ActionRequest | SessionRequest | CapacityAnswer) -> None:
    assert type(request).from_json(through_the_wire(request.to_json())) == request


leases = st.floats(0, exclude_min=True, allow_nan=False, allow_infinity=False)


@given(starteds, leases, leases)
def test_started_comes_back_equal(started: Started, lease_s: float, pause_lease_s: float) -> None:
    fields = payload.started_to_json(started) | {"lease_s": lease_s, "pause_lease_s": pause_lease_s}
    answer = StartAnswer.from_json(through_the_wire({"session_id": "s", **fields}))
    assert answer == StartAnswer("s", started, lease_s, pause_lease_s)


@pytest.mark.parametrize("name", ["lease_s", "pause_lease_s"])
@pytest.mark.parametrize("value", [0, -1.5])
def test_a_lease_is_some_time(name: str, value: float) -> None:
    started = payload.started_to_json(Started("i", Observation("o"), "t"))
    fields = {"session_id": "s", **started, "lease_s": 1, "pause_lease_s": 1, name: value}
    with pytest.raises(PayloadError, match=f"{name}: must be more than 0"):
        StartAnswer.from_json(fields)


@given(steppeds, finite)
def test_stepped_comes_back_equal(stepped: Stepped, env_s: float) -> None:
    fields = through_the_wire({**payload.stepped_to_json(stepped), "env_s": env_s})
    assert ActionAnswer.from_json(fields) == ActionAnswer(stepped, env_s)


@pytest.mark.parametrize("kind", ErrorKind)
def test_refusals_come_back_equal(kind: ErrorKind) -> None:
    fields = through_the_wire(Refusal(kind, "why").to_json())
    assert WireError.from_json(fields) == WireError(kind.word, "why", kind.retryable)


def test_only_what_sending_again_can_mend_has_a_status_that_is_sent_again() -> None:
    assert {kind for kind in ErrorKind if kind.status == 429 or kind.status >= 500} == {
        ErrorKind.CAPACITY,
        ErrorKind.UNAVAILABLE,
    }


json_values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=10)
NAMES = [
    "request_id",
    "session_id",
    "env",
    "split",
    "seed",
    "options",
    "turn",
    "action",
    "observation",
    "images",
    "text",
]
NAMES += [
    "data",
    "media_type",
    "reward",
    "done",
    "success",
    "env_s",
    "error",
    "kind",
    "message",
    "retryable",
    "capacity",
    "session_id",
    "lease_s",
    "pause_lease_s",
]
objects = st.dictionaries(st.sampled_from(NAMES), json_values | st.dictionaries(st.sampled_from(NAMES), json_values))


@given(st.binary() | objects.map(lambda fields: json.dumps(fields).encode()), st.sampled_from(READERS))
def test_whatever_the_bytes_only_payload_errors_come_out(data: bytes, read: Any) -> None:
    with contextlib.suppress(PayloadError):
        read(payload.load(data))


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"seed": 1}, "request_id: is missing"),
        (START | {"request_id": 1}, "request_id: expected str, got int"),
        (START | {"request_id": ""}, "request_id: must have 1 to 128"),
        (START | {"request_id": "x" * 129}, "request_id: must have 1 to 128"),
        (START | {"seed": True}, "seed: expected int, got bool"),
        (START | {"seed": 1.0}, "seed: expected int, got float"),
        (START | {"seed": -1}, "seed: must be between"),
        (START | {"seed": 2**63}, "seed: must be between"),
        (START | {"options": []}, "options: expected dict, got list"),
        (START | {"sedd": 1}, "'sedd': no such field"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(PayloadError, match=word):
        StartRequest.from_json(fields)


@pytest.mark.parametrize(
    "data", [b'{"a":NaN}', b'{"a":Infinity}', b"[1]", b"null", b"[" * 200_000, b"1" * 5000, b"\xff"]
)
def test_what_is_not_a_strict_object_is_refused(data: bytes) -> None:
    with pytest.raises(PayloadError):
        payload.load(data)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e999])
def test_numbers_are_finite_in_both_directions(value: float) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        payload.dump({"reward": value})
    with pytest.raises(PayloadError, match="reward"):
        payload.take({"reward": value}, "reward", float)
    with pytest.raises(PayloadError, match="reward"):
        payload.take(payload.load(b'{"reward": 1e999}'), "reward", float)
    with pytest.raises(PayloadError, match="reward"):
        payload.take({"reward": 10**400}, "reward", float)
