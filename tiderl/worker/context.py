"""What a role needs to know of the process it lives in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tiderl.clock import JobClock
from tiderl.config.schema import Config
from tiderl.scheduling.events import RankJoined, SecondsSpent
from tiderl.types import Rank
from tiderl.worker.seconds import RankMeter

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Made once per process, before its role. The groups live as long as the process: a role switch makes and destroys none."""

    config: Config
    rank: Rank
    run_dir: Path
    #: Checkpoint folder to go on from, or None.
    resume_dir: Path | None
    device: torch.device
    #: The actors among themselves; None on other ranks.
    actor_group: dist.ProcessGroup | None
    #: The actors among themselves, for the thread that writes checkpoints; None on other ranks.
    storage_group: dist.ProcessGroup | None
    #: The leader of the weight sync (rank 0) and the rollout ranks; None on the other actors, and on Ref ranks.
    sync_group: dist.ProcessGroup | None
    #: Queue a message to the coordinator; from the event loop only.
    emit: Callable[[Any], None]
    clock: JobClock
    meter: RankMeter

    @property
    def sync_leader(self) -> Rank:
        return Rank(0)

    def tell_seconds(self) -> None:
        """Say how this rank has spent its time so far."""
        self.emit(SecondsSpent(self.rank, self.meter.totals()))


class RoleWorker(Protocol):
    """A rank in one of its roles."""

    @property
    def phase(self) -> str:
        """What the device does at this moment, for heartbeats and the console."""

    async def start(self) -> RankJoined:
        """Load what the role needs."""

    async def run(self) -> None:
        """Work until cancelled; an exception ends the rank."""

    def handle(self, message: Any) -> None:
        """Take an order; must not block."""

    def gauges(self) -> dict[str, float]:
        """Present numbers for the heartbeat."""

    async def stop(self) -> int:
        """Free the device; returns the engine's total of generated tokens (0 without an engine)."""
