"""What a run says at its end, and `metrics.jsonl`."""

from __future__ import annotations

import io
import json
import math
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tiderl.config.schema import Config, EmulateConfig, EngineConfig
from tiderl.coordinator.load import LoadReport
from tiderl.coordinator.summary import emulation_report, ledger_report, seconds_report, summarize, write_summary
from tiderl.observe.console import Console
from tiderl.observe.metrics import MetricsWriter
from tiderl.scheduling.actions import ReportEvaluation, ReportLedger, ReportStep
from tiderl.scheduling.ledger import SecondsBalance
from tiderl.types import WeightVersion

BALANCES = {"generated": 100, "trained": 40, "evaluated": 30, "stale": 5, "failed": 12, "dropped": 3, "held": 10}


def evaluation(version: int, success: float) -> ReportEvaluation:
    return ReportEvaluation(WeightVersion(version), 10, 1, success, 0.5, 3.0, False)


@pytest.fixture
def metrics(tmp_path: Path) -> Any:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    yield writer
    writer.close()


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def test_the_ledger_closes_when_all_counts_agree() -> None:
    assert ledger_report(BALANCES, 100, 0) == {**BALANCES, "engine_generated": 100, "closes": True}
    # A resumed run: the engines of this process made 30, those before it 70.
    assert ledger_report(BALANCES, 30, 70)["closes"] is True


@pytest.mark.parametrize(
    ("balances", "engine", "before"), [({"held": 9}, 100, 0), ({"generated": 99}, 100, 0), ({}, 99, 0), ({}, 100, 1)]
)
def test_the_ledger_does_not_close_when_any_count_differs(balances: dict[str, int], engine: int, before: int) -> None:
    assert ledger_report({**BALANCES, **balances}, engine, before)["closes"] is False


LOAD = LoadReport(num_events=2000, cpu_s_per_1000_events=0.75, lag_p50_s=0.0005, lag_p99_s=0.012)
SECONDS = {"decode": 60.0, "forward": 39.96, "total": 100.0, "error": 0.0004, "closes": True}


def test_seconds_close_up_to_a_thousandth() -> None:
    assert seconds_report(SecondsBalance({"decode": 59.0, "forward": 40.9}, 100.0)) == {
        "decode": 59.0, "forward": 40.9, "total": 100.0, "error": pytest.approx(0.001), "closes": True,
    }  # fmt: skip
    assert seconds_report(SecondsBalance({"decode": 59.0, "forward": 41.2}, 100.0))["closes"] is False


def test_what_an_emulated_run_is_worth() -> None:
    config = Config(
        engine=EngineConfig(kind="emulated"),
        emulate=EmulateConfig(hardware="profiles/h100.toml", model="profiles/7b.toml", time_scale=2.0),
    )
    gauges = {"prefill_s": 30.0, "decode_s": 70.0, "late_s": 2.0}
    assert emulation_report(config, LOAD, gauges) == {
        "time_scale": 2.0, "hardware": "h100", "model": "7b", "late_share": 0.02, "trusted": True, "doubt": "",
    }  # fmt: skip
    late = emulation_report(config, LOAD, gauges | {"late_s": 4.0})
    slow = emulation_report(config, replace(LOAD, lag_p99_s=0.021), gauges)
    assert late is not None and slow is not None
    assert (late["trusted"], slow["trusted"]) == (False, False)
    assert "4.0%" in late["doubt"]
    assert "21 ms" in slow["doubt"]
    assert emulation_report(Config(), LOAD, gauges) is None


def test_summarize_by_hand(metrics: MetricsWriter) -> None:
    metrics.evaluation(evaluation(0, 0.25), 1.0)
    metrics.ledger(ReportLedger(WeightVersion(0), {"startup": 8.0}, 8.0, 0.0, BALANCES), 2.0)
    metrics.step(ReportStep(0, {"reward": 0.1, "trained_tokens": 300.0}), 6.0, {})
    metrics.ledger(ReportLedger(WeightVersion(1), {"decode": 8.0}, 8.0, 0.0, BALANCES), 7.0)
    metrics.step(ReportStep(1, {"reward": 0.6, "trained_tokens": 500.0}), 18.0, {})
    metrics.evaluation(evaluation(2, 0.75), 19.0)
    assert summarize(
        metrics, tokens={"closes": True}, seconds=SECONDS, load=LOAD, emulated=None, wall_s=16.0
    ) == {
        "eval_success_first": 0.25,
        "eval_success_last": 0.75,
        "reward_first": 0.1,
        "reward_last": 0.6,
        "steps": 2,
        "goodput": 50.0,
        "wall_s": 16.0,
        "ledger": {"closes": True},
        "seconds": SECONDS,
        "coordinator": {
            "num_events": 2000, "cpu_s_per_1000_events": 0.75, "lag_p50_s": 0.0005, "lag_p99_s": 0.012,
        },
        "emulated": None,
    }  # fmt: skip


def test_a_run_without_steps_and_evaluations_says_so(metrics: MetricsWriter) -> None:
    summary = summarize(metrics, tokens={}, seconds=SECONDS, load=LOAD, emulated=None, wall_s=1.0)
    assert (summary["eval_success_first"], summary["reward_last"], summary["steps"], summary["goodput"]) == (
        None,
        None,
        0,
        0.0,
    )


def test_the_last_line_is_the_summary_and_so_is_the_file(tmp_path: Path, metrics: MetricsWriter) -> None:
    metrics.evaluation(evaluation(0, 0.25), 1.0)
    metrics.step(ReportStep(0, {"reward": 0.1, "trained_tokens": 300.0}), 2.0, {})
    emulated = {
        "time_scale": 2.0,
        "hardware": "h100",
        "model": "7b",
        "late_share": 0.0,
        "trusted": False,
        "doubt": "slow",
    }
    summary = summarize(
        metrics, tokens=ledger_report(BALANCES, 99, 0), seconds=SECONDS, load=LOAD, emulated=emulated, wall_s=10.0
    )
    out = io.StringIO()
    write_summary(tmp_path, summary, "all 1 steps are done", Console("line", 1, out))
    text = out.getvalue()
    assert json.loads(text.splitlines()[-1]) == summary == json.loads((tmp_path / "summary.json").read_text())
    assert "the job ended: all 1 steps are done" in text
    assert (
        "token ledger DOES NOT CLOSE: 100 generated = 40 trained + 30 evaluated + 5 stale + 12 failed + 3 dropped + 10 held"
        in text
    )
    assert "(engines count 99)" in text
    assert "time ledger closes (but for 0.040%): 100 rank-seconds (emulated s) = decode 60.0%, forward 40.0%" in text
    assert "2000 events, 0.75 CPU s per 1,000; its event loop was 0.5 ms late (p50), 12.0 ms (p99)" in text
    assert "emulated: 7b on h100, 2 emulated s in a real one; its figures are NOT to be trusted: slow" in text


def test_metrics_are_one_line_of_json_each(tmp_path: Path, metrics: MetricsWriter) -> None:
    metrics.step(
        ReportStep(4, {"reward": 0.5, "grad_norm": math.nan, "loss": math.inf}), 2.5, {"running": 3.0, "blocks": 1.0}
    )
    metrics.evaluation(evaluation(5, 0.75), 3.5)
    step, evaluated = lines(tmp_path)
    assert step == {
        "kind": "step", "step": 4, "time_s": 2.5, "reward": 0.5, "grad_norm": None, "loss": None,
        "engine_blocks": 1.0, "engine_running": 3.0,
    }  # fmt: skip
    assert evaluated == {
        "kind": "eval", "version": 5, "time_s": 3.5, "eval_success": 0.75, "eval_reward": 0.5, "eval_turns": 3.0,
        "num_tasks": 10, "num_missing": 1, "complete": False,
    }  # fmt: skip


def test_a_ledger_line_holds_the_steps_seconds_and_all_tokens(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl", emulated=4.0)
    writer.ledger(ReportLedger(WeightVersion(3), {"decode": 7.5, "sync": 0.5}, 8.0, 0.001, {"held": 5}), 40.0)
    writer.close()
    assert lines(tmp_path) == [
        {"kind": "ledger", "version": 3, "time_s": 40.0, "seconds_decode": 7.5, "seconds_sync": 0.5, "rank_seconds": 8.0,
         "error": 0.001, "tokens_held": 5, "emulated": 4.0}
    ]  # fmt: skip


def test_metrics_go_on_in_the_same_private_file(tmp_path: Path, metrics: MetricsWriter) -> None:
    metrics.step(ReportStep(0, {"reward": 0.0}), 1.0, {})
    again = MetricsWriter(tmp_path / "metrics.jsonl")
    again.step(ReportStep(1, {"reward": 0.0}), 1.0, {})
    again.close()
    assert [line["step"] for line in lines(tmp_path)] == [0, 1]
    assert stat.S_IMODE((tmp_path / "metrics.jsonl").stat().st_mode) == 0o600
