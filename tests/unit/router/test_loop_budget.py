"""Costly work is spread over ticks of the event loop, in order, and no waiting task starves."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from blockyard.router.admission.loop_budget import LoopBudget


class Ticks:
    """Counts the ticks of the loop, and records in which tick each task took a permit."""

    def __init__(self, most_per_tick: int) -> None:
        self.budget = LoopBudget(most_per_tick)
        self.now = 0
        self.passed: list[tuple[int, int]] = []

    @asynccontextmanager
    async def counted(self) -> AsyncIterator[None]:
        async def count() -> None:
            while True:
                self.now += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        yield
        counting.cancel()
        assert self.most_in_a_tick == 3

    async def step(self, number: int) -> None:
        await self.budget.take()
        self.passed.append((self.now, number))

    @property
    def order(self) -> list[int]:
        return [number for _, number in self.passed]

    @property
    def most_in_a_tick(self) -> int:
        return max(Counter(tick for tick, _ in self.passed).values())


async def test_no_tick_exceeds_the_budget_and_the_order_is_kept() -> None:
    ticks = Ticks(3)
    async with ticks.counted():
        for _ in range(2):
            await asyncio.gather(*(ticks.step(number) for number in range(20)))
    assert ticks.order == [*range(20)] * 2


async def test_steps_without_a_task_keep_to_the_same_budget_in_order_with_the_others() -> None:
    ticks = Ticks(3)
    async with ticks.counted():
        stepping = asyncio.gather(*(ticks.step(number) for number in range(10)))
        await asyncio.sleep(0)
        for number in range(10, 20):
            ticks.budget.run(lambda number=number: ticks.passed.append((ticks.now, number)))
        await stepping
        for _ in range(20):
            await asyncio.sleep(0)
    assert ticks.order == [*range(20)]


@pytest.mark.parametrize("at_once", [4, 20])
async def test_tasks_of_later_ticks_do_not_overtake(at_once: int) -> None:
    ticks = Ticks(3)
    async with ticks.counted(), asyncio.TaskGroup() as tasks:

        async def step_and_bring_another(number: int) -> None:
            await ticks.step(number)
            # It runs in the next tick, before the tasks that were waiting already.
            if number + at_once < 100:
                tasks.create_task(step_and_bring_another(number + at_once))

        for number in range(at_once):
            tasks.create_task(step_and_bring_another(number))
    assert ticks.order == [*range(100)]


async def test_who_waits_is_served_however_busy_the_others_are() -> None:
    budget, served = LoopBudget(2), Counter[int]()

    async def stream(number: int) -> None:
        while True:
            await budget.take()
            served[number] += 1
            await asyncio.sleep(0)

    streams = [asyncio.create_task(stream(number)) for number in range(12)]
    for _ in range(1000):
        await asyncio.sleep(0)
    for task in streams:
        task.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    assert min(served[number] for number in range(12)) >= 100
    assert max(served.values()) - min(served.values()) <= 2


async def test_those_who_leave_the_line_hold_nobody_up() -> None:
    ticks = Ticks(2)
    tasks = [asyncio.create_task(ticks.step(number)) for number in range(12)]
    await asyncio.sleep(0)
    # 2 and 3 are called in this tick and leave before they run; 7 to 9 still wait.
    asyncio.get_running_loop().call_soon(lambda: [tasks[number].cancel() for number in (2, 3, 7, 8, 9)])
    async with asyncio.timeout(10):
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.01)
    with pytest.raises(StopIteration):
        ticks.step(12).send(None)  # Nobody is left: it goes at once.
    assert ticks.order == [0, 1, 4, 5, 6, 10, 11, 12]
