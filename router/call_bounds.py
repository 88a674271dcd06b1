"""What bounds every call that costs work: a deadline, the client's or ours, and its tenant's share of what is admitted.

Does not own the limits themselves (config.py, admission.py) nor what a tenant may be called (validation.py).
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from blockyard.router.admission import AdmissionLedger, Charge
from blockyard.router.errors import DeadlinePassed
from blockyard.router.interceptor import Context
from blockyard.router.validation import valid_tenant

MAX_DEADLINE_SECONDS = 24 * 3600.0
"""A longer one is clamped: nobody waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBounds:
    """One for each router, shared by its services."""

    ledger: AdmissionLedger
    default_timeout_seconds: float
    """For a call without a deadline."""

    def seconds_left(self, context: Context) -> float:
        left = context.time_remaining()
        return self.default_timeout_seconds if left is None else min(left, MAX_DEADLINE_SECONDS)

    def tenant(self, context: Context) -> str:
        """Raises InvalidRequest."""
        return valid_tenant(context.invocation_metadata() or ())

    @asynccontextmanager
    async def admitted(self, context: Context, tokens: int) -> AsyncIterator[Charge]:
        """Charged and within the deadline. Raises InvalidRequest, Overloaded, DeadlinePassed."""
        with self.ledger.charge(tokens, tenant=self.tenant(context)) as charge:
            async with self.deadline(context):
                yield charge

    @asynccontextmanager
    async def deadline(self, context: Context) -> AsyncIterator[None]:
        """Raises DeadlinePassed."""
        try:
            async with asyncio.timeout(self.seconds_left(context)):
                yield
        except TimeoutError:
            raise DeadlinePassed("the deadline passed before the answer was complete") from None
