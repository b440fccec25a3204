"""What the tests of actors and Ref ranks share: small trajectories, a trainer and a reference that write down what they are asked,
and a rank whose every word is heard."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tiderl.clock import JobClock
from tiderl.config.schema import Config, LossConfig, TimeoutsConfig, TrainerConfig
from tiderl.scheduling import actions as ac
from tiderl.trainers.base import LogProbs, MicroBatchResult, StepResult
from tiderl.types import (
    Finish,
    GroupId,
    MicroBatch,
    MicroBatchId,
    Pipelining,
    Rank,
    TaskId,
    TaskKind,
    Trajectory,
    WeightVersion,
)
from tiderl.wire.messages import MicroBatchMessage, ReferenceMessage, ScoreMessage
from tiderl.worker.context import WorkerContext
from tiderl.worker.seconds import RankMeter

BOUND_S = 20.0
ACTOR = Rank(0)
REF = Rank(2)


def config(swap: str = "offload", window_tokens: int = 20) -> Config:
    return replace(
        Config(),
        loss=LossConfig(kl_weight=0.1),
        trainer=TrainerConfig(swap=swap, window_tokens=window_tokens),  # type: ignore[arg-type]
        timeouts=TimeoutsConfig(heartbeat_s=0.01, start_s=BOUND_S, lost_s=BOUND_S, shutdown_s=BOUND_S),
    )


def trajectory(num_tokens: int) -> Trajectory:
    return Trajectory(
        task_id=TaskId(0),
        group_id=GroupId(0),
        kind=TaskKind.TRAIN,
        token_ids=np.arange(num_tokens, dtype=np.int32),
        generated=np.ones(num_tokens, np.bool_),
        log_probs=np.zeros(num_tokens, np.float32),
        weight_versions=np.zeros(num_tokens, np.int32),
        turns=(),
        images=(),
        reward=1.0,
        success=True,
        finish=Finish.DONE,
    )


def micro_batch(number: int, *lengths: int, step: int = 0) -> MicroBatch:
    return MicroBatch(MicroBatchId(number), step, tuple(map(trajectory, lengths)), (0.5,) * len(lengths))


def assigned(number: int, *lengths: int, step: int = 0) -> MicroBatchMessage:
    batch = micro_batch(number, *lengths, step=step)
    task_ids = tuple(TaskId(i) for i in range(len(lengths)))
    action = ac.AssignMicroBatch(ACTOR, step, batch.micro_batch_id, task_ids, batch.advantages)
    return MicroBatchMessage(action, batch.trajectories)


def to_score(number: int, *lengths: int, actor: Rank = ACTOR) -> ScoreMessage:
    batch = micro_batch(number, *lengths)
    task_ids = tuple(TaskId(i) for i in range(len(lengths)))
    return ScoreMessage(ac.ScoreMicroBatch(REF, 0, batch.micro_batch_id, actor, task_ids), batch.trajectories)


def scored(number: int, *lengths: int, step: int = 0) -> ReferenceMessage:
    return ReferenceMessage(step, MicroBatchId(number), tuple(np.full(n, -number, np.float32) for n in lengths))


def opened(pipelining: Pipelining, step: int = 0) -> ac.OpenStep:
    return ac.OpenStep((ACTOR,), step, WeightVersion(0), pipelining)


def closed(step: int = 0) -> ac.CloseStep:
    return ac.CloseStep((ACTOR,), step, 0)


class Time:
    """A machine's clock that only the fakes' work moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def read_s(self) -> float:
        return self.now_s


@dataclass(frozen=True, eq=False)
class Ticket:
    number: int
    num_tokens: int


@dataclass
class Device:
    """What both fakes write down, and a gate where work on the device can be held: `hold` names the entry."""

    time: Time = field(default_factory=Time)
    log: list[str] = field(default_factory=list)
    hold: str = ""
    reached: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)

    def does(self, entry: str, seconds: float) -> float:
        self.log.append(entry)
        if entry == self.hold:
            self.reached.set()
            assert self.go_on.wait(BOUND_S)
        self.time.now_s += seconds
        return seconds

    @property
    def passes(self) -> str:
        """All that was done between `begin` and `end`, the loading left out."""
        return " ".join(entry for entry in self.log if entry != "load")


class FakeTrainer:
    """A forward takes 1 s a token, a backward 2 s, an update 0.5 s."""

    version = WeightVersion(0)

    def __init__(self, device: Device) -> None:
        self.device = device
        self.references: list[Sequence[LogProbs] | None] = []
        self.advantages: list[tuple[float, ...]] = []

    def start(self) -> None:
        self.device.does("load", 0.0)

    def begin_step(self) -> None:
        self.device.does("begin", 0.0)

    def forward(self, batch: MicroBatch) -> Ticket:
        self.advantages.append(batch.advantages)
        self.device.does(f"f{batch.micro_batch_id}", batch.num_tokens)
        return Ticket(batch.micro_batch_id, batch.num_tokens)

    def backward(self, in_flight: Ticket, reference: Sequence[LogProbs] | None) -> MicroBatchResult:
        self.references.append(reference)
        forward_s, backward_s = float(in_flight.num_tokens), 2.0 * in_flight.num_tokens
        self.device.does(f"b{in_flight.number}", backward_s)
        return MicroBatchResult(
            in_flight.num_tokens, in_flight.num_tokens, 1, forward_s, backward_s, {"loss": 0.25}, 0.125
        )

    def end_step(self, *, abandon: bool) -> StepResult:
        optimizer_s = self.device.does("leave" if abandon else "end", 0.5)
        return StepResult(not abandon, abandon, WeightVersion(0 if abandon else 1), 1.5, 1e-3, 9, optimizer_s)

    def score(self, token_ids: Sequence[int]) -> Any:
        return np.zeros(len(token_ids) - 1, np.float32)

    def full_weights(self) -> Iterator[Any]:
        self.device.log.append("weights")
        return iter(())


class FakeReference:
    """A swap in takes 3 s, out 1 s, scoring 0.5 s a token; log-probs are minus the micro-batch's length."""

    def __init__(self, device: Device, *, fits: bool = False, as_tensors: bool = True) -> None:
        self.device = device
        self.is_on_device = False
        self.fits = fits
        self.as_tensors = as_tensors
        self.returned: list[LogProbs] = []

    def start(self) -> None:
        self.device.does("load", 0.0)

    def swap_in(self) -> float:
        if self.is_on_device:
            return 0.0
        self.is_on_device = True
        return self.device.does("in", 3.0)

    def swap_out(self) -> float:
        self.is_on_device = False
        return self.device.does("out", 1.0)

    def fits_beside(self) -> bool:
        assert not self.is_on_device
        self.device.does("fits?", 0.0)
        return self.fits

    def log_probs(self, trajectories: Sequence[Trajectory]) -> list[LogProbs]:
        assert self.is_on_device
        lengths = [t.num_tokens for t in trajectories]
        self.device.does("s" + "+".join(map(str, lengths)), sum(lengths) / 2)
        arrays = [np.full(n, -n, np.float32) for n in lengths]
        values: list[LogProbs] = [torch.from_numpy(a) for a in arrays] if self.as_tensors else list(arrays)
        self.returned += values
        return values


class HeardRank:
    """A rank's surroundings: its context, and everything that it says."""

    def __init__(self, folder: Path, rank: Rank, settings: Config, time: Time) -> None:
        self.said: list[Any] = []
        self._spoken = asyncio.Event()
        self.meter = RankMeter(JobClock(1.0, time.read_s))
        self.context = WorkerContext(
            settings, rank, folder, None, torch.device("cpu"), None, None, None, self.hear, self.meter.clock, self.meter
        )

    def hear(self, message: Any) -> None:
        self.said.append(message)
        self._spoken.set()

    def all_of(self, kind: type) -> list[Any]:
        return [message for message in self.said if isinstance(message, kind)]

    async def says(self, kind: type, times: int = 1) -> Any:
        """The `times`-th message of a kind."""
        async with asyncio.timeout(BOUND_S):
            while len(self.all_of(kind)) < times:
                self._spoken.clear()
                await self._spoken.wait()
        return self.all_of(kind)[times - 1]
