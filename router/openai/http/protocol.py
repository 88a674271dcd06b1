"""Connections: bounds of their number, their silence, and the size and time of a request's head.

Bytes that are not HTTP get a one-sentence answer and are not logged. aiohttp itself would quote them to the client, and
log them with a traceback. Does not own requests (openai/routes.py).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Any

from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web import BaseRequest, RequestHandler, Server, StreamResponse
from blockyard.router.admission.loop_budget import LoopBudget
from blockyard.router.calls.gate import ENDS_PER_TICK
from blockyard.router.errors import InternalError, MalformedMessage, Overloaded, RouterError
from blockyard.router.openai.http.call import CallNotes, drawn_id, own_headers
from blockyard.router.openai.http.errors import (
    HeadTooLarge,
    HeadTooSlow,
    error_body,
    error_headers,
    status_of,
)
from blockyard.router.openai.http.json_response import encoded, error_response

IDLE_SECONDS = 75.0
"""Longest silence between two requests of a connection, after which it is closed."""
HEAD_SECONDS = 15.0
"""Deadline of a request's head, from its first byte. For the first head it counts from the start of the connection."""
MAX_HEAD_BYTES = 32 * 1024
RETRY_SECONDS = 5.0
LINGER_SECONDS = 2.0
"""Time for which the rest of a refused body is still read, without which the client may miss the answer."""
MAX_LINE_BYTES = 8190
MAX_HEADERS = 64

logger = logging.getLogger(__name__)


class _Connection(RequestHandler):
    def __init__(self, manager: "Connections", **options: Any) -> None:
        super().__init__(manager, **options)
        self._connections = manager
        self._head_bytes = 0
        """Bytes that have arrived of a head that is not complete."""
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        most = self._connections.most_connections
        if len(self._connections.connections) > most:
            message = f"the limit of {most} connections is reached"
            self._end_with(Overloaded(message, retry_after_seconds=RETRY_SECONDS))
        else:
            self._restart_head_timer()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_head_timer()
        # It cancels the handler. A front end that dies ends hundreds at once.
        self._connections.ends.run(partial(super().connection_lost, exc))

    def data_received(self, data: bytes) -> None:
        heads_before = self._request_count
        super().data_received(data)
        if self._request_count != heads_before:
            self._head_bytes = 0
            # The next head may have begun in the same data.
            self._restart_head_timer()
        elif self._awaits_head and data:
            if not self._head_bytes and self._request_count:
                self._restart_head_timer()
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._end_with(HeadTooLarge(f"the head must have at most {MAX_HEAD_BYTES} bytes"))

    @property
    def _awaits_head(self) -> bool:
        """True if neither a request nor the rest of a body is in progress."""
        return self._request_count == 0 or (self._waiter is not None and not self._waiter.done())

    @property
    def _is_within_head(self) -> bool:
        """True if part of a head has arrived, on a connection that awaits one.

        The parser does not report what it holds, so this feeds it empty lines. Between requests it skips them. Within a
        head they end or break it, so the connection cannot be used after True.
        """
        if self._parser is None:
            return False
        try:
            messages, _, _ = self._parser.feed_data(b"\r\n\r\n")
        except HttpProcessingError:
            return True
        return bool(messages)

    def _restart_head_timer(self) -> None:
        self._stop_head_timer()
        self._head_timer = self._loop.call_later(HEAD_SECONDS, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self._awaits_head:
            self._restart_head_timer()
        elif self._head_bytes or (self._request_count and self._is_within_head):
            self._end_with(HeadTooSlow(f"the head was not complete within {HEAD_SECONDS:g} s"))
        elif not self._request_count:
            self.force_close()  # a client that has sent nothing gets no answer

    def _end_with(self, answer: RouterError) -> None:
        """Send an error for data that is not a complete request, and close the connection."""
        self._stop_head_timer()
        if self.transport is None:
            return
        body, status = encoded(error_body(answer)), status_of(answer)
        headers = error_headers(answer) | own_headers(CallNotes(request_id=drawn_id()))
        headers |= {"Content-Type": "application/json; charset=utf-8", "Content-Length": str(len(body))}
        lines = [f"{name}: {value}" for name, value in (headers | {"Connection": "close"}).items()]
        head = "\r\n".join([f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *lines, "", ""])
        self.transport.write(head.encode() + body)
        self.force_close()

    def handle_error(
        self,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun already")
        answer: RouterError = InternalError("internal error")
        if isinstance(exc, HttpProcessingError):
            logger.debug("a connection sent data that is not an HTTP request")
            answer = MalformedMessage("this is not a valid HTTP request")
        response = error_response(answer)
        response.headers.update(own_headers(CallNotes(request_id=drawn_id())))
        response.force_close()
        return response

    def log_exception(self, *args: Any, **options: Any) -> None:
        """Log only an exception's type: its text may quote the client. calls/gate.py logs failures of handlers."""
        logger.error("a connection has failed: %s", type(options.get("exc_info")).__name__)


class Connections(Server):
    """Makes the protocol of each connection to the port. A handler is cancelled when its client disconnects."""

    def __init__(
        self, handler: Callable[[BaseRequest], Awaitable[StreamResponse]], *, most_connections: int
    ) -> None:
        super().__init__(handler, handler_cancellation=True)
        self.most_connections = most_connections
        self.ends = LoopBudget(ENDS_PER_TICK)

    def __call__(self) -> RequestHandler:
        return _Connection(
            self,
            loop=self._loop,
            keepalive_timeout=IDLE_SECONDS,
            lingering_time=LINGER_SECONDS,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            max_headers=MAX_HEADERS,
            access_log=None,
            # A compressed body is refused (body.py), not inflated.
            auto_decompress=False,
        )
