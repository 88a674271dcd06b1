"""HTTP request as a call: its id, headers, deadline and client address.

`HttpCall` implements CallContext (calls/bounds.py), as gRPC's context does, so both are handled alike.
"""

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from aiohttp.web import BaseRequest
from blockyard.proto.naming.headers import API_KEY, AUTHORIZATION, IGNORED, REQUEST_ID, TIMEOUT_SECONDS
from blockyard.proto.naming.identifiers import NAME_RULE, is_id
from blockyard.router.errors import InvalidRequest


def call_id(request: BaseRequest) -> str:
    """Return the client's X-Request-Id, or a random id. Raises InvalidRequest."""
    given = request.headers.get(REQUEST_ID)
    if given is None:
        return drawn_id()
    if not is_id(given):
        raise InvalidRequest.of(REQUEST_ID, f"must be {NAME_RULE}, not empty")
    return given


def drawn_id() -> str:
    return f"req-{secrets.token_hex(12)}"


@dataclass(slots=True, kw_only=True)
class CallNotes:
    """Collects facts about a call for its response."""

    request_id: str
    ignored: tuple[str, ...] = ()
    """Fields of the call's body that have no effect."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Maps fields of GenerateRequest to the names that the call's body has for them."""


def own_headers(notes: CallNotes) -> dict[str, str]:
    """Return the headers that every response has. Without `Server`, aiohttp would name itself and its version."""
    headers = {"Server": "blockyard", REQUEST_ID: notes.request_id}
    return headers | ({IGNORED: ", ".join(notes.ignored)} if notes.ignored else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpCall:
    metadata: tuple[tuple[str, str | bytes], ...]
    deadline: float
    """Time on the monotonic clock by which the call must end, with all its prompts."""
    address: str = ""
    """Address of the client, as gRPC writes it: "ipv4:127.0.0.1:1234"."""

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self.metadata

    def time_remaining(self) -> float:
        return self.deadline - time.monotonic()

    def peer(self) -> str:
        return self.address


def http_call(request: BaseRequest, *, default_timeout_seconds: float) -> HttpCall:
    """Return the call's headers, deadline and address. Raises InvalidRequest for a wrong timeout."""
    written = request.headers.get(TIMEOUT_SECONDS)
    seconds = default_timeout_seconds if written is None else _timeout(written)
    return HttpCall(
        metadata=call_metadata(request), deadline=time.monotonic() + seconds, address=peer_address(request)
    )


def peer_address(request: BaseRequest) -> str:
    name = None if request.transport is None else request.transport.get_extra_info("peername")
    if not isinstance(name, tuple) or len(name) < 2:
        return "unix:"
    host, port = name[:2]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def call_metadata(request: BaseRequest) -> tuple[tuple[str, str | bytes], ...]:
    """Return the headers as gRPC would, with an API key as the bearer token if there is no other.

    A value that is not ASCII stays bytes, and is never a valid token or name.
    """
    metadata = tuple(
        (name.lower(), value if value.isascii() else value.encode("utf-8", "surrogateescape"))
        for name, value in request.headers.items()
    )
    if AUTHORIZATION in request.headers:
        return metadata
    keys = [value for name, value in metadata if name == API_KEY and isinstance(value, str)]
    return (*metadata, *((AUTHORIZATION, f"Bearer {key}") for key in keys))


def _timeout(written: str) -> float:
    try:
        seconds = float(written)
    except ValueError:
        seconds = -1.0
    # NaN is in no range.
    if not 0 < seconds < float("inf"):
        raise InvalidRequest.of(TIMEOUT_SECONDS, "must be a number of seconds above 0")
    return seconds
