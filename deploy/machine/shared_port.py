"""The routers' ports of a cluster, chosen before any router starts.

Owns the check that nobody else listens there, and the choice of the next free port. The kernel lets all processes of
one user that ask for SO_REUSEPORT share a port: a second cluster would take some of the first one's clients without a
word. Does not own listening.
"""

import contextlib
import socket
from collections.abc import Callable, Iterator

from blockyard.proto.limits import MAX_PORT
from blockyard.proto.security.loopback import without_brackets


def next_free(first: int, num_ports: int, is_free: Callable[[int], bool]) -> int:
    """The lowest port from `first` on at which `num_ports` ports in a row are free. Raises ValueError for none."""
    start = port = first
    while port <= MAX_PORT:
        if not is_free(port):
            start = port + 1
        elif port - start + 1 == num_ports:
            return start
        port += 1
    raise ValueError(f"no port from {first} on is free")


def can_bind(host: str, port: int) -> bool:
    """Whether nobody listens on this port of an address of this machine."""
    try:
        with _bound(host, port):
            return True
    except OSError:
        return False


@contextlib.contextmanager
def reserved_port(host: str, port: int) -> Iterator[int]:
    """A port of this machine that nobody listens on, held until routers do; 0 takes a free one, host "" means all
    interfaces. Raises ValueError for one that is taken."""
    try:
        with _bound(host, port) as probe:
            port = probe.getsockname()[1]
    except OSError as error:
        raise ValueError(f"routers cannot share port {port}: {error.strerror}") from None
    with _bound(host, port, is_shared=True):
        yield port


def _bound(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Raises OSError."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    # Without it a port whose last connections have just ended would seem taken.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(is_shared))
    try:
        bound.bind((without_brackets(host), port))
    except BaseException:
        bound.close()
        raise
    return bound
