"""Rate limits: token buckets that bound the requests and tokens of an API token and of a tenant per minute.

A bucket holds one minute's worth, starts full and fills evenly. A call takes one request from each bucket of its API
token and its tenant. It also takes the tokens that it may need: its prompt and everything that it may generate. The
unused part goes back at the end of the call. A refused call takes nothing.

A call that needs more than a minute's worth takes a full bucket. What it uses beyond that is debt: the bucket falls
below zero and refuses calls until it has filled again.

Pure: the clock is an argument. Each router has its own buckets. Does not own the limits (token_entries.py) or how much
may be admitted at once (ledger.py).
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
"""The most buckets. An auth file can name fewer. Beyond it, full buckets are forgotten first."""
Kind = Literal["requests", "tokens"]
KINDS: tuple[Kind, ...] = ("requests", "tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimit:
    """Requests and tokens per minute of one API token or tenant. None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    def of(self, kind: Kind) -> int | None:
        return self.requests_per_minute if kind == "requests" else self.tokens_per_minute


NO_LIMIT = RateLimit()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limited:
    """An API token or tenant that has a limit."""

    key: Hashable
    """Names its two buckets."""
    label: str
    """Words for it in a refusal."""
    limit: RateLimit


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """State of a bucket at one moment."""

    per_minute: int
    remaining: int
    full_in_seconds: float


@dataclass(slots=True)
class _Bucket:
    per_minute: int
    level: float
    """Requests or tokens left. Below 0: debt."""
    at: float
    """Time at which `level` was computed, in seconds."""

    def fill(self, per_minute: int, now: float) -> None:
        filled = self.level + max(now - self.at, 0.0) * self.per_minute / MINUTE_SECONDS
        self.per_minute, self.at = per_minute, now
        self.level = min(filled, per_minute)

    def seconds_until(self, amount: float) -> float:
        return max(amount - self.level, 0.0) * MINUTE_SECONDS / self.per_minute


class RateCharge:
    """Charge of one call. `give_back` returns to the buckets all that the call did not use."""

    def __init__(self, taken: Sequence[tuple[_Bucket, Kind, float]], clock: Callable[[], float]) -> None:
        self._taken, self._clock = taken, clock
        self._used: dict[Kind, int] = {"requests": 1, "tokens": 0}

    def use(self, tokens: int) -> None:
        """Record how many tokens the call used in total."""
        self._used = {"requests": 1, "tokens": tokens}

    def void(self) -> None:
        """Record that the call used nothing, because it was refused elsewhere."""
        self._used = {"requests": 0, "tokens": 0}

    def give_back(self) -> None:
        now = self._clock()
        for bucket, kind, amount in self._taken:
            # Fill the bucket first. The result must not depend on whether another call looked at it meanwhile.
            bucket.fill(bucket.per_minute, now)
            bucket.level = min(bucket.level + amount - self._used[kind], bucket.per_minute)


class RateLimits:
    """The buckets of one router."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[tuple[Kind, Hashable], _Bucket] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    @contextmanager
    def charge(self, limited: Sequence[Limited], *, tokens: int) -> Iterator[RateCharge]:
        """Take one request and `tokens` from the buckets, and give the unused part back when the context ends.

        Raises RateLimited, and then takes nothing.
        """
        taken: list[tuple[_Bucket, Kind, float]] = []
        refusals: list[tuple[float, str]] = []
        for one, kind in product(limited, KINDS):
            bucket = self._bucket(one, kind)
            if bucket is None:
                continue
            amount: float = min(1 if kind == "requests" else tokens, bucket.per_minute)
            taken.append((bucket, kind, amount))
            if seconds := bucket.seconds_until(amount):
                refusals.append((seconds, f"{one.label} may have {bucket.per_minute} {kind} a minute"))
        if refusals:
            seconds, refusal = max(refusals)
            raise RateLimited(f"{refusal}: come back in {seconds:.1f} s", retry_after_seconds=seconds)
        for bucket, _, amount in taken:
            bucket.level -= amount
        charge = RateCharge(taken, self._clock)
        try:
            yield charge
        finally:
            charge.give_back()

    def standing(self, limited: Sequence[Limited], kind: Kind) -> Standing | None:
        """Return the state of the bucket of this kind with the least left, or None if no limit applies."""
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
        """Return the bucket, filled up to now, or None if there is no limit. Make it if it is new."""
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
        """At MAX_BUCKETS, forget full buckets, and then the oldest ones. Names come from the auth file, so this happens
        only if the file's names keep changing."""
        if len(self._buckets) < MAX_BUCKETS:
            return
        for key, bucket in list(self._buckets.items()):
            bucket.fill(bucket.per_minute, now)
            if bucket.level >= bucket.per_minute:
                del self._buckets[key]
        while len(self._buckets) >= MAX_BUCKETS:
            del self._buckets[next(iter(self._buckets))]
