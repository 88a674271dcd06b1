"""One port for all routers of a cluster, chosen before any of them starts.

Owns that nobody else listens there. The kernel lets every process of one user that asks for SO_REUSEPORT share a port,
so a second cluster on it would take a part of the first one's clients without a word. Does not own listening.
"""

import contextlib
import socket
from collections.abc import Iterator

MAX_PORT = 65535


@contextlib.contextmanager
def reserved_port(host: str, port: int) -> Iterator[int]:
    """A port of this machine that nobody listens on, held until routers do; 0 takes a free one, host "" means all
    interfaces. Raises ValueError for one that is taken."""
    with socket.socket() as probe:
        # Without it a port whose last connections have just ended would seem taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(f"routers cannot share port {port}: {error.strerror}") from None
        port = probe.getsockname()[1]
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host, port))
        yield port
