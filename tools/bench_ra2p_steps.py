"""What `bench_ra2p.py` plays and what it makes of it: arrival patterns, a step's figures, predictions held against measurements.

No process, no clock: from the groups and events of steps to the numbers of the JSON line (tests/unit/test_bench_ra2p.py).
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiderl.config.schema import Config
from tiderl.scheduling.events import MicroBatchTrained, ReferenceScored, StepTrained
from tiderl.scheduling.lifecycle import Group, GroupState, Task, TaskState
from tiderl.scheduling.ra2p import Choice, Ra2p, StepForecast
from tiderl.types import Finish, GroupId, GroupSpec, Pipelining, Rank, TaskId, TaskKind, Trajectory, WeightVersion

#: A choice is right where the chosen way took at most this share longer than the faster one.
TOLERANCE = 0.05
#: Lengths are drawn from 1 - SPREAD to 1 + SPREAD times their mean.
SPREAD = 0.2
#: Of a trajectory: its prompt, which carries no loss.
PROMPT_SHARE = 0.25

StepEvent = MicroBatchTrained | ReferenceScored | StepTrained


# --- what is played ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pattern:
    """`num_ready` groups lie there when the step opens; another one comes every `tprm_ratio` times a micro-batch's compute."""

    tprm_ratio: float
    num_ready: int

    def arrivals_s(self, num_groups: int, micro_batch_s: float) -> list[float]:
        """When each group becomes ready, in seconds after the step's opening."""
        coming = range(1, num_groups - self.num_ready + 1)
        return [0.0] * min(self.num_ready, num_groups) + [i * self.tprm_ratio * micro_batch_s for i in coming]

    def forecast(
        self, group_tokens: Sequence[int], micro_batch_s: float, *, num_actors: int, num_ref: int
    ) -> StepForecast:
        """The step as the scheduler would expect it: right in every arrival, and in the tokens of every group."""
        ready, coming = tuple(group_tokens[: self.num_ready]), tuple(group_tokens[self.num_ready :])
        return StepForecast(ready, coming, self.tprm_ratio * micro_batch_s, num_actors, num_ref)


#: TPRM from 0 to 3 times a micro-batch's compute. Four actors are through with a group in a quarter of that, so that the ways
#: differ most below 0.5; beyond it a step takes as long as its groups need to come, either way.
PATTERNS = (
    Pattern(0.0, 8),
    Pattern(0.1, 1),
    Pattern(0.1, 4),
    Pattern(0.2, 0),
    Pattern(0.2, 4),
    Pattern(0.25, 1),
    Pattern(0.25, 4),
    Pattern(0.35, 2),
    Pattern(0.35, 6),
    Pattern(0.5, 6),
    Pattern(0.75, 3),
    Pattern(1.0, 5),
    Pattern(1.25, 6),
    Pattern(1.5, 7),
    Pattern(1.75, 6),
    Pattern(2.0, 7),
    Pattern(2.25, 7),
    Pattern(2.5, 6),
    Pattern(2.75, 5),
    Pattern(3.0, 7),
)


def trajectories_of(
    num_groups: int, group_size: int, mean_tokens: int, vocab_size: int, seed: int
) -> list[tuple[Trajectory, ...]]:
    """Random tokens, group by group; the engine's log-probs are those of a model that knows nothing."""
    random = np.random.default_rng(seed)
    groups = []
    for group in range(num_groups):
        lengths = np.rint(mean_tokens * random.uniform(1 - SPREAD, 1 + SPREAD, group_size)).astype(int)
        tasks = [TaskId(group * group_size + place) for place in range(group_size)]
        groups.append(
            tuple(_trajectory(t, group, int(n), vocab_size, random) for t, n in zip(tasks, lengths, strict=True))
        )
    return groups


def _trajectory(
    task_id: TaskId, group: int, num_tokens: int, vocab_size: int, random: np.random.Generator
) -> Trajectory:
    generated = np.arange(num_tokens) >= PROMPT_SHARE * num_tokens
    return Trajectory(
        task_id=task_id,
        group_id=GroupId(group),
        kind=TaskKind.TRAIN,
        token_ids=random.integers(0, vocab_size, num_tokens, dtype=np.int32),
        generated=generated,
        log_probs=np.where(generated, -np.log(vocab_size), 0.0).astype(np.float32),
        weight_versions=np.where(generated, 0, -1).astype(np.int32),
        turns=(),
        images=(),
        reward=float(task_id % 2),
        success=bool(task_id % 2),
        finish=Finish.DONE,
    )


def ready_group(trajectories: Sequence[Trajectory]) -> Group:
    """The scheduler's record of a group that these trajectories complete."""
    group_id = trajectories[0].group_id
    spec = GroupSpec(group_id, TaskKind.TRAIN, "bench", "train", int(group_id), "bench")
    group = Group(spec, len(trajectories), 0, WeightVersion(0), state=GroupState.READY, num_finished=len(trajectories))
    group.tasks = [
        Task(t.task_id, group, TaskState.FINISHED, context_tokens=t.num_tokens, reward=t.reward) for t in trajectories
    ]
    return group


# --- what came of it --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepRun:
    """A step that was played: `step_s` from its opening to the last backward by the conductor's clock, and what the ranks said."""

    step_s: float
    ranks: tuple[Rank, ...]
    events: tuple[StepEvent, ...]

    def compute_s(self) -> dict[Rank, float]:
        """Reference, forward and backward of each rank; no swap, no wait."""
        return {rank: sum(_compute_s(event) for event in self.events if event.rank == rank) for rank in self.ranks}

    def idle_s(self) -> dict[Rank, float]:
        """What is left of the step beside a rank's compute and swaps: waits for data and for log-probs, orders on their way, the
        gathering of the parameters when it opens."""
        swap_s = dict.fromkeys(self.ranks, 0.0)
        for event in self.events:
            if isinstance(event, StepTrained):
                swap_s[event.rank] += event.swap_s
        return {rank: self.step_s - compute_s - swap_s[rank] for rank, compute_s in self.compute_s().items()}

    @property
    def num_swaps(self) -> int:
        """Of all ranks: how often a reference was brought to a device."""
        return sum(event.num_swaps for event in self.events if isinstance(event, StepTrained))

    @property
    def busiest_s(self) -> float:
        """Compute of the rank that has most of it: no schedule of the same micro-batches on the same ranks is shorter."""
        return max(self.compute_s().values())


def _compute_s(event: StepEvent) -> float:
    if isinstance(event, MicroBatchTrained):
        return event.reference_s + event.forward_s + event.backward_s
    # What `StepTrained` says is the sum of what its micro-batches said.
    return event.reference_s if isinstance(event, ReferenceScored) else 0.0


def figures(runs: Sequence[StepRun]) -> dict[str, Any]:
    """Medians over repetitions."""
    return {
        "step_s": statistics.median(run.step_s for run in runs),
        "compute_s": statistics.median(run.busiest_s for run in runs),
        "overhead_s": statistics.median(run.step_s - run.busiest_s for run in runs),
        "swaps": statistics.median(run.num_swaps for run in runs),
        "idle_s": {str(rank): statistics.median(run.idle_s()[rank] for run in runs) for rank in runs[0].ranks},
    }


def micro_batch_s(runs: Sequence[StepRun], num_groups: int) -> float:
    """Reference, forward and backward of one group's tokens on one rank: the median over repetitions."""
    return statistics.median(sum(run.compute_s().values()) / num_groups for run in runs)


# --- predicted against measured ---------------------------------------------------------------------------------------


class Predictor:
    """What `Ra2p` would say after the steps that it was told of. Asking changes nothing: there is no last choice to stay with."""

    def __init__(self, config: Config) -> None:
        self._ra2p = Ra2p(config)

    def learn(self, run: StepRun) -> None:
        for event in run.events:
            if isinstance(event, MicroBatchTrained):
                self._ra2p.trained(event)
            elif isinstance(event, ReferenceScored):
                self._ra2p.scored(event)
            else:
                self._ra2p.stepped(event)

    def choose(self, forecast: StepForecast) -> Choice:
        return copy.deepcopy(self._ra2p).choose(forecast)


def comparison(
    pattern: Pattern,
    chosen: Pipelining,
    predicted_s: Mapping[Pipelining, float],
    measured_s: Mapping[Pipelining, float],
) -> dict[str, Any]:
    """One pattern's line: of the ways that were measured, what was predicted, and which was chosen."""
    return {
        "tprm_ratio": pattern.tprm_ratio,
        "num_ready": pattern.num_ready,
        "chosen": chosen.value,
        "predicted_s": {way.value: predicted_s[way] for way in measured_s},
        "measured_s": {way.value: seconds for way, seconds in measured_s.items()},
    }


def summary(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How often the choice was right (`TOLERANCE`), what the worst one cost, and by what share predictions were too high (+) or too
    low (-). A pattern is decisive where the ways differ by more than the tolerance: elsewhere any choice is right."""
    losses: list[float] = []
    decisive: list[bool] = []
    errors: dict[str, list[float]] = {}
    for line in lines:
        measured_s = line["measured_s"]
        losses.append(measured_s[line["chosen"]] / min(measured_s.values()) - 1)
        decisive.append(max(measured_s.values()) / min(measured_s.values()) - 1 > TOLERANCE)
        for way, seconds in measured_s.items():
            errors.setdefault(way, []).append(line["predicted_s"][way] / seconds - 1)
    every = [error for of_way in errors.values() for error in of_way]
    return {
        "share_right": sum(loss <= TOLERANCE for loss in losses) / len(losses),
        "num_decisive": sum(decisive),
        "num_decisive_right": sum(d and loss <= TOLERANCE for d, loss in zip(decisive, losses, strict=True)),
        "max_loss": max(losses),
        "median_abs_error": statistics.median(map(abs, every)),
        "max_abs_error": max(map(abs, every)),
        "median_error": {way: statistics.median(of_way) for way, of_way in errors.items()},
    }
