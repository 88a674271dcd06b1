"""Where admitted requests wait for a worker: in order of arrival and priority, tenants in turn.

A request takes its ticket once and keeps it: one that a worker bounced, or whose worker died, stands again
where it stood. Nobody stands longer than the line allows, all his times together. Does not own the order
(admission/fair_queue.py), whether a worker has room (cluster/gate.py) nor which one is taken (placement/policies.py).
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
"""The head of the line looks again after so long, even if nothing happened: probes come due by time."""


@dataclass(slots=True, eq=False)
class _Place:
    """Of one who stands in line."""

    leave_at: float
    """On the loop's clock."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class WaitingLine:
    """Only the one whose turn it is, the head, looks whether it can go on."""

    def __init__(
        self,
        *,
        max_wait_seconds: float = float("inf"),
        tenant_weights: Mapping[str, float] | None = None,
    ) -> None:
        self._max_wait_seconds = max_wait_seconds
        self._next_ticket = 0
        self._queues = TenantQueues(tenant_weights)
        self._places: dict[Ticket, _Place] = {}
        self._rate = CompletionRate()

    def __len__(self) -> int:
        return len(self._places)

    def ticket(self, rank: float = 0.0, *, tenant: str = "", cost_tokens: int = 0) -> Ticket:
        self._next_ticket += 1
        return Ticket(rank=rank, number=self._next_ticket, tenant=tenant, cost_tokens=cost_tokens)

    def notify(self) -> None:
        """Something changed that may let the head of the line go on."""
        head = self._queues.first()
        if head is not None:
            self._places[head].changed.set()

    @contextmanager
    def standing(self, ticket: Ticket) -> Iterator[None]:
        """In line for the life of the context; whoever leaves lets the next one look. Who leaves by an error, or is
        cancelled, has not had his turn."""
        begun_at = asyncio.get_running_loop().time()
        self._queues.add(ticket)
        self._places[ticket] = _Place(begun_at + self._max_wait_seconds - ticket.waited_seconds)
        self._rate.begin(1)
        # Somebody who comes can change whose turn it is among the others.
        self.notify()
        had_turn = False
        try:
            yield
            had_turn = True
        finally:
            ticket.waited_seconds += asyncio.get_running_loop().time() - begun_at
            self._queues.remove(ticket, had_turn=had_turn)
            del self._places[ticket]
            self._rate.end(1)
            self.notify()

    async def turn(self, ticket: Ticket) -> None:
        """Waits for everybody who goes before. Raises Overloaded after the longest wait."""
        if self._queues.first() is ticket:
            return
        place = self._places[ticket]
        try:
            async with asyncio.timeout_at(place.leave_at):
                while self._queues.first() is not ticket:
                    place.changed.clear()
                    await place.changed.wait()
        except TimeoutError:
            raise self._waited_too_long() from None

    async def change(self, ticket: Ticket) -> None:
        """For the head: returns at the next `notify`, or when it is worth another look anyway; if it is somebody
        else's turn by then, only after him. Raises Overloaded after the longest wait."""
        place = self._places[ticket]
        place.changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(RECHECK_SECONDS):
                await place.changed.wait()
        if asyncio.get_running_loop().time() >= place.leave_at:
            raise self._waited_too_long()
        await self.turn(ticket)

    def _waited_too_long(self) -> Overloaded:
        """With the time that the line takes now to serve as many as stand in it."""
        expected_seconds = self._rate.seconds_to_free(self._rate.held)
        return Overloaded(
            f"no worker had room within {self._max_wait_seconds:g} s",
            retry_after_seconds=retry_delay_seconds(expected_seconds, random.random()),
        )
