"""Rank 0's console: a progress bar over training steps with one compact line, on a terminal; a line a step elsewhere.

    [######......] 12/40 reward 0.61 success 0.63 1.9k tok/s RAS 9 TPRM 0.3s step 9.1s twt 1.2s rwt 0.0s eval 0.74
        | 0A train 1A train 2R 31 tasks 3R 30 tasks | kv 83% · 4 paused | ranks [0] (training)        (one line on a terminal)

Roles: A actor, R rollout, F reference. Nothing else may write to the console while a job runs.
"""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Mapping
from typing import TextIO

from tiderl.scheduling.actions import ReportEvaluation, ReportStep
from tiderl.types import Rank, Role

logger = logging.getLogger(__name__)

_BAR_CELLS = 16
_ERASE_LINE = "\r\x1b[2K"
_LETTER = {Role.ACTOR: "A", Role.ROLLOUT: "R", Role.REF: "F"}


class Console:
    """Draws to `stream`. `mode`: "auto" (a bar on a terminal, lines elsewhere), "line", "off". Figures of a run with emulated
    backends say so."""

    def __init__(self, mode: str, num_steps: int, stream: TextIO | None = None, *, emulated: bool = False) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self._num_steps = num_steps
        self._off = mode == "off"
        self._live = mode == "auto" and self._stream.isatty()
        self._label = "emulated " if emulated else ""
        self._facts = "starting"
        self._eval = ""
        self._ranks = ""
        self._done = 0
        self._drawn = False

    def step(self, report: ReportStep) -> None:
        """A training step is over."""
        m = report.metrics
        self._done = report.step + 1
        parts = [
            f"reward {m['reward']:.2f}",
            f"success {m['success']:.2f}",
            f"{_short(m['goodput'])} tok/s",
            f"RAS {m['ras']:.0f}",
            f"TPRM {m['tprm_s']:.1f}s" if "tprm_s" in m else "TPRM -",
            f"step {m['step_s']:.1f}s",
            f"twt {m['twt_s']:.1f}s",
            f"rwt {m['rwt_s']:.1f}s",
        ]
        self._facts = self._label + " ".join(parts)
        if not self._live:
            self._print(f"step {self._done}/{self._num_steps} {self._facts}{self._eval}{self._ranks}")

    def evaluation(self, report: ReportEvaluation) -> None:
        """An evaluation round is over."""
        self._eval = f" eval {report.success:.2f}"
        missing = f", {report.num_missing} missing" if report.num_missing else ""
        self._print(
            f"{self._label}evaluation of version {report.version}: success {report.success:.3f}, reward {report.reward:.3f}, "
            f"{report.turns:.1f} turns ({report.num_tasks} tasks{missing})"
        )

    def refresh(
        self,
        roles: Mapping[Rank, Role],
        phases: Mapping[Rank, str],
        kv_use: float,
        num_paused: int,
        waiting_for: str,
    ) -> None:
        """What every rank does now; draws on a terminal."""
        ranks = " ".join(f"{rank}{_LETTER[role]} {phases.get(rank, '?')}" for rank, role in sorted(roles.items()))
        paused = f" · {num_paused} paused" if num_paused else ""
        self._ranks = f" | {ranks} | kv {kv_use:.0%}{paused}"
        if self._live and not self._off:
            filled = _BAR_CELLS * self._done // max(1, self._num_steps)
            bar = "#" * filled + "." * (_BAR_CELLS - filled)
            line = f"[{bar}] {self._done}/{self._num_steps} {self._facts}{self._eval}{self._ranks} | {waiting_for}"
            width = shutil.get_terminal_size().columns - 1
            self._write(_ERASE_LINE + line[:width])
            self._drawn = True

    def warn(self, text: str) -> None:
        """Something that the user should see at once, even without a console."""
        if self._off:
            print(f"tiderl: {text}", file=sys.stderr)
        self._print(f"! {text}")

    def say(self, text: str) -> None:
        self._print(text)

    def close(self) -> None:
        """Leave the last drawn line as it is; what is written next gets a line of its own."""
        if self._drawn:
            self._write("\n")
            self._drawn = False

    def _print(self, text: str) -> None:
        if self._off:
            return
        self._write((_ERASE_LINE if self._drawn else "") + text + "\n")
        self._drawn = False

    def _write(self, text: str) -> None:
        """A console that nobody holds any more (`… | head`) must not end the job."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError as error:
            self._off = True
            logger.warning("the console is gone (%s): nothing more is written to it", error)


def _short(value: float) -> str:
    return f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}"
