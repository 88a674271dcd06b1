"""Upload: a file in the body of a request, written to disk as it arrives.

Owns the bounds of its size, its time and the number of uploads at once. Does not own what the file must contain
(lines.py) or where it is kept (store.py).
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from aiohttp import BodyPartReader, ClientPayloadError
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web import BaseRequest
from aiohttp.web_exceptions import HTTPException
from blockyard.router.errors import InvalidRequest, Overloaded
from blockyard.router.openai.batches.store import MAX_FILE_BYTES
from blockyard.router.openai.http.body import BODY_SECONDS
from blockyard.router.openai.http.errors import BodyTooLarge, BodyTooSlow, UnsupportedMediaType

MAX_UPLOADS = 8
MAX_OF_A_CLIENT = 4
RETRY_SECONDS = 5.0
UPLOAD_SECONDS = 600.0
"""Deadline of a whole upload."""
WRITE_BYTES = 256 * 1024
MAX_PARTS = 8
MAX_VALUE_BYTES = 1024
MAX_NAME_CHARACTERS = 255
T = TypeVar("T")
Write = Callable[[bytes], Awaitable[object]]


class Uploads:
    """Uploads that one gateway is receiving."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()
        """Number of uploads by client."""

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Raises Overloaded while too many others are running, and BodyTooSlow for one that takes too long."""
        if self._running[client] >= MAX_OF_A_CLIENT or self._running.total() >= MAX_UPLOADS:
            whose = " of this client" if self._running[client] >= MAX_OF_A_CLIENT else ""
            message = f"too many files{whose} are being received"
            raise Overloaded(message, retry_after_seconds=RETRY_SECONDS)
        self._running[client] += 1
        try:
            async with asyncio.timeout(UPLOAD_SECONDS):
                yield
        except TimeoutError:
            raise BodyTooSlow("the file did not arrive in time") from None
        finally:
            self._running[client] -= 1
            if not self._running[client]:
                del self._running[client]


async def receive(request: BaseRequest, write: Write) -> tuple[str, int]:
    """Pass the body's field `file` to `write` in pieces. Return its name and its bytes.

    Raises InvalidRequest, BodyTooLarge, BodyTooSlow, UnsupportedMediaType or what `write` raises.
    """
    media_type = request.headers.get("Content-Type", "")
    if not media_type.lower().startswith("multipart/form-data;"):
        raise UnsupportedMediaType("Content-Type must be multipart/form-data")
    if (request.content_length or 0) > MAX_FILE_BYTES + MAX_PARTS * MAX_VALUE_BYTES:
        raise BodyTooLarge(f"a file must have at most {MAX_FILE_BYTES} bytes")
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    try:
        return await _receive(request, write)
    except (ClientPayloadError, HTTPException, HttpProcessingError, ValueError, LookupError, AssertionError):
        # aiohttp's parser checks some of what clients send by assertions.
        raise InvalidRequest("the body must be valid multipart/form-data") from None


async def _receive(request: BaseRequest, write: Write) -> tuple[str, int]:
    reader = await request.multipart()
    purpose: str | None = None
    received: tuple[str, int] | None = None
    for _ in range(MAX_PARTS):
        part = await _timely(reader.next())
        if part is None:
            break
        name = part.name if isinstance(part, BodyPartReader) else None
        if not isinstance(part, BodyPartReader) or name not in ("purpose", "file"):
            raise InvalidRequest.of("(a field)", "is not known here: a file has the fields purpose and file")
        if name == "purpose":
            purpose = (await _timely(part.read_chunk(MAX_VALUE_BYTES))).decode()
        elif received is not None:
            raise InvalidRequest.of("file", "must occur once")
        else:
            received = (part.filename or "file")[:MAX_NAME_CHARACTERS], await _written(part, write)
    if purpose != "batch":
        raise InvalidRequest.of("purpose", "must be batch")
    if received is None:
        raise InvalidRequest.of("file", "is required")
    return received


async def _written(part: BodyPartReader, write: Write) -> int:
    num_bytes = 0
    waiting = bytearray()
    while chunk := await _timely(part.read_chunk(WRITE_BYTES)):
        num_bytes += len(chunk)
        if num_bytes > MAX_FILE_BYTES:
            raise BodyTooLarge(f"a file must have at most {MAX_FILE_BYTES} bytes")
        waiting += chunk
        if len(waiting) >= WRITE_BYTES:
            await write(bytes(waiting))
            waiting.clear()
    await write(bytes(waiting))
    return num_bytes


async def _timely(reading: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await reading
    except TimeoutError:
        raise BodyTooSlow(f"no part of the body came within {BODY_SECONDS:g} s") from None
