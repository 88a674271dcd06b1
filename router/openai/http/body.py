"""Request body: read within bounds and parsed as a JSON object.

Each bound is checked before the work that it limits: the length before the bytes, the number of parts before the
parser. The parser would make objects of the parts and block the event loop for seconds. Does not own the fields'
meaning.
"""

import asyncio
import json
from typing import Any, NoReturn

import numpy as np
from aiohttp import ClientPayloadError
from aiohttp.web import BaseRequest
from aiohttp.web_exceptions import HTTPException
from blockyard.router.calls.intake import Charge
from blockyard.router.errors import InvalidRequest
from blockyard.router.openai.http.errors import BodyTooLarge, BodyTooSlow, UnsupportedMediaType

BODY_SECONDS = 30.0
"""Deadline for the whole body to arrive."""
BASE_BYTES = 512 * 1024
"""Room for schemas, biases and lists of tokens."""
BYTES_PER_TOKEN = 16
"""Bytes per token of the context: text with each character escaped, or ids, with some room."""
MAX_BODY_BYTES = 16 * 1024 * 1024
"""Largest body, as large as the largest message over gRPC."""
FREE_BYTES = 64 * 1024
"""First bytes of each body, which are not charged. So a small body is accepted however many large ones are arriving."""
MAX_PARTS = 20_000
"""Most objects, arrays and fields. A schema of 64 KiB has no more."""
BASE_VALUES = 128 * 1024
VALUES_PER_TOKEN = 2
"""Values per token of the context. A body of small numbers alone takes the parser five times as long as text."""
PARTS = (b"[", b"{", b":")
_NO_MARKS = bytes(set(range(256)) - set(b'"[{:,'))


def max_body_bytes(max_model_len: int) -> int:
    return min(BASE_BYTES + BYTES_PER_TOKEN * max_model_len, MAX_BODY_BYTES)


def max_values(max_model_len: int) -> int:
    return BASE_VALUES + VALUES_PER_TOKEN * max_model_len


async def read_json(request: BaseRequest, charge: Charge, *, max_model_len: int) -> dict[str, Any]:
    """Read the body and return it as a JSON object. `charge` grows with the bytes that arrive.

    Raises InvalidRequest, BodyTooLarge, BodyTooSlow, Overloaded or UnsupportedMediaType.
    """
    limit_bytes = max_body_bytes(max_model_len)
    check_head(request, limit_bytes)
    try:
        # A small body has come with its head.
        async with asyncio.timeout(None if request.content.is_eof() else BODY_SECONDS):
            raw = await _read(request, limit_bytes, charge)
        return parse_json(raw, most_values=max_values(max_model_len))
    except TimeoutError:
        raise BodyTooSlow(f"the body was not complete within {BODY_SECONDS:g} s") from None
    except (ClientPayloadError, HTTPException):
        raise InvalidRequest("the body ends too early") from None


def parse_json(raw: bytes, *, most_values: int) -> dict[str, Any]:
    """Parse a JSON object with at most this many values. Raises InvalidRequest."""
    _check_parts(raw, most_values)
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise InvalidRequest("the body must be UTF-8") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except ValueError:
        # For malformed JSON, and for integers with thousands of digits.
        raise InvalidRequest("the body must be JSON") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    return value


def _check_parts(raw: bytes, most_values: int) -> None:
    # Most bodies have few such characters, even with those inside strings.
    if sum(map(raw.count, PARTS)) > MAX_PARTS or raw.count(b",") > most_values:
        outside = _outside_strings(raw)
        num_commas = outside.count(b",")
        if len(outside) - num_commas > MAX_PARTS:
            raise InvalidRequest(f"the body must have at most {MAX_PARTS} objects, arrays and fields")
        if num_commas > most_values:
            raise InvalidRequest(f"the body must have at most {most_values} values")


def _outside_strings(raw: bytes) -> bytes:
    """Return each `[`, `{`, `:` and `,` that is not in a string, in one pass over any input.

    Raises InvalidRequest for a string without an end. A backslash outside a string is not JSON: the parser stops there,
    and up to there both see the same strings.
    """
    unescaped = raw.replace(rb"\\", b"").replace(rb"\"", b"")
    chars = np.frombuffer(unescaped.translate(None, _NO_MARKS), np.uint8)
    is_quote = chars == ord('"')
    is_inside = np.logical_xor.accumulate(is_quote)
    if is_inside[-1:].any():
        raise InvalidRequest("the body must be JSON")
    return bytes(chars[~(is_inside | is_quote)])


def check_head(request: BaseRequest, limit_bytes: int) -> None:
    # This matters for security: a web page may send other types without a preflight. aiohttp's own `content_type` takes
    # half a second for 8 KB of parameters.
    media_type = request.headers.get("Content-Type", "").partition(";")[0]
    if media_type.strip().lower() != "application/json":
        raise UnsupportedMediaType("Content-Type must be application/json")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise UnsupportedMediaType("Content-Encoding is not supported: send the body as it is")
    if (request.content_length or 0) > limit_bytes:
        _refuse_size(limit_bytes)


async def _read(request: BaseRequest, limit_bytes: int, charge: Charge) -> bytes:
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > limit_bytes:
            _refuse_size(limit_bytes)
        if len(body) > FREE_BYTES + charge.num_bytes:
            charge.grow(len(body) - FREE_BYTES - charge.num_bytes)
    return bytes(body)


def _refuse_size(limit_bytes: int) -> NoReturn:
    raise BodyTooLarge(f"the body must have at most {limit_bytes} bytes")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
