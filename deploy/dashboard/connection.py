"""Connects the live page to routers, with the settings in the head's environment.

The variables are those of every command: BLOCKYARD_TLS, BLOCKYARD_TLS_CA, BLOCKYARD_TLS_CERT, BLOCKYARD_TLS_KEY,
BLOCKYARD_TOKEN_FILE, BLOCKYARD_PLAINTEXT_TOKEN. Owns the error messages for missing ones. It reads the token from its
file for each new connection and never shows it.
"""

import logging
from collections.abc import Mapping, Sequence

from blockyard.deploy.dashboard.announcement import Announcement
from blockyard.deploy.dashboard.start_hook import TOKEN_FILE_VARIABLE
from blockyard.proto.security.secret_files import read_secret_file
from blockyard.router.client import (
    AsyncClient,
    AuthenticationError,
    BlockyardError,
    TlsOptions,
    UnavailableError,
)

logger = logging.getLogger(__name__)

ASK_SECONDS = 1.5
"""Deadline of each call to a router."""
_TRUE = frozenset({"1", "true", "yes", "on"})
_TOKEN_HELP = (
    f"this cluster's routers ask for a token: start Ray's head with {TOKEN_FILE_VARIABLE} naming a file of mode 0600 "
    "that holds a viewer's token (blockyard token new --role viewer)"
)
_TLS_HELP = (
    "this cluster's routers speak TLS: start Ray's head with BLOCKYARD_TLS_CA naming the CA's file, or BLOCKYARD_TLS=1 "
    "for a CA that this machine trusts"
)
_CERTIFICATE_HELP = (
    "this cluster's routers ask for a client's certificate: start Ray's head with BLOCKYARD_TLS_CERT and "
    "BLOCKYARD_TLS_KEY"
)


class CannotReach(Exception):
    """No router can be asked, for example because the head's environment lacks a setting. The text is for operators."""


def client_of(address: str, announcement: Announcement, environment: Mapping[str, str]) -> AsyncClient:
    """Return a client of one router. Raise CannotReach if the environment lacks what it needs."""
    tls = _tls(environment)
    if announcement.uses_tls and tls is None:
        raise CannotReach(_TLS_HELP)
    if announcement.wants_certificate and (tls is None or tls.cert is None):
        raise CannotReach(_CERTIFICATE_HELP)
    # A head that serves a guarded cluster may serve an open one too.
    token = _token(environment) if announcement.wants_token else None
    try:
        return AsyncClient(
            [address],
            timeout_seconds=ASK_SECONDS,
            retries=0,
            token=token or "",
            tls=tls if announcement.uses_tls else None,
            allow_plaintext_token=_is_on(environment, "BLOCKYARD_PLAINTEXT_TOKEN"),
        )
    except ValueError as error:
        # The text may name files, and not only their owner can see the page.
        logger.warning("the routers cannot be reached with the settings in the environment: %s", error)
        raise CannotReach(
            "the routers cannot be reached with the settings in the head's environment (an unusable TLS file, or a "
            "token that would go over the network in plaintext): the log dashboard_BlockyardHead.log says more"
        ) from None


def failure_text(error: BlockyardError, announcement: Announcement) -> str:
    """Return the text that the page shows for a failed call."""
    if isinstance(error, AuthenticationError) and announcement.wants_token:
        return f"the token was refused: {error}. {_TOKEN_HELP[0].upper()}{_TOKEN_HELP[1:]}"
    if isinstance(error, UnavailableError) and announcement.uses_tls:
        return f"{error} (over TLS: see BLOCKYARD_TLS_CA in the head's environment)"
    return str(error)


def _tls(environment: Mapping[str, str]) -> TlsOptions | None:
    files = {name: environment.get(f"BLOCKYARD_TLS_{name.upper()}") or None for name in ("ca", "cert", "key")}
    if not any(files.values()) and not _is_on(environment, "BLOCKYARD_TLS"):
        return None
    return TlsOptions(**files)


def _token(environment: Mapping[str, str]) -> str:
    path = environment.get(TOKEN_FILE_VARIABLE)
    if not path:
        raise CannotReach(_TOKEN_HELP)
    try:
        return read_secret_file(path, "token file")[0].decode("ascii").strip()
    except (ValueError, UnicodeDecodeError):
        # The message names neither the file nor the reason, because not only its owner can see the page.
        raise CannotReach(
            f"the file that {TOKEN_FILE_VARIABLE} names cannot be used. {_TOKEN_HELP}"
        ) from None


def _is_on(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "").lower() in _TRUE


def ordered(addresses: Sequence[str], first: str | None) -> list[str]:
    """Return all addresses, with `first` at the front if it is among them."""
    return sorted(addresses, key=lambda address: address != first)
