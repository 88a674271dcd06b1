"""Authentication and authorisation: bearer tokens, their roles, and the methods that each role may call. Pure.

No role may call a method that the table does not name. Only the sha256 of each token is stored, so the auth file
reveals no token. Tokens have 256 random bits: they cannot be guessed and need no salt.

Does not own the contents of the file (token_entries.py), its path (token_file.py) or how a refusal is sent
(services/interceptor.py).
"""

import hmac
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256

from blockyard.proto.naming.headers import AUTHORIZATION
from blockyard.router.admission.rate_limits import NO_LIMIT, RateLimit
from blockyard.router.errors import Forbidden, Unauthenticated


class Role(StrEnum):
    USER = "user"
    VIEWER = "viewer"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """The caller that a bearer token proves: its name, role, tenant and limit."""

    name: str
    role: Role
    tenant: str
    """Tenant to which the caller's requests and cached prefixes belong."""
    limit: RateLimit = NO_LIMIT
    """Limit per minute that all tokens of this name share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownToken:
    principal: Principal
    expires: float | None = None
    """Time of expiry in Unix seconds. None: the token never expires."""


LIVE_PAGE = Principal(name="live-page", role=Role.VIEWER, tenant="live-page")
"""Principal of the live page in Ray's dashboard, on a cluster that `up` has started."""
PRINCIPAL: ContextVar[Principal | None] = ContextVar("blockyard_principal", default=None)
"""Caller of the call in progress. None where clients are not authenticated."""


def principal_name() -> str:
    """Return the caller's name for the audit log."""
    principal = PRINCIPAL.get()
    return "anonymous" if principal is None else principal.name


def _methods(
    service: str, names: Iterable[str], roles: frozenset[Role] | None
) -> dict[str, frozenset[Role] | None]:
    return {f"/{service}/{name}": roles for name in names}


_USERS = frozenset({Role.USER, Role.ADMIN})
_VIEWERS = frozenset({Role.VIEWER, Role.ADMIN})
_ADMINS = frozenset({Role.ADMIN})
OPEN = None
"""Anyone may call the method without a token."""

METHOD_ROLES: Mapping[str, frozenset[Role] | None] = {
    **_methods(
        "blockyard.v1.InferenceService",
        ("Generate", "GenerateStream", "Embed", "Tokenize", "Detokenize", "ListModels", "Abort"),
        _USERS,
    ),
    **_methods(
        "blockyard.v1.ClusterService",
        ("GetClusterInfo", "ListWorkers", "WatchWorkers", "ListRequests", "GetIndexInfo"),
        _VIEWERS,
    ),
    **_methods(
        "blockyard.v1.ClusterService",
        ("GetBlockPool", "ListBlocks", "FindBlocks", "ListSequences", "LookupPrefix", "ExplainPlacement"),
        _VIEWERS,
    ),
    **_methods(
        "blockyard.v1.AdminService",
        (
            *("DrainWorker", "ResumeWorker", "FlushCache", "RebuildIndex", "PullPrefix", "Abort"),
            *("AddAdapter", "RemoveAdapter", "ListAdapters"),
        ),
        _ADMINS,
    ),
    **_methods("grpc.reflection.v1alpha.ServerReflection", ("ServerReflectionInfo",), _VIEWERS),
    **_methods("grpc.health.v1.Health", ("Check", "List", "Watch"), OPEN),
}


class TokenTable:
    """Known tokens with their principals, and the rate limits of tenants."""

    def __init__(
        self,
        known: Mapping[bytes, KnownToken],
        tenant_limits: Mapping[str, RateLimit] | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`known` maps the sha256 of each token to the token's record."""
        # The table is keyed by an HMAC under a random key. The time of a look-up then reveals nothing about a digest.
        self._key = secrets.token_bytes(32)
        self._known = {self._blinded(digest): token for digest, token in known.items()}
        self._tenant_limits = tenant_limits or {}
        self._clock = clock

    def __len__(self) -> int:
        return len(self._known)

    def find(self, token: str) -> Principal | None:
        """Return the token's principal, or None if the token is unknown or has expired."""
        known = self._find(token)
        return None if known is None or self._is_over(known) else known.principal

    def has_expired(self, token: str) -> bool:
        """Return True if the token is known and has expired."""
        known = self._find(token)
        return known is not None and self._is_over(known)

    def limit_of_tenant(self, tenant: str) -> RateLimit:
        return self._tenant_limits.get(tenant, NO_LIMIT)

    def _find(self, token: str) -> KnownToken | None:
        return self._known.get(self._blinded(sha256(token.encode()).digest()))

    def _is_over(self, known: KnownToken) -> bool:
        return known.expires is not None and self._clock() >= known.expires

    def _blinded(self, digest: bytes) -> bytes:
        return hmac.digest(self._key, digest, "sha256")


def authenticate(
    method: str, metadata: Iterable[tuple[str, str | bytes]], tokens: TokenTable
) -> Principal | None:
    """Return the principal of the token in the metadata, or None for a method that needs no token.

    Raises Unauthenticated.
    """
    if method in METHOD_ROLES and METHOD_ROLES[method] is OPEN:
        return None
    token = _bearer_token(metadata)
    principal = tokens.find(token)
    if principal is None:
        if tokens.has_expired(token):
            # Only a caller that has the token itself learns this.
            raise Unauthenticated("this token has expired")
        raise Unauthenticated("this token is not known here")
    return principal


def check_role(method: str, principal: Principal) -> None:
    """Check that the principal's role may call the method. Raises Forbidden."""
    roles = METHOD_ROLES.get(method) or frozenset()
    if principal.role not in roles:
        raise Forbidden(f"the role {principal.role} may not make this call")


def check_admin(field: str) -> None:
    """Check that the caller is an admin, who alone may set `field`. Without authentication any caller passes.

    Raises Forbidden.
    """
    principal = PRINCIPAL.get()
    if principal is not None and principal.role is not Role.ADMIN:
        raise Forbidden(f"{field}: is for admins")


def _bearer_token(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    shown = [value for key, value in metadata if key == AUTHORIZATION]
    if len(shown) != 1 or not isinstance(shown[0], str):
        raise Unauthenticated("one bearer token is required: `authorization: Bearer TOKEN`")
    scheme, _, token = shown[0].partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise Unauthenticated("one bearer token is required: `authorization: Bearer TOKEN`")
    return token
