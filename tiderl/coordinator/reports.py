"""What the coordinator tells people: every report of the core goes to the console, to `metrics.jsonl` and to Prometheus.

It decides nothing and keeps what the summary at the end needs.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping

from tiderl.coordinator.load import LoadMeter
from tiderl.observe.console import Console
from tiderl.observe.metrics import MetricsWriter
from tiderl.observe.prometheus import PrometheusExporter
from tiderl.scheduling.actions import Note, ReportEvaluation, ReportLedger, ReportStep
from tiderl.types import Rank, Role

logger = logging.getLogger(__name__)


class Reports:
    """One run's. `exporter` is None where Prometheus is not wanted. Times are on the job's clock."""

    def __init__(
        self, metrics: MetricsWriter, console: Console, load: LoadMeter, exporter: PrometheusExporter | None
    ) -> None:
        self.metrics = metrics
        self.console = console
        self.load = load
        self._exporter = exporter
        self._seconds: Counter[str] = Counter()

    def step(self, report: ReportStep, now_s: float, gauges: Mapping[str, float]) -> None:
        self.metrics.step(report, now_s, gauges)
        self.console.step(report)
        if self._exporter is not None:
            self._exporter.step(report.metrics)
            self._exporter.engine(gauges)

    def evaluation(self, report: ReportEvaluation, now_s: float) -> None:
        self.metrics.evaluation(report, now_s)
        self.console.evaluation(report)
        if self._exporter is not None:
            self._exporter.evaluation(report.version, report.success, report.reward, report.turns)

    def ledger(self, report: ReportLedger, now_s: float) -> None:
        if self.metrics.ready_s is None:
            # The start of many processes on one machine would drown what follows.
            self.load.start_counting()
        self.metrics.ledger(report, now_s)
        self._seconds.update(report.seconds)
        if self._exporter is not None:
            self._exporter.ledger(self._seconds, report.tokens)
            load = self.load.report()
            self._exporter.load(load.cpu_s_per_1000_events, load.lag_p50_s, load.lag_p99_s)

    def note(self, note: Note) -> None:
        logger.log(logging.getLevelNamesMapping()[note.level.upper()], "%s", note.text)
        if note.level != "info":
            self.warn(note.text)

    def warn(self, text: str) -> None:
        self.console.warn(text)

    def refresh(
        self,
        roles: Mapping[Rank, Role],
        phases: Mapping[Rank, str],
        gauges: Mapping[str, float],
        num_paused: int,
        waiting_for: str,
    ) -> None:
        """What every rank does now."""
        kv_use = gauges.get("used_blocks", 0.0) / max(1.0, gauges.get("num_blocks", 0.0))
        self.console.refresh(roles, phases, kv_use, num_paused, waiting_for)

    def close(self) -> None:
        self.metrics.close()
        if self._exporter is not None:
            self._exporter.close()
