"""Prefix look-up: asks the prefix index for placement, within a short timeout.

Owns the timeout, the circuit breaker, the count of failures, and the stride: the index has every S-th block of a
prefix. Of an index on several servers, it asks the one that has the prompt's prefix (proto/index/shards.py). Each
server has its own breaker. For operators it also owns two slower queries: which incarnations are in the index, and its
size. Each runs at most once a second, however many ask. Does not own the index or the fallback: with `available=False`
placement decides without prefixes. No method raises an error of the index.
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
from blockyard.proto.index.holders import Holders
from blockyard.proto.index.shards import shard_of
from blockyard.router.cluster.depths import BerthDepths, CachedDepth

REMEMBERED_LOOKUPS = 1000
LEAST_HOLDERS = 256
HOLDERS_A_WORKER = 4
"""Berths (an incarnation's numbers in the index) read per worker in one look-up.

There are two per incarnation, and a worker has two incarnations until the older lease ends.

Forged berths beyond these cost cache hits, but no time.
"""
INFO_SECONDS = 2.0
"""Timeout for counting the whole index, which takes about 10 ms."""
_NOBODYS_NAME = bytes(16)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixLookupConfig:
    timeout_seconds: float = 0.04
    """Timeout of a look-up, extended only while the event loop is late. Computing a prefix worth finding takes
    longer."""
    failures_to_open: int = 3
    """Failures in a row that open the breaker. While it is open, requests do not even wait for the timeout."""
    open_seconds: float = 1.0
    """Time for which the open breaker admits no look-up."""
    check_timeout_seconds: float = 1.0
    """Timeout for the check whether the index answers at all. It is long, because a busy machine may be late."""
    refresh_seconds: float = 1.0
    """Greatest age of a reported state or size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupResult:
    depth_by_worker: Mapping[WorkerId, CachedDepth] = field(default_factory=dict)
    """Cached leading blocks of the prompt, by worker. Workers without any are left out."""
    available: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexHealth:
    """State of the index as this router sees it."""

    answers: bool
    """True if the index answers within `check_timeout_seconds`."""
    in_time: bool
    """True if it answers look-ups within `timeout_seconds`. If not, placement goes without it."""
    standing: frozenset[tuple[WorkerId, Incarnation]]
    """Incarnations with a valid lease in the index. Empty if it does not answer."""


class BreakerState(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    """One look-up runs as a probe. All others still go without the index."""


class CircuitBreaker:
    """Breaker of look-ups: after some failures in a row it admits none for a while. Pure: the caller gives the time."""

    def __init__(self, *, failures_to_open: int, open_seconds: float) -> None:
        self.state = BreakerState.CLOSED
        self._failures_to_open = failures_to_open
        self._open_seconds = open_seconds
        self._num_failures = 0
        self._reopen_at = 0.0

    def admits(self, now: float) -> bool:
        """Return True if a look-up may run. The caller must then call `succeeded`, `failed` or `abandoned`."""
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
        """Record that the look-up was cancelled. Its result is unknown, so the next look-up may be the probe."""
        if self.state is BreakerState.HALF_OPEN:
            self.state = BreakerState.OPEN


class _Shard:
    """One server of the index: its breaker, and the last check of it."""

    def __init__(self, index: PrefixIndex, config: PrefixLookupConfig, clock: Callable[[], float]) -> None:
        self.index = index
        self._config = config
        self._clock = clock
        self.breaker = CircuitBreaker(
            failures_to_open=config.failures_to_open, open_seconds=config.open_seconds
        )
        self._standing: frozenset[tuple[WorkerId, Incarnation]] | None = None
        """Incarnations with a valid lease at the last check. None if it had no answer."""
        self._checked_at = float("-inf")
        self._checking = asyncio.Lock()

    async def health(self) -> IndexHealth:
        async with self._checking:
            if self._clock() - self._checked_at >= self._config.refresh_seconds:
                self._standing = await self._who_stands()
                self._checked_at = self._clock()
        answers = self._standing is not None
        # Without requests nothing else would close the breaker again.
        in_time = answers and await self.is_available()
        return IndexHealth(answers=answers, in_time=in_time, standing=self._standing or frozenset())

    async def _who_stands(self) -> frozenset[tuple[WorkerId, Incarnation]] | None:
        try:
            async with asyncio.timeout(self._config.check_timeout_seconds):
                records = await self.index.directory()
        except (PrefixIndexError, TimeoutError):
            return None
        return frozenset((record.worker_id, record.incarnation) for record in records)

    async def count(self) -> IndexInfo | None:
        try:
            async with asyncio.timeout(INFO_SECONDS):
                return await self.index.info()
        except (PrefixIndexError, TimeoutError):
            return None
        finally:
            # A size and a state in one report must be of the same moment.
            self._checked_at = float("-inf")

    async def is_available(self) -> bool:
        """Return True if the index counts as answering in time. If a probe is due, look up a name that no block has."""
        if self.breaker.state is BreakerState.CLOSED:
            return True
        return self.breaker.admits(self._clock()) and not isinstance(
            await self.ask((_NOBODYS_NAME,), most=LEAST_HOLDERS), ErrorKind
        )

    async def ask(
        self, names: Sequence[bytes], *, most: int, expects_workers: bool = False
    ) -> Sequence[Holder] | ErrorKind:
        """Run a look-up that the breaker has admitted, and tell the breaker its result. Return an error as its kind."""
        try:
            async with patient_timeout(self._config.timeout_seconds):
                holders = await self.index.lookup(names, most=most, expects_workers=expects_workers)
        except (PrefixIndexError, TimeoutError) as error:
            kind = error.kind if isinstance(error, PrefixIndexError) else ErrorKind.TIMEOUT
            if kind is ErrorKind.NO_LEASE:  # an answer in time
                self.breaker.succeeded()
            else:
                self.breaker.failed(self._clock())
            return kind
        except asyncio.CancelledError:
            self.breaker.abandoned()
            raise
        self.breaker.succeeded()
        return holders


class PrefixLookup:
    """Look-ups of one router, shared by all its requests."""

    def __init__(
        self,
        *shards: PrefixIndex,
        config: PrefixLookupConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`shards`: the index on each of its servers, in the order of the setting."""
        self._config = config or PrefixLookupConfig()
        self._clock = clock
        self._shards = [_Shard(index, self._config, clock) for index in shards]
        self.errors: Counter[ErrorKind] = Counter()
        """Failures of requests' look-ups, by kind. Failures of checks without a request do not count."""
        self.num_lookups = 0
        """Look-ups of requests that the breaker admitted."""
        self.num_skipped = 0
        """Requests that went without the index because the breaker was open, or the workers were cut off from the
        index."""
        self.durations_seconds = deque[float](maxlen=REMEMBERED_LOOKUPS)
        """Durations of the last answered look-ups."""
        self._size: IndexInfo | None = None
        self._counted_at = float("-inf")
        self._counting = asyncio.Lock()

    @property
    def timeout_seconds(self) -> float:
        return self._config.timeout_seconds

    @property
    def num_shards(self) -> int:
        return len(self._shards)

    def breaker_state(self, shard: int = 0) -> BreakerState:
        return self._shards[shard].breaker.state

    def shard_of(self, names: Sequence[bytes], stride_blocks: int = 1) -> int:
        """Return the shard that knows the blocks of this chain. The root is the first block in the index, or the last
        block of a chain that is too short for the index."""
        root = names[min(stride_blocks, len(names)) - 1] if names else b""
        return shard_of(root, len(self._shards))

    async def lookup(
        self,
        names: Sequence[bytes],
        incarnations: Mapping[WorkerId, Incarnation],
        *,
        stride_blocks: int = 1,
        is_cut_off: bool = False,
    ) -> LookupResult:
        """Return how many leading blocks of `names` each worker has cached, rounded down to the stride of the index.

        `is_cut_off`: the chain's shard does not know what the workers cache, so it is not asked.

        Only `incarnations`, those that may get requests, count. Blocks of an ended incarnation are lost, and an
        incarnation that was replaced must get no requests.
        """
        shard = self._shards[self.shard_of(names, stride_blocks)]
        known = names[stride_blocks - 1 :: stride_blocks]
        if not known or not incarnations:
            return LookupResult(available=await shard.is_available())
        begin = self._clock()
        if is_cut_off or not shard.breaker.admits(begin):
            self.num_skipped += 1
            return LookupResult(available=False)
        self.num_lookups += 1
        most = max(LEAST_HOLDERS, HOLDERS_A_WORKER * len(incarnations))
        reply = await shard.ask(known, most=most, expects_workers=True)
        if isinstance(reply, ErrorKind):
            self.errors[reply] += 1
            return LookupResult(available=False)
        self.durations_seconds.append(self._clock() - begin)
        return LookupResult(depth_by_worker=_depths(reply, incarnations, stride_blocks), available=True)

    async def health(self, shard: int = 0) -> IndexHealth:
        """Return the state of a shard for operators, at most `refresh_seconds` old. Not for placement.

        If the breaker is due for a probe, run one.
        """
        return await self._shards[shard].health()

    async def info(self) -> IndexInfo | None:
        """Return the size of the index, or None if no server answers. Not for placement.

        One count runs at a time. Its result serves all callers for `refresh_seconds`.
        """
        async with self._counting:
            if self._clock() - self._counted_at >= self._config.refresh_seconds:
                self._size = _sum_of(await asyncio.gather(*(shard.count() for shard in self._shards)))
                self._counted_at = self._clock()
        return self._size


def _sum_of(sizes: Sequence[IndexInfo | None]) -> IndexInfo | None:
    """Return the size on all servers that answered, or None if none did."""
    known = [size for size in sizes if size is not None]
    if not known:
        return None
    return IndexInfo(
        names=sum(size.names for size in known),
        bytes=sum(size.bytes for size in known),
        live_berths=sum(size.live_berths for size in known),
        dead_berths=sum(size.dead_berths for size in known),
    )


@asynccontextmanager
async def patient_timeout(seconds: float) -> AsyncIterator[None]:
    """Apply a timeout, but extend it if the event loop itself is late: the answer may be in the socket, unread.

    The extension is as long as the delay of the loop, and at most `seconds`.
    """
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
) -> Mapping[WorkerId, CachedDepth]:
    if isinstance(holders, Holders):
        return BerthDepths(holders, incarnations, stride_blocks)
    return {
        holder.worker_id: CachedDepth(
            blocks=holder.depth * stride_blocks, host_blocks=holder.host_blocks * stride_blocks
        )
        for holder in holders
        if incarnations.get(holder.worker_id) == holder.incarnation
    }
