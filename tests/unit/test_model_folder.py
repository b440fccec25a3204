"""Each way in which a model folder can be broken is told apart, without torch."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tiderl.errors import ModelError
from tiderl.trainers.model_folder import check_model_folder, num_parameters, weight_shapes

SHAPES = {"model.embed_tokens.weight": [7, 4], "model.norm.weight": [4]}


def write_weights(file: Path, shapes: dict[str, list[int]], missing_bytes: int = 0) -> None:
    """A safetensors file of float32 zeros, written by the format's definition."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        size = 4
        for n in shape:
            size *= n
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * (end - missing_bytes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    write_weights(tmp_path / "model.safetensors", SHAPES)
    return tmp_path


def configure(folder: Path, **settings: object) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", **settings}))


def test_a_whole_folder_passes_and_is_counted(folder: Path) -> None:
    check_model_folder(folder)
    check_model_folder(str(folder))
    assert num_parameters(folder) == 7 * 4 + 4
    assert weight_shapes(folder) == {"model.embed_tokens.weight": (7, 4), "model.norm.weight": (4,)}


def test_shards_are_counted_together(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    write_weights(folder / "a.safetensors", {"x": [3, 5]})
    write_weights(folder / "b.safetensors", {"y": [2], "scalar": []})
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors", "scalar": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    check_model_folder(folder)
    assert num_parameters(folder) == 15 + 2 + 1
    (folder / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"cannot read .*b\.safetensors"):
        check_model_folder(folder)


def test_the_index_must_map(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": 3}}))
    with pytest.raises(ModelError, match="no weight_map"):
        check_model_folder(folder)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"model_type": "gpt2"}, r"model_type 'gpt2'; supported are qwen2"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope'"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope type 'dynamic'"),
    ],
)
def test_models_that_packing_would_change_are_refused(
    folder: Path, settings: dict[str, object], complaint: str
) -> None:
    configure(folder, **settings)
    with pytest.raises(ModelError, match=complaint):
        check_model_folder(folder)


def test_static_rope_scaling_passes(folder: Path) -> None:
    configure(folder, rope_parameters={"rope_type": "llama3", "factor": 8.0})
    check_model_folder(folder)


def test_missing_things_are_named(folder: Path) -> None:
    with pytest.raises(ModelError, match="nowhere is not a folder"):
        check_model_folder(folder / "nowhere")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        check_model_folder(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"cannot read .*config\.json"):
        check_model_folder(folder)


@pytest.mark.parametrize(("text", "complaint"), [("{", "not valid JSON"), ("[]", "holds list")])
def test_a_broken_config_is_named(folder: Path, text: str, complaint: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=complaint):
        check_model_folder(folder)


def test_a_truncated_weight_file_is_named(folder: Path) -> None:
    write_weights(folder / "model.safetensors", SHAPES, missing_bytes=1)
    with pytest.raises(ModelError, match="is cut short"):
        check_model_folder(folder)


@pytest.mark.parametrize(
    "content",
    [b"", b"12345", struct.pack("<Q", 10**15), struct.pack("<Q", 9) + b"{", struct.pack("<Q", 3) + b"{,}"],
    ids=["empty", "short", "huge header", "cut header", "not JSON"],
)
def test_a_weight_file_of_something_else_is_named(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        check_model_folder(folder)


@pytest.mark.parametrize(
    "header", ["[]", '{"x": 3}', '{"x": {"shape": [1]}}', '{"x": {"shape": 1, "data_offsets": [0, 4]}}']
)
def test_a_header_of_another_form_is_named(folder: Path, header: str) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode() + b"\0" * 4)
    with pytest.raises(ModelError, match="broken safetensors header"):
        check_model_folder(folder)


def test_a_file_without_tensors_is_refused(folder: Path) -> None:
    write_weights(folder / "model.safetensors", {})
    with pytest.raises(ModelError, match="hold no tensors"):
        check_model_folder(folder)


def test_the_check_needs_no_torch() -> None:
    code = "import sys, tiderl.trainers.model_folder; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    root = str(Path(__file__).parents[2])
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=60)
