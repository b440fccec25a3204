"""Load to seconds: what a prefill, a decode step, a training pass, a swap, a weight sync take on a GPU of a profile.

A roofline: what is computed takes its FLOPs at the peak's efficient share, what is moved takes its bytes at the bandwidth's; where
both go on at once the longer one counts. The emulated backends wait for these seconds; the simulator adds them to its clock.

Invariants (tests/unit/test_profiles_costs.py):

1. Pure: the same load costs the same seconds, always.
2. More load never costs less.
3. A step that decodes and prefills is one step: it reads the weights once and pays the overhead once.

Source: paper §8 (costs from first principles); Williams et al. 2009 (the roofline).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiderl.profiles.schema import HardwareProfile, ModelProfile
from tiderl.profiles.work import ModelWork

#: The reduction's gradients are in fp32, whatever the model's type (`trainers/fsdp.py`).
_GRADIENT_BYTES = 4
#: Held of the optimizer: fp32 master weights and AdamW's two moments.
_OPTIMIZER_BYTES = 12
#: Moved by an update, of every parameter of the shard, all in fp32. Clipping: the norm reads the gradient (4), scaling reads and
#: writes it (8). AdamW, one fused pass: reads gradient, master weight and moments (16), writes weight and moments (12).
_UPDATE_BYTES = 40
#: `rl.loss.token_log_probs` makes logits for so many rows at a time, and holds three fp32 copies: scaled, log-softmax, gradient.
_HEAD_CHUNK_ROWS = 1024
_BYTES_PER_LOGIT = 12
#: transformers computes norms in fp32 and keeps their inputs so.
_NORM_BYTES = 4


@dataclass(frozen=True, slots=True)
class StepLoad:
    """One engine step. `prefill_chunks`: (tokens computed, tokens of its context before them) per prompt chunk."""

    num_decodes: int
    #: Sum of the decoding requests' context tokens, which the step reads from the KV cache.
    decode_context_tokens: int
    prefill_chunks: tuple[tuple[int, int], ...] = ()


class CostModel:
    """Seconds on one GPU. Build with `tiderl.profiles.files.load(hardware_path, model_path)`."""

    def __init__(self, hardware: HardwareProfile, model: ModelProfile) -> None:
        self.hardware = hardware
        self.model = model
        self.work = work = ModelWork(model)
        share, peak = hardware.efficiency, hardware.peak_flops_per_s
        self._memory_bytes_per_s = hardware.memory_bytes_per_s * share.memory_bandwidth
        self._nvlink_bytes_per_s = hardware.nvlink_bytes_per_s * share.nvlink
        self._network_bytes_per_s = hardware.network_bytes_per_s * share.network
        self._pcie_bytes_per_s = hardware.pcie_bytes_per_s * share.pcie
        # An engine step is priced hundreds of times a second by every emulated rank: seconds a unit, once and for all.
        decode, prefill = peak * share.decode_compute, peak * share.prefill
        self._decode_s = (work.token_flops + work.head_flops) / decode
        self._decode_pair_s = work.pair_flops / decode
        self._prefill_token_s = work.token_flops / prefill
        self._prefill_chunk_s = work.head_flops / prefill
        self._prefill_pair_s = work.pair_flops / prefill
        self._weights_read_s = work.weights_read_bytes / self._memory_bytes_per_s
        self._context_read_s = work.kv_bytes_per_token / self._memory_bytes_per_s
        self._state_moved_s = work.state_moved_bytes / self._memory_bytes_per_s
        self._overhead_s = share.step_overhead_s

    def engine_step_s(self, load: StepLoad) -> float:
        """overhead + max(compute, memory), where

        compute = decode FLOPs / (peak * decode_compute) + prefill FLOPs / (peak * prefill),
        memory = (weights + KV cache read + states moved) / (memory bandwidth * its efficiency).
        """
        num_decodes, context_tokens = load.num_decodes, load.decode_context_tokens
        compute_s = self._decode_s * num_decodes + self._decode_pair_s * context_tokens
        for num_tokens, before in load.prefill_chunks:
            pairs = num_tokens * (before + 0.5 * (num_tokens + 1))
            compute_s += self._prefill_chunk_s + self._prefill_token_s * num_tokens + self._prefill_pair_s * pairs
        memory_s = self._weights_read_s + self._context_read_s * context_tokens + self._state_moved_s * num_decodes
        return self._overhead_s + (compute_s if compute_s > memory_s else memory_s)

    def forward_s(self, lengths: Sequence[int]) -> float:
        """A training forward over packed sequences of these lengths (the reference's too): FLOPs / (peak * forward).

        Micro-batches have thousands of tokens, so reading the weights is hidden.
        """
        return self.work.training_flops(lengths) / (self.hardware.peak_flops_per_s * self.hardware.efficiency.forward)

    def backward_s(self, lengths: Sequence[int], *, checkpoint_layers: bool) -> float:
        """2 forwards' FLOPs / (peak * backward), 3 where the layers are recomputed."""
        num_forwards = 3 if checkpoint_layers else 2
        return (
            num_forwards
            * self.work.training_flops(lengths)
            / (self.hardware.peak_flops_per_s * self.hardware.efficiency.backward)
        )

    def optimizer_s(self, num_actors: int) -> float:
        """Gradient reduction over the actors and the update of one shard.

        Reduce-scatter of fp32 gradients, `_UPDATE_BYTES` a parameter of the shard at the memory's bandwidth. The new parameters
        are gathered when the next step begins (`gather_s`).
        """
        reduce_s = self.ring_bytes(num_actors, _GRADIENT_BYTES) / self.ring_bytes_per_s(num_actors)
        return reduce_s + self.update_s(num_actors)

    def update_s(self, num_actors: int) -> float:
        """Clipping and AdamW over one actor's shard."""
        return _UPDATE_BYTES * self.model.num_parameters / num_actors / self._memory_bytes_per_s

    def swap_s(self, num_bytes: int) -> float:
        """One way between host and GPU: bytes / (PCIe a direction * its efficiency)."""
        return num_bytes / self._pcie_bytes_per_s

    def gather_s(self, num_actors: int) -> float:
        """All parameters, in the model's type, from the actors' shards to every actor."""
        return self.ring_bytes(num_actors, self.model.dtype_bytes) / self.ring_bytes_per_s(num_actors)

    def ring_bytes(self, num_ranks: int, bytes_per_parameter: int) -> float:
        """What every rank sends in a ring's all-gather or reduce-scatter of all parameters: all but its own part."""
        return bytes_per_parameter * self.model.num_parameters * (num_ranks - 1) / num_ranks

    def ring_bytes_per_s(self, num_ranks: int) -> float:
        """Of every rank in a ring over ranks 0 .. num_ranks-1, which fill node after node.

        Inside a node NVLink carries it. Across nodes NCCL lays a ring through every network port of the ranks' own, so that the
        node with the fewest of them, the last one, is the narrow place.
        """
        gpus_per_node = self.hardware.gpus_per_node
        if num_ranks <= gpus_per_node:
            return self._nvlink_bytes_per_s
        num_ports = num_ranks % gpus_per_node or gpus_per_node
        return min(self._nvlink_bytes_per_s, num_ports * self._network_bytes_per_s)

    def sync_s(self, num_receivers: int) -> float:
        """Broadcast of all weights from the leader: bytes / (the slowest link * its efficiency) + hop latency * receivers.

        Through a chain, in which every rank sends on what it has, so that the slowest link counts once. Leader and receivers that
        fill more than a node meet the network, where a rank has its own port.
        """
        if num_receivers == 0:
            return 0.0
        inside = num_receivers < self.hardware.gpus_per_node
        bytes_per_s = self._nvlink_bytes_per_s if inside else min(self._nvlink_bytes_per_s, self._network_bytes_per_s)
        return self.weight_bytes / bytes_per_s + num_receivers * self.hardware.hop_latency_s

    def load_s(self) -> float:
        """Weights that have arrived on the GPU into the engine's own tensors: every byte read and written."""
        return 2 * self.weight_bytes / self._memory_bytes_per_s

    @property
    def num_parameters(self) -> int:
        return self.model.num_parameters

    @property
    def weight_bytes(self) -> int:
        return self.model.num_parameters * self.model.dtype_bytes

    @property
    def memory_bytes(self) -> int:
        """Of the GPU."""
        return self.hardware.memory_bytes

    def kv_cache_tokens(self, gpu_memory_share: float, *, num_sequences: int = 0) -> int:
        """What is left of a GPU's memory for the KV cache of one engine, in tokens; 0 where the weights alone are too much.

        Left of the share by weights, workspace, and the states of `num_sequences` sequences at once (which only a model with linear
        attention has).
        """
        states = num_sequences * self.model.state_bytes_per_sequence
        taken = self.weight_bytes + self.hardware.engine_workspace_bytes + states
        return max(0, int(self.hardware.memory_bytes * gpu_memory_share) - taken) // self.model.kv_bytes_per_token

    def trainer_bytes(self, num_actors: int, *, reference: bool) -> int:
        """Resident bytes of an actor in a step: weights, fp32 gradients, its shard of the optimizer, the reference.

        As `trainers/fsdp.py` holds them: weights and gradients whole from `begin_step` to `end_step`, the shard (fp32 master
        weights, two moments) always. The shard's own gradients take the whole ones' place, layer by layer.
        """
        parameters = self.model.num_parameters
        weights = self.weight_bytes * (2 if reference else 1)
        return weights + _GRADIENT_BYTES * parameters + _OPTIMIZER_BYTES * parameters // num_actors

    def activation_bytes(self, num_tokens: int, *, checkpoint_layers: bool) -> int:
        """Of one micro-batch between its forward and its backward.

        Counted as Korthikanti et al. 2022 (arXiv:2205.05198, §4.1) count, for what `trainers/model.py` runs: no dropout,
        fused attention (no scores are kept), a gated MLP, and norms in fp32. With hidden size h, widths q and k of queries
        and keys and MLP width f, a layer keeps of a token: the inputs of two norms in fp32 (2 h), what comes of them before
        and after their weight (4 h); queries, attention's output and a copy in the tokens' order (3 q), keys and values (2
        k); gate, activated gate, up and product (4 f). Recomputed layers keep their inputs (h) alone, and the one at work
        the rest. Logits are recomputed chunk by chunk (`trainer.checkpoint_head`). Linear attention is taken to keep as
        much as full attention.
        """
        model = self.model
        widths = 4 * model.hidden_size + 3 * model.query_width + 2 * model.kv_width + 4 * model.intermediate_size
        layer = widths * model.dtype_bytes + 2 * model.hidden_size * _NORM_BYTES
        inputs = model.num_layers * model.hidden_size * model.dtype_bytes
        layers = inputs + layer if checkpoint_layers else model.num_layers * layer
        logits = min(num_tokens, _HEAD_CHUNK_ROWS) * model.vocab_size * _BYTES_PER_LOGIT
        return num_tokens * layers + logits
