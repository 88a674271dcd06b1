"""Draining: the worker takes no new requests, and its running ones finish within a grace period or move elsewhere.

    on -> routers are told -> all requests have ended, or the grace is over: the rest is handed over -> drained

Owns the grace period and the waiting for the end. A drain continues although its callers stop waiting; only `resume`
takes it back. Does not own the requests (session.py) or the index entries (indexing/publisher.py).
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable

from blockyard.proto.runtime.tasks import BackgroundTasks
from blockyard.worker.session.session import SessionService

logger = logging.getLogger(__name__)


class ShuttingDown(Exception):
    """The worker is shutting down: its drain cannot be taken back."""


class DrainTakenBack(Exception):
    """The worker was resumed before the drain was complete."""


class Draining:
    """The drain of one worker. Used on its event loop."""

    def __init__(self, service: SessionService) -> None:
        self._service = service
        self.on_change: Callable[[bool], None] = lambda is_draining: None
        """Called with `is_draining` when that changes."""
        self._is_final = False
        self._until = math.inf
        self._grace: asyncio.Timeout | None = None
        """The timer of the grace period, while it runs. None before and after."""
        self._tasks = BackgroundTasks()
        self._task: asyncio.Task[int] | None = None
        """Returns the number of requests that were handed over. Cancelled where the drain was taken back."""

    @property
    def is_on(self) -> bool:
        return self._task is not None

    async def drain(self, grace_seconds: float) -> int:
        """Drain, and return how many requests other workers take over once none runs here.

        A second call joins the first, and the shorter grace counts. Raises DrainTakenBack, or the error by which the
        drain failed.
        """
        until = asyncio.get_running_loop().time() + grace_seconds
        if self._task is None:
            self._task = self._begin(until)
        elif until < self._until:
            self._until = until
            if self._grace is not None and not self._grace.expired():
                self._grace.reschedule(until)
        task = self._task
        # A cancelled caller leaves the drain running.
        await asyncio.wait([task])
        if task.cancelled():
            raise DrainTakenBack
        return task.result()

    async def drain_for_good(self, grace_seconds: float) -> int:
        """Drain before the worker ends. This drain cannot be taken back."""
        self._is_final = True
        return await self.drain(grace_seconds)

    def resume(self) -> None:
        """Take a drain back, complete or not. Without a drain nothing happens. Raises ShuttingDown."""
        if self._is_final:
            raise ShuttingDown
        if self._task is None:
            return
        self._task.cancel()
        self._task = None
        self._service.set_draining(False)
        self.on_change(False)
        logger.info("resumed: new requests are accepted")

    async def aclose(self) -> None:
        """End a drain that is incomplete. Its callers get DrainTakenBack."""
        await self._tasks.aclose()

    def _begin(self, until: float) -> asyncio.Task[int]:
        logger.info("draining: new requests are refused")
        self._until = until
        self._service.set_draining(True)
        self.on_change(True)
        return self._tasks.start(self._run(), name="drain")

    async def _run(self) -> int:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._until) as self._grace:
                await self._service.until_idle()
        self._grace = None
        num_moved = await self._service.hand_over()
        logger.info("drained: no request runs here, %d requests were handed over", num_moved)
        return num_moved
