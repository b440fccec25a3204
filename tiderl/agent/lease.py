"""Signs of life for an environment session whose task is busy elsewhere: a full engine may take longer over a turn than the lease.

Invariants (tests/unit/test_loop_pause.py):

1. The session hears a `resume` every third of its lease while the block runs, and none after it: never beside another request.
2. A sign that fails is logged and no more: the task's next request will tell whether the session is gone.

Source: paper §4.1 (sessions have an inactivity clock).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from tiderl.errors import EnvironmentFailure
from tiderl.types import SessionHandle

logger = logging.getLogger(__name__)

#: A server that grants next to no lease is not to be asked in a tight loop.
MIN_INTERVAL_S = 0.05


class LeasedSession(Protocol):
    """A session that ends if it hears nothing for `handle.lease_s`."""

    @property
    def handle(self) -> SessionHandle: ...

    async def resume(self) -> None: ...


@asynccontextmanager
async def signs_of_life(session: LeasedSession) -> AsyncIterator[None]:
    """Keep the active `session` alive while the block runs. The end waits for a sign on its way, for a third of a lease at most."""
    over = asyncio.Event()
    sending = asyncio.create_task(_send(session, over))
    try:
        yield
    finally:
        # Not cancelled: a sign that the server reads only after the next /pause would start the session's clock again.
        over.set()
        await sending


async def _send(session: LeasedSession, over: asyncio.Event) -> None:
    handle = session.handle
    interval_s = max(MIN_INTERVAL_S, handle.lease_s / 3)
    while not await _within(interval_s, over):
        try:
            async with asyncio.timeout(interval_s):
                await session.resume()
        except TimeoutError:
            logger.warning(
                "session %s on %s: no answer in %g s to a sign of life", handle.session_id, handle.url, interval_s
            )
        except EnvironmentFailure as error:
            logger.warning("a sign of life failed: %s", error)


async def _within(seconds: float, event: asyncio.Event) -> bool:
    """Whether `event` comes in that time."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
