"""Several servers of the index behind the contract of one, for the suites of the single server.

Splits each call by the roots of its names, as workers and routers do, but in one call. Does not stand in for the
product's publishers and look-ups: see test_shards.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from blockyard.proto.index.contract import (
    MAX_LISTED,
    ApplyResult,
    Batch,
    Berth,
    DirectoryPage,
    Holder,
    IndexInfo,
    PrefixIndex,
    PurgeProgress,
    RenewResult,
    SpotCheck,
    WorkerRecord,
)
from blockyard.proto.index.shards import shard_of
from redis.asyncio import Redis

from tests.unit.index.harness import RedisHarness
from tests.unit.index.truth import ROOTS

Result = TypeVar("Result", ApplyResult, RenewResult)


class SplitIndex:
    """`roots` has the first name of each name's chain. Berths are those of the first server."""

    def __init__(self, shards: Sequence[PrefixIndex], roots: Mapping[bytes, bytes]) -> None:
        self._shards = shards
        self._roots = roots
        self._berths: dict[tuple[int, int], list[Berth]] = {}
        """Each server's berth, by number and epoch of the first server's."""
        self._numbers: list[dict[int, int]] = [{} for _ in shards]
        """Each server's number, by the first server's."""

    async def register(
        self, record: WorkerRecord, *, lease_seconds: float, has_host_cache: bool = False
    ) -> Berth:
        berths = [
            await shard.register(record, lease_seconds=lease_seconds, has_host_cache=has_host_cache)
            for shard in self._shards
        ]
        first = berths[0]
        self._berths[first.number, first.epoch] = berths
        for numbers, berth in zip(self._numbers, berths, strict=True):
            numbers[first.number] = berth.number
            if first.anywhere is not None and berth.anywhere is not None:
                numbers[first.anywhere] = berth.anywhere
        return first

    def _berth_on(self, shard: int, berth: Berth) -> Berth:
        numbers, known = self._numbers[shard], self._berths.get((berth.number, berth.epoch))
        return Berth(
            number=numbers[berth.number],
            epoch=known[shard].epoch if known is not None else berth.epoch,
            anywhere=None if berth.anywhere is None else numbers[berth.anywhere],
        )

    def _on(self, shard: int, names: Sequence[bytes]) -> tuple[bytes, ...]:
        return tuple(name for name in names if shard_of(self._roots[name], len(self._shards)) == shard)

    async def apply(self, berth: Berth, batch: Batch) -> ApplyResult:
        return _worst(
            [
                await index.apply(
                    self._berth_on(shard, berth),
                    Batch(
                        sequence=batch.sequence,
                        removed=self._on(shard, batch.removed),
                        added=self._on(shard, batch.added),
                        anywhere_removed=self._on(shard, batch.anywhere_removed),
                        anywhere_added=self._on(shard, batch.anywhere_added),
                    ),
                )
                for shard, index in enumerate(self._shards)
            ],
            (ApplyResult.UNKNOWN, ApplyResult.GAP, ApplyResult.DUPLICATE),
        )

    async def renew(
        self,
        berth: Berth,
        *,
        lease_seconds: float,
        applied_sequence: int = 0,
        check: SpotCheck | None = None,
    ) -> RenewResult:
        return _worst(
            [
                await index.renew(
                    self._berth_on(shard, berth),
                    lease_seconds=lease_seconds,
                    applied_sequence=applied_sequence,
                    check=None if check is None else self._check_on(shard, check),
                )
                for shard, index in enumerate(self._shards)
            ],
            (RenewResult.UNKNOWN, RenewResult.DAMAGED, RenewResult.FULL),
        )

    def _check_on(self, shard: int, check: SpotCheck) -> SpotCheck:
        return replace(
            check,
            held=self._on(shard, check.held),
            gone=self._on(shard, check.gone),
            anywhere_held=self._on(shard, check.anywhere_held),
            anywhere_gone=self._on(shard, check.anywhere_gone),
        )

    async def retire(self, berth: Berth) -> None:
        for shard, index in enumerate(self._shards):
            await index.retire(self._berth_on(shard, berth))

    async def lookup(
        self, names: Sequence[bytes], *, most: int = MAX_LISTED, expects_workers: bool = False
    ) -> Sequence[Holder]:
        root = self._roots[names[0]] if names else b""
        shard = self._shards[shard_of(root, len(self._shards))]
        return await shard.lookup(names, most=most, expects_workers=expects_workers)

    async def directory(self) -> list[WorkerRecord]:
        lists = [await shard.directory() for shard in self._shards]
        assert len({frozenset(records) for records in lists}) == 1
        return lists[0]

    async def directory_page(self, after: int = 0) -> DirectoryPage:
        return await self._shards[0].directory_page(after)

    async def purge(self, *, slice_buckets: int = 64) -> PurgeProgress:
        first, *others = [await shard.purge(slice_buckets=slice_buckets) for shard in self._shards]
        return replace(first, active=first.active or any(other.active for other in others))

    async def info(self) -> IndexInfo:
        sizes = [await shard.info() for shard in self._shards]
        return replace(
            sizes[0], names=sum(size.names for size in sizes), bytes=sum(size.bytes for size in sizes)
        )


def _worst(results: Sequence[Result], order: Sequence[Result]) -> Result:
    """Return the first of `order` that a server gave, or what all gave."""
    found = [result for result in order if result in results]
    assert found or len(set(results)) == 1
    return found[0] if found else results[0]


class ShardedHarness:
    """Several servers. A part in `shards` is the whole of one."""

    def __init__(self, clients: Sequence[Redis], *, cluster: str) -> None:
        self.shards = [
            RedisHarness(client, cluster=cluster, shard=shard) for shard, client in enumerate(clients)
        ]
        self.index = SplitIndex([shard.index for shard in self.shards], ROOTS)

    async def advance(self, seconds: float) -> None:
        for shard in self.shards:
            await shard.advance(seconds)

    async def flush(self) -> None:
        for shard in self.shards:
            await shard.flush()

    async def num_entries(self) -> int:
        return sum([await shard.num_entries() for shard in self.shards])

    def limited(self, max_berths: int) -> PrefixIndex:
        return SplitIndex([shard.limited(max_berths) for shard in self.shards], ROOTS)
