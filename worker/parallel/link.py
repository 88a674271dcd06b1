"""Link: the connection between rank 0 and another rank. Carries small frames, each with a kind and bytes.

Owns framing and the bounds of what is read. Both ends prove by TLS that they know the secret, before a byte of content
passes. Content is JSON or integers, so nothing that is read can run code.
"""

import contextlib
import json
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from enum import IntEnum
from threading import Lock
from typing import Any, NamedTuple

from blockyard.proto.security.peer_sockets import SESSION_NAME

MAX_FRAME_BYTES = 256 * 2**20
SEND_SECONDS = 10.0
"""Longest wait for a rank that takes nothing."""
DEAD_SECONDS = 10.0
"""Time after which the kernel ends a connection whose other end acknowledges nothing: its machine is cut off."""
HANDSHAKE_SECONDS = 10.0
"""Longest wait of rank 0 for a peer that has connected: it accepts one at a time."""
_HEADER = struct.Struct("<BI")
_READ_BYTES = 256 * 2**10


class LinkClosed(Exception):
    """The other end has closed the connection, has failed, or sent what no rank sends."""


class Kind(IntEnum):
    """The kinds of frames."""

    HELLO = 1
    """The first frame of a rank: its number and code version, as JSON."""
    START = 2
    """The answer of rank 0: settings and names of shared memory."""
    MAPPED = 3
    """Whether the rank has mapped the shared memory."""
    GO = 4
    """Whether all ranks have mapped the shared memory: load."""
    LOADED = 5
    """The rank can take part in steps that measure its memory."""
    MEASURED = 6
    """The bytes that the rank has for its KV cache, where ranks measure them."""
    POOLS = 7
    """The blocks and host slots that every rank allocates."""
    READY = 8
    """The rank has its part of the model and its pools."""
    PULSE = 9
    STEP = 10
    """Arrays of a step (messages.py)."""
    FAILED = 11
    """The reason why a rank cannot load its part, or take part in a step, as JSON."""
    STOP = 12
    STORE = 13
    """A value that a rank tells all others while they meet (link_store.py), as JSON."""


_KINDS = frozenset(int(kind) for kind in Kind)


class Frame(NamedTuple):
    kind: Kind
    data: bytearray

    def json(self, key: str) -> Any:
        """Return the value of a key. Raises LinkClosed where there is none."""
        try:
            return json.loads(self.data)[key]
        except (ValueError, KeyError, TypeError) as error:
            raise LinkClosed(f"a frame of kind {self.kind.name} without {key!r}") from error


class Link:
    """One end of a connection. Any thread may send, one thread reads."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(DEAD_SECONDS * 1000))
        self.local_host: str = sock.getsockname()[0]
        """The address of this end."""
        sock.setblocking(False)
        self._socket = sock
        self._sending = Lock()
        """Held for a whole frame, so that no other one comes between its parts."""
        self._lock = Lock()
        """Held by each read and write: two at a time would break the state of TLS."""
        self._unread = bytearray()
        self._is_closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: Kind, data: bytes | bytearray | memoryview = b"") -> None:
        """Send a frame. Raises LinkClosed where the other end is gone, or takes nothing for SEND_SECONDS."""
        with self._sending:
            self._send(kind, data)

    def send_pulse(self) -> None:
        """Send a pulse, unless a frame is on its way that is as good. Raises LinkClosed."""
        if self._sending.acquire(blocking=False):
            try:
                self._send(Kind.PULSE, b"")
            finally:
                self._sending.release()

    def _send(self, kind: Kind, data: bytes | bytearray | memoryview) -> None:
        left = memoryview(b"".join([_HEADER.pack(kind, len(data)), data]))
        deadline = time.monotonic() + SEND_SECONDS
        while left:
            try:
                with self._lock:
                    left = left[self._socket.send(left) :]
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                if time.monotonic() > deadline:
                    raise LinkClosed("the other end takes nothing") from None
                self._check_open()
                select.select([], [self._socket], [], 0.05)
            except (OSError, ValueError) as error:
                raise LinkClosed(str(error)) from error

    def send_json(self, kind: Kind, **values: Any) -> None:
        self.send(kind, json.dumps(values).encode())

    def arrived(self) -> Iterator[Frame]:
        """Yield the frames that have arrived by now. Raises LinkClosed at the end of the connection."""
        yield from self._whole_frames()
        while True:
            try:
                with self._lock:
                    data = self._socket.recv(_READ_BYTES)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            except (OSError, ValueError) as error:
                raise LinkClosed(str(error)) from error
            if not data:
                raise LinkClosed("the other end has closed the connection")
            self._unread += data
            yield from self._whole_frames()

    def _whole_frames(self) -> Iterator[Frame]:
        while len(self._unread) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._unread)
            if length > MAX_FRAME_BYTES or kind not in _KINDS:
                raise LinkClosed(f"a frame of kind {kind} and {length} bytes")
            end = _HEADER.size + length
            if len(self._unread) < end:
                return
            data = self._unread[_HEADER.size : end]
            del self._unread[:end]
            yield Frame(Kind(kind), data)

    def expect(self, kind: Kind, seconds: float) -> Frame:
        """Wait for the next frame, which must be of this kind, and pass over pulses. Raises LinkClosed."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            for frame in self.arrived():
                if frame.kind is kind:
                    return frame
                if frame.kind is not Kind.PULSE:
                    raise LinkClosed(f"a frame of kind {frame.kind.name} where {kind.name} is due")
            self._check_open()
            select.select([self._socket], [], [], min(left, 0.25))
        raise LinkClosed(f"no frame of kind {kind.name} within {seconds:g} s")

    def expect_end(self, seconds: float) -> None:
        """Wait until the other end closes, and pass over everything before that."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(LinkClosed):
            while time.monotonic() < deadline:
                for _ in self.arrived():
                    pass
                self._check_open()
                select.select([self._socket], [], [], 0.05)

    def close(self) -> None:
        """End the connection. Another thread that uses it gets LinkClosed."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        with self._lock:
            self._socket.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise LinkClosed("the connection is closed")


def accepted(sock: socket.socket, context: Callable[[bool], ssl.SSLContext]) -> Link:
    """Return the link of a connection to a listener. Raises LinkClosed for an end without the secret."""
    try:
        sock.settimeout(HANDSHAKE_SECONDS)
        return Link(context(True).wrap_socket(sock, server_side=True))
    except OSError as error:
        sock.close()
        raise LinkClosed(f"no handshake: {error}") from error


def connected(host: str, port: int, context: Callable[[bool], ssl.SSLContext], seconds: float) -> Link:
    """Connect to rank 0. Raises LinkClosed where it does not listen within the time, or lacks the secret."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            sock = socket.create_connection((host, port), seconds)
            sock.settimeout(seconds)  # rank 0 may still be busy with another one
            return Link(context(False).wrap_socket(sock, server_hostname=SESSION_NAME))
        except ConnectionRefusedError as error:
            if time.monotonic() > deadline:
                raise LinkClosed(f"nothing listens at {host}:{port}") from error
            time.sleep(0.1)
        except OSError as error:
            raise LinkClosed(f"no handshake with {host}:{port}: {error}") from error
