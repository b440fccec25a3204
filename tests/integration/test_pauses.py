"""A whole job whose KV caches hold half of its tasks: they are paused and resumed, and nothing is lost by it.

Environments forget an active session after `LEASE_S` and a paused one after `PAUSE_LEASE_S`; pauses last longer than both.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration import jobs
from tiderl.coordinator.journal import journal_codec, read_journal
from tiderl.coordinator.replay import replay
from tiderl.scheduling import actions as ac
from tiderl.scheduling import events as ev
from tiderl.types import FailureKind, TaskId

pytestmark = pytest.mark.timeout(900)

LEASE_S = PAUSE_LEASE_S = 1.5
#: What a turn takes: some tasks are paused until others have ended theirs.
LATENCY = "constant:2.5"
#: Of each of the two rollout ranks, that may have 32 training tasks to play at once, of some 76 tokens in the end.
KV_CACHE_TOKENS = 576


@dataclass(frozen=True)
class Paused:
    """The job's run folder and its journal, opened."""

    run_dir: Path
    console: str
    events: list[tuple[float, Any]]
    actions: list[tuple[float, Any]]

    @property
    def pauses_s(self) -> dict[TaskId, float]:
        """The longest pause of every task that was resumed: from `TaskPaused` to `ResumeTask`."""
        resumed = [(t, a.task_id) for t, a in self.actions if isinstance(a, ac.ResumeTask)]
        longest: dict[TaskId, float] = {}
        for paused_s, event in self.events:
            if isinstance(event, ev.TaskPaused):
                ends = [t for t, task_id in resumed if task_id == event.task_id and t >= paused_s]
                if ends:
                    longest[event.task_id] = max(longest.get(event.task_id, 0.0), min(ends) - paused_s)
        return longest


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Paused:
    folder = tmp_path_factory.mktemp("pauses")
    jobs.write_model(folder / "model")
    leases = ["--lease-s", str(LEASE_S), "--pause-lease-s", str(PAUSE_LEASE_S)]
    with jobs.environment_server(*leases, "--latency", LATENCY) as url:
        config = folder / "job.toml"
        config.write_text(jobs.CONFIG.format(folder=folder / "runs", model=folder / "model", url=url))
        # Tasks are admitted by what they use now, without foresight: so that there is something to pause.
        flags = [
            "--rollout.footprint",
            "paper",
            "--engine.kv-cache-tokens",
            str(KV_CACHE_TOKENS),
            "--train.steps",
            "2",
            "--eval.num-tasks",
            "8",
        ]
        code, console = jobs.run_job(config, "--run.name", "paused", *flags)
        assert code == 0, console
    run_dir = folder / "runs" / "paused"
    codec = journal_codec()
    _, records = read_journal(run_dir / "journal.msgpack")
    events, actions = [], []
    for record in records:
        events.append((record.now_s, codec.unpack(record.event)))
        actions += [(record.now_s, codec.unpack(action)) for action in record.actions]
    return Paused(run_dir, console, events, actions)


def test_the_budget_is_half_of_what_the_tasks_come_to(job: Paused) -> None:
    """So that the rest of this file is about what it says: 32 tasks at their full length against two caches."""
    finals = [e.context_tokens for _, e in job.events if isinstance(e, ev.TaskFinished)]
    assert 32 * sum(finals) / len(finals) >= 2 * 2 * KV_CACHE_TOKENS


def test_tasks_are_paused_and_resumed_and_the_metrics_say_so(job: Paused) -> None:
    num_pauses = sum(isinstance(a, ac.PauseTask) for _, a in job.actions)
    num_resumes = sum(isinstance(a, ac.ResumeTask) for _, a in job.actions)
    assert num_pauses > 4 and num_resumes > 4
    last = jobs.lines_of(job.run_dir, "step")[-1]
    # What happened after the last step is in the journal alone.
    assert 0 < last["num_resumes"] <= last["num_pauses"] <= num_pauses
    assert last["prefill_repeated"] > 0 and 0 < last["prefix_hit_rate"] < 1


def test_pauses_outlast_the_leases_and_no_session_is_lost(job: Paused) -> None:
    assert max(job.pauses_s.values()) > max(LEASE_S, PAUSE_LEASE_S)
    assert not [e for _, e in job.events if isinstance(e, ev.PausedTaskLost)]
    failed = [e for _, e in job.events if isinstance(e, ev.TaskFailed) and e.kind is not FailureKind.CANCELLED]
    # One task in eight crashes its environment, on purpose; nothing else fails.
    assert all("on purpose" in e.detail for e in failed), [e.detail for e in failed]


def test_paused_tasks_finish_like_any_other(job: Paused) -> None:
    finished = {e.task_id for _, e in job.events if isinstance(e, ev.TaskFinished)}
    assert finished & job.pauses_s.keys(), "no task that was paused has finished"
    trained = {t for _, a in job.actions if isinstance(a, ac.AssignMicroBatch) for t in a.task_ids}
    assert trained & job.pauses_s.keys(), "no task that was paused was trained on"
    for line in jobs.lines_of(job.run_dir, "step"):
        # Tokens of both sides of a pause have the log-probs that the trainer computes for them.
        assert line["log_prob_gap_max"] < 1e-4


def test_the_ledger_closes_and_the_replay_has_no_difference(job: Paused) -> None:
    assert json.loads(job.console.strip().splitlines()[-1])["ledger"]["closes"] is True
    header, records = read_journal(job.run_dir / "journal.msgpack")
    assert replay(header.fresh_core(), records).differences == []
