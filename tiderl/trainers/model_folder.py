"""What can be said of a Hugging Face model folder without loading it: is it whole, do we support it, how large is it.

Reads JSON and safetensors headers only, with the standard library, so that the launcher can refuse a broken folder before
any GPU is busy.

Invariants (tests/unit/test_model_folder.py):

1. A folder that passes loads in the trainer; each fault of one that doesn't is a `ModelError` that names the file.
2. `num_parameters` counts what the safetensors hold, shards included, tied duplicates not.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from tiderl.errors import ModelError

#: Their attention is plain causal, and their layers sit in `model.layers`: what `model.py` builds on.
SUPPORTED_MODEL_TYPES = ("qwen2", "qwen3", "llama")
#: These change all frequencies with the longest position of the batch, so packing would change the model.
UNSUPPORTED_ROPE_TYPES = ("dynamic", "longrope")
MAX_HEADER_BYTES = 100 * 1024 * 1024


def check_model_folder(path: str | Path) -> None:
    """Raise `ModelError` unless the folder holds a supported model with all of its weight files, none cut short."""
    folder = Path(path)
    _require_folder(folder)
    config = _read_json(folder, "config.json")
    model_type = config.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ModelError(
            f"model.path: {folder}/config.json says model_type {model_type!r}; supported are {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    if config.get("use_sliding_window"):
        raise ModelError(f"model.path: {folder}/config.json sets use_sliding_window; only full attention is supported")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type"))
    if rope_type in UNSUPPORTED_ROPE_TYPES:
        raise ModelError(
            f"model.path: {folder}/config.json uses rope type {rope_type!r}, which depends on the batch; use another model"
        )
    if not weight_shapes(folder):
        raise ModelError(f"model.path: the safetensors files in {folder} hold no tensors; copy the model again")


def num_parameters(path: str | Path) -> int:
    """Number of parameters in the folder's safetensors files. Raises `ModelError` as `check_model_folder` does."""
    return sum(math.prod(shape) for shape in weight_shapes(Path(path)).values())


def weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all stored tensors. Raises `ModelError` for a missing or truncated file."""
    _require_folder(folder)
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _weight_files(folder):
        shapes.update(_read_header(file))
    return shapes


def _require_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ModelError(f"model.path: {folder} is not a folder; give a local Hugging Face model folder")


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ModelError(
            f"model.path: {folder} has neither {single.name} nor {index.name}; convert the weights to safetensors"
        )
    weight_map = _read_json(folder, index.name).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"model.path: {index} has no weight_map from tensor names to file names; copy the model again")
    return [folder / name for name in sorted(set(weight_map.values()))]


def _read_header(file: Path) -> dict[str, tuple[int, ...]]:
    """The format: 8 bytes of header length, a JSON header of names, shapes and offsets behind it, then the data."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES + 1
            if length > min(size, MAX_HEADER_BYTES):
                raise ModelError(f"model.path: {file} is not a safetensors file, or was cut short; copy it again")
            entries = json.loads(stream.read(length))
        entries.pop("__metadata__", None)
        shapes = {str(name): tuple(int(n) for n in entry["shape"]) for name, entry in entries.items()}
        end = 8 + length + max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except OSError as error:
        raise ModelError(f"model.path: cannot read {file} ({error.strerror}); copy it again") from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ModelError(
            f"model.path: {file} has a broken safetensors header ({type(error).__name__}: {error}); copy it again"
        ) from error
    if size < end:
        raise ModelError(f"model.path: {file} is cut short: {size} bytes of {end}; copy it again")
    return shapes


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    file = folder / name
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"model.path: cannot read {file} ({error.strerror}); copy the model again") from error
    except ValueError as error:
        raise ModelError(f"model.path: {file} is not valid JSON ({error}); copy the model again") from error
    if not isinstance(content, dict):
        raise ModelError(f"model.path: {file} holds {type(content).__name__}, not an object; copy the model again")
    return content
