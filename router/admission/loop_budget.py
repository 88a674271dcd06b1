"""Loop budget: limits the number of costly steps in one tick of the event loop.

After a busy moment hundreds of writers become ready at once. The loop runs all of them before any timer or arrival.
Does not own which steps are costly (generation/client_buffer.py).
"""

import asyncio
from collections import deque
from collections.abc import Callable


class LoopBudget:
    """Permits for costly steps, shared by tasks of one loop. A task that gets none in this tick waits in line for a
    later one.

    While any task waits, no tick exceeds the limit. The tick in which the first ones arrive may have nearly twice as
    many, because the loop does not report where a tick ends.
    """

    def __init__(self, most_per_tick: int) -> None:
        assert most_per_tick > 0
        self._most_per_tick = most_per_tick
        self._num_taken = 0
        """Permits taken in this tick."""
        self._num_called = 0
        """Waiting tasks that were given a permit and have not run yet."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_following = False
        """`_begin_tick` is scheduled for the next tick. Always true while a task waits."""

    async def take(self) -> None:
        if self._waiting or self._num_called or self._num_taken >= self._most_per_tick:
            await self._stand_in_line()
        self._num_taken += 1
        self._follow()

    def run(self, step: Callable[[], object]) -> None:
        """Run a step now if this tick has a permit left, or else in a later tick, in order."""
        if self._waiting or self._num_called or self._num_taken >= self._most_per_tick:
            waiter = asyncio.get_running_loop().create_future()
            waiter.add_done_callback(lambda _: self._run_called(step))
            self._waiting.append(waiter)
            self._follow()
        else:
            self._num_taken += 1
            self._follow()
            step()

    def _run_called(self, step: Callable[[], object]) -> None:
        self._num_called -= 1
        self._num_taken += 1
        self._follow()
        step()

    async def _stand_in_line(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._follow()
        try:
            await waiter
        finally:
            # A task that is cancelled after its call leaves its permit unused.
            if waiter.done() and not waiter.cancelled():
                self._num_called -= 1

    def _follow(self) -> None:
        if not self._is_following:
            self._is_following = True
            asyncio.get_running_loop().call_soon(self._begin_tick)

    def _begin_tick(self) -> None:
        self._is_following = False
        self._num_taken = num_called = 0
        if self._waiting:
            # Schedule it first, so that the next tick begins before the waiters called now run in it.
            self._follow()
        while self._waiting and num_called < self._most_per_tick:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                num_called += 1
        self._num_called += num_called
