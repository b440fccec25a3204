"""A whole job with emulated backends: live ranks, coordinator, HTTP environment and collectives; only the compute is made up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration import jobs
from tiderl.coordinator.journal import read_journal
from tiderl.coordinator.replay import replay
from tiderl.profiles.files import load
from tiderl.scheduling.ledger import Activity

pytestmark = pytest.mark.timeout(600)

HARDWARE, MODEL = "configs/profiles/h200_sxm.toml", "configs/profiles/qwen2.5_7b.toml"
TIME_SCALE = 8.0
NUM_ACTORS = 2

CONFIG = f"""
[run]
folder = "{{folder}}"
[roles]
num_actors = {NUM_ACTORS}
[env]
name = "emulated-webshop"
urls = ["{{url}}"]
[engine]
kind = "emulated"
[train]
steps = 3
groups_per_step = 4
group_size = 4
[trainer]
kind = "emulated"
checkpoint_layers = true
[loss]
kl_weight = 0.001
[eval]
every = 3
num_tasks = 4
[checkpoint]
every = 2
export_hf = false
[emulate]
hardware = "{HARDWARE}"
model = "{MODEL}"
time_scale = {TIME_SCALE}
[timeouts]
start_s = 4000
sync_s = 600
"""


@dataclass(frozen=True)
class Job:
    run_dir: Path
    code: int
    console: str

    @property
    def summary(self) -> dict[str, Any]:
        return dict(json.loads(self.console.strip().splitlines()[-1]))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    folder = tmp_path_factory.mktemp("emulated")
    with jobs.environment_server("--options", json.dumps({"time_scale": TIME_SCALE}), env="emulated-webshop") as url:
        config = folder / "job.toml"
        config.write_text(CONFIG.format(folder=folder / "runs", url=url))
        code, console = jobs.run_job(config, "--run.name", "emulated")
        yield Job(folder / "runs" / "emulated", code, console)


def test_the_job_ends_well_and_says_that_it_is_emulated(job: Job) -> None:
    assert job.code == 0, job.console
    summary = job.summary
    assert summary["steps"] == 3
    emulated = summary["emulated"]
    assert (emulated["time_scale"], emulated["hardware"], emulated["model"]) == (TIME_SCALE, "h200_sxm", "qwen2.5_7b")
    assert emulated["trusted"] is (emulated["doubt"] == "")
    assert "trained tokens/emulated s" in job.console
    steps = [line for line in job.console.splitlines() if line.startswith("step ")]
    assert len(steps) == 3
    assert all("emulated" in line for line in steps)
    lines = [json.loads(line) for line in (job.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert {line["emulated"] for line in lines} == {TIME_SCALE}


def test_both_ledgers_close(job: Job) -> None:
    summary = job.summary
    assert summary["ledger"]["closes"] is True
    # A short job: the latency of its last messages weighs more than the 0.1 % that a run may be off by.
    assert summary["seconds"]["error"] < 0.01
    assert [line["version"] for line in jobs.lines_of(job.run_dir, "ledger")] == [0, 1, 2, 3]


def test_the_trainer_took_the_profiles_time(job: Job) -> None:
    """Forward and backward of all ranks, from the packed lengths that the trainer was given."""
    costs = load(str(jobs.PROJECT / HARDWARE), str(jobs.PROJECT / MODEL))
    forward_s = sum(line["seconds_forward"] + line["seconds_backward"] for line in jobs.lines_of(job.run_dir, "ledger"))
    steps = jobs.lines_of(job.run_dir, "step")
    # A step's means over the actors; the ledger's seconds have the gathering at a step's beginning, too.
    told_s = sum((line["forward_s"] + line["backward_s"]) * NUM_ACTORS for line in steps)
    gathered_s = len(steps) * NUM_ACTORS * costs.gather_s(NUM_ACTORS)
    assert forward_s == pytest.approx(told_s + gathered_s, rel=0.1)
    # With recomputed layers the backward pass is three forwards (at its own efficiency), and the reference is one.
    efficiency = costs.hardware.efficiency
    for line in steps:
        assert line["backward_s"] / line["forward_s"] == pytest.approx(
            3 * efficiency.forward / efficiency.backward, rel=0.1
        )
        assert line["reference_s"] == pytest.approx(line["forward_s"], rel=0.1)


def test_all_activities_of_such_a_schedule_were_seen(job: Job) -> None:
    seconds = job.summary["seconds"]
    assert {a.value for a in Activity if seconds[a.value] > 0.0} == {a.value for a in Activity}


def test_the_journal_replays_without_a_difference(job: Job) -> None:
    header, records = read_journal(job.run_dir / "journal.msgpack")
    comparison = replay(header.fresh_core(), records)
    assert comparison.num_events > 100
    assert comparison.differences == []
