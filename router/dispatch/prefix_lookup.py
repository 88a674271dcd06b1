"""The placement path's look at the prefix index: soon, or not at all.

Owns the time-out, the circuit breaker, the counting of failures, and what it means that the index knows only every
S-th block of a prefix. For operators it also owns two slower questions, each asked at most once a second however many
want to know: who stands in the index, and how large it is. Does not own the index nor the fall-back: with
`available=False` placement decides without prefixes. Nothing here raises.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum

from blockyard.proto.index.contract import (
    ErrorKind,
    Holder,
    Incarnation,
    IndexInfo,
    PrefixIndex,
    PrefixIndexError,
    WorkerId,
)
from blockyard.router.cluster.view import CachedDepth

REMEMBERED_LOOKUPS = 1000
LEAST_HOLDERS = 256
HOLDERS_A_WORKER = 4
"""Berths in the answer to a look-up: a worker has two in each life, and two lives until the earlier one's lease ends.
Whoever forges more costs hits, and no more time than these."""
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
    check_timeout_seconds: float = 1.0
    """For the question whether the index answers at all: a busy machine is late, and late is not away."""
    refresh_seconds: float = 1.0
    """Whoever asks how the index is, or how large, is told of nothing older than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupResult:
    depth_by_worker: dict[WorkerId, CachedDepth] = field(default_factory=dict)
    """What each worker holds; who holds nothing is not in it."""
    available: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexHealth:
    """What this router itself saw of the index."""

    answers: bool
    """Within a second, to somebody who is in no hurry."""
    in_time: bool
    """Look-ups are answered as soon as placement needs them; if not, it goes without."""
    standing: frozenset[tuple[WorkerId, Incarnation]]
    """Whose lease runs there; nobody's where it does not answer."""


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
        """Of the look-ups that are counted; probes are not."""
        self.num_lookups = 0
        self.num_skipped = 0
        """Requests that went without because the breaker was open."""
        self.durations_seconds = deque[float](maxlen=REMEMBERED_LOOKUPS)
        """Of the last look-ups that were answered."""
        self._standing: frozenset[tuple[WorkerId, Incarnation]] | None = None
        """None where the last check was not answered."""
        self._size: IndexInfo | None = None
        self._checked_at = self._counted_at = float("-inf")
        self._checking, self._counting = asyncio.Lock(), asyncio.Lock()

    @property
    def timeout_seconds(self) -> float:
        return self._config.timeout_seconds

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
            return LookupResult(available=await self._is_available())
        begin = self._clock()
        if not self._breaker.admits(begin):
            self.num_skipped += 1
            return LookupResult(available=False)
        self.num_lookups += 1
        reply = await self._ask(known, most=max(LEAST_HOLDERS, HOLDERS_A_WORKER * len(incarnations)))
        if isinstance(reply, ErrorKind):
            self.errors[reply] += 1
            return LookupResult(available=False)
        self.durations_seconds.append(self._clock() - begin)
        return LookupResult(depth_by_worker=_depths(reply, incarnations, stride_blocks), available=True)

    async def health(self) -> IndexHealth:
        """For operators, not for the placement path. All who ask within a second are told the same."""
        async with self._checking:
            if self._clock() - self._checked_at >= self._config.refresh_seconds:
                self._standing = await self._who_stands()
                self._checked_at = self._clock()
        answers = self._standing is not None
        # Without requests nobody else would close the breaker again.
        in_time = answers and await self._is_available()
        return IndexHealth(answers=answers, in_time=in_time, standing=self._standing or frozenset())

    async def info(self) -> IndexInfo | None:
        """How large the index is; None where it does not say. Not for the placement path. One count at a time is under
        way, and all who ask within a second share it."""
        async with self._counting:
            if self._clock() - self._counted_at >= self._config.refresh_seconds:
                self._size = await self._count()
                self._counted_at = self._clock()
                # A size and a state that are told together must be of the same moment.
                self._checked_at = float("-inf")
        return self._size

    async def _who_stands(self) -> frozenset[tuple[WorkerId, Incarnation]] | None:
        try:
            async with asyncio.timeout(self._config.check_timeout_seconds):
                records = await self._index.directory()
        except (PrefixIndexError, TimeoutError):
            return None
        return frozenset((record.worker_id, record.incarnation) for record in records)

    async def _count(self) -> IndexInfo | None:
        try:
            async with asyncio.timeout(INFO_SECONDS):
                return await self._index.info()
        except (PrefixIndexError, TimeoutError):
            return None

    async def _is_available(self) -> bool:
        """For who has no name to look up: where the breaker wants a probe, a name that nobody has is one."""
        if self._breaker.state is BreakerState.CLOSED:
            return True
        return self._breaker.admits(self._clock()) and not isinstance(
            await self._ask((_NOBODYS_NAME,), most=LEAST_HOLDERS), ErrorKind
        )

    async def _ask(self, names: Sequence[bytes], *, most: int) -> list[Holder] | ErrorKind:
        """The breaker has admitted it."""
        try:
            async with _patient_timeout(self._config.timeout_seconds):
                holders = await self._index.lookup(names, most=most)
        except (PrefixIndexError, TimeoutError) as error:
            self._breaker.failed(self._clock())
            return error.kind if isinstance(error, PrefixIndexError) else ErrorKind.TIMEOUT
        except asyncio.CancelledError:
            self._breaker.abandoned()
            raise
        self._breaker.succeeded()
        return holders


@asynccontextmanager
async def _patient_timeout(seconds: float) -> AsyncIterator[None]:
    """asyncio.timeout, but when the loop itself comes late to the end of it, what waits gets as much time again, and
    at most `seconds`: the answer may lie in the socket, unread."""
    loop = asyncio.get_running_loop()
    due = loop.time() + seconds
    async with asyncio.timeout(None) as limit:
        expiry = loop.call_at(
            due, lambda: limit.reschedule(min(2 * loop.time() - due, loop.time() + seconds))
        )
        try:
            yield
        finally:
            expiry.cancel()


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
