"""Invariants of tiderl/profiles/files.py: strict files, and errors that say what would be right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tiderl.errors import ConfigError
from tiderl.profiles.files import load, load_hardware, load_model

PROFILES = Path(__file__).resolve().parents[2] / "configs" / "profiles"
HARDWARE = PROFILES / "h100_sxm.toml"
MODEL = PROFILES / "qwen2.5_7b.toml"
HYBRID = PROFILES / "qwen3.5_9b.toml"


def edited(source: Path, folder: Path, key: str, line: str) -> Path:
    """A copy of a profile in which the line of `key` is `line`."""
    text, num_edits = re.subn(rf"^{re.escape(key)} = .*$", line, source.read_text(), flags=re.MULTILINE)
    assert num_edits == 1, key
    copy = folder / source.name
    copy.write_text(text)
    return copy


def test_every_hardware_goes_with_every_model() -> None:
    models = sorted(PROFILES.glob("qwen*.toml"))
    hardware = sorted(set(PROFILES.glob("*.toml")) - set(models))
    assert len(hardware) == 3 and len(models) == 4
    for gpu in hardware:
        for model in models:
            costs = load(gpu, model)
            assert costs.kv_cache_tokens(0.85) > 100_000, (gpu, model)


def test_what_a_file_says_is_what_is_read() -> None:
    hardware = load_hardware(str(HARDWARE))
    assert (hardware.name, hardware.peak_flops_per_s, hardware.gpus_per_node) == ("H100 SXM5 80GB", 989.4e12, 8)
    assert hardware.efficiency.network == 0.9
    model = load_model(MODEL)
    assert (model.layer_parameters, model.query_width, model.kv_width) == (6_525_621_760, 3584, 512)
    assert (model.vocab_size, model.tied) == (152_064, False)


def test_an_integer_passes_as_a_number(tmp_path: Path) -> None:
    hardware = load_hardware(edited(HARDWARE, tmp_path, "peak_flops_per_s", "peak_flops_per_s = 1000"))
    assert hardware.peak_flops_per_s == 1000.0 and type(hardware.peak_flops_per_s) is float


def test_no_overhead_is_allowed(tmp_path: Path) -> None:
    hardware = load_hardware(edited(HARDWARE, tmp_path, "step_overhead_s", "step_overhead_s = 0"))
    assert hardware.efficiency.step_overhead_s == 0.0


@pytest.mark.parametrize(
    ("key", "line", "where", "right"),
    [
        ("name", "nmae = 'x'", "nmae", "unknown key; known are name, "),
        ("name", "", "name", "is missing; give a string"),
        ("name", "name = 1", "name", "is 1; give a string"),
        ("memory_bytes", "memory_bytes = 8e10", "memory_bytes", "give an integer"),
        ("memory_bytes", "memory_bytes = true", "memory_bytes", "is True; give an integer"),
        ("memory_bytes", "memory_bytes = 0", "memory_bytes", "is 0; give a number above 0"),
        ("gpus_per_node", "gpus_per_node = -8", "gpus_per_node", "above 0"),
        ("peak_flops_per_s", "peak_flops_per_s = '989e12'", "peak_flops_per_s", "is '989e12'; give a number"),
        ("peak_flops_per_s", "peak_flops_per_s = inf", "peak_flops_per_s", "give a finite number"),
        ("hop_latency_s", "hop_latency_s = nan", "hop_latency_s", "give a finite number"),
        ("prefill", "prefil = 0.5", "efficiency.prefil", "unknown key; known are prefill, "),
        ("prefill", "", "efficiency.prefill", "is missing; give a number"),
        ("forward", "forward = 1.2", "efficiency.forward", "give a share of the peak in (0, 1]"),
        ("forward", "forward = 0.0", "efficiency.forward", "above 0"),
        ("step_overhead_s", "step_overhead_s = -1", "efficiency.step_overhead_s", "of 0 or more"),
    ],
)
def test_bad_hardware(tmp_path: Path, key: str, line: str, where: str, right: str) -> None:
    path = edited(HARDWARE, tmp_path, key, line)
    with pytest.raises(ConfigError) as caught:
        load_hardware(path)
    assert caught.value.path == f"{path}: {where}"
    assert right in caught.value.problem


@pytest.mark.parametrize(
    ("source", "key", "line", "right"),
    [
        (MODEL, "tied", "tied = 1", "give true or false"),
        (MODEL, "num_parameters", "num_parameters = 1_000_000_000", "counts embedding, head and vision tower too"),
        (MODEL, "head_parameters", "head_parameters = 544_997_377", "give vocabulary x hidden_size (3584)"),
        (MODEL, "num_full_attention_layers", "num_full_attention_layers = 29", "give at most num_layers (28)"),
        (MODEL, "num_kv_heads", "num_kv_heads = 3", "give a divisor of num_query_heads (28)"),
        (MODEL, "kv_bytes_per_token", "kv_bytes_per_token = 57_345", "is 57345; give 57344, which is 2 x"),
        (
            MODEL,
            "state_bytes_per_sequence",
            "state_bytes_per_sequence = 1",
            "with 0 layers of linear attention; give 0",
        ),
        (HYBRID, "state_bytes_per_sequence", "state_bytes_per_sequence = 0", "with 24 layers of linear attention"),
        (PROFILES / "qwen3_vl_4b.toml", "head_parameters", "head_parameters = 2560", "give 388956160, or tied = false"),
    ],
)
def test_bad_model(tmp_path: Path, source: Path, key: str, line: str, right: str) -> None:
    path = edited(source, tmp_path, key, line)
    with pytest.raises(ConfigError) as caught:
        load_model(path)
    assert caught.value.path == f"{path}: {key}"
    assert right in caught.value.problem


def test_efficiency_must_be_a_section(tmp_path: Path) -> None:
    path = tmp_path / "gpu.toml"
    path.write_text(HARDWARE.read_text().split("[efficiency]")[0] + "efficiency = 0.5\n")
    with pytest.raises(ConfigError, match="efficiency: is 0.5; give a section"):
        load_hardware(path)


def test_files_that_are_not_there_or_not_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: No such file or directory; give a profile"):
        load_hardware(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("name =")
    with pytest.raises(ConfigError, match=r"bad\.toml: is not TOML"):
        load(HARDWARE, tmp_path / "bad.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.toml: is not TOML"):
        load_model(tmp_path / "binary.toml")
