"""Neighbours: connections between workers of one account on one machine. They need no TLS.

Each worker listens on a Unix socket beside its transfer port. The kernel tells both ends who the other one is. Only a
process of the same account counts whose files in /proc this one may open: it could read that one's memory anyway.
Containers are told apart by their mount namespaces. Where no such socket answers, the source is elsewhere, and TCP is
taken.
"""

import hashlib
import hmac
import os
import socket
import struct

_CREDENTIALS = struct.Struct("3i")
"""Process, account and group of the other end."""


class Neighbours:
    """The Unix sockets of the workers that have one secret and cluster."""

    def __init__(self, secret: str, cluster: str) -> None:
        self._secret = secret.encode()
        self._cluster = cluster

    def listen(self, incarnation: str, port: int) -> socket.socket:
        """Listen as the worker of this incarnation and transfer port. Raises OSError where that is not possible."""
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.bind(self._name(incarnation, port))
            sock.listen(16)
        except BaseException:
            sock.close()
            raise
        return sock

    def connect(self, incarnation: str, port: int, seconds: float) -> socket.socket | None:
        """Connect to the worker of this incarnation and transfer port. Return None where that is not possible."""
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(seconds)
            sock.connect(self._name(incarnation, port))
            if is_neighbour(sock):
                return sock
        except OSError:
            pass
        sock.close()
        return None

    def _name(self, incarnation: str, port: int) -> bytes:
        """Return a name that belongs to no file. It ends with its socket, and each network namespace has its own."""
        text = f"transfer {self._cluster} {incarnation} {port}".encode()
        return b"\0blockyard-" + hmac.digest(self._secret, text, hashlib.sha256).hex().encode()


def is_neighbour(sock: socket.socket) -> bool:
    """Return whether the other end is a process that this one may inspect, in the same container."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, account, _ = _CREDENTIALS.unpack(data)
    try:
        theirs, ours = (os.stat(f"/proc/{who}/ns/mnt") for who in (process, "self"))
    except OSError:
        return False
    return account == os.geteuid() and os.path.samestat(theirs, ours)
