"""A router's event loop handles a few ready sockets per tick, and each of them in turn."""

import asyncio
import selectors
import socket
from collections import Counter
from collections.abc import Iterator

import pytest
from blockyard.router.event_loop import EVENTS_PER_TICK, FewEvents, new_event_loop

NUM_SOCKETS = 3 * EVENTS_PER_TICK + 1
Pairs = list[tuple[socket.socket, socket.socket]]


@pytest.fixture
def pairs() -> Iterator[Pairs]:
    pairs = [socket.socketpair() for _ in range(NUM_SOCKETS)]
    yield pairs
    for pair in pairs:
        for end in pair:
            end.close()


def test_each_ready_file_comes_in_its_turn_though_none_is_read(pairs: Pairs) -> None:
    seen = Counter[int]()
    with FewEvents() as selector:
        for reader, writer in pairs:
            selector.register(reader, selectors.EVENT_READ)
            writer.send(b"x")
        for _ in range(8):
            ready = selector.select(0)
            assert 0 < len(ready) <= EVENTS_PER_TICK
            seen.update(key.fd for key, _ in ready)
    assert seen == {reader.fileno(): 2 for reader, _ in pairs}


def test_a_file_that_is_dropped_or_changed_meanwhile_is_not_told_of(pairs: Pairs) -> None:
    with FewEvents() as selector:
        for reader, writer in pairs:
            selector.register(reader, selectors.EVENT_READ)
            writer.send(b"x")
        first = {key.fd for key, _ in selector.select(0)}
        dropped, changed, *_ = (reader for reader, _ in pairs if reader.fileno() not in first)
        selector.unregister(dropped)
        selector.modify(changed, selectors.EVENT_WRITE)
        events = {key.fd: events for _ in range(12) for key, events in selector.select(0)}
    assert dropped.fileno() not in events
    assert events[changed.fileno()] == selectors.EVENT_WRITE


def test_a_burst_is_spread_over_ticks(pairs: Pairs) -> None:
    ticks: list[int] = []
    """Number of the tick in which each socket was read."""

    async def read_all() -> None:
        loop, tick = asyncio.get_running_loop(), 0
        for reader, writer in pairs:
            writer.send(b"x")
            loop.add_reader(reader, lambda reader=reader: (reader.recv(1), ticks.append(tick)))
        while len(ticks) < NUM_SOCKETS:
            await asyncio.sleep(0)
            tick += 1

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(read_all())
    assert max(Counter(ticks).values()) <= EVENTS_PER_TICK
