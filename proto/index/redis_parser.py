"""Reads Redis's replies within bounds, because the server may have been replaced or taken over.

Owns the largest size of a reply, and drops notices that the server sends unasked. Does not own what a reply means
(redis.py).
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

# redis-py exports it for its own use alone, from 6.0 on. Its default parser depends on whether hiredis is installed.
from redis._parsers import _AsyncRESP3Parser
from redis.exceptions import InvalidResponse

MAX_REPLY_BYTES = 2 << 20
MAX_REPLY_ITEMS = 16_384
"""Most lines of a reply: each number, string and array has one. A look-up with 4,096 holders has 8,193."""
ITEMS_PER_TICK = 512
"""Lines read, in about 1 ms, before other tasks get the event loop."""
_NULL = -1


class BoundedParser(_AsyncRESP3Parser):
    """redis-py's own parser of replies, with bounds. It reads protocol 2 too. Without bounds it would read any length
    that a server claims, as hiredis would. Raises InvalidResponse for a reply beyond the bounds, and the connection is
    closed."""

    def __init__(self, socket_read_size: int) -> None:
        super().__init__(socket_read_size)  # type: ignore[no-untyped-call]
        self._num_items = 0

    async def handle_push_response(self, response: Any, **_: Any) -> None:
        """Ignore a notice of the server. A notice of maintenance would make the client log in at another host."""

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
        """Read a line of a reply. Every ITEMS_PER_TICK lines, check the bounds and let other tasks run first. `_pos`
        counts the bytes of the reply that were read."""
        self._num_items = num_items = self._num_items + 1 if self._pos else 1
        if self._pos > MAX_REPLY_BYTES or not num_items % ITEMS_PER_TICK:
            return self._readline_after_yielding()
        return _AsyncRESP3Parser._readline(self)

    async def _readline_after_yielding(self) -> bytes:
        if self._pos > MAX_REPLY_BYTES or self._num_items >= MAX_REPLY_ITEMS:
            raise InvalidResponse("a reply is longer than any of ours")
        await asyncio.sleep(0)
        return await _AsyncRESP3Parser._readline(self)


async def _nothing() -> None:
    """Return None, for protocol 2's null."""
