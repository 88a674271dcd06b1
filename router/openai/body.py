"""The body of a request, within bounds, as a JSON object.

Bounds come before what they bound: the length before the bytes, the number of parts before the parser, which makes
objects of them and would hold the event loop for seconds. Does not own what the fields mean.
"""

import asyncio
import json
from typing import Any, NoReturn

import numpy as np
from aiohttp import ClientPayloadError
from aiohttp.web import BaseRequest
from aiohttp.web_exceptions import HTTPException
from blockyard.router.errors import InvalidRequest
from blockyard.router.openai.http_errors import BodyTooLarge, BodyTooSlow, UnsupportedMediaType

BODY_SECONDS = 30.0
"""For the whole of it."""
BASE_BYTES = 512 * 1024
"""For schemas, biases, lists of tokens."""
BYTES_PER_TOKEN = 16
"""Of the context: text with each character escaped, or ids, and some room."""
MAX_BODY_BYTES = 16 * 1024 * 1024
"""As gRPC's messages."""
MAX_PARTS = 20_000
"""Objects, arrays and fields: a schema of 64 KiB has no more."""


def max_body_bytes(max_model_len: int) -> int:
    return min(BASE_BYTES + BYTES_PER_TOKEN * max_model_len, MAX_BODY_BYTES)


async def read_json(request: BaseRequest, *, limit_bytes: int) -> dict[str, Any]:
    """Raises InvalidRequest, BodyTooLarge, BodyTooSlow, UnsupportedMediaType."""
    _check_head(request, limit_bytes)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return parse_json(await _read(request, limit_bytes))
    except TimeoutError:
        raise BodyTooSlow(f"the body did not come within {BODY_SECONDS:g} s") from None
    except (ClientPayloadError, HTTPException):
        raise InvalidRequest("the body ends too early") from None


def parse_json(raw: bytes) -> dict[str, Any]:
    """Raises InvalidRequest."""
    # Most bodies have few even with those in their texts.
    if _num_parts(raw) > MAX_PARTS and _num_parts_outside_strings(raw) > MAX_PARTS:
        raise InvalidRequest(f"the body must have at most {MAX_PARTS} objects, arrays and fields")
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise InvalidRequest("the body must be UTF-8") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except ValueError:
        # Of malformed JSON, and of integers with thousands of digits.
        raise InvalidRequest("the body must be JSON") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    return value


def _num_parts(raw: bytes) -> int:
    return raw.count(b"[") + raw.count(b"{") + raw.count(b":")


def _num_parts_outside_strings(raw: bytes) -> int:
    """Counts in one pass, whatever the body is. Raises InvalidRequest for a string that does not end.

    A backslash outside a string is not JSON: the parser stops there, and before it both see the same strings."""
    unescaped = raw.replace(rb"\\", b"").replace(rb"\"", b"")
    chars = np.frombuffer(unescaped, np.uint8)
    is_inside = np.logical_xor.accumulate(chars == ord('"'))
    if is_inside[-1:].any():
        raise InvalidRequest("the body must be JSON")
    is_part = (chars == ord("[")) | (chars == ord("{")) | (chars == ord(":"))
    return int(np.count_nonzero(is_part & ~is_inside))


def _check_head(request: BaseRequest, limit_bytes: int) -> None:
    # Not for order's sake: a web page elsewhere may send other types without the browser asking first.
    # aiohttp's own `content_type` takes half a second for 8 KB of parameters.
    media_type = request.headers.get("Content-Type", "").partition(";")[0]
    if media_type.strip().lower() != "application/json":
        raise UnsupportedMediaType("Content-Type must be application/json")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise UnsupportedMediaType("Content-Encoding is not supported: send the body as it is")
    if (request.content_length or 0) > limit_bytes:
        _refuse_size(limit_bytes)


async def _read(request: BaseRequest, limit_bytes: int) -> bytes:
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > limit_bytes:
            _refuse_size(limit_bytes)
    return bytes(body)


def _refuse_size(limit_bytes: int) -> NoReturn:
    raise BodyTooLarge(f"the body must have at most {limit_bytes} bytes")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")
