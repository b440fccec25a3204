"""The journal: written, read, cut, and replayed through a fresh core."""

from __future__ import annotations

import random
import stat
from pathlib import Path

import msgpack
import pytest

from tests.scheduling.driver import World, small_config
from tiderl.coordinator.journal import Header, JournalWriter, Record, journal_codec, read_journal
from tiderl.coordinator.replay import Comparison, replay
from tiderl.errors import UserError
from tiderl.scheduling import events as ev
from tiderl.scheduling.core import Core


def random_run(seed: int, *, steps: int = 3) -> World:
    """A job with failures, evaluation, checkpoints and late groups, played to its end or stopped."""
    rng = random.Random(seed)
    config = small_config(
        steps=steps,
        max_staleness=rng.randint(0, 2),
        on_late=rng.choice(["wait", "drop"]),
        num_actors=rng.randint(1, 2),
        eval_every=rng.randint(0, 2),
        checkpoint_every=rng.randint(0, 2),
    )
    world = World(config, kv_tokens=(300, 450), capacity=6)
    for _ in range(rng.randint(1, 6)):
        left = iter(range(rng.randint(0, 40)))
        world.play(rng, until=lambda left=left: next(left, None) is None)  # type: ignore[misc]
        if world.playing and world.shutdown is None:
            world.fail(rng.choice(sorted(world.playing)), retryable=rng.random() < 0.5, tokens=3)
    if rng.random() < 0.3 and world.shutdown is None:
        world.stop()
    world.play(rng)
    return world


def written(world: World, path: Path, resumed: dict[str, object] | None = None) -> Header:
    header = Header(world.config, world.num_actors + len(world.kv_tokens), resumed)
    with JournalWriter(path, header) as journal:
        for now_s, event, actions in world.history:
            journal.write(now_s, event, actions)
    return header


def read(path: Path) -> list[Record]:
    return list(read_journal(path)[1])


@pytest.mark.parametrize("seed", range(8))
def test_invariants_1_and_3_what_was_written_is_read_and_decided_again(tmp_path: Path, seed: int) -> None:
    world = random_run(seed)
    header = written(world, tmp_path / "journal.msgpack")
    read_header, records = read_journal(tmp_path / "journal.msgpack")
    assert read_header == header
    found = list(records)
    codec = journal_codec()
    assert [record.seq for record in found] == list(range(len(world.history)))
    assert [(r.now_s, codec.unpack(r.event)) for r in found] == [(now_s, event) for now_s, event, _ in world.history]
    assert [tuple(codec.unpack(a) for a in r.actions) for r in found] == [actions for _, _, actions in world.history]
    comparison = replay(read_header.fresh_core(), found)
    assert comparison == Comparison(len(found), sum(len(actions) for _, _, actions in world.history), [])


def test_invariant_3_of_a_resumed_run(tmp_path: Path) -> None:
    first = World(small_config(steps=4))
    first.play(random.Random(1), until=lambda: len(first.reports) == 2)
    first.stop()
    first.play(random.Random(2))
    state = first.states[-1][1]
    second = World(first.config, saved=state)
    second.play(random.Random(3))
    written(second, tmp_path / "journal.msgpack", state)
    header, records = read_journal(tmp_path / "journal.msgpack")
    assert header.resumed == state
    assert replay(header.fresh_core(), records).differences == []


def test_a_decision_that_differs_is_found_and_shown(tmp_path: Path) -> None:
    """The same events under another staleness bound: the replay of a journal notices a core that decides otherwise."""
    world = World(small_config(max_staleness=1))
    world.play(random.Random(1), until=lambda: bool(world.supplies))
    written(world, tmp_path / "journal.msgpack")
    comparison = replay(Core(small_config(max_staleness=2), 2), read(tmp_path / "journal.msgpack"))
    (difference,) = comparison.differences
    assert "SyncFinished" in difference and "count=4" in difference and "count=6" in difference


def test_invariant_2_a_file_that_was_cut_anywhere_reads_as_a_prefix(tmp_path: Path) -> None:
    world = World(small_config(steps=1, groups_per_step=1))
    world.play(random.Random(0))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    written(world, whole)
    data = whole.read_bytes()
    records = read(whole)
    unpacker = msgpack.Unpacker()
    unpacker.feed(data)
    unpacker.unpack()
    header_bytes = unpacker.tell()
    ends = [header_bytes]
    for _ in records:
        unpacker.unpack()
        ends.append(unpacker.tell())
    assert ends[-1] == len(data)
    # All places in the first and the last records, a part of those between.
    for num_bytes in sorted({*range(header_bytes - 3, ends[3]), *range(0, len(data), 17), *range(ends[-4], len(data))}):
        cut.write_bytes(data[:num_bytes])
        if num_bytes < header_bytes:
            with pytest.raises(UserError, match="is not a TideRL journal"):
                read(cut)
        else:
            assert read(cut) == records[: sum(end <= num_bytes for end in ends) - 1]


def test_a_crashed_run_loses_at_most_the_last_records(tmp_path: Path) -> None:
    """Without `close`: what was written is on its way to the disk in portions."""
    path = tmp_path / "journal.msgpack"
    with JournalWriter(path, Header(small_config(), 2, None)) as journal:
        for i in range(200):
            journal.write(float(i), ev.Tick(), ())
        seen = read(path)
    assert len(seen) > 200 - 65
    assert len(read(path)) == 200


def test_the_file_is_private_and_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "journal.msgpack"
    written(random_run(1, steps=1), path)
    with JournalWriter(path, Header(small_config(), 2, None)):
        pass
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read(path) == []


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"\x95\x01\x02\x03\x04\x05", msgpack.packb(["tiderl-journal", 99, "{}", 2, None])]
)
def test_what_is_no_journal_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "journal.msgpack").write_bytes(data)
    with pytest.raises(UserError):
        read_journal(tmp_path / "journal.msgpack")


def test_a_file_that_is_not_there_is_the_users_to_mend(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give the folder of a run that has one"):
        read_journal(tmp_path / "nothing")
