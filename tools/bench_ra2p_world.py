"""Real actor and Ref ranks for `bench_ra2p.py`, each a process of its own, and the conductor that plays training steps on them.

The ranks are `tiderl.worker.process`, as in a job, with the real wire and the real channel of reference log-probs. In place of the
coordinator there is a conductor, which opens a step, feeds groups to `scheduling.step.OpenedStep` when their time has come, and
carries orders and events between it and the ranks. There are no rollout ranks, no environments and no weight syncs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tiderl.clock import JobClock
from tiderl.config.schema import Config
from tiderl.errors import TideError, WaitTimeout, WireError
from tiderl.scheduling import actions as ac
from tiderl.scheduling.events import MicroBatchTrained, RankJoined, StepTrained
from tiderl.scheduling.ra2p import Choice
from tiderl.scheduling.readiness import Signals
from tiderl.scheduling.step import OpenedStep
from tiderl.types import Pipelining, Rank, TaskId, Trajectory, WeightVersion
from tiderl.wire.job import Job
from tiderl.wire.messages import MicroBatchMessage, RankFailed, ScoreMessage, wire_codec
from tiderl.wire.sockets import JobKeys, ServerSocket
from tools.bench_ra2p_steps import StepEvent, StepRun, ready_group

LOOPBACK = "127.0.0.1"
#: How often silent ranks are looked after.
LOOK_AFTER_S = 1.0
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class TimedGroup:
    """A group that becomes ready so long after its step's opening (the job's seconds; 0.0: before it)."""

    ready_s: float
    trajectories: tuple[Trajectory, ...]


class World:
    """`roles.num_actors` actors and `roles.num_ref` Ref ranks. `timeouts.start_s` and `timeouts.step_s` bound the waits, in real
    seconds both. Raises `TideError` where a rank fails, with what it said."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self._config = config
        self._run_dir = run_dir
        roles = config.roles
        self._actors = tuple(Rank(r) for r in range(roles.num_actors))
        self._refs = tuple(Rank(r) for r in range(roles.num_actors, roles.num_actors + roles.num_ref))
        self.clock = JobClock(config.emulate.time_scale)
        self._codec = wire_codec(config.wire.max_message_bytes)
        self._keys = JobKeys.generate()
        self._wire = ServerSocket(self._keys, max_message_bytes=config.wire.max_message_bytes)
        self._receiving: asyncio.Future[tuple[int, list[bytes]]] | None = None
        self._processes: list[subprocess.Popen[str]] = []
        self._joined: set[Rank] = set()
        self._num_steps = 0
        self._version = WeightVersion(0)

    # --- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        ranks = (*self._actors, *self._refs)
        timeouts = self._config.timeouts
        port = await self._wire.bind(LOOPBACK)
        keys = self._keys.public_for_clients()
        job = Job(self._config, len(ranks), self._run_dir, None, LOOPBACK, LOOPBACK, port, keys)
        self._store = TCPStore(
            LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeouts.start_s)
        )
        for rank in ranks:
            self._launch(rank, len(ranks))
        first_input = self._processes[0].stdin
        assert first_input is not None
        first_input.write(job.to_json() + "\n")
        first_input.close()
        deadline_s = _loop_s() + timeouts.start_s
        while len(self._joined) < len(ranks):
            if _loop_s() >= deadline_s:
                missing = sorted(set(ranks) - self._joined)
                raise WaitTimeout("the bench", f"ranks {missing} to join", timeouts.start_s, "--start-timeout-s")
            message = await self._receive(deadline_s)
            if isinstance(message, RankJoined):
                self._joined.add(message.rank)

    def _launch(self, rank: Rank, world_size: int) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",  # four ranks on few cores
            "PYTHONPATH": str(ROOT),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(self._store.port),
            "TIDERL_START_TIMEOUT_S": str(self._config.timeouts.start_s),
        }
        self._processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "tiderl.worker.process"],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # what a rank has to say is in its log
                text=True,
            )
        )

    async def stop(self) -> None:
        """End all ranks, whatever they are doing."""
        for rank in self._joined:
            with contextlib.suppress(WireError):  # a rank that has gone already
                await self._send(rank, ac.Shutdown(0, "the bench is over"))
        for number, process in enumerate(self._processes):
            try:
                await asyncio.to_thread(
                    process.wait, self._config.timeouts.shutdown_s if number in self._joined else 0.0
                )
            except subprocess.TimeoutExpired:
                process.kill()
                await asyncio.to_thread(process.wait)
        if self._receiving is not None:
            self._receiving.cancel()
        await self._wire.close(linger_s=0.0)

    # --- a step ---------------------------------------------------------------------------------------------------

    async def play(self, way: Pipelining, groups: Sequence[TimedGroup]) -> StepRun:
        """One training step, with an update at its end; returns when all actors have left it."""
        coming = sorted(groups, key=lambda group: group.ready_s)
        trajectories = {t.task_id: t for group in groups for t in group.trajectories}
        refs = self._refs if way is Pipelining.DECOUPLED else ()
        number, self._num_steps = self._num_steps, self._num_steps + 1
        choice, signals = Choice(way, {}, "the bench says so"), Signals(0, None, 0.0)
        deadline_s = _loop_s() + self._config.timeouts.step_s
        opened_s = last_s = self.clock.now_s()
        step = OpenedStep(self._config, number, self._actors, refs, choice, signals, opened_s, 0.0)
        await self._order([ac.OpenStep(self._actors, number, self._version, way)], trajectories)
        events: list[StepEvent] = []
        while sum(isinstance(event, StepTrained) for event in events) < len(self._actors):
            now_s = self.clock.now_s()
            ready = [group for group in coming if opened_s + group.ready_s <= now_s]
            coming = coming[len(ready) :]
            if ready:  # together: what is there is dealt out at once
                await self._order(step.feed([ready_group(g.trajectories) for g in ready], now_s), trajectories)
            next_s = self.clock.real_s(opened_s + coming[0].ready_s - now_s) if coming else float("inf")
            if _loop_s() >= deadline_s:
                waited_for = f"ranks {step.waits_for()} to end a {way.value} step"
                raise WaitTimeout("the bench", waited_for, self._config.timeouts.step_s, "--step-timeout-s")
            message = await self._receive(min(deadline_s, _loop_s() + next_s))
            if isinstance(message, MicroBatchTrained):
                last_s = self.clock.now_s()
                await self._order(step.trained(message, last_s), trajectories)
            if isinstance(message, StepEvent):
                events.append(message)
        results = [event for event in events if isinstance(event, StepTrained)]
        if not all(result.updated for result in results):
            raise TideError(f"step {number} ({way.value}) made no update: {results}")
        self._version = results[0].version
        return StepRun(last_s - opened_s, (*self._actors, *refs), tuple(events))

    async def _order(self, actions: Sequence[ac.Action], trajectories: dict[TaskId, Trajectory]) -> None:
        for action in actions:
            if isinstance(action, ac.AssignMicroBatch):
                chosen = tuple(trajectories[task_id] for task_id in action.task_ids)
                await self._send(action.rank, MicroBatchMessage(action, chosen))
            elif isinstance(action, ac.ScoreMicroBatch):
                chosen = tuple(trajectories[task_id] for task_id in action.task_ids)
                await self._send(action.rank, ScoreMessage(action, chosen))
            elif isinstance(action, ac.OpenStep | ac.CloseStep):
                for rank in action.ranks:
                    await self._send(rank, action)
            else:
                raise TideError(f"a step of the bench asks for {type(action).__name__}, which nobody is there for")

    # --- messages -------------------------------------------------------------------------------------------------

    async def _send(self, rank: Rank, message: Any) -> None:
        await self._wire.send(rank, self._codec.encode(message))

    async def _receive(self, deadline_s: float) -> Any:
        """The next message of any rank; None where none has come by then (the event loop's seconds), or for a while."""
        if self._receiving is None:
            self._receiving = asyncio.ensure_future(self._wire.recv())
        await asyncio.wait([self._receiving], timeout=min(max(0.0, deadline_s - _loop_s()), LOOK_AFTER_S))
        if not self._receiving.done():
            self._require_alive()
            return None
        (_, frames), self._receiving = self._receiving.result(), None
        message = self._codec.decode(frames)
        if isinstance(message, RankFailed):
            raise TideError(f"rank {message.rank} cannot go on: {message.reason}")
        return message

    def _require_alive(self) -> None:
        for rank, process in enumerate(self._processes):
            if process.poll() is not None:
                log = self._run_dir / "logs" / f"rank_{rank:05d}.log"
                raise TideError(f"rank {rank} has ended with exit code {process.returncode}; its log: {log}")


def _loop_s() -> float:
    return asyncio.get_running_loop().time()
