"""The journal: every event that the core has handled, when, and what it answered. Enough to replay a run decision by decision.

    file = header, record, record, …      each a msgpack array; what was cut off at the end of a crashed run is ignored
    header = ["tiderl-journal", format, config as JSON, world size, resumed state or nil]
    record = [seq, now_s, event, [action, …]]      event and actions packed by the wire's codec

Invariants (tests/replay/test_journal.py):

1. Reading gives back what was written, in order; `seq` counts from 0 without gaps.
2. A file that was cut anywhere reads as a prefix of what was written.
3. Replaying it through a fresh core gives the same actions, byte for byte.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import msgpack

from tiderl.config.load import overlay, to_json
from tiderl.config.schema import Config
from tiderl.errors import UserError
from tiderl.scheduling.actions import ACTION_TYPES, Action
from tiderl.scheduling.core import Core
from tiderl.scheduling.events import EVENT_TYPES, Event
from tiderl.wire.codec import Codec

_MAGIC = "tiderl-journal"
_FORMAT = 4
#: A written record is at most this many records away from the disk.
_FLUSH_EVERY = 64


@dataclass(frozen=True, slots=True)
class Header:
    """What a replay needs to make the core that the run started with."""

    config: Config
    world_size: int
    resumed: Mapping[str, Any] | None

    def fresh_core(self) -> Core:
        core = Core(self.config, self.world_size)
        if self.resumed is not None:
            core.load_state_dict(self.resumed)
        return core


@dataclass(frozen=True, slots=True)
class Record:
    """One call of `core.handle`. Event and actions are packed: comparing bytes compares decisions."""

    seq: int
    now_s: float
    event: bytes
    actions: tuple[bytes, ...]


def journal_codec() -> Codec:
    """Packs events and actions; they hold no arrays."""
    return Codec((*EVENT_TYPES, *ACTION_TYPES))


class JournalWriter:
    """Appends records; use as a context manager. Raises `OSError` where the disk refuses."""

    def __init__(self, path: Path, header: Header) -> None:
        self._codec = journal_codec()
        self._packer = msgpack.Packer()
        self._seq = 0
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
        self._file.write(
            self._packer.pack(
                [_MAGIC, _FORMAT, to_json(header.config), header.world_size, header.resumed and dict(header.resumed)]
            )
        )

    def __enter__(self) -> JournalWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, now_s: float, event: Event, actions: tuple[Action, ...]) -> None:
        packed = [self._codec.pack(action) for action in actions]
        self._file.write(self._packer.pack([self._seq, now_s, self._codec.pack(event), packed]))
        self._seq += 1
        if self._seq % _FLUSH_EVERY == 0:
            self._file.flush()


def read_journal(path: Path) -> tuple[Header, Iterator[Record]]:
    """The header, and the records one by one. Raises `UserError` for a file that is no journal."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise UserError(f"journal {path}: {error.strerror}; give the folder of a run that has one") from error
    unpacker = msgpack.Unpacker(file, max_buffer_size=0, strict_map_key=False)
    try:
        magic, version, config, world_size, resumed = unpacker.unpack()
    except (msgpack.UnpackException, ValueError, TypeError) as error:
        file.close()
        raise UserError(f"{path} is not a TideRL journal: {error!r}") from error
    if (magic, version) != (_MAGIC, _FORMAT):
        file.close()
        raise UserError(f"{path} is a {magic!r} of format {version}; this version reads {_MAGIC!r} of format {_FORMAT}")

    def records() -> Iterator[Record]:
        with file:
            for seq, now_s, event, actions in unpacker:
                yield Record(seq, now_s, event, tuple(actions))

    # Laid over the defaults: a journal that is older than a setting was written when its default was the only behaviour.
    return Header(overlay(Config(), json.loads(config)), world_size, resumed), records()
