"""Connections: what is no HTTP is answered in one sentence, and told to no log.

aiohttp itself would quote the client's bytes to him and log them with a traceback. Owns how long a connection may be
silent and how large a request's head may be. Does not own requests (routes.py).
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web import BaseRequest, RequestHandler, Server, StreamResponse
from blockyard.router.errors import InternalError, MalformedMessage, RouterError
from blockyard.router.openai.http_call import drawn_id, own_headers
from blockyard.router.openai.json_response import error_response

IDLE_SECONDS = 75.0
"""Between requests of a connection, and until the head of the first one is complete."""
LINGER_SECONDS = 2.0
"""The rest of a body that was refused is read for so long, so that the client hears why."""
MAX_LINE_BYTES = 8190
MAX_HEADERS = 64

logger = logging.getLogger(__name__)


class _Connection(RequestHandler):
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
        response.headers.update(own_headers(drawn_id()))
        response.force_close()
        return response

    def log_exception(self, *args: Any, **options: Any) -> None:
        """Whatever it says may quote the client: what fails in a handler is logged in call_gate.py."""
        logger.error("a connection has failed: %s", type(options.get("exc_info")).__name__)


class Connections(Server):
    """The protocol factory of the port. A handler is cancelled when its client goes."""

    def __init__(self, handler: Callable[[BaseRequest], Awaitable[StreamResponse]]) -> None:
        super().__init__(handler, handler_cancellation=True)

    def __call__(self) -> RequestHandler:
        return _Connection(
            self,
            loop=self._loop,
            keepalive_timeout=IDLE_SECONDS,
            lingering_time=LINGER_SECONDS,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            max_headers=MAX_HEADERS,
            access_log=None,  # type: ignore[arg-type]
            # A body that is compressed is refused (body.py), not inflated.
            auto_decompress=False,
        )
