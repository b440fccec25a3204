"""The worker process of one rank: joins torchrun's world, connects to the coordinator, and lives in its role until told to leave.

Started by `tiderl.launch` as `python -m tiderl.worker.process`; rank 0 reads the job's description from standard input, the
others from torchrun's store. The main thread runs the event loop (messages, turn loops); the role's device thread runs everything
on the device, so that no forward pass ever delays a heartbeat.

Exit codes: 0 after `Shutdown(exit_code=0)`, 2 for a fault that the user can mend, 1 for everything else.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import socket
import sys
import time
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from tiderl.clock import JobClock
from tiderl.envs.auth import read_token
from tiderl.envs.client import EnvClient
from tiderl.errors import TideError, UserError, WaitTimeout
from tiderl.scheduling.actions import Shutdown
from tiderl.scheduling.events import SecondsSpent
from tiderl.scheduling.ledger import Activity
from tiderl.types import Rank
from tiderl.wire.job import Job
from tiderl.wire.messages import Farewell, Heartbeat, Hello, RankFailed, wire_codec
from tiderl.wire.sockets import WorkerSocket
from tiderl.worker import backends
from tiderl.worker.actor import ActorWorker
from tiderl.worker.context import RoleWorker, WorkerContext
from tiderl.worker.rollout import RolloutWorker
from tiderl.worker.seconds import RankMeter

logger = logging.getLogger(__name__)

_STORE_KEY = "job"


class WorkerProcess:
    """One rank's connection to the coordinator and its role."""

    def __init__(self, job: Job, rank: Rank, store: Store) -> None:
        self._job = job
        self._rank = rank
        self._store = store
        self._meter = RankMeter(JobClock(job.config.emulate.time_scale))
        self._codec = wire_codec(job.config.wire.max_message_bytes)
        self._outbox: asyncio.Queue[Any] = asyncio.Queue()
        self._role: RoleWorker | None = None
        self._shutdown: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        """The worker's life; returns the exit code."""
        config = self._job.config
        assert self._job.keys is not None
        wire = WorkerSocket(self._rank, max_message_bytes=config.wire.max_message_bytes)
        try:
            await wire.connect(
                self._job.address,
                self._job.keys,
                timeout_s=config.timeouts.start_s,
                lost_s=config.timeouts.lost_s,
            )
            # From here on the coordinator decides in which order ranks leave.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            return await self._serve(wire)
        finally:
            await wire.close()

    async def _serve(self, wire: WorkerSocket) -> int:
        """Work, speak and listen until told to leave, or until one of the three fails."""
        self.emit(Hello(self._rank, socket.gethostname(), os.getpid()))
        coroutines = (self._work(), self._send(wire), self._receive(wire), self._beat())
        parts: list[asyncio.Future[Any]] = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
        try:
            done, _ = await asyncio.wait({self._shutdown, *parts}, return_when=asyncio.FIRST_COMPLETED)
            if self._shutdown in done:
                return await self._leave(self._shutdown.result())
            for part in done:
                part.result()
            raise TideError("a part of the worker has ended without a cause")
        except Exception as error:  # the rank's last word: whatever it was, the coordinator must hear it
            logger.exception("rank %d cannot go on", self._rank)
            await self._say(wire, RankFailed(self._rank, _reason(error), isinstance(error, UserError)))
            return 2 if isinstance(error, UserError) else 1
        finally:
            await self._flush()
            for part in parts:
                part.cancel()

    def emit(self, message: Any) -> None:
        """Queue a message to the coordinator."""
        self._outbox.put_nowait(message)

    async def _work(self) -> None:
        self._role = await _make_role(self._job, self._rank, self._store, self.emit, self._meter)
        self.emit(await self._role.start())
        await self._role.run()

    async def _send(self, wire: WorkerSocket) -> None:
        while True:
            message = await self._outbox.get()
            await wire.send(self._codec.encode(message))
            self._outbox.task_done()

    async def _say(self, wire: WorkerSocket, message: Any) -> None:
        """Send past the queue, whose sender may be what has failed."""
        try:
            await wire.send(self._codec.encode(message))
        except TideError as error:
            logger.error("the coordinator cannot be told: %s", error)

    async def _flush(self) -> None:
        try:
            await asyncio.wait_for(self._outbox.join(), timeout=self._job.config.timeouts.heartbeat_s)
        except TimeoutError:
            logger.warning("%d messages to the coordinator could not be sent", self._outbox.qsize())

    async def _receive(self, wire: WorkerSocket) -> None:
        while True:
            message = self._codec.decode(await wire.recv())
            if isinstance(message, Shutdown):
                self._shutdown.set_result(message)
                await asyncio.Event().wait()  # nothing follows; `_serve` ends this part
            assert self._role is not None, "an order before the rank has joined"
            self._role.handle(message)

    async def _beat(self) -> None:
        interval_s = self._job.config.timeouts.heartbeat_s
        while True:
            due_s = time.monotonic() + interval_s
            await asyncio.sleep(interval_s)
            lag_s = max(0.0, time.monotonic() - due_s)
            phase = self._role.phase if self._role is not None else "start"
            gauges = self._role.gauges() if self._role is not None else {}
            self.emit(Heartbeat(self._rank, phase, lag_s, gauges))

    async def _leave(self, order: Shutdown) -> int:
        logger.info("leaving: %s", order.reason)
        self._meter.rest(Activity.SHUTDOWN)
        total = 0
        if self._role is not None:
            try:
                total = await asyncio.wait_for(self._role.stop(), timeout=self._job.config.timeouts.shutdown_s)
            except (TimeoutError, TideError) as error:
                logger.warning("the role could not be stopped in order: %r", error)
        self.emit(SecondsSpent(self._rank, self._meter.totals()))
        self.emit(Farewell(self._rank, total))
        return order.exit_code


async def _make_role(job: Job, rank: Rank, store: Store, emit: Any, meter: RankMeter) -> RoleWorker:
    """Join the world, make the groups (once, in the same order on all ranks), build the role."""
    config = job.config
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=config.timeouts.collective_s)

    def join() -> tuple[Any, Any, Any]:
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=job.world_size, timeout=timeout)
        actors = list(range(config.roles.num_actors))
        pool = list(range(config.roles.num_actors, job.world_size))
        actor_group = dist.new_group(actors, timeout=timeout)
        storage_group = dist.new_group(actors, backend="gloo", timeout=timedelta(seconds=config.timeouts.step_s))
        sync_group = dist.new_group([0, *pool], timeout=timeout)
        is_actor, is_member = rank in actors, rank in (0, *pool)
        return actor_group if is_actor else None, storage_group if is_actor else None, sync_group if is_member else None

    actor_group, storage_group, sync_group = await asyncio.to_thread(join)
    context = WorkerContext(
        config,
        rank,
        job.run_dir,
        job.resume_dir,
        device,
        actor_group,
        storage_group,
        sync_group,
        emit,
        meter.clock,
        meter,
    )
    if rank < config.roles.num_actors:
        return ActorWorker(context, backends.make_trainer(context, job.world_size), backends.vocab_size(config))
    token = read_token(config.env.token_file)
    sessions = EnvClient(config.env.urls, token, config.timeouts.env_request_s, env=config.env.name)
    chat = await backends.make_chat(config)
    return RolloutWorker(context, backends.make_engine(context), sessions, chat, backends.vocab_size(config))


def _reason(error: BaseException) -> str:
    """The cause in one paragraph for what was foreseen, with the place of the fault for what was not."""
    if isinstance(error, TideError):
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"


def _join_store(rank: Rank) -> tuple[Job, Store]:
    """Torchrun's store, under a prefix of this start of the job, and the job's description."""
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    bound_s = float(os.environ["TIDERL_START_TIMEOUT_S"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    tcp_store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=bound_s))
    store = PrefixStore(f"tiderl/{restart}", tcp_store)
    if rank == 0:
        text = sys.stdin.readline()
        store.set(_STORE_KEY, text)
    else:
        try:
            text = store.get(_STORE_KEY).decode()
        except dist.DistStoreError as error:
            raise WaitTimeout(f"rank {rank}", "rank 0's description of the job", bound_s, "timeouts.start_s") from error
    return Job.from_json(text), store


def _log_to_file(job: Job, rank: Rank) -> None:
    """From here on everything that this process prints, native libraries included, goes to the rank's own log."""
    folder = job.run_dir / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank_{rank:05d}.log"
    print(f"log: {path}", flush=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname).1s %(name)s: %(message)s", force=True
    )


def main() -> None:
    rank = Rank(int(os.environ["RANK"]))
    job, store = _join_store(rank)
    _log_to_file(job, rank)
    # `kill -USR1 PID` writes the stacks of all threads to the rank's log: where a hanging rank hangs.
    faulthandler.register(signal.SIGUSR1, all_threads=True)

    async def live() -> None:
        code = await WorkerProcess(job, rank, store).run()
        logging.shutdown()
        # Threads of engines and gloo may be stuck for good, and the event loop would join them: nothing is worth waiting for.
        os._exit(code)

    asyncio.run(live())


if __name__ == "__main__":
    main()
