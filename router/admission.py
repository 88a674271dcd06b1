"""Who may come in: the ledger of what is admitted now.

`AdmissionLedger` charges requests, by their outputs, and prompt tokens, estimated from bytes before anything costly is
done with them, and refuses beyond the limits. Pure: time and chance come from outside. Does not own who among the
admitted goes first (tenants.py), their waiting (waiting_line.py), nor whether a worker has room (worker_gate.py).

Tokens are those of prompts alone. The ledger guards what the router itself spends: tokenising, ids and names that it
keeps until the end. `max_tokens` costs it nothing, is mostly far above what is generated and the whole context where it
is left out, so that charging it would refuse requests for tokens that never come. KV that grows with outputs is
guarded where it lies: workers admit by blocks and preempt.

While several tenants are active none holds more than its share of either limit, by weight. A tenant is active
while it has something admitted, running or waiting, and for a while after it was refused; alone it may take all. What
it held when another came is not taken from it, but nothing is added until it is within its share. A tenant that holds
nothing is never above its share, however small that is.
"""

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from blockyard.router.errors import Overloaded
from blockyard.router.retry_delay import MAX_DELAY_SECONDS, CompletionRate, retry_delay_seconds
from blockyard.router.tenants import checked_weights

BYTES_PER_TOKEN = 4
"""Of text, for an estimate that costs nothing; real tokenizers take 3 to 5."""
REFUSED_ACTIVE_SECONDS = 60.0
"""A refused tenant's share stays reserved for so long: twice the longest delay that it is told."""
MAX_REFUSED_TENANTS = 1024
"""Remembered at once; the longest refused are forgotten first."""
WEIGHT_UNITS = 1000
"""Weights are counted in whole units, so that shares are exact."""


def estimate_tokens(text_bytes: int) -> int:
    """Prompt tokens expected of a text; at least one."""
    return text_bytes // BYTES_PER_TOKEN + 1


@dataclass(slots=True, eq=False)
class _Account:
    """One active tenant's."""

    weight_units: int
    requests: int = 0
    tokens: int = 0
    refused_at: float = 0.0
    returns_at: float = 0.0
    """When the last one that was refused has been told to come back: the next one comes after it."""


@dataclass(slots=True, eq=False)
class Charge:
    """What one request holds of the ledger."""

    outputs: int
    tokens: int
    _account: _Account
    _all_tokens: CompletionRate

    def correct(self, tokens: int) -> None:
        """The prompt has so many tokens. Never refuses: the work of counting them is done."""
        added = tokens - self.tokens
        self.tokens = tokens
        self._account.tokens += added
        self._all_tokens.change(added)


class AdmissionLedger:
    """What is admitted now. A charge is given back exactly as it stands at its end."""

    def __init__(
        self,
        *,
        max_requests: int,
        max_tokens: int,
        tenant_weights: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._weights = checked_weights(tenant_weights or {})
        self._clock = clock
        self._rng = rng or random.Random()
        self._requests = CompletionRate(clock)
        self._tokens = CompletionRate(clock)
        self._active: dict[str, _Account] = {}
        self._active_units = 0
        """The sum of their weights."""
        self._refused: OrderedDict[str, _Account] = OrderedDict()
        """Those of the active that were refused of late, the longest refused first."""

    @property
    def requests(self) -> int:
        """One with several outputs counts as so many."""
        return self._requests.held

    @property
    def tokens(self) -> int:
        return self._tokens.held

    @property
    def active_tenants(self) -> int:
        return len(self._active)

    @contextmanager
    def charge(self, tokens: int, *, outputs: int = 1, tenant: str = "") -> Iterator[Charge]:
        """Holds a request's outputs and its tokens for the life of the context. Raises Overloaded beyond a limit.

        A single request larger than a limit is let in when nothing else is: it could else never run.
        """
        self._forget_refused()
        account = self._account(tenant)
        self._check(
            tenant, account, outputs, account.requests, self._requests, self._max_requests, "requests"
        )
        self._check(tenant, account, tokens, account.tokens, self._tokens, self._max_tokens, "prompt tokens")
        charge = Charge(outputs, tokens, account, self._tokens)
        self._requests.begin(outputs)
        self._tokens.begin(tokens)
        account.requests += outputs
        account.tokens += tokens
        try:
            yield charge
        finally:
            self._requests.end(outputs)
            self._tokens.end(charge.tokens)
            account.requests -= outputs
            account.tokens -= charge.tokens
            self._close_if_idle(tenant, account)

    def _check(
        self,
        tenant: str,
        account: _Account,
        amount: int,
        of_tenant: int,
        of_all: CompletionRate,
        limit: int,
        told: str,
    ) -> None:
        """One limit for one more request. Raises Overloaded."""
        if not self._requests.held:
            return
        share = limit * account.weight_units // self._active_units
        if of_all.held + amount > limit:
            self._refuse(tenant, account, of_all.seconds_to_free(amount), f"too many {told}")
        if account.requests and of_tenant + amount > share:
            expected_seconds = of_all.seconds_to_free(amount, held=of_tenant)
            self._refuse(tenant, account, expected_seconds, f"too many {told} of this tenant")

    def _refuse(self, tenant: str, account: _Account, seconds_to_free: float, told: str) -> None:
        """The refused of a tenant are told to come back one after another, at the rate at which room is made."""
        now = self._clock()
        expected_seconds = max(account.returns_at - now, 0.0) + seconds_to_free
        account.returns_at = now + min(expected_seconds, MAX_DELAY_SECONDS)
        account.refused_at = now
        self._refused[tenant] = account
        self._refused.move_to_end(tenant)
        raise Overloaded(
            f"{told} are running or waiting",
            retry_after_seconds=retry_delay_seconds(expected_seconds, self._rng.random()),
        )

    def _account(self, tenant: str) -> _Account:
        if tenant not in self._active:
            units = round(self._weights.get(tenant, 1.0) * WEIGHT_UNITS)
            self._active[tenant] = _Account(units)
            self._active_units += units
        return self._active[tenant]

    def _forget_refused(self) -> None:
        oldest = self._clock() - REFUSED_ACTIVE_SECONDS
        while self._refused:
            tenant, account = next(iter(self._refused.items()))
            if account.refused_at > oldest and len(self._refused) <= MAX_REFUSED_TENANTS:
                return
            del self._refused[tenant]
            self._close_if_idle(tenant, account)

    def _close_if_idle(self, tenant: str, account: _Account) -> None:
        if not account.requests and tenant not in self._refused:
            del self._active[tenant]
            self._active_units -= account.weight_units
