"""Checkpoints and exports of several files, and writes that fail. Numbers of actors: tests/conformance/test_trainer.py."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from tiderl.errors import TrainerError
from tiderl.trainers import checkpoint, export
from tiderl.trainers.checkpoint import CheckpointWriter, read_info, read_tensors
from tiderl.trainers.export import write_model_folder


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def make_tensors() -> dict[str, torch.Tensor]:
    return {name: torch.randn(4, 5, generator=torch.Generator().manual_seed(i)) for i, name in enumerate("abc")}


def test_a_checkpoint_of_several_files_comes_back(
    group: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for one tensor and a half in a file: three files."""
    monkeypatch.setattr(checkpoint, "MAX_FILE_BYTES", 4 * 5 * 4 * 3 // 2)
    writer = CheckpointWriter(group, 60.0)
    tensors = make_tensors()
    writer.save(tmp_path / "saved", tensors, version=3)
    for tensor in tensors.values():
        tensor.zero_()  # the snapshot is taken when `save` returns
    writer.wait()
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) == 3
    info = read_info(tmp_path / "saved")
    assert (info.version, info.shapes) == (3, dict.fromkeys("abc", (4, 5)))
    read_tensors(tmp_path / "saved", tensors, group)
    for name, tensor in make_tensors().items():
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=0)


def test_a_write_that_fails_is_reported_and_leaves_no_checkpoint(
    group: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    writer = CheckpointWriter(group, 60.0)
    with monkeypatch.context() as patch:
        patch.setattr(HuggingFaceStorageWriter, "write_data", full)
        writer.save(tmp_path / "saved", make_tensors(), version=3)
        with pytest.raises(TrainerError, match="No space left on device"):
            writer.wait()
    assert not (tmp_path / "saved").exists()
    writer.save(tmp_path / "saved", make_tensors(), version=3)
    writer.wait()
    assert read_info(tmp_path / "saved").version == 3


def test_a_folder_that_cannot_be_made_is_reported_at_once(group: dist.ProcessGroup, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainerError, match="cannot save a checkpoint"):
        CheckpointWriter(group, 60.0).save(tmp_path / "file" / "saved", make_tensors(), version=1)


def test_leftovers_are_named_when_they_are_removed(
    group: dist.ProcessGroup, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "saved.partial").mkdir()
    with caplog.at_level(logging.WARNING):
        writer = CheckpointWriter(group, 60.0)
        writer.save(tmp_path / "saved", make_tensors(), version=1)
        writer.wait()
    assert "saved.partial" in caplog.text


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.json").write_text(json.dumps({"format": 99, "version": 1, "shapes": {}}))
    with pytest.raises(TrainerError, match="has format 99"):
        read_info(tmp_path)


def test_an_export_of_several_files_has_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import load_file

    monkeypatch.setattr(export, "MAX_FILE_BYTES", 4 * 5 * 2 * 2)  # two bfloat16 tensors
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": "qwen2", "torch_dtype": "float32"}))
    (source / "tokenizer.json").write_text("{}")
    (source / "model.safetensors").write_bytes(b"old weights")
    (source / "model.safetensors.index.json").write_text("{}")
    tensors = make_tensors()
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    write_model_folder(tmp_path / "hf", iter(tensors.items()), shapes, torch.bfloat16, source)

    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert index == {"metadata": {"total_size": 3 * 40}, "weight_map": {"a": first, "b": first, "c": second}}
    for name, file in index["weight_map"].items():
        torch.testing.assert_close(load_file(tmp_path / "hf" / file)[name], tensors[name].bfloat16(), rtol=0, atol=0)
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == {"model_type": "qwen2", "dtype": "bfloat16"}
    assert {f.name for f in (tmp_path / "hf").iterdir()} == {
        first, second, "model.safetensors.index.json", "config.json", "tokenizer.json",
    }  # fmt: skip
