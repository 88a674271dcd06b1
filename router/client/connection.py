"""Connection of a client: TLS, its token, its tenant, and the trace that a call belongs to.

Owns the refusal to send a token where others could read it. Opens no channel (aio_channels.py, sync_channels.py).
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
from blockyard.proto.security.certificate_files import read_ca, read_pair
from blockyard.proto.security.loopback import host_of, is_loopback
from blockyard.router.client.retry import DEFAULT_CONNECT_SECONDS, call_metadata, channel_options

TOKEN_VARIABLE = "BLOCKYARD_TOKEN"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsOptions:
    """TLS of a client, as PEM files. `TlsOptions()` trusts the CAs that this system trusts."""

    ca: str | None = None
    """Trust these CAs and no others."""
    cert: str | None = None
    """The client's certificate, for routers that ask for one. Needs `key`."""
    key: str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files and return gRPC's credentials. Raises ValueError for files that cannot be used."""
        if (self.cert is None) is not (self.key is None):
            raise ValueError("tls: a client's certificate and its key go together")
        roots = None if self.ca is None else read_ca(self.ca)
        if self.cert is None or self.key is None:
            return grpc.ssl_channel_credentials(roots)
        key, cert = read_pair(self.key, self.cert)
        return grpc.ssl_channel_credentials(roots, key, cert)


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """Settings that all channels and calls of one client share."""

    own_metadata: tuple[tuple[str, str], ...] = field(repr=False)
    """Token and tenant."""
    credentials: grpc.ChannelCredentials | None
    options: tuple[tuple[str, int], ...]

    @classmethod
    def of(
        cls,
        addresses: Sequence[str],
        *,
        token: str | None,
        tenant: str | None,
        tls: TlsOptions | None,
        allow_plaintext_token: bool,
        connect_seconds: float = DEFAULT_CONNECT_SECONDS,
    ) -> "Connection":
        """Check a client's settings and join them. A token of None takes BLOCKYARD_TOKEN. Raises ValueError or
        TypeError."""
        shown = os.environ.get(TOKEN_VARIABLE) if token is None else token
        if shown and tls is None and not allow_plaintext_token:
            _check_private_way(addresses)
        return cls(
            own_metadata=call_metadata(shown or None, tenant),
            credentials=None if tls is None else tls.credentials(),
            options=channel_options(connect_seconds),
        )

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of a call that begins now."""
        return (*self.own_metadata, *_trace_headers())

    @property
    def is_tls(self) -> bool:
        return self.credentials is not None


def _trace_headers() -> tuple[tuple[str, str], ...]:
    """Return the headers that continue the caller's trace. Empty for a caller without OpenTelemetry or a span."""
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers)
    return tuple(headers.items())


def _check_private_way(addresses: Sequence[str]) -> None:
    for address in addresses:
        if not is_loopback(host_of(address)):
            raise ValueError(
                f"the token would go to {address} in plaintext, where others can read it: use TLS, or allow it by "
                "allow_plaintext_token or --plaintext-token"
            )
