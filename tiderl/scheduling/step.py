"""One training step in progress: the groups that it has taken, the micro-batches cut from them, and who is through with which.

Groups come as they become ready. Their trajectories wait here until there are enough to give every actor a full micro-batch, or
until an actor is idle, or until the step has all of its groups; then they are dealt out (`dispatch.py`). So early micro-batches
are full, an actor never idles beside work, and the last one is as small as it can be.

Invariants (tests/scheduling/test_step.py, test_core_machine.py):

1. Every trajectory of every group is assigned exactly once, with its advantage; the step closes with the last of them.
2. No trajectory waits while an actor has nothing to do.
3. Decoupled, every micro-batch is scored by one Ref rank, the one with the fewest tokens before it; once the step is finished
   colocated, by its actor.

Source: paper §5.1 (streaming, micro-batch dispatch).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tiderl.config.schema import Config
from tiderl.errors import IllegalEvent
from tiderl.scheduling import dispatch
from tiderl.scheduling.actions import Action, AssignMicroBatch, CloseStep, FinishColocated, ScoreMicroBatch
from tiderl.scheduling.advantages import group_advantages
from tiderl.scheduling.events import MicroBatchTrained, StepTrained
from tiderl.scheduling.lifecycle import Group, GroupState
from tiderl.scheduling.ra2p import Choice
from tiderl.scheduling.readiness import Signals
from tiderl.types import MicroBatchId, Rank, TaskId

#: Ids of micro-batches are the step's number times this, and on.
_MAX_MICRO_BATCHES = 1_000_000


@dataclass(slots=True)
class OpenedStep:
    """See the module docstring. `ref_ranks` score for a decoupled step."""

    config: Config
    step: int
    actors: tuple[Rank, ...]
    ref_ranks: tuple[Rank, ...]
    choice: Choice
    signals: Signals
    opened_s: float
    #: What the trainer waited before the step opened, and, all actors idle, since then.
    waited_s: float
    groups: list[Group] = field(default_factory=list)
    is_closed: bool = False
    #: When the newest micro-batch was done.
    last_trained_s: float = 0.0
    results: dict[Rank, StepTrained] = field(default_factory=dict)
    _pending: list[tuple[int, TaskId]] = field(default_factory=list)
    _advantages: dict[TaskId, float] = field(default_factory=dict)
    #: Tokens given to each actor in this step, and the micro-batches that it is not through with.
    _loads: list[int] = field(default_factory=list)
    _outstanding: list[set[MicroBatchId]] = field(default_factory=list)
    _ref_loads: dict[Rank, int] = field(default_factory=dict)
    _num_micro_batches: int = 0
    _idle_since_s: float | None = None

    def __post_init__(self) -> None:
        self._loads = [0] * len(self.actors)
        self._outstanding = [set() for _ in self.actors]
        self._ref_loads = dict.fromkeys(self.ref_ranks, 0)
        self._idle_since_s = self.opened_s

    @property
    def room(self) -> int:
        """How many groups the step may still take."""
        return 0 if self.is_closed else self.config.train.groups_per_step - len(self.groups)

    @property
    def num_outstanding(self) -> int:
        """Micro-batches that were assigned and not trained on."""
        return sum(len(micro_batches) for micro_batches in self._outstanding)

    def feed(self, groups: list[Group], now_s: float) -> list[Action]:
        assert len(groups) <= self.room
        for group in groups:
            group.state = GroupState.TRAINING
            tasks = group.finished
            values = group_advantages([t.reward for t in tasks], by_std=self.config.loss.normalize_advantage_by_std)
            for task, value in zip(tasks, values, strict=True):
                self._advantages[task.task_id] = value
                self._pending.append((task.context_tokens, task.task_id))
        self.groups += groups
        return self._deal(now_s)

    def trained(self, event: MicroBatchTrained, now_s: float) -> list[Action]:
        """Raises `IllegalEvent` for a micro-batch that this actor does not have."""
        place = self.actors.index(event.rank) if event.rank in self.actors else None
        if place is None or event.micro_batch_id not in self._outstanding[place]:
            raise IllegalEvent(
                f"rank {event.rank} trained on micro-batch {event.micro_batch_id}, which it does not have"
            )
        self._outstanding[place].remove(event.micro_batch_id)
        self.last_trained_s = now_s
        if not self.num_outstanding and not self.is_closed:
            self._idle_since_s = now_s
        return [] if self.is_closed else self._deal(now_s)

    def finish_colocated(self, reason: str) -> list[Action]:
        if not self._ref_loads:
            return []
        self._ref_loads = {}
        return [FinishColocated(self.actors, self.step, reason)]

    def close(self, now_s: float) -> list[Action]:
        """Nothing more is assigned in this step."""
        if self.is_closed:
            return []
        self._count_waiting(now_s)
        self.is_closed = True
        return [CloseStep(self.actors, self.step, self._num_micro_batches)]

    def waits_for(self) -> list[Rank]:
        """Actors that the step cannot go on without."""
        return [r for r in self.actors if r not in self.results] if self.is_closed else self.busy_actors()

    def busy_actors(self) -> list[Rank]:
        """Actors that are not through with their micro-batches."""
        return [rank for rank, left in zip(self.actors, self._outstanding, strict=True) if left]

    def _deal(self, now_s: float) -> list[Action]:
        """Hand out what waits here, if it is time to; close the step if that was the last of it."""
        is_complete = self.room == 0
        idle = any(not micro_batches for micro_batches in self._outstanding)
        num_tokens = sum(length for length, _ in self._pending)
        max_tokens = self.config.trainer.max_micro_batch_tokens
        if not (
            is_complete or (self._pending and (idle or dispatch.saturates(num_tokens, len(self.actors), max_tokens)))
        ):
            return []
        decoupled = bool(self._ref_loads)
        shares = dispatch.spread(self._pending, self._loads, max_tokens, smallest_last=decoupled)
        self._pending = []
        actions = [action for share in shares for action in self._assign(share)]
        if shares:
            self._count_waiting(now_s)
        return actions + self.close(now_s) if is_complete else actions

    def _assign(self, share: dispatch.Share) -> list[Action]:
        # Unique in the run: steps and micro-batches of a step are both counted.
        number = MicroBatchId(self.step * _MAX_MICRO_BATCHES + self._num_micro_batches)
        self._num_micro_batches += 1
        self._loads[share.dp_index] += share.num_tokens
        self._outstanding[share.dp_index].add(number)
        actor = self.actors[share.dp_index]
        advantages = tuple(self._advantages[task_id] for task_id in share.task_ids)
        actions: list[Action] = [AssignMicroBatch(actor, self.step, number, share.task_ids, advantages)]
        if self._ref_loads:
            ref_rank = min(self._ref_loads, key=lambda rank: (self._ref_loads[rank], rank))
            self._ref_loads[ref_rank] += share.num_tokens
            actions.append(ScoreMicroBatch(ref_rank, self.step, number, actor, share.task_ids))
        return actions

    def _count_waiting(self, now_s: float) -> None:
        """The actors have something to do, or will have nothing more."""
        if self._idle_since_s is not None:
            self.waited_s += now_s - self._idle_since_s
            self._idle_since_s = None
