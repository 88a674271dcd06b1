"""What is costly is spread over turns of the loop, in order, and nobody is left waiting."""

import asyncio
from collections import Counter

from blockyard.router.turn_share import TurnShare


async def test_no_turn_has_more_than_its_share_and_the_order_is_kept() -> None:
    share, turn = TurnShare(3), 0
    passed: list[tuple[int, int]] = []

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def step(number: int) -> None:
        await share.take()
        passed.append((turn, number))

    counting = asyncio.create_task(count_turns())
    for _ in range(2):
        await asyncio.gather(*(step(number) for number in range(20)))
    counting.cancel()
    assert [number for _, number in passed] == [*range(20)] * 2
    assert max(Counter(turn for turn, _ in passed).values()) == 3
