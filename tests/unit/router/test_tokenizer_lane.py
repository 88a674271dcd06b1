"""A lane gives the tokenizer's processes to clients in turn, and loses none of them to a caller that leaves."""

import asyncio

import pytest
from blockyard.router.tokenizing.service import QUANTUM_CHARACTERS, _Lane


async def test_a_lane_is_given_to_clients_in_turn() -> None:
    seat, order = object(), []
    lane = _Lane([seat])  # type: ignore[list-item]
    await lane.take("first", 1)

    async def call(client: str, number: int) -> None:
        await lane.take(client, 10 * QUANTUM_CHARACTERS)
        order.append((client, number))
        lane.give(seat)  # type: ignore[arg-type]

    async with asyncio.TaskGroup() as group:
        flood = [group.create_task(call("many", number)) for number in range(10)]
        await asyncio.sleep(0)
        for number in range(2):
            group.create_task(call("few", number))
        await asyncio.sleep(0)
        flood[1].cancel()
        await asyncio.sleep(0)
        lane.give(seat)  # type: ignore[arg-type]
    assert [number for client, number in order if client == "many"] == [0, *range(2, 10)]
    assert [number for client, number in order if client == "few"] == [0, 1]
    assert order.index(("few", 1)) <= 4


@pytest.mark.parametrize("cancels_first", [True, False])
async def test_a_caller_cancelled_as_its_seat_is_given_keeps_no_seat(*, cancels_first: bool) -> None:
    seat = object()
    lane = _Lane([seat])  # type: ignore[list-item]
    await lane.take("holder", 1)
    waits = asyncio.create_task(lane.take("waits", 1))
    await asyncio.sleep(0)
    # Both in one turn of the event loop.
    if cancels_first:
        waits.cancel()
        lane.give(seat)  # type: ignore[arg-type]
    else:
        lane.give(seat)  # type: ignore[arg-type]
        waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    async with asyncio.timeout(60.0):
        assert await lane.take("next", 1) is seat
