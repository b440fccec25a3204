"""`metrics.jsonl`: one line of JSON a training step (`"kind": "step"`) and one an evaluation (`"kind": "eval"`), as they happen.

The keys of a step are those of `scheduling.metrics`, and the sums of the ranks' gauges as `engine_*`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiderl.scheduling.actions import ReportEvaluation, ReportStep


class MetricsWriter:
    """Appends to `metrics.jsonl` and remembers what the summary needs."""

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w", buffering=1)
        self.steps: list[Mapping[str, float]] = []
        self.evaluations: list[ReportEvaluation] = []

    def step(self, report: ReportStep, now_s: float, gauges: Mapping[str, float]) -> None:
        self.steps.append(report.metrics)
        engine = {f"engine_{name}": value for name, value in sorted(gauges.items())}
        self._write({"kind": "step", "step": report.step, "time_s": now_s, **report.metrics, **engine})

    def evaluation(self, report: ReportEvaluation, now_s: float) -> None:
        self.evaluations.append(report)
        self._write(
            {
                "kind": "eval",
                "version": report.version,
                "time_s": now_s,
                "eval_success": report.success,
                "eval_reward": report.reward,
                "eval_turns": report.turns,
                "num_tasks": report.num_tasks,
                "num_missing": report.num_missing,
                "complete": report.complete,
            }
        )

    def close(self) -> None:
        self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        # NaN is no JSON; a value that is not finite is written as null.
        clean = {k: None if isinstance(v, float) and (v != v or abs(v) == float("inf")) else v for k, v in line.items()}
        self._file.write(json.dumps(clean, allow_nan=False) + "\n")
