"""Checkpoint folders: `checkpoints/step_000020/` holds `trainer/` (the actors'), `scheduler.json` and, last of all, `COMPLETE`.

A folder without `COMPLETE` is not a checkpoint: nothing loads it, and the next save of the same step replaces it.

Invariants (tests/unit/test_checkpoints.py):

1. `COMPLETE` is written after everything else is on disk.
2. `keep_newest` never removes the newest complete checkpoint, and never an incomplete one that may still be being written.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiderl.errors import UserError

_COMPLETE = "COMPLETE"


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:06d}"


def write_scheduler_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write ours, then mark the checkpoint as complete."""
    _write_synced(folder / "scheduler.json", json.dumps(state))
    _write_synced(folder / _COMPLETE, "")


def read_scheduler_state(folder: Path) -> dict[str, Any]:
    """The state that `write_scheduler_state` wrote. Raises `UserError`."""
    try:
        state: dict[str, Any] = json.loads((folder / "scheduler.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"checkpoint {folder}: scheduler.json cannot be read: {error}; resume from another checkpoint"
        ) from error
    return state


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that `run.resume` means: `path` itself, or the newest complete one of the run `path`. Raises `UserError`."""
    if (path / _COMPLETE).exists():
        return path.resolve()
    complete = _complete_ones(path)
    if not complete:
        raise UserError(f"run.resume: {path} is neither a complete checkpoint nor a run folder that holds one")
    return complete[-1].resolve()


def keep_newest(run_dir: Path, num_kept: int) -> None:
    """Remove all complete checkpoints but the newest `num_kept`."""
    for folder in _complete_ones(run_dir)[: -max(1, num_kept)]:
        (folder / _COMPLETE).unlink()
        shutil.rmtree(folder)


def _complete_ones(run_dir: Path) -> list[Path]:
    folders = [marker.parent for marker in run_dir.glob(f"checkpoints/step_*/{_COMPLETE}")]
    return sorted(folders, key=lambda folder: (len(folder.name), folder.name))


def _write_synced(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
