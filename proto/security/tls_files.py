"""The TLS files of each of a cluster's gRPC ports. Pure: tls.py reads them.

- The public port (clients to routers) has ServerTls: a certificate. With `client_ca`, clients must show one too.
- The session port (routers to workers) has SessionTls: one certificate and one CA for all of a cluster. Both sides show
  the certificate.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    """PEM files of the public port."""

    cert: str
    """The server's certificate, and those between it and the CA."""
    key: str
    client_ca: str | None = None
    """With it every client must show a certificate that this CA has signed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTls:
    """PEM files of the session, the same for routers and workers."""

    cert: str
    key: str
    ca: str


def session_tls(cert: str | None, key: str | None, ca: str | None) -> SessionTls | None:
    """Return the files of the session port, or None if no option is given. Raises ValueError if only some of the three
    are."""
    if cert is None and key is None and ca is None:
        return None
    if cert is None or key is None or ca is None:
        raise ValueError("--session-tls-cert, --session-tls-key and --session-tls-ca go together")
    return SessionTls(cert=cert, key=key, ca=ca)


def server_tls(cert: str | None, key: str | None, client_ca: str | None) -> ServerTls | None:
    """Return the files of the public port, or None if no option is given. Raises ValueError if some are given, but not
    both `cert` and `key`."""
    if cert is None and key is None and client_ca is None:
        return None
    if cert is None or key is None:
        raise ValueError("--tls-cert and --tls-key go together, and --tls-client-ca needs them")
    return ServerTls(cert=cert, key=key, client_ca=client_ca)
