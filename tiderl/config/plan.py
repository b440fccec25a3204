"""What a job will do, from its settings alone: the text of `--dry-run`.

Numbers of tokens are upper bounds (every trajectory as long as the context allows); memory counts what grows with the model
and the KV cache's tokens, not activations and the engine's own workspace.

Source: paper §3 (roles), Appendix B.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiderl.config.schema import Config

#: Optimizer state of an actor: fp32 master weights and AdamW's two moments.
_OPTIMIZER_BYTES = 12
_GRADIENT_BYTES = 4
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def describe(config: Config, world_size: int, num_parameters: int | None = None) -> str:
    """The plan of a valid configuration as a few tables. `num_parameters` of the model, where it is known."""
    sections = [
        ("Ranks and roles", _roles(config, world_size)),
        ("One training step", _step(config)),
        ("One rollout rank", _rollout(config)),
        ("Memory of a rank, without activations", _memory(config, num_parameters)),
        ("Waits and their bounds", _waits(config)),
    ]
    return "\n\n".join(f"{title}\n{_table(rows)}" for title, rows in sections)


def _table(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def _roles(config: Config, world_size: int) -> list[tuple[str, str]]:
    num_actors = config.roles.num_actors
    num_ref = config.roles.num_ref
    first_rollout = num_actors + num_ref
    rows = [
        ("actor", f"{_ranks(0, num_actors)}: train ({config.trainer.kind})"),
        ("ref", _reference(config)),
        ("rollout", f"{_ranks(first_rollout, world_size - first_rollout)}: generate ({config.engine.kind})"),
    ]
    rows.append(("environment", f"{config.env.name} at {', '.join(config.env.urls)}"))
    if config.engine.kind == "emulated":
        emulate = config.emulate
        what = f"{emulate.model} on {emulate.hardware}, {emulate.time_scale:g} emulated s in a real one"
        rows.append(("emulated", f"all compute: {what}"))
    return rows


def _reference(config: Config) -> str:
    """Where the reference is, and how a step gets its log-probs."""
    schedule, num_ref = config.schedule, config.roles.num_ref
    if config.loss.kl_weight == 0:
        return "none (loss.kl_weight is 0)"
    if schedule.mode == "async":
        return "on the actors' ranks: scores the whole batch, then the actors train on it"
    if schedule.mode == "stream":
        return f"on the actors' ranks: in turn with the actor for every micro-batch (swap: {config.trainer.swap})"
    if not num_ref:
        return f"on the actors' ranks: scores what is ready, then the actors train on it (swap: {config.trainer.swap})"
    how = f"chosen step by step ({schedule.cost_model})" if schedule.pipelining == "auto" else schedule.pipelining
    return f"{_ranks(config.roles.num_actors, num_ref)}: {how}"


def _ranks(first: int, count: int) -> str:
    return f"rank {first}" if count == 1 else f"ranks {first}-{first + count - 1}"


def _step(config: Config) -> list[tuple[str, str]]:
    num_groups, group_size = config.train.groups_per_step, config.train.group_size
    num_trajectories = num_groups * group_size
    max_tokens = num_trajectories * config.model.max_context_tokens
    staleness = config.schedule.max_staleness
    fitting = config.trainer.max_micro_batch_tokens // config.model.max_context_tokens
    return [
        ("groups", f"{num_groups} of {group_size} trajectories: {_count(num_trajectories)} trajectories"),
        ("tokens", f"at most {_count(max_tokens)}, {_count(max_tokens // config.roles.num_actors)} an actor"),
        (
            "micro-batch",
            f"at most {_count(config.trainer.max_micro_batch_tokens)} tokens: {fitting} of the longest trajectories",
        ),
        ("trajectories alive", f"at most {_count((staleness + 1) * num_trajectories)} (max_staleness {staleness})"),
        ("steps", f"{_count(config.train.steps)}, {_count(config.train.steps * num_trajectories)} trajectories in all"),
    ]


def _rollout(config: Config) -> list[tuple[str, str]]:
    cache, context = config.engine.kv_cache_tokens, config.model.max_context_tokens
    rows = [
        (
            "context",
            f"at most {_count(context)} tokens, {config.agent.max_turns} turns of {config.agent.max_new_tokens}",
        )
    ]
    if cache == 0:
        rows.append(("KV cache", f"what the engine finds (engine.gpu_memory_share {config.engine.gpu_memory_share:g})"))
    else:
        usable = int(cache * (1 - config.rollout.kv_reserve))
        rows.append(("KV cache", f"{_count(cache)} tokens, {_count(usable)} of them for admission"))
        rows.append(("longest tasks at once", f"{usable // context}"))
    rollout = config.rollout
    if rollout.scheduler == "ctb":
        rows.append(("scheduler", f"ctb: by what tasks use and may need ({rollout.footprint}); pauses and resumes"))
    else:
        rows.append(("scheduler", "fixed: always as many tasks at once as there may be"))
    rows.append(
        ("tasks at once", f"at most {rollout.max_tasks_per_rank}, {config.engine.max_running} in an engine step")
    )
    return rows


def _memory(config: Config, num_parameters: int | None) -> list[tuple[str, str]]:
    if num_parameters is None:
        return [("unknown", "the model's number of parameters is not known")]
    dtype_bytes, num_actors = _DTYPE_BYTES[config.model.dtype], config.roles.num_actors
    weights = num_parameters * dtype_bytes
    reference = weights if config.loss.kl_weight > 0 else 0
    optimizer = num_parameters * (_OPTIMIZER_BYTES + _GRADIENT_BYTES) // num_actors
    gradients = num_parameters * _GRADIENT_BYTES
    actor = weights + gradients + optimizer + reference
    parts = f"weights {_bytes(weights)}, gradients {_bytes(gradients)}, optimizer shard {_bytes(optimizer)}"
    return [
        ("parameters", _count(num_parameters)),
        ("actor", f"{_bytes(actor)}: {parts}" + (f", reference {_bytes(reference)}" if reference else "")),
        ("rollout", f"{_bytes(weights)} of weights, and the KV cache"),
    ]


def _waits(config: Config) -> list[tuple[str, str]]:
    timeouts = config.timeouts
    bounds = [
        ("a rank joins", "timeouts.start_s", timeouts.start_s),
        ("environment servers answer at the start", "timeouts.env_start_s", timeouts.env_start_s),
        ("a request to an environment", "timeouts.env_request_s", timeouts.env_request_s),
        ("a task, pauses not counted", "rollout.task_timeout_s", config.rollout.task_timeout_s),
        ("a silent rank", "timeouts.lost_s", timeouts.lost_s),
        ("a collective", "timeouts.collective_s", timeouts.collective_s),
        ("a weight sync", "timeouts.sync_s", timeouts.sync_s),
        ("a training step", "timeouts.step_s", timeouts.step_s),
        ("an evaluation holds the next sync", "eval.max_wait_s", config.eval.max_wait_s),
        ("the job shuts down", "timeouts.shutdown_s", timeouts.shutdown_s),
    ]
    return [(what, f"{bound_s:g} s ({setting})") for what, setting, bound_s in bounds]


def _count(number: int) -> str:
    return f"{number:,}"


def _bytes(number: int) -> str:
    size = float(number)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"
