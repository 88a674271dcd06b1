"""How much a token and a tenant may ask for in a minute, and what they have asked for: token buckets.

A bucket holds a minute's worth at most, is full at first and fills evenly. A call takes one request from each bucket
of its token and its tenant, and the tokens that it may need: its prompt's and all that it may generate. What it did not
need goes back at its end. A call that is refused takes nothing from any of them.

A call that alone needs more than a minute's worth takes a full bucket. What it really used beyond that is owed: the
bucket falls below zero and lets nobody in until it has filled again.

Pure: time comes from outside. Each router has buckets of its own. Does not own who has which limit (token_entries.py)
nor what is admitted at once (ledger.py).
"""

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Literal

from blockyard.router.errors import RateLimited

MINUTE_SECONDS = 60.0
MAX_PER_MINUTE = 10**12
MAX_BUCKETS = 65_536
"""More than an auth file can name; of more, those are forgotten first that are full."""
Kind = Literal["requests", "tokens"]
KINDS: tuple[Kind, ...] = ("requests", "tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimit:
    """What one token or one tenant may ask for; None is without a limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    def of(self, kind: Kind) -> int | None:
        return self.requests_per_minute if kind == "requests" else self.tokens_per_minute


NO_LIMIT = RateLimit()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limited:
    """Somebody with a limit."""

    key: Hashable
    """Under which it is counted."""
    told: str
    """What a refusal calls it."""
    limit: RateLimit


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a bucket stands now."""

    per_minute: int
    remaining: int
    full_in_seconds: float


@dataclass(slots=True)
class _Bucket:
    per_minute: int
    level: float
    """Below 0: owed."""
    at: float
    """When the level was that."""

    def fill(self, per_minute: int, now: float) -> None:
        filled = self.level + max(now - self.at, 0.0) * self.per_minute / MINUTE_SECONDS
        self.per_minute, self.at = per_minute, now
        self.level = min(filled, per_minute)

    def seconds_until(self, amount: float) -> float:
        return max(amount - self.level, 0.0) * MINUTE_SECONDS / self.per_minute


class RateCharge:
    """What one call has taken; at its end all goes back but for what it used."""

    def __init__(self, taken: Sequence[tuple[_Bucket, Kind, float]], clock: Callable[[], float]) -> None:
        self._taken, self._clock = taken, clock
        self._used: dict[Kind, int] = {"requests": 1, "tokens": 0}

    def use(self, tokens: int) -> None:
        """So many in all."""
        self._used = {"requests": 1, "tokens": tokens}

    def void(self) -> None:
        """The call was refused elsewhere: it used nothing."""
        self._used = {"requests": 0, "tokens": 0}

    def settle(self) -> None:
        now = self._clock()
        for bucket, kind, amount in self._taken:
            # What fills it meanwhile may not depend on whether another call has looked at it.
            bucket.fill(bucket.per_minute, now)
            bucket.level = min(bucket.level + amount - self._used[kind], bucket.per_minute)


class RateLimits:
    """One for each router."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[tuple[Kind, Hashable], _Bucket] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    @contextmanager
    def charge(self, limited: Sequence[Limited], *, tokens: int) -> Iterator[RateCharge]:
        """Takes what a call may need for the life of the context. Raises RateLimited, and then has taken nothing."""
        taken: list[tuple[_Bucket, Kind, float]] = []
        refusals: list[tuple[float, str]] = []
        for one, kind in product(limited, KINDS):
            bucket = self._bucket(one, kind)
            if bucket is None:
                continue
            amount: float = min(1 if kind == "requests" else tokens, bucket.per_minute)
            taken.append((bucket, kind, amount))
            if seconds := bucket.seconds_until(amount):
                refusals.append((seconds, f"{one.told} may have {bucket.per_minute} {kind} a minute"))
        if refusals:
            seconds, told = max(refusals)
            raise RateLimited(f"{told}: come back in {seconds:.1f} s", retry_after_seconds=seconds)
        for bucket, _, amount in taken:
            bucket.level -= amount
        charge = RateCharge(taken, self._clock)
        try:
            yield charge
        finally:
            charge.settle()

    def standing(self, limited: Sequence[Limited], kind: Kind) -> Standing | None:
        """Of the bucket with the least left; None where nothing limits."""
        buckets = [bucket for one in limited if (bucket := self._bucket(one, kind)) is not None]
        if not buckets:
            return None
        least = min(buckets, key=lambda bucket: bucket.level)
        return Standing(
            per_minute=least.per_minute,
            remaining=max(int(least.level), 0),
            full_in_seconds=least.seconds_until(least.per_minute),
        )

    def _bucket(self, one: Limited, kind: Kind) -> _Bucket | None:
        """Filled up to now; None without a limit."""
        per_minute = one.limit.of(kind)
        if per_minute is None:
            return None
        now, key = self._clock(), (kind, one.key)
        bucket = self._buckets.get(key)
        if bucket is None:
            self._make_room(now)
            bucket = self._buckets[key] = _Bucket(per_minute, per_minute, now)
        bucket.fill(per_minute, now)
        return bucket

    def _make_room(self, now: float) -> None:
        """Names come from the auth file alone, so this is for a file whose names change all the time."""
        if len(self._buckets) < MAX_BUCKETS:
            return
        for key, bucket in list(self._buckets.items()):
            bucket.fill(bucket.per_minute, now)
            if bucket.level >= bucket.per_minute:
                del self._buckets[key]
        while len(self._buckets) >= MAX_BUCKETS:
            del self._buckets[next(iter(self._buckets))]
