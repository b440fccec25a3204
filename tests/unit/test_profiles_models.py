"""The shipped model profiles against the models' published sizes, and against their shapes, matrix by matrix."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiderl.profiles.files import load_model
from tiderl.profiles.schema import ModelProfile

PROFILES = Path(__file__).resolve().parents[2] / "configs" / "profiles"


def model(name: str) -> ModelProfile:
    return load_model(PROFILES / f"{name}.toml")


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("qwen2.5_7b", 7.61e9),  # model card
        ("qwen2.5_14b", 14.7e9),  # model card
        ("qwen3_vl_4b", 4_437_815_808),  # safetensors of the repository
        ("qwen3.5_9b", 9_653_104_368 - 243_290_624),  # safetensors of the repository, multi-token prediction left out
    ],
)
def test_published_size(name: str, published: float) -> None:
    assert model(name).num_parameters == pytest.approx(published, rel=0.01)


def gated_mlp(m: ModelProfile) -> int:
    return 3 * m.hidden_size * m.intermediate_size


@pytest.mark.parametrize("name", ["qwen2.5_7b", "qwen2.5_14b"])
def test_qwen2_by_its_shapes(name: str) -> None:
    m = model(name)
    h, q, kv = m.hidden_size, m.query_width, m.kv_width
    attention = (h * q + q) + 2 * (h * kv + kv) + q * h  # queries, keys and values have a bias, the output hasn't
    layer = attention + gated_mlp(m) + 2 * h  # two norms
    assert m.num_parameters == m.num_layers * layer + h + 2 * 152_064 * h  # last norm, embedding, head


def test_qwen3_vl_4b_by_its_shapes() -> None:
    m = model("qwen3_vl_4b")
    h, q, kv = m.hidden_size, m.query_width, m.kv_width
    layer = (
        h * q + 2 * h * kv + q * h + 2 * m.head_dim + gated_mlp(m) + 2 * h
    )  # norms of queries and keys, a head's width
    language = m.num_layers * layer + h + 151_936 * h
    # Each of the three deepstack mergers norms four patches as one.
    vision = vision_tower(24, 1024, 4096, h) + 3 * merger(1024, h, norm_width=4 * 1024)
    assert m.vision_parameters == vision
    assert m.num_parameters == language + vision


def test_qwen3_5_9b_by_its_shapes() -> None:
    m = model("qwen3.5_9b")
    h, q, kv = m.hidden_size, m.query_width, m.kv_width
    full = h * 2 * q + 2 * h * kv + q * h + 2 * m.head_dim  # the output gate is as wide as the queries
    key, value, heads = 16 * 128, 32 * 128, 32
    # Projections of q, k, v; z; b and a; a convolution over 4 tokens; decay and step a head; a gated norm; the output.
    channels = 2 * key + value
    linear = h * channels + h * value + 2 * h * heads + 4 * channels + 2 * heads + 128 + value * h
    num_linear = m.num_layers - m.num_full_attention_layers
    layers = m.num_full_attention_layers * full + num_linear * linear + m.num_layers * (gated_mlp(m) + 2 * h)
    language = layers + h + 2 * 248_320 * h
    assert m.vision_parameters == vision_tower(27, 1152, 4304, h)
    assert m.num_parameters == language + m.vision_parameters
    # fp32 outer products a value head, and the 3 tokens before the convolution's in bf16.
    assert m.state_bytes_per_sequence == num_linear * (heads * 128 * 128 * 4 + 3 * channels * 2)


def vision_tower(depth: int, width: int, mlp: int, out: int) -> int:
    """A Qwen vision transformer: patches of 3 x 2 x 16 x 16 values, 2304 positions, blocks, the merger to the language model."""
    patches = 3 * 2 * 16 * 16 * width + width
    norms = 2 * 2 * width
    attention = width * 3 * width + 3 * width + width * width + width
    block = norms + attention + width * mlp + mlp + mlp * width + width
    return patches + 2304 * width + depth * block + merger(width, out, norm_width=width)


def merger(width: int, out: int, *, norm_width: int) -> int:
    """Four patches side by side through two layers, after a norm."""
    side_by_side = 4 * width
    return 2 * norm_width + side_by_side * side_by_side + side_by_side + side_by_side * out + out
