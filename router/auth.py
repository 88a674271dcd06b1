"""Who may call what: bearer tokens, their roles, and the one table of methods. Pure.

Default-deny: a method that the table does not name is nobody's, whatever the role. Tokens are known by their sha256
alone, so the file of them gives none away; they are drawn with 256 bits, which no guess finds and which need no salt.
Does not own where the file lies (token_file.py) nor how a refusal travels (interceptor.py).
"""

import hmac
import json
import re
import secrets
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from typing import Any

from blockyard.router.errors import Forbidden, Unauthenticated
from blockyard.router.names import NAME_RULE, is_id

AUTHORIZATION_KEY = "authorization"
"""Of a call's metadata: `Bearer TOKEN`."""
MAX_TOKENS = 10_000
TOKEN_BYTES = 32
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FIELDS = frozenset({"name", "token_sha256", "role", "tenant"})


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
    """Principals by token, as parsed."""

    def __init__(self, principals: Mapping[bytes, Principal]) -> None:
        """By the sha256 of each one's token."""
        # Found under a key that nobody knows: how long a look-up takes then says nothing of any digest.
        self._key = secrets.token_bytes(32)
        self._principals = {self._blinded(digest): principal for digest, principal in principals.items()}

    def __len__(self) -> int:
        return len(self._principals)

    def find(self, token: str) -> Principal | None:
        return self._principals.get(self._blinded(sha256(token.encode()).digest()))

    def _blinded(self, digest: bytes) -> bytes:
        return hmac.digest(self._key, digest, "sha256")


def authenticate(
    method: str, metadata: Iterable[tuple[str, str | bytes]], tokens: TokenTable
) -> Principal | None:
    """Who calls; None for a method that is open to everybody. Raises Unauthenticated."""
    if method in METHOD_ROLES and METHOD_ROLES[method] is OPEN:
        return None
    principal = tokens.find(_bearer_token(metadata))
    if principal is None:
        raise Unauthenticated("this token is not known here")
    return principal


def check_role(method: str, principal: Principal) -> None:
    """Raises Forbidden."""
    roles = METHOD_ROLES.get(method) or frozenset()
    if principal.role not in roles:
        raise Forbidden(f"the role {principal.role} may not call this method")


def check_admin(field: str) -> None:
    """Of the call at hand; a cluster without authentication lets anybody. Raises Forbidden."""
    principal = PRINCIPAL.get()
    if principal is not None and principal.role is not Role.ADMIN:
        raise Forbidden(f"{field}: is for admins")


def _bearer_token(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    shown = [value for key, value in metadata if key == AUTHORIZATION_KEY]
    if len(shown) != 1 or not isinstance(shown[0], str):
        raise Unauthenticated("one bearer token is required: metadata `authorization: Bearer TOKEN`")
    scheme, _, token = shown[0].partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise Unauthenticated("one bearer token is required: metadata `authorization: Bearer TOKEN`")
    return token


def parse_tokens(text: str, *, page_token_sha256: str | None = None) -> TokenTable:
    """`page_token_sha256` is the live page's own, which is in no file. Raises ValueError with a sentence that names the
    entry, and nothing of any token."""
    try:
        document = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(document, list) or not document:
        raise ValueError("it must be a JSON list with at least one entry")
    if len(document) > MAX_TOKENS:
        raise ValueError(f"it has {len(document)} entries, more than {MAX_TOKENS}")
    principals: dict[bytes, Principal] = {}
    names: set[str] = set()
    for number, entry in enumerate(document, start=1):
        digest, principal = _parsed(entry, number)
        if principal.name in names:
            raise ValueError(f"entry {number}: the name {principal.name!r} is taken by an earlier one")
        if digest in principals:
            raise ValueError(f"{principal.name!r} has the same token as {principals[digest].name!r}")
        names.add(principal.name)
        principals[digest] = principal
    if page_token_sha256 is not None:
        principals.setdefault(bytes.fromhex(page_token_sha256), LIVE_PAGE)
    return TokenTable(principals)


def _parsed(entry: Any, number: int) -> tuple[bytes, Principal]:
    if not isinstance(entry, dict):
        raise ValueError(f"entry {number} is no JSON object")
    name = entry.get("name")
    # What is no name may be anything that was put into the wrong place, a token for one: not repeated.
    if not isinstance(name, str) or not is_id(name):
        raise ValueError(f"entry {number}: name must be {NAME_RULE}, not empty")
    told = f"entry {number} ({name})"
    if entry.keys() - _FIELDS:
        raise ValueError(f"{told} has fields besides {', '.join(sorted(_FIELDS))}")
    digest = entry.get("token_sha256")
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise ValueError(f"{told}: token_sha256 must be 64 digits of [0-9a-f], as `blockyard token new` says")
    role = entry.get("role")
    if not isinstance(role, str) or role not in set(Role):
        raise ValueError(f"{told}: role must be one of {', '.join(Role)}")
    tenant = entry.get("tenant", name)
    if not isinstance(tenant, str) or not is_id(tenant):
        raise ValueError(f"{told}: tenant must be {NAME_RULE}, not empty")
    return bytes.fromhex(digest), Principal(name=name, role=Role(role), tenant=tenant)


def new_token(name: str, role: str, tenant: str | None = None) -> tuple[str, dict[str, str]]:
    """A token, and the entry by which routers know it. Raises ValueError as parse_tokens does."""
    token = "by-" + secrets.token_urlsafe(TOKEN_BYTES)
    entry = {"name": name, "token_sha256": sha256(token.encode()).hexdigest(), "role": role}
    if tenant is not None:
        entry["tenant"] = tenant
    _parsed(entry, 1)
    return token, entry
