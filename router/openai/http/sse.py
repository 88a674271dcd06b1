"""A stream of server-sent events whose status waits for the first of them: what is refused before gets its own.

Does not own pace while output comes (generation/output.py), only that of the last events.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp.web import BaseRequest, StreamResponse
from blockyard.router.openai.http.json_response import encoded

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # For nginx, which would hold the stream back.
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
        """`headed` adds the headers that are known when it begins."""
        self._request = request
        self._headed = headed
        self._slow_reader_seconds = slow_reader_seconds
        self.response = StreamResponse(headers=HEADERS)

    @property
    def has_begun(self) -> bool:
        return self.response.prepared

    async def send(self, value: dict[str, Any]) -> None:
        """Waits while the client takes nothing."""
        if not self.has_begun:
            self._headed(self.response)
            await self.response.prepare(self._request)
        await self.response.write(b"data: " + encoded(value) + b"\n\n")

    async def end(self, *last: dict[str, Any], is_whole: bool) -> None:
        """With these events, and the mark of a whole stream. Raises TimeoutError for a client that takes nothing."""
        async with asyncio.timeout(self._slow_reader_seconds):
            for value in last:
                await self.send(value)
            if is_whole:
                await self.response.write(DONE)
            await self.response.write_eof()

    def cut_off(self) -> None:
        """What waits for the client is dropped."""
        if self._request.transport is not None:
            self._request.transport.abort()
