"""TLS contexts of sockets between workers, and between the ranks of one worker. Imports no gRPC.

Both ends show a certificate, as on the session port: the operator's, or else one of the authority that follows from the
cluster secret (cluster_identity.py). Workers move and are dialled by number, so a session certificate stands for no
host. Each carries the name SESSION_NAME, and the CA signs for nothing else. Does not own credentials of gRPC (tls.py).
"""

import os
import ssl
from collections.abc import Callable
from functools import partial

from blockyard.proto.security.certificate_files import Reloaded, no_password, read_ca, read_pair
from blockyard.proto.security.cluster_identity import issue_identity
from blockyard.proto.security.tls_files import SessionTls

SESSION_NAME = "blockyard-session"
"""The DNS name in every session certificate."""


def peer_contexts(
    files: SessionTls | None, *, secret: str, cluster: str
) -> Callable[[bool], ssl.SSLContext] | None:
    """Return a function that makes the TLS context of a socket between workers; its argument says whether for the
    server's side. None means plaintext. Both sides prove themselves as on the session port.

    Raises ValueError for files that cannot be used.
    """
    if files is not None:
        own = Reloaded(file_paths(files.cert, files.key, files.ca), partial(session_pems, files))
        return lambda is_server: _peer_context(*own.current(), is_server=is_server)
    if not secret:
        return None

    def issued(is_server: bool) -> ssl.SSLContext:
        identity = issue_identity(secret, cluster, dns_name=SESSION_NAME)
        return _peer_context(identity.key, identity.certificate, identity.authority, is_server=is_server)

    return issued


def session_pems(files: SessionTls) -> tuple[bytes, bytes, bytes]:
    """Return key, certificate chain and CA of the operator's files. Raises ValueError for files that cannot be used."""
    return *read_pair(files.key, files.cert), read_ca(files.ca)


def _peer_context(key: bytes, certificate: bytes, ca: bytes, *, is_server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=ca.decode("ascii"))
    # OpenSSL takes a key only from a file. This one is in memory, and only this process can open it.
    with os.fdopen(os.memfd_create("key"), "wb") as file:
        file.write(key + certificate)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}", password=no_password)
    return context


def file_paths(*paths: str | None) -> list[str]:
    """Return the paths that are set."""
    return [path for path in paths if path is not None]
