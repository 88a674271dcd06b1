"""The waiting line is first come, first placed, with tenants in turn. A request that goes back keeps its position.

No request waits in it for ever.
"""

import asyncio

import pytest
from blockyard.router.admission.fair_queue import QUANTUM_TOKENS, Ticket
from blockyard.router.dispatch.waiting_line import RECHECK_SECONDS, WaitingLine
from blockyard.router.errors import Overloaded

from simulation.virtual_time import in_virtual_time


class Line:
    """A line, and the tickets that have had their turns since it was opened."""

    def __init__(self) -> None:
        self.line = WaitingLine()
        self.served: list[Ticket] = []
        self.is_open = False

    async def stand(self, ticket: Ticket) -> None:
        with self.line.standing(ticket):
            await self.line.reach_head(ticket)
            while not self.is_open:
                await self.line.next_change(ticket)
            self.served.append(ticket)
            await asyncio.sleep(0.01)

    def open(self) -> None:
        self.is_open = True
        self.line.notify()


async def test_the_line_keeps_the_order_of_arrival_also_of_those_who_come_back_with_their_tickets() -> None:
    standing = Line()
    first, *others = [standing.line.ticket() for _ in range(10)]
    async with asyncio.TaskGroup() as tasks:
        waiting = []
        for ticket in others:
            waiting.append(tasks.create_task(standing.stand(ticket)))
            await asyncio.sleep(0)
        waiting[0].cancel()
        waiting[4].cancel()
        await asyncio.sleep(0.01)
        tasks.create_task(standing.stand(first))
        await asyncio.sleep(0.01)
        standing.open()
    assert standing.served == [first, *others[1:4], *others[5:]]


async def test_a_more_urgent_one_passes_those_who_have_not_waited_long_enough() -> None:
    standing = Line()
    standing.open()
    waited_long, waited_little, urgent = (standing.line.ticket(rank=rank) for rank in (100.0, 108.0, 105.0))
    async with asyncio.TaskGroup() as tasks:
        for ticket in (waited_long, waited_little, urgent):
            tasks.create_task(standing.stand(ticket))
    assert standing.served == [waited_long, urgent, waited_little]


async def test_somebody_who_comes_and_changes_the_turns_wakes_the_one_whose_turn_it_is_now() -> None:
    standing = Line()
    small, other, urgent_and_large = (
        standing.line.ticket(rank=rank, tenant=tenant, cost_tokens=quanta * QUANTUM_TOKENS)
        for rank, tenant, quanta in ((1.0, "a", 1), (1.0, "b", 1), (0.0, "a", 5))
    )
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for ticket in (small, other):
            tasks.create_task(standing.stand(ticket))
            await asyncio.sleep(0.01)
        tasks.create_task(standing.stand(urgent_and_large))
        standing.is_open = True
    assert standing.served == [other, urgent_and_large, small]


@in_virtual_time
async def test_the_longest_wait_counts_all_the_times_in_line_and_holds_for_the_head_too() -> None:
    line, now = WaitingLine(max_wait_seconds=0.4), asyncio.get_running_loop().time
    head, behind = line.ticket(), line.ticket()
    left: list[Ticket] = []

    async def stand(ticket: Ticket, seconds: float = 60.0) -> None:
        until = now() + seconds
        try:
            with line.standing(ticket):
                await line.reach_head(ticket)
                while now() < until:
                    await line.next_change(ticket)
        finally:
            left.append(ticket)

    await stand(head, seconds=0.3)
    begun = now()
    results = await asyncio.gather(stand(head), stand(behind), return_exceptions=True)
    assert 0.4 <= now() - begun <= 0.4 + RECHECK_SECONDS
    assert left == [head, head, behind]
    for result in results:
        assert isinstance(result, Overloaded)
        assert result.retry_after_seconds is not None


@in_virtual_time
async def test_the_longest_wait_holds_behind_a_head_that_stays() -> None:
    line = WaitingLine(max_wait_seconds=0.1)
    with line.standing(line.ticket()):
        ticket = line.ticket()
        with pytest.raises(Overloaded), line.standing(ticket):
            await line.reach_head(ticket)


async def test_who_leaves_by_an_error_has_not_had_his_turn() -> None:
    line = WaitingLine()
    ticket = line.ticket(cost_tokens=1)
    with pytest.raises(KeyError), line.standing(ticket):
        raise KeyError
    assert not ticket.is_paid
    with line.standing(ticket):
        pass
    assert ticket.is_paid
