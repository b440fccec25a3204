"""A GPU and a model of round numbers, so that a test's arithmetic can be read."""

from __future__ import annotations

import dataclasses

from tiderl.profiles.costs import CostModel
from tiderl.profiles.schema import Efficiency, HardwareProfile, ModelProfile

ROUND_EFFICIENCY = Efficiency(
    prefill=0.5,
    decode_compute=0.25,
    forward=0.4,
    backward=0.5,
    memory_bandwidth=0.6,
    pcie=0.5,
    nvlink=0.5,
    network=0.8,
    step_overhead_s=0.001,
)
ROUND_GPU = HardwareProfile(
    name="round",
    peak_flops_per_s=1e12,
    memory_bytes=10_000_000,
    memory_bytes_per_s=1e9,
    pcie_bytes_per_s=1e8,
    nvlink_bytes_per_s=1e9,
    network_bytes_per_s=1e8,
    gpus_per_node=4,
    hop_latency_s=0.001,
    engine_workspace_bytes=1_000_000,
    efficiency=ROUND_EFFICIENCY,
)
#: 1,000,000 parameters in layers, 200,000 each in embedding and head (a vocabulary of 2,000).
ROUND_MODEL = ModelProfile(
    name="round",
    num_parameters=1_400_000,
    embedding_parameters=200_000,
    head_parameters=200_000,
    tied=False,
    vision_parameters=0,
    num_layers=4,
    num_full_attention_layers=4,
    hidden_size=100,
    intermediate_size=300,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=16,
    dtype_bytes=2,
    kv_bytes_per_token=512,
    state_bytes_per_sequence=0,
)
#: Every other layer keeps a state of 25,000 bytes instead of keys and values.
ROUND_HYBRID = dataclasses.replace(
    ROUND_MODEL, num_full_attention_layers=2, kv_bytes_per_token=256, state_bytes_per_sequence=50_000
)


def round_costs(model: ModelProfile = ROUND_MODEL, **efficiency: float) -> CostModel:
    """Costs on the round GPU, some of its efficiencies replaced."""
    changed = dataclasses.replace(ROUND_EFFICIENCY, **efficiency)
    return CostModel(dataclasses.replace(ROUND_GPU, efficiency=changed), model)
