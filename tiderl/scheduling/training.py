"""The training half of the core: one step after the other, and the weight sync between them.

    WAITING → STEPPING → (evaluation closes) → PREPARING → SYNCING → WAITING …

Owns the phase, the open step (`step.py`), the sync's roll call and the running checkpoint. `core.py` decides *when* a phase ends;
this module knows what a phase consists of and whom it waits for.

Invariants (tests/scheduling/test_core_machine.py):

1. Steps and syncs never overlap; a sync starts only when every member has said that it is ready (paper.md: handshake).
2. A step ends when every actor has left it; all actors must agree on whether it made an update.
3. Every phase that waits for a rank has a deadline, and can name whom it waits for.

Source: paper §2.1, §5.1 (colocated: reference and actor share the actor ranks), §5.2 (sync_params).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from tiderl.config.schema import Config
from tiderl.errors import IllegalEvent
from tiderl.scheduling.actions import AbandonStep, Action, OpenStep, PrepareSync, SaveCheckpoint, StartSync
from tiderl.scheduling.events import CheckpointSaved, MicroBatchTrained, StepTrained, SyncFinished, SyncReady
from tiderl.scheduling.lifecycle import Group
from tiderl.scheduling.ra2p import Choice
from tiderl.scheduling.readiness import Signals
from tiderl.scheduling.step import OpenedStep
from tiderl.types import Rank, WeightVersion


class Phase(enum.Enum):
    """What the trainer is doing."""

    JOINING = "joining"
    WAITING = "waiting for data"
    STEPPING = "training"
    UPDATED = "waiting for the evaluation"
    PREPARING = "calling the weight sync's members"
    SYNCING = "weight sync"
    SAVING = "saving"


@dataclass(slots=True)
class RollCall:
    """A sync in progress: who has answered so far."""

    version: WeightVersion
    members: tuple[Rank, ...]
    started_s: float
    ready: set[Rank] = field(default_factory=set)
    finished: dict[Rank, SyncFinished] = field(default_factory=dict)


class TrainingSide:
    """Phases of the trainer, from a batch to synced weights."""

    def __init__(self, config: Config, actors: tuple[Rank, ...]) -> None:
        self._config = config
        self.actors = actors
        self.phase = Phase.JOINING
        self.deadline_s: float | None = config.timeouts.start_s
        self.version = WeightVersion(0)
        self.step: OpenedStep | None = None
        self.sync: RollCall | None = None
        #: Actors whose part of a checkpoint is not on disk yet, by (updates, final).
        self.saving: dict[tuple[int, bool], set[Rank]] = {}
        #: Checkpoints that lack a part, because an actor could not save it; and steps of which all parts are on disk.
        self._broken_saves: set[tuple[int, bool]] = set()
        self.on_disk: set[int] = set()
        self.waiting_since_s = 0.0
        self.next_step = 0

    # --- a step ---------------------------------------------------------------------------------------------------

    def open_step(self, choice: Choice, signals: Signals, ref_ranks: tuple[Rank, ...], now_s: float) -> list[Action]:
        """The trainer begins a step; `feed` gives it its groups. `ref_ranks` score for a decoupled one."""
        assert self.phase is Phase.WAITING
        waited_s = now_s - self.waiting_since_s
        self.step = OpenedStep(self._config, self.next_step, self.actors, ref_ranks, choice, signals, now_s, waited_s)
        self.next_step += 1
        self._enter(Phase.STEPPING, None)
        return [OpenStep(self.actors, self.step.step, self.version, choice.pipelining)]

    def feed(self, groups: list[Group], now_s: float) -> list[Action]:
        """Give the open step these groups, and the actors what should be theirs; the step closes when it has all of its groups."""
        assert self.step is not None
        return self._bounded(self.step.feed(groups, now_s), now_s)

    def micro_batch_trained(self, event: MicroBatchTrained, now_s: float) -> list[Action]:
        """An actor is through with a micro-batch, and may be idle."""
        if self.step is None or event.step != self.step.step:
            raise IllegalEvent(f"rank {event.rank} trained on a micro-batch of step {event.step}, which is not open")
        return self._bounded(self.step.trained(event, now_s), now_s)

    def finish_colocated(self, reason: str) -> list[Action]:
        """A Ref rank is gone: the actors score the rest of the open step themselves."""
        return [] if self.step is None else self.step.finish_colocated(reason)

    def abandon(self, now_s: float) -> list[Action]:
        """Leave the open step, if there is one, without an update."""
        if self.step is None:
            return []
        actions: list[Action] = [AbandonStep(self.actors, self.step.step), *self.step.close(now_s)]
        return self._bounded(actions, now_s)

    def trained(self, event: StepTrained, now_s: float) -> OpenedStep | None:
        """An actor has left the step; returns the step when it was the last one."""
        step = self.step
        if step is None or event.step != step.step or event.rank not in self.actors or event.rank in step.results:
            raise IllegalEvent(f"rank {event.rank} left step {event.step}, but it is not in such a step")
        if not step.is_closed:
            raise IllegalEvent(f"rank {event.rank} left step {event.step}, which nobody has closed")
        if not event.abandoned and event.rank in step.busy_actors():
            raise IllegalEvent(
                f"rank {event.rank} left step {event.step} with micro-batches that it was not through with"
            )
        others = next(iter(step.results.values()), event)
        if (event.updated, event.abandoned, event.version) != (others.updated, others.abandoned, others.version):
            raise IllegalEvent(
                f"rank {event.rank} disagrees with rank {others.rank} on the outcome of step {event.step}"
            )
        if event.version != self.version + event.updated or (event.updated and event.abandoned):
            raise IllegalEvent(
                f"rank {event.rank} left step {event.step} with version {event.version} after {self.version}"
            )
        step.results[event.rank] = event
        if len(step.results) < len(self.actors):
            self._bounded([], now_s)
            return None
        self.version = event.version
        self.step = None
        return step

    def _bounded(self, actions: list[Action], now_s: float) -> list[Action]:
        """While actors have something to do, the next thing that they say has a bound; while they wait for data there is none."""
        assert self.step is not None
        waits_for_actors = self.step.is_closed or self.step.num_outstanding > 0
        self.deadline_s = now_s + self._config.timeouts.step_s if waits_for_actors else None
        return actions

    # --- the weight sync ------------------------------------------------------------------------------------------

    def hold(self, deadline_s: float | None) -> None:
        """The update is made; something else must end before the sync."""
        self._enter(Phase.UPDATED, deadline_s)

    def prepare_sync(self, members: tuple[Rank, ...], now_s: float) -> list[Action]:
        self.sync = RollCall(self.version, members, now_s)
        self._enter(Phase.PREPARING, now_s + self._config.timeouts.sync_s)
        return [PrepareSync(members, self.version)]

    def ready(self, event: SyncReady) -> list[Action]:
        sync = self.sync
        if sync is None or self.phase is not Phase.PREPARING or event.version != sync.version:
            raise IllegalEvent(f"rank {event.rank} is ready for a sync of version {event.version} that nobody called")
        if event.rank not in sync.members or event.rank in sync.ready:
            raise IllegalEvent(f"rank {event.rank} is no member of the sync, or was ready before")
        sync.ready.add(event.rank)
        if len(sync.ready) < len(sync.members):
            return []
        self._enter(Phase.SYNCING, self.deadline_s)
        return [StartSync(sync.members, sync.version, self.actors[0])]

    def finished(self, event: SyncFinished) -> RollCall | None:
        """A member is through; returns the roll call when it was the last one."""
        sync = self.sync
        if sync is None or self.phase is not Phase.SYNCING or event.version != sync.version:
            raise IllegalEvent(f"rank {event.rank} finished a sync of version {event.version} that did not start")
        if event.rank not in sync.members or event.rank in sync.finished:
            raise IllegalEvent(f"rank {event.rank} is no member of the sync, or has finished before")
        sync.finished[event.rank] = event
        if len(sync.finished) < len(sync.members):
            return None
        self.sync = None
        return sync

    def wait_for_data(self, now_s: float) -> None:
        """The trainer is free, under the newest weights."""
        self.waiting_since_s = now_s
        self._enter(Phase.WAITING, None)

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def save(self, now_s: float, *, final: bool) -> list[Action]:
        """Save; the job ends after a final save, and goes on beside any other."""
        self.saving[self.version, final] = set(self.actors)
        if final:
            self._enter(Phase.SAVING, now_s + self._config.timeouts.collective_s)
        return [SaveCheckpoint(self.actors, self.version, final)]

    def saved(self, event: CheckpointSaved) -> bool:
        """An actor has saved its part, or could not; True when all parts of that checkpoint are on disk."""
        key = (event.step, event.final)
        if event.rank not in self.saving.get(key, ()):
            raise IllegalEvent(f"rank {event.rank} saved step {event.step}, which nobody asked for")
        self.saving[key].remove(event.rank)
        if not event.ok:
            self._broken_saves.add(key)
        if self.saving[key]:
            return False
        del self.saving[key]
        if key in self._broken_saves:
            return False
        self.on_disk.add(event.step)
        return True

    def waits_for(self) -> str:
        """Whom the present phase waits for, in words."""
        missing: list[Rank] = []
        if self.phase is Phase.STEPPING and self.step is not None:
            missing = self.step.waits_for()
        elif self.phase is Phase.PREPARING and self.sync is not None:
            missing = [r for r in self.sync.members if r not in self.sync.ready]
        elif self.phase is Phase.SYNCING and self.sync is not None:
            missing = [r for r in self.sync.members if r not in self.sync.finished]
        elif self.phase is Phase.SAVING:
            missing = sorted(set().union(*self.saving.values()))
        return f"ranks {missing} ({self.phase.value})" if missing else self.phase.value

    def _enter(self, phase: Phase, deadline_s: float | None) -> None:
        self.phase = phase
        self.deadline_s = deadline_s
