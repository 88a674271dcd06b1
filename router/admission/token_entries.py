"""Contents of the auth file: tokens with their limits and expiry, and limits of tenants. Pure.

The file is a list of entries, or an object with that list under `tokens` and limits by tenant under `tenants`. Several
entries may share a name, for example during rotation. They differ only in token and expiry, and at most one of them
never expires. Does not own what a role may do (auth.py) or the file's path (token_file.py).
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import MAXYEAR, UTC, datetime, timedelta
from hashlib import sha256
from typing import Any

from blockyard.proto.naming.identifiers import NAME_RULE, is_id
from blockyard.router.admission.auth import LIVE_PAGE, KnownToken, Principal, Role, TokenTable
from blockyard.router.admission.rate_limits import KINDS, MAX_PER_MINUTE, RateLimit

MAX_TOKENS = 10_000
"""The most entries of tokens, and the most tenants with limits."""
TOKEN_BYTES = 32
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LIMITS = frozenset(f"{kind}_per_minute" for kind in KINDS)
_FIELDS = _LIMITS | {"name", "token_sha256", "role", "tenant", "expires"}

Entry = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Contents of an auth file, as JSON values."""

    entries: Sequence[Entry] = ()
    tenants: Mapping[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        entries = list(self.entries)
        return json.dumps({"tokens": entries, "tenants": self.tenants} if self.tenants else entries, indent=2)


def parse_document(text: str) -> Document:
    """Parse the file's text, but check neither its entries nor its tenants. Raises ValueError."""
    if not text.strip():
        raise ValueError("it is empty")
    try:
        document = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        raise ValueError("it is not JSON") from None
    tenants: Any = {}
    if isinstance(document, dict):
        if "tokens" not in document or document.keys() - {"tokens", "tenants"}:
            raise ValueError("it must be a JSON list, or an object with `tokens` and optionally `tenants`")
        document, tenants = document["tokens"], document.get("tenants", {})
    if not isinstance(document, list) or not isinstance(tenants, dict):
        raise ValueError("it must be a JSON list, or an object with a list `tokens` and an object `tenants`")
    if max(len(document), len(tenants)) > MAX_TOKENS:
        raise ValueError(f"it has more than {MAX_TOKENS} entries")
    return Document(entries=document, tenants=tenants)


def parse_tokens(text: str, *, page_token_sha256: str | None = None) -> TokenTable:
    """Parse and check the file's text, and return its tokens.

    `page_token_sha256` adds the live page's token, which is in no file. Raises ValueError, which names the entry and
    reveals no token.
    """
    document = parse_document(text)
    known: dict[bytes, KnownToken] = {}
    of_name: dict[str, list[KnownToken]] = {}
    for number, entry in enumerate(document.entries, start=1):
        digest, token = _parsed(entry, number)
        name = token.principal.name
        _check_one_name(token, of_name.setdefault(name, []), f"entry {number}: the name {name!r}")
        if digest in known:
            raise ValueError(f"{name!r} has the same token as {known[digest].principal.name!r}")
        of_name[name].append(token)
        known[digest] = token
    limits = {tenant: _tenant_limit(tenant, given) for tenant, given in document.tenants.items()}
    return TokenTable(known | _page(page_token_sha256, known), limits)


def no_tokens(page_token_sha256: str | None) -> TokenTable:
    """Return a table that knows no token but the live page's."""
    return TokenTable(_page(page_token_sha256, {}))


def _page(page_token_sha256: str | None, known: Mapping[bytes, KnownToken]) -> dict[bytes, KnownToken]:
    digest = None if page_token_sha256 is None else bytes.fromhex(page_token_sha256)
    return {} if digest is None or digest in known else {digest: KnownToken(principal=LIVE_PAGE)}


def _check_one_name(token: KnownToken, earlier: Sequence[KnownToken], label: str) -> None:
    for other in earlier:
        if token.expires is None and other.expires is None:
            raise ValueError(
                f"{label} is used by an earlier entry: all entries of a name but one need `expires`"
            )
        if token.principal != other.principal:
            raise ValueError(f"{label} has another role, tenant or limit in an earlier entry")


def _parsed(entry: Any, number: int) -> tuple[bytes, KnownToken]:
    if not isinstance(entry, dict):
        raise ValueError(f"entry {number} is not a JSON object")
    name = entry.get("name")
    # Do not repeat an invalid name: it may be a token in the wrong field.
    if not isinstance(name, str) or not is_id(name):
        raise ValueError(f"entry {number}: name must be {NAME_RULE}, not empty")
    label = f"entry {number} ({name})"
    if entry.keys() - _FIELDS:
        raise ValueError(f"{label} has fields besides {', '.join(sorted(_FIELDS))}")
    digest = entry.get("token_sha256")
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise ValueError(
            f"{label}: token_sha256 must be 64 digits of [0-9a-f], as `blockyard token new` prints"
        )
    role = entry.get("role")
    if not isinstance(role, str) or role not in set(Role):
        raise ValueError(f"{label}: role must be one of {', '.join(Role)}")
    tenant = entry.get("tenant", name)
    if not isinstance(tenant, str) or not is_id(tenant):
        raise ValueError(f"{label}: tenant must be {NAME_RULE}, not empty")
    principal = Principal(name=name, role=Role(role), tenant=tenant, limit=_limit(entry, label))
    expires = None if entry.get("expires") is None else parse_time(entry["expires"], label).timestamp()
    return bytes.fromhex(digest), KnownToken(principal=principal, expires=expires)


def _limit(given: Mapping[str, Any], label: str) -> RateLimit:
    limits: dict[str, int] = {}
    for name in sorted(_LIMITS & given.keys()):
        value = given[name]
        if type(value) is not int or not 1 <= value <= MAX_PER_MINUTE:
            raise ValueError(f"{label}: {name} must be a whole number from 1 to {MAX_PER_MINUTE}")
        limits[name] = value
    return RateLimit(**limits)


def _tenant_limit(tenant: str, given: Any) -> RateLimit:
    if not is_id(tenant):
        raise ValueError(f"tenants: a name must be {NAME_RULE}, not empty")
    label = f"tenants: {tenant}"
    if not isinstance(given, dict) or given.keys() - _LIMITS:
        raise ValueError(f"{label} must have nothing besides {', '.join(sorted(_LIMITS))}")
    return _limit(given, label)


def parse_time(value: Any, label: str) -> datetime:
    """Parse a UTC time as in RFC 3339. Raises ValueError."""
    try:
        time = datetime.fromisoformat(value)
        is_utc = "T" in value and time.utcoffset() == timedelta(0)
    except (TypeError, ValueError):
        is_utc = False
    if not is_utc:
        raise ValueError(f"{label}: expires must be a time in UTC, such as 2026-12-31T00:00:00Z")
    return time


# For `blockyard token`.


def new_token(
    name: str,
    role: str,
    tenant: str | None = None,
    *,
    limit: RateLimit | None = None,
    expires: datetime | None = None,
) -> tuple[str, Entry]:
    """Draw a token and return it with its entry for the file. Raises ValueError as `parse_tokens` does."""
    token, digest = _drawn()
    limits = {} if limit is None else {f"{kind}_per_minute": limit.of(kind) for kind in KINDS}
    optional = {"tenant": tenant, "expires": None if expires is None else _written(expires), **limits}
    entry: Entry = {"name": name, "token_sha256": digest, "role": role}
    entry |= {key: value for key, value in optional.items() if value is not None}
    _parsed(entry, 1)
    return token, entry


def rotated(
    entries: Sequence[Entry], name: str, *, overlap_seconds: float, now: datetime
) -> tuple[str, list[Entry]]:
    """Draw a new token of this name. Return it, and all entries with the new one and without the name's expired ones.

    Earlier entries of the name expire after the overlap, or at their own expiry if that is earlier. The new one expires
    when the last of them would have. Raises ValueError, also if all of them have expired: the new token would be
    refused at once.
    """
    earlier = _of_name(entries, name)
    last = max(earlier, key=_end)
    if _end(last) <= now:
        raise ValueError(
            f"every token of {name!r} has expired, the last on {last['expires']}: revoke the name and make a new token"
        )
    try:
        soon = now + timedelta(seconds=overlap_seconds)
    except (OverflowError, ValueError):
        raise ValueError(f"an overlap of {overlap_seconds:g} s ends after the year {MAXYEAR}") from None
    token, digest = _drawn()
    kept = [
        {**entry, "expires": _written(soon)} if entry["name"] == name and _end(entry) > soon else entry
        for entry in entries
        if entry["name"] != name or _end(entry) > now
    ]
    return token, [*kept, {**last, "token_sha256": digest}]


def revoked(entries: Sequence[Entry], name: str) -> list[Entry]:
    """Return the entries without those of this name. Raises ValueError if there are none."""
    gone = _of_name(entries, name)
    return [entry for entry in entries if entry not in gone]


def _of_name(entries: Sequence[Entry], name: str) -> list[Entry]:
    found = [entry for entry in entries if entry["name"] == name]
    if not found:
        raise ValueError(f"no entry has the name {name!r}")
    return found


def _end(entry: Entry) -> datetime:
    expires = entry.get("expires")
    return datetime.max.replace(tzinfo=UTC) if expires is None else parse_time(expires, str(entry["name"]))


def _drawn() -> tuple[str, str]:
    token = "by-" + secrets.token_urlsafe(TOKEN_BYTES)
    return token, sha256(token.encode()).hexdigest()


def _written(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
