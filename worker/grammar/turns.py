"""Chooses whose grammar is compiled next, and whose slow mask is made next: clients take turns.

Of grammars each client has one compiled at a time. So however many one client sends, and however slow they are, the
next one of another waits for none of them while there are two places. Does not own what a place is (compiler.py), nor
the masks (masks.py). `Turns` is used on one event loop; `ClientQueue` knows no loop.
"""

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Turn:
    """One grammar's. Several clients may wait for it: whoever's turn comes first."""

    future: asyncio.Future[None]
    clients: set[int] = field(default_factory=set)
    client: int | None = None
    """Whose turn it is; None before it came."""


class Turns:
    def __init__(self, num_places: int) -> None:
        self._num_free = num_places
        self._waiting: OrderedDict[int, deque[Turn]] = OrderedDict()
        """By client: whose turn is next comes first."""
        self._busy: set[int] = set()

    def num_waiting(self, client: int) -> int:
        """Of its grammars, those whose turn has not come."""
        return sum(not turn.future.done() for turn in self._waiting.get(client, ()))

    def wait(self, client: int) -> Turn:
        """Its future is done when the turn comes; to be ended, also before that."""
        turn = Turn(asyncio.get_running_loop().create_future())
        self.join(turn, client)
        return turn

    def join(self, turn: Turn, client: int) -> None:
        """This client waits for it too."""
        if turn.future.done() or client in turn.clients:
            return
        turn.clients.add(client)
        self._waiting.setdefault(client, deque()).append(turn)
        self._go_on()

    def end(self, turn: Turn) -> None:
        if turn.client is not None:
            if turn.client in self._waiting:
                self._waiting.move_to_end(turn.client)
            self._busy.remove(turn.client)
            self._num_free += 1
            turn.client = None
        turn.future.cancel()
        self._go_on()

    def _go_on(self) -> None:
        while self._num_free and (client := self._next_client()) is not None:
            turn = self._waiting[client].popleft()
            turn.client = client
            self._busy.add(client)
            self._num_free -= 1
            turn.future.set_result(None)

    def _next_client(self) -> int | None:
        """The first that is not busy and has somebody waiting; those without are forgotten."""
        for client, turns in list(self._waiting.items()):
            while turns and turns[0].future.done():
                turns.popleft()
            if not turns:
                del self._waiting[client]
            elif client not in self._busy:
                return client
        return None


class ClientQueue(Generic[T]):
    """Clients take turns by one item each, of which the oldest comes first. Not thread-safe."""

    def __init__(self) -> None:
        self._items: OrderedDict[int, deque[T]] = OrderedDict()
        """Queues by client. The client whose turn is next comes first, and no queue is empty."""

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    def put(self, client: int, item: T) -> None:
        self._items.setdefault(client, deque()).append(item)

    def take(self) -> T:
        """Raises KeyError where there is none."""
        client, items = self._items.popitem(last=False)
        item = items.popleft()
        if items:
            self._items[client] = items
        return item
