"""Rotation: round-robin between clients, for the next grammar to compile and the next slow mask to make.

Each client has one grammar compiled at a time. So one client's grammars, however many or slow, hold up one of the two
trial processes and never both. Does not own the processes (compiler.py) or the masks (masks.py).
`Rotation` is used on one event loop; `ClientQueue` knows no loop.
"""

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Turn:
    """The turn of one grammar. Several clients may wait for it; the first to have its turn counts."""

    future: asyncio.Future[None]
    clients: set[int] = field(default_factory=set)
    client: int | None = None
    """The client whose turn this is. None before the turn has come, and after its end."""


class Rotation:
    def __init__(self, num_permits: int) -> None:
        self._num_free = num_permits
        self._waiting: OrderedDict[int, deque[Turn]] = OrderedDict()
        """Queues by client. The client with the next turn comes first."""
        self._busy: set[int] = set()

    def num_waiting(self, client: int) -> int:
        """Return how many of the client's grammars wait for their turn."""
        return sum(not turn.future.done() for turn in self._waiting.get(client, ()))

    def wait(self, client: int) -> Turn:
        """Queue a turn. Its future is done when the turn comes. End it in any case, even before that."""
        turn = Turn(asyncio.get_running_loop().create_future())
        self.join(turn, client)
        return turn

    def join(self, turn: Turn, client: int) -> None:
        """Make this client wait for the turn too."""
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
        """Return the first client that is not busy and has a grammar waiting. Clients without one are dropped."""
        for client, turns in list(self._waiting.items()):
            while turns and turns[0].future.done():
                turns.popleft()
            if not turns:
                del self._waiting[client]
            elif client not in self._busy:
                return client
        return None


class ClientQueue(Generic[T]):
    """Items of several clients: clients take turns with one item each, the oldest first. Not thread-safe."""

    def __init__(self) -> None:
        self._items: OrderedDict[int, deque[T]] = OrderedDict()
        """Queues by client. The client with the next turn comes first, and no queue is empty."""

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    def put(self, client: int, item: T) -> None:
        self._items.setdefault(client, deque()).append(item)

    def take(self) -> T:
        """Take the next item. Raises KeyError where there is none."""
        client, items = self._items.popitem(last=False)
        item = items.popleft()
        if items:
            self._items[client] = items
        return item
