"""Checkpoints of the trainer: sharded safetensors, written in the background, whole or not there at all.

A checkpoint is a folder of safetensors shards (torch.distributed.checkpoint, no pickle) and `checkpoint.json`, which is written
last. It is written under the name `<folder>.partial` and renamed when every rank's part is on disk.

Invariants (tests/conformance/test_trainer.py):

1. What is saved is the state at the call of `save`; later updates don't leak in.
2. A folder that lacks `checkpoint.json` is never loaded.
3. A checkpoint loads on any number of ranks. Names and shapes are compared before anything is changed.

Source: paper §7 (checkpoints are asynchronous and distributed).
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from tiderl.errors import TrainerError

MARKER = "checkpoint.json"
FORMAT = 1
#: A rank holds one file's bytes in memory while it writes it.
MAX_FILE_BYTES = 2 * 1024**3

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """The content of `checkpoint.json`."""

    version: int
    shapes: Mapping[str, tuple[int, ...]]


class CheckpointWriter:
    """Saves one checkpoint at a time. `group` is a gloo group of the actors that nothing else uses."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self._pending: Future[None] | None = None
        self._finisher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")

    def save(self, folder: Path, tensors: Mapping[str, Tensor], version: int) -> None:
        """(collective) Copy the tensors now, write them in the background. Raises `TrainerError` if the folder can't be made."""
        self.wait()
        partial = folder.with_name(folder.name + ".partial")
        problem = _prepare(folder, partial) if self._group.rank() == 0 else ""
        raise_together(problem, f"cannot save a checkpoint to {folder}", self._group)
        writer = HuggingFaceStorageWriter(
            str(partial), fqn_to_index_mapping=_file_numbers(tensors), save_distributed=True
        )
        written = async_save(dict(tensors), storage_writer=writer, process_group=self._group)
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        content = {"format": FORMAT, "version": version, "shapes": shapes}
        assert isinstance(written, Future), "no stager was given, so this is a plain future"
        self._pending = self._finisher.submit(self._finish, written, partial, folder, content)

    def _finish(self, written: Future[object], partial: Path, folder: Path, content: dict[str, object]) -> None:
        # Rank 0's part of async_save ends after it has heard from every rank, so here all files are on disk.
        written.result(timeout=self._timeout_s)
        if self._group.rank() == 0:
            (partial / MARKER).write_text(json.dumps(content), encoding="utf-8")
            partial.rename(folder)

    def wait(self) -> None:
        """(collective) Until the last `save` is whole on disk. Raises `TrainerError` on every rank if any rank failed."""
        if self._pending is None:
            return
        wait([self._pending], timeout=self._timeout_s)
        if not self._pending.done():
            problem = f"not written within {self._timeout_s:g} s (bound: timeouts.step_s)"
        else:
            error = self._pending.exception()
            problem = f"{type(error).__name__}: {error}" if error else ""
        self._pending = None
        raise_together(problem, "the last checkpoint was not saved", self._group)


def raise_together(problem: str, what: str, group: dist.ProcessGroup) -> None:
    """(collective) Raise `TrainerError` on every rank of a gloo group if any rank has a problem."""
    failed = torch.tensor([int(bool(problem))])
    dist.all_reduce(failed, group=group)
    if failed.item():
        raise TrainerError(f"{what}: {problem or 'another actor failed, see its log'}; check space and permissions")


def read_info(folder: Path) -> CheckpointInfo:
    """What a checkpoint holds. Raises `TrainerError` where it is missing, not whole, or of another format."""
    marker = folder / MARKER
    if not marker.is_file():
        raise TrainerError(f"{folder} is not a whole checkpoint ({MARKER} is missing); choose another in run.resume")
    try:
        content = json.loads(marker.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise TrainerError(
                f"{marker} has format {content['format']}, this TideRL reads {FORMAT}; choose another in run.resume"
            )
        shapes = {str(name): tuple(int(n) for n in shape) for name, shape in content["shapes"].items()}
        return CheckpointInfo(int(content["version"]), shapes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrainerError(
            f"{marker} is broken ({type(error).__name__}: {error}); choose another in run.resume"
        ) from error


def check_fits(folder: Path, info: CheckpointInfo, tensors: Mapping[str, Tensor]) -> None:
    """Raise `TrainerError` unless the checkpoint holds exactly the tensors that the model has."""
    wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    different = sorted(name for name in wanted.keys() | info.shapes.keys() if wanted.get(name) != info.shapes.get(name))
    if different:
        name = different[0]
        raise TrainerError(
            f"{folder} is a checkpoint of another model: {name} has shape {info.shapes.get(name, 'none')} there, "
            f"{wanted.get(name, 'none')} in model.path ({len(different)} tensors differ); resume with the model of that run"
        )


def read_tensors(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    """(collective) Fill the tensors in place from a checkpoint that `check_fits`. Raises `TrainerError`."""
    try:
        load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)), process_group=group)
    except (CheckpointException, OSError, RuntimeError, KeyError, AssertionError) as error:
        raise TrainerError(f"the checkpoint {folder} does not load ({error}); choose another in run.resume") from error


def _prepare(folder: Path, partial: Path) -> str:
    """Make room for a save; returns what is wrong, or nothing."""
    if folder.exists():
        return f"{folder} exists"
    try:
        if partial.exists():
            log.warning("removing %s, left behind by a save that was cut off", partial)
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
    except OSError as error:
        return f"{error.strerror}: {partial}"
    return ""


def _file_numbers(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Tensors to files (from 1), so that no file of a rank passes MAX_FILE_BYTES by much."""
    numbers: dict[str, int] = {}
    number, used = 1, 0
    for name, tensor in tensors.items():
        size = math.prod(tensor.shape) * tensor.element_size()
        if used and used + size > MAX_FILE_BYTES:
            number, used = number + 1, 0
        numbers[name] = number
        used += size
    return numbers
