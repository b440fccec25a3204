"""Checkpoint folders: the two invariants of `coordinator.checkpoints`, and what a resume finds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiderl.coordinator import checkpoints
from tiderl.errors import UserError


def complete(run_dir: Path, step: int) -> Path:
    folder = checkpoints.checkpoint_dir(run_dir, step)
    (folder / "trainer").mkdir(parents=True)
    checkpoints.write_scheduler_state(folder, {"next_step": step})
    return folder


def incomplete(run_dir: Path, step: int) -> Path:
    folder = checkpoints.checkpoint_dir(run_dir, step)
    (folder / "trainer").mkdir(parents=True)
    return folder


def steps_in(run_dir: Path) -> list[str]:
    return sorted(folder.name for folder in (run_dir / "checkpoints").iterdir())


def test_what_is_written_is_read(tmp_path: Path) -> None:
    state = {"format": 1, "version": 3, "open_groups": [[7, "train", "e", "s", 1, "t"]], "ledger": {"held": 5}}
    checkpoints.write_scheduler_state(tmp_path, state)
    assert checkpoints.read_scheduler_state(tmp_path) == state


def test_invariant_1_the_mark_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that refuses any of the writes leaves no mark; each file is on disk before the next begins."""
    order: list[str] = []

    def fsync(fd: int) -> None:
        order.append(Path(f"/proc/self/fd/{fd}").resolve().name.removesuffix(".partial"))
        assert not (tmp_path / "COMPLETE").exists()

    monkeypatch.setattr("tiderl.coordinator.checkpoints.os.fsync", fsync)
    checkpoints.write_scheduler_state(tmp_path, {})
    assert order == ["scheduler.json", "COMPLETE"]


def test_invariant_1_a_failed_write_leaves_no_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("tiderl.coordinator.checkpoints.os.fsync", refuse)
    with pytest.raises(OSError, match="disk full"):
        checkpoints.write_scheduler_state(tmp_path, {})
    assert not (tmp_path / "COMPLETE").exists()


def test_invariant_2_the_newest_complete_ones_stay_and_so_do_incomplete_ones(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        complete(tmp_path, step)
    incomplete(tmp_path, 5)
    incomplete(tmp_path, 50)
    checkpoints.keep_newest(tmp_path, 2)
    assert steps_in(tmp_path) == ["step_000005", "step_000030", "step_000040", "step_000050"]
    checkpoints.keep_newest(tmp_path, 0)
    assert steps_in(tmp_path) == ["step_000005", "step_000040", "step_000050"], (
        "the newest one stays whatever is asked for"
    )


def test_invariant_2_the_newest_is_the_one_of_the_highest_step(tmp_path: Path) -> None:
    """A million steps have one digit more."""
    for step in (999_999, 1_000_000):
        complete(tmp_path, step)
    assert checkpoints.find_checkpoint(tmp_path).name == "step_1000000"
    checkpoints.keep_newest(tmp_path, 1)
    assert steps_in(tmp_path) == ["step_1000000"]


def test_a_resume_finds_a_checkpoint_or_the_newest_of_a_run(tmp_path: Path) -> None:
    old, new = complete(tmp_path, 10), complete(tmp_path, 20)
    incomplete(tmp_path, 30)
    assert checkpoints.find_checkpoint(old) == old.resolve()
    assert checkpoints.find_checkpoint(tmp_path) == new.resolve()


def test_a_resume_from_nothing_is_the_users_to_mend(tmp_path: Path) -> None:
    folder = incomplete(tmp_path, 30)
    for path in (tmp_path, folder, tmp_path / "nothing"):
        with pytest.raises(UserError, match=r"run\.resume: .* is neither a complete checkpoint nor a run folder"):
            checkpoints.find_checkpoint(path)


def test_a_state_that_cannot_be_read_is_the_users_to_mend(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="resume from another checkpoint"):
        checkpoints.read_scheduler_state(tmp_path)
    (tmp_path / "scheduler.json").write_text('{"cut":')
    with pytest.raises(UserError, match="resume from another checkpoint"):
        checkpoints.read_scheduler_state(tmp_path)
