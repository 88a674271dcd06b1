"""The prefix index in memory, with a clock of the caller's: for simulation in virtual time, and for tests.

One conformance suite checks that it behaves as redis.py does. It is written plainly: its look-up goes through the chain
block by block and never relies on nested sets. Keeps nothing on disk.
"""

import itertools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blockyard.proto.index.contract import (
    MAX_BERTHS,
    MAX_LISTED,
    MAX_PAGE_RECORDS,
    ApplyResult,
    Batch,
    Berth,
    Depths,
    DirectoryPage,
    ErrorKind,
    Holder,
    IndexInfo,
    PrefixIndexError,
    PurgeProgress,
    RenewResult,
    SpotCheck,
    WorkerRecord,
    merge_tiers,
)
from blockyard.proto.index.schema import BERTH_BYTES, INDEXED_NAME_BYTES, NUM_BUCKETS, bucket_of


@dataclass(slots=True, kw_only=True)
class _BerthState:
    record: WorkerRecord
    is_anywhere: bool
    """The second number of a pair. `sequence` belongs to the first alone."""
    epoch: int | None
    """None once retired or condemned: nothing can be written under it any more."""
    sequence: int
    lease_seconds: float
    deadline: float


class TwinPrefixIndex:
    """PrefixIndex in memory. `available = False` makes every call fail as if Redis were down."""

    def __init__(self, clock: Callable[[], float], *, max_berths: int = MAX_BERTHS) -> None:
        self.available = True
        self._clock = clock
        self._max_berths = max_berths
        self.flush()

    def flush(self) -> None:
        """Forget everything, as after FLUSHALL or a restart of a Redis without persistence."""
        self._buckets: list[dict[bytes, set[int]]] = [{} for _ in range(NUM_BUCKETS)]
        self._berths: dict[int, _BerthState] = {}
        self._free: list[int] = []
        self._highest = 0
        self._last_beat = self._served_since = float("-inf")
        self._beat_lease_seconds = 0.0
        self._condemned: set[int] = set()
        self._cursor = 0

    async def register(
        self, record: WorkerRecord, *, lease_seconds: float, has_host_cache: bool = False
    ) -> Berth:
        self._check_available()
        for state in self._berths.values():
            if (state.record.worker_id, state.record.incarnation) == (record.worker_id, record.incarnation):
                self._retire(state)
        numbers = [self._take_number() for _ in range(2 if has_host_cache else 1)]
        number, anywhere = numbers[0], numbers[1] if has_host_cache else None
        if number is None:
            raise PrefixIndexError(
                ErrorKind.BERTHS_EXHAUSTED,
                f"all {self._max_berths} berths are taken: {record.worker_id} is not in the index",
            )
        berth = Berth(number=number, epoch=secrets.randbits(63), anywhere=anywhere)
        now = self._clock()
        for taken in _numbers(berth):
            self._berths[taken] = _BerthState(
                record=record,
                is_anywhere=taken != number,
                epoch=berth.epoch,
                sequence=0,
                lease_seconds=lease_seconds,
                deadline=now + lease_seconds,
            )
        self._beat(now, lease_seconds)
        return berth

    async def apply(self, berth: Berth, batch: Batch) -> ApplyResult:
        self._check_available()
        states = self._owned(berth)
        if not states:
            return ApplyResult.UNKNOWN
        if batch.sequence <= states[0].sequence:
            return ApplyResult.DUPLICATE
        if batch.sequence > states[0].sequence + 1:
            return ApplyResult.GAP
        self._change(berth.number, batch.removed, batch.added)
        if berth.anywhere is not None:
            self._change(berth.anywhere, batch.anywhere_removed, batch.anywhere_added)
        states[0].sequence = batch.sequence
        return ApplyResult.OK

    async def renew(
        self,
        berth: Berth,
        *,
        lease_seconds: float,
        applied_sequence: int = 0,
        check: SpotCheck | None = None,
    ) -> RenewResult:
        self._check_available()
        states = self._owned(berth)
        if not states or states[0].sequence < applied_sequence:
            return RenewResult.UNKNOWN
        now = self._clock()
        for state in states:
            state.lease_seconds = lease_seconds
            state.deadline = now + lease_seconds
        self._beat(now, lease_seconds)
        return RenewResult.OK if check is None or self._says(berth, check) else RenewResult.DAMAGED

    async def retire(self, berth: Berth) -> None:
        self._check_available()
        for state in self._owned(berth):
            self._retire(state)

    async def lookup(
        self, names: Sequence[bytes], *, most: int = MAX_LISTED, expects_workers: bool = False
    ) -> list[Holder]:
        self._check_available()
        if expects_workers and self._clock() - self._last_beat > self._beat_lease_seconds:
            raise PrefixIndexError(ErrorKind.NO_LEASE, "no worker has a running lease")
        holding, depths = self._live(), dict[int, int]()
        for depth, name in enumerate(names, start=1):
            holding &= self._holders(name)
            if not holding:
                break
            depths.update(dict.fromkeys(holding, depth))
        on_gpu: Depths = {}
        anywhere: Depths = {}
        for number, depth in itertools.islice(depths.items(), most):
            state = self._berths[number]
            tier = anywhere if state.is_anywhere else on_gpu
            tier[state.record.worker_id, state.record.incarnation] = depth
        return merge_tiers(on_gpu, anywhere)

    async def directory(self) -> list[WorkerRecord]:
        self._check_available()
        return [self._berths[number].record for number in self._workers()[:MAX_LISTED]]

    async def directory_page(self, after: int = 0) -> DirectoryPage:
        self._check_available()
        numbers = [number for number in self._workers() if number > after]
        page = numbers[:MAX_PAGE_RECORDS]
        records = [self._berths[number].record for number in page]
        return DirectoryPage(records=records, next_after=page[-1] if len(page) < len(numbers) else 0)

    async def purge(self, *, slice_buckets: int = 64) -> PurgeProgress:
        self._check_available()
        if not self._condemned:
            self._condemn()
        if not self._condemned:
            return PurgeProgress(active=False, next_bucket=0, changed_entries=0)
        stop, changed = min(self._cursor + slice_buckets, NUM_BUCKETS), 0
        for bucket in itertools.islice(self._buckets, self._cursor, stop):
            touched = [name for name, holders in bucket.items() if holders & self._condemned]
            changed += len(touched)
            for name in touched:
                self._strike(name, self._condemned)
        self._cursor = stop
        if stop < NUM_BUCKETS:
            return PurgeProgress(active=True, next_bucket=stop, changed_entries=changed)
        return PurgeProgress(active=False, next_bucket=0, changed_entries=changed, freed=self._release())

    async def info(self) -> IndexInfo:
        """Return the size of the index. It counts the bytes of names and berth numbers alone, without their
        containers."""
        self._check_available()
        holders = [held for bucket in self._buckets for held in bucket.values()]
        num_live = len(self._live())
        return IndexInfo(
            names=len(holders),
            bytes=sum(INDEXED_NAME_BYTES + BERTH_BYTES * len(held) for held in holders),
            live_berths=num_live,
            dead_berths=len(self._berths) - num_live,
        )

    def _check_available(self) -> None:
        if not self.available:
            raise PrefixIndexError(ErrorKind.CONNECTION, "the twin is unavailable")

    def _live(self) -> set[int]:
        now = self._clock()
        return {number for number, state in self._berths.items() if state.deadline > now}

    def _workers(self) -> list[int]:
        return sorted(number for number in self._live() if not self._berths[number].is_anywhere)

    def _owned(self, berth: Berth) -> list[_BerthState]:
        """Return the states of the berth's numbers if the index knows all of them under its epoch, else an empty
        list."""
        states = [state for number in _numbers(berth) if (state := self._berths.get(number)) is not None]
        owns_all = len(states) == len(_numbers(berth)) and all(state.epoch == berth.epoch for state in states)
        return states if owns_all else []

    def _change(self, number: int, removed: Sequence[bytes], added: Sequence[bytes]) -> None:
        for name in removed:
            self._strike(name[:INDEXED_NAME_BYTES], {number})
        for name in added:
            self._buckets[bucket_of(name)].setdefault(name[:INDEXED_NAME_BYTES], set()).add(number)

    def _says(self, berth: Berth, check: SpotCheck) -> bool:
        expected = [(berth.number, check.held, check.gone)]
        if berth.anywhere is not None:
            expected.append((berth.anywhere, check.anywhere_held, check.anywhere_gone))
        return all(
            all(number in self._holders(name) for name in held)
            and not any(number in self._holders(name) for name in gone)
            for number, held, gone in expected
        )

    def _holders(self, name: bytes) -> set[int]:
        return self._buckets[bucket_of(name)].get(name[:INDEXED_NAME_BYTES], set())

    def _take_number(self) -> int | None:
        if self._free:
            return self._free.pop()
        if self._highest >= self._max_berths:
            return None
        self._highest += 1
        return self._highest

    def _beat(self, now: float, lease_seconds: float) -> None:
        if abs(now - self._last_beat) > lease_seconds:
            self._served_since = now
        if self._last_beat - now > lease_seconds:
            for state in self._berths.values():
                state.deadline = min(state.deadline, now + lease_seconds)
        self._last_beat, self._beat_lease_seconds = now, lease_seconds

    def _retire(self, state: _BerthState) -> None:
        state.epoch, state.deadline = None, float("-inf")

    def _strike(self, name: bytes, numbers: set[int]) -> None:
        bucket = self._buckets[bucket_of(name)]
        left = bucket.get(name, set()) - numbers
        if left:
            bucket[name] = left
        else:
            bucket.pop(name, None)

    def _condemn(self) -> None:
        now = self._clock()
        serving = now - self._last_beat <= self._beat_lease_seconds
        for number, state in self._berths.items():
            lapsed_seconds = now - max(state.deadline, self._served_since)
            is_dead = state.deadline <= now and serving and lapsed_seconds >= 2 * state.lease_seconds
            if state.epoch is None or is_dead:
                self._retire(state)
                self._condemned.add(number)

    def _release(self) -> tuple[int, ...]:
        freed = tuple(self._condemned)
        for number in freed:
            del self._berths[number]
        self._free.extend(freed)
        self._condemned, self._cursor = set(), 0
        return freed


def _numbers(berth: Berth) -> tuple[int, ...]:
    return (berth.number,) if berth.anywhere is None else (berth.number, berth.anywhere)
