"""At most so many costly steps in one turn of the event loop.

When the loop was busy, hundreds of writers become ready at once, and all that is ready runs before anybody else, timers
and arrivals included. Does not own which steps are costly (generation/output.py).
"""

import asyncio
from collections import deque


class TurnShare:
    """One for all who share the loop. Whoever finds no room waits for a later turn, in the order in which they came.

    While somebody waits no turn has more than its share. A turn in which the first ones come may have nearly twice
    that: the loop does not say where one turn ends and the next begins.
    """

    def __init__(self, most_a_turn: int) -> None:
        assert most_a_turn > 0
        self._most_a_turn = most_a_turn
        self._num_taken = 0
        """In this turn."""
        self._num_called = 0
        """Their turn has come, but they have not run yet."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_following = False
        """`_begin_turn` is to run in the next turn: always so while somebody waits."""

    async def take(self) -> None:
        if self._waiting or self._num_called or self._num_taken >= self._most_a_turn:
            await self._stand_in_line()
        self._num_taken += 1
        self._follow()

    async def _stand_in_line(self) -> None:
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._follow()
        try:
            await place
        finally:
            # One that is cancelled once it was called leaves its share unused.
            if place.done() and not place.cancelled():
                self._num_called -= 1

    def _follow(self) -> None:
        if not self._is_following:
            self._is_following = True
            asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self._is_following = False
        self._num_taken = num_called = 0
        if self._waiting:
            # First, so that the next turn begins before those who are called now run in it.
            self._follow()
        while self._waiting and num_called < self._most_a_turn:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                num_called += 1
        self._num_called += num_called
