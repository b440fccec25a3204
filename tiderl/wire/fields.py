"""How a dataclass field of a given type looks on the wire, compiled once per type into a pair of functions.

`compile_dataclass` and `compile_field` turn annotations into `Converter`s: `encode(value, frames)` gives a plain value for
msgpack and appends array data to `frames`; `decode(plain, frames)` takes the plain value back and pulls array data from
`frames`. Both check every type, so that a wrong value is found where it is made, and again where it arrives.

| annotation | on the wire |
|---|---|
| `bool`, `int`, `float`, `str`, `bytes`, `NewType`s of them | itself; an `int` passes as a `float`, a `bool` never as an `int` |
| `enum.Enum` | its value (all values `str`, or all `int`) |
| `tuple[X, ...]`, `tuple[X, Y]` | list |
| `Mapping[K, X]`, `dict[K, X]` | list of [key, value] (a msgpack map would hide a doubled key) |
| `NDArray[T]` | [dtype, shape]; the data is a frame of its own |
| a frozen dataclass | list of its fields in order |
| `X | None` and other unions | scalars as themselves, dataclasses as [name, fields] |

Invariants (tests/unit/test_codec.py):

1. `decode(encode(x)) == x` for every supported value; a decoded array is a read-only view of its frame.
2. A value that does not fit its annotation raises `Reject`, in both directions, and names the path to it.
3. The depth of recursion is that of the annotations, never that of the input: recursive types are refused at compilation.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tiderl.wire.leaves import SCALARS, Buffer, Converter, Reject, compile_array, compile_enum, expected


def compile_field(annotation: Any, outer: tuple[type, ...] = ()) -> Converter:
    """The converter for one resolved annotation. `outer` are the dataclasses around it.

    Raises `TypeError` for a type that has no form on the wire.
    """
    while isinstance(annotation, typing.NewType):
        annotation = annotation.__supertype__
    if annotation in SCALARS:
        return SCALARS[annotation]
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is np.ndarray:
        return compile_array(annotation)
    if origin is tuple:
        return _variadic(args[0], outer) if args[1:] == (...,) else _fixed(args, outer)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(args, outer)
    if origin in (typing.Union, types.UnionType):
        return _union(args, outer)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return compile_enum(annotation)
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return compile_dataclass(annotation, outer)
    raise TypeError(f"{annotation!r} has no form on the wire; see the table in tiderl/wire/fields.py")


def compile_dataclass(cls: type, outer: tuple[type, ...] = ()) -> Converter:
    """The converter for a frozen dataclass with positional fields: a list of its fields in order.

    Raises `TypeError` for a class or a field that has no form on the wire.
    """
    if cls in outer:
        raise TypeError(f"{cls.__name__} contains itself; recursive types have no form on the wire")
    names, converters = _fields_of(cls, outer)
    encoders = tuple((name, converter.encode) for name, converter in zip(names, converters, strict=True))
    decoders = tuple(converter.decode for converter in converters)
    num_fields = len(names)

    def encode(value: Any, frames: list[Buffer]) -> list[Any]:
        if type(value) is not cls:
            expected(cls.__name__, value)
        plain = []
        name = ""
        try:
            for name, encode_field in encoders:
                plain.append(encode_field(getattr(value, name), frames))
        except Reject as reject:
            raise reject.inside(f".{name}") from None
        return plain

    def decode(plain: Any, frames: Iterator[Buffer]) -> Any:
        if type(plain) is not list:
            expected(f"the fields of {cls.__name__}", plain)
        if len(plain) != num_fields:
            raise Reject(f"expected the {num_fields} fields of {cls.__name__}, got {len(plain)}")
        values: list[Any] = []
        try:
            for decode_field, field in zip(decoders, plain, strict=True):
                values.append(decode_field(field, frames))
        except Reject as reject:
            raise reject.inside(f".{names[len(values)]}") from None
        try:
            return cls(*values)
        except ValueError as error:
            raise Reject(f"{cls.__name__} refuses these values: {error}") from error

    return Converter(encode, decode, (list,))


def _fields_of(cls: type, outer: tuple[type, ...]) -> tuple[tuple[str, ...], tuple[Converter, ...]]:
    if not dataclasses.is_dataclass(cls) or not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise TypeError(f"{cls.__name__} is not a frozen dataclass")
    fields = dataclasses.fields(cls)
    for field in fields:
        if not field.init or field.kw_only:
            raise TypeError(f"{cls.__name__}.{field.name} is not a positional field of the constructor")
    try:
        hints = typing.get_type_hints(cls)
    except NameError as error:
        raise TypeError(f"{cls.__name__}: an annotation does not resolve at run time: {error}") from error
    converters = []
    for field in fields:
        try:
            converters.append(compile_field(hints[field.name], (*outer, cls)))
        except TypeError as error:
            raise TypeError(f"{cls.__name__}.{field.name}: {error}") from error
    return tuple(field.name for field in fields), tuple(converters)


def _variadic(item: Any, outer: tuple[type, ...]) -> Converter:
    converter = compile_field(item, outer)
    encode_item, decode_item = converter.encode, converter.decode

    def encode(value: Any, frames: list[Buffer]) -> list[Any]:
        if type(value) is not tuple:
            expected("tuple", value)
        plain: list[Any] = []
        try:
            for entry in value:
                plain.append(encode_item(entry, frames))
        except Reject as reject:
            raise reject.inside(f"[{len(plain)}]") from None
        return plain

    def decode(plain: Any, frames: Iterator[Buffer]) -> tuple[Any, ...]:
        if type(plain) is not list:
            expected("list", plain)
        values: list[Any] = []
        try:
            for entry in plain:
                values.append(decode_item(entry, frames))
        except Reject as reject:
            raise reject.inside(f"[{len(values)}]") from None
        return tuple(values)

    return Converter(encode, decode, (list,))


def _fixed(items: tuple[Any, ...], outer: tuple[type, ...]) -> Converter:
    converters = tuple(compile_field(item, outer) for item in items)
    encoders = tuple(converter.encode for converter in converters)
    decoders = tuple(converter.decode for converter in converters)

    def convert(functions: tuple[Callable[[Any, Any], Any], ...], values: Sequence[Any], frames: Any) -> list[Any]:
        if len(values) != len(functions):
            raise Reject(f"expected {len(functions)} items, got {len(values)}")
        done: list[Any] = []
        try:
            for function, value in zip(functions, values, strict=True):
                done.append(function(value, frames))
        except Reject as reject:
            raise reject.inside(f"[{len(done)}]") from None
        return done

    def encode(value: Any, frames: list[Buffer]) -> list[Any]:
        if type(value) is not tuple:
            expected("tuple", value)
        return convert(encoders, value, frames)

    def decode(plain: Any, frames: Iterator[Buffer]) -> tuple[Any, ...]:
        if type(plain) is not list:
            expected("list", plain)
        return tuple(convert(decoders, plain, frames))

    return Converter(encode, decode, (list,))


def _mapping(args: tuple[Any, ...], outer: tuple[type, ...]) -> Converter:
    keys, values = compile_field(args[0], outer), compile_field(args[1], outer)
    if not set(keys.plain) <= {str, int}:
        raise TypeError(f"mapping keys must be str, int or enums, not {args[0]!r}")

    def encode(value: Any, frames: list[Buffer]) -> list[Any]:
        if not isinstance(value, Mapping):
            expected("mapping", value)
        plain = []
        for key, entry in value.items():
            try:
                plain.append([keys.encode(key, frames), values.encode(entry, frames)])
            except Reject as reject:
                raise reject.inside(f"[{key!r}]") from None
        return plain

    def decode(plain: Any, frames: Iterator[Buffer]) -> dict[Any, Any]:
        if type(plain) is not list:
            expected("list of pairs", plain)
        decoded: dict[Any, Any] = {}
        for index, pair in enumerate(plain):
            if type(pair) is not list or len(pair) != 2:
                raise Reject("expected a pair of key and value", f"[{index}]")
            try:
                key = keys.decode(pair[0], frames)
                entry = values.decode(pair[1], frames)
            except Reject as reject:
                raise reject.inside(f"[{str(pair[0])[:64]!r}]") from None
            if key in decoded:
                raise Reject("key comes twice", f"[{str(key)[:64]!r}]")
            decoded[key] = entry
        return decoded

    return Converter(encode, decode, (list,))


def _union(members: tuple[Any, ...], outer: tuple[type, ...]) -> Converter:
    others = tuple(member for member in members if member is not type(None))
    if len(others) == 1:
        return _optional(compile_field(others[0], outer))
    scalars = {member: SCALARS[member] for member in members if member in SCALARS}
    classes = [member for member in others if isinstance(member, type) and dataclasses.is_dataclass(member)]
    tagged = {cls.__name__: (cls, compile_dataclass(cls, outer)) for cls in classes}
    if len(scalars) + len(tagged) != len(members):
        raise TypeError(f"a union may hold scalars and dataclasses with names of their own, not {members!r}")
    choices = " or ".join(member.__name__ for member in members)

    def encode(value: Any, frames: list[Buffer]) -> Any:
        if (scalar := scalars.get(type(value))) is not None:
            return scalar.encode(value, frames)
        cls, converter = tagged.get(type(value).__name__, (None, None))
        if converter is None or type(value) is not cls:
            expected(choices, value)
        return [cls.__name__, converter.encode(value, frames)]

    def decode(plain: Any, frames: Iterator[Buffer]) -> Any:
        if (scalar := scalars.get(type(plain))) is not None:
            return scalar.decode(plain, frames)
        if type(plain) is not list or len(plain) != 2 or type(plain[0]) is not str:
            expected(choices, plain)
        _, converter = tagged.get(plain[0], (None, None))
        if converter is None:
            raise Reject(f"expected {choices}, got {plain[0][:64]!r}")
        return converter.decode(plain[1], frames)

    return Converter(encode, decode, (*scalars, list) if tagged else tuple(scalars))


def _optional(converter: Converter) -> Converter:
    def encode(value: Any, frames: list[Buffer]) -> Any:
        return None if value is None else converter.encode(value, frames)

    def decode(plain: Any, frames: Iterator[Buffer]) -> Any:
        return None if plain is None else converter.decode(plain, frames)

    return Converter(encode, decode, (*converter.plain, type(None)))
