"""Invariants of tiderl/profiles/work.py."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.profile_fakes import ROUND_HYBRID, ROUND_MODEL
from tiderl.profiles.work import ModelWork, pairs


def test_work_of_the_round_model() -> None:
    work = ModelWork(ROUND_MODEL)
    assert (work.token_flops, work.head_flops, work.pair_flops) == (2_000_000, 400_000, 1024)
    assert work.weights_read_bytes == 2_400_000
    assert work.decode_flops(3, 100) == 3 * 2_400_000 + 100 * 1024
    assert work.step_bytes(3, 100) == 2_400_000 + 100 * 512


def test_layers_of_linear_attention_have_a_state_and_no_pairs() -> None:
    work = ModelWork(ROUND_HYBRID)
    assert work.pair_flops == 512
    assert work.step_bytes(3, 100) == 2_400_000 + 100 * 256 + 3 * 2 * 50_000


@given(st.integers(0, 60), st.integers(0, 60))
def test_pairs_are_those_of_a_causal_mask(num_tokens: int, before: int) -> None:
    allowed = [(q, k) for q in range(before, before + num_tokens) for k in range(before + num_tokens) if k <= q]
    assert pairs(num_tokens, before) == len(allowed)


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=8), st.integers(0, 8192))
def test_chunks_cost_what_the_whole_prompt_costs_and_a_head_each(sizes: list[int], before: int) -> None:
    work = ModelWork(ROUND_MODEL)
    chunks, context = [], before
    for size in sizes:
        chunks.append((size, context))
        context += size
    whole = work.prefill_flops([(sum(sizes), before)])
    assert work.prefill_flops(chunks) == whole + (len(sizes) - 1) * work.head_flops


@given(st.lists(st.integers(1, 8192), max_size=8))
def test_training_is_a_prefill_with_every_tokens_head(lengths: list[int]) -> None:
    work = ModelWork(ROUND_HYBRID)
    prefills = work.prefill_flops((n, 0) for n in lengths)
    assert work.training_flops(lengths) == prefills + (sum(lengths) - len(lengths)) * work.head_flops


@given(st.integers(1, 4096), st.integers(0, 8192))
def test_decoding_is_a_prefill_of_one_token(num_tokens: int, before: int) -> None:
    work = ModelWork(ROUND_MODEL)
    tokens = [(1, before + n) for n in range(num_tokens)]
    contexts = sum(c + 1 for _, c in tokens)
    assert work.decode_flops(num_tokens, contexts) == work.prefill_flops(tokens)
