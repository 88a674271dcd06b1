"""Checks whether a worker or router still answers its supervisor.

Owns the health checks and when silence means that a process hangs. Does not own killing (supervisor.py).

It counts missed checks, not seconds, because a supervisor that was itself stopped for a minute then counts at most
one. Only one check is in flight at a time, so a slow answer, as on a busy machine, still counts.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from math import inf, isinf
from typing import Any, TypeVar

from blockyard.deploy.supervision.replicas import PUSH_SECONDS, Replica
from blockyard.proto.runtime.tasks import BackgroundTasks, cancel_and_wait, running
from ray.exceptions import ActorUnavailableError

ANSWER_SECONDS = PUSH_SECONDS
"""An answer that takes longer counts as missed for now, and shows in `status`."""
QUESTION_SECONDS = PUSH_SECONDS + ANSWER_SECONDS
"""Time from one missed check to the next. The supervisor pauses between checks."""
STARTING_SECONDS = 120.0
"""Silence of a starting process that means a hang, from its first answer on. It answers while it loads, but an import
on a busy machine may silence it for long. A restarted supervisor allows the same to processes that it adopts."""
HEALTH_CHECK = "health check"
T = TypeVar("T")


class HungError(RuntimeError):
    """The process lives but does not answer its health checks."""


class HealthCheck:
    """Health checks of one incarnation of a worker or router."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[object]],
        end: Callable[[], Awaitable[bool]],
        *,
        silence_seconds: float = inf,
    ) -> None:
        """`end` ends the silent process, and returns False if that was not possible, or if it answers others."""
        self.silence_seconds = silence_seconds
        """Silence that means a hang. Infinite until the first answer, because the process may wait for a node."""
        self.num_missed = 0
        """Checks in a row without an answer."""
        self._num_forgiven = 0
        """Missed checks that count no more, because the process could not be ended after them."""
        self._ask = ask
        self._end = end
        self._checks = BackgroundTasks(on_failure=lambda name, error: None)  # `look` raises it.
        # Asked at once. The answer shows that the process has begun, so that a later silence is a hang.
        self._asked: asyncio.Task[object] | None = self._checks.start(_awaited(ask()), name=HEALTH_CHECK)
        self._hung = asyncio.Event()

    async def look(self) -> object | None:
        """Ask, unless a question is still unanswered, and return the answer. Return None if it takes too long.

        Raise what the call raises, which counts as an answer too, except that Ray has no connection to the process.
        """
        if self._asked is None:
            self._asked = self._checks.start(_awaited(self._ask()), name=HEALTH_CHECK)
        await asyncio.wait({self._asked}, timeout=ANSWER_SECONDS)
        if self._asked is None or not self._asked.done():
            self.missed()
            return None
        asked, self._asked = self._asked, None
        if isinstance(asked.exception(), ActorUnavailableError):
            await asyncio.sleep(ANSWER_SECONDS)  # So that each missed check stands for the same time.
            self.missed()
            return None
        self.num_missed = self._num_forgiven = 0
        if isinf(self.silence_seconds):
            self.silence_seconds = STARTING_SECONDS
        return asked.result()

    def missed(self) -> None:
        self.num_missed += 1
        if (self.num_missed - self._num_forgiven) * QUESTION_SECONDS >= self.silence_seconds:
            self._hung.set()

    async def unless_hung(self, work: Awaitable[T]) -> T:
        """Return the result of `work`. Raise HungError if the process hangs meanwhile and was ended.

        A silent process that could not be ended is asked again: it may be this supervisor that is cut off.
        """
        working = asyncio.ensure_future(_awaited(work))
        try:
            while True:
                async with running(self._hung.wait()) as hung:
                    await asyncio.wait({working, hung}, return_when=asyncio.FIRST_COMPLETED)
                if working.done():
                    return working.result()
                if await self._end():
                    raise HungError(f"it did not answer for {self.silence_seconds:.0f} s and was killed")
                self.ask_anew()
        finally:
            await cancel_and_wait(working)

    def ask_anew(self) -> None:
        """Count the silence from now on. The question without an answer may be lost."""
        self._hung.clear()
        self._num_forgiven = self.num_missed
        if self._asked is not None:
            self._asked.cancel()
            self._asked = None

    async def stop(self) -> None:
        self._asked = None
        await self._checks.aclose()


class HealthChecks:
    """Health checks of all workers and routers that run or start."""

    def __init__(self) -> None:
        self._checks: dict[str, tuple[Replica, HealthCheck]] = {}
        """Replicas and their checks, by the replica's name."""

    @contextlib.asynccontextmanager
    async def of(
        self, replica: Replica, actor: Any, end: Callable[[], Awaitable[bool]]
    ) -> AsyncIterator[HealthCheck]:
        """Have `look_at_all` check this replica inside the block. Yield the check. `end` is that of HealthCheck."""
        question = actor.is_draining if replica.kind == "worker" else actor.ready_incarnations
        health = HealthCheck(question.remote, end)
        self._checks[replica.name] = replica, health
        try:
            yield health
        finally:
            del self._checks[replica.name]
            await health.stop()

    def ask_all_anew(self) -> None:
        """Count the silence of all from now on, and drop questions that may be lost."""
        for _, health in self._checks.values():
            health.ask_anew()

    async def look_at_all(self) -> None:
        """Ask each replica, and note in it what it missed and whether it drains.

        Leaves out leaving ones, because a stop has a deadline of its own. Ignores failures, which count as answers.
        """
        asked = [check for check in self._checks.values() if not check[0].is_leaving]
        await asyncio.gather(*(self._look(*check) for check in asked), return_exceptions=True)

    async def _look(self, replica: Replica, health: HealthCheck) -> None:
        answered = await health.look()
        if self._checks.get(replica.name, (None, None))[1] is not health or replica.is_leaving:
            return
        replica.num_missed = health.num_missed
        if replica.kind == "worker" and replica.is_up and answered is not None:
            replica.phase = "draining" if answered else "serving"


async def _awaited(work: Awaitable[T]) -> T:
    return await work
