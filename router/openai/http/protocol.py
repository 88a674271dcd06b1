"""Connections: what is no HTTP is answered in one sentence, and told to no log.

aiohttp itself would quote the client's bytes to him and log them with a traceback. Owns how many connections there may
be, how long one may be silent, and how large and how slow a request's head may be. Does not own requests
(openai/routes.py).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web import BaseRequest, RequestHandler, Server, StreamResponse
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
"""Between requests of a connection."""
HEAD_SECONDS = 15.0
"""For a request's head from its first byte on, and for the first head of a connection from its beginning on."""
MAX_HEAD_BYTES = 32 * 1024
RETRY_SECONDS = 5.0
LINGER_SECONDS = 2.0
"""The rest of a body that was refused is read for so long, so that the client hears why."""
MAX_LINE_BYTES = 8190
MAX_HEADERS = 64

logger = logging.getLogger(__name__)


class _Connection(RequestHandler):
    def __init__(self, manager: "Connections", **options: Any) -> None:
        super().__init__(manager, **options)
        self._connections = manager
        self._head_bytes = 0
        """Of a head that is not complete yet."""
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        most = self._connections.most_connections
        if len(self._connections.connections) > most:
            told = f"the limit of {most} connections is reached"
            self._end_with(Overloaded(told, retry_after_seconds=RETRY_SECONDS))
        else:
            self._restart_head_timer()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        heads_before = self._request_count
        super().data_received(data)
        if self._request_count != heads_before:
            self._head_bytes = 0
            # The next head may have begun behind them.
            self._restart_head_timer()
        elif self._awaits_head and data:
            if not self._head_bytes and self._request_count:
                self._restart_head_timer()
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._end_with(HeadTooLarge(f"the head must have at most {MAX_HEAD_BYTES} bytes"))

    @property
    def _awaits_head(self) -> bool:
        """Neither a request nor the rest of a body is under way."""
        return self._request_count == 0 or (self._waiter is not None and not self._waiter.done())

    @property
    def _is_within_head(self) -> bool:
        """Of a connection that awaits a head. The parser does not say what it holds. Between requests it skips empty
        lines; within a head they end it, or break it. So the connection cannot be used after a yes."""
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
            self._end_with(HeadTooSlow(f"the head did not come within {HEAD_SECONDS:g} s"))
        elif not self._request_count:
            self.force_close()  # who has said nothing is told nothing

    def _end_with(self, answer: RouterError) -> None:
        """Answers what is no request yet, and hangs up."""
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
            raise ConnectionError("the answer is under way already")
        answer: RouterError = InternalError("internal error")
        if isinstance(exc, HttpProcessingError):
            logger.debug("a connection sent what is no HTTP request")
            answer = MalformedMessage("this is no HTTP request that can be read")
        response = error_response(answer)
        response.headers.update(own_headers(CallNotes(request_id=drawn_id())))
        response.force_close()
        return response

    def log_exception(self, *args: Any, **options: Any) -> None:
        """Whatever it says may quote the client: what fails in a handler is logged in calls/gate.py."""
        logger.error("a connection has failed: %s", type(options.get("exc_info")).__name__)


class Connections(Server):
    """The protocol factory of the port. A handler is cancelled when its client goes."""

    def __init__(
        self, handler: Callable[[BaseRequest], Awaitable[StreamResponse]], *, most_connections: int
    ) -> None:
        super().__init__(handler, handler_cancellation=True)
        self.most_connections = most_connections

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
            # A body that is compressed is refused (body.py), not inflated.
            auto_decompress=False,
        )
