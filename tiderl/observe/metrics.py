"""`metrics.jsonl`: lines of JSON, as things happen. Times are on the job's clock.

| `kind` | when | keys |
|---|---|---|
| `step` | a training step is over | those of `scheduling.metrics`, and the sums of the ranks' gauges as `engine_*` |
| `eval` | an evaluation is over | `version`, `eval_*`, `num_tasks`, `num_missing`, `complete` |
| `ledger` | weights are on all ranks | `version`; `seconds_*`, `rank_seconds`, `error`; `tokens_*` |

`seconds_*` is what all ranks did since the line of this kind before, by `ledger.Activity`: it adds up to `rank_seconds`, but for a
share of `error`. `tokens_*` says where all tokens are that were generated so far.
In a run with emulated backends every line has `"emulated": TIME_SCALE`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiderl.scheduling.actions import ReportEvaluation, ReportLedger, ReportStep


class MetricsWriter:
    """Appends to `metrics.jsonl` and remembers what the summary needs."""

    def __init__(self, path: Path, emulated: float | None = None) -> None:
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w", buffering=1)
        self.steps: list[Mapping[str, float]] = []
        self.evaluations: list[ReportEvaluation] = []
        #: When all ranks had weights for the first time, and when the newest step was over.
        self.ready_s: float | None = None
        self.last_step_s = 0.0
        self._label = {} if emulated is None else {"emulated": emulated}

    def step(self, report: ReportStep, now_s: float, gauges: Mapping[str, float]) -> None:
        self.steps.append(report.metrics)
        self.last_step_s = now_s
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

    def ledger(self, report: ReportLedger, now_s: float) -> None:
        if self.ready_s is None:
            self.ready_s = now_s
        self._write(
            {
                "kind": "ledger",
                "version": report.version,
                "time_s": now_s,
                **{f"seconds_{name}": seconds for name, seconds in report.seconds.items()},
                "rank_seconds": report.elapsed_s,
                "error": report.error,
                **{f"tokens_{name}": num for name, num in report.tokens.items()},
            }
        )

    def close(self) -> None:
        self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        # NaN is no JSON; a value that is not finite is written as null.
        line = {**line, **self._label}
        clean = {k: None if isinstance(v, float) and (v != v or abs(v) == float("inf")) else v for k, v in line.items()}
        self._file.write(json.dumps(clean, allow_nan=False) + "\n")
