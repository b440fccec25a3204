"""The live shell of the scheduling core: receives, lets the core decide, performs. A process of its own beside rank 0.

    worker ── event ──▶ handle ──▶ actions ──▶ workers, buffer, paused tasks, task stream, metrics, console
                          │
                       journal

It owns what the core only names: the trajectories of finished tasks, the paused tasks, the task stream, the run folder. It makes no
decision of its own, except to declare a silent rank or a paused task's session lost.

Invariants (tests/integration/test_coordinator.py, tests/integration/test_coordinator_paused.py):

1. Every event that the core handled is in the journal, with the core's answer, in order.
2. Actions are performed in the core's order, and messages sent in it, beside the handling of further events; an action's answer
   is handled after the action's siblings were performed. Only the orders about one task may be sent later than others, together,
   while its lease is under renewal (`paused.py`).
3. A rank that sends nothing for `timeouts.lost_s` is lost, whatever it was doing.
4. Whatever ends the job, all ranks are told, the paused tasks' sessions are ended, and the wait for both is bounded.
5. A paused task goes on byte for byte as it came, on whatever rank.

Source: paper Appendix B (rank-0 coordinator).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tiderl.clock import JobClock
from tiderl.config.schema import Config
from tiderl.coordinator import checkpoints
from tiderl.coordinator.journal import JournalWriter
from tiderl.coordinator.membership import Membership
from tiderl.coordinator.paused import PausedTasks, SessionAdopter
from tiderl.coordinator.reports import Reports
from tiderl.coordinator.stream import TaskStream
from tiderl.errors import IllegalEvent, WireError
from tiderl.scheduling import actions as ac
from tiderl.scheduling import events as ev
from tiderl.scheduling.core import Core
from tiderl.types import MicroBatchId, Rank, TaskId, TaskKind, Trajectory
from tiderl.wire import messages as ms
from tiderl.wire.sockets import ServerSocket

logger = logging.getLogger(__name__)

#: How often the console is redrawn and silent ranks are looked for.
HOUSEKEEPING_S = 0.5


class Coordinator:
    """One run of a job. `sessions` reaches the environment sessions of paused tasks; it must outlive `run`."""

    def __init__(
        self,
        config: Config,
        core: Core,
        stream: TaskStream,
        wire: ServerSocket,
        journal: JournalWriter,
        reports: Reports,
        sessions: SessionAdopter,
        run_dir: Path,
        world_size: int,
    ) -> None:
        self._config = config
        self._core = core
        self._stream = stream
        self._wire = wire
        self._journal = journal
        self._reports = reports
        self._run_dir = run_dir
        self._codec = ms.wire_codec(config.wire.max_message_bytes)
        self._members = Membership(world_size, config.timeouts)
        self._buffer: dict[TaskId, Trajectory] = {}
        #: Of the open step, those handed out to actors that a Ref rank may have to score.
        self._assigned: dict[MicroBatchId, tuple[Trajectory, ...]] = {}
        self._paused = PausedTasks(sessions, config.timeouts.env_request_s, self._lost_paused)
        self._states: dict[int, dict[str, Any]] = {}
        self._inbox: deque[ev.Event] = deque()
        self._outbox: asyncio.Queue[tuple[Rank, Any]] = asyncio.Queue()
        self._clock = JobClock(config.emulate.time_scale)
        self._start_s = self._clock.now_s()
        self._next_train_group = core.rollout.supply.num_supplied
        self._end: ac.Shutdown | None = None
        self._farewell_deadline_s = 0.0
        #: Did the job end by something that the user can mend?
        self.user_error = False
        self._perform: dict[type, Callable[[Any], None]] = {
            ac.SupplyGroups: self._supply,
            ac.PauseTask: self._tell_player,
            ac.CancelTask: self._tell_player,
            ac.ResumeTask: self._resume,
            ac.EndPaused: self._end_paused,
            ac.AssignMicroBatch: self._assign,
            ac.ScoreMicroBatch: self._score,
            ac.CloseStep: lambda a: self._assigned.clear(),
            ac.DropTrajectories: self._drop,
            ac.SaveCheckpoint: self._save,
            ac.ReportStep: lambda a: self._reports.step(a, self.now_s(), self._members.gauges()),
            ac.ReportEvaluation: lambda a: self._reports.evaluation(a, self.now_s()),
            ac.ReportLedger: lambda a: self._reports.ledger(a, self.now_s()),
            ac.Note: self._reports.note,
            ac.Shutdown: self._shutdown,
        }

    def now_s(self) -> float:
        """Seconds since the coordinator's start: the core's clock."""
        return self._clock.now_s() - self._start_s

    def _real_s(self) -> float:
        """The same on the machine's clock, for what has its own: ranks' signs of life, and their leaving."""
        return self._clock.real_s(self.now_s())

    def tell(self, event: ev.Event) -> None:
        """An event from outside the wire (a signal, the environments)."""
        self._inbox.append(event)

    @property
    def gauges(self) -> dict[str, float]:
        """The newest gauges of all ranks, added up."""
        return self._members.gauges()

    @property
    def engine_generated_tokens(self) -> int:
        """Generated tokens by the engines' own count, of all ranks that have said farewell."""
        return sum(farewell.total_generated_tokens for farewell in self._members.farewells.values())

    async def run(self) -> ac.Shutdown:
        """Serve until the core ends the job and the ranks have left; returns the core's last word."""
        self._settle()
        receiving = asyncio.ensure_future(self._wire.recv())
        sending = asyncio.ensure_future(self._send_all())
        try:
            while self._end is None:
                await asyncio.wait(
                    {receiving, sending}, timeout=self._next_wake_s(), return_when=asyncio.FIRST_COMPLETED
                )
                if sending.done():
                    sending.result()  # it never ends by itself
                while receiving.done() and self._end is None:
                    self._take(receiving)
                    receiving = asyncio.ensure_future(self._wire.recv())
                    await asyncio.sleep(0)
                self._housekeep()
                self._settle()
            await self._say_farewell(receiving)
        finally:
            receiving.cancel()
            sending.cancel()
            await self._paused.close(self._farewell_left_s())
        return self._end

    # --- from the wire to the core --------------------------------------------------------------------------------

    def _next_wake_s(self) -> float:
        deadline_s = self._core.next_deadline_s()
        if deadline_s is None:
            return HOUSEKEEPING_S
        return max(0.0, min(HOUSEKEEPING_S, self._clock.real_s(deadline_s - self.now_s())))

    def _take(self, received: asyncio.Future[tuple[int, list[bytes]]]) -> None:
        """One message of a rank: facts for the core go to the inbox, data to the buffer."""
        try:
            number, frames = received.result()
        except WireError as error:
            logger.warning("a message is ignored: %s", error)
            return
        rank = Rank(number)
        self._members.heard(rank, self._real_s())
        try:
            message = self._codec.decode(frames)
        except WireError as error:
            # A fact that the core never hears of would be waited for without end.
            self._lose(rank, f"sent a message that cannot be read: {error}")
            return
        if isinstance(message, ms.TrajectoryMessage):
            self._buffer[message.event.task_id] = message.trajectory
            self._inbox.append(message.event)
        elif isinstance(message, ms.PausedMessage):
            self._paused.keep(message.task)
            self._inbox.append(message.event)
        elif isinstance(message, ms.Heartbeat):
            self._members.beat(message)
            if message.loop_lag_s > self._config.timeouts.heartbeat_s:
                logger.warning(
                    "rank %d's event loop was %.1f s late (phase %s)", rank, message.loop_lag_s, message.phase
                )
        elif isinstance(message, ms.Hello):
            logger.info("rank %d is process %d on %s", rank, message.pid, message.host)
        elif isinstance(message, ms.RankFailed):
            self.user_error |= message.user_error
            self._lose(rank, message.reason)
        elif isinstance(message, ms.Farewell):
            self._members.left(message)
        else:
            self._inbox.append(message)

    def _settle(self) -> None:
        """Let the core handle everything in the inbox, and perform its answers."""
        deadline_s = self._core.next_deadline_s()
        if deadline_s is not None and self.now_s() >= deadline_s:
            self._inbox.append(ev.Tick())
        while self._inbox:
            event = self._inbox.popleft()
            if isinstance(event, ev.PausedTaskLost) and not self._paused.forget(event.task_id):
                continue  # the core has resumed or ended it in the meantime
            ending = self._end is not None
            for action in self._handle(event):
                if not ending:  # afterwards events are only for the ledger
                    self._do(action)

    def _handle(self, event: ev.Event) -> tuple[ac.Action, ...]:
        """The core's answer to one event, journaled. An illegal one is a bug of a rank or of the core: it ends the job."""
        now_s = self.now_s()
        self._reports.load.count_event()
        try:
            actions = self._core.handle(event, now_s)
        except IllegalEvent as error:
            logger.error("illegal event %s: %s", event, error)
            if self._end is not None:
                return ()
            reason = f"a rank and the scheduler disagree: {error}"
            return (ac.Note("error", reason), ac.Shutdown(1, reason))
        self._journal.write(now_s, event, actions)
        return actions

    async def _send_all(self) -> None:
        """Send what is in the outbox, in order. A step's trajectories take a while: events are handled between two messages."""
        while True:
            await self._send(*await self._outbox.get())
            await asyncio.sleep(0)

    async def _send(self, rank: Rank, message: Any) -> None:
        try:
            await self._wire.send(rank, self._codec.encode(message))
        except WireError as error:
            logger.warning("%s for rank %d is not sent: %s", type(message).__name__, rank, error)
            if self._end is None:
                self._lose(rank, str(error))

    def _lose(self, rank: Rank, reason: str) -> None:
        """The core hears of it once, whatever else goes wrong with the rank."""
        if self._members.lose(rank):
            self._inbox.append(ev.RankLost(rank, reason))

    # --- from the core to the world -------------------------------------------------------------------------------

    def _do(self, action: ac.Action) -> None:
        perform = self._perform.get(type(action))
        if perform is not None:
            perform(action)
        for rank in _addressees(action):
            self._outbox.put_nowait((rank, action))

    def _supply(self, action: ac.SupplyGroups) -> None:
        if action.kind is TaskKind.EVAL:
            groups = self._stream.eval_round(action.count)
        else:
            first = self._next_train_group
            groups = tuple(self._stream.train_group(first + i) for i in range(action.count))
            self._next_train_group += action.count
        self._inbox.append(ev.GroupsSupplied(action.kind, groups))

    def _tell_player(self, action: ac.PauseTask | ac.CancelTask) -> None:
        self._paused.after_leaving(action.task_id, partial(self._outbox.put_nowait, (action.rank, action)))

    def _resume(self, action: ac.ResumeTask) -> None:
        self._paused.take(
            action.task_id, lambda task: self._outbox.put_nowait((action.rank, ms.ResumeMessage(action, task)))
        )

    def _end_paused(self, action: ac.EndPaused) -> None:
        logger.info("%d paused tasks are not needed any more: %s", len(action.task_ids), action.reason)
        self._paused.end(action.task_ids)

    def _lost_paused(self, task_id: TaskId, detail: str) -> None:
        self._inbox.append(ev.PausedTaskLost(task_id, detail))

    def _assign(self, action: ac.AssignMicroBatch) -> None:
        trajectories = tuple(self._buffer.pop(task_id) for task_id in action.task_ids)
        self._assigned[action.micro_batch_id] = trajectories
        self._outbox.put_nowait((action.rank, ms.MicroBatchMessage(action, trajectories)))

    def _score(self, action: ac.ScoreMicroBatch) -> None:
        self._outbox.put_nowait((action.rank, ms.ScoreMessage(action, self._assigned.pop(action.micro_batch_id))))

    def _drop(self, action: ac.DropTrajectories) -> None:
        for task_id in action.task_ids:
            # Trajectories of a step that made no update were handed out already.
            self._buffer.pop(task_id, None)

    def _save(self, action: ac.SaveCheckpoint) -> None:
        self._states[action.step] = self._core.state_dict()

    def _shutdown(self, action: ac.Shutdown) -> None:
        self._end = action

    def _housekeep(self) -> None:
        for rank, reason in self._members.newly_lost(self._real_s()):
            self._inbox.append(ev.RankLost(rank, reason))
        self._paused.check()
        roles, training = self._core.roles, self._core.training
        phases = {rank: beat.phase for rank, beat in self._members.beats.items()}
        num_paused = self._core.rollout.num_paused
        self._reports.refresh(roles, phases, self._members.gauges(), num_paused, training.waits_for())
        self._complete_checkpoints()

    def _complete_checkpoints(self) -> None:
        """Write our part of every checkpoint whose actors' parts are all on disk."""
        pending = {step for step, _ in self._core.training.saving}
        for step in sorted(self._states.keys() - pending):
            state = self._states.pop(step)
            if step not in self._core.training.on_disk:
                continue  # an actor's part failed, and the core has said so
            try:
                checkpoints.write_scheduler_state(checkpoints.checkpoint_dir(self._run_dir, step), state)
                checkpoints.keep_newest(self._run_dir, self._config.checkpoint.keep)
            except OSError as error:
                logger.error("checkpoint of step %d is incomplete: %s", step, error)
                self._reports.warn(f"checkpoint of step {step} is incomplete: {error}")

    # --- the end --------------------------------------------------------------------------------------------------

    async def _say_farewell(self, receiving: asyncio.Future[tuple[int, list[bytes]]]) -> None:
        """Tell all ranks to leave and collect their farewells, for at most `timeouts.shutdown_s`; meanwhile sessions are ended."""
        assert self._end is not None
        self._farewell_deadline_s = self._real_s() + self._config.timeouts.shutdown_s
        self._paused.end_all()
        if self._end.exit_code == 0:
            self._complete_checkpoints()
        for rank in self._members.present():
            self._outbox.put_nowait((rank, self._end))
        while self._members.present() and (left_s := self._farewell_left_s()) > 0.0:
            await asyncio.wait({receiving}, timeout=min(HOUSEKEEPING_S, left_s))
            if receiving.done():
                self._take(receiving)
                receiving = asyncio.ensure_future(self._wire.recv())
            self._settle()
        receiving.cancel()
        if self._members.present():
            logger.warning("ranks %s did not say farewell within timeouts.shutdown_s", self._members.present())
        self._reports.console.close()

    def _farewell_left_s(self) -> float:
        return max(0.0, self._farewell_deadline_s - self._real_s())


def _addressees(action: ac.Action) -> tuple[Rank, ...]:
    """The ranks that the action itself goes to; what carries data, or follows such a message, is sent by its `_perform`."""
    if isinstance(action, ac.StartTask):
        return (action.rank,)
    return getattr(action, "ranks", ())
