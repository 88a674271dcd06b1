"""Who may come in: the ledger of what is admitted now.

`AdmissionLedger` charges requests, by their outputs, and prompt tokens, estimated from bytes before anything costly is
done with them, and refuses beyond the limits. Pure: time and chance come from outside. Does not own who among the
admitted goes first (fair_queue.py), their waiting (dispatch/waiting_line.py), nor whether a worker has room
(cluster/gate.py).

Tokens are those of prompts alone. The ledger guards what the router itself spends: tokenising, ids and names that it
keeps until the end. `max_tokens` costs it nothing, is mostly far above what is generated and the whole context where it
is left out, so that charging it would refuse requests for tokens that never come. KV that grows with outputs is
guarded where it lies: workers admit by blocks and preempt.

While several tenants are active none holds more than its share of either limit, by weight. A tenant is active
while it has something admitted, running or waiting, and, once refused, until it should have come back. Alone it may
take all but a sixteenth, which is for whoever comes next. What it held when another
came is not taken from it, but nothing is added until it is within its share. A tenant that holds nothing is never above
its share, however small that is. Where clients have no names, their addresses are the tenants.

Names cost nothing, so those that were refused and hold nothing weigh no more together than those that hold something:
at most half of a limit stays free for them. That is enough for each to be let in when it comes back, and what it
holds then counts in full.

A request that is larger than a limit on its own is let in when nothing else is, and refused while anything runs: on a
router that is never empty it never enters, and its refusal says so.
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
"""Of text, for an estimate that costs nothing; real tokenizers take 3 to 5."""
RETURN_GRACE_SECONDS = 5.0
"""A refused tenant is expected so long after the time at which it was told to come back, and then forgotten."""
MAX_REFUSED_TENANTS = 1024
"""Remembered at once; of more, those are forgotten first who were to come back first."""
REQUESTS = "requests (max_requests)"
TOKENS = "prompt tokens (max_tokens_admitted)"
NEWCOMERS_PART = 16
"""One part in so many of each limit is not for a tenant that alone holds all the rest."""
WEIGHT_UNITS = 1000
"""Weights are counted in whole units, so that shares are exact."""


def text_bytes(*texts: str) -> int:
    """As UTF-8. Megabytes are not encoded for it: of ASCII, which most long texts are, a character is a byte."""
    return sum(len(text) if text.isascii() else len(text.encode()) for text in texts)


def estimate_tokens(text_bytes: int) -> int:
    """Prompt tokens expected of a text; at least one."""
    return text_bytes // BYTES_PER_TOKEN + 1


@dataclass(slots=True, eq=False)
class _Account:
    """One active tenant's."""

    weight_units: int
    requests: int = 0
    tokens: int = 0
    expected_until: float = 0.0
    """It was refused and may come back until then."""
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
        self._holding_units = 0
        """Of those among them that hold something."""
        self._refused: dict[str, _Account] = {}
        """Those of the active that were refused and may come back."""
        self._forgotten_next: list[tuple[float, str]] = []
        """A heap with one entry for each of the refused: the time is right, or too early after another refusal."""

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

        A request larger than a limit is let in when nothing else is: it could else never run.
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
        told: str,
    ) -> None:
        """One limit for one more request. Raises Overloaded."""
        if not self._requests.held:
            return
        if amount > limit:
            text = f"this one alone is above the limit of {limit} {told} and runs only when nothing else does"
            self._refuse(tenant, account, of_all.seconds_to_free(of_all.held), text)
        is_alone = bool(account.requests) and self._holding_units == account.weight_units
        room = limit - limit // NEWCOMERS_PART if is_alone else limit
        if of_all.held + amount > room:
            self._refuse(
                tenant, account, of_all.seconds_to_free(amount), f"the limit of {limit} {told} is reached"
            )
        share = limit * account.weight_units // self._shared_units
        if account.requests and of_tenant + amount > share:
            text = f"this tenant's share of {share} of the limit of {limit} {told} is reached"
            self._refuse(tenant, account, of_all.seconds_to_free(amount, held=of_tenant), text)

    @property
    def _shared_units(self) -> int:
        """What a limit is divided by. Of an asker that holds something: at least its own."""
        return min(self._active_units, 2 * self._holding_units)

    def _refuse(self, tenant: str, account: _Account, seconds_to_free: float, told: str) -> NoReturn:
        """The refused of a tenant are told to come back one after another, at the rate at which room is made."""
        now = self._clock()
        expected_seconds = max(account.returns_at - now, 0.0) + seconds_to_free
        account.returns_at = now + min(expected_seconds, MAX_DELAY_SECONDS)
        delay_seconds = retry_delay_seconds(expected_seconds, self._rng.random())
        account.expected_until = max(account.expected_until, now + delay_seconds + RETURN_GRACE_SECONDS)
        if tenant not in self._refused:
            self._refused[tenant] = account
            heappush(self._forgotten_next, (account.expected_until, tenant))
        raise Overloaded(
            f"{told}: come back in {delay_seconds:.1f} s",
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
