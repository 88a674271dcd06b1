"""Server-sent events: a stream whose status waits for its first event. An error before that gets its own status.

Owns the time limit of the last events. Does not own the one while output arrives (generation/client_buffer.py).
"""

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp.http import HttpVersion11
from aiohttp.web import BaseRequest, StreamResponse
from blockyard.router.openai.http.json_response import encoded

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # For nginx, which would otherwise buffer the stream.
    "X-Accel-Buffering": "no",
}
DONE = b"data: [DONE]\n\n"


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

    @property
    def has_begun(self) -> bool:
        return self.response.prepared

    @property
    def is_open(self) -> bool:
        """True if the stream has begun, and its client reads as fast as events come."""
        protocol, transport = self._request.protocol, self._request.transport
        is_open = transport is not None and not (transport.is_closing() or protocol.writing_paused)
        return is_open and self.has_begun

    def send_now(self, value: dict[str, Any]) -> None:
        """Send one event on a stream that `is_open`, past aiohttp's writer, which takes as long as the system call."""
        transport = self._request.transport
        assert transport is not None
        event = b"data: " + encoded(value) + b"\n\n"
        transport.write(b"%x\r\n%b\r\n" % (len(event), event) if self.response.chunked else event)

    async def send(self, value: dict[str, Any]) -> None:
        """Send one event, and begin the stream with the first. Waits while the client does not read."""
        if not self.has_begun:
            self._headed(self.response)
            if self._request.version >= HttpVersion11:
                self.response.enable_chunked_encoding()
            await self.response.prepare(self._request)
        await self.response.write(b"data: " + encoded(value) + b"\n\n")

    async def end(self, *last: dict[str, Any], is_whole: bool) -> None:
        """Send these events and, if the stream `is_whole`, its end mark. Raises TimeoutError for a client that does not
        read."""
        async with asyncio.timeout(self._slow_reader_seconds):
            for value in last:
                await self.send(value)
            if is_whole:
                await self.response.write(DONE)
            await self.response.write_eof()

    def cut_off(self) -> None:
        """Close the connection at once, and drop what waits to be sent."""
        if self._request.transport is not None:
            self._request.transport.abort()
