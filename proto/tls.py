"""The files of TLS, checked, and the gRPC credentials and ports that they make. Which files is in tls_files.py.

Workers move and are dialled by number, so a session certificate stands for no host: each carries the name SESSION_NAME,
and the CA signs for nothing else. Does not own the client's side of the public port (router/client/connection.py).
"""

import ssl
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
from blockyard.proto.secret_files import read_file, read_secret_file
from blockyard.proto.tls_files import ServerTls, SessionTls

SESSION_NAME = "blockyard-session"
"""The DNS name in every session certificate."""


def server_credentials(tls: ServerTls | SessionTls | None) -> grpc.ServerCredentials | None:
    """None for a port in plaintext. Raises ValueError for files that cannot be used."""
    if tls is None:
        return None
    client_ca = tls.ca if isinstance(tls, SessionTls) else tls.client_ca
    roots = None if client_ca is None else read_ca(client_ca)
    pair = read_pair(tls.key, tls.cert)
    return grpc.ssl_server_credentials([pair], root_certificates=roots, require_client_auth=roots is not None)


def https_context(tls: ServerTls | None) -> ssl.SSLContext | None:
    """The same for a port that speaks HTTP; None for plaintext. Raises ValueError for files that cannot be used."""
    if tls is None:
        return None
    read_pair(tls.key, tls.cert)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(tls.cert, tls.key, password=_no_password)
    context.set_alpn_protocols(["http/1.1"])
    if tls.client_ca is not None:
        context.load_verify_locations(cadata=read_ca(tls.client_ca).decode("ascii"))
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def session_credentials(tls: SessionTls | None) -> grpc.ChannelCredentials | None:
    """A router's, towards workers; None for plaintext. Raises ValueError for files that cannot be used."""
    if tls is None:
        return None
    key, cert = read_pair(tls.key, tls.cert)
    return grpc.ssl_channel_credentials(read_ca(tls.ca), key, cert)


def listen(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    """The port. Raises RuntimeError where it cannot be had."""
    if credentials is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, credentials)


def session_channel(
    credentials: grpc.ChannelCredentials | None, options: Sequence[tuple[str, Any]], address: str
) -> grpc.aio.Channel:
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    named = (*options, ("grpc.ssl_target_name_override", SESSION_NAME))
    return grpc.aio.secure_channel(address, credentials, options=named)


def read_pair(key: str, cert: str) -> tuple[bytes, bytes]:
    """A private key and its certificate. Raises ValueError that names the files."""
    pair = read_secret_file(key, "TLS key")[0], read_file(cert, "TLS certificate")
    # gRPC itself would say nothing, and fail every handshake.
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=_no_password)
    except (ssl.SSLError, ValueError):
        raise ValueError(
            f"TLS certificate {cert} and key {key} are no pair in PEM form without a password"
        ) from None
    return pair


def read_ca(path: str) -> bytes:
    """Raises ValueError that names the file."""
    content = read_file(path, "TLS CA")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError):
        raise ValueError(f"TLS CA {path} holds no certificates in PEM form") from None
    return content


def _no_password() -> str:
    """Instead of asking on the terminal."""
    raise ValueError("the key has a password")
