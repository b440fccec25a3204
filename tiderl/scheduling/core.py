"""The scheduling core: one pure state machine that holds every decision of a job.

`handle(event, now_s)` checks the event, applies it, and decides: it returns the actions that follow. It has no clock, no
randomness and no I/O; two shells drive it, the live coordinator and the replay.

Invariants (tests/scheduling/test_core_machine.py, tests/replay/):

1. An illegal event raises `IllegalEvent` and changes nothing.
2. The same events at the same times give the same actions, in the same order.
3. Tokens are conserved (`ledger.py`), staleness is bounded (`staleness.py`), budgets hold (`ctb.py`).
4. The cost of an event does not depend on how many tasks there are, but for a logarithm; whole ranks are listed once a step.
5. While the job waits for a rank, `next_deadline_s` is set.

Source: paper §4, §5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tiderl.config.schema import Config
from tiderl.errors import IllegalEvent, UserError
from tiderl.scheduling import events as ev
from tiderl.scheduling.actions import Action, Note, ReportEvaluation, ReportLedger, ReportStep, Shutdown
from tiderl.scheduling.feeding import StepFeeder
from tiderl.scheduling.groups import GroupBook
from tiderl.scheduling.ledger import RankSeconds
from tiderl.scheduling.lifecycle import Group
from tiderl.scheduling.metrics import step_metrics
from tiderl.scheduling.ra2p import Ra2p
from tiderl.scheduling.rollout import RolloutSide
from tiderl.scheduling.step import OpenedStep
from tiderl.scheduling.training import Phase, RollCall, TrainingSide
from tiderl.types import GroupId, GroupSpec, Rank, Role, TaskKind, WeightVersion

#: Updates in a row that may be skipped because something was not finite, before the job ends.
MAX_SKIPPED_STEPS = 3

#: What is still taken down when the job has ended.
FOR_THE_LEDGER = (ev.TurnStarted, ev.TurnEnded, ev.TaskPaused, ev.TaskFinished, ev.TaskFailed, ev.SecondsSpent)

#: Version of `state_dict`'s layout.
STATE_FORMAT = 2


class Core:
    """See the module docstring. `world_size` ranks: actors first, then the pool, whose first `roles.num_ref` are Ref ranks."""

    def __init__(self, config: Config, world_size: int) -> None:
        self._config = config
        self._world_size = world_size
        num_actors = config.roles.num_actors
        self._roles = {Rank(r): config.roles.first_role(r) for r in range(world_size)}
        #: Ref ranks that died; the job goes on without them.
        self._lost: set[Rank] = set()
        self.ra2p = Ra2p(config)
        self._joined: set[Rank] = set()
        self._capacity_known = False
        self.training = TrainingSide(config, tuple(Rank(r) for r in range(num_actors)))
        self.book = GroupBook(config, WeightVersion(0))
        self.rollout = RolloutSide(config, self.book)
        self._feeder = StepFeeder(config, self.book, self.training, self.ra2p)
        self.seconds = RankSeconds(world_size)
        self._seconds_at_sync = self.seconds.balance()
        self._trained_groups: list[Group] = []
        self._num_skipped = 0
        self._last_step_end_s: float | None = None
        #: Until the first weight sync the rollout ranks of a resumed run hold the model that the run once started from.
        self._has_synced = False
        self._stopping: str | None = None
        self._stop_deadline_s: float | None = None
        self.ended = False
        self._handlers: dict[type, Callable[[Any, float], list[Action]]] = {
            ev.Tick: lambda e, t: [],
            ev.StopRequested: self._on_stop,
            ev.RankJoined: self._on_joined,
            ev.RankLost: self._on_lost,
            ev.EnvironmentCapacity: self._on_capacity,
            ev.GroupsSupplied: lambda e, t: self.rollout.supplied(e),
            ev.TurnStarted: lambda e, t: self.rollout.turn_started(e),
            ev.TurnEnded: lambda e, t: self.rollout.turn_ended(e),
            ev.TaskPaused: lambda e, t: self.rollout.paused(e),
            ev.PausedTaskLost: lambda e, t: self.rollout.paused_lost(e, t),
            ev.EngineLoad: lambda e, t: self.rollout.engine_load(e),
            ev.SecondsSpent: self._on_seconds,
            ev.TaskFinished: lambda e, t: self.rollout.finished(e, t),
            ev.TaskFailed: self._on_task_failed,
            ev.MicroBatchTrained: self._on_micro_batch_trained,
            ev.ReferenceScored: self._on_scored,
            ev.StepTrained: self._on_trained,
            ev.SyncReady: lambda e, t: self.training.ready(e),
            ev.SyncFinished: self._on_synced,
            ev.CheckpointSaved: self._on_saved,
        }

    # --- the contract with the shells -----------------------------------------------------------------------------

    def handle(self, event: ev.Event, now_s: float) -> tuple[Action, ...]:
        """Apply one event. Raises `IllegalEvent`, with nothing changed."""
        if self.ended:
            # The ranks are leaving; what they still report of their tasks and of their time belongs in the ledger.
            if isinstance(event, FOR_THE_LEDGER):
                self._handlers[type(event)](event, now_s)
            return ()
        actions = self._handlers[type(event)](event, now_s)
        # A decision may make room for another: until nothing follows any more.
        while not self.ended and (more := self._decide(now_s)):
            actions += more
        return tuple(actions)

    def next_deadline_s(self) -> float | None:
        """When the shell must send `Tick` if nothing else has happened."""
        if self.ended:
            return None
        deadlines = [self.training.deadline_s, self._stop_deadline_s]
        return min((d for d in deadlines if d is not None), default=None)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed job needs, as plain values: groups whose fate is open are played again, none is skipped or doubled."""
        specs = [[s.group_id, s.kind.value, s.env, s.split, s.seed, s.task_type] for s in self.rollout.open_specs()]
        return {
            "format": STATE_FORMAT,
            "version": self.training.version,
            "next_step": self.training.next_step,
            "num_supplied": self.rollout.supply.num_supplied,
            "open_groups": specs,
            "ledger": self.book.ledger.balances(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state; only before the first event."""
        if state["format"] != STATE_FORMAT:
            raise UserError(
                f"the checkpoint's scheduler state has format {state['format']}, this version reads {STATE_FORMAT}"
            )
        assert not self._joined
        self.training.version = WeightVersion(state["version"])
        self.training.next_step = state["next_step"]
        self.rollout.supply.num_supplied = state["num_supplied"]
        self.rollout.supply.to_restart = [
            GroupSpec(GroupId(gid), TaskKind(kind), env, split, seed, task_type)
            for gid, kind, env, split, seed, task_type in state["open_groups"]
        ]
        self.book.ledger.restore(state["ledger"])
        self.book.gate.advance(self.training.version)

    @property
    def roles(self) -> Mapping[Rank, Role]:
        return self._roles

    # --- start and end --------------------------------------------------------------------------------------------

    def _on_joined(self, event: ev.RankJoined, now_s: float) -> list[Action]:
        if event.rank in self._joined or self._roles.get(event.rank) is not event.role:
            raise IllegalEvent(f"rank {event.rank} joined as {event.role.value}, which it is not, or joined twice")
        if event.role is Role.ACTOR and event.weight_version != self.training.version:
            raise IllegalEvent(
                f"rank {event.rank} has weights of version {event.weight_version}, the scheduler {self.training.version}"
            )
        if event.role is Role.ROLLOUT and (event.num_kv_blocks < 1 or event.kv_block_tokens < 1):
            raise IllegalEvent(f"rank {event.rank} joined without a KV cache")
        self._joined.add(event.rank)
        if event.role is Role.ROLLOUT:
            self.rollout.add_rank(event.rank, event.num_kv_blocks, event.kv_block_tokens, now_s)
        return []

    def _on_capacity(self, event: ev.EnvironmentCapacity, now_s: float) -> list[Action]:
        self._capacity_known = True
        self.rollout.batching.set_capacity(event.num_sessions)
        return []

    def _on_lost(self, event: ev.RankLost, now_s: float) -> list[Action]:
        role = self._roles.get(event.rank)
        if role is None or event.rank in self._lost:
            raise IllegalEvent(f"rank {event.rank} was lost, but there is no such rank")
        if role is not Role.REF or self.training.phase is Phase.JOINING:
            return self._fail(f"rank {event.rank} ({role.value}) is lost: {event.reason}")
        self._lost.add(event.rank)
        left = len(self._ref_ranks())
        actions = self.training.finish_colocated(f"Ref rank {event.rank} is lost: {event.reason}")
        this_step = "the actors score the rest of this step themselves, " if actions else ""
        text = f"Ref rank {event.rank} is lost: {event.reason}; {this_step}{left} Ref ranks are left for the next"
        return [Note("warning", text), *actions]

    def _ref_ranks(self) -> tuple[Rank, ...]:
        return tuple(r for r, role in self._roles.items() if role is Role.REF and r not in self._lost)

    def _sync_members(self) -> tuple[Rank, ...]:
        """Who holds the actor's weights, or gets them."""
        return tuple(r for r, role in self._roles.items() if role is not Role.REF)

    def _on_stop(self, event: ev.StopRequested, now_s: float) -> list[Action]:
        if self._stopping is not None:
            return []
        self._stopping = event.reason
        self._stop_deadline_s = now_s + self._config.timeouts.shutdown_s
        actions: list[Action] = [Note("info", f"stopping: {event.reason}"), *self.rollout.stop_training_tasks()]
        return actions + self.training.abandon(now_s)

    def _on_seconds(self, event: ev.SecondsSpent, now_s: float) -> list[Action]:
        if event.rank not in self._roles:
            raise IllegalEvent(f"rank {event.rank} told how it spent its time, but there is no such rank")
        self.seconds.tell(event.rank, event.seconds, now_s)
        return []

    def _fail(self, reason: str, exit_code: int = 1) -> list[Action]:
        self.ended = True
        self.rollout.abandon()
        return [Note("error", reason), Shutdown(exit_code, reason)]

    def _finish(self, reason: str) -> list[Action]:
        self.ended = True
        return [Shutdown(0, reason)]

    # --- what the ranks report ------------------------------------------------------------------------------------

    def _on_task_failed(self, event: ev.TaskFailed, now_s: float) -> list[Action]:
        actions = self.rollout.failed(event, now_s)
        limit = self._config.rollout.max_failures_in_a_row
        if self.rollout.failures_in_a_row < limit:
            return actions
        reason = (
            f"{limit} tasks failed in a row (rollout.max_failures_in_a_row): something is wrong with all of them; "
            f"the last failure was {event.kind.value}: {event.detail}"
        )
        return actions + self._fail(reason, exit_code=2)

    def _on_micro_batch_trained(self, event: ev.MicroBatchTrained, now_s: float) -> list[Action]:
        actions = self.training.micro_batch_trained(event, now_s)
        self.ra2p.trained(event)
        return actions

    def _on_scored(self, event: ev.ReferenceScored, now_s: float) -> list[Action]:
        if self._roles.get(event.rank) is not Role.REF:
            raise IllegalEvent(f"rank {event.rank} scored a micro-batch, but it is no Ref rank")
        self.ra2p.scored(event)
        return []

    def _on_trained(self, event: ev.StepTrained, now_s: float) -> list[Action]:
        if event.abandoned and self._stopping is None:
            raise IllegalEvent(f"rank {event.rank} abandoned step {event.step}, but nobody has asked for it")
        step = self.training.trained(event, now_s)
        self.ra2p.stepped(event)
        return [] if step is None else self._end_step(step, event, now_s)

    def _end_step(self, step: OpenedStep, last: ev.StepTrained, now_s: float) -> list[Action]:
        if last.abandoned:
            # The groups stay open: a resumed job plays them again.
            self.training.wait_for_data(now_s)
            return [Note("info", f"step {step.step} was abandoned")]
        actions: list[Action] = []
        if last.updated:
            self._num_skipped = 0
            since_s = self._last_step_end_s if self._last_step_end_s is not None else step.opened_s - step.waited_s
            metrics = step_metrics(step, self.rollout, now_s, since_s)
            num_tokens = sum(self.book.retire(group) for group in step.groups)
            self._trained_groups = step.groups
            actions.append(ReportStep(self.training.version - 1, {**metrics, "trained_tokens": float(num_tokens)}))
            every = self._config.checkpoint.every
            if every and self.training.version % every == 0 and self.training.version < self._config.train.steps:
                actions += self.training.save(now_s, final=False)
            round_ = self.rollout.round
            if round_ is not None:
                round_.deadline_s = now_s + self._config.eval.max_wait_s
            self.training.hold(round_.deadline_s if round_ is not None else None)
        else:
            self._num_skipped += 1
            reason = f"step {step.step} made no update: a loss or a gradient was not finite"
            actions.append(Note("error", reason))
            actions += [self.book.drop_trained(group, reason) for group in step.groups]
            if self._num_skipped >= MAX_SKIPPED_STEPS:
                return actions + self._fail(
                    f"{MAX_SKIPPED_STEPS} steps in a row made no update (loss or gradient not finite)"
                )
            self.training.wait_for_data(now_s)
            self.book.ready.start_step(now_s)
        self._last_step_end_s = now_s
        return actions

    def _on_synced(self, event: ev.SyncFinished, now_s: float) -> list[Action]:
        sync = self.training.finished(event)
        if not event.ok:
            return self._fail(f"rank {event.rank} did not get weights {event.version}: {event.detail}")
        return [] if sync is None else self._end_sync(sync, now_s)

    def _end_sync(self, sync: RollCall, now_s: float) -> list[Action]:
        self._has_synced = True
        self.book.gate.advance(sync.version)
        self.book.gate.retire(len(self._trained_groups))
        self._trained_groups = []
        self.training.wait_for_data(now_s)
        self.book.ready.start_step(now_s)
        longest = max(sync.finished.values(), key=lambda e: (e.transfer_s + e.load_s, e.rank))
        gap = max(e.canary_gap for e in sync.finished.values())
        actions: list[Action] = [
            Note(
                "info",
                f"weights {sync.version} on {len(sync.members)} ranks in {now_s - sync.started_s:.2f} s (slowest: rank "
                f"{longest.rank}, transfer {longest.transfer_s:.2f} s, load {longest.load_s:.2f} s), canary gap {gap:.1e}",
            ),
            self._report_ledger(sync.version),
        ]
        every = self._config.eval.every
        is_last = sync.version >= self._config.train.steps
        if every and (sync.version % every == 0 or is_last) and self._stopping is None:
            actions += self.rollout.open_round(sync.version, now_s + self._config.eval.max_wait_s)
        if is_last:
            actions += self.rollout.stop_training_tasks()
        return actions

    def _report_ledger(self, version: WeightVersion) -> ReportLedger:
        balance = self.seconds.balance()
        step = balance.since(self._seconds_at_sync)
        self._seconds_at_sync = balance
        return ReportLedger(version, step.seconds, step.elapsed_s, step.error, self.book.ledger.balances())

    def _on_saved(self, event: ev.CheckpointSaved, now_s: float) -> list[Action]:
        complete = self.training.saved(event)
        actions: list[Action] = []
        if not event.ok:
            text = f"rank {event.rank} could not save step {event.step}: {event.detail}"
            if event.final:
                return self._fail(text)
            actions.append(Note("error", text))
        if complete:
            actions.append(Note("info", f"checkpoint of step {event.step} is on disk"))
        if self.training.phase is Phase.SAVING and not self.training.saving:
            actions += self._finish(self._stopping or f"all {self._config.train.steps} steps are done")
        return actions

    # --- decisions ------------------------------------------------------------------------------------------------

    def _decide(self, now_s: float) -> list[Action]:
        """Everything that the present state allows, in a fixed order."""
        actions: list[Action] = []
        if self._is_late(self._stop_deadline_s, now_s):
            return self._fail(
                f"the state could not be saved in timeouts.shutdown_s; waiting for {self.training.waits_for()}"
            )
        training = self.training
        if training.phase is Phase.JOINING:
            if self._stopping is not None:
                return self._finish(self._stopping)
            if self._is_late(training.deadline_s, now_s):
                missing = [r for r in self._roles if r not in self._joined]
                return self._fail(f"ranks {missing} have not joined within timeouts.start_s")
            if len(self._joined) == self._world_size and self._capacity_known:
                actions += training.prepare_sync(self._sync_members(), now_s)
            return actions
        actions += self._close_evaluation(now_s)
        if training.phase is Phase.WAITING:
            actions += self._use_free_trainer(now_s)
        elif training.phase is Phase.STEPPING and self._stopping is None:
            actions += self._feeder.go_on(now_s)
        elif training.phase is Phase.UPDATED and self._stopping is not None:
            actions += training.save(now_s, final=True)
        elif training.phase is Phase.UPDATED and self.rollout.round is None:
            actions += training.prepare_sync(self._sync_members(), now_s)
        if training.phase not in (Phase.UPDATED, Phase.WAITING) and self._is_late(training.deadline_s, now_s):
            return actions + self._fail(f"waited in vain for {training.waits_for()}; the bound is in [timeouts]")
        if self._has_synced:
            actions += self.rollout.request_supply()
            actions += self.rollout.place_tasks(now_s)
        return actions

    def _close_evaluation(self, now_s: float) -> list[Action]:
        """End the round when it is complete, when the sync has waited long enough for it, or when the job stops."""
        open_round = self.rollout.round
        if open_round is None:
            return []
        supplied = open_round.num_tasks > 0
        done = supplied and not open_round.open_tasks
        blocks = self.training.phase is Phase.UPDATED or self._all_trained
        late = blocks and self._is_late(open_round.deadline_s, now_s)
        if not (done or late or self._stopping is not None):
            return []
        closed, actions = self.rollout.close_round()
        report: ReportEvaluation = closed.report()
        if not report.complete and self._stopping is None:
            actions.append(
                Note(
                    "warning",
                    f"evaluation of version {report.version} is incomplete: {report.num_missing} tasks missing",
                )
            )
        if self._stopping is None:
            actions.append(report)
        return actions

    def _use_free_trainer(self, now_s: float) -> list[Action]:
        training, rollout = self.training, self.rollout
        if self._stopping is not None or (self._all_trained and rollout.round is None):
            return training.save(now_s, final=True)
        if self._all_trained:
            assert rollout.round is not None
            training.deadline_s = rollout.round.deadline_s
            return []
        return self._feeder.begin(self._ref_ranks(), now_s)

    @property
    def _all_trained(self) -> bool:
        return self.training.version >= self._config.train.steps

    @staticmethod
    def _is_late(deadline_s: float | None, now_s: float) -> bool:
        return deadline_s is not None and now_s >= deadline_s
