"""Health checks of a head's raylet and dashboard.

Owns the requests that they get, and when silence means a hang. Does not own kills and restarts (guardian.py).

gRPC's own threads answer a raylet's connection, HTTP/2 settings and health check even while its event loop hangs. So
the check asks for the raylet's configuration, which only that loop answers (Ray 2.60). The dashboard is asked for its
version, because that request also passes through the dashboard's process for jobs. Any answer counts, even an error or
a closed connection. This file writes HTTP/2 itself, because grpc is a heavy import for a process that lives as long as
the cluster.
"""

import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

QUESTION_SECONDS = 10.0
"""Interval between health checks. An answer that takes longer counts as missed."""
HUNG_SECONDS = 60.0
"""Silence that means a hang: every check of that time was missed."""
STARTING_SECONDS = 600.0
"""The same before the first answer, because a start on a busy machine takes long."""
LATE_SECONDS = 2.0
"""Delay of the guardian's loop that means that it was not scheduled. A check missed meanwhile does not count."""
HTTP2_HEAD_BYTES = 9
"""Size of a frame's header: length, type, flags and stream."""
HTTP2_SETTINGS = b"\4"
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + HTTP2_SETTINGS + b"\0\0\0\0\0"
"""Beginning of a client's connection, with an empty settings frame."""
RAYLET_METHOD = "/ray.rpc.NodeManagerService/GetSystemConfig"
_DATA, _HEADERS, _RESET = b"\0", b"\1", b"\3"
_END_STREAM, _END_HEADERS = b"\1", b"\4"
_STREAM = 1
_EMPTY_MESSAGE = bytes(5)
"""An empty gRPC message: not compressed, length 0."""
_READ_BYTES = 4096
_MIN_WAIT_SECONDS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeHistory:
    """Results of the health checks of one process of the head, from its start on."""

    has_answered: bool = False
    num_missed: int = 0
    """Checks in a row without an answer, except late ones."""

    def after(self, *, answered: bool, was_late: bool) -> "ProbeHistory":
        """Return the history after one more check. A check is late if the guardian was not scheduled meanwhile."""
        if answered:
            return ProbeHistory(has_answered=True)
        return self if was_late else replace(self, num_missed=self.num_missed + 1)

    @property
    def hangs(self) -> bool:
        silence_seconds = HUNG_SECONDS if self.has_answered else STARTING_SECONDS
        return self.num_missed * QUESTION_SECONDS >= silence_seconds


def ray_token(environment: Mapping[str, str]) -> str:
    """Return the Ray token that processes with this environment use. Empty if Ray asks for none.

    Raise OSError if the token's file cannot be read.
    """
    if environment.get("RAY_AUTH_MODE") != "token":
        return ""
    if token := environment.get("RAY_AUTH_TOKEN"):
        return token
    path = environment.get("RAY_AUTH_TOKEN_PATH")
    return Path(path).read_text(encoding="ascii").strip() if path else ""


def does_raylet_answer(ports: Collection[int], token: str, *, seconds: float) -> bool:
    """Tell whether a raylet answers on all these ports. False without a port. Raise OSError if it cannot be asked."""
    deadline = time.monotonic() + seconds
    question = HTTP2_PREFACE + _call(RAYLET_METHOD, token)
    return bool(ports) and all(
        _answers(("localhost", port), question, _is_call_answered, deadline) for port in sorted(ports)
    )


def does_dashboard_answer(address: tuple[str, int], token: str, *, seconds: float) -> bool:
    """Tell whether the dashboard answers. Raise OSError if it cannot be asked."""
    lines = ["GET /api/version HTTP/1.1", f"Host: {address[0]}:{address[1]}", "Connection: close"]
    if token:
        lines.append(f"Authorization: Bearer {token}")
    question = "".join(f"{line}\r\n" for line in [*lines, ""]).encode()
    return _answers(address, question, lambda received: b"\n" in received, time.monotonic() + seconds)


def _answers(
    address: tuple[str, int], question: bytes, is_answer: Callable[[bytes], bool], deadline: float
) -> bool:
    """Send a request and tell whether an answer comes before the deadline.

    A closed connection is an answer. A refused one is none.
    """
    try:
        with socket.create_connection(address, timeout=_left_seconds(deadline)) as connection:
            connection.sendall(question)
            received = b""
            while not is_answer(received):
                connection.settimeout(_left_seconds(deadline))
                more = connection.recv(_READ_BYTES)
                if not more:  # It closed the connection, as a raylet with TLS does at once.
                    return True
                received += more
    except (TimeoutError, ConnectionRefusedError):
        return False
    except ConnectionError:
        return True
    return True


def _left_seconds(deadline: float) -> float:
    return max(_MIN_WAIT_SECONDS, deadline - time.monotonic())


def _call(method: str, token: str) -> bytes:
    """Return the frames of a gRPC call of `method` with an empty message."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    if token:
        headers["authorization"] = f"Bearer {token}"
    # HPACK's simplest form (RFC 7541, 6.2.2): literal names and values, without indexing.
    block = b"".join(b"\0" + _text(name) + _text(value) for name, value in headers.items())
    return _frame(_HEADERS, _END_HEADERS, block) + _frame(_DATA, _END_STREAM, _EMPTY_MESSAGE)


def _text(text: str) -> bytes:
    """Encode a text in HPACK (RFC 7541, 5.1 and 5.2): its length with a 7-bit prefix, then the text itself."""
    encoded = text.encode()
    if len(encoded) < 0x7F:
        return bytes([len(encoded)]) + encoded
    rest, length = len(encoded) - 0x7F, b"\x7f"
    while rest >= 0x80:
        length += bytes([rest & 0x7F | 0x80])
        rest >>= 7
    return length + bytes([rest]) + encoded


def _frame(kind: bytes, flags: bytes, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + kind + flags + _STREAM.to_bytes(4, "big") + payload


def _is_call_answered(received: bytes) -> bool:
    """Tell whether `received` answers the call, by headers or a reset. Settings and pings come from gRPC itself."""
    return any(kind in (_HEADERS, _RESET) and stream == _STREAM for kind, stream in _frames(received))


def _frames(received: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield the type and stream of each frame with a complete header."""
    while len(received) >= HTTP2_HEAD_BYTES:
        yield received[3:4], int.from_bytes(received[5:9], "big")
        received = received[HTTP2_HEAD_BYTES + int.from_bytes(received[:3], "big") :]
