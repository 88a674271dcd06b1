"""The placement path's look at the prefix index: soon, or not at all.

Owns the time-out, the circuit breaker, the counting of failures, and what it means that the index knows only every
S-th block of a prefix. Does not own the index nor the fall-back: with `available=False` placement decides without
prefixes. Nothing here raises.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from blockyard.proto.prefix_index import (
    ErrorKind,
    Holder,
    Incarnation,
    IndexInfo,
    PrefixIndex,
    PrefixIndexError,
    WorkerId,
)
from blockyard.router.cluster_view import CachedDepth

REMEMBERED_LOOKUPS = 1000
INFO_SECONDS = 2.0
"""For the counting of the whole index, which takes some 10 ms."""
_NOBODYS_NAME = bytes(16)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixLookupConfig:
    timeout_seconds: float = 0.04
    """What a request waits at most: less than recomputing any prefix worth finding."""
    failures_to_open: int = 3
    """In a row. While the breaker is open, requests do not even wait the time-out."""
    open_seconds: float = 1.0
    refresh_seconds: float = 1.0
    """Whoever asks whether the index answers is told of no older look-up than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupResult:
    depth_by_worker: dict[WorkerId, CachedDepth] = field(default_factory=dict)
    """What each worker holds; who holds nothing is not in it."""
    available: bool


class BreakerState(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    """One request probes; the others still go without."""


class CircuitBreaker:
    """Pure: the caller brings the time."""

    def __init__(self, *, failures_to_open: int, open_seconds: float) -> None:
        self.state = BreakerState.CLOSED
        self._failures_to_open = failures_to_open
        self._open_seconds = open_seconds
        self._num_failures = 0
        self._reopen_at = 0.0

    def admits(self, now: float) -> bool:
        """True obliges the caller to report `succeeded`, `failed` or `abandoned`."""
        if self.state is BreakerState.CLOSED:
            return True
        if self.state is BreakerState.OPEN and now >= self._reopen_at:
            self.state = BreakerState.HALF_OPEN
            return True
        return False

    def succeeded(self) -> None:
        self.state = BreakerState.CLOSED
        self._num_failures = 0

    def failed(self, now: float) -> None:
        self._num_failures += 1
        if self.state is BreakerState.HALF_OPEN or self._num_failures >= self._failures_to_open:
            self.state = BreakerState.OPEN
            self._reopen_at = now + self._open_seconds

    def abandoned(self) -> None:
        """The caller was cancelled: nothing was learnt, and the next request may probe."""
        if self.state is BreakerState.HALF_OPEN:
            self.state = BreakerState.OPEN


class PrefixLookup:
    """One for each router; shared by all its requests."""

    def __init__(
        self,
        index: PrefixIndex,
        *,
        config: PrefixLookupConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index = index
        self._config = config or PrefixLookupConfig()
        self._clock = clock
        self._breaker = CircuitBreaker(
            failures_to_open=self._config.failures_to_open, open_seconds=self._config.open_seconds
        )
        self.errors: Counter[ErrorKind] = Counter()
        self.num_lookups = 0
        self.num_skipped = 0
        """Requests that went without because the breaker was open."""
        self.answers = True
        """Whether the last question was answered."""
        self.durations_seconds = deque[float](maxlen=REMEMBERED_LOOKUPS)
        """Of the last look-ups that were answered."""
        self._asked_at = float("-inf")

    @property
    def breaker_state(self) -> BreakerState:
        return self._breaker.state

    async def lookup(
        self,
        names: Sequence[bytes],
        incarnations: Mapping[WorkerId, Incarnation],
        *,
        stride_blocks: int = 1,
    ) -> LookupResult:
        """How deep each worker's cached prefix of `names` is, rounded down to the stride of the index. Only the
        incarnations that the router knows count: a dead life's blocks are lost, and a zombie is not to be fed."""
        known = names[stride_blocks - 1 :: stride_blocks]
        if not known or not incarnations:
            return LookupResult(available=self._breaker.state is BreakerState.CLOSED)
        begin = self._clock()
        if not self._breaker.admits(begin):
            self.num_skipped += 1
            return LookupResult(available=False)
        holders = await self._ask(known)
        if holders is None:
            return LookupResult(available=False)
        self.durations_seconds.append(self._clock() - begin)
        return LookupResult(depth_by_worker=_depths(holders, incarnations, stride_blocks), available=True)

    async def refresh(self) -> None:
        """Makes `answers` true of now: looks up a name that nobody has, unless somebody just got an answer."""
        now = self._clock()
        is_recent = now - self._asked_at < self._config.refresh_seconds
        if not (self.answers and is_recent) and self._breaker.admits(now):
            await self._ask((_NOBODYS_NAME,))

    async def info(self) -> IndexInfo | None:
        """How large the index is; None where it does not say. Not for the placement path."""
        try:
            async with asyncio.timeout(INFO_SECONDS):
                return await self._index.info()
        except (PrefixIndexError, TimeoutError):
            self.answers = False
            return None

    async def _ask(self, names: Sequence[bytes]) -> list[Holder] | None:
        """None where the index does not answer. The breaker has admitted it."""
        self.num_lookups += 1
        self._asked_at = self._clock()
        try:
            async with asyncio.timeout(self._config.timeout_seconds):
                holders = await self._index.lookup(names)
        except TimeoutError:
            self._failed(ErrorKind.TIMEOUT)
        except PrefixIndexError as error:
            self._failed(error.kind)
        except asyncio.CancelledError:
            self._breaker.abandoned()
            raise
        else:
            self._breaker.succeeded()
            self.answers = True
            return holders
        return None

    def _failed(self, kind: ErrorKind) -> None:
        self.errors[kind] += 1
        self._breaker.failed(self._clock())
        self.answers = False


def _depths(
    holders: Sequence[Holder], incarnations: Mapping[WorkerId, Incarnation], stride_blocks: int
) -> dict[WorkerId, CachedDepth]:
    return {
        holder.worker_id: CachedDepth(
            blocks=holder.depth * stride_blocks, host_blocks=holder.host_blocks * stride_blocks
        )
        for holder in holders
        if incarnations.get(holder.worker_id) == holder.incarnation
    }
