"""Who may call what: bearer tokens, their roles, and the one table of methods. Pure.

Default-deny: a method that the table does not name is nobody's, whatever the role. Tokens are known by their sha256
alone, so the file of them gives none away; they are drawn with 256 bits, which no guess finds and which need no salt.
Does not own what the file says (token_entries.py), where it lies (token_file.py) nor how a refusal travels
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
    """Whoever showed a token."""

    name: str
    role: Role
    tenant: str
    """Whose requests and prefixes are his."""
    limit: RateLimit = NO_LIMIT
    """Of all tokens of this name together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownToken:
    principal: Principal
    expires: float | None = None
    """Unix seconds; None: never."""


LIVE_PAGE = Principal(name="live-page", role=Role.VIEWER, tenant="live-page")
"""Of Ray's dashboard, on a cluster that `up` has started."""
PRINCIPAL: ContextVar[Principal | None] = ContextVar("blockyard_principal", default=None)
"""Of the call that is being served; None where clients are not authenticated."""


def principal_name() -> str:
    """For the audit log."""
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
"""For everybody, without a token."""

METHOD_ROLES: Mapping[str, frozenset[Role] | None] = {
    **_methods(
        "blockyard.v1.InferenceService",
        ("Generate", "GenerateStream", "Tokenize", "Detokenize", "ListModels", "Abort"),
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
        ("DrainWorker", "ResumeWorker", "FlushCache", "RebuildIndex", "Abort"),
        _ADMINS,
    ),
    **_methods("grpc.reflection.v1alpha.ServerReflection", ("ServerReflectionInfo",), _VIEWERS),
    **_methods("grpc.health.v1.Health", ("Check", "List", "Watch"), OPEN),
}


class TokenTable:
    """Principals by token, and the limits of tenants, as parsed."""

    def __init__(
        self,
        known: Mapping[bytes, KnownToken],
        tenant_limits: Mapping[str, RateLimit] | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`known`: by the sha256 of each one's token."""
        # Found under a key that nobody knows: how long a look-up takes then says nothing of any digest.
        self._key = secrets.token_bytes(32)
        self._known = {self._blinded(digest): token for digest, token in known.items()}
        self._tenant_limits = tenant_limits or {}
        self._clock = clock

    def __len__(self) -> int:
        return len(self._known)

    def find(self, token: str) -> Principal | None:
        """None also for a token that has expired."""
        known = self._find(token)
        return None if known is None or self._is_over(known) else known.principal

    def has_expired(self, token: str) -> bool:
        """False for one that is not known."""
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
    """Who calls; None for a method that is open to everybody. Raises Unauthenticated."""
    if method in METHOD_ROLES and METHOD_ROLES[method] is OPEN:
        return None
    token = _bearer_token(metadata)
    principal = tokens.find(token)
    if principal is None:
        if tokens.has_expired(token):
            # Only whoever shows the token itself is told.
            raise Unauthenticated("this token has expired")
        raise Unauthenticated("this token is not known here")
    return principal


def check_role(method: str, principal: Principal) -> None:
    """Raises Forbidden."""
    roles = METHOD_ROLES.get(method) or frozenset()
    if principal.role not in roles:
        raise Forbidden(f"the role {principal.role} may not make this call")


def check_admin(field: str) -> None:
    """Of the call at hand; a cluster without authentication lets anybody. Raises Forbidden."""
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
