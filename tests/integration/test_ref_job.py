"""A whole job with a Ref rank: decoupled steps, and what happens when the Ref rank is killed in the middle. Emulated, so quick."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.integration import jobs
from tests.integration.test_emulated_job import CONFIG, TIME_SCALE
from tiderl.coordinator.journal import journal_codec, read_journal
from tiderl.coordinator.replay import replay
from tiderl.scheduling.actions import FinishColocated, OpenStep
from tiderl.types import Pipelining

pytestmark = pytest.mark.timeout(600)

NUM_STEPS = 5


def ref_process(run_dir: Path) -> int:
    """The process of rank 2, once a step is done."""
    deadline_s = time.monotonic() + 200.0
    while time.monotonic() < deadline_s:
        if (run_dir / "metrics.jsonl").exists() and jobs.lines_of(run_dir, "step"):
            found = re.search(r"rank 2 is process (\d+)", (run_dir / "logs" / "coordinator.log").read_text())
            assert found is not None
            return int(found[1])
        time.sleep(0.2)
    raise AssertionError("no step was made")


def test_a_job_outlives_its_ref_rank(tmp_path: Path) -> None:
    with jobs.environment_server("--options", json.dumps({"time_scale": TIME_SCALE}), env="emulated-webshop") as url:
        config = tmp_path / "job.toml"
        config.write_text(CONFIG.format(folder=tmp_path / "runs", url=url))
        flags = ("--run.name", "ref", "--roles.num-ref", "1", "--train.steps", str(NUM_STEPS), "--eval.every", "0")
        job = jobs.start_job(config, *flags, "--timeouts.lost-s", "6")
        run_dir = tmp_path / "runs" / "ref"
        try:
            os.kill(ref_process(run_dir), signal.SIGKILL)
            console, _ = job.communicate(timeout=jobs.BOUND_S)
        finally:
            job.kill()
            job.wait()
    assert job.returncode == 0, console
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == NUM_STEPS
    assert summary["ledger"]["closes"] is True
    assert "Ref rank 2 is lost" in console
    steps = jobs.lines_of(run_dir, "step")
    assert steps[0]["decoupled"] == 1.0 and steps[0]["num_swaps"] == 0
    assert steps[-1]["colocated"] == 1.0

    header, records = read_journal(run_dir / "journal.msgpack")
    found = list(records)
    assert replay(header.fresh_core(), found).differences == []
    actions = [journal_codec().unpack(action) for record in found for action in record.actions]
    ways = [action.pipelining for action in actions if isinstance(action, OpenStep)]
    assert ways[0] is Pipelining.DECOUPLED
    # Decoupled until it was found out, colocated from then on.
    assert ways == sorted(ways, key=lambda way: way is Pipelining.COLOCATED)
    assert sum(isinstance(action, FinishColocated) for action in actions) <= 1
