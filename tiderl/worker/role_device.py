"""The device thread of an actor or a Ref rank: what runs on it is counted as one activity of the rank, and shown as its phase.

Invariants (tests/unit/test_ref_worker.py, test_actor_worker.py):

1. The seconds of a function are its activity's, those between two functions are what the rank rests on.
2. The phase is the function's while it runs, and "idle" after it, whatever it raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from tiderl.engines.device_thread import DeviceThread
from tiderl.scheduling.ledger import Activity
from tiderl.worker.seconds import RankMeter

T = TypeVar("T")


class RoleDevice:
    """`phase` is for heartbeats and the console."""

    def __init__(self, name: str, meter: RankMeter) -> None:
        self.phase = "start"
        self._meter = meter
        self._thread = DeviceThread(name, step=lambda: False)

    def start(self) -> None:
        self._thread.start()

    async def run(self, phase: str, activity: Activity, function: Callable[[], T]) -> T:
        """Run `function` on the device thread, after those before it, and await its result."""

        def work() -> T:
            with self._meter.work(activity):
                return function()

        self.phase = phase
        try:
            return await self._thread.submit(work)
        finally:
            self.phase = "idle"

    async def stop(self, timeout_s: float) -> None:
        """Raises `WaitTimeout` where what runs takes longer than `timeout_s` to end (`timeouts.shutdown_s`)."""
        await asyncio.to_thread(self._thread.stop, timeout_s=timeout_s, setting="timeouts.shutdown_s")
