"""Waiting line: admitted requests that wait for a worker, in order of arrival and priority, with fair tenants.

A request keeps its ticket. If a worker refuses it or dies, the request comes back to the same position. Its stays in
line together last at most `max_wait_seconds`. Does not own the order (admission/fair_queue.py), whether a worker has
room (cluster/gate.py) or the choice of a worker (placement/policies.py).
"""

import asyncio
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from blockyard.router.admission.fair_queue import TenantQueues, Ticket
from blockyard.router.admission.retry_delay import CompletionRate, retry_delay_seconds
from blockyard.router.errors import Overloaded

RECHECK_SECONDS = 0.05
"""The head of the line checks again after this time even without an event. Probes of a full worker (cluster/gate.py)
become due by time."""


@dataclass(slots=True, eq=False)
class _Position:
    """State of one waiting request."""

    leave_at: float
    """Time on the event loop's clock at which the request has waited too long."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class WaitingLine:
    """Requests in line for a worker. Only the head checks whether it can go on."""

    def __init__(
        self,
        *,
        max_wait_seconds: float = float("inf"),
        tenant_weights: Mapping[str, float] | None = None,
    ) -> None:
        self._max_wait_seconds = max_wait_seconds
        self._next_ticket = 0
        self._queues = TenantQueues(tenant_weights)
        self._positions: dict[Ticket, _Position] = {}
        self._rate = CompletionRate()

    def __len__(self) -> int:
        return len(self._positions)

    def ticket(self, rank: float = 0.0, *, tenant: str = "", cost_tokens: int = 0) -> Ticket:
        self._next_ticket += 1
        return Ticket(rank=rank, number=self._next_ticket, tenant=tenant, cost_tokens=cost_tokens)

    def notify(self) -> None:
        """Wake the head of the line: it may be able to go on."""
        head = self._queues.first()
        if head is not None:
            self._positions[head].changed.set()

    @contextmanager
    def standing(self, ticket: Ticket) -> Iterator[None]:
        """Stand in line for the life of the context. Leaving wakes the next head.

        A request that leaves normally has been served, and its tenant pays its cost (admission/fair_queue.py). One that
        leaves by an exception or a cancellation costs nothing.
        """
        begun_at = asyncio.get_running_loop().time()
        self._queues.add(ticket)
        self._positions[ticket] = _Position(begun_at + self._max_wait_seconds - ticket.waited_seconds)
        self._rate.begin(1)
        # A new request can change the order of the others.
        self.notify()
        was_served = False
        try:
            yield
            was_served = True
        finally:
            ticket.waited_seconds += asyncio.get_running_loop().time() - begun_at
            self._queues.remove(ticket, was_served=was_served)
            del self._positions[ticket]
            self._rate.end(1)
            self.notify()

    async def reach_head(self, ticket: Ticket) -> None:
        """Wait until the request is the head. Raises Overloaded after the longest wait."""
        if self._queues.first() is ticket:
            return
        position = self._positions[ticket]
        try:
            async with asyncio.timeout_at(position.leave_at):
                while self._queues.first() is not ticket:
                    position.changed.clear()
                    await position.changed.wait()
        except TimeoutError:
            raise self._waited_too_long() from None

    async def next_change(self, ticket: Ticket) -> None:
        """Wait, as the head, for the next `notify` or RECHECK_SECONDS, and then until the request is the head again.

        Raises Overloaded after the longest wait.
        """
        position = self._positions[ticket]
        position.changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(RECHECK_SECONDS):
                await position.changed.wait()
        if asyncio.get_running_loop().time() >= position.leave_at:
            raise self._waited_too_long()
        await self.reach_head(ticket)

    def _waited_too_long(self) -> Overloaded:
        """Return the refusal. Its retry delay is the time in which the line now serves as many requests as it holds."""
        expected_seconds = self._rate.seconds_to_free(self._rate.held)
        return Overloaded(
            f"no worker had room within {self._max_wait_seconds:g} s",
            retry_after_seconds=retry_delay_seconds(expected_seconds, random.random()),
        )
