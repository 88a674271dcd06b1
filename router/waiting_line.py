"""Where admitted requests that found no worker wait, in order of arrival and priority.

A request takes its ticket once and keeps it: one that a worker bounced, or whose worker died, stands again
where it stood. Does not own whether a worker has room (admission.py) nor which one is taken (placement.py).
"""

import asyncio
import heapq
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

RECHECK_SECONDS = 0.05
"""The head of the line looks again after so long, even if nothing happened: probes come due by time."""


class Ticket(NamedTuple):
    """Lower ones go first."""

    rank: float
    """The time of arrival, later by some seconds for each step of priority: nobody who waits is passed for ever."""
    number: int
    """Decides between equals: the order of arrival."""


class WaitingLine:
    """Only the one with the lowest ticket looks for a worker."""

    def __init__(self) -> None:
        self._next_ticket = 0
        self._changed: dict[Ticket, asyncio.Event] = {}
        """Of those who stand in line."""
        self._order: list[Ticket] = []
        """A heap; those who left are dropped when they come to its top."""

    def ticket(self, rank: float = 0.0) -> Ticket:
        self._next_ticket += 1
        return Ticket(rank, self._next_ticket)

    def notify(self) -> None:
        """Something changed that may let the head of the line go on."""
        head = self._head()
        if head is not None:
            self._changed[head].set()

    @contextmanager
    def standing(self, ticket: Ticket) -> Iterator[None]:
        """In line for the life of the context; whoever leaves lets the next one look."""
        assert ticket not in self._changed, "a request stands in line once"
        self._changed[ticket] = asyncio.Event()
        heapq.heappush(self._order, ticket)
        try:
            yield
        finally:
            del self._changed[ticket]
            self.notify()

    async def turn(self, ticket: Ticket) -> None:
        """Waits for everybody who came before."""
        changed = self._changed[ticket]
        while self._head() != ticket:
            changed.clear()
            await changed.wait()

    async def change(self, ticket: Ticket) -> None:
        """For the head: returns at the next `notify`, or when it is worth another look anyway; if somebody with
        an older ticket came back meanwhile, only after him."""
        changed = self._changed[ticket]
        changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(RECHECK_SECONDS):
                await changed.wait()
        await self.turn(ticket)

    def _head(self) -> Ticket | None:
        while self._order and self._order[0] not in self._changed:
            heapq.heappop(self._order)
        return self._order[0] if self._order else None
