"""Whether the raylet and the dashboard of a head still answer.

Owns what they are asked, and when silence means that one hangs. Does not own its end or its next start (guardian.py).

gRPC's own threads answer a raylet's connection, HTTP/2 settings and health check even while its event loop hangs. So
the raylet is asked for its configuration, which only that loop answers (Ray 2.60). The dashboard is asked for its
version, which also passes through its process for jobs. Any answer counts, an error too; so does a closed connection.
Writes HTTP/2 itself: grpc would be a heavy import for a process that lives as long as the cluster.
"""

import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

QUESTION_SECONDS = 10.0
"""From one question to the next; an answer that takes longer is missed."""
HUNG_SECONDS = 60.0
"""Silence for so long means that a part hangs: it has missed every question of that time."""
STARTING_SECONDS = 600.0
"""The same before its first answer: a start on a busy machine takes long."""
LATE_SECONDS = 2.0
"""A guardian that pauses for so long more than it wanted was not scheduled, and no question of that time counts."""
HTTP2_HEAD_BYTES = 9
"""Each frame begins with its length, type, flags and stream."""
HTTP2_SETTINGS = b"\4"
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + HTTP2_SETTINGS + b"\0\0\0\0\0"
"""A client says this first; it has no settings of its own."""
RAYLET_METHOD = "/ray.rpc.NodeManagerService/GetSystemConfig"
_DATA, _HEADERS, _RESET = b"\0", b"\1", b"\3"
_END_STREAM, _END_HEADERS = b"\1", b"\4"
_STREAM = 1
_EMPTY_MESSAGE = bytes(5)
"""gRPC's head of a message (not compressed, length 0), and nothing after it."""
_READ_BYTES = 4096
_MIN_WAIT_SECONDS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """One life of a part, as its answers show it."""

    has_answered: bool = False
    num_missed: int = 0
    """Questions in a row without an answer, of those that count."""

    def after(self, *, answered: bool, was_late: bool) -> "Pulse":
        """The pulse after one more question. It was late if the guardian was not scheduled meanwhile."""
        if answered:
            return Pulse(has_answered=True)
        return self if was_late else replace(self, num_missed=self.num_missed + 1)

    @property
    def hangs(self) -> bool:
        patience_seconds = HUNG_SECONDS if self.has_answered else STARTING_SECONDS
        return self.num_missed * QUESTION_SECONDS >= patience_seconds


def ray_token(environment: Mapping[str, str]) -> str:
    """The token that processes of such an environment show; empty where Ray asks for none. Raises OSError."""
    if environment.get("RAY_AUTH_MODE") != "token":
        return ""
    if token := environment.get("RAY_AUTH_TOKEN"):
        return token
    path = environment.get("RAY_AUTH_TOKEN_PATH")
    return Path(path).read_text(encoding="ascii").strip() if path else ""


def does_raylet_answer(ports: Collection[int], token: str, *, seconds: float) -> bool:
    """Whether each of its ports does; without a port it does not. Raises OSError where it cannot be asked."""
    deadline = time.monotonic() + seconds
    question = HTTP2_PREFACE + _call(RAYLET_METHOD, token)
    return bool(ports) and all(
        _answers(("localhost", port), question, _is_call_answered, deadline) for port in sorted(ports)
    )


def does_dashboard_answer(address: tuple[str, int], token: str, *, seconds: float) -> bool:
    """Raises OSError where it cannot be asked."""
    lines = ["GET /api/version HTTP/1.1", f"Host: {address[0]}:{address[1]}", "Connection: close"]
    if token:
        lines.append(f"Authorization: Bearer {token}")
    question = "".join(f"{line}\r\n" for line in [*lines, ""]).encode()
    return _answers(address, question, lambda received: b"\n" in received, time.monotonic() + seconds)


def _answers(
    address: tuple[str, int], question: bytes, is_answer: Callable[[bytes], bool], deadline: float
) -> bool:
    """False for silence until the deadline and where nothing listens."""
    try:
        with socket.create_connection(address, timeout=_left_seconds(deadline)) as connection:
            connection.sendall(question)
            received = b""
            while not is_answer(received):
                connection.settimeout(_left_seconds(deadline))
                more = connection.recv(_READ_BYTES)
                if not more:  # It closed: with TLS a raylet does so at once.
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
    """The frames of a call with an empty message."""
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
    # HPACK's plainest form (RFC 7541, 6.2.2): each name and value as it is, nothing to be remembered.
    block = b"".join(b"\0" + _text(name) + _text(value) for name, value in headers.items())
    return _frame(_HEADERS, _END_HEADERS, block) + _frame(_DATA, _END_STREAM, _EMPTY_MESSAGE)


def _text(text: str) -> bytes:
    """Encodes a text in HPACK (RFC 7541, 5.1 and 5.2): its length in a prefix of 7 bits, then the text as it is."""
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
    """Headers or a reset are an answer; settings and pings are gRPC's own."""
    return any(kind in (_HEADERS, _RESET) and stream == _STREAM for kind, stream in _frames(received))


def _frames(received: bytes) -> Iterator[tuple[bytes, int]]:
    """Kind and stream of each frame whose head is there."""
    while len(received) >= HTTP2_HEAD_BYTES:
        yield received[3:4], int.from_bytes(received[5:9], "big")
        received = received[HTTP2_HEAD_BYTES + int.from_bytes(received[:3], "big") :]
