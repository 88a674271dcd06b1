"""TLS credentials of every port, made from its files. Changed files take effect for new connections.

Does not own which files there are (tls_files.py) or how they are read (certificate_files.py).
router/client/connection.py owns the client's side of the public port.

On the session port both sides show a certificate: the operator's, or else one of the authority that follows from the
cluster secret (cluster_identity.py). Sockets between workers, which need no gRPC, are in peer_sockets.py.
"""

import ssl
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, cast

import grpc
import grpc.aio
from blockyard.proto.security.certificate_files import (
    Reloaded,
    first_end,
    no_password,
    read_ca,
    read_pair,
)
from blockyard.proto.security.cluster_identity import issue_identity
from blockyard.proto.security.peer_sockets import SESSION_NAME, file_paths, session_pems
from blockyard.proto.security.tls_files import ServerTls, SessionTls

REISSUE_SECONDS = 24 * 3600.0
"""Age at which a worker replaces a certificate that it issued to itself. Routers issue one for each connection."""


def server_credentials(tls: ServerTls | SessionTls | None) -> grpc.ServerCredentials | None:
    """Return a gRPC server's credentials, or None for a port in plaintext. Raises ValueError for files that cannot be
    used."""
    if tls is None:
        return None
    client_ca = tls.ca if isinstance(tls, SessionTls) else tls.client_ca

    def read() -> grpc.ServerCertificateConfiguration:
        roots = None if client_ca is None else read_ca(client_ca)
        pair = read_pair(tls.key, tls.cert)
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=roots)

    files = Reloaded(file_paths(tls.cert, tls.key, client_ca), read)
    current = files.current()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal current
        before, current = current, files.current()
        return None if current is before else current

    return _dynamic(current, changed, asks_for_certificate=client_ca is not None)


class TlsWatch:
    """Tells whether the TLS files of one port can be used now. What was read before stays in use while they cannot."""

    def __init__(self, tls: ServerTls | SessionTls) -> None:
        """Raises ValueError for files that cannot be used."""
        ca = tls.ca if isinstance(tls, SessionTls) else tls.client_ca
        self._files = Reloaded(file_paths(tls.cert, tls.key, ca), lambda: first_end(tls.key, tls.cert, ca))

    def are_good(self) -> bool:
        """Return False if a file cannot be read or used, or a certificate has expired."""
        end = self._files.current()
        return self._files.is_good and datetime.now(UTC) < end


def _dynamic(
    first: grpc.ServerCertificateConfiguration,
    changed: Callable[[], grpc.ServerCertificateConfiguration | None],
    *,
    asks_for_certificate: bool,
) -> grpc.ServerCredentials:
    """Return credentials that begin with `first`. For each connection, gRPC asks `changed` for newer ones, on a thread
    of its own. None keeps the current ones."""
    # gRPC's types omit None, which its documentation allows.
    fetcher = cast(Callable[[], grpc.ServerCertificateConfiguration], changed)
    return grpc.dynamic_ssl_server_credentials(
        first, fetcher, require_client_authentication=asks_for_certificate
    )


def session_server_credentials(
    files: SessionTls | None, *, secret: str, cluster: str
) -> grpc.ServerCredentials | None:
    """Return the credentials of a worker's session port, which demand a certificate of the client too. None means
    plaintext: there are neither files nor a secret. Raises ValueError for files that cannot be used."""
    if files is not None or not secret:
        return server_credentials(files)
    issued_at = time.monotonic()

    def configuration() -> grpc.ServerCertificateConfiguration:
        own = issue_identity(secret, cluster, dns_name=SESSION_NAME)
        pair = (own.key, own.certificate)
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=own.authority)

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal issued_at
        if time.monotonic() - issued_at < REISSUE_SECONDS:
            return None
        issued_at = time.monotonic()
        return configuration()

    return _dynamic(configuration(), renewed, asks_for_certificate=True)


def https_context(tls: ServerTls | None) -> ssl.SSLContext | None:
    """Return the TLS context of a port that speaks HTTP, or None for plaintext. Raises ValueError for files that cannot
    be used."""
    if tls is None:
        return None
    return _HttpsContext.of(tls)


class _HttpsContext(ssl.SSLContext):
    """A server's context. Each of its connections takes the context that the files make at that time.

    A resumed session is not verified again: neither the dates of its certificate, nor a CA that was replaced since.
    Where clients show certificates, a connection therefore begins in a context of its own, which knows no earlier
    session.
    """

    _current: Callable[[], ssl.SSLContext]
    _asks_for_certificate: bool

    @classmethod
    def of(cls, tls: ServerTls) -> "_HttpsContext":
        """Build the context of a port. Raises ValueError for files that cannot be used."""
        port = cls(ssl.PROTOCOL_TLS_SERVER)
        files = Reloaded(file_paths(tls.cert, tls.key, tls.client_ca), partial(_loaded_context, tls))
        port._current, port._asks_for_certificate = files.current, tls.client_ca is not None
        return port

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        current = self._current()
        begins_in = _unresumable(current) if self._asks_for_certificate else current
        return begins_in.wrap_bio(incoming, outgoing, server_side, server_hostname, session)


def _unresumable(context: ssl.SSLContext) -> ssl.SSLContext:
    """Return a new context whose connections switch to the given one at their first message. OpenSSL looks for earlier
    sessions in the new one alone, which has none."""

    def proceed(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        connection.context = context

    first = _https_context(asks_for_certificate=True)
    # Otherwise OpenSSL would issue sessions that no later connection can resume.
    first.num_tickets = 0
    first.options |= ssl.OP_NO_TICKET
    # Called with each connection's first message, whether it names a server or not.
    first.sni_callback = proceed
    return first


def _loaded_context(tls: ServerTls) -> ssl.SSLContext:
    read_pair(tls.key, tls.cert)
    context = _https_context(asks_for_certificate=tls.client_ca is not None)
    context.load_cert_chain(tls.cert, tls.key, password=no_password)
    if tls.client_ca is not None:
        context.load_verify_locations(cadata=read_ca(tls.client_ca).decode("ascii"))
    return context


def _https_context(*, asks_for_certificate: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if asks_for_certificate:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def listen(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    """Bind an address and return the port. Raises RuntimeError if it cannot be bound."""
    if credentials is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, credentials)


def session_channels(
    files: SessionTls | None, *, secret: str, cluster: str, options: Sequence[tuple[str, Any]] = ()
) -> Callable[[str], grpc.aio.Channel]:
    """Return a function that opens a router's channel to a worker's address, in plaintext if there are neither files
    nor a secret. Raises ValueError for files that cannot be used."""
    if files is not None:
        own = Reloaded(file_paths(files.cert, files.key, files.ca), partial(_session_credentials, files))
        return partial(_session_channel, own.current, options)
    if not secret:
        return partial(grpc.aio.insecure_channel, options=options)

    def issued() -> grpc.ChannelCredentials:
        own = issue_identity(secret, cluster, dns_name=SESSION_NAME)
        return grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)

    return partial(_session_channel, issued, options)


def _session_credentials(files: SessionTls) -> grpc.ChannelCredentials:
    key, certificate, ca = session_pems(files)
    return grpc.ssl_channel_credentials(ca, key, certificate)


def _session_channel(
    credentials: Callable[[], grpc.ChannelCredentials], options: Sequence[tuple[str, Any]], address: str
) -> grpc.aio.Channel:
    named = (*options, ("grpc.ssl_target_name_override", SESSION_NAME))
    return grpc.aio.secure_channel(address, credentials(), options=named)
