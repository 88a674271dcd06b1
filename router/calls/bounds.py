"""Bounds of every call that costs work: its deadline, the charge of its client in the ledger, and limits per minute.

Does not own the limits (config.py, admission/ledger.py, admission/rate_limits.py), the form of a tenant's name
(request/validation.py) or permissions (admission/auth.py).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from ipaddress import IPv6Address, IPv6Network, ip_address
from typing import Protocol
from urllib.parse import unquote

from blockyard.proto.naming import headers
from blockyard.router.admission.auth import PRINCIPAL, Role
from blockyard.router.admission.fair_queue import ADDRESS_SIGN
from blockyard.router.admission.ledger import AdmissionLedger, Charge
from blockyard.router.admission.rate_limits import NO_LIMIT, Limited, RateCharge, RateLimit, RateLimits
from blockyard.router.errors import DeadlinePassed, Forbidden, Overloaded
from blockyard.router.request.validation import valid_tenant

MAX_DEADLINE_SECONDS = 24 * 3600.0
"""Longest deadline. A longer one is shortened to this."""
REMEMBERED_ADDRESSES = 4096
IPV6_CLIENT_BITS = 64
"""Bits of an IPv6 network that identify a client. One machine may use any address within its network."""


class CallContext(Protocol):
    """Context of a call in any protocol, which has its headers, deadline and peer. gRPC's ServicerContext is one."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...

    def time_remaining(self) -> float | None:
        """Return the seconds until the client's deadline, or None if it has set none."""

    def peer(self) -> str:
        """Return the other end of the connection, as gRPC writes it: "ipv4:127.0.0.1:1234"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Client of a call: who pays for it, and with whom it shares what."""

    tenant: str
    """Tenant that pays for the call. Where clients do not authenticate, the one that the call names, or ""."""
    realm: str
    """The tenant if clients authenticate, else "". Callers of different realms share neither prefixes nor request
    ids."""
    client: str
    """Key of its account in the ledger and of its queue: the tenant, or the address if there is none."""
    limited: tuple[Limited, ...] = ()
    """The API token and tenant whose limits per minute apply to the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBounds:
    """Bounds of calls, shared by all services of a router."""

    default_timeout_seconds: float
    """Deadline of a call that sets none."""
    rates: RateLimits = field(default_factory=RateLimits)
    limit_of_tenant: Callable[[str], RateLimit] = lambda tenant: NO_LIMIT

    def seconds_left(self, context: CallContext) -> float:
        left = context.time_remaining()
        return self.default_timeout_seconds if left is None else min(left, MAX_DEADLINE_SECONDS)

    def caller(self, context: CallContext) -> Caller:
        """Return the call's client. Raises InvalidRequest; Forbidden if a caller other than an admin names another
        tenant."""
        named = valid_tenant(context.invocation_metadata() or ())
        principal = PRINCIPAL.get()
        if principal is None:
            return Caller(tenant=named, realm="", client=named or client_address(context.peer()))
        if named not in ("", principal.tenant) and principal.role is not Role.ADMIN:
            raise Forbidden(f"{headers.TENANT}: this token does not belong to that tenant")
        tenant = named or principal.tenant
        of_token = Limited(key=("token", principal.name), label="this token", limit=principal.limit)
        of_tenant = Limited(key=("tenant", tenant), label="this tenant", limit=self.limit_of_tenant(tenant))
        limited = tuple(one for one in (of_token, of_tenant) if one.limit != NO_LIMIT)
        return Caller(tenant=tenant, realm=tenant, client=tenant, limited=limited)

    @asynccontextmanager
    async def admitted(
        self, context: CallContext, tokens: int, ledger: AdmissionLedger
    ) -> AsyncIterator[Charge]:
        """Charge the call's prompt tokens in its model's ledger and apply its deadline, for the life of the context.

        Of the limits per minute the call takes one request and no tokens.

        Raises InvalidRequest, Forbidden, Overloaded, RateLimited or DeadlinePassed.
        """
        with self.charged(self.caller(context), tokens, ledger) as (charge, _):
            async with self.deadline(context):
                yield charge

    @asynccontextmanager
    async def admitted_to_read(
        self, context: CallContext, ledger: AdmissionLedger, *, is_limited: bool = True
    ) -> AsyncIterator[str]:
        """Admit a call to what it reads or changes on disk or in Redis. Yield its tenant, and apply its deadline.

        The call holds a request and a token of the ledger for the life of the context. It needs room in the limits per
        minute and takes none. With `is_limited=False` it needs no room there either.

        Raises InvalidRequest, Forbidden, Overloaded, RateLimited or DeadlinePassed.
        """
        caller = self.caller(context)
        with self.charged(caller if is_limited else replace(caller, limited=()), 1, ledger) as (_, rate):
            rate.void()
            async with self.deadline(context):
                yield caller.tenant

    @contextmanager
    def charged(
        self,
        caller: Caller,
        prompt_tokens: int,
        ledger: AdmissionLedger,
        *,
        outputs: int = 1,
        generated_tokens: int | None = None,
    ) -> Iterator[tuple[Charge, RateCharge]]:
        """Charge the call in the ledger and to its limits per minute, for the life of the context.

        Without `generated_tokens` no tokens count against limits per minute.

        Raises Overloaded or RateLimited, and then takes nothing.
        """
        tokens = 0 if generated_tokens is None else prompt_tokens + generated_tokens
        with self.rates.charge(caller.limited, tokens=tokens) as rate, ExitStack() as held:
            try:
                charge = held.enter_context(
                    ledger.charge(prompt_tokens, outputs=outputs, tenant=caller.client)
                )
            except Overloaded:
                rate.void()
                raise
            yield charge, rate

    @asynccontextmanager
    async def deadline(self, context: CallContext) -> AsyncIterator[None]:
        """Cancel the body of the context at the call's deadline. Raises DeadlinePassed then."""
        try:
            async with asyncio.timeout(self.seconds_left(context)):
                yield
        except TimeoutError:
            raise DeadlinePassed("the deadline passed before the answer was complete") from None


def caller_client(peer: str) -> str:
    """Return the client to charge for a call that is not read yet: the token's tenant, or the address in `peer`."""
    principal = PRINCIPAL.get()
    return client_address(peer) if principal is None else principal.tenant


def client_address(peer: str) -> str:
    """Return the key of a client without a tenant: "@" with its address without the port, or with its network for
    IPv6."""
    kind, _, rest = peer.partition(":")
    return ADDRESS_SIGN + (_network(unquote(rest).rpartition(":")[0]) or kind)


@lru_cache(maxsize=REMEMBERED_ADDRESSES)
def _network(address: str) -> str | None:
    """Return the address of a client, or its network for IPv6. None: this is no address."""
    try:
        host = ip_address(address.strip("[]").partition("%")[0])
    except ValueError:
        return None
    if isinstance(host, IPv6Address) and host.ipv4_mapped is not None:
        host = host.ipv4_mapped
    if isinstance(host, IPv6Address):
        return str(IPv6Network((host, IPV6_CLIENT_BITS), strict=False))
    return str(host)
