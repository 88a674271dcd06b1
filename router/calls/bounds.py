"""What bounds every call that costs work: a deadline, the client's or ours, its client's share of what is admitted, and
what its token and tenant may ask for in a minute.

Does not own the limits themselves (config.py, admission/ledger.py, admission/rate_limits.py), what a tenant may be
called (request/validation.py) nor who may call what (admission/auth.py).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from ipaddress import IPv6Address, IPv6Network, ip_address
from typing import Protocol
from urllib.parse import unquote

from blockyard.proto.naming.identifiers import TENANT_KEY
from blockyard.router.admission.auth import PRINCIPAL, Role
from blockyard.router.admission.fair_queue import ADDRESS_SIGN
from blockyard.router.admission.ledger import AdmissionLedger, Charge
from blockyard.router.admission.rate_limits import NO_LIMIT, Limited, RateCharge, RateLimit, RateLimits
from blockyard.router.errors import DeadlinePassed, Forbidden, Overloaded
from blockyard.router.request.validation import valid_tenant

MAX_DEADLINE_SECONDS = 24 * 3600.0
"""A longer one is clamped: nobody waits for it."""
IPV6_CLIENT_BITS = 64
"""A machine has as many addresses behind them as it likes."""


class CallContext(Protocol):
    """What bounds a call, whatever protocol it came by. gRPC's own context is one."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...

    def time_remaining(self) -> float | None:
        """Until the client's deadline; None where it has set none."""

    def peer(self) -> str:
        """The other end of the connection, as gRPC writes it: "ipv4:127.0.0.1:1234"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Whose call it is."""

    tenant: str
    """Proven where clients authenticate, else as the call says, and "" where it says nothing."""
    realm: str
    """Whoever is in another one shares neither prefixes nor ids of requests: the tenant where it is proven, else ""."""
    client: str
    """For shares and turns: the tenant, or where there is none the address."""
    limited: tuple[Limited, ...] = ()
    """Whose limits a minute it counts against."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBounds:
    """One for each router, shared by its services."""

    ledger: AdmissionLedger
    default_timeout_seconds: float
    """For a call without a deadline."""
    rates: RateLimits = field(default_factory=RateLimits)
    limit_of_tenant: Callable[[str], RateLimit] = lambda tenant: NO_LIMIT

    def seconds_left(self, context: CallContext) -> float:
        left = context.time_remaining()
        return self.default_timeout_seconds if left is None else min(left, MAX_DEADLINE_SECONDS)

    def caller(self, context: CallContext) -> Caller:
        """Raises InvalidRequest, and Forbidden for who names a tenant that is not his and is no admin."""
        named = valid_tenant(context.invocation_metadata() or ())
        principal = PRINCIPAL.get()
        if principal is None:
            return Caller(tenant=named, realm="", client=named or client_address(context.peer()))
        if named not in ("", principal.tenant) and principal.role is not Role.ADMIN:
            raise Forbidden(f"{TENANT_KEY}: this token is not that tenant's")
        tenant = named or principal.tenant
        of_token = Limited(key=("token", principal.name), told="this token", limit=principal.limit)
        of_tenant = Limited(key=("tenant", tenant), told="this tenant", limit=self.limit_of_tenant(tenant))
        limited = tuple(one for one in (of_token, of_tenant) if one.limit != NO_LIMIT)
        return Caller(tenant=tenant, realm=tenant, client=tenant, limited=limited)

    @asynccontextmanager
    async def admitted(self, context: CallContext, tokens: int) -> AsyncIterator[Charge]:
        """Charged and within the deadline; of the limits a minute it takes a request alone. Raises InvalidRequest,
        Forbidden, Overloaded, RateLimited, DeadlinePassed."""
        with self.charged(self.caller(context), tokens) as (charge, _):
            async with self.deadline(context):
                yield charge

    @contextmanager
    def charged(
        self, caller: Caller, prompt_tokens: int, *, outputs: int = 1, generated_tokens: int | None = None
    ) -> Iterator[tuple[Charge, RateCharge]]:
        """Held for the life of the context. Without `generated_tokens` no token counts against a limit a minute. Raises
        Overloaded, RateLimited; then nothing is taken of any."""
        tokens = 0 if generated_tokens is None else prompt_tokens + generated_tokens
        with self.rates.charge(caller.limited, tokens=tokens) as rate, ExitStack() as held:
            try:
                charge = held.enter_context(
                    self.ledger.charge(prompt_tokens, outputs=outputs, tenant=caller.client)
                )
            except Overloaded:
                rate.void()
                raise
            yield charge, rate

    @asynccontextmanager
    async def deadline(self, context: CallContext) -> AsyncIterator[None]:
        """Raises DeadlinePassed."""
        try:
            async with asyncio.timeout(self.seconds_left(context)):
                yield
        except TimeoutError:
            raise DeadlinePassed("the deadline passed before the answer was complete") from None


def caller_client(peer: str) -> str:
    """Whoever is charged before a call is read: the tenant where it is proven, else the address of `peer`."""
    principal = PRINCIPAL.get()
    return client_address(peer) if principal is None else principal.tenant


def client_address(peer: str) -> str:
    """What stands for a client that has no name: its address, without the port; of IPv6 the network."""
    kind, _, rest = peer.partition(":")
    try:
        host = ip_address(unquote(rest).rpartition(":")[0].strip("[]").partition("%")[0])
    except ValueError:
        return ADDRESS_SIGN + kind
    if isinstance(host, IPv6Address) and host.ipv4_mapped is not None:
        host = host.ipv4_mapped
    if isinstance(host, IPv6Address):
        return ADDRESS_SIGN + str(IPv6Network((host, IPV6_CLIENT_BITS), strict=False))
    return ADDRESS_SIGN + str(host)
