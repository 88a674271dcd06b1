"""The waiting line is first come, first placed, with tenants in turn. A request that goes back keeps its position.

No request waits in it for ever.
"""

import asyncio

import pytest
from blockyard.router.admission.fair_queue import QUANTUM_TOKENS, Ticket
from blockyard.router.dispatch.waiting_line import RECHECK_SECONDS, WaitingLine
from blockyard.router.errors import Overloaded

from simulation.virtual_time import in_virtual_time


async def test_the_line_keeps_the_order_of_arrival() -> None:
    line = WaitingLine()
    served: list[int] = []
    is_open = False

    async def request(number: int) -> None:
        ticket = line.ticket()
        with line.standing(ticket):
            await line.reach_head(ticket)
            while not is_open:
                await line.next_change(ticket)
            served.append(number)

    async with asyncio.TaskGroup() as tasks:
        waiting = []
        for number in range(10):
            waiting.append(tasks.create_task(request(number)))
            await asyncio.sleep(0)
        waiting[0].cancel()
        waiting[4].cancel()
        await asyncio.sleep(0.01)
        is_open = True
        line.notify()
    assert served == [1, 2, 3, 5, 6, 7, 8, 9]


async def test_who_comes_back_with_his_ticket_goes_before_those_who_came_later() -> None:
    line = WaitingLine()
    first, second, third = line.ticket(), line.ticket(), line.ticket()
    served: list[Ticket] = []
    is_open = False

    async def stand(ticket: Ticket) -> None:
        with line.standing(ticket):
            await line.reach_head(ticket)
            while not is_open:
                await line.next_change(ticket)
            served.append(ticket)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stand(second))
        tasks.create_task(stand(third))
        await asyncio.sleep(0.01)
        tasks.create_task(stand(first))
        await asyncio.sleep(0.01)
        is_open = True
        line.notify()
    assert served == [first, second, third]


async def test_a_more_urgent_one_passes_those_who_have_not_waited_long_enough() -> None:
    line = WaitingLine()
    waited_long, waited_little = line.ticket(rank=100.0), line.ticket(rank=108.0)
    urgent = line.ticket(rank=115.0 - 10.0)
    served: list[Ticket] = []

    async def stand(ticket: Ticket) -> None:
        with line.standing(ticket):
            await line.reach_head(ticket)
            served.append(ticket)
            await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as tasks:
        for ticket in (waited_long, waited_little, urgent):
            tasks.create_task(stand(ticket))
    assert served == [waited_long, urgent, waited_little]


async def test_somebody_who_comes_and_changes_the_turns_wakes_the_one_whose_turn_it_is_now() -> None:
    line = WaitingLine()
    small = line.ticket(rank=1.0, tenant="a", cost_tokens=QUANTUM_TOKENS)
    other = line.ticket(rank=1.0, tenant="b", cost_tokens=QUANTUM_TOKENS)
    urgent_and_large = line.ticket(rank=0.0, tenant="a", cost_tokens=5 * QUANTUM_TOKENS)
    served: list[Ticket] = []
    is_open = asyncio.Event()

    async def stand(ticket: Ticket) -> None:
        with line.standing(ticket):
            await line.reach_head(ticket)
            while not is_open.is_set():
                await line.next_change(ticket)
            served.append(ticket)

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for ticket in (small, other):
            tasks.create_task(stand(ticket))
            await asyncio.sleep(0.01)
        tasks.create_task(stand(urgent_and_large))
        is_open.set()
    assert served == [other, urgent_and_large, small]


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
