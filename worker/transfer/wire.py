"""Wire: the messages of a transfer connection, as proto/v1/session.proto describes them at PullRequest.

Reads never trust the other side: every length has a bound, and every wait ends.
"""

import contextlib
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from blockyard.proto.v1.session_pb2 import PullReply, PullRequest
from blockyard.worker.memory.checksums import crc32, crc32_of
from google.protobuf.message import DecodeError

_LENGTH = struct.Struct("<I")
_HEADER = struct.Struct("<II")
_PLACE = struct.Struct("<QQ")
HEADER_BYTES = _HEADER.size
"""Bytes before those of each block."""
POLL_SECONDS = 0.05
"""Longest wait of a read before it asks whether the bytes are still wanted."""
MAX_REPLY_BYTES = 64 << 10
"""Longest reply. What NIXL needs to find a worker's memory is a few kilobytes."""
MAX_PIECES = 512
"""Pieces of one send. Linux takes 1,024."""
TRIAL_BYTES = 4 << 20
MAX_TRIAL_BLOCKS = 512
"""Bounds of a trial, which measures a link. Its bytes come in blocks, at least one."""
TRIAL_SECONDS = 1.0

Place = tuple[int, int]
"""Address and length of a piece of a block, in the source's memory."""
Message = TypeVar("Message", PullRequest, PullReply)


class ProtocolError(Exception):
    """The other side sent what none of our workers would send. The text says what."""


class Cut(Exception):
    """The connection ended before the other side had sent everything."""


class Late(Exception):
    """Time ran out."""


class NotWanted(Exception):
    """Raised where nobody waits for the bytes any more."""


class Memory(Protocol):
    """The memory of the other side."""

    def read(self, places: list[Place], into: memoryview) -> None:
        """Fill `into` with these pieces, which are as long as it is. Raises ProtocolError, Cut, Late or NotWanted."""
        ...


class Connection:
    """One connection of a transfer, with a time limit. Not thread-safe."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._timeout = sock.gettimeout()
        self.deadline = time.monotonic()
        """Time on the monotonic clock at which a read or a write raises Late."""
        self.is_wanted: Callable[[], bool] | None = None
        """Asked at each wait of a read, which raises NotWanted once it returns False."""
        self.num_read = 0
        """Bytes that have arrived."""

    def close(self) -> None:
        self._socket.close()

    def send(self, message: PullRequest | PullReply) -> None:
        """Send a message. Raises Late or Cut."""
        data = message.SerializeToString()
        self._send([_LENGTH.pack(len(data)) + data])

    def send_block(self, index: int, pieces: Iterable[memoryview], checksum: int | None = None) -> None:
        """Send a block whose bytes are those of `pieces`, with the checksum that they must have. None: that which they
        have. Raises Late or Cut."""
        pieces = tuple(pieces)
        if checksum is None:
            checksum = crc32_of(pieces)
        self._send([_HEADER.pack(index, checksum), *pieces])

    def send_places(self, index: int, places: Sequence[Place], checksum: int) -> None:
        """Send where a block's bytes are, and the checksum that they must have. Raises Late or Cut."""
        packed = b"".join(_PLACE.pack(*place) for place in places)
        self._send([_HEADER.pack(index, checksum) + _LENGTH.pack(len(places)) + packed])

    def send_byte(self) -> None:
        """Say that all blocks have been read. Raises Late or Cut."""
        self._send([b"\0"])

    def receive_byte(self) -> None:
        """Wait until the other side has read all blocks. Raises Cut, Late or NotWanted."""
        self._read(1)

    def _send(self, pieces: list[bytes | memoryview]) -> None:
        if isinstance(self._socket, ssl.SSLSocket):
            pieces = [b"".join(pieces)]  # each send would be a record of its own
        left = [memoryview(piece) for piece in pieces]
        while left:
            try:
                self._wait_at_most(self._seconds_left())
                left = _after(left, self._send_some(left[:MAX_PIECES]))
            except TimeoutError as error:
                raise Late from error
            except OSError as error:
                raise Cut from error

    def _send_some(self, pieces: list[memoryview]) -> int:
        if isinstance(self._socket, ssl.SSLSocket):
            return self._socket.send(pieces[0])
        return self._socket.sendmsg(pieces)

    def _wait_at_most(self, seconds: float) -> None:
        """Bound the next read or write. Each change of a socket's limit is a call of the system."""
        if seconds != self._timeout:
            self._timeout = seconds
            self._socket.settimeout(seconds)

    def check(self) -> None:
        """Raise Late or NotWanted where that is so."""
        self._seconds_left()
        if self.is_wanted is not None and not self.is_wanted():
            raise NotWanted

    def _seconds_left(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise Late
        return left

    def receive(self, kind: type[Message], max_bytes: int) -> Message:
        """Return the next message. Raises ProtocolError, Cut, Late or NotWanted."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > max_bytes:
            raise ProtocolError(f"a message of {length} bytes, at most {max_bytes} are expected")
        try:
            return kind.FromString(self._read(length))
        except DecodeError as error:
            raise ProtocolError(f"not a {kind.DESCRIPTOR.name}") from error

    def receive_block(self, index: int, into: memoryview) -> int:
        """Fill `into` with the block of this index, and return its checksum.

        Raises ProtocolError for another index or other bytes than were sent; also Cut, Late and NotWanted.
        """
        checksum = self._checksum_of(index)
        self._fill(into)
        if crc32(into) != checksum:
            raise ProtocolError(f"block {index} has a wrong checksum")
        return checksum

    def read_block(self, index: int, into: memoryview, memory: Memory) -> int:
        """Read the block of this index in the other side's memory. Otherwise as `receive_block`."""
        checksum = self._checksum_of(index)
        (count,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if not 0 < count <= MAX_PIECES:
            raise ProtocolError(f"a block of {count} pieces")
        places = list(_PLACE.iter_unpack(self._read(_PLACE.size * count)))
        if sum(length for _, length in places) != len(into):
            raise ProtocolError("a block of another length")
        memory.read(places, into)
        if crc32(into) != checksum:
            self._seconds_left()  # after that the source may change the block
            raise ProtocolError(f"block {index} has a wrong checksum")
        self.num_read += len(into)
        return checksum

    def _checksum_of(self, index: int) -> int:
        found, checksum = _HEADER.unpack(self._read(_HEADER.size))
        if found != index:
            raise ProtocolError(f"block {found} where {index} is due")
        return int(checksum)

    def _read(self, count: int) -> bytes:
        data = bytearray(count)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, into: memoryview) -> None:
        filled = 0
        while filled < len(into):
            if self.is_wanted is not None and not self.is_wanted():
                raise NotWanted
            try:
                left = self._seconds_left()
                self._wait_at_most(left if self.is_wanted is None else min(left, POLL_SECONDS))
                received = self._socket.recv_into(into[filled:])
            except TimeoutError:
                continue
            except OSError as error:
                raise Cut from error
            if not received:
                raise Cut
            filled += received
            self.num_read += received


def _after(pieces: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of the pieces after their first `count` bytes."""
    for index, piece in enumerate(pieces):
        if count < len(piece):
            return [piece[count:], *pieces[index + 1 :]]
        count -= len(piece)
    return []


def trial_blocks(num_bytes: int, block_bytes: int) -> int:
    """Return how many blocks a trial of so many bytes has."""
    return min(-(-min(num_bytes, TRIAL_BYTES) // block_bytes), MAX_TRIAL_BLOCKS)


def shut(sock: socket.socket) -> None:
    """End a connection or a listener that another thread uses. That thread closes it."""
    with contextlib.suppress(OSError):
        # A TLS socket's own method would first forget its TLS, and the other thread might send in plaintext.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
