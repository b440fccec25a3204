"""Load to work: the FLOPs and the bytes that a load asks of a GPU. It follows from the model's shapes alone.

With c tokens of context before it, a token meets every matrix of the layers once (2 FLOPs a parameter), and in every layer of full
attention the query meets c + 1 keys and values (2 FLOPs each, a query head's width): n tokens after c meet n * c + n * (n + 1) / 2
pairs. Left out are norms and activation functions, linear attention's own recurrence (0.6 % of Qwen3.5-9B's FLOPs), and the vision
tower, whose share depends on images that a load does not tell of.

Invariants (tests/unit/test_profiles_work.py):

1. Splitting a prompt into chunks changes its FLOPs by the head of one token a chunk, and by nothing else.
2. A training forward over a sequence is its prefill with the head at every token.

Source: Narayanan et al. 2021 (arXiv:2104.04473), appendix, for a token's FLOPs; paper §8 (costs from first principles).
"""

from __future__ import annotations

from collections.abc import Iterable

from tiderl.profiles.schema import ModelProfile


class ModelWork:
    """FLOPs and bytes of a model's loads."""

    def __init__(self, model: ModelProfile) -> None:
        self.token_flops = 2 * model.layer_parameters
        self.head_flops = 2 * model.head_parameters
        #: Of a query that meets one key and its value, in all layers of full attention.
        self.pair_flops = 4 * model.num_full_attention_layers * model.query_width
        #: Weights that an engine step reads once, whatever its load: an embedding's rows are few, a vision tower's turn rare.
        self.weights_read_bytes = (model.layer_parameters + model.head_parameters) * model.dtype_bytes
        self.kv_bytes_per_token = model.kv_bytes_per_token
        #: A decoding request reads its state and writes it back.
        self.state_moved_bytes = 2 * model.state_bytes_per_sequence

    def prefill_flops(self, chunks: Iterable[tuple[int, int]]) -> int:
        """Of prompt chunks (tokens computed, tokens of context before them); the head runs at the last token of each."""
        return sum(
            self.token_flops * num_tokens + self.head_flops + self.pair_flops * pairs(num_tokens, before)
            for num_tokens, before in chunks
        )

    def decode_flops(self, num_decodes: int, context_tokens: int) -> int:
        """Of one token of each decoding request; `context_tokens` is the sum of what they look at, themselves included."""
        return (self.token_flops + self.head_flops) * num_decodes + self.pair_flops * context_tokens

    def training_flops(self, lengths: Iterable[int]) -> int:
        """Of a forward over sequences of these lengths, with the head at every token.

        An upper bound: the FSDP trainer runs the head only where a token was generated, which saves up to 8 % (Qwen2.5-7B) or 15 %
        (Qwen3.5-9B) where these are few. A fitted efficiency makes up for it.
        """
        return sum((self.token_flops + self.head_flops) * n + self.pair_flops * pairs(n, 0) for n in lengths)

    def step_bytes(self, num_decodes: int, context_tokens: int) -> int:
        """What an engine step moves: the weights, the decoding requests' keys and values, their states."""
        moved = self.kv_bytes_per_token * context_tokens + self.state_moved_bytes * num_decodes
        return self.weights_read_bytes + moved


def pairs(num_tokens: int, before: int) -> int:
    """Of a query and a key that it may look at, in a causal chunk of `num_tokens` after `before` tokens of context."""
    return num_tokens * before + num_tokens * (num_tokens + 1) // 2
