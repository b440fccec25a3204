"""The plan of `--dry-run`: its numbers, against numbers worked out by hand."""

from __future__ import annotations

import re

from tiderl.config.load import overlay
from tiderl.config.plan import describe
from tiderl.config.schema import Config

CONFIG = overlay(
    Config(),
    {
        "env": {"urls": ["http://a:1", "http://b:2"]},
        "roles": {"num_actors": 2},
        "model": {"dtype": "bfloat16", "max_context_tokens": 1000},
        "train": {"steps": 10, "groups_per_step": 3, "group_size": 4},
        "trainer": {"max_micro_batch_tokens": 2500},
        "engine": {"kv_cache_tokens": 6400},
        "rollout": {"kv_reserve": 0.25},
        "loss": {"kl_weight": 0.1},
    },
)


def row(text: str, name: str) -> str:
    found = re.search(rf"^  {name} +(.*)$", text, re.MULTILINE)
    assert found is not None, f"no row {name!r} in:\n{text}"
    return found[1]


def test_roles() -> None:
    text = describe(CONFIG, 8)
    assert row(text, "actor").startswith("ranks 0-1:")
    assert row(text, "rollout").startswith("ranks 2-7:")
    assert row(text, "ref").startswith("on the actors' ranks: scores what is ready")
    assert row(text, "environment") == "babyai at http://a:1, http://b:2"


def test_ref_ranks_come_between_actors_and_rollout() -> None:
    text = describe(overlay(CONFIG, {"roles": {"num_ref": 2}}), 8)
    assert row(text, "actor").startswith("ranks 0-1:")
    assert row(text, "ref") == "ranks 2-3: chosen step by step (pipeline)"
    assert row(text, "rollout").startswith("ranks 4-7:")
    fixed = describe(overlay(CONFIG, {"roles": {"num_ref": 1}, "schedule": {"pipelining": "decoupled"}}), 8)
    assert row(fixed, "ref") == "rank 2: decoupled"


def test_the_reference_of_other_modes() -> None:
    assert "scores the whole batch" in row(describe(overlay(CONFIG, {"schedule": {"mode": "async"}}), 8), "ref")
    assert "in turn" in row(describe(overlay(CONFIG, {"schedule": {"mode": "stream"}}), 8), "ref")
    assert row(describe(overlay(CONFIG, {"loss": {"kl_weight": 0.0}}), 8), "ref") == "none (loss.kl_weight is 0)"


def test_a_step() -> None:
    text = describe(CONFIG, 8)
    assert row(text, "groups") == "3 of 4 trajectories: 12 trajectories"
    assert row(text, "tokens") == "at most 12,000, 6,000 an actor"
    assert row(text, "micro-batch") == "at most 2,500 tokens: 2 of the longest trajectories"
    assert row(text, "trajectories alive") == "at most 24 (max_staleness 1)"
    assert row(text, "steps") == "10, 120 trajectories in all"


def test_the_kv_cache() -> None:
    text = describe(CONFIG, 8)
    assert row(text, "KV cache") == "6,400 tokens, 4,800 of them for admission"
    assert row(text, "longest tasks at once") == "4"
    assert "what the engine finds" in describe(Config(), 2)


def test_memory() -> None:
    # 2**30 parameters: 2 GiB of bf16 weights, 4 GiB of fp32 gradients, 16 GiB / 2 of master weights, moments, reduced gradients,
    # and 2 GiB of the frozen reference.
    text = describe(CONFIG, 8, 2**30)
    memory = text[text.index("Memory") :]
    assert row(memory, "actor") == (
        "16.0 GiB: weights 2.0 GiB, gradients 4.0 GiB, optimizer shard 8.0 GiB, reference 2.0 GiB"
    )
    assert row(memory, "rollout").startswith("2.0 GiB of weights")
    assert "not known" in describe(CONFIG, 8)


def test_without_a_kl_penalty_there_is_no_reference() -> None:
    text = describe(overlay(CONFIG, {"loss": {"kl_weight": 0.0}}), 8, 2**30)
    assert row(text, "ref") == "none (loss.kl_weight is 0)"
    assert row(text[text.index("Memory") :], "actor").startswith("14.0 GiB")


def test_every_timeout_is_in_the_table_of_waits() -> None:
    text = describe(CONFIG, 8)
    settings = [name for name in vars(CONFIG.timeouts) if name != "heartbeat_s"]
    assert [name for name in settings if f"timeouts.{name}" not in text] == []
