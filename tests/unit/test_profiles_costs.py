"""Invariants of tiderl/profiles/costs.py: cases by hand, the arithmetic beside them, and properties of every load."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.profile_fakes import ROUND_GPU, ROUND_HYBRID, ROUND_MODEL, round_costs
from tiderl.profiles.costs import CostModel, StepLoad
from tiderl.profiles.files import load
from tiderl.profiles.schema import ModelProfile

PROFILES = Path(__file__).resolve().parents[2] / "configs" / "profiles"

# The round model: 2 x 1,000,000 = 2e6 FLOPs a token in the layers, 2 x 200,000 = 4e5 in the head, 4 x 4 layers x 64 = 1024 a pair.
# Weights read in a step: 1,200,000 x 2 = 2.4e6 bytes. The round GPU: memory 1e9 x 0.6 = 6e8 byte/s, decode 1e12 x 0.25 = 2.5e11
# FLOP/s, prefill 5e11, forward 4e11, backward 5e11, overhead 1 ms.


def test_decode_step_bound_by_memory() -> None:
    # memory (2.4e6 + 1000 x 512) / 6e8 = 4.853333 ms; compute (10 x 2.4e6 + 1000 x 1024) / 2.5e11 = 0.1001 ms
    assert round_costs().engine_step_s(StepLoad(10, 1000)) == pytest.approx(5.853333e-3, rel=1e-6)


def test_decode_step_bound_by_compute() -> None:
    # compute (1000 x 2.4e6 + 2000 x 1024) / 2.5e11 = 9.608192 ms; memory (2.4e6 + 2000 x 512) / 6e8 = 5.706667 ms
    assert round_costs().engine_step_s(StepLoad(1000, 2000)) == pytest.approx(10.608192e-3)


def test_prefill_of_a_chunk_after_context() -> None:
    # 2000 tokens after 500: pairs 2000 x 500 + 2000 x 2001 / 2 = 3,001,000
    # FLOPs 2000 x 2e6 + 4e5 + 3,001,000 x 1024 = 7.073424e9; / 5e11 = 14.146848 ms (reading the weights: 4 ms)
    assert round_costs().engine_step_s(StepLoad(0, 0, ((2000, 500),))) == pytest.approx(15.146848e-3)


def test_short_prefill_waits_for_the_weights() -> None:
    # FLOPs 10 x 2e6 + 4e5 + 55 x 1024 = 2.045632e7, 0.04 ms; weights 2.4e6 / 6e8 = 4 ms
    assert round_costs().engine_step_s(StepLoad(0, 0, ((10, 0),))) == pytest.approx(5e-3)


def test_mixed_step_is_one_step() -> None:
    # The prefill's 14.146848 ms and the decodes' 9.608192 ms (both from above), one overhead; the weights are read meanwhile.
    assert round_costs().engine_step_s(StepLoad(1000, 2000, ((2000, 500),))) == pytest.approx(24.755040e-3)


def test_decoding_requests_move_their_states() -> None:
    # Hybrid: (2.4e6 + 1000 x 256 + 10 x 2 x 50,000) / 6e8 = 6.093333 ms
    assert round_costs(ROUND_HYBRID).engine_step_s(StepLoad(10, 1000)) == pytest.approx(1e-3 + 3.656e6 / 6e8)


def test_decode_step_of_a_real_model() -> None:
    # Qwen2.5-7B on an H100, one request with 1000 tokens of context: 2 x (6,525,621,760 + 544,997,376) bytes of weights and
    # 1000 x 57,344 of cache at 3.35e12 x 0.77 byte/s are 5.5044 ms; the overhead is 2 ms.
    costs = load(PROFILES / "h100_sxm.toml", PROFILES / "qwen2.5_7b.toml")
    assert costs.engine_step_s(StepLoad(1, 1000)) == pytest.approx(7.5044e-3, rel=1e-5)


def test_training_passes() -> None:
    # Lengths 100 and 50: pairs 100 x 101 / 2 + 50 x 51 / 2 = 6325; FLOPs 150 x 2.4e6 + 6325 x 1024 = 3.664768e8
    costs = round_costs()
    assert costs.forward_s([100, 50]) == pytest.approx(3.664768e8 / 4e11)
    assert costs.backward_s([100, 50], checkpoint_layers=False) == pytest.approx(2 * 3.664768e8 / 5e11)
    assert costs.backward_s([100, 50], checkpoint_layers=True) == pytest.approx(3 * 3.664768e8 / 5e11)


def test_optimizer_inside_a_node() -> None:
    # 2 actors. Reduce-scatter: 4 x 1.4e6 bytes x 1/2 at 1e9 x 0.5 = 5.6 ms. Update: 40 x 1.4e6 / 2 bytes at 6e8 = 46.666667 ms.
    # The gathering when the next step begins: 2 x 1.4e6 bytes x 1/2 at 5e8 = 2.8 ms.
    costs = round_costs()
    assert costs.optimizer_s(2) == pytest.approx(52.266667e-3, rel=1e-6)
    assert costs.gather_s(2) == pytest.approx(2.8e-3)


def test_optimizer_across_nodes() -> None:
    # 6 actors on nodes of 4: the last node has 2 ports of 1e8 x 0.8, so a ring gets 1.6e8 byte/s.
    # 4 x 1.4e6 x 5/6 / 1.6e8 = 29.166667 ms; 40 x 1.4e6 / 6 / 6e8 = 15.555556 ms; 2 x 1.4e6 x 5/6 / 1.6e8 = 14.583333 ms
    assert round_costs().optimizer_s(6) == pytest.approx(44.722222e-3, rel=1e-6)
    assert round_costs().gather_s(6) == pytest.approx(14.583333e-3, rel=1e-6)


def test_a_ring_across_nodes_is_no_faster_than_nvlink() -> None:
    fast = dataclasses.replace(ROUND_GPU, network_bytes_per_s=1e10)
    assert CostModel(fast, ROUND_MODEL).ring_bytes_per_s(8) == round_costs().ring_bytes_per_s(4) == pytest.approx(5e8)


def test_one_actor_only_updates() -> None:
    # 40 x 1.4e6 bytes at 6e8
    assert round_costs().optimizer_s(1) == pytest.approx(93.333333e-3, rel=1e-6)
    assert round_costs().gather_s(1) == 0.0


def test_swap() -> None:
    # 1e6 bytes at 1e8 x 0.5
    assert round_costs().swap_s(1_000_000) == pytest.approx(20e-3)


def test_sync() -> None:
    costs = round_costs()
    # 2.8e6 bytes at 5e8 (NVLink: leader and 3 receivers fill a node) and 3 hops of 1 ms
    assert costs.sync_s(3) == pytest.approx(8.6e-3)
    # The fourth is on another node: 2.8e6 bytes at 1e8 x 0.8, and 4 hops
    assert costs.sync_s(4) == pytest.approx(39e-3)
    assert costs.sync_s(0) == 0.0


def test_load() -> None:
    # 2.8e6 bytes read and written at 6e8
    assert round_costs().load_s() == pytest.approx(2 * 2.8e6 / 6e8)


def test_kv_capacity() -> None:
    costs = round_costs()
    # 10,000,000 x 0.8 - 2,800,000 of weights - 1,000,000 of workspace = 4,200,000 bytes, 8203.1 times 512
    assert costs.kv_cache_tokens(0.8) == 8203
    # Weights and workspace alone take 0.38.
    assert costs.kv_cache_tokens(0.3) == 0
    # Without linear attention sequences have no states.
    assert costs.kv_cache_tokens(0.8, num_sequences=50) == 8203
    # With it 20 x 50,000 bytes less: 3,200,000 / 256
    assert round_costs(ROUND_HYBRID).kv_cache_tokens(0.8, num_sequences=20) == 12_500


def test_trainer_memory() -> None:
    # 4 actors: weights 2.8e6, gradients 4 x 1.4e6, optimizer 12 x 1.4e6 / 4; the reference is another 2.8e6
    costs = round_costs()
    assert costs.trainer_bytes(4, reference=False) == 12_600_000
    assert costs.trainer_bytes(4, reference=True) == 15_400_000
    assert (costs.weight_bytes, costs.memory_bytes, costs.num_parameters) == (2_800_000, 10_000_000, 1_400_000)


def test_activations() -> None:
    costs = round_costs()
    # A layer, of a token: 2 x (4 x 100 + 3 x 64 + 2 x 32 + 4 x 300) + 4 x 2 x 100 = 4512 bytes. Logits: 12 bytes x 2000.
    assert costs.activation_bytes(10, checkpoint_layers=False) == 10 * 4 * 4512 + 10 * 24_000
    # Four inputs of 200 bytes, and one layer at work.
    assert costs.activation_bytes(10, checkpoint_layers=True) == 10 * (800 + 4512) + 10 * 24_000
    # Never more logits than of 1024 rows.
    assert costs.activation_bytes(5000, checkpoint_layers=True) == 5000 * 5312 + 1024 * 24_000


CHUNKS = st.lists(st.tuples(st.integers(1, 8192), st.integers(0, 32_768)), max_size=4)
LOADS = st.builds(
    lambda contexts, chunks: StepLoad(len(contexts), sum(contexts), tuple(chunks)),
    st.lists(st.integers(1, 32_768), max_size=64),
    CHUNKS,
)
MODELS = st.sampled_from([ROUND_MODEL, ROUND_HYBRID])


@given(LOADS, MODELS, st.integers(1, 1000), st.integers(1, 1000))
def test_more_load_never_costs_less(load_: StepLoad, model: ModelProfile, extra: int, context: int) -> None:
    costs = round_costs(model)
    base_s = costs.engine_step_s(load_)
    decodes, tokens, chunks = load_.num_decodes, load_.decode_context_tokens, load_.prefill_chunks
    grown = [
        StepLoad(decodes + extra, tokens + extra * context, chunks),
        StepLoad(decodes, tokens + extra, chunks),
        StepLoad(decodes, tokens, (*chunks, (extra, context))),
        *(StepLoad(decodes, tokens, ((n + extra, before), *chunks[1:])) for n, before in chunks[:1]),
        *(StepLoad(decodes, tokens, ((n, before + extra), *chunks[1:])) for n, before in chunks[:1]),
    ]
    assert all(costs.engine_step_s(more) >= base_s for more in grown)


@given(LOADS, MODELS)
def test_a_step_agrees_with_its_work(load_: StepLoad, model: ModelProfile) -> None:
    """`engine_step_s` has its constants computed beforehand; by the formula of its docstring it is the same."""
    costs = round_costs(model)
    work = costs.work
    decode_s = work.decode_flops(load_.num_decodes, load_.decode_context_tokens) / 2.5e11
    compute_s = decode_s + work.prefill_flops(load_.prefill_chunks) / 5e11
    memory_s = work.step_bytes(load_.num_decodes, load_.decode_context_tokens) / 6e8
    assert costs.engine_step_s(load_) == pytest.approx(0.001 + max(compute_s, memory_s))
    assert costs.engine_step_s(load_) == round_costs(model).engine_step_s(load_)


@given(LOADS, LOADS)
def test_two_steps_never_cost_less_than_one_of_both(one: StepLoad, other: StepLoad) -> None:
    costs = round_costs()
    both = StepLoad(
        one.num_decodes + other.num_decodes,
        one.decode_context_tokens + other.decode_context_tokens,
        one.prefill_chunks + other.prefill_chunks,
    )
    # One overhead is saved, and at least that.
    assert costs.engine_step_s(both) <= (costs.engine_step_s(one) + costs.engine_step_s(other) - 0.001) * (1 + 1e-12)


@given(st.lists(st.integers(1, 8192), min_size=1, max_size=8), st.integers(1, 8192), st.booleans())
def test_more_training_never_costs_less(lengths: list[int], extra: int, checkpoint_layers: bool) -> None:
    costs = round_costs()
    longer, more = [lengths[0] + extra, *lengths[1:]], [*lengths, extra]
    for grown in (longer, more):
        assert costs.forward_s(grown) > costs.forward_s(lengths)
        assert costs.backward_s(grown, checkpoint_layers=checkpoint_layers) > costs.backward_s(
            lengths, checkpoint_layers=checkpoint_layers
        )
    assert costs.activation_bytes(sum(more), checkpoint_layers=checkpoint_layers) > costs.activation_bytes(
        sum(lengths), checkpoint_layers=checkpoint_layers
    )


@given(st.integers(0, 10**9), st.integers(1, 10**9), st.integers(1, 40), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_more_bytes_receivers_or_memory_never_less(
    num_bytes: int, extra: int, num_ranks: int, share: float, other_share: float
) -> None:
    costs = round_costs()
    assert costs.swap_s(num_bytes + extra) > costs.swap_s(num_bytes)
    assert costs.sync_s(num_ranks + 1) > costs.sync_s(num_ranks)
    assert costs.trainer_bytes(num_ranks + 1, reference=True) <= costs.trainer_bytes(num_ranks, reference=True)
    low, high = sorted((share, other_share))
    assert costs.kv_cache_tokens(low) <= costs.kv_cache_tokens(high)
