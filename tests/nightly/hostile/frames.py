"""HTTP/2 by hand: a gRPC client that sends any part of a message, as fast as the server's windows permit.

Owns framing and flow control of one connection. It reads no header of the server: the end of a call is enough.
"""

import socket
import struct
import time
from types import TracebackType
from typing import Self

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE = 4
CANCEL = 8
FIRST_WINDOW_BYTES = 65_535
MAX_FRAME_BYTES = 16_384


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def literal(name: str, value: str) -> bytes:
    """A header without compression; both are shorter than 127 bytes."""
    return b"\0" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()


class Connection:
    """A connection to "host:port". `serve` sends within the windows what was asked for, and reads what comes."""

    def __init__(self, address: str, *, source: str = "") -> None:
        """`source`: the address that the connection comes from."""
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=10, source_address=(source, 0))
        self._socket.sendall(PREFACE + frame(SETTINGS, 0, 0))
        self._host = address
        self._window = FIRST_WINDOW_BYTES
        self.first_window_bytes = FIRST_WINDOW_BYTES
        """Bytes that a call may send before the server has read any of it."""
        self._windows: dict[int, int] = {}
        self._unsent: dict[int, memoryview] = {}
        self._read = b""
        self.ended: set[int] = set()
        """Calls that the server has ended."""
        self.is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def call(self, method: str, message_bytes: int, sent_bytes: int, *metadata: tuple[str, str]) -> int:
        """Begin a call whose message claims `message_bytes`, and send that much of it. Return the call's number."""
        stream = 2 * len(self._windows) + 1
        self._windows[stream] = self.first_window_bytes
        named = (
            (":method", "POST"),
            (":scheme", "http"),
            (":path", method),
            (":authority", self._host),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            *metadata,
        )
        self._send(frame(HEADERS, END_HEADERS, stream, b"".join(literal(*pair) for pair in named)))
        if sent_bytes:
            self._unsent[stream] = memoryview(b"\0" + struct.pack(">I", message_bytes) + b"\x12" * sent_bytes)
        return stream

    def serve(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.is_closed and (left := deadline - time.monotonic()) > 0:
            for stream in list(self._unsent):
                self._send_some(stream)
            self._receive(min(left, 0.05))

    @property
    def unsent_bytes(self) -> int:
        return sum(map(len, self._unsent.values()))

    def drip(self, stream: int) -> None:
        """Send one more byte of the call's message."""
        self._unsent.setdefault(stream, memoryview(b"\x12"))

    def break_off(self, stream: int) -> None:
        """Send what the windows permit, and cancel the call."""
        if stream in self._unsent:
            self._send_some(stream)
        self._unsent.pop(stream, None)
        self._send(frame(RST_STREAM, 0, stream, struct.pack(">I", CANCEL)))

    def _send_some(self, stream: int) -> None:
        piece = self._unsent[stream][: max(0, min(self._window, self._windows[stream], MAX_FRAME_BYTES))]
        if not piece:
            return
        self._window -= len(piece)
        self._windows[stream] -= len(piece)
        self._unsent[stream] = self._unsent[stream][len(piece) :]
        if not self._unsent[stream]:
            del self._unsent[stream]
        self._send(frame(DATA, 0, stream, bytes(piece)))

    def _send(self, data: bytes) -> None:
        try:
            self._socket.settimeout(10)
            self._socket.sendall(data)
        except OSError:
            self.is_closed = True

    def _receive(self, seconds: float) -> None:
        self._socket.settimeout(0.001 if self._unsent else seconds)
        try:
            piece = self._socket.recv(2**16)
        except TimeoutError:
            return
        except OSError:
            piece = b""
        self.is_closed = self.is_closed or not piece
        self._read += piece
        while len(self._read) >= 9:
            size = int.from_bytes(self._read[:3])
            if len(self._read) < 9 + size:
                return
            kind, flags, stream = self._read[3], self._read[4], int.from_bytes(self._read[5:9])
            payload, self._read = self._read[9 : 9 + size], self._read[9 + size :]
            self._take(kind, flags, stream, payload)

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == WINDOW_UPDATE and stream == 0:
            self._window += int.from_bytes(payload)
        elif kind == WINDOW_UPDATE and stream in self._windows:
            self._windows[stream] += int.from_bytes(payload)
        elif kind == SETTINGS and not flags & ACK:
            for at in range(0, len(payload), 6):
                setting, value = struct.unpack(">HI", payload[at : at + 6])
                if setting == INITIAL_WINDOW_SIZE:
                    for number in self._windows:
                        self._windows[number] += value - self.first_window_bytes
                    self.first_window_bytes = value
            self._send(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self._send(frame(PING, ACK, 0, payload))
        elif kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
            self.ended.add(stream)
            self._unsent.pop(stream, None)
