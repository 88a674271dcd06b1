"""Admission ledger: counts the requests and prompt tokens that are admitted now, and refuses more than the limits.

`AdmissionLedger` charges each request for its number of outputs and its prompt tokens. The tokens are estimated from
bytes, before any costly work. Pure: the clock and the random source are arguments. Does not own the order of admitted
requests (fair_queue.py), their waiting (dispatch/waiting_line.py) or the room of a worker (cluster/gate.py).

The ledger protects the router's own resources: tokenizing, and the ids and block names that it keeps. So it counts no
generated tokens. `max_tokens` costs the router nothing, and charging it would refuse requests without need. It is
usually far above the number of generated tokens, and the whole context if left out. Workers protect their KV cache
themselves: they admit by blocks and preempt.

Shares of tenants:
- While several tenants are active, no tenant may grow beyond its share of a limit, by weight.
- A tenant is active while it has an admitted request. After a refusal it stays active until it should have come back.
- A tenant that alone holds something may grow to all but 1/16 of a limit. The rest stays free for the next tenant.
- A tenant above its share keeps what it holds but gets nothing more.
- A tenant that holds nothing is never above its share, however small the share is.
- Where clients have no names, their addresses are the tenants.

Clients can invent tenant names, so all refused tenants that hold nothing reserve at most half of a limit together. This
lets each of them in when it comes back, and then it counts in full.

A request larger than a limit is admitted only when no other request is. On a router that is never empty it is never
admitted, and the refusal says so.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from typing import NoReturn

from blockyard.router.admission.fair_queue import checked_weights, weight_of
from blockyard.router.admission.retry_delay import MAX_DELAY_SECONDS, CompletionRate, retry_delay_seconds
from blockyard.router.errors import Overloaded

BYTES_PER_TOKEN = 4
"""Bytes of text per token, for a free estimate. Real tokenizers have 3 to 5."""
RETURN_GRACE_SECONDS = 5.0
"""A refused tenant counts as active for this long after its retry time."""
MAX_REFUSED_TENANTS = 1024
"""The most refused tenants that are remembered. Beyond it, those with the earliest retry times are forgotten first."""
REQUESTS = "requests (max_requests)"
TOKENS = "prompt tokens (max_tokens_admitted)"
NEWCOMERS_PART = 16
"""1/16 of each limit stays free for new tenants while only one tenant holds anything."""
WEIGHT_UNITS = 1000
"""Units of weight 1. Weights are rounded to whole units, so that sums of them are exact."""


def text_bytes(*texts: str) -> int:
    """Return the number of UTF-8 bytes. ASCII text, as most long texts are, is not encoded: a character is a byte."""
    return sum(len(text) if text.isascii() else len(text.encode()) for text in texts)


def estimate_tokens(text_bytes: int) -> int:
    """Return the expected number of tokens of a text of this size, at least 1."""
    return text_bytes // BYTES_PER_TOKEN + 1


@dataclass(slots=True, eq=False)
class _Account:
    """Holdings of one active tenant, and the time at which it should come back after a refusal."""

    weight_units: int
    requests: int = 0
    tokens: int = 0
    expected_until: float = 0.0
    """Time until which a refused tenant counts as active even if it holds nothing."""
    returns_at: float = 0.0
    """Retry time of the tenant's last refusal. The next refusal gets a later one."""


@dataclass(slots=True, eq=False)
class Charge:
    """Charge of one request: the outputs and prompt tokens that it holds in the ledger."""

    outputs: int
    tokens: int
    _account: _Account
    _all_tokens: CompletionRate

    def correct(self, tokens: int) -> None:
        """Replace the estimate by the real number of prompt tokens. Never refuses: tokenizing is done already."""
        added = tokens - self.tokens
        self.tokens = tokens
        self._account.tokens += added
        self._all_tokens.change(added)


class AdmissionLedger:
    """Ledger of the outputs and prompt tokens that are admitted now."""

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
        """Sum of the weights of active tenants."""
        self._holding_units = 0
        """Sum of the weights of active tenants that hold something."""
        self._refused: dict[str, _Account] = {}
        """Active tenants that were refused and may come back."""
        self._forgotten_next: list[tuple[float, str]] = []
        """A heap with one entry per refused tenant. An entry's time is exact, or too early after another refusal."""

    def limit(self, *, max_requests: int, max_tokens: int) -> None:
        """Set the limits anew. What is admitted already stays."""
        self._max_requests, self._max_tokens = max_requests, max_tokens

    @property
    def limits(self) -> tuple[int, int]:
        """Return the limits of requests and of prompt tokens."""
        return self._max_requests, self._max_tokens

    @property
    def requests(self) -> int:
        """Return the number of admitted requests. A request with several outputs or beams counts once for each."""
        return self._requests.held

    @property
    def tokens(self) -> int:
        return self._tokens.held

    @property
    def active_tenants(self) -> int:
        return len(self._active)

    @contextmanager
    def charge(self, tokens: int, *, outputs: int = 1, tenant: str = "") -> Iterator[Charge]:
        """Hold a request's outputs and prompt tokens for the life of the context. Raises Overloaded beyond a limit.

        A request larger than a limit is admitted when no other request is. Otherwise it could never run.
        """
        self._forget_refused()
        account = self._account(tenant)
        self._check(tenant, account, outputs, account.requests, self._requests, self._max_requests, REQUESTS)
        self._check(tenant, account, tokens, account.tokens, self._tokens, self._max_tokens, TOKENS)
        charge = Charge(outputs, tokens, account, self._tokens)
        self._requests.begin(outputs)
        self._tokens.begin(tokens)
        if not account.requests:
            self._holding_units += account.weight_units
        account.requests += outputs
        account.tokens += tokens
        try:
            yield charge
        finally:
            self._requests.end(outputs)
            self._tokens.end(charge.tokens)
            account.requests -= outputs
            account.tokens -= charge.tokens
            if not account.requests:
                self._holding_units -= account.weight_units
            self._close_if_idle(tenant, account)

    def _check(
        self,
        tenant: str,
        account: _Account,
        amount: int,
        of_tenant: int,
        of_all: CompletionRate,
        limit: int,
        limit_name: str,
    ) -> None:
        """Check that `amount` more fits one limit, and the tenant's share of it. Raises Overloaded."""
        if not self._requests.held:
            return
        if amount > limit:
            text = f"this request alone exceeds the limit of {limit} {limit_name} and runs only when no other does"
            self._refuse(tenant, account, of_all.seconds_to_free(of_all.held), text)
        is_alone = bool(account.requests) and self._holding_units == account.weight_units
        room = limit - limit // NEWCOMERS_PART if is_alone else limit
        if of_all.held + amount > room:
            self._refuse(
                tenant,
                account,
                of_all.seconds_to_free(amount),
                f"the limit of {limit} {limit_name} is reached",
            )
        share = limit * account.weight_units // self._shared_units
        if account.requests and of_tenant + amount > share:
            text = f"this tenant's share of {share} of the limit of {limit} {limit_name} is reached"
            self._refuse(tenant, account, of_all.seconds_to_free(amount, held=of_tenant), text)

    @property
    def _shared_units(self) -> int:
        """Return the units of weight among which a limit is shared: at most half of them for tenants that hold
        nothing."""
        return min(self._active_units, 2 * self._holding_units)

    def _refuse(self, tenant: str, account: _Account, seconds_to_free: float, reason: str) -> NoReturn:
        """Raise Overloaded with a retry delay, and keep the tenant active until it should have come back.

        A tenant's refused requests get successive retry times, at the rate at which room is made.
        """
        now = self._clock()
        expected_seconds = max(account.returns_at - now, 0.0) + seconds_to_free
        account.returns_at = now + min(expected_seconds, MAX_DELAY_SECONDS)
        delay_seconds = retry_delay_seconds(expected_seconds, self._rng.random())
        account.expected_until = max(account.expected_until, now + delay_seconds + RETURN_GRACE_SECONDS)
        if tenant not in self._refused:
            self._refused[tenant] = account
            heappush(self._forgotten_next, (account.expected_until, tenant))
        raise Overloaded(
            f"{reason}: come back in {delay_seconds:.1f} s",
            retry_after_seconds=delay_seconds,
        )

    def _account(self, tenant: str) -> _Account:
        if tenant not in self._active:
            units = round(weight_of(tenant, self._weights) * WEIGHT_UNITS)
            self._active[tenant] = _Account(units)
            self._active_units += units
        return self._active[tenant]

    def _forget_refused(self) -> None:
        now = self._clock()
        while self._forgotten_next:
            until, tenant = self._forgotten_next[0]
            if until > now and len(self._refused) <= MAX_REFUSED_TENANTS:
                return
            account = self._refused[tenant]
            if account.expected_until > until:
                heapreplace(self._forgotten_next, (account.expected_until, tenant))
                continue
            heappop(self._forgotten_next)
            del self._refused[tenant]
            self._close_if_idle(tenant, account)

    def _close_if_idle(self, tenant: str, account: _Account) -> None:
        if not account.requests and tenant not in self._refused:
            del self._active[tenant]
            self._active_units -= account.weight_units
