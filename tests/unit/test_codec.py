"""The codec: round trips, refusals with a path, and that no bytes at all get anything but a message or a `WireError`."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NewType

import msgpack
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiderl.errors import WireError
from tiderl.scheduling.actions import ACTION_TYPES
from tiderl.scheduling.events import EVENT_TYPES
from tiderl.types import Finish, Image, TaskKind, Trajectory, Turn
from tiderl.wire.codec import Codec

Id = NewType("Id", int)


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.Enum):
    ZERO = 0
    ONE = 1


@dataclass(frozen=True)
class Point:
    x: int
    y: float


@dataclass(frozen=True)
class Label:
    text: str


@dataclass(frozen=True)
class Everything:
    """One field of every kind that the codec knows, arrays left out."""

    flag: bool
    count: int
    share: float
    name: str
    blob: bytes
    id: Id
    color: Color
    level: Level
    maybe: Point | None
    points: tuple[Point, ...]
    pair: tuple[int, str]
    by_name: Mapping[str, float]
    by_id: dict[Id, tuple[str, ...]]
    either: Point | Label | None
    scalar: int | str | None
    optional: tuple[float | None, ...]


@dataclass(frozen=True, eq=False)
class Arrays:
    ids: npt.NDArray[np.int32]
    anything: npt.NDArray[Any]
    many: tuple[npt.NDArray[np.float32], ...]


@dataclass(frozen=True)
class Positive:
    value: int

    def __post_init__(self) -> None:
        if self.value <= 0:
            raise ValueError("value must be positive")


CODEC = Codec([Everything, Arrays, Point, Positive])

integers = st.integers(-(2**63), 2**64 - 1)
floats = st.floats(allow_nan=False)
texts = st.text(max_size=20)
points = st.builds(Point, integers, floats)
everythings = st.builds(
    Everything,
    flag=st.booleans(),
    count=integers,
    share=floats,
    name=texts,
    blob=st.binary(max_size=20),
    id=integers.map(Id),
    color=st.sampled_from(Color),
    level=st.sampled_from(Level),
    maybe=st.none() | points,
    points=st.lists(points, max_size=3).map(tuple),
    pair=st.tuples(integers, texts),
    by_name=st.dictionaries(texts, floats, max_size=3),
    by_id=st.dictionaries(integers.map(Id), st.lists(texts, max_size=2).map(tuple), max_size=3),
    either=st.none() | points | st.builds(Label, texts),
    scalar=st.none() | integers | texts,
    optional=st.lists(st.none() | floats, max_size=3).map(tuple),
)
DTYPES = ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")


@st.composite
def arrays(draw: st.DrawFn, dtypes: tuple[str, ...] = DTYPES) -> npt.NDArray[Any]:
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    num_bytes = math.prod(shape) * dtype.itemsize
    data = draw(st.binary(min_size=num_bytes, max_size=num_bytes))
    if dtype.kind == "b":
        data = bytes(byte & 1 for byte in data)
    return np.frombuffer(data, dtype).reshape(shape)


messages_with_arrays = st.builds(Arrays, arrays(("i4",)), arrays(), st.lists(arrays(("f4",)), max_size=2).map(tuple))


def header(*plain: Any) -> bytes:
    return bytes(msgpack.packb(list(plain)))


def same(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


@given(everythings)
def test_a_message_comes_back_equal_and_gives_equal_bytes(message: Everything) -> None:
    packed = CODEC.pack(message)
    back = CODEC.unpack(packed)
    assert back == message
    assert CODEC.pack(back) == packed
    assert {name: type(value) for name, value in vars(back).items()} == {n: type(v) for n, v in vars(message).items()}


@given(messages_with_arrays)
def test_arrays_come_back_bit_for_bit_and_read_only(message: Arrays) -> None:
    back = CODEC.decode(CODEC.encode(message))
    assert same(back.ids, message.ids)
    assert same(back.anything, message.anything)
    assert len(back.many) == len(message.many)
    assert all(same(left, right) for left, right in zip(back.many, message.many, strict=True))
    assert not any(array.flags.writeable for array in (back.ids, back.anything, *back.many))


def test_contiguous_arrays_are_not_copied_on_either_side() -> None:
    ids = np.arange(1000, dtype=np.int32)
    frames = CODEC.encode(Arrays(ids, ids, ()))
    assert np.shares_memory(np.frombuffer(frames[1], np.uint8), ids)
    data = bytes(frames[1])
    assert np.shares_memory(CODEC.decode([frames[0], data, frames[2]]).ids, np.frombuffer(data, np.uint8))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=">i4").reshape(3, 4),
        np.arange(12, dtype=np.int32).reshape(3, 4).T,
        np.arange(9)[::2].astype("i4"),
    ],
    ids=["big-endian", "transposed", "strided"],
)
def test_arrays_of_another_layout_arrive_with_the_same_values(array: npt.NDArray[Any]) -> None:
    back = CODEC.decode(CODEC.encode(Arrays(array, array, ())))
    assert back.ids.tolist() == array.tolist()


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinities_pass(value: float) -> None:
    assert CODEC.unpack(CODEC.pack(Point(1, value))) == Point(1, value)


def test_nan_passes() -> None:
    assert math.isnan(CODEC.unpack(CODEC.pack(Point(1, math.nan))).y)


def test_an_int_passes_as_a_float_and_arrives_as_one() -> None:
    back = CODEC.unpack(CODEC.pack(Point(1, 2)))
    assert type(back.y) is float
    assert type(CODEC.unpack(header("Point", [1, 2])).y) is float


def test_numpy_doubles_pass_as_floats() -> None:
    assert CODEC.unpack(CODEC.pack(Point(1, np.float64(0.5)))) == Point(1, 0.5)


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (Point("1", 0.0), "Point.x: expected int, got str"),
        (Point(True, 0.0), "Point.x: expected int, got bool"),
        (Point(1, True), "Point.y: expected float, got bool"),
        (Point(np.int64(1), 0.0), "Point.x: expected int, got int64"),
        (Point(2**64, 0.0), "Point.x: 65-bit integer; integers are limited to 64 bits"),
        (Point(1, 10**400), "Point.y: an integer this large does not fit a float"),
        (Label("a"), "Label is not a registered message"),
        (Arrays(np.zeros(1, np.int64), np.zeros(1), ()), "Arrays.ids: expected an array of int32, got int64"),
        (Arrays([1], np.zeros(1), ()), "Arrays.ids: expected array, got list"),
        (Arrays(np.zeros(1, np.int32), np.array([object()]), ()), "Arrays.anything: expected an array of numbers"),
        (Arrays(np.zeros(1, np.int32), np.zeros(1, "U3"), ()), "Arrays.anything: expected an array of numbers"),
        (Arrays(np.zeros(1, np.int32), np.zeros(1), (np.zeros(1),)), r"Arrays.many\[0\]: expected an array of float32"),
        (Arrays(np.zeros(1, np.int32), np.zeros((1,) * 9), ()), "Arrays.anything: 9 dimensions"),
    ],
)
def test_a_wrong_value_is_refused_where_it_is_made(message: object, complaint: str) -> None:
    with pytest.raises(WireError, match=f"^{complaint}"):
        CODEC.encode(message)


def test_a_string_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(WireError, match="Label: a string is not valid Unicode"):
        Codec([Label]).encode(Label("\ud800"))


def everything_fields(**changes: Any) -> list[Any]:
    fields = {
        "flag": True, "count": 1, "share": 0.5, "name": "n", "blob": b"", "id": 1, "color": "red", "level": 0, "maybe": None,
        "points": [], "pair": [1, "a"], "by_name": [], "by_id": [], "either": None, "scalar": None, "optional": [],
    }  # fmt: skip
    return list((fields | changes).values())


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"flag": 1}, ".flag: expected bool, got int"),
        ({"count": True}, ".count: expected int, got bool"),
        ({"count": 1.0}, ".count: expected int, got float"),
        ({"share": "1"}, ".share: expected float, got str"),
        ({"name": b"n"}, ".name: expected str, got bytes"),
        ({"blob": "b"}, ".blob: expected bytes, got str"),
        ({"color": "green"}, ".color: 'green' is no value of Color"),
        ({"color": ["red"]}, ".color: expected the value of a Color, got list"),
        ({"level": True}, ".level: expected the value of a Level, got bool"),
        ({"maybe": [1]}, ".maybe: expected the 2 fields of Point, got 1"),
        ({"maybe": 3}, ".maybe: expected the fields of Point, got int"),
        ({"points": [[1, 2.0], [1, "y"]]}, r".points\[1\].y: expected float, got str"),
        ({"points": None}, ".points: expected list, got NoneType"),
        ({"pair": [1, "a", 2]}, ".pair: expected 2 items, got 3"),
        ({"pair": [1, 2]}, r".pair\[1\]: expected str, got int"),
        ({"by_name": [["a", 1.0], ["a", 2.0]]}, r".by_name\['a'\]: key comes twice"),
        ({"by_name": [["a"]]}, r".by_name\[0\]: expected a pair of key and value"),
        ({"by_name": [["a", None]]}, r".by_name\['a'\]: expected float, got NoneType"),
        ({"by_id": [["1", []]]}, r".by_id\['1'\]: expected int, got str"),
        ({"either": ["Everything", []]}, ".either: expected Point or Label or NoneType, got 'Everything'"),
        ({"either": ["Label", [1]]}, ".either.text: expected str, got int"),
        ({"scalar": 1.5}, ".scalar: expected int or str or NoneType, got float"),
        ({"optional": [None, "x"]}, r".optional\[1\]: expected float, got str"),
    ],
)
def test_a_wrong_field_is_refused_with_its_path(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(WireError, match=f"^Everything{complaint}$"):
        CODEC.unpack(header("Everything", everything_fields(**changes)))


@pytest.mark.parametrize(
    ("frames", "complaint"),
    [
        ([], "a message has at least one frame, got none"),
        ([b""], "first frame is not what this codec writes"),
        ([b"\xc1"], "first frame is not what this codec writes"),
        ([header("Point", [1, 2.0]) + b"\x00"], "first frame is not what this codec writes"),
        ([msgpack.packb({"Point": [1, 2.0]})], "first frame is not what this codec writes"),
        ([msgpack.packb(["Point", [msgpack.ExtType(1, b"x"), 2.0]])], "first frame is not what this codec writes"),
        ([msgpack.packb(["Point", [msgpack.Timestamp(1), 2.0]])], "first frame is not what this codec writes"),
        ([b"\x91" * 100_000], "nested too deeply"),
        ([b"\xdd\xff\xff\xff\xff"], "first frame is not what this codec writes"),
        ([b"\xa2\xff\xff"], "first frame is not what this codec writes"),
        ([header("Point")], r"not \[name, fields\]"),
        ([header(b"Point", [1, 2.0])], r"not \[name, fields\]"),
        ([header("Pickle", [1])], "'Pickle' is not a registered message"),
        ([header("Point", [1, 2.0]), b""], "Point: 1 frames more than its arrays need"),
        ([header("Positive", [0])], "Positive: Positive refuses these values: value must be positive"),
    ],
)
def test_a_wrong_frame_is_refused(frames: list[bytes], complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        CODEC.decode(frames)


@pytest.mark.parametrize(
    ("ids", "data", "complaint"),
    [
        (["<i4", [3]], [bytes(8)], r"shape \[3\] of int32 takes 12 bytes, the frame has 8"),
        (["<i4", [-1]], [bytes(4)], "lengths as the shape"),
        (["<i4", [2**63]], [bytes(4)], "lengths as the shape"),
        (["<i4", [2**62, 4]], [bytes(4)], "takes 73786976294838206464 bytes"),
        (["<i4", [True]], [bytes(4)], "lengths as the shape"),
        (["<i4", [1] * 9], [bytes(4)], "lengths as the shape"),
        (["<i8", [1]], [bytes(8)], "expected an array of int32, got '<i8'"),
        (["|O", [1]], [bytes(8)], "expected an array of int32, got '|O'"),
        (["<i4"], [bytes(4)], "expected the dtype and shape"),
        (["<i4", [1]], [], "the frame with the data of this array is missing"),
    ],
)
def test_a_wrong_array_is_refused(ids: Any, data: list[bytes], complaint: str) -> None:
    with pytest.raises(WireError, match=f"^Arrays.ids: .*{complaint}"):
        CODEC.decode([header("Arrays", [ids, ["<f4", [0]], []]), *data])


@given(st.lists(st.binary(max_size=60), max_size=3))
def test_random_bytes_only_ever_raise_wire_error(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        CODEC.decode(frames)


@settings(max_examples=300)
@given(everythings | messages_with_arrays, st.data())
def test_mutated_messages_decode_to_something_valid_or_raise_wire_error(message: Any, data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in CODEC.encode(message)]
    frame = data.draw(st.sampled_from([frame for frame in frames if frame]))
    position = data.draw(st.integers(0, len(frame) - 1))
    if data.draw(st.booleans()):
        frame[position] = data.draw(st.integers(0, 255))
    else:
        del frame[position:]
    try:
        back = CODEC.decode([bytes(frame) for frame in frames])
    except WireError:
        return
    CODEC.encode(back)  # whatever got through fits its annotations


plain_values = st.recursive(
    st.none() | st.booleans() | integers | floats | texts | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)


@given(st.sampled_from(["Everything", "Arrays", "Point", "Positive"]), st.lists(plain_values, max_size=17))
def test_wellformed_headers_with_random_fields_are_valid_or_raise_wire_error(name: str, fields: list[Any]) -> None:
    try:
        back = CODEC.decode([header(name, fields)])
    except WireError:
        return
    CODEC.encode(back)


def test_messages_over_the_limit_are_refused_in_both_directions() -> None:
    small = Codec([Label], max_message_bytes=100)
    assert small.unpack(small.pack(Label("x" * 50))) == Label("x" * 50)
    with pytest.raises(WireError, match=r"over the limit of 100 \(wire.max_message_bytes\)"):
        small.encode(Label("x" * 100))
    with pytest.raises(WireError, match="over the limit of 100"):
        small.unpack(Codec([Label]).pack(Label("x" * 100)))


def test_pack_refuses_arrays() -> None:
    with pytest.raises(WireError, match="Arrays holds arrays"):
        CODEC.pack(Arrays(np.zeros(1, np.int32), np.zeros(1), ()))


@dataclass
class Mutable:
    x: int


@dataclass(frozen=True)
class Recursive:
    next: Recursive | None


@dataclass(frozen=True)
class Untyped:
    x: Any


@dataclass(frozen=True)
class KeywordOnly:
    x: int = field(kw_only=True)


@dataclass(frozen=True)
class FloatKeys:
    x: Mapping[float, int]


@dataclass(frozen=True)
class Pointers:
    x: npt.NDArray[np.object_]


@dataclass(frozen=True)
class Unresolved:
    x: Nowhere  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("cls", "complaint"),
    [
        (Mutable, "Mutable is not a frozen dataclass"),
        (Recursive, "Recursive contains itself"),
        (Untyped, "Untyped.x: .*Any has no form on the wire"),
        (KeywordOnly, "KeywordOnly.x is not a positional field"),
        (FloatKeys, "FloatKeys.x: mapping keys must be"),
        (Pointers, "Pointers.x: arrays of object_ have no form"),
        (Unresolved, "Unresolved: an annotation does not resolve"),
    ],
)
def test_classes_without_a_form_on_the_wire_are_refused_at_once(cls: type, complaint: str) -> None:
    with pytest.raises(TypeError, match=complaint):
        Codec([cls])


def test_two_messages_of_one_name_are_refused() -> None:
    with pytest.raises(TypeError, match="two messages are called Point"):
        Codec([Point, Point])


def test_the_scheduling_core_s_events_and_actions_all_have_a_form_on_the_wire() -> None:
    Codec([*EVENT_TYPES, *ACTION_TYPES])


def test_a_trajectory_survives_the_wire() -> None:
    trajectory = Trajectory(
        task_id=7,
        group_id=3,
        kind=TaskKind.TRAIN,
        token_ids=np.array([5, 6, 7], np.int32),
        generated=np.array([False, True, True]),
        log_probs=np.array([0.0, -0.5, -1.5], np.float32),
        weight_versions=np.array([-1, 2, 2], np.int32),
        turns=(Turn(1, 3, 0.25, 0.5, 0),),
        images=(Image(b"png", "image/png", 0, 1),),
        reward=1,
        success=True,
        finish=Finish.DONE,
    )
    codec = Codec([Trajectory])
    frames = codec.encode(trajectory)
    assert len(frames) == 5
    back = codec.decode([bytes(frame) for frame in frames])
    for name in ("token_ids", "generated", "log_probs", "weight_versions"):
        assert same(getattr(back, name), getattr(trajectory, name))
    assert (back.turns, back.images, back.reward, back.finish) == (
        trajectory.turns,
        trajectory.images,
        1.0,
        Finish.DONE,
    )


def test_arrays_of_unequal_length_in_a_trajectory_are_a_wire_error() -> None:
    fields = [1, 1, "train", ["<i4", [1]], ["|b1", [2]], ["<f4", [1]], ["<i4", [1]], [], [], 0.0, False, "done"]
    with pytest.raises(WireError, match=r"Trajectory refuses these values: .*generated has shape"):
        Codec([Trajectory]).decode([header("Trajectory", fields), bytes(4), bytes(2), bytes(4), bytes(4)])
