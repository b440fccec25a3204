"""Validation: what passes, and for each fault the setting that the complaint names."""

from __future__ import annotations

from typing import Any

import pytest

from tiderl.config.load import from_dict, overlay, to_dict
from tiderl.config.schema import Config
from tiderl.config.validate import _RANGES, numbers, validate
from tiderl.errors import ConfigError

GOOD = overlay(Config(), {"model": {"path": "models/x"}, "env": {"urls": ["http://127.0.0.1:8300"]}})


EMULATED = {
    "engine.kind": "emulated", "trainer.kind": "emulated", "checkpoint.export_hf": False, "model.path": "",
}  # fmt: skip


def changed(changes: dict[str, Any]) -> Config:
    """`GOOD` with settings by dotted path; a value that no file could hold (NaN) passes too."""
    tree = to_dict(GOOD)
    for path, value in changes.items():
        section, name = path.split(".")
        tree[section][name] = value
    return from_dict(tree)


def test_the_defaults_pass_with_a_model_a_server_and_two_ranks() -> None:
    validate(GOOD, 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"roles.num_actors": 7},
        {"roles.num_actors": 3, "roles.num_ref": 4, "loss.kl_weight": 0.1, "schedule.pipelining": "decoupled"},
        {"engine.kv_cache_tokens": 8640},  # 8640 * 0.95 = 8208 >= 8192
        {"engine.kv_cache_tokens": 8192, "rollout.kv_reserve": 0},
        {"schedule.max_staleness": 0},
        {"train.group_size": 2},
        {"eval.every": 0, "checkpoint.every": 0},
        {"env.urls": ["http://10.0.0.5:8300/env", "https://[::1]:8300"]},
        {"loss.old_log_probs": "trainer", "loss.tis_cap": 2.0},
        {"optim.lr": 0, "optim.betas": [0, 0.999]},
        {"model.max_context_tokens": 16384},
        EMULATED,
        EMULATED | {"emulate.time_scale": 0.25},
        {"agent.max_new_tokens": 8191},
    ],
    ids=str,
)
def test_the_edge_of_what_is_right_passes(changes: dict[str, Any]) -> None:
    validate(changed(changes), 8)


@pytest.mark.parametrize(
    ("changes", "path", "advice"),
    [
        ({"roles.num_actors": 0}, "roles.num_actors", "must be at least 1, got 0"),
        ({"roles.num_actors": 3, "roles.num_ref": 5, "loss.kl_weight": 0.1}, "roles.num_ref", "use at most 4"),
        ({"roles.num_ref": 1}, "roles.num_ref", "there is no reference to hold; set it to 0"),
        ({"roles.num_ref": 1, "loss.kl_weight": 0.1, "schedule.mode": "stream"}, "roles.num_ref", "have nothing to do"),
        (
            {"roles.num_ref": 1, "loss.kl_weight": 0.1, "schedule.pipelining": "colocated"},
            "roles.num_ref",
            "have nothing to do; set it to 0",
        ),
        ({"schedule.pipelining": "decoupled"}, "schedule.pipelining", "needs Ref ranks; set roles.num_ref"),
        ({"trainer.window_tokens": -1}, "trainer.window_tokens", "must be at least 0"),
        ({"roles.num_actors": 8}, "roles.num_actors", "8 of 8 ranks leave none for rollout; use at most 7"),
        ({"engine.kind": "emulated"}, "trainer.kind", 'set both to "emulated", or neither'),
        ({"trainer.kind": "emulated"}, "trainer.kind", 'set both to "emulated", or neither'),
        ({"emulate.time_scale": 2.0}, "emulate.time_scale", "real backends take real time; leave it at 1"),
        (EMULATED | {"emulate.time_scale": 0.0}, "emulate.time_scale", "must be above 0, got 0"),
        (EMULATED | {"checkpoint.export_hf": True}, "checkpoint.export_hf", "set it to false"),
        (EMULATED | {"emulate.hardware": ""}, "emulate.hardware", "is empty; give a profile"),
        (EMULATED | {"emulate.model": ""}, "emulate.model", "is empty; give a profile"),
        ({"run.prometheus_port": 65536}, "run.prometheus_port", "at least 0 and at most 65535"),
        ({"train.group_size": 1}, "train.group_size", "must be at least 2, got 1"),
        ({"train.steps": 0}, "train.steps", "must be at least 1"),
        ({"agent.temperature": 0}, "agent.temperature", "must be above 0, got 0"),
        ({"eval.temperature": -0.1}, "eval.temperature", "must be at least 0"),
        ({"eval.num_tasks": 0}, "eval.num_tasks", "must be at least 1"),
        ({"eval.max_wait_s": 0}, "eval.max_wait_s", "must be above 0"),
        ({"schedule.max_staleness": -1}, "schedule.max_staleness", "must be at least 0"),
        ({"agent.max_new_tokens": 8192}, "agent.max_new_tokens", r"leave no room .*model.max_context_tokens \(8192\)"),
        ({"trainer.max_micro_batch_tokens": 8191}, "trainer.max_micro_batch_tokens", "use at least 8192"),
        ({"engine.kv_cache_tokens": 8650}, "engine.kv_cache_tokens", r"not a multiple of engine.block_size \(32\)"),
        # 8192 / 0.95 = 8623.2, and the next multiple of 32 is 8640.
        ({"engine.kv_cache_tokens": 8608}, "engine.kv_cache_tokens", "use at least 8640"),
        ({"engine.gpu_memory_share": 1.1}, "engine.gpu_memory_share", "must be above 0 and at most 1, got 1.1"),
        ({"rollout.kv_reserve": 1.0}, "rollout.kv_reserve", "must be at least 0 and below 1"),
        ({"loss.clip_low": 1.0}, "loss.clip_low", "must be above 0 and below 1"),
        ({"loss.clip_high": 0.0}, "loss.clip_high", "must be above 0"),
        ({"loss.tis_cap": 2.0}, "loss.tis_cap", 'set loss.old_log_probs = "trainer"'),
        ({"optim.betas": [0.9, 1.0]}, "optim.betas[1]", "must be at least 0 and below 1"),
        ({"model.path": ""}, "model.path", "give a Hugging Face model folder"),
        ({"env.name": ""}, "env.name", "name an environment"),
        ({"env.urls": []}, "env.urls", "tiderl env serve"),
        ({"env.urls": ["127.0.0.1:8300"]}, "env.urls[0]", "does not start with http"),
        ({"env.urls": ["http://a", "ftp://b"]}, "env.urls[1]", "does not start with http"),
        ({"env.urls": ["http://"]}, "env.urls[0]", "names no host"),
        ({"env.urls": ["http://a:99999"]}, "env.urls[0]", "is not a URL"),
        ({"env.urls": ["http://a/?x=1"]}, "env.urls[0]", "has more than scheme, host, port and path"),
        ({"env.urls": ["http://user:secret@a"]}, "env.urls[0]", "has more than scheme, host, port and path"),
        ({"env.urls": ["http://a", "http://a"]}, "env.urls[1]", "comes twice"),
        ({"timeouts.sync_s": 0}, "timeouts.sync_s", "must be above 0"),
        ({"timeouts.lost_s": 4.0}, "timeouts.lost_s", r"4 s must be above 2 x timeouts.heartbeat_s \(2 s\)"),
        ({"wire.max_message_bytes": 1000}, "wire.max_message_bytes", "must be at least 1.04858e"),
    ],
    ids=str,
)
def test_a_fault_names_its_setting_and_what_would_be_right(changes: dict[str, Any], path: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice) as caught:
        validate(changed(changes), 8)
    assert caught.value.path == path


def test_every_number_of_the_schema_has_a_range() -> None:
    assert {path for path, _ in numbers(Config())} == set(_RANGES)


@pytest.mark.parametrize("path", sorted(_RANGES))
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1])
def test_no_number_may_be_negative_or_not_finite(path: str, value: float) -> None:
    assert not _RANGES[path].holds(value)
