"""Chooses the ports of a cluster's routers before any router starts.

Owns the check that no other process listens there, and the choice of the next free port. All processes of one user can
share a port with SO_REUSEPORT, so a second cluster would silently take some of the first one's clients. Does not own
listening.
"""

import contextlib
import socket
from collections.abc import Callable, Iterator

from blockyard.proto.limits import MAX_PORT
from blockyard.proto.security.loopback import without_brackets


def next_free(first: int, num_ports: int, is_free: Callable[[int], bool]) -> int:
    """Return the lowest port >= `first` that begins `num_ports` free ports in a row. Raise ValueError if none does."""
    start = port = first
    while port <= MAX_PORT:
        if not is_free(port):
            start = port + 1
        elif port - start + 1 == num_ports:
            return start
        port += 1
    raise ValueError(f"no port from {first} on is free")


def can_bind(host: str, port: int) -> bool:
    """Tell whether `port` is free at `host`, an address of this machine."""
    try:
        with _bound(host, port):
            return True
    except OSError:
        return False


@contextlib.contextmanager
def reserved_port(host: str, port: int) -> Iterator[int]:
    """Reserve a free port of this machine inside the block, so that routers can share it. Yield the port.

    Port 0 takes any free port. Host "" means all interfaces. Raise ValueError if the port is taken.
    """
    try:
        with _bound(host, port) as probe:
            port = probe.getsockname()[1]
    except OSError as error:
        raise ValueError(f"routers cannot share port {port}: {error.strerror}") from None
    with _bound(host, port, is_shared=True):
        yield port


def _bound(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Return a bound socket, with SO_REUSEPORT if `is_shared`. Raise OSError if the port is taken."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    # Without SO_REUSEADDR, a port with recently ended connections would seem taken.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(is_shared))
    try:
        bound.bind((without_brackets(host), port))
    except BaseException:
        bound.close()
        raise
    return bound
