"""Reads Redis's replies within bounds, because the server may have been replaced or taken over.

Owns how large a reply may be, and drops notices that the server sends unasked. Does not own what a reply means
(redis.py).
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

# Exported by redis-py for its own use alone, from 6.0 on; its choice of a parser depends on whether hiredis is there.
from redis._parsers import _AsyncRESP3Parser
from redis.exceptions import InvalidResponse

MAX_REPLY_BYTES = 2 << 20
MAX_REPLY_ITEMS = 16_384
"""Lines: each number, string and array has one. A look-up with 4,096 holders has 8,193."""
ITEMS_A_TURN = 512
"""Takes about 1 ms. Then others have the event loop."""
_NULL = -1


class BoundedParser(_AsyncRESP3Parser):
    """redis-py's own parser, for protocol 2 too. It would read whatever length a server claims, and so would hiredis.
    Raises InvalidResponse for a reply beyond the bounds; the connection is closed then."""

    def __init__(self, socket_read_size: int) -> None:
        super().__init__(socket_read_size)  # type: ignore[no-untyped-call]
        self._num_items = 0

    async def handle_push_response(self, response: Any, **_: Any) -> None:
        """Follows no notice: one of maintenance would have the client log in at another host."""

    def on_disconnect(self) -> None:
        super().on_disconnect()  # type: ignore[no-untyped-call]
        self._clear()  # type: ignore[no-untyped-call]

    # Plain functions that return a coroutine: one more coroutine for each item would cost a third of the time.

    def _read(self, length: int) -> Coroutine[Any, Any, Any]:
        if length == _NULL:
            return _nothing()
        if not 0 <= length <= MAX_REPLY_BYTES - self._pos:
            raise InvalidResponse("a string is longer than any of ours")
        return _AsyncRESP3Parser._read(self, length)

    def _readline(self) -> Coroutine[Any, Any, bytes]:
        """`_pos` counts the reply's bytes that were read; each line has two at least."""
        self._num_items = num_items = self._num_items + 1 if self._pos else 1
        if self._pos > MAX_REPLY_BYTES or not num_items % ITEMS_A_TURN:
            return self._readline_in_turn()
        return _AsyncRESP3Parser._readline(self)

    async def _readline_in_turn(self) -> bytes:
        if self._pos > MAX_REPLY_BYTES or self._num_items >= MAX_REPLY_ITEMS:
            raise InvalidResponse("a reply is longer than any of ours")
        await asyncio.sleep(0)
        return await _AsyncRESP3Parser._readline(self)


async def _nothing() -> None:
    """Protocol 2's null."""
