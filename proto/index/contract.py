"""The contract of the prefix index: which worker holds which leading blocks, as a hint.

Owns the words that both sides share (berth, batch, holder), the `PrefixIndex` protocol and its one exception. Imports
no Redis, so that the engine, the twin and the simulator can use it without. Does not own the storage: see redis.py (the
product) and twin.py (in memory).

The index is never the truth. A wrong entry costs hit rate and no more, because the worker checks its own cache again.
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
"""Most names in one batch. Redis serves no other client while it applies them, about a millisecond."""

MAX_PAGE_RECORDS = 256
"""Most records in one page. Parsing and verifying so many blocks a reader's event loop for a few milliseconds."""

MAX_LISTED = 2048
"""Most records that `directory` returns, and most berths that `lookup` reads by default."""

MAX_BERTHS = 65_535
"""The highest berth number, because berths are stored as u16. Number 0 is never assigned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """One incarnation of one worker, as it introduces itself to routers."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str
    """`host:port` of the engine session."""
    fingerprint: str
    """Hex digest of the model. A router refuses a worker whose model differs from its first worker's."""
    block_size: int
    proof: str = ""
    """Signature of the other fields by the cluster's secret (security/cluster_identity.py). Routers connect to no
    worker without it in its record, because anybody with write access to the index could have made up the record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Berth:
    """A worker's number in the index. Numbers are used again, and the random epoch tells this use from every other.

    A worker with a host cache has a second number, for the blocks that it holds in either memory. The pair has one
    epoch, one lease and one batch sequence, and every batch covers both. So both numbers live, lag and die together,
    and rules about berths need no second version. A name that is listed for the GPU is always listed for either memory
    too.
    """

    number: int
    """The number for names on the GPU."""
    epoch: int
    anywhere: int | None = None
    """The number for names on the GPU or in host memory. None if the worker asked for no second number or got none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The net change of a worker's cached blocks since its last batch. Applied in order, it never lists a block whose
    parent is not listed."""

    sequence: int
    """Counts up by one from FIRST_SEQUENCE under each berth."""
    removed: tuple[bytes, ...] = ()
    """Leaf-to-root: a child before its parent."""
    added: tuple[bytes, ...] = ()
    """Root-to-leaf: a parent before its child."""
    anywhere_removed: tuple[bytes, ...] = ()
    """`removed` for the berth's second number. Ignored if the berth has none."""
    anywhere_added: tuple[bytes, ...] = ()

    @property
    def num_names(self) -> int:
        return len(self.removed) + len(self.added) + len(self.anywhere_removed) + len(self.anywhere_added)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotCheck:
    """Names that the index must list for a worker, and names that it must not: a sample. The index contradicts the
    sample if a foreign client wrote to the index, or if the index lost a batch."""

    record: WorkerRecord
    held: tuple[bytes, ...] = ()
    """Names that were published under the berth's number."""
    gone: tuple[bytes, ...] = ()
    """Names that were published as removed."""
    anywhere_held: tuple[bytes, ...] = ()
    """`held` for the berth's second number. Ignored if the berth has none."""
    anywhere_gone: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A live worker that holds at least the first block of the chain looked up."""

    worker_id: WorkerId
    incarnation: Incarnation
    depth: int
    """Leading blocks on the GPU."""
    host_blocks: int = 0
    """Blocks that follow those in the chain and lie in host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryPage:
    """A part of the records in the index, ordered by berth."""

    records: Sequence[WorkerRecord]
    next_after: int
    """The berth after which the next page begins, or 0 on the last page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgeProgress:
    """The result of one slice of the purge, which removes dead berths from the index slice by slice."""

    active: bool
    """A purge is under way and needs another slice."""
    next_bucket: int
    changed_entries: int
    """Names from which this slice removed a dead berth, or damaged data."""
    freed: tuple[int, ...] = ()
    """Berth numbers returned to the free list, because the purge is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexInfo:
    """The size of the index. It is counted slice by slice, and the index may change in between."""

    names: int
    """Distinct names of all berths, dead or alive."""
    bytes: int
    """Bytes that the names take, estimated from a sample. 0 if the index cannot tell."""
    live_berths: int
    """Numbers with a running lease: two for a worker with a host cache."""
    dead_berths: int
    """Numbers whose lease has lapsed, or that were retired, and that are not purged yet."""


class ApplyResult(Enum):
    OK = "OK"
    DUPLICATE = "DUPLICATE"
    """Already applied: continue with the next sequence number."""
    GAP = "GAP"
    """An earlier batch is missing: take a new berth and republish everything."""
    UNKNOWN = "UNKNOWN"
    """This berth is not yours, or no longer: take a new berth and republish everything."""


class RenewResult(Enum):
    OK = "OK"
    UNKNOWN = "UNKNOWN"
    DAMAGED = "DAMAGED"
    """The lease is extended, but the index contradicts what was published: take a new berth and republish
    everything."""
    FULL = "FULL"
    """The lease is extended, but the index has no memory for new names."""


class ErrorKind(Enum):
    """The reason why the index could not answer."""

    TIMEOUT = "timeout"
    CONNECTION = "connection"
    LOADING = "loading"
    DENIED = "denied"
    FULL = "full"
    NO_LEASE = "no_lease"
    """No worker has a running lease, so the index does not tell what workers cache."""
    CLUSTER_MODE = "cluster_mode"
    READ_ONLY = "read_only"
    BERTHS_EXHAUSTED = "berths_exhausted"
    DAMAGED = "damaged"
    """A key of the index has another Redis type. The next registration deletes it."""
    REPLY = "reply"


class PrefixIndexError(Exception):
    """The index did not do what was asked. No request may fail because of it."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(f"{kind.value}: {message}")
        self.kind = kind


class PrefixIndex(Protocol):
    """The operations of the index. Each takes one round trip, except `register`, `directory` and `info`. If the index
    fails, they raise PrefixIndexError and nothing else."""

    async def register(
        self, record: WorkerRecord, *, lease_seconds: float, has_host_cache: bool = False
    ) -> Berth:
        """Give a worker a fresh, empty berth. Raises PrefixIndexError if none is left.

        Retires an earlier berth of the same incarnation at once, so that a worker that registers again never stands in
        the index twice. Leaves other incarnations alone: an old process that registers again must not replace its
        successor, and routers can tell them apart.

        A worker with a host cache gets a second number, unless only one is left. Then the index lists only the blocks
        on its GPU.
        """
        ...

    async def apply(self, berth: Berth, batch: Batch) -> ApplyResult:
        """Apply a batch atomically: removals, then additions, under each of the berth's numbers.

        Raises PrefixIndexError of the kind FULL if the index has no memory for the additions. The removals are applied
        even so. Send the same batch again later.
        """
        ...

    async def renew(
        self,
        berth: Berth,
        *,
        lease_seconds: float,
        applied_sequence: int = 0,
        check: SpotCheck | None = None,
    ) -> RenewResult:
        """Let the berth's lease end `lease_seconds` from now.

        Returns UNKNOWN also if the index has lost a batch that it once confirmed. `applied_sequence` is the number of
        the last confirmed batch. So a fail-over to a stale replica shows before the next batch. Returns DAMAGED if the
        index contradicts `check`.
        """
        ...

    async def retire(self, berth: Berth) -> None:
        """End a berth's lease now, so that the next purge may remove it. An unknown berth is left alone."""
        ...

    async def lookup(
        self, names: Sequence[bytes], *, most: int = MAX_LISTED, expects_workers: bool = False
    ) -> Sequence[Holder]:
        """Return each live worker that holds the first block of the chain, with how many leading blocks it holds. At
        most `most` berths are read. Of more, any may be left out.

        `expects_workers`: raise PrefixIndexError of the kind NO_LEASE if no worker has renewed its lease in time.
        """
        ...

    async def directory(self) -> list[WorkerRecord]:
        """Return the incarnations with a running lease, MAX_LISTED at most. For one lease after a restart, it may list
        two incarnations of one worker. Takes one round trip for each page."""
        ...

    async def directory_page(self, after: int = 0) -> DirectoryPage:
        """Return the records of live berths above `after`: up to MAX_PAGE_RECORDS, fewer where they are long."""
        ...

    async def purge(self, *, slice_buckets: int = 64) -> PurgeProgress:
        """Advance the purge by one slice, and remove dead berths from the index.

        A berth is dead if it retired, or if its lease stayed lapsed for two leases while the index served without a
        break. Any number of processes may call this. They advance one shared purge, and each slice is atomic.
        """
        ...

    async def info(self) -> IndexInfo:
        """Return the size of the index, for operators. It reads the whole index, in slices short enough for other
        clients."""
        ...


Depths = dict[tuple[WorkerId, Incarnation], int]


def merge_tiers(on_gpu: Depths, anywhere: Depths) -> list[Holder]:
    """Join the depths found under first and under second numbers into holders. A worker without a second number counts
    no host blocks."""
    return [
        Holder(
            worker_id=worker_id,
            incarnation=incarnation,
            depth=(depth := on_gpu.get((worker_id, incarnation), 0)),
            host_blocks=max(anywhere.get((worker_id, incarnation), 0) - depth, 0),
        )
        for worker_id, incarnation in on_gpu | anywhere
    ]
