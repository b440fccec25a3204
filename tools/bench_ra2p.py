"""Every way of computing the reference, on real ranks with the same micro-batches, and what RA2P predicts (one JSON line last).

    OMP_NUM_THREADS=1 python tools/bench_ra2p.py --backend fsdp        # a tiny Qwen2 on the CPU
    OMP_NUM_THREADS=1 python tools/bench_ra2p.py --backend emulated    # the time that Qwen2.5-7B would take on H200

Four ranks, as processes of their own, train eight groups; a group fills a micro-batch. Decoupled, three of the ranks are actors and
one scores for them; all other ways have four actors. Seconds are the job's: with the emulated backend, emulated ones.

`ready8`: all groups are there when the step opens. `step_s` is the time from there to the last backward, `compute_s` what the
busiest rank computes in it (reference, forward, backward), `overhead_s` their difference, `swaps` how often all ranks together
brought the reference to their device, `idle_s` what each rank neither computed nor swapped.

`patterns`: `num_ready` groups are there, another one comes every `tprm_ratio` times a micro-batch's compute. `predicted_s` is what
the `pipeline` model says after it has seen the decoupled and the colocated steps of `ready8`; `chosen` is the shorter prediction.
`patterns_in_job` is the choice that a running job with a Ref rank has: colocated, its three actors do all, and the Ref rank idles.

The H200 is an H100 with more memory: beside four actors of 7B, 80 GB have no place for a resident reference.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tiderl.config.schema import (
    Config,
    EmulateConfig,
    EngineConfig,
    LossConfig,
    ModelConfig,
    RolesConfig,
    ScheduleConfig,
    TimeoutsConfig,
    TrainConfig,
    TrainerConfig,
)
from tiderl.scheduling.ra2p import Choice
from tiderl.types import Pipelining
from tools.bench_ra2p_steps import (
    PATTERNS,
    SPREAD,
    Pattern,
    Predictor,
    StepRun,
    comparison,
    figures,
    micro_batch_s,
    summary,
    trajectories_of,
)
from tools.bench_ra2p_world import TimedGroup, World

NUM_RANKS, NUM_REF, NUM_GROUPS, GROUP_SIZE = 4, 1, 8, 4
VOCAB_SIZE = 512
#: Of a trajectory. FSDP: a forward of a micro-batch takes some tens of ms. Emulated: a swap is an eighth of a micro-batch's
#: compute, so that now one way is the shorter one and now the other.
MEAN_TOKENS = {"fsdp": 64, "emulated": 3072}


@dataclass(frozen=True, slots=True)
class Mode:
    """A way, on the ranks of one of the worlds."""

    world: str
    way: Pipelining


#: The worlds differ in their roles, and in where an actor's reference is between two uses.
SPLIT, SHARED, RESIDENT = "split", "shared", "resident"
DECOUPLED, COLOCATED = Mode(SPLIT, Pipelining.DECOUPLED), Mode(SHARED, Pipelining.COLOCATED)
#: The same three actors as decoupled.
SWITCHED = Mode(SPLIT, Pipelining.COLOCATED)
Measured = Mapping[tuple[Pattern, Mode], float]
READY8 = {
    "decoupled": DECOUPLED,
    "colocated": COLOCATED,
    "alternating_offload": Mode(SHARED, Pipelining.ALTERNATING),
    "alternating_resident": Mode(RESIDENT, Pipelining.ALTERNATING),
}


def main() -> None:
    args = arguments()
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    with tempfile.TemporaryDirectory(prefix="bench_ra2p_") as folder:
        if args.backend == "fsdp":
            write_model(Path(folder) / "model")
        print(json.dumps(asyncio.run(measure(args, args.run_dir or Path(folder), Path(folder) / "model"))))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["fsdp", "emulated"], default="fsdp")
    parser.add_argument("--repeats", type=int, default=3, help="steps of every mode and pattern; the medians count")
    parser.add_argument("--time-scale", type=float, default=5.0, help="emulated seconds in a real one")
    parser.add_argument("--patterns", type=int, default=len(PATTERNS), help="how many arrival patterns, from the first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start-timeout-s", type=float, default=180.0, help="bound of the ranks' start")
    parser.add_argument("--step-timeout-s", type=float, default=60.0, help="bound of one step")
    parser.add_argument("--run-dir", type=Path, help="where the ranks' logs go (default: a folder that is removed)")
    return parser.parse_args()


def write_model(folder: Path) -> None:
    """A random Qwen2 of some 3 M parameters, as large as a step of a second on two cores allows."""
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
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).float().save_pretrained(folder)


def job(args: argparse.Namespace, world: str, model_path: Path) -> Config:
    emulated = args.backend == "emulated"
    num_ref = NUM_REF if world == SPLIT else 0
    # A group fills a micro-batch, and never two.
    max_tokens = round(GROUP_SIZE * MEAN_TOKENS[args.backend] * (1 + SPREAD))
    return Config(
        model=ModelConfig(str(model_path), "bfloat16" if emulated else "float32", max_context_tokens=max_tokens),
        roles=RolesConfig(num_actors=NUM_RANKS - num_ref, num_ref=num_ref),
        engine=EngineConfig(kind="emulated" if emulated else "vllm"),
        train=TrainConfig(groups_per_step=NUM_GROUPS, group_size=GROUP_SIZE),
        trainer=TrainerConfig(
            kind=args.backend,
            max_micro_batch_tokens=max_tokens,
            checkpoint_layers=emulated,
            swap="resident" if world == RESIDENT else "offload",
        ),
        loss=LossConfig(kl_weight=0.001),
        schedule=ScheduleConfig(pipelining="auto", cost_model="pipeline"),
        emulate=EmulateConfig(
            hardware="configs/profiles/h200_sxm.toml", time_scale=args.time_scale if emulated else 1.0
        ),
        timeouts=TimeoutsConfig(start_s=args.start_timeout_s, step_s=args.step_timeout_s),
    )


async def measure(args: argparse.Namespace, run_dir: Path, model_path: Path) -> dict[str, Any]:
    """All runs; returns what the JSON line says."""
    worlds: dict[str, World] = {}
    try:
        for name in (SPLIT, SHARED, RESIDENT):
            worlds[name] = World(job(args, name, model_path), run_dir / name)
            await worlds[name].start()
        return await Bench(args, worlds, job(args, SPLIT, model_path)).measure()
    finally:
        await asyncio.gather(*(world.stop() for world in worlds.values()))


class Bench:
    """Owns the order of the runs. `config` is that of a job with a Ref rank, whose scheduler is asked."""

    def __init__(self, args: argparse.Namespace, worlds: Mapping[str, World], config: Config) -> None:
        self._args = args
        self._worlds = worlds
        self._groups = trajectories_of(NUM_GROUPS, GROUP_SIZE, MEAN_TOKENS[args.backend], VOCAB_SIZE, args.seed)
        self._predictor = Predictor(config)
        self._micro_batch_s = 0.0

    async def measure(self) -> dict[str, Any]:
        at_once = [0.0] * NUM_GROUPS
        for mode in (*READY8.values(), SWITCHED):  # the first passes of every rank are slow
            await self._play("warm-up", mode, at_once)
        ready8: dict[str, list[StepRun]] = {name: [] for name in READY8}
        for number in range(self._args.repeats):
            for name in _turned(list(READY8), number):
                ready8[name].append(await self._play("ready8", READY8[name], at_once))
        for name in ("decoupled", "colocated"):
            for run in ready8[name]:
                self._predictor.learn(run)
        self._micro_batch_s = micro_batch_s(ready8["colocated"], NUM_GROUPS)
        patterns = PATTERNS[: self._args.patterns]
        measured_s = await self._measured_s(patterns)
        lines = [self._with_equal_ranks(pattern, measured_s) for pattern in patterns]
        in_job = [self._in_job(pattern, measured_s) for pattern in patterns]
        return {
            "backend": self._args.backend,
            "ready8": {name: figures(runs) for name, runs in ready8.items()},
            "patterns": lines,
            "patterns_in_job": in_job,
            "summary": summary(lines),
            "summary_in_job": summary(in_job),
        }

    async def _measured_s(self, patterns: Sequence[Pattern]) -> dict[tuple[Pattern, Mode], float]:
        modes = [DECOUPLED, COLOCATED, SWITCHED]
        seconds: dict[tuple[Pattern, Mode], list[float]] = {(p, m): [] for p in patterns for m in modes}
        for number in range(self._args.repeats):
            for pattern in patterns:
                arrivals_s = pattern.arrivals_s(NUM_GROUPS, self._micro_batch_s)
                for mode in _turned(modes, number):
                    seconds[pattern, mode].append((await self._play(str(pattern), mode, arrivals_s)).step_s)
        return {key: statistics.median(values) for key, values in seconds.items()}

    def _with_equal_ranks(self, pattern: Pattern, measured_s: Measured) -> dict[str, Any]:
        """Four ranks either way: each way is predicted for the actors that it would have."""
        predicted_s = {
            mode.way: self._choice(pattern, num_ref).predicted_s[mode.way]
            for mode, num_ref in ((DECOUPLED, NUM_REF), (COLOCATED, 0))
        }
        shorter = min(predicted_s, key=lambda way: predicted_s[way])
        return comparison(
            pattern, shorter, predicted_s, {m.way: measured_s[pattern, m] for m in (DECOUPLED, COLOCATED)}
        )

    def _in_job(self, pattern: Pattern, measured_s: Measured) -> dict[str, Any]:
        """The same three actors either way: the choice is the scheduler's own."""
        choice = self._choice(pattern, NUM_REF)
        measured = {m.way: measured_s[pattern, m] for m in (DECOUPLED, SWITCHED)}
        return comparison(pattern, choice.pipelining, choice.predicted_s, measured)

    def _choice(self, pattern: Pattern, num_ref: int) -> Choice:
        tokens = [sum(trajectory.num_tokens for trajectory in group) for group in self._groups]
        num_actors = NUM_RANKS - num_ref
        return self._predictor.choose(
            pattern.forecast(tokens, self._micro_batch_s, num_actors=num_actors, num_ref=num_ref)
        )

    async def _play(self, what: str, mode: Mode, arrivals_s: Sequence[float]) -> StepRun:
        groups = [TimedGroup(s, trajectories) for s, trajectories in zip(arrivals_s, self._groups, strict=True)]
        run = await self._worlds[mode.world].play(mode.way, groups)
        print(
            f"{what}: {mode.way.value} ({mode.world}) {run.step_s:.3g} s, busiest {run.busiest_s:.3g} s, swaps {run.num_swaps}",
            file=sys.stderr,
            flush=True,
        )
        return run


def _turned(entries: list[Any], number: int) -> list[Any]:
    """Another one comes first in every round."""
    turn = number % len(entries)
    return entries[turn:] + entries[:turn]


if __name__ == "__main__":
    main()
