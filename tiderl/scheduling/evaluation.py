"""Evaluation rounds: the model of one weight version, measured beside the training rollouts that follow it.

A round opens when its version has reached the rollout ranks, and the next weight sync waits for it, so that all its tasks are
played by that one version. The wait is bounded: past the bound the round is closed as incomplete and its missing tasks are counted.

Invariants (tests/scheduling/test_evaluation.py):

1. At most one round is open; it closes when its last task is finished or given up, or at its deadline.
2. `num_tasks = finished + num_missing` in the report; means are over the finished ones only.

Source: paper §4.2 (evaluation anchors the weights), "Evaluation (§3.2)".
"""

from __future__ import annotations

from tiderl.scheduling.actions import ReportEvaluation
from tiderl.types import TaskId, WeightVersion


class EvaluationRound:
    """An open round."""

    def __init__(self, version: WeightVersion, deadline_s: float) -> None:
        self.version = version
        self.deadline_s = deadline_s
        self.open_tasks: set[TaskId] = set()
        self.num_tasks = 0
        self._finished: list[tuple[float, bool, int]] = []

    def add(self, task_id: TaskId) -> None:
        self.open_tasks.add(task_id)
        self.num_tasks += 1

    def finish(self, task_id: TaskId, reward: float, success: bool, num_turns: int) -> None:
        self.open_tasks.remove(task_id)
        self._finished.append((reward, success, num_turns))

    def give_up(self, task_id: TaskId) -> None:
        self.open_tasks.remove(task_id)

    def report(self) -> ReportEvaluation:
        """The round's result; tasks that are still open count as missing."""
        n = len(self._finished)
        return ReportEvaluation(
            version=self.version,
            num_tasks=self.num_tasks,
            num_missing=self.num_tasks - n,
            success=sum(s for _, s, _ in self._finished) / n if n else 0.0,
            reward=sum(r for r, _, _ in self._finished) / n if n else 0.0,
            turns=sum(t for _, _, t in self._finished) / n if n else 0.0,
            complete=n == self.num_tasks,
        )
