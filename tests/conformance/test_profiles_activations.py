"""`CostModel.activation_bytes` against what autograd really keeps of the trainer's model, layer by layer."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.unit.profile_fakes import ROUND_GPU, ROUND_MODEL
from tiderl.profiles.costs import CostModel
from tiderl.trainers.attention import PACKED_ATTENTION, register_packed_attention
from tiderl.trainers.model import PackedCausalLM

NUM_TOKENS = 512
#: Wide enough that what is not counted (a norm's scale and a softmax's sum, a few numbers a token) stays below 1 %.
MODEL = dataclasses.replace(
    ROUND_MODEL,
    hidden_size=256,
    intermediate_size=1024,
    num_query_heads=4,
    num_kv_heads=1,
    head_dim=64,
    embedding_parameters=512 * 256,
    head_parameters=512 * 256,
)


def kept_bytes(num_layers: int, *, checkpoint_layers: bool) -> int:
    """Of storages that the graph of a forward holds, parameters left out."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    register_packed_attention()
    config = Qwen2Config(
        vocab_size=MODEL.vocab_size,
        hidden_size=MODEL.hidden_size,
        intermediate_size=MODEL.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=MODEL.num_query_heads,
        num_key_value_heads=MODEL.num_kv_heads,
        tie_word_embeddings=False,
        attn_implementation=PACKED_ATTENTION,
    )
    causal_lm = Qwen2ForCausalLM(config).to(torch.bfloat16).eval()
    model = PackedCausalLM(causal_lm, checkpoint_head=True, checkpoint_layers=checkpoint_layers)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}  # holds the tensors, so that no address is used twice

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in parameters:
            kept[address] = tensor
        return tensor

    token_ids = torch.arange(NUM_TOKENS)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(token_ids, token_ids, (NUM_TOKENS,), token_ids[-8:], token_ids[-8:], 1.0)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("checkpoint_layers", [False, True])
def test_what_a_layer_adds(checkpoint_layers: bool) -> None:
    def counted(num_layers: int) -> int:
        costs = CostModel(ROUND_GPU, dataclasses.replace(MODEL, num_layers=num_layers))
        return costs.activation_bytes(NUM_TOKENS, checkpoint_layers=checkpoint_layers)

    kept = kept_bytes(4, checkpoint_layers=checkpoint_layers) - kept_bytes(2, checkpoint_layers=checkpoint_layers)
    assert counted(4) - counted(2) == pytest.approx(kept, rel=0.01)
