"""Taking nothing new: what runs has a grace to finish, then goes on on other workers, and the index forgets this one.

    on -> routers are told -> nothing runs any more, or the grace is over: the rest is handed over -> drained

Owns the grace and who waits for the end. A drain goes on whoever stops waiting for it; only `resume` takes it back.
Does not own the requests (session.py) nor what is known in the index (indexing/publisher.py).
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
    """The worker ends: its drain cannot be taken back."""


class DrainTakenBack(Exception):
    """The worker was resumed before nothing ran any more."""


class Draining:
    """One worker's. Used on its event loop."""

    def __init__(self, service: SessionService) -> None:
        self._service = service
        self.on_change: Callable[[bool], None] = lambda is_draining: None
        """Called with whether it takes nothing new, when that changes."""
        self._is_final = False
        self._until = math.inf
        self._grace: asyncio.Timeout | None = None
        """While what runs may finish."""
        self._tasks = BackgroundTasks()
        self._task: asyncio.Task[None] | None = None
        self._moved: asyncio.Future[int | None] | None = None
        """How many requests were handed over; None where it was taken back."""

    @property
    def is_on(self) -> bool:
        return self._task is not None

    async def drain(self, grace_seconds: float) -> int:
        """Returns once nothing runs any more: how many requests other workers go on with. A second call joins the
        first, and the shorter grace counts. Raises DrainTakenBack."""
        until = asyncio.get_running_loop().time() + grace_seconds
        if self._moved is None:
            self._moved = self._begin(until)
        elif until < self._until:
            self._until = until
            if self._grace is not None and not self._grace.expired():
                self._grace.reschedule(until)
        moved = await asyncio.shield(self._moved)
        if moved is None:
            raise DrainTakenBack
        return moved

    async def drain_for_good(self, grace_seconds: float) -> int:
        """The same before the worker ends."""
        self._is_final = True
        return await self.drain(grace_seconds)

    def resume(self) -> None:
        """Takes a drain back, done or not. Without one nothing happens. Raises ShuttingDown."""
        if self._is_final:
            raise ShuttingDown
        if self._task is None or self._moved is None:
            return
        self._task.cancel()
        if not self._moved.done():
            self._moved.set_result(None)
        self._task = self._moved = None
        self._service.set_draining(False)
        self.on_change(False)
        logger.info("resumed: new requests are taken again")

    async def aclose(self) -> None:
        """End a drain that still runs. Its waiters wait on: cancel them first."""
        await self._tasks.aclose()

    def _begin(self, until: float) -> "asyncio.Future[int | None]":
        logger.info("draining: nothing new is taken")
        self._until = until
        self._service.set_draining(True)
        self.on_change(True)
        moved: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._task = self._tasks.start(self._run(moved), name="drain")
        return moved

    async def _run(self, moved: "asyncio.Future[int | None]") -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._until) as self._grace:
                await self._service.until_idle()
        self._grace = None
        num_moved = await self._service.hand_over()
        logger.info("drained: nothing runs any more, %d requests were handed over", num_moved)
        if not moved.done():
            moved.set_result(num_moved)
