"""`tiderl replay RUN`: run a journal's events through a fresh core and compare every decision.

Prints `N events, N actions, 0 differences`, or the first decisions that differ. Exit code 0 without differences, else 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tiderl.coordinator.journal import Record, journal_codec, read_journal
from tiderl.scheduling.core import Core

#: Differences that are printed in full; the rest is counted.
MAX_SHOWN = 5


@dataclass(slots=True)
class Comparison:
    """What a replay has found so far."""

    num_events: int = 0
    num_actions: int = 0
    differences: list[str] = field(default_factory=list)


def replay(core: Core, records: Iterable[Record]) -> Comparison:
    """Feed all records to `core` and compare its answers with the recorded ones."""
    codec = journal_codec()
    found = Comparison()
    for record in records:
        event = codec.unpack(record.event)
        actions = tuple(codec.pack(action) for action in core.handle(event, record.now_s))
        found.num_events += 1
        found.num_actions += len(actions)
        if actions != record.actions:
            then = [codec.unpack(action) for action in record.actions]
            now = [codec.unpack(action) for action in actions]
            found.differences.append(
                f"event {record.seq} at {record.now_s:.6f} s: {event}\n  then: {then}\n  now:  {now}"
            )
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="run folder, or a journal file")


def run(arguments: argparse.Namespace) -> int:
    path: Path = arguments.run
    header, records = read_journal(path / "journal.msgpack" if path.is_dir() else path)
    found = replay(header.fresh_core(), records)
    for difference in found.differences[:MAX_SHOWN]:
        print(difference)
    print(f"{found.num_events} events, {found.num_actions} actions, {len(found.differences)} differences")
    return 1 if found.differences else 0
