"""At most so many costly steps in one turn of the event loop.

When the loop was busy, hundreds of writers become ready at once, and all that is ready runs before anybody else, timers
and arrivals included. Does not own which steps are costly (output.py).
"""

import asyncio


class TurnShare:
    """One for all who share the loop. Whoever comes too late waits for a later turn, in order."""

    def __init__(self, most_a_turn: int) -> None:
        self._most_a_turn = most_a_turn
        self._num_taken = 0

    async def take(self) -> None:
        while self._num_taken >= self._most_a_turn:  # noqa: ASYNC110 - a turn of the loop is what is waited for
            await asyncio.sleep(0)
        if self._num_taken == 0:
            # It runs in the next turn, before those who wait for that.
            asyncio.get_running_loop().call_soon(self._begin_turn)
        self._num_taken += 1

    def _begin_turn(self) -> None:
        self._num_taken = 0
