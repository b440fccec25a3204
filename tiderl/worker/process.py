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
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from tiderl.clock import JobClock
from tiderl.envs.auth import read_token
from tiderl.envs.client import EnvClient
from tiderl.errors import TideError, UserError
from tiderl.scheduling.actions import Shutdown
from tiderl.scheduling.events import SecondsSpent
from tiderl.scheduling.ledger import Activity
from tiderl.types import Rank, Role
from tiderl.wire.job import Job
from tiderl.wire.messages import Farewell, Heartbeat, Hello, RankFailed, wire_codec
from tiderl.wire.sockets import ClientSocket
from tiderl.worker import backends
from tiderl.worker.actor import ActorWorker
from tiderl.worker.context import RoleWorker, WorkerContext
from tiderl.worker.ref import RefWorker
from tiderl.worker.reference_channel import ActorAddress, ReferenceListener, ReferenceSender
from tiderl.worker.rollout import RolloutWorker
from tiderl.worker.seconds import RankMeter
from tiderl.worker.store import ENDED_KEY, JOB_KEY, await_key, join_store

logger = logging.getLogger(__name__)

#: Rank 0, to its store, that the job has ended.
_TELL_S = 1.0


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
        wire = ClientSocket(self._rank, max_message_bytes=config.wire.max_message_bytes)
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

    async def _serve(self, wire: ClientSocket) -> int:
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

    async def _send(self, wire: ClientSocket) -> None:
        while True:
            message = await self._outbox.get()
            await wire.send(self._codec.encode(message))
            self._outbox.task_done()

    async def _say(self, wire: ClientSocket, message: Any) -> None:
        """Send past the queue, whose sender may be what has failed."""
        try:
            await wire.send(self._codec.encode(message))
        except TideError as error:
            logger.error("the coordinator cannot be told: %s", error)

    async def _flush(self) -> None:
        try:
            async with asyncio.timeout(self._job.config.timeouts.heartbeat_s):
                await self._outbox.join()
        except TimeoutError:
            logger.warning("%d messages to the coordinator could not be sent", self._outbox.qsize())

    async def _receive(self, wire: ClientSocket) -> None:
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
        if self._rank == 0:
            # For the parents of ranks that died. On a thread, since a group that hangs may hold the store.
            await asyncio.wait(
                {asyncio.create_task(asyncio.to_thread(self._store.set, ENDED_KEY, order.reason))}, timeout=_TELL_S
            )
        self._meter.rest(Activity.SHUTDOWN)
        total = 0
        if self._role is not None:
            try:
                async with asyncio.timeout(self._job.config.timeouts.shutdown_s):
                    total = await self._role.stop()
            except (TimeoutError, TideError) as error:
                logger.warning("the role could not be stopped in order: %r", error)
        self.emit(SecondsSpent(self._rank, self._meter.totals()))
        self.emit(Farewell(self._rank, total))
        return order.exit_code


async def _make_role(job: Job, rank: Rank, store: Store, emit: Any, meter: RankMeter) -> RoleWorker:
    """Join the world, make the groups, build the role. Ranks in order: actors, Ref ranks, rollout ranks."""
    config = job.config
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    role = config.roles.first_role(rank)
    listener = await _listen(job, rank, store) if role is Role.ACTOR and config.roles.num_ref else None
    actor_group, storage_group, sync_group = await asyncio.to_thread(_join_world, job, rank, store, on_gpu)
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
    if role is Role.ACTOR:
        trainer, vocab_size = backends.make_trainer(context, job.world_size), backends.vocab_size(config)
        reference = backends.make_reference(context, trainer) if config.loss.kl_weight > 0 else None
        return ActorWorker(context, trainer, vocab_size, reference=reference, listener=listener)
    if role is Role.REF:
        return await _make_ref(job, context, store)
    token = read_token(config.env.token_file)
    sessions = EnvClient(config.env.urls, token, config.timeouts.env_request_s, env=config.env.name)
    chat = await backends.make_chat(config)
    return RolloutWorker(context, backends.make_engine(context), sessions, chat, backends.vocab_size(config))


def _join_world(job: Job, rank: Rank, store: Store, on_gpu: bool) -> tuple[Any, Any, Any]:
    """Make the groups, once, in the same order on all ranks: the actors' two, the sync group; None for one without this rank."""
    config = job.config
    timeout = timedelta(seconds=config.timeouts.collective_s)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=job.world_size, timeout=timeout)
    roles = [config.roles.first_role(r) for r in range(job.world_size)]
    actors = [r for r, role in enumerate(roles) if role is Role.ACTOR]
    # The reference never changes, and a Ref rank that dies must not spoil a group that others need.
    sync_members = [0, *(r for r, role in enumerate(roles) if role is Role.ROLLOUT)]
    actor_group = dist.new_group(actors, timeout=timeout)
    storage_group = dist.new_group(actors, backend="gloo", timeout=timedelta(seconds=config.timeouts.step_s))
    sync_group = dist.new_group(sync_members, timeout=timeout)
    is_actor, is_member = rank in actors, rank in sync_members
    return actor_group if is_actor else None, storage_group if is_actor else None, sync_group if is_member else None


async def _listen(job: Job, rank: Rank, store: Store) -> ReferenceListener:
    """An actor's ear for Ref ranks. Its address is in the store before the world is joined, so that nobody has to wait for it."""
    assert job.keys is not None
    listener = ReferenceListener(job.keys, max_message_bytes=job.config.wire.max_message_bytes)
    (await listener.open(*listening_hosts(job, rank))).publish(store, rank)
    return listener


async def _make_ref(job: Job, context: WorkerContext, store: Store) -> RefWorker:
    assert job.keys is not None
    find = partial(ActorAddress.find, store, timeout_s=job.config.timeouts.start_s)
    ranks = [Rank(actor) for actor in range(job.config.roles.num_actors)]
    actors = {actor: await asyncio.to_thread(find, actor) for actor in ranks}
    sender = ReferenceSender(context.rank, job.keys, max_message_bytes=job.config.wire.max_message_bytes)
    return RefWorker(context, backends.make_reference(context), sender, actors)


def listening_hosts(job: Job, rank: Rank) -> tuple[str, str]:
    """Where this rank listens, and under which name others find it: on rank 0's machine as the coordinator does, elsewhere at the
    address from which the coordinator is reached."""
    if rank == int(os.environ["LOCAL_RANK"]):  # torchrun numbers the ranks of rank 0's machine first
        return job.bind_host, job.connect_host
    family, _, _, _, place = socket.getaddrinfo(job.connect_host, job.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # sends nothing: it only asks the kernel for the way
        own: str = probe.getsockname()[0]
    return own, own


def _reason(error: BaseException) -> str:
    """The cause in one paragraph for what was foreseen, with the place of the fault for what was not."""
    if isinstance(error, TideError):
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"


def _find_job(rank: Rank) -> tuple[Job, Store]:
    """The job's description, and torchrun's store, through which all ranks have it from rank 0."""
    bound_s = float(os.environ["TIDERL_START_TIMEOUT_S"])
    store = join_store(bound_s)
    if rank == 0:
        text = sys.stdin.readline()
        store.set(JOB_KEY, text)
    else:
        what = "rank 0's description of the job"
        text = await_key(store, JOB_KEY, waiter=f"rank {rank}", waited_for=what, bound_s=bound_s)
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
    job, store = _find_job(rank)
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
