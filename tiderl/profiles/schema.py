"""What a profile says of a GPU and of a model, as its vendor publishes it. The numbers are in configs/profiles/, each beside its
source.

Units are in the names; a byte per second is one in one direction. Efficiencies are shares of the peak. They, and an engine's
workspace, are assumptions: `tools/fit_profile.py` replaces efficiencies by what a run has measured.

Invariants: those of `files.py`, which reads the profiles.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of a GPU's peaks that real work gets, each in (0, 1], and the seconds that no peak explains."""

    #: Of the peak FLOP/s: prompts in the engine; the decoding requests' matrix products; a trainer's forward and backward.
    prefill: float
    decode_compute: float
    forward: float
    backward: float
    #: Of the respective bandwidth.
    memory_bandwidth: float
    pcie: float
    nvlink: float
    network: float
    #: Of an engine step beside what the GPU computes: scheduling, inputs, launches, sampling. 0 or more.
    step_overhead_s: float


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """One GPU, and how it is tied to the others."""

    name: str
    #: Dense bf16 on tensor cores.
    peak_flops_per_s: float
    #: What a process can allocate of it in all.
    memory_bytes: int
    memory_bytes_per_s: float
    pcie_bytes_per_s: float
    nvlink_bytes_per_s: float
    #: Of one GPU's own network port.
    network_bytes_per_s: float
    gpus_per_node: int
    #: From one rank of a chain to the next.
    hop_latency_s: float
    #: What an engine needs beside weights and KV cache: activations of its largest step, graphs, communication buffers.
    engine_workspace_bytes: int
    efficiency: Efficiency


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """A causal language model, possibly with a vision tower before it and with layers of linear attention among the others."""

    name: str
    #: All that a trainer holds: layers, embedding, head (once with the embedding where they are tied), vision tower.
    num_parameters: int
    embedding_parameters: int
    head_parameters: int
    tied: bool
    #: 0: no vision tower.
    vision_parameters: int
    num_layers: int
    #: Layers whose attention looks at the whole context, and so have a KV cache. The others keep a state of fixed size.
    num_full_attention_layers: int
    hidden_size: int
    #: Of the gated MLP.
    intermediate_size: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    #: Of weights, activations and KV cache.
    dtype_bytes: int
    kv_bytes_per_token: int
    #: Of all layers of linear attention, for one sequence. 0: there are none.
    state_bytes_per_sequence: int

    @property
    def layer_parameters(self) -> int:
        """Of the layers and the last norm: what every token meets."""
        head = 0 if self.tied else self.head_parameters
        return self.num_parameters - self.embedding_parameters - head - self.vision_parameters

    @property
    def query_width(self) -> int:
        return self.num_query_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def vocab_size(self) -> int:
        return self.head_parameters // self.hidden_size
