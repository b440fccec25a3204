"""Whether a job's settings make sense, alone and together. Pure: looks at nothing but the settings and the world's size.

Invariants (tests/unit/test_config_validate.py):

1. The defaults pass (given a model, a server and a world that holds all roles).
2. Each complaint is a `ConfigError` with the dotted path of the setting to change, its value, and what would be right.
3. No number that is not finite passes.

What needs the machine (does the folder exist, does the server answer) is checked where it is used.
"""

from __future__ import annotations

import dataclasses
import math
import urllib.parse
from collections.abc import Iterator
from typing import Any

from tiderl.config.schema import Config
from tiderl.errors import ConfigError


def validate(config: Config, world_size: int) -> None:
    """Raise `ConfigError` for the first setting that cannot work with `world_size` ranks."""
    _check_ranges(config)
    _check_roles(config, world_size)
    _check_environment(config)
    _check_lengths(config)
    _check_loss(config)
    _check_emulation(config)
    _check_waits(config)


@dataclasses.dataclass(frozen=True)
class _Range:
    """The values that a number may have by itself, whatever the others are."""

    low: float
    high: float = math.inf
    #: Whether `low` and `high` themselves are allowed.
    has_low: bool = True
    has_high: bool = True

    def holds(self, value: float) -> bool:
        above = value >= self.low if self.has_low else value > self.low
        below = value <= self.high if self.has_high else value < self.high
        return above and below and math.isfinite(value)

    def __str__(self) -> str:
        low = f"{'at least' if self.has_low else 'above'} {self.low:g}"
        high = f"{'at most' if self.has_high else 'below'} {self.high:g}"
        return low if math.isinf(self.high) else f"{low} and {high}"


_POSITIVE = _Range(0, has_low=False)
_NOT_NEGATIVE = _Range(0)
_ONE_OR_MORE = _Range(1)
_SHARE = _Range(0, 1)
_OPEN_SHARE = _Range(0, 1, has_high=False)

#: Every number of the schema; a test holds that none is left out.
_RANGES = {
    "run.seed": _NOT_NEGATIVE,
    "run.prometheus_port": _Range(0, 65535),
    "model.max_context_tokens": _Range(2),
    "roles.num_actors": _ONE_OR_MORE,
    "roles.num_ref": _NOT_NEGATIVE,
    "env.num_tasks": _NOT_NEGATIVE,
    "agent.max_turns": _ONE_OR_MORE,
    "agent.max_new_tokens": _ONE_OR_MORE,
    # Log-probs are those of logits / temperature, so a greedy training rollout has none.
    "agent.temperature": _POSITIVE,
    "rollout.max_tasks_per_rank": _ONE_OR_MORE,
    "rollout.growth_safety": _NOT_NEGATIVE,
    "rollout.length_quantile": _SHARE,
    "rollout.kv_reserve": _OPEN_SHARE,
    "rollout.resume_margin": _OPEN_SHARE,
    "rollout.diversity_penalty": _NOT_NEGATIVE,
    "rollout.spare_trajectories": _NOT_NEGATIVE,
    "rollout.task_timeout_s": _POSITIVE,
    "rollout.max_attempts": _ONE_OR_MORE,
    "rollout.max_failures_in_a_row": _ONE_OR_MORE,
    "engine.kv_cache_tokens": _NOT_NEGATIVE,
    "engine.block_size": _ONE_OR_MORE,
    "engine.max_running": _ONE_OR_MORE,
    "engine.max_batched_tokens": _ONE_OR_MORE,
    "engine.gpu_memory_share": _Range(0, 1, has_low=False),
    "train.steps": _ONE_OR_MORE,
    "train.groups_per_step": _ONE_OR_MORE,
    # A group of one has no advantage: its reward is its own mean.
    "train.group_size": _Range(2),
    "trainer.max_micro_batch_tokens": _ONE_OR_MORE,
    "loss.clip_low": _Range(0, 1, has_low=False, has_high=False),
    "loss.clip_high": _POSITIVE,
    "loss.kl_weight": _NOT_NEGATIVE,
    "loss.tis_cap": _NOT_NEGATIVE,
    "trainer.window_tokens": _NOT_NEGATIVE,
    "optim.lr": _NOT_NEGATIVE,
    "optim.betas[0]": _OPEN_SHARE,
    "optim.betas[1]": _OPEN_SHARE,
    "optim.eps": _POSITIVE,
    "optim.weight_decay": _NOT_NEGATIVE,
    "optim.max_grad_norm": _NOT_NEGATIVE,
    "optim.warmup_steps": _NOT_NEGATIVE,
    "optim.min_lr_ratio": _SHARE,
    "schedule.max_staleness": _NOT_NEGATIVE,
    "eval.every": _NOT_NEGATIVE,
    "eval.num_tasks": _ONE_OR_MORE,
    "eval.temperature": _NOT_NEGATIVE,
    "eval.max_wait_s": _POSITIVE,
    "checkpoint.every": _NOT_NEGATIVE,
    "checkpoint.keep": _ONE_OR_MORE,
    "wire.max_message_bytes": _Range(1024 * 1024),
    "wire.sync_bucket_bytes": _Range(1024),
    "wire.canary_tolerance": _NOT_NEGATIVE,
    "emulate.time_scale": _POSITIVE,
    "timeouts.start_s": _POSITIVE,
    "timeouts.heartbeat_s": _POSITIVE,
    "timeouts.lost_s": _POSITIVE,
    "timeouts.collective_s": _POSITIVE,
    "timeouts.sync_s": _POSITIVE,
    "timeouts.step_s": _POSITIVE,
    "timeouts.env_request_s": _POSITIVE,
    "timeouts.env_start_s": _POSITIVE,
    "timeouts.shutdown_s": _POSITIVE,
}


def numbers(section: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """The dotted path and value of every number in the settings, items of tuples as `path[i]`."""
    for field in dataclasses.fields(section):
        value, path = getattr(section, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from numbers(value, f"{path}.")
        for suffix, entry in (
            [(f"[{i}]", item) for i, item in enumerate(value)] if isinstance(value, tuple) else [("", value)]
        ):
            if isinstance(entry, int | float) and not isinstance(entry, bool):
                yield path + suffix, entry


def _check_ranges(config: Config) -> None:
    for path, value in numbers(config):
        if not _RANGES[path].holds(value):
            raise ConfigError(path, f"must be {_RANGES[path]}, got {value}")


def _check_roles(config: Config, world_size: int) -> None:
    num_actors, num_ref = config.roles.num_actors, config.roles.num_ref
    if num_actors >= world_size:
        raise ConfigError(
            "roles.num_actors",
            f"{num_actors} of {world_size} ranks leave none for rollout; use at most {world_size - 1}, or start more ranks",
        )
    if num_actors + num_ref >= world_size:
        raise ConfigError(
            "roles.num_ref",
            f"{num_ref} Ref ranks beside {num_actors} actors leave none of {world_size} ranks for rollout; use at most "
            f"{world_size - num_actors - 1}",
        )
    if num_ref and config.loss.kl_weight == 0:
        raise ConfigError(
            "roles.num_ref", f"{num_ref}, but loss.kl_weight is 0: there is no reference to hold; set it to 0"
        )
    schedule = config.schedule
    if num_ref and (schedule.mode != "tide" or schedule.pipelining == "colocated"):
        what = f'schedule.mode "{schedule.mode}"' if schedule.mode != "tide" else 'schedule.pipelining "colocated"'
        raise ConfigError("roles.num_ref", f"{num_ref}, but with {what} Ref ranks have nothing to do; set it to 0")
    if not num_ref and schedule.pipelining == "decoupled":
        raise ConfigError("schedule.pipelining", '"decoupled" needs Ref ranks; set roles.num_ref, or choose another')


def _check_environment(config: Config) -> None:
    if not config.env.name:
        raise ConfigError("env.name", "is empty; name an environment that the servers offer, such as babyai")
    if not config.env.urls:
        raise ConfigError(
            "env.urls", 'is empty; give the servers, such as ["http://127.0.0.1:8300"] (`tiderl env serve`)'
        )
    for index, url in enumerate(config.env.urls):
        problem = _url_problem(url)
        if problem:
            raise ConfigError(f"env.urls[{index}]", f"{url!r} {problem}; give a base URL such as http://10.0.0.5:8300")
        if url in config.env.urls[:index]:
            raise ConfigError(f"env.urls[{index}]", f"{url!r} comes twice; its capacity would be counted twice")


def _url_problem(url: str) -> str:
    try:
        parts = urllib.parse.urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        return f"is not a URL ({error})"
    if parts.scheme not in ("http", "https"):
        return "does not start with http:// or https://"
    if not has_host:
        return "names no host"
    if parts.query or parts.fragment or parts.username is not None:
        return "has more than scheme, host, port and path"
    return ""


def _check_lengths(config: Config) -> None:
    context, new = config.model.max_context_tokens, config.agent.max_new_tokens
    if not config.model.path and config.engine.kind != "emulated":
        raise ConfigError("model.path", "is empty; give a Hugging Face model folder")
    if new >= context:
        raise ConfigError(
            "agent.max_new_tokens", f"{new} leave no room for a prompt in model.max_context_tokens ({context})"
        )
    if config.trainer.max_micro_batch_tokens < context:
        raise ConfigError(
            "trainer.max_micro_batch_tokens",
            f"{config.trainer.max_micro_batch_tokens} cannot hold the longest trajectory; use at least {context} "
            "(model.max_context_tokens)",
        )
    cache, block = config.engine.kv_cache_tokens, config.engine.block_size
    if cache == 0:
        return
    if cache % block:
        raise ConfigError("engine.kv_cache_tokens", f"{cache} is not a multiple of engine.block_size ({block})")
    # Admission leaves the reserve free, and a task that needs more than all the rest would never start.
    usable = math.floor(cache * (1 - config.rollout.kv_reserve))
    if usable < context:
        needed = math.ceil(context / (1 - config.rollout.kv_reserve) / block) * block
        raise ConfigError(
            "engine.kv_cache_tokens",
            f"{cache} less rollout.kv_reserve hold no context of {context} tokens (model.max_context_tokens); "
            f"use at least {needed}",
        )


def _check_loss(config: Config) -> None:
    if config.loss.tis_cap > 0 and config.loss.old_log_probs == "rollout":
        raise ConfigError(
            "loss.tis_cap",
            'corrects trainer against engine log-probs, but both are the engine\'s here; set loss.old_log_probs = "trainer", '
            "or 0",
        )


def _check_emulation(config: Config) -> None:
    if (config.engine.kind == "emulated") != (config.trainer.kind == "emulated"):
        raise ConfigError(
            "trainer.kind",
            f"{config.trainer.kind!r} with engine.kind {config.engine.kind!r}: emulated backends have no weights to exchange "
            'with real ones; set both to "emulated", or neither',
        )
    if config.engine.kind != "emulated":
        if config.emulate.time_scale != 1.0:
            raise ConfigError(
                "emulate.time_scale", f"{config.emulate.time_scale:g}, but real backends take real time; leave it at 1"
            )
        return
    for name in ("hardware", "model"):
        if not getattr(config.emulate, name):
            raise ConfigError(f"emulate.{name}", "is empty; give a profile, such as one of configs/profiles/")
    if config.checkpoint.export_hf:
        raise ConfigError("checkpoint.export_hf", "an emulated trainer has no weights to export; set it to false")


def _check_waits(config: Config) -> None:
    timeouts = config.timeouts
    if timeouts.lost_s <= 2 * timeouts.heartbeat_s:
        # One late heartbeat must not make a rank look lost.
        raise ConfigError(
            "timeouts.lost_s",
            f"{timeouts.lost_s:g} s must be above 2 x timeouts.heartbeat_s ({timeouts.heartbeat_s:g} s)",
        )
