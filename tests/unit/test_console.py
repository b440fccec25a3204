"""The console: lines elsewhere, a bar on a terminal, nothing when it is off."""

from __future__ import annotations

import io

import pytest

from tiderl.observe.console import Console
from tiderl.scheduling.actions import ReportEvaluation, ReportStep
from tiderl.types import Rank, Role, WeightVersion

METRICS = {
    "reward": 0.614, "success": 0.5, "goodput": 1934.0, "ras": 9.0, "tprm_s": 0.31, "step_s": 9.06, "twt_s": 1.2, "rwt_s": 0.0,
}  # fmt: skip
ROLES = {Rank(1): Role.ROLLOUT, Rank(0): Role.ACTOR, Rank(2): Role.REF}
PHASES = {Rank(0): "train", Rank(1): "31 tasks"}
CLEAR = "\r\x1b[2K"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")


def evaluation(num_missing: int = 0) -> ReportEvaluation:
    return ReportEvaluation(WeightVersion(4), 10, num_missing, 0.74, 0.8, 5.25, num_missing == 0)


def test_a_line_a_step() -> None:
    out = io.StringIO()
    console = Console("line", 40, out)
    console.refresh(ROLES, PHASES, 0.41, 0, "ranks [0] (training)")
    assert out.getvalue() == "", "without a terminal nothing is drawn"
    console.step(ReportStep(11, METRICS))
    assert out.getvalue() == (
        "step 12/40 reward 0.61 success 0.50 1.9k tok/s RAS 9 TPRM 0.3s step 9.1s twt 1.2s rwt 0.0s"
        " | 0A train 1R 31 tasks 2F ? | kv 41%\n"
    )


def test_a_step_without_arrivals_has_no_tprm() -> None:
    out = io.StringIO()
    Console("line", 1, out).step(ReportStep(0, {k: v for k, v in METRICS.items() if k != "tprm_s"} | {"goodput": 42.0}))
    assert "TPRM - " in out.getvalue() and " 42 tok/s" in out.getvalue()


def test_an_evaluation_has_a_line_and_stays_in_later_ones() -> None:
    out = io.StringIO()
    console = Console("line", 40, out)
    console.evaluation(evaluation())
    console.evaluation(evaluation(num_missing=3))
    console.step(ReportStep(0, METRICS))
    full, missing, step = out.getvalue().splitlines()
    assert full == "evaluation of version 4: success 0.740, reward 0.800, 5.2 turns (10 tasks)"
    assert missing.endswith("(10 tasks, 3 missing)")
    assert step.endswith("rwt 0.0s eval 0.74")


def test_a_terminal_gets_one_line_that_is_drawn_over() -> None:
    out = Terminal()
    console = Console("auto", 40, out)
    console.step(ReportStep(19, METRICS))
    assert out.getvalue() == ""
    console.refresh(ROLES, PHASES, 0.41, 0, "ranks [0] (training)")
    console.refresh(ROLES, PHASES, 0.42, 4, "ranks [0] (training)")
    first, second = out.getvalue().split(CLEAR)[1:]
    assert first.startswith("[########........] 20/40 reward 0.61") and first.endswith(
        "| kv 41% | ranks [0] (training)"
    )
    assert second.endswith("| kv 42% · 4 paused | ranks [0] (training)") and "\n" not in out.getvalue()
    console.warn("rank 1 is slow")
    assert out.getvalue().endswith(f"{second}{CLEAR}! rank 1 is slow\n")


def test_a_narrow_terminal_is_not_overflowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    out = Terminal()
    Console("auto", 40, out).refresh(ROLES, PHASES, 0.5, 0, "x")
    assert len(out.getvalue().removeprefix(CLEAR)) == 29


def test_closing_leaves_the_drawn_line_and_ends_it() -> None:
    out = Terminal()
    console = Console("auto", 40, out)
    console.refresh(ROLES, PHASES, 0.5, 0, "x")
    drawn = out.getvalue()
    console.close()
    console.close()
    assert out.getvalue() == drawn + "\n"
    untouched = Terminal()
    Console("auto", 40, untouched).close()
    assert untouched.getvalue() == ""


def test_lines_can_be_had_on_a_terminal_too() -> None:
    out = Terminal()
    console = Console("line", 40, out)
    console.refresh(ROLES, PHASES, 0.5, 0, "x")
    console.step(ReportStep(0, METRICS))
    assert out.getvalue().startswith("step 1/40 ")


def test_off_is_silent() -> None:
    out = Terminal()
    console = Console("off", 40, out)
    console.refresh(ROLES, PHASES, 0.5, 0, "x")
    console.step(ReportStep(0, METRICS))
    console.evaluation(evaluation())
    console.warn("careful")
    console.close()
    assert out.getvalue() == ""


def test_a_run_without_steps_can_be_drawn() -> None:
    out = Terminal()
    Console("auto", 0, out).refresh({}, {}, 0.0, 0, "joining")
    assert "0/0 starting" in out.getvalue()
