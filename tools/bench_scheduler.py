"""How fast the scheduling core decides: events/s of `core.handle` in a closed loop of synthetic events (one JSON line last).

    OMP_NUM_THREADS=1 python tools/bench_scheduler.py --tasks 100000 --ranks 1000
    OMP_NUM_THREADS=1 python tools/bench_scheduler.py --tasks 100000 --ranks 1000 --growth-safety 0     # more pauses

`--tasks` trajectories are live at any time (supplied and not yet trained), and the KV caches of all `--ranks` together hold
`--memory-share` of them at their mean final length. Only the calls of `core.handle` are timed. The garbage collector stays on, and
what it takes inside of them counts. Measured are `--events` events after the warm-up: until the live set is full, and as many tasks
have finished as `--warmup-share` of it.

Times are wall time; on a busy machine `cpu_events_per_s`, by the clock of the thread, says what a quiet one would show.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from array import array
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tiderl.config.schema import (
    CheckpointConfig,
    Config,
    EvalConfig,
    ModelConfig,
    RolesConfig,
    RolloutConfig,
    ScheduleConfig,
    TrainConfig,
)
from tiderl.scheduling import actions as ac
from tiderl.scheduling import events as ev
from tiderl.scheduling.core import Core
from tiderl.types import TaskId
from tools.bench_workload import MAX_CONTEXT_TOKENS, TRAJECTORY_TOKENS, synthetic
from tools.bench_world import BLOCK_TOKENS, World

GROUP_SIZE = 8
NUM_TYPES = 5
#: Live tasks are so many steps' worth of groups, plus one.
MAX_STALENESS = 4
RANKS_PER_ACTOR = 10


class Meter:
    """Stands before the core's `handle` and times it. The times are in an array, so that the garbage collector ignores them."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._resumed: set[TaskId] = set()
        self._inside = False
        self._gc_began_ns = 0
        self.reset()

    def reset(self) -> None:
        """Forget what was measured so far."""
        self.took_ns = array("Q")
        self.mix: Counter[str] = Counter()
        self.cpu_ns = self.gc_ns = self._most_ns = 0
        self._slowest = ""

    def handle(self, event: ev.Event, now_s: float) -> tuple[ac.Action, ...]:
        self._inside = True
        began_cpu_ns = time.thread_time_ns()
        began_ns = time.perf_counter_ns()
        actions = self._core.handle(event, now_s)
        took_ns = time.perf_counter_ns() - began_ns
        self.cpu_ns += time.thread_time_ns() - began_cpu_ns
        self._inside = False
        self.took_ns.append(took_ns)
        if took_ns > self._most_ns:
            self._most_ns, self._slowest = took_ns, type(event).__name__
        self.mix[self._name(event)] += 1
        self._resumed.update(action.task_id for action in actions if isinstance(action, ac.ResumeTask))
        return actions

    def on_gc(self, phase: str, info: dict[str, int]) -> None:
        """For `gc.callbacks`."""
        if phase == "start":
            self._gc_began_ns = time.perf_counter_ns()
        elif self._inside:
            self.gc_ns += time.perf_counter_ns() - self._gc_began_ns

    def summary(self) -> dict[str, float | str]:
        """The JSON line's measured part. `gc_share` is the collector's share of the time, `slowest` the event behind `max_us`."""
        ordered = sorted(self.took_ns)
        count, total_ns = len(ordered), sum(ordered)
        num_pauses = self.mix["TaskPaused"] + self.mix["TurnStarted (resumed)"]
        return {
            "events_per_s": round(count / total_ns * 1e9, 1),
            "p50_us": ordered[count // 2] / 1e3,
            "p99_us": ordered[count * 99 // 100] / 1e3,
            "max_us": ordered[-1] / 1e3,
            "slowest": self._slowest,
            "pause_share": round(num_pauses / count, 4),
            "cpu_events_per_s": round(count / self.cpu_ns * 1e9, 1),
            "gc_share": round(self.gc_ns / total_ns, 3),
        }

    def _name(self, event: ev.Event) -> str:
        name = type(event).__name__
        if isinstance(event, ev.TurnStarted | ev.TaskPaused) and event.task_id in self._resumed:
            self._resumed.remove(event.task_id)
            return "TurnStarted (resumed)" if isinstance(event, ev.TurnStarted) else name
        return name


def job(args: argparse.Namespace) -> Config:
    """A job that keeps `args.tasks` tasks live and never ends."""
    return Config(
        model=ModelConfig(max_context_tokens=MAX_CONTEXT_TOKENS),
        roles=RolesConfig(num_actors=max(1, args.ranks // RANKS_PER_ACTOR)),
        rollout=RolloutConfig(footprint=args.footprint, growth_safety=args.growth_safety),
        train=TrainConfig(
            steps=10**9, groups_per_step=max(1, args.tasks // (GROUP_SIZE * (MAX_STALENESS + 1))), group_size=GROUP_SIZE
        ),
        schedule=ScheduleConfig(max_staleness=MAX_STALENESS),
        eval=EvalConfig(every=0),
        checkpoint=CheckpointConfig(every=0),
    )


def measure(args: argparse.Namespace) -> Meter:
    """Warm up, then `args.events` events."""
    config = job(args)
    tokens_per_rank = int(args.memory_share * args.tasks * TRAJECTORY_TOKENS / args.ranks)
    meter = Meter(Core(config, config.roles.num_actors + args.ranks))
    world = World(
        meter.handle,
        synthetic(0, group_size=GROUP_SIZE, num_types=NUM_TYPES, latency_s=1.0),
        num_actors=config.roles.num_actors,
        num_ranks=args.ranks,
        num_blocks=max(MAX_CONTEXT_TOKENS, tokens_per_rank) // BLOCK_TOKENS,
        num_sessions=args.tasks,
    )
    began_s = time.perf_counter()
    while world.num_finished < args.warmup_share * args.tasks:
        world.step()
    print(f"warm after {len(meter.took_ns)} events, {time.perf_counter() - began_s:.1f} s", file=sys.stderr)
    meter.reset()
    gc.callbacks.append(meter.on_gc)
    for _ in range(args.events):
        world.step()
    gc.callbacks.remove(meter.on_gc)
    return meter


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = RolloutConfig()
    option = parser.add_argument
    option("--tasks", type=int, default=1000, help="live tasks")
    option("--ranks", type=int, default=10, help="rollout ranks")
    option("--events", type=int, default=300_000, help="events to measure")
    option("--warmup-share", type=float, default=0.3, help="of the live tasks, how many must have finished first")
    option("--memory-share", type=float, default=0.25, help="of the live tasks, how many the caches hold")
    option("--footprint", choices=["growth", "paper"], default=defaults.footprint)
    option("--growth-safety", type=float, default=defaults.growth_safety)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    meter = measure(args)
    for name, count in meter.mix.most_common():
        print(f"{count:10d} {count / args.events:7.2%}  {name}", file=sys.stderr)
    print(json.dumps({"tasks": args.tasks, "ranks": args.ranks, **meter.summary()}))


if __name__ == "__main__":
    main()
