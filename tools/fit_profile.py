"""Fit the efficiencies of a hardware profile to what runs have measured: a TOML section to put in its place (one JSON line last).

    python tools/fit_profile.py runs/a runs/b --hardware configs/profiles/h100_sxm.toml --model configs/profiles/qwen2.5_7b.toml

A run tells of its engines in sums over its rollout ranks: between two training steps S engine steps took so many seconds for so
many tokens. That interval is taken for S equal steps. So its seconds are linear in the reciprocals of the efficiencies, once it is
known whether such a step waits for memory or for compute; that is read off the efficiencies of the last round, until it no longer
changes. A mixture of quick and slow steps takes longer than equal ones: with chunks that arrive at random (steps drawn one by one),
shares came out up to 13 % low and the overhead up to 84 % high. The residuals tell how well whole intervals are met.

A factor is kept from the profile, and the reason said, where nothing tells of it (PCIe: no metric does), or where it cannot be told
from another one: with the same load in every interval an overhead looks like a lower bandwidth.

Trainer: FLOPs as the profile counts them (the head at every token, trajectories all of the mean length) over the seconds measured,
and what the optimizer's seconds leave to the links after the update.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tiderl.errors import UserError
from tiderl.profiles.costs import CostModel
from tiderl.profiles.files import load_hardware, load_model
from tiderl.profiles.schema import Efficiency, HardwareProfile, ModelProfile
from tiderl.profiles.work import ModelWork

#: In the order in which they are told apart: who explains the same seconds as those before is kept from the profile.
_ENGINE_FACTORS = ("memory_bandwidth", "prefill", "decode_compute", "step_overhead_s")
_PREFILL, _DECODE = 1, 2
_GAUGES = ("steps", "prefilled_tokens", "generated_tokens", "read_tokens", "prefill_s", "decode_s")
#: A column of the regression must have so much of its length outside of the plane of the others.
_SEPARABLE = 0.05
_MIN_SAMPLES = 3
_MAX_ROUNDS = 50


@dataclass(frozen=True, slots=True)
class Interval:
    """What the engines of a run did between two training steps, all ranks together."""

    steps: float
    prefilled_tokens: float
    generated_tokens: float
    read_tokens: float
    seconds: float
    #: Mean context before a prefilled token: like that of the decoding requests; where none decodes, half a trajectory.
    prefill_context: float


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """What a training step asked of an actor on average, and how long it took."""

    num_actors: int
    num_backward_forwards: int
    num_trajectories: float
    context_tokens: float
    forward_s: float
    backward_s: float
    reference_s: float
    optimizer_s: float


@dataclass(frozen=True, slots=True)
class Factor:
    """One efficiency: fitted (`why_kept` empty) or the profile's. The residual is the median relative one of its samples."""

    value: float
    num_samples: int = 0
    residual: float = 0.0
    why_kept: str = ""


def read_run(folder: Path) -> tuple[list[Interval], list[TrainingStep]]:
    """Raises `UserError` where the folder is no run's."""
    try:
        config = json.loads((folder / "config.json").read_text())
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        num_actors, recomputes = config["roles"]["num_actors"], config["trainer"]["checkpoint_layers"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder}: {error!r}; give the folder of a run, with its config.json and metrics.jsonl"
        ) from error
    steps = [line for line in lines if line.get("kind") == "step"]
    return list(_intervals(steps)), list(_training_steps(steps, num_actors, 3 if recomputes else 2))


def _intervals(lines: Sequence[Mapping[str, Any]]) -> Iterator[Interval]:
    for before, after in itertools.pairwise(lines):
        try:
            grown = {name: after[f"engine_{name}"] - before[f"engine_{name}"] for name in _GAUGES}
            trajectory_tokens = after["context_tokens"]
        except (KeyError, TypeError):
            continue  # an older run, or a rank that had not told yet
        seconds = grown["prefill_s"] + grown["decode_s"]
        # The sums shrink where a run was resumed or a rank was lost.
        if grown["steps"] > 0 and seconds > 0 and min(grown.values()) >= 0:
            generated, read = grown["generated_tokens"], grown["read_tokens"]
            context = read / generated if generated else trajectory_tokens / 2
            yield Interval(grown["steps"], grown["prefilled_tokens"], generated, read, seconds, context)


def _training_steps(
    lines: Sequence[Mapping[str, Any]], num_actors: int, num_backward_forwards: int
) -> Iterator[TrainingStep]:
    names = ("num_trajectories", "context_tokens", "forward_s", "backward_s", "reference_s", "optimizer_s")
    for line in lines:
        values = [line[name] for name in names if isinstance(line.get(name), int | float)]
        if len(values) == len(names):
            yield TrainingStep(num_actors, num_backward_forwards, *values)


def fit(
    hardware: HardwareProfile, model: ModelProfile, intervals: Sequence[Interval], steps: Sequence[TrainingStep]
) -> dict[str, Factor]:
    """Every efficiency by name, in the order of the schema."""
    factors = fit_engine(hardware, ModelWork(model), intervals)
    factors |= fit_passes(hardware, ModelWork(model), steps)
    # The update's traffic is known by the bandwidth that the engines have found.
    share = dataclasses.replace(hardware.efficiency, memory_bandwidth=factors["memory_bandwidth"].value)
    factors |= fit_links(CostModel(dataclasses.replace(hardware, efficiency=share), model), steps)
    factors["pcie"] = Factor(hardware.efficiency.pcie, why_kept="no metric tells of swaps")
    return {field.name: factors[field.name] for field in dataclasses.fields(Efficiency)}


def fit_engine(hardware: HardwareProfile, work: ModelWork, intervals: Sequence[Interval]) -> dict[str, Factor]:
    """Robust least squares over the intervals; see the module docstring."""
    kept = hardware.efficiency
    # The unknowns: reciprocals of the shares, and the overhead itself.
    known = np.array([1 / kept.memory_bandwidth, 1 / kept.prefill, 1 / kept.decode_compute, kept.step_overhead_s])
    if len(intervals) < _MIN_SAMPLES:
        why = f"{len(intervals)} intervals with the engines' gauges, {_MIN_SAMPLES} are needed"
        return {name: Factor(getattr(kept, name), why_kept=why) for name in _ENGINE_FACTORS}
    costs = np.array([_seconds_at_peak(hardware, work, interval) for interval in intervals])  # [num_intervals, 4]
    seconds = np.array([interval.seconds for interval in intervals])
    unknowns, bound_by_memory = known, _bound_by_memory(costs, known)
    for _ in range(_MAX_ROUNDS):
        rows = _rows(costs, bound_by_memory) / seconds[:, None]  # every interval counts alike: relative seconds
        unknowns, _ = _solve_tied(rows, known)
        rows = rows[_inliers(rows @ unknowns - 1)]
        unknowns, reasons = _solve_tied(rows, known)
        before, bound_by_memory = bound_by_memory, _bound_by_memory(costs, unknowns)
        if np.array_equal(before, bound_by_memory):
            break
    else:
        print(f"fit_profile: what bounds the engines is not settled after {_MAX_ROUNDS} rounds", file=sys.stderr)
    errors = np.abs(rows @ unknowns - 1)
    factors = {}
    for column, name in enumerate(_ENGINE_FACTORS):
        value = float(unknowns[column] if name == "step_overhead_s" else 1 / unknowns[column])
        if column in reasons:
            factors[name] = Factor(value, why_kept=reasons[column])
            continue
        told = rows[:, column] > 0
        factors[name] = Factor(value, int(told.sum()), float(np.median(errors[told])))
    return _plausible(factors, kept)


def _seconds_at_peak(hardware: HardwareProfile, work: ModelWork, interval: Interval) -> tuple[float, ...]:
    """Of memory, prefill and decode at the full peaks, and the steps that each cost an overhead."""
    moved = (
        interval.steps * work.weights_read_bytes
        + work.kv_bytes_per_token * interval.read_tokens
        + work.state_moved_bytes * interval.generated_tokens
    )
    prefill = (work.token_flops + work.pair_flops * interval.prefill_context) * interval.prefilled_tokens
    decode = (work.token_flops + work.head_flops) * interval.generated_tokens + work.pair_flops * interval.read_tokens
    peak = hardware.peak_flops_per_s
    return moved / hardware.memory_bytes_per_s, prefill / peak, decode / peak, interval.steps


def _bound_by_memory(costs: npt.NDArray[np.float64], unknowns: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    return np.asarray(costs[:, 0] * unknowns[0] > costs[:, 1:3] @ unknowns[1:3])


def _rows(costs: npt.NDArray[np.float64], bound_by_memory: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """Of the regression: what hides behind the longer part costs nothing."""
    rows = costs.copy()
    rows[~bound_by_memory, 0] = 0.0
    rows[bound_by_memory, 1:3] = 0.0
    return rows


def _solve_tied(
    rows: npt.NDArray[np.float64], known: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], dict[int, str]]:
    """`_solve`, but where decoding cannot be told from prefill it keeps the profile's ratio to it.

    Both are matrix products of one batch; what is wrong with the one must not end up in the overhead.
    """
    solved, reasons = _solve(rows, known)
    if _DECODE not in reasons or _PREFILL in reasons or not rows[:, _DECODE].any():
        return solved, reasons
    ratio = known[_DECODE] / known[_PREFILL]
    tied = rows.copy()
    tied[:, _PREFILL] += ratio * rows[:, _DECODE]
    tied[:, _DECODE] = 0.0
    solved, reasons = _solve(tied, known)
    if _PREFILL not in reasons:
        solved[_DECODE] = ratio * solved[_PREFILL]
        reasons[_DECODE] = "the profile's ratio to prefill; the loads vary too little to tell the two apart"
    return solved, reasons


def _solve(
    rows: npt.NDArray[np.float64], known: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], dict[int, str]]:
    """Least squares of rows @ unknowns = 1 over the unknowns that can be told apart; the others are as `known`, and why."""
    free, reasons = _separable(rows)
    while free:
        fixed = [column for column in range(rows.shape[1]) if column not in free]
        target = 1 - rows[:, fixed] @ known[fixed]
        solution = np.linalg.lstsq(rows[:, free], target, rcond=None)[0]
        negative = [column for column, value in zip(free, solution, strict=True) if value <= 0]
        if not negative:
            solved = known.copy()
            solved[free] = solution
            return solved, reasons
        free.remove(negative[-1])
        reasons[negative[-1]] = "the intervals would have it negative: they contradict the model of a step"
    return known, reasons


def _separable(rows: npt.NDArray[np.float64]) -> tuple[list[int], dict[int, str]]:
    free: list[int] = []
    reasons = {}
    for column in range(rows.shape[1]):
        values = rows[:, column]
        if np.count_nonzero(values) < _MIN_SAMPLES:
            reasons[column] = f"{np.count_nonzero(values)} intervals are bound by it, {_MIN_SAMPLES} are needed"
            continue
        others = rows[:, free]
        apart = values - others @ np.linalg.lstsq(others, values, rcond=None)[0] if free else values
        if np.linalg.norm(apart) < _SEPARABLE * np.linalg.norm(values):
            names = ", ".join(_ENGINE_FACTORS[other] for other in free)
            reasons[column] = f"the loads vary too little to tell it from {names}"
            continue
        free.append(column)
    return free, reasons


def _inliers(errors: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Within three standard deviations, as the median tells them, or within 1 %."""
    sizes = np.abs(errors)
    return np.asarray(sizes <= max(0.01, 3 * 1.4826 * float(np.median(sizes))))


def _plausible(factors: dict[str, Factor], kept: Efficiency) -> dict[str, Factor]:
    """A share above 1 is a wrong profile or a wrong run, and no share."""
    for name, factor in factors.items():
        if name != "step_overhead_s" and factor.value > 1:
            why = f"{factor.value:.3g} came out, more than the peak: are these the run's GPU and model?"
            factors[name] = Factor(getattr(kept, name), why_kept=why)
    return factors


def fit_passes(hardware: HardwareProfile, work: ModelWork, steps: Sequence[TrainingStep]) -> dict[str, Factor]:
    """`forward` from the actors' forwards and the reference's, `backward`: medians over the training steps."""
    forward, backward = [], []
    for step in steps:
        n = step.context_tokens
        flops = (work.token_flops + work.head_flops) * n + work.pair_flops * n * (n + 1) / 2
        at_peak_s = flops * step.num_trajectories / step.num_actors / hardware.peak_flops_per_s
        forward += [at_peak_s / seconds for seconds in (step.forward_s, step.reference_s) if seconds > 0]
        backward += [step.num_backward_forwards * at_peak_s / step.backward_s] if step.backward_s > 0 else []
    kept = hardware.efficiency
    factors = {"forward": _median(forward, kept.forward), "backward": _median(backward, kept.backward)}
    return _plausible(factors, kept)


def fit_links(costs: CostModel, steps: Sequence[TrainingStep]) -> dict[str, Factor]:
    """`nvlink` or `network`, whichever carried the optimizer's collectives, from the seconds that the update leaves of it."""
    hardware = costs.hardware
    shares: dict[str, list[float]] = {"nvlink": [], "network": []}
    for step in steps:
        link_s = step.optimizer_s - costs.update_s(step.num_actors)
        if step.num_actors == 1 or link_s <= 0:
            continue
        # What `optimizer_s` would take of the links at the profile's efficiency, to that which they took.
        expected_s = costs.optimizer_s(step.num_actors) - costs.update_s(step.num_actors)
        slower = costs.ring_bytes_per_s(step.num_actors) < costs.ring_bytes_per_s(hardware.gpus_per_node)
        name = "network" if slower else "nvlink"
        shares[name].append(getattr(hardware.efficiency, name) * expected_s / link_s)
    kept = hardware.efficiency
    factors = {name: _median(samples, getattr(kept, name)) for name, samples in shares.items()}
    return _plausible(factors, kept)


def _median(samples: Sequence[float], kept: float) -> Factor:
    if len(samples) < _MIN_SAMPLES:
        return Factor(kept, why_kept=f"{len(samples)} training steps tell of it, {_MIN_SAMPLES} are needed")
    middle = statistics.median(samples)
    return Factor(middle, len(samples), statistics.median(abs(sample / middle - 1) for sample in samples))


def report(factors: Mapping[str, Factor], title: str) -> str:
    """The section as TOML, and one JSON line."""
    lines = [f"# Fitted by tools/fit_profile.py: {title}", "[efficiency]"]
    for name, factor in factors.items():
        note = (
            f"kept: {factor.why_kept}"
            if factor.why_kept
            else f"{factor.num_samples} samples, residual {factor.residual:.1%}"
        )
        lines.append(f"{name} = {factor.value:.4g} # {note}")
    lines.append(json.dumps({name: dataclasses.asdict(factor) for name, factor in factors.items()}))
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--hardware", required=True, help="profile of the runs' GPU")
    parser.add_argument("--model", required=True, help="profile of the runs' model")
    arguments = parser.parse_args(argv)
    intervals: list[Interval] = []
    steps: list[TrainingStep] = []
    try:
        hardware, model = load_hardware(arguments.hardware), load_model(arguments.model)
        for folder in arguments.runs:
            of_engines, of_trainer = read_run(folder)
            intervals += of_engines
            steps += of_trainer
    except UserError as error:
        print(f"fit_profile: {error}", file=sys.stderr)
        return 2
    runs = ", ".join(str(folder) for folder in arguments.runs)
    print(report(fit(hardware, model, intervals, steps), f"{model.name} on {hardware.name}, from {runs}"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
