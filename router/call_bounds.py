"""What bounds every call that costs work: a deadline, the client's or ours, and its tenant's share of what is admitted.

Does not own the limits themselves (config.py, admission.py), what a tenant may be called (validation.py) nor who may
call what (auth.py).
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from blockyard.router.admission import AdmissionLedger, Charge
from blockyard.router.auth import PRINCIPAL, Role
from blockyard.router.errors import DeadlinePassed, Forbidden
from blockyard.router.validation import TENANT_KEY, valid_tenant

MAX_DEADLINE_SECONDS = 24 * 3600.0
"""A longer one is clamped: nobody waits for it."""


class CallContext(Protocol):
    """What bounds a call, whatever protocol it came by. gRPC's own context is one."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...

    def time_remaining(self) -> float | None:
        """Until the client's deadline; None where it has set none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Whose call it is."""

    tenant: str
    """For limits and turns: proven where clients authenticate, else as the call says, and "" where it says nothing."""
    realm: str
    """Whoever is in another one shares neither prefixes nor ids of requests: the tenant where it is proven, else ""."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBounds:
    """One for each router, shared by its services."""

    ledger: AdmissionLedger
    default_timeout_seconds: float
    """For a call without a deadline."""

    def seconds_left(self, context: CallContext) -> float:
        left = context.time_remaining()
        return self.default_timeout_seconds if left is None else min(left, MAX_DEADLINE_SECONDS)

    def caller(self, context: CallContext) -> Caller:
        """Raises InvalidRequest, and Forbidden for who names a tenant that is not his and is no admin."""
        named = valid_tenant(context.invocation_metadata() or ())
        principal = PRINCIPAL.get()
        if principal is None:
            return Caller(tenant=named, realm="")
        if named not in ("", principal.tenant) and principal.role is not Role.ADMIN:
            raise Forbidden(f"{TENANT_KEY}: this token is not that tenant's")
        tenant = named or principal.tenant
        return Caller(tenant=tenant, realm=tenant)

    @asynccontextmanager
    async def admitted(self, context: CallContext, tokens: int) -> AsyncIterator[Charge]:
        """Charged and within the deadline. Raises InvalidRequest, Forbidden, Overloaded, DeadlinePassed."""
        with self.ledger.charge(tokens, tenant=self.caller(context).tenant) as charge:
            async with self.deadline(context):
                yield charge

    @asynccontextmanager
    async def deadline(self, context: CallContext) -> AsyncIterator[None]:
        """Raises DeadlinePassed."""
        try:
            async with asyncio.timeout(self.seconds_left(context)):
                yield
        except TimeoutError:
            raise DeadlinePassed("the deadline passed before the answer was complete") from None
