"""tools/fit_profile.py: metrics made from known efficiencies give them back, and what they don't tell is kept and named."""

from __future__ import annotations

import dataclasses
import json
import random
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tiderl.profiles.costs import CostModel, StepLoad
from tiderl.profiles.files import load_hardware, load_model
from tiderl.profiles.schema import Efficiency
from tools.fit_profile import Factor, fit, main, read_run

PROFILES = Path(__file__).resolve().parents[2] / "configs" / "profiles"
HARDWARE, MODEL = PROFILES / "h100_sxm.toml", PROFILES / "qwen2.5_7b.toml"
#: Nothing like the profile's.
TRUE = Efficiency(
    prefill=0.44,
    decode_compute=0.31,
    forward=0.29,
    backward=0.47,
    memory_bandwidth=0.62,
    pcie=0.5,
    nvlink=0.8,
    network=0.7,
    step_overhead_s=0.0045,
)
NUM_RANKS = 4
Shape = Callable[[random.Random], StepLoad]


def true_costs(model: Path = MODEL) -> CostModel:
    return CostModel(dataclasses.replace(load_hardware(HARDWARE), efficiency=TRUE), load_model(model))


def few_decodes(rng: random.Random) -> StepLoad:
    num = rng.randint(1, 128)
    return StepLoad(num, num * rng.randint(500, 8000))


def many_decodes(rng: random.Random) -> StepLoad:
    num = rng.randint(500, 1500)
    return StepLoad(num, num * rng.randint(20, 60))


def prefills(rng: random.Random) -> StepLoad:
    """Prompts whose tokens have half a trajectory before them on average, which is what is assumed of them."""
    sizes = [rng.randint(500, 2000) for _ in range(rng.randint(1, 4))]
    return StepLoad(0, 0, tuple((size, 1500 - size // 2) for size in sizes))


def agents(rng: random.Random) -> StepLoad:
    """As in a run: requests that decode, and observations of others behind contexts like theirs."""
    num, context = rng.randint(32, 200), rng.randint(1000, 4000)
    chunks = tuple((rng.randint(100, 500), context) for _ in range(rng.randint(1, 4)))
    return StepLoad(num, num * context, chunks)


def write_run(
    folder: Path,
    shapes: Iterable[Shape],
    *,
    model: Path = MODEL,
    num_actors: int = 4,
    checkpoint_layers: bool = True,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """A run's folder: a line a shape, in which each rank repeats one step; returns the lines for a test to spoil."""
    costs, rng = true_costs(model), random.Random(seed)
    gauges = dict.fromkeys(
        ("prefilled_tokens", "prefill_s", "decode_s", "steps", "read_tokens", "generated_tokens"), 0.0
    )
    lines = [step_line(costs, gauges, 3000, 1, num_actors, checkpoint_layers)]
    for shape in shapes:
        load = shape(rng)
        steps = rng.randint(200, 2000) * NUM_RANKS
        prefilled = sum(tokens for tokens, _ in load.prefill_chunks)
        seconds, share = steps * costs.engine_step_s(load), prefilled / (prefilled + load.num_decodes)
        more = {
            "prefilled_tokens": steps * prefilled,
            "prefill_s": seconds * share,
            "decode_s": seconds * (1 - share),
            "steps": steps,
            "read_tokens": steps * load.decode_context_tokens,
            "generated_tokens": steps * load.num_decodes,
        }
        gauges = {name: value + more[name] for name, value in gauges.items()}
        length = rng.randint(2900, 3100)
        lines.append(step_line(costs, gauges, length, len(lines) + 1, num_actors, checkpoint_layers))
    config = {"roles": {"num_actors": num_actors}, "trainer": {"checkpoint_layers": checkpoint_layers}}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_lines(folder, lines)
    return lines


def step_line(
    costs: CostModel, gauges: dict[str, float], length: int, step: int, num_actors: int, checkpoint_layers: bool
) -> dict[str, Any]:
    lengths = [length] * 128
    return {
        "kind": "step",
        "step": step,
        "context_tokens": float(length),
        "num_trajectories": 128.0,
        "forward_s": costs.forward_s(lengths) / num_actors,
        "reference_s": costs.forward_s(lengths) / num_actors,
        "backward_s": costs.backward_s(lengths, checkpoint_layers=checkpoint_layers) / num_actors,
        "optimizer_s": costs.optimizer_s(num_actors),
        **{f"engine_{name}": value for name, value in gauges.items()},
    }


def write_lines(folder: Path, lines: Iterable[dict[str, Any]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def fitted(*folders: Path, model: Path = MODEL) -> dict[str, Factor]:
    runs = [read_run(folder) for folder in folders]
    intervals = [interval for of_engines, _ in runs for interval in of_engines]
    steps = [step for _, of_trainer in runs for step in of_trainer]
    return fit(load_hardware(HARDWARE), load_model(model), intervals, steps)


ENGINE = ("memory_bandwidth", "prefill", "decode_compute", "step_overhead_s")


def assert_true(factors: dict[str, Factor], *names: str) -> None:
    for name in names:
        assert factors[name].why_kept == "", (name, factors[name])
        assert factors[name].value == pytest.approx(getattr(TRUE, name), rel=0.02), name


@pytest.mark.parametrize("model", ["qwen2.5_7b", "qwen3.5_9b"])
def test_all_that_a_run_tells_is_recovered(tmp_path: Path, model: str) -> None:
    path = PROFILES / f"{model}.toml"
    write_run(tmp_path, [few_decodes, many_decodes, prefills, agents] * 10, model=path)
    factors = fitted(tmp_path, model=path)
    assert_true(factors, *ENGINE, "forward", "backward", "nvlink")
    assert all(factor.residual < 0.02 for factor in factors.values())
    # Nothing crossed a node, and nothing tells of PCIe.
    assert {name for name, factor in factors.items() if factor.why_kept} == {"pcie", "network"}


def test_an_agents_run_alone(tmp_path: Path) -> None:
    write_run(tmp_path, [agents] * 40)
    assert_true(fitted(tmp_path), "prefill", "decode_compute")


def test_several_runs_and_more_actors_than_a_node_has(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [few_decodes] * 10, num_actors=12, checkpoint_layers=False)
    write_run(tmp_path / "b", [prefills] * 10, num_actors=12, seed=1)
    factors = fitted(tmp_path / "a", tmp_path / "b")
    assert_true(factors, "memory_bandwidth", "prefill", "step_overhead_s", "forward", "backward", "network")
    assert factors["nvlink"].why_kept == "0 training steps tell of it, 3 are needed"
    assert factors["nvlink"].value == load_hardware(HARDWARE).efficiency.nvlink


def test_spoiled_lines_are_left_out(tmp_path: Path) -> None:
    lines = write_run(tmp_path, [few_decodes, many_decodes, prefills, agents] * 10)
    # An interval in which the machine hung, a line without gauges, one that is not finite, other lines, a resumed run.
    for line in lines[10:]:
        line["engine_decode_s"] += 5000.0
    del lines[20]["engine_steps"]
    lines[30]["engine_read_tokens"] = None
    lines[31]["forward_s"] = None
    again = [dict(line) for line in lines]
    write_lines(tmp_path, [*lines, {"kind": "eval", "version": 3}, *again])
    assert_true(fitted(tmp_path), *ENGINE, "forward", "backward", "nvlink")


def test_noise_is_averaged_out(tmp_path: Path) -> None:
    lines = write_run(tmp_path, [few_decodes, many_decodes, prefills, agents] * 30)
    rng = random.Random(1)
    before = {name: [line[name] for line in lines] for name in ("engine_prefill_s", "engine_decode_s")}
    for number in range(1, len(lines)):
        noise = rng.gauss(1.0, 0.01)
        for name, values in before.items():
            lines[number][name] = lines[number - 1][name] + (values[number] - values[number - 1]) * noise
        for name in ("forward_s", "backward_s", "optimizer_s"):
            lines[number][name] *= rng.gauss(1.0, 0.01)
    write_lines(tmp_path, lines)
    factors = fitted(tmp_path)
    assert_true(factors, *ENGINE, "forward", "backward", "nvlink")
    assert 0.003 < factors["prefill"].residual < 0.02


def test_one_load_does_not_tell_overhead_from_bandwidth(tmp_path: Path) -> None:
    write_run(tmp_path, [lambda rng: StepLoad(64, 64 * 2000)] * 10)
    factors = fitted(tmp_path)
    profile = load_hardware(HARDWARE).efficiency
    assert factors["step_overhead_s"].why_kept == "the loads vary too little to tell it from memory_bandwidth"
    assert factors["step_overhead_s"].value == profile.step_overhead_s
    # The bandwidth takes the blame: (2 ms + bytes / bandwidth) must be the seconds measured.
    costs = true_costs()
    work_s = costs.engine_step_s(StepLoad(64, 64 * 2000)) - profile.step_overhead_s
    bandwidth = costs.work.step_bytes(64, 64 * 2000) / work_s / costs.hardware.memory_bytes_per_s
    assert factors["memory_bandwidth"].value == pytest.approx(bandwidth)
    for name in ("prefill", "decode_compute"):
        assert factors[name].why_kept == "0 intervals are bound by it, 3 are needed"


def test_decoding_follows_prefill_where_they_are_not_told_apart(tmp_path: Path) -> None:
    write_run(tmp_path, [lambda rng: StepLoad(num := rng.randint(100, 400), num * 30, ((num * 4, 30),))] * 10)
    factors = fitted(tmp_path)
    # The profile has both at 0.55; together they must explain num x (4 prefilled tokens + 1 decoded).
    decode = factors["decode_compute"]
    assert decode.why_kept == "the profile's ratio to prefill; the loads vary too little to tell the two apart"
    assert decode.value == factors["prefill"].value
    assert TRUE.decode_compute < decode.value < TRUE.prefill
    # Held at 0.55, decoding would have pushed half as much again into the overhead.
    assert factors["step_overhead_s"].value == pytest.approx(TRUE.step_overhead_s, rel=0.1)


def test_one_actor_tells_of_no_link(tmp_path: Path) -> None:
    write_run(tmp_path, [few_decodes] * 10, num_actors=1)
    factors = fitted(tmp_path)
    assert {name for name, factor in factors.items() if "0 training steps" in factor.why_kept} == {"nvlink", "network"}


def test_more_than_the_peak_is_refused(tmp_path: Path) -> None:
    lines = write_run(tmp_path, [few_decodes] * 10)
    for line in lines:
        line["forward_s"] /= 10
        line["reference_s"] /= 10
    write_lines(tmp_path, lines)
    forward = fitted(tmp_path)["forward"]
    assert forward.why_kept == "2.9 came out, more than the peak: are these the run's GPU and model?"
    assert forward.value == load_hardware(HARDWARE).efficiency.forward


def test_the_report_is_a_section_and_a_json_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", [few_decodes, many_decodes, prefills, agents] * 10)
    assert main([str(tmp_path / "run"), "--hardware", str(HARDWARE), "--model", str(MODEL)]) == 0
    text = capsys.readouterr().out.strip()
    section, last = text.rsplit("\n", 1)
    # In the profile's place it reads as one.
    profile = tmp_path / "gpu.toml"
    profile.write_text(HARDWARE.read_text().split("[efficiency]")[0] + section)
    shares = load_hardware(profile).efficiency
    assert shares.prefill == pytest.approx(TRUE.prefill, rel=0.02)
    assert "pcie = 0.79 # kept: no metric tells of swaps" in section
    factors = json.loads(last)
    assert set(factors) == set(tomllib.loads(section)["efficiency"]) == {f.name for f in dataclasses.fields(Efficiency)}
    # Of the 40 intervals 20 prefill; a few may be left out as outliers.
    assert 15 <= factors["prefill"]["num_samples"] <= 20 and factors["prefill"]["why_kept"] == ""


def test_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--hardware", str(HARDWARE), "--model", str(MODEL)]
    assert main([str(tmp_path), *arguments]) == 2
    assert "give the folder of a run, with its config.json and metrics.jsonl" in capsys.readouterr().err
    assert main([str(tmp_path), "--hardware", str(tmp_path / "none.toml"), "--model", str(MODEL)]) == 2
    assert "none.toml" in capsys.readouterr().err


def test_a_run_without_steps_keeps_everything(tmp_path: Path) -> None:
    write_run(tmp_path, [])
    write_lines(tmp_path, [])
    factors = fitted(tmp_path)
    assert all(factor.why_kept for factor in factors.values())
    assert {name: factor.value for name, factor in factors.items()} == dataclasses.asdict(
        load_hardware(HARDWARE).efficiency
    )
