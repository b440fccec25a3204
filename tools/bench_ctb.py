"""Continuous Task Batching against fixed concurrency, on the real vLLM engine with a small KV cache (one JSON line last).

    OMP_NUM_THREADS=1 python tools/bench_ctb.py                                     # synthetic, WebShop-like, about 12 minutes
    OMP_NUM_THREADS=1 python tools/bench_ctb.py --trace ../shared/traces/webshop_react.jsonl --token-scale 1

Every level of fixed concurrency is run once, then `--pairs` rounds of CTB, the best fixed level, and as many at once as there
are tasks, in turning order. Between runs all weights are loaded again, which empties the engine's caches.

`prefill_first` is what an endless cache would have to compute (`bench_workload.distinct_prefill_tokens`), `prefill_repeated` all
that was computed beyond it. In the JSON line each mode has the medians of all its runs; `pairs` has the ratios of every round,
and `ratios` their medians.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tiderl.config.schema import (
    AgentConfig,
    CheckpointConfig,
    Config,
    EngineConfig,
    EvalConfig,
    ModelConfig,
    RolloutConfig,
    ScheduleConfig,
    TrainConfig,
    TrainerConfig,
)
from tiderl.engines.base import EngineInfo
from tiderl.engines.vllm import VllmEngine
from tiderl.types import WeightVersion
from tools.bench_replay import Replay, RunResult
from tools.bench_workload import MAX_CONTEXT_TOKENS, MAX_TURNS, GroupWork, read_trace, synthetic

VOCAB_SIZE = 512
BLOCK_TOKENS = 32
#: A step that prefills should take some tens of steps that decode, as on a GPU with the default of 8192.
MAX_BATCHED_TOKENS = 2048
#: Share of the number of tasks that a level of fixed concurrency has; a quarter is what the memory holds at full length.
FIXED_SHARES = (1.0, 1 / 2, 3 / 8, 1 / 4, 3 / 16, 1 / 8)
CTB = "ctb"


def main() -> None:
    args = arguments()
    quieten()
    groups = workload(args)
    with tempfile.TemporaryDirectory(prefix="bench_ctb_") as folder:
        write_model(Path(folder))
        print(json.dumps(asyncio.run(Bench(groups, args, folder).measure())))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=8, help="groups to play")
    parser.add_argument("--group-size", type=int, default=8, help="trajectories in a group")
    parser.add_argument("--token-scale", type=float, default=0.25, help="all lengths of the workload times this")
    parser.add_argument(
        "--latency-ms", type=float, default=100.0, help="median latency of the environment, where none is recorded"
    )
    parser.add_argument(
        "--trace", type=Path, help="recorded sessions (shared/traces/README.md) in place of the synthetic workload"
    )
    parser.add_argument(
        "--kv-share", type=float, default=0.25, help="share of all tasks that the KV cache holds at full length"
    )
    parser.add_argument(
        "--kv-tokens", type=int, default=0, help="size of the KV cache in tokens, in place of --kv-share"
    )
    parser.add_argument(
        "--fixed", default="", help="levels of fixed concurrency, such as 64,16,8 (default: around the memory's share)"
    )
    parser.add_argument("--pairs", type=int, default=5, help="rounds of ctb, best fixed and all at once")
    parser.add_argument("--footprint", choices=["growth", "paper"], default=RolloutConfig().footprint)
    parser.add_argument("--growth-safety", type=float, default=RolloutConfig().growth_safety)
    parser.add_argument("--run-timeout-s", type=float, default=300.0, help="bound of one run")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def quieten() -> None:
    """One line a run on stderr, beside what TideRL itself has to complain about."""
    # vLLM reads it as it is imported; more threads than one make it slower on few cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    # vLLM's kernel registry touches every attribute of torch.distributed.
    warnings.filterwarnings("ignore", "`torch.distributed.reduce_op` is deprecated", FutureWarning)


def workload(args: argparse.Namespace) -> list[GroupWork]:
    latency_s = args.latency_ms / 1000
    if args.trace is None:
        stream = synthetic(args.seed, group_size=args.group_size, token_scale=args.token_scale, latency_s=latency_s)
        return [next(stream) for _ in range(args.groups)]
    return read_trace(
        args.trace,
        args.seed,
        group_size=args.group_size,
        num_groups=args.groups,
        token_scale=args.token_scale,
        latency_s=latency_s,
        max_context_tokens=int(MAX_CONTEXT_TOKENS * args.token_scale),
    )


def write_model(folder: Path) -> None:
    """A random Qwen2 of 3.4 M parameters: small enough for a CPU, large enough that a prefill costs something."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_CONTEXT_TOKENS,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).float().save_pretrained(folder)


@dataclass(frozen=True, slots=True)
class Mode:
    """A schedule to measure: `ctb`, or so many tasks at once."""

    name: str
    rollout: RolloutConfig


class Bench:
    """Owns the engine and the order of the runs."""

    def __init__(self, groups: Sequence[GroupWork], args: argparse.Namespace, model_folder: str) -> None:
        self._groups = groups
        self._args = args
        self._num_tasks = sum(len(group.tasks) for group in groups)
        self._config = self._job(args, model_folder)
        self._engine = VllmEngine(self._config)
        self._info: EngineInfo | None = None
        self._version = 0
        self._runs: dict[str, list[RunResult]] = {}

    async def measure(self) -> dict[str, Any]:
        """All runs; returns what the JSON line says."""
        self._info = await asyncio.to_thread(self._engine.start)
        try:
            levels = self._levels()
            # The first batches of every size are slow; they should not count for anyone.
            await self._run(levels[-1], self._groups[:2])
            for level in levels:
                await self._measured(level)
            best = max(levels, key=lambda level: self._runs[level.name][0].tokens_per_s)
            ctb = Mode(CTB, self._config.rollout)
            contestants = [ctb, best, levels[0]] if best is not levels[0] else [ctb, best]
            pairs = []
            for number in range(self._args.pairs):
                turn = number % len(contestants)
                results = {mode.name: await self._measured(mode) for mode in contestants[turn:] + contestants[:turn]}
                pairs.append(_compared(results[CTB], results[best.name], results[levels[0].name]))
        finally:
            await asyncio.to_thread(self._engine.shutdown)
        medians = {name: _median_of(runs) for name, runs in self._runs.items()}
        return {
            "ctb": medians.pop(CTB, None),
            "fixed": medians,
            "best_fixed": best.name,
            "pairs": pairs,
            "ratios": {key: statistics.median(pair[key] for pair in pairs) for key in (pairs[0] if pairs else ())},
        }

    def _job(self, args: argparse.Namespace, model_folder: str) -> Config:
        tasks = [task for group in self._groups for task in group.tasks]
        max_context = max(int(MAX_CONTEXT_TOKENS * args.token_scale), 1 + max(task.context_tokens for task in tasks))
        kv_tokens = args.kv_tokens or int(args.kv_share * sum(task.context_tokens for task in tasks))
        return Config(
            model=ModelConfig(path=model_folder, dtype="float32", max_context_tokens=max_context),
            agent=AgentConfig(
                max_turns=max(MAX_TURNS, *(len(task.turns) for task in tasks)), max_new_tokens=max_context
            ),
            rollout=RolloutConfig(
                footprint=args.footprint, growth_safety=args.growth_safety, task_timeout_s=args.run_timeout_s
            ),
            engine=EngineConfig(
                kv_cache_tokens=max(kv_tokens, max_context),
                block_size=BLOCK_TOKENS,
                max_running=self._num_tasks,
                max_batched_tokens=MAX_BATCHED_TOKENS,
            ),
            train=TrainConfig(steps=1, groups_per_step=len(self._groups), group_size=args.group_size),
            trainer=TrainerConfig(max_micro_batch_tokens=max_context),
            schedule=ScheduleConfig(max_staleness=0),
            eval=EvalConfig(every=0),
            checkpoint=CheckpointConfig(every=0),
        )

    def _levels(self) -> list[Mode]:
        """Levels of fixed concurrency, all tasks at once first."""
        shares = {round(self._num_tasks * share) for share in FIXED_SHARES}
        asked = {int(level) for level in self._args.fixed.split(",")} if self._args.fixed else shares
        levels = sorted((asked | {self._num_tasks}) - {0}, reverse=True)
        rollout = self._config.rollout
        return [Mode(str(n), replace(rollout, scheduler="fixed", max_tasks_per_rank=n)) for n in levels]

    async def _measured(self, mode: Mode) -> RunResult:
        began_s = time.monotonic()
        result = await self._run(mode, self._groups)
        self._runs.setdefault(mode.name, []).append(result)
        shown = " ".join(f"{key}={value:.4g}" for key, value in asdict(result).items())
        print(f"{mode.name:>4} {shown} ({time.monotonic() - began_s:.1f} s)", file=sys.stderr, flush=True)
        return result

    async def _run(self, mode: Mode, groups: Sequence[GroupWork]) -> RunResult:
        assert self._info is not None
        await self._empty_caches()
        config = replace(
            self._config, rollout=mode.rollout, train=replace(self._config.train, groups_per_step=len(groups))
        )
        gc.collect()
        return await Replay(groups, config, self._engine, self._info, VOCAB_SIZE).run(self._args.run_timeout_s)

    async def _empty_caches(self) -> None:
        """Load the same weights again: as after any weight update, no cached block is used any more."""
        from safetensors.torch import load_file

        weights = load_file(Path(self._config.model.path) / "model.safetensors")
        self._version += 1
        version = WeightVersion(self._version)
        await self._engine.submit(lambda: self._engine.update_weights(weights.items(), version))


def _compared(ctb: RunResult, best: RunResult, all_at_once: RunResult) -> dict[str, float]:
    """One round's ratios, more than 1 where CTB is better; hit rates against the best level as a difference in points."""
    return {
        "tokens_vs_best": ctb.tokens_per_s / best.tokens_per_s,
        "tokens_vs_all": ctb.tokens_per_s / all_at_once.tokens_per_s,
        "cpu_vs_best": best.cpu_s / ctb.cpu_s,
        "cpu_vs_all": all_at_once.cpu_s / ctb.cpu_s,
        "hit_points_vs_best": 100 * (ctb.hit_rate - best.hit_rate),
        "hit_vs_all": ctb.hit_rate / all_at_once.hit_rate,
        "repeated_share": ctb.prefill_repeated / ctb.prefill_first,
        "preemptions": float(ctb.preemptions),
    }


def _median_of(runs: Sequence[RunResult]) -> dict[str, float]:
    return {f.name: statistics.median(getattr(run, f.name) for run in runs) for f in fields(RunResult)}


if __name__ == "__main__":
    main()
