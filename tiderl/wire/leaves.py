"""Wire forms of values that contain no other values: scalars, enums and arrays; and what every converter is made of.

Array data is little-endian, numeric or bool, in C order, in a frame of its own: no copy on either side where the array is
laid out like that already.
"""

from __future__ import annotations

import enum
import math
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

Buffer = bytes | memoryview

_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1
#: Numeric and bool only, little-endian: what every machine understands alike, and nothing that holds pointers.
_DTYPES = {
    np.dtype(code).str: np.dtype(code)
    for code in ("|b1", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16")
}
_MAX_DIMENSIONS = 8


class Reject(Exception):
    """A value does not fit; `path` grows from the inside out while the exception travels up."""

    def __init__(self, problem: str, path: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.path = path

    def inside(self, step: str) -> Reject:
        """The same complaint, seen from one level further out."""
        return Reject(self.problem, step + self.path)


@dataclass(frozen=True, slots=True)
class Converter:
    """Both directions of one type; `plain` are the Python types that its wire values have after msgpack."""

    encode: Callable[[Any, list[Buffer]], Any]
    decode: Callable[[Any, Iterator[Buffer]], Any]
    plain: tuple[type, ...]


def expected(what: str, value: object) -> NoReturn:
    raise Reject(f"expected {what}, got {type(value).__name__}")


def _exact(kind: type) -> Converter:
    """`bool`, `str` or `bytes`: nothing to convert, only to check."""

    def check(value: Any, _frames: object) -> Any:
        if type(value) is not kind:
            expected(kind.__name__, value)
        return value

    return Converter(check, check, (kind,))


def _encode_int(value: Any, _frames: object) -> Any:
    if type(value) is not int:
        expected("int", value)
    if not _MIN_INT <= value <= _MAX_INT:
        raise Reject(f"{value.bit_length()}-bit integer; integers are limited to 64 bits")
    return value


def _decode_int(value: Any, _frames: object) -> Any:
    if type(value) is not int:
        expected("int", value)
    return value


def _encode_float(value: Any, _frames: object) -> float:
    if type(value) is float:
        return value
    # np.float64 is a float too; other NumPy scalars are not, and are refused.
    if isinstance(value, float) or type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise Reject("an integer this large does not fit a float") from None
    expected("float", value)


def _decode_float(value: Any, _frames: object) -> float:
    if type(value) is float:
        return value
    if type(value) is int:
        return float(value)
    expected("float", value)


def _decode_none(value: Any, _frames: object) -> None:
    if value is not None:
        expected("None", value)


SCALARS: Mapping[object, Converter] = {
    bool: _exact(bool),
    str: _exact(str),
    bytes: _exact(bytes),
    int: Converter(_encode_int, _decode_int, (int,)),
    float: Converter(_encode_float, _decode_float, (float, int)),
    type(None): Converter(_decode_none, _decode_none, (type(None),)),
}


def compile_enum(cls: type[enum.Enum]) -> Converter:
    members = {member.value: member for member in cls}
    kinds = {type(value) for value in members}
    if kinds not in ({str}, {int}):
        raise TypeError(f"the values of {cls.__name__} are not all str or all int")
    (kind,) = kinds

    def encode(value: Any, _frames: object) -> Any:
        if type(value) is not cls:
            expected(cls.__name__, value)
        return value.value

    def decode(plain: Any, _frames: object) -> enum.Enum:
        if type(plain) is not kind:
            expected(f"the value of a {cls.__name__}", plain)
        if plain not in members:
            raise Reject(f"{str(plain)[:64]!r} is no value of {cls.__name__}")
        return members[plain]

    return Converter(encode, decode, (kind,))


def compile_array(annotation: Any) -> Converter:
    wanted = _dtype_of(annotation)

    def encode(value: Any, frames: list[Buffer]) -> list[Any]:
        if type(value) is not np.ndarray:
            expected("array", value)
        dtype = value.dtype.newbyteorder("<")
        if dtype.str not in _DTYPES or wanted not in (None, dtype):
            raise Reject(f"expected an array of {wanted or 'numbers'}, got {value.dtype}")
        if value.ndim > _MAX_DIMENSIONS:
            raise Reject(f"{value.ndim} dimensions; arrays are limited to {_MAX_DIMENSIONS}")
        # No copy where the array is little-endian and contiguous already.
        flat = np.ascontiguousarray(value, dtype).reshape(-1)
        frames.append(flat.view(np.uint8).data)
        return [dtype.str, list(value.shape)]

    def decode(plain: Any, frames: Iterator[Buffer]) -> np.ndarray[Any, Any]:
        if type(plain) is not list or len(plain) != 2 or type(plain[0]) is not str or type(plain[1]) is not list:
            raise Reject("expected the dtype and shape of an array")
        dtype, shape = _DTYPES.get(plain[0]), plain[1]
        if dtype is None or wanted not in (None, dtype):
            raise Reject(f"expected an array of {wanted or 'numbers'}, got {plain[0][:64]!r}")
        if len(shape) > _MAX_DIMENSIONS or not all(type(length) is int and 0 <= length < 2**63 for length in shape):
            raise Reject(f"expected at most {_MAX_DIMENSIONS} lengths as the shape of an array")
        data = next(frames, None)
        if data is None:
            raise Reject("the frame with the data of this array is missing")
        num_bytes = math.prod(shape) * dtype.itemsize
        if len(data) != num_bytes:
            raise Reject(f"shape {shape} of {dtype} takes {num_bytes} bytes, the frame has {len(data)}")
        array = np.frombuffer(data, dtype).reshape(shape)
        array.flags.writeable = False
        return array

    return Converter(encode, decode, (list,))


def _dtype_of(annotation: Any) -> np.dtype[Any] | None:
    """The dtype that an `NDArray[...]` asks for; `None` for `NDArray[Any]`."""
    (scalar,) = typing.get_args(typing.get_args(annotation)[1])
    if scalar is Any or scalar is np.generic:
        return None
    dtype: np.dtype[Any] = np.dtype(scalar).newbyteorder("<")
    if dtype.str not in _DTYPES:
        raise TypeError(f"arrays of {scalar.__name__} have no form on the wire")
    return dtype
