"""Environments that have nothing but sizes and times: what Table 4's workloads, or recorded sessions, do to the rest of the system.

They run behind the real server, and have it wait as long as the environment that they stand for would work. Texts are the JSON of
`emulated_sizes.py`; the emulated engine's answers say how skilled the model is, and episodes end sooner as it learns.

Option: `time_scale`, by which all delays are divided; it must be the job's `emulate.time_scale`, which the agent checks.

Invariants (tests/unit/test_emulated_env.py):

1. Same split, seed and actions: same episode; the instruction is the same for all tasks of a workload.
2. A malformed action changes nothing, and the observation says so. The episode waits for a proper one.
3. Starting and stepping keep a worker busy for some 30 us, and import neither torch nor numpy.

Source: paper Table 4.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Protocol

from tiderl.envs.builtin.emulated_sizes import ActionSizes, InstructionSizes
from tiderl.envs.builtin.emulated_trace import RecordedEpisode, RecordedSession, read_trace
from tiderl.envs.builtin.emulated_workloads import (
    ALFWORLD,
    OSWORLD,
    SCIENCEBOARD,
    WEBSHOP,
    Episode,
    Opening,
    Reply,
    Workload,
)
from tiderl.envs.payload import PayloadError
from tiderl.envs.protocol import Observation, Started, Stepped
from tiderl.errors import UserError

#: Few enough for a mixed suite's types to travel in one answer.
NUM_TASKS = {"train": 10_000, "test": 1_000}
TRACE_VARIABLE = "TIDERL_TRACE_FILE"


class PlayedEpisode(Protocol):
    """`emulated_workloads.Episode`, or what is like it."""

    opening: Opening

    def act(self, skill: float, roll: int) -> Reply: ...


class EmulatedEnvironment:
    """One episode. What tasks there are is the subclasses' matter: `num_tasks`, `task_type` and `_episode`."""

    def __init__(self) -> None:
        self._played: PlayedEpisode | None = None
        self._time_scale = 1.0

    @classmethod
    def num_tasks(cls, split: str) -> int:
        """How many seeds the split has. Raises `ValueError` for an unknown split."""
        raise NotImplementedError

    @classmethod
    def task_type(cls, split: str, seed: int) -> str:
        raise NotImplementedError

    @classmethod
    def _episode(cls, split: str, seed: int) -> PlayedEpisode:
        raise NotImplementedError

    def start(self, split: str, seed: int, options: Mapping[str, Any]) -> Started:
        """Begin. Raises `ValueError` for an unknown split, seed or option."""
        num_tasks = self.num_tasks(split)
        if not 0 <= seed < num_tasks:
            raise ValueError(f"split {split} has the seeds 0 .. {num_tasks - 1}; got {seed}")
        self._time_scale = _read_options(options)
        self._played = self._episode(split, seed)
        opening = self._played.opening
        self._observation = opening.observation
        instruction = InstructionSizes(opening.instruction_filler, opening.instruction_tokens, self._time_scale)
        return Started(
            instruction.text(),
            Observation(opening.observation.text()),
            self.task_type(split, seed),
            opening.delay_s / self._time_scale,
        )

    def step(self, action: str) -> Stepped:
        """Play the JSON of an `ActionSizes`. Raises `RuntimeError` before `start` and after the end (the caller's mistake)."""
        if self._played is None:
            raise RuntimeError(
                "this emulated episode is not running: start it first, and start a new one after its end"
            )
        try:
            played = ActionSizes.read(action)
        except PayloadError as error:
            refused = replace(self._observation, num_tokens=1, error=f"not an emulated action: {error}")
            return Stepped(Observation(refused.text()), 0.0, done=False, success=False)
        reply = self._played.act(played.skill, played.roll)
        self._observation = reply.observation
        if reply.done:
            self._played = None
        delay_s = reply.delay_s / self._time_scale
        return Stepped(Observation(reply.observation.text()), reply.reward, reply.done, reply.success, delay_s)

    def close(self) -> None:
        self._played = None


class WorkloadEnvironment(EmulatedEnvironment):
    """Tasks of Table 4's workloads, one workload after the other."""

    workloads: ClassVar[tuple[Workload, ...]]

    @classmethod
    def num_tasks(cls, split: str) -> int:
        if split not in NUM_TASKS:
            raise ValueError(f"emulated workloads have the splits {', '.join(NUM_TASKS)}; got {split!r}")
        return NUM_TASKS[split]

    @classmethod
    def task_type(cls, split: str, seed: int) -> str:
        return cls.workloads[seed % len(cls.workloads)].name

    @classmethod
    def _episode(cls, split: str, seed: int) -> PlayedEpisode:
        return Episode(cls.workloads[seed % len(cls.workloads)], split, seed)


class EmulatedWebShop(WorkloadEnvironment):
    workloads = (WEBSHOP,)


class EmulatedAlfWorld(WorkloadEnvironment):
    workloads = (ALFWORLD,)


class EmulatedText(WorkloadEnvironment):
    """The paper's text suite: WebShop and AlfWorld, one task each in turn."""

    workloads = (WEBSHOP, ALFWORLD)


class EmulatedOSWorld(WorkloadEnvironment):
    workloads = (OSWORLD,)


class EmulatedScienceBoard(WorkloadEnvironment):
    workloads = (SCIENCEBOARD,)


class EmulatedTrace(EmulatedEnvironment):
    """The sessions of the file that TIDERL_TRACE_FILE names, as many tasks as sessions; both splits are the whole file."""

    @classmethod
    def num_tasks(cls, split: str) -> int:
        if split not in NUM_TASKS:
            raise ValueError(f"emulated-trace has the splits {', '.join(NUM_TASKS)}; got {split!r}")
        return len(_sessions())

    @classmethod
    def task_type(cls, split: str, seed: int) -> str:
        return _sessions()[seed].task_type

    @classmethod
    def _episode(cls, split: str, seed: int) -> PlayedEpisode:
        return RecordedEpisode(_sessions()[seed], split, seed)


def _sessions() -> tuple[RecordedSession, ...]:
    """Raises `UserError`."""
    # Not an option: the task types must be known before anything is started.
    path = os.environ.get(TRACE_VARIABLE, "")
    if not path:
        raise UserError(f"emulated-trace plays the sessions of a trace file: name it in the variable {TRACE_VARIABLE}")
    return read_trace(path)


def _read_options(options: Mapping[str, Any]) -> float:
    """The time scale. Raises `ValueError`."""
    unknown = sorted(set(options) - {"time_scale"})
    if unknown:
        raise ValueError(f"emulated environments know the option time_scale; got {', '.join(unknown)}")
    time_scale = options.get("time_scale", 1.0)
    if isinstance(time_scale, bool) or not isinstance(time_scale, int | float):
        raise ValueError(f"option time_scale must be a number, got {time_scale!r}")
    if not (math.isfinite(time_scale) and time_scale > 0):
        raise ValueError(f"option time_scale must be finite and more than 0, got {time_scale}")
    return float(time_scale)
