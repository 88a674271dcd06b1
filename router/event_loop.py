"""Event loop of a router that has a process of its own. It handles a few ready sockets per tick.

asyncio's own loop handles all of them in one tick. A front end that closes 256 connections at once would block it for
10 ms. Does not own the loop of a router on Ray, which Ray makes.
"""

import asyncio
import selectors
from collections import deque

EVENTS_PER_TICK = 32
"""Ready sockets handled in one tick. One whose client has gone takes 20 to 40 us."""


class FewEvents(selectors.DefaultSelector):
    """Returns at most EVENTS_PER_TICK ready files at once, and the others before it asks the kernel again."""

    def __init__(self) -> None:
        super().__init__()
        self._later: deque[tuple[selectors.SelectorKey, int]] = deque()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not self._later:
            self._later += super().select(timeout)
        keys = self.get_map()
        few = [self._later.popleft() for _ in range(min(len(self._later), EVENTS_PER_TICK))]
        # A file whose key has changed meanwhile is ready or not by the kernel's next answer.
        return [(key, events) for key, events in few if keys.get(key.fd) is key]


def new_event_loop() -> asyncio.AbstractEventLoop:
    return asyncio.SelectorEventLoop(FewEvents())
