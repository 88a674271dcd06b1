"""First come, first placed, and nobody loses his place by being sent back."""

import asyncio

from blockyard.router.waiting_line import Ticket, WaitingLine


async def test_the_line_keeps_the_order_of_arrival() -> None:
    line = WaitingLine()
    served: list[int] = []
    is_open = False

    async def request(number: int) -> None:
        ticket = line.ticket()
        with line.standing(ticket):
            await line.turn(ticket)
            while not is_open:
                await line.change(ticket)
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
            await line.turn(ticket)
            while not is_open:
                await line.change(ticket)
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
            await line.turn(ticket)
            served.append(ticket)
            await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as tasks:
        for ticket in (waited_long, waited_little, urgent):
            tasks.create_task(stand(ticket))
    assert served == [waited_long, urgent, waited_little]
