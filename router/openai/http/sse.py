"""Server-sent events: a stream whose status waits for its first event. An error before that gets its own status.

Owns the time limit of the last events. Does not own the one while output arrives (generation/client_buffer.py).
"""

import asyncio
from collections.abc import Callable

from aiohttp.http import HttpVersion11
from aiohttp.web import BaseRequest, StreamResponse

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # For nginx, which would otherwise buffer the stream.
    "X-Accel-Buffering": "no",
}
DONE = b"data: [DONE]\n\n"


def event(data: bytes, name: bytes = b"") -> bytes:
    """Return one event of a stream, with a name where the API has names."""
    return b"event: %b\ndata: %b\n\n" % (name, data) if name else b"data: %b\n\n" % data


class EventStream:
    def __init__(
        self,
        request: BaseRequest,
        *,
        slow_reader_seconds: float,
        headed: Callable[[StreamResponse], None] = lambda response: None,
    ) -> None:
        """`headed` is called when the stream begins, to add headers to the response."""
        self._request = request
        self._headed = headed
        self._slow_reader_seconds = slow_reader_seconds
        self.response = StreamResponse(headers=HEADERS)
        self._protocol = request.protocol
        self._transport: asyncio.Transport | None = None
        """Transport of a stream that has begun."""
        self._is_chunked = False

    @property
    def has_begun(self) -> bool:
        return self.response.prepared

    @property
    def is_open(self) -> bool:
        """True if the stream has begun, and its client reads as fast as events come."""
        transport = self._transport
        return transport is not None and not (self._protocol.writing_paused or transport.is_closing())

    def send_now(self, events: bytes) -> None:
        """Send events on a stream that `is_open`, past aiohttp's writer, which takes as long as the system call.

        Raises RuntimeError if the stream has not begun.
        """
        if self._transport is None:
            raise RuntimeError("the stream has not begun")
        if self._is_chunked:
            self._transport.write(b"%x\r\n%b\r\n" % (len(events), events))
        else:
            self._transport.write(events)

    async def send(self, events: bytes) -> None:
        """Send events, and begin the stream with the first. Waits while the client does not read."""
        if not self.has_begun:
            self._headed(self.response)
            if self._request.version >= HttpVersion11:
                self.response.enable_chunked_encoding()
                self._is_chunked = True
            await self.response.prepare(self._request)
        await self.response.write(events)
        # aiohttp sends the head with the first event.
        self._transport = self._request.transport

    async def end(self, events: bytes) -> None:
        """Send the last events, and end the stream. Raises TimeoutError for a client that does not read."""
        async with asyncio.timeout(self._slow_reader_seconds):
            await self.response.write_eof(events)

    def cut_off(self) -> None:
        """Close the connection at once, and drop what waits to be sent."""
        if self._request.transport is not None:
            self._request.transport.abort()
