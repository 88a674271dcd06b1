"""The contract of the prefix index: which worker holds which leading blocks, as a hint.

Owns the words both sides share (berth, batch, holder), the `PrefixIndex` protocol and its one exception.
It imports no Redis: the engine, the twin and the simulator use it where Redis is not installed.
Does not own the storage: see redis.py (the product) and twin.py (in memory).

The index is never the truth. It may cost or win hit rate; the worker looks again in its own cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol

WorkerId = NewType("WorkerId", str)
Incarnation = NewType("Incarnation", str)

FIRST_SEQUENCE = 1
"""The sequence number of the first batch applied under a fresh berth."""

MAX_BATCH_NAMES = 512
"""More names in one script would hold up every other client of Redis for about a millisecond."""

MAX_PAGE_RECORDS = 256
"""To parse and to verify a page takes a few milliseconds, for which a reader's event loop stands still."""

MAX_LISTED = 2048
"""Records that `directory` returns, and berths that `lookup` returns unless it is told otherwise."""

MAX_BERTHS = 65_535
"""Berths are stored as u16; 0 is never given out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """One life of one worker, as it introduces itself to routers."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str
    """`host:port` of the engine session."""
    fingerprint: str
    """Hex digest of the model; routers refuse a worker whose fingerprint differs."""
    block_size: int
    proof: str = ""
    """Signature of the rest by the cluster's secret (security/cluster_identity.py). Routers connect to no
    worker whose record lacks it: anybody who may write to the index could have made one up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Berth:
    """A worker's place in the index. The random epoch tells this use of the number from every other.

    A worker that keeps blocks in host memory too has a second number, for what it holds anywhere. The pair has one
    epoch, one lease and one count of batches, and every batch tells of both: so they live, fall behind and die
    together, no rule about berths needs a second version, and at no moment is a name on the GPU but not anywhere.
    """

    number: int
    """For names on the GPU."""
    epoch: int
    anywhere: int | None = None
    """For names on the GPU or in host memory; None for a worker that asked for no second number or got none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The net difference of two prefix-closed caches, in an order that keeps every state between closed."""

    sequence: int
    """Counts up by one from FIRST_SEQUENCE under each berth."""
    removed: tuple[bytes, ...] = ()
    """Leaf-to-root: a child before its parent."""
    added: tuple[bytes, ...] = ()
    """Root-to-leaf: a parent before its child."""
    anywhere_removed: tuple[bytes, ...] = ()
    """The same for the berth's second number; without one it is ignored."""
    anywhere_added: tuple[bytes, ...] = ()

    @property
    def num_names(self) -> int:
        return len(self.removed) + len(self.added) + len(self.anywhere_removed) + len(self.anywhere_added)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotCheck:
    """Some of what the index must say of a worker if nobody but its clients has written to it and no news was lost."""

    record: WorkerRecord
    held: tuple[bytes, ...] = ()
    """Names that the index was told of under the berth's number."""
    gone: tuple[bytes, ...] = ()
    """Names that it was told are removed."""
    anywhere_held: tuple[bytes, ...] = ()
    """The same for the berth's second number; without one it is ignored."""
    anywhere_gone: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A live worker that holds at least the first block of the chain looked up."""

    worker_id: WorkerId
    incarnation: Incarnation
    depth: int
    """Leading blocks on the GPU."""
    host_blocks: int = 0
    """Blocks that follow those and are in host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryPage:
    """Some of the records in the index, ordered by berth."""

    records: Sequence[WorkerRecord]
    next_after: int
    """The berth after which the next page begins; 0 on the last page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgeProgress:
    """What one slice of the janitor's walk did."""

    active: bool
    """A walk is under way and wants another slice."""
    next_bucket: int
    changed_entries: int
    """Names from which a dead berth, or garbage, was struck in this slice."""
    freed: tuple[int, ...] = ()
    """Berth numbers returned to the free list because the walk is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexInfo:
    """How large the index is. Counted in slices, between which it changes."""

    names: int
    """Distinct names held by anybody, dead or alive."""
    bytes: int
    """What those take, estimated from a sample; 0 where the index cannot tell."""
    live_berths: int
    """Numbers whose lease runs: two for a worker with a host cache."""
    dead_berths: int
    """Numbers lapsed or retired that are not purged yet."""


class ApplyResult(Enum):
    OK = "OK"
    DUPLICATE = "DUPLICATE"
    """Already applied: go on with the next sequence number."""
    GAP = "GAP"
    """A batch before this one is missing: take a new berth and republish everything."""
    UNKNOWN = "UNKNOWN"
    """This berth is not, or no longer, yours: take a new berth and republish everything."""


class RenewResult(Enum):
    OK = "OK"
    UNKNOWN = "UNKNOWN"
    DAMAGED = "DAMAGED"
    """The lease is extended, but the index does not say what it was told: take a new berth and republish everything."""


class ErrorKind(Enum):
    """Why the index could not answer; the label of an error counter."""

    TIMEOUT = "timeout"
    CONNECTION = "connection"
    LOADING = "loading"
    DENIED = "denied"
    FULL = "full"
    READ_ONLY = "read_only"
    BERTHS_EXHAUSTED = "berths_exhausted"
    DAMAGED = "damaged"
    """A key of ours is of another type: a registration makes it anew."""
    REPLY = "reply"


class PrefixIndexError(Exception):
    """The index did not do what was asked. Nobody may fail a request because of it."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(f"{kind.value}: {message}")
        self.kind = kind


class PrefixIndex(Protocol):
    """Every method but `info` and `directory` is one round trip. All raise PrefixIndexError alone."""

    async def register(
        self, record: WorkerRecord, *, lease_seconds: float, has_host_cache: bool = False
    ) -> Berth:
        """Take a fresh, empty berth. An earlier berth of the same incarnation is retired at once, so that
        a worker that registers anew never stands in the index twice. Other incarnations are left alone:
        a zombie that registers again must not oust its successor; routers tell them apart.

        With a host cache it has a second number, unless only one is left: then the worker's GPU is in the index."""
        ...

    async def apply(self, berth: Berth, batch: Batch) -> ApplyResult:
        """Apply removals, then additions, under both numbers, atomically."""
        ...

    async def renew(
        self,
        berth: Berth,
        *,
        lease_seconds: float,
        applied_sequence: int = 0,
        check: SpotCheck | None = None,
    ) -> RenewResult:
        """Extend the lease. UNKNOWN also where the index has forgotten a batch that it once confirmed
        (`applied_sequence` is the last one): a fail-over to a stale replica is seen without waiting
        for the next batch. DAMAGED where it contradicts `check`."""
        ...

    async def retire(self, berth: Berth) -> None:
        """Say goodbye: not live from now on, purgeable at once. A berth that is unknown is left alone."""
        ...

    async def lookup(self, names: Sequence[bytes], *, most: int = MAX_LISTED) -> list[Holder]:
        """Each live worker that holds the first block of the chain, with the depths it holds. Of more than `most`
        berths it leaves out some, no matter which."""
        ...

    async def directory(self) -> list[WorkerRecord]:
        """The incarnations whose lease runs, MAX_LISTED at most. Two of one worker may stand side by side for one
        lease. One round trip for each page."""
        ...

    async def directory_page(self, after: int = 0) -> DirectoryPage:
        """Returns records with a berth above `after`: up to MAX_PAGE_RECORDS, fewer where they are long."""
        ...

    async def purge(self, *, slice_buckets: int = 64) -> PurgeProgress:
        """Walk one more slice of the index and strike out the dead.

        Dead is who retired, or whose lease stayed lapsed for two leases of unbroken service of the index.
        Any number of janitors may call it: they advance one shared walk, a slice being atomic."""
        ...

    async def info(self) -> IndexInfo:
        """How large the index is. For operators: it walks over all of it, in slices that hold nobody up."""
        ...


Depths = dict[tuple[WorkerId, Incarnation], int]


def merge_tiers(on_gpu: Depths, anywhere: Depths) -> list[Holder]:
    """Holders from what was found under first and second numbers. One that has no second number holds nothing more
    anywhere than on its GPU."""
    return [
        Holder(
            worker_id=worker_id,
            incarnation=incarnation,
            depth=(depth := on_gpu.get((worker_id, incarnation), 0)),
            host_blocks=max(anywhere.get((worker_id, incarnation), 0) - depth, 0),
        )
        for worker_id, incarnation in on_gpu | anywhere
    ]
