"""Messages to frames and back: strict, without pickle and without object hooks.

A message is an instance of a frozen dataclass that was registered with the `Codec`. Frame 0 is msgpack of
`[class name, [field values in order]]`; every array is a raw frame of its own behind it, in the order of the fields, and is
copied neither here nor there. `fields.py` says how each type of field looks. A buffer is `bytes` or a `memoryview` of bytes.

Invariants (tests/unit/test_codec.py):

1. `decode(encode(m)) == m` for every registered message; `unpack(pack(m)) == m` for those without arrays.
2. Equal messages give equal bytes (mappings keep their order).
3. Whatever the bytes, `decode` and `unpack` return a message whose every field fits its annotation, or raise `WireError`
   with the path of the fault (`TaskFinished.reward: expected float, got str`). Nothing else, and no code of the peer runs.
4. Arrays come back read-only, as views of their frames: they cost nothing, and keep their frame alive.
5. Messages over `max_message_bytes` are refused in both directions.

Non-finite floats are let through: that a gradient norm is NaN is exactly what the coordinator must hear.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgpack

from tiderl.errors import WireError
from tiderl.wire.fields import compile_dataclass
from tiderl.wire.leaves import Buffer, Converter, Reject

#: The default of `wire.max_message_bytes`.
DEFAULT_MAX_MESSAGE_BYTES = 256 * 1024 * 1024


class Codec:
    """Encodes and decodes the given message classes; safe to use from several threads."""

    def __init__(self, types: Iterable[type], *, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES) -> None:
        """Compile all converters. Raises `TypeError` for a class that has no form on the wire or a name used twice."""
        self._max_message_bytes = max_message_bytes
        self._by_name: dict[str, Converter] = {}
        self._by_type: dict[type, Converter] = {}
        for cls in types:
            if cls.__name__ in self._by_name:
                raise TypeError(f"two messages are called {cls.__name__}")
            self._by_name[cls.__name__] = self._by_type[cls] = compile_dataclass(cls)

    def encode(self, message: object) -> list[Buffer]:
        """Frames of a message. Array frames are views: the arrays must not change until the frames are sent.

        Raises `WireError` where the message is not registered, a field does not fit its annotation, or it is too large.
        """
        name = type(message).__name__
        converter = self._by_type.get(type(message))
        if converter is None:
            raise WireError(f"{name} is not a registered message")
        frames: list[Buffer] = [b""]
        try:
            frames[0] = msgpack.packb([name, converter.encode(message, frames)])
        except Reject as reject:
            raise WireError(f"{name}{reject.path}: {reject.problem}") from None
        except UnicodeEncodeError as error:
            raise WireError(f"{name}: a string is not valid Unicode: {error}") from error
        self._check_size(name, frames)
        return frames

    def decode(self, frames: Sequence[Buffer]) -> Any:
        """The message in `frames`. Raises `WireError` for anything that `encode` cannot have made."""
        if not frames:
            raise WireError("a message has at least one frame, got none")
        self._check_size("message", frames)
        arrays = iter(frames[1:])
        message = self._decode_header(frames[0], arrays)
        num_left = sum(1 for _ in arrays)
        if num_left:
            raise WireError(f"{type(message).__name__}: {num_left} frames more than its arrays need")
        return message

    def pack(self, message: object) -> bytes:
        """A message without arrays as one piece of bytes (for the journal). Raises `WireError` as `encode` does."""
        frames = self.encode(message)
        if len(frames) > 1:
            raise WireError(f"{type(message).__name__} holds arrays and does not fit one frame; use `encode`")
        return bytes(frames[0])

    def unpack(self, data: Buffer) -> Any:
        """The inverse of `pack`. Raises `WireError` as `decode` does."""
        return self.decode((data,))

    def _decode_header(self, header: Buffer, arrays: Iterator[Buffer]) -> Any:
        try:
            # Maps and extension types are never written, so they are refused before they are built.
            plain = msgpack.unpackb(header, strict_map_key=True, max_map_len=0, max_ext_len=0)
        except (ValueError, msgpack.UnpackException) as error:
            reason = str(error) or "nested too deeply"
            raise WireError(f"a message's first frame is not what this codec writes: {reason}") from error
        if type(plain) is not list or len(plain) != 2 or type(plain[0]) is not str:
            raise WireError("a message's first frame is not [name, fields]")
        name, fields = plain
        converter = self._by_name.get(name)
        if converter is None:
            raise WireError(f"{name[:64]!r} is not a registered message")
        try:
            return converter.decode(fields, arrays)
        except Reject as reject:
            raise WireError(f"{name}{reject.path}: {reject.problem}") from None

    def _check_size(self, name: str, frames: Sequence[Buffer]) -> None:
        num_bytes = sum(len(frame) for frame in frames)
        if num_bytes > self._max_message_bytes:
            raise WireError(
                f"{name} has {num_bytes} bytes, over the limit of {self._max_message_bytes} (wire.max_message_bytes)"
            )
