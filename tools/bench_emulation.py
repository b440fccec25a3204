"""How well emulated engines keep the time of their profile on this machine, several processes at once (one JSON line last).

    OMP_NUM_THREADS=1 python tools/bench_emulation.py --engines 8 --tasks 64 --seconds 20
    OMP_NUM_THREADS=1 python tools/bench_emulation.py --time-scale 4

Every engine plays `--tasks` WebShop-like tasks without end and without environments (`bench_workload.py`), each turn held for the
next one. Measured are the steps of `--seconds` real seconds after the first ones:

- `ratio`: a step's real time to what the profile says for its load, divided by the time scale. `ratio_median`, `ratio_p99`: of all
  steps of all engines. A late wake-up makes one step longer and the following ones shorter.
- `behind_ms_p99`: how far an engine is behind its schedule at the beginning of a step.
- `drift`: (real time from first to last step - schedule) / schedule; the worst engine's.
- `cpu_us_per_step`: of a whole process, the front with its event loop included; `device_cpu_us_per_step`: of the device thread.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from array import array
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from tiderl.clock import JobClock
from tiderl.config.schema import Config, EngineConfig, ModelConfig
from tiderl.engines.base import Sampling
from tiderl.engines.emulated import EmulatedEngine
from tiderl.engines.emulated_language import END, NUM_FILLERS, call_id
from tiderl.profiles.costs import CostModel, StepLoad
from tiderl.profiles.files import load
from tools.bench_workload import MAX_CONTEXT_TOKENS, TaskWork, synthetic

ROOT = Path(__file__).resolve().parents[1]
#: Steps that are not measured: the first prompts, and whatever is slow once.
WARMUP_S = 3.0
#: How much longer than its work a process may take.
SPARE_S = 60.0


class MeteredCosts:
    """Stands before a cost model, and writes down when each step begins and how long it should take."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self.began_s, self.due_s, self.cpu_s = array("d"), array("d"), array("d")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._costs, name)

    def engine_step_s(self, load: StepLoad) -> float:
        duration_s = self._costs.engine_step_s(load)
        self.began_s.append(time.monotonic())
        self.cpu_s.append(time.thread_time())
        self.due_s.append(duration_s)
        return duration_s


async def play(engine: EmulatedEngine, name: str, works: list[TaskWork]) -> None:
    """One task after the other, for ever."""
    random = np.random.default_rng(list(name.encode()))
    for number in count():
        work = works[number % len(works)]
        context = random.integers(0, NUM_FILLERS, work.prompt_tokens - 1).tolist()
        for turn in work.turns:
            context.append(call_id(turn.output_tokens, exact=True))
            sampling = Sampling(1.0, 4096, (END,))
            generation = await engine.generate(name, context, sampling, hold=True)
            context += generation.token_ids.tolist()
            context += random.integers(0, NUM_FILLERS, max(turn.observation_tokens - 1, 0)).tolist()
        engine.release(name)


async def run_engine(args: argparse.Namespace) -> dict[str, Any]:
    costs = MeteredCosts(load(args.hardware, args.model))
    config = Config(
        model=ModelConfig(max_context_tokens=2 * MAX_CONTEXT_TOKENS),
        engine=EngineConfig(kind="emulated", max_running=args.tasks),
    )
    engine = EmulatedEngine(config, costs, JobClock(args.time_scale), args.child)  # type: ignore[arg-type]
    await asyncio.to_thread(engine.start)
    stream = synthetic(args.child, group_size=args.tasks)
    tasks = [
        asyncio.create_task(play(engine, f"{args.child}/{n}", list(next(stream).tasks))) for n in range(args.tasks)
    ]
    await asyncio.sleep(WARMUP_S)
    first, cpu_began_s = len(costs.began_s), time.process_time()
    await asyncio.sleep(args.seconds)
    last, cpu_s = len(costs.began_s) - 1, time.process_time() - cpu_began_s
    for task in tasks:
        task.cancel()
    failures = [
        e for e in await asyncio.gather(*tasks, return_exceptions=True) if not isinstance(e, asyncio.CancelledError)
    ]
    stats = engine.stats()
    await asyncio.to_thread(engine.shutdown)
    assert not failures, failures
    began_s = np.array(costs.began_s[first : last + 1])
    due_s = np.array(costs.due_s[first:last]) / args.time_scale
    behind_s = (began_s - began_s[0])[1:] - np.cumsum(due_s)
    return {
        "steps": len(due_s),
        "ratios": (np.diff(began_s) / due_s).tolist(),
        # The schedule is where the engine is least behind, since it is never ahead.
        "behind_s": (behind_s - min(behind_s.min(), 0.0)).tolist(),
        "drift": float(np.median(behind_s[-100:]) - np.median(behind_s[:100])) / float(due_s.sum()),
        "step_ms": float(np.median(due_s)) * 1e3,
        "cpu_us": cpu_s / len(due_s) * 1e6,
        "device_cpu_us": (costs.cpu_s[last] - costs.cpu_s[first]) / len(due_s) * 1e6,
        "hit_rate": stats.total_cached_tokens / (stats.total_cached_tokens + stats.total_prefilled_tokens),
        "preemptions": stats.total_preemptions,
        "generated": stats.total_generated_tokens / stats.total_steps,
    }


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, *sys.argv[1:], "--child"]
    children = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE) for rank in range(args.engines)]
    try:
        outputs = [child.communicate(timeout=WARMUP_S + args.seconds + SPARE_S)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    results = [json.loads(output) for output in outputs]
    ratios = np.concatenate([result["ratios"] for result in results])
    behind_s = np.concatenate([result["behind_s"] for result in results])
    return {
        "engines": args.engines,
        "tasks": args.tasks,
        "time_scale": args.time_scale,
        "steps": int(ratios.size),
        "step_ms_median": round(statistics.mean(result["step_ms"] for result in results), 3),
        "ratio_median": round(float(np.median(ratios)), 4),
        "ratio_p1": round(float(np.quantile(ratios, 0.01)), 4),
        "ratio_p99": round(float(np.quantile(ratios, 0.99)), 4),
        "behind_ms_p99": round(float(np.quantile(behind_s, 0.99)) * 1e3, 3),
        "drift": max((result["drift"] for result in results), key=abs),
        "cpu_us_per_step": round(statistics.mean(result["cpu_us"] for result in results), 1),
        "device_cpu_us_per_step": round(statistics.mean(result["device_cpu_us"] for result in results), 1),
        "tokens_per_step": round(statistics.mean(result["generated"] for result in results), 1),
        "hit_rate": round(statistics.mean(result["hit_rate"] for result in results), 3),
        "preemptions": sum(result["preemptions"] for result in results),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--tasks", type=int, default=64, help="tasks at once on an engine")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--time-scale", type=float, default=1.0)
    parser.add_argument("--hardware", default=str(ROOT / "configs/profiles/h100_sxm.toml"))
    parser.add_argument("--model", default=str(ROOT / "configs/profiles/qwen2.5_7b.toml"))
    parser.add_argument("--child", type=int, default=-1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child >= 0:
        print(json.dumps(asyncio.run(run_engine(args))))
    else:
        print(json.dumps(run_all(args)))


if __name__ == "__main__":
    main()
