"""Writing a Hugging Face model folder out of gathered weights, one file's worth in memory at a time.

Invariants (tests/conformance/test_trainer.py):

1. The folder loads in transformers with the trainer's weights: same names, tied duplicates left out, tokenizer files as they were.
2. It appears under its name only when it is whole.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

MAX_FILE_BYTES = 4 * 1024**3
#: What may lie beside the weights in a model folder and belongs to the model: configs, tokenizer, chat template.
COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model")


def write_model_folder(
    folder: Path,
    weights: Iterable[tuple[str, torch.Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    source: Path,
) -> None:
    """Write `weights` (in the order of `shapes`) and the other files of `source`. Raises `OSError`."""
    if folder.exists():
        raise FileExistsError(f"{folder} exists")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _copy_other_files(source, partial, dtype)
    _write_weights(partial, weights, shapes, dtype)
    partial.rename(folder)


def _write_weights(
    folder: Path, weights: Iterable[tuple[str, torch.Tensor]], shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> None:
    from safetensors.torch import save_file

    files = _plan_files(shapes, dtype.itemsize)
    waiting: dict[str, torch.Tensor] = {}
    current = ""
    for name, tensor in weights:
        if current and files[name] != current:
            save_file(waiting, folder / current, metadata={"format": "pt"})
            waiting = {}
        current = files[name]
        # A copy: a gathered tensor may share memory with the trainer's own.
        waiting[name] = tensor.to(device="cpu", dtype=dtype, copy=True).contiguous()
    save_file(waiting, folder / current, metadata={"format": "pt"})
    if len(set(files.values())) > 1:
        total = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _plan_files(shapes: Mapping[str, tuple[int, ...]], element_bytes: int) -> dict[str, str]:
    numbers: dict[str, int] = {}
    number, used = 1, 0
    for name, shape in shapes.items():
        size = math.prod(shape) * element_bytes
        if used and used + size > MAX_FILE_BYTES:
            number, used = number + 1, 0
        numbers[name] = number
        used += size
    if number == 1:
        return dict.fromkeys(shapes, "model.safetensors")
    return {name: f"model-{n:05d}-of-{number:05d}.safetensors" for name, n in numbers.items()}


def _copy_other_files(source: Path, folder: Path, dtype: torch.dtype) -> None:
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix in COPIED_SUFFIXES and not file.name.endswith(".index.json"):
            shutil.copyfile(file, folder / file.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
