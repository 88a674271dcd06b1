"""Drives RedisPrefixIndex and TwinPrefixIndex alike: time travel, flush and a count of
stored entries.

Redis has no clock to inject. Moving every stored instant back by n seconds has the same effect as n seconds passing.
"""

from hashlib import sha256
from typing import Any, Protocol

from blockyard.proto.index.contract import (
    ErrorKind,
    Incarnation,
    PrefixIndex,
    PrefixIndexError,
    PurgeProgress,
    WorkerId,
    WorkerRecord,
)
from blockyard.proto.index.redis import RedisPrefixIndex
from blockyard.proto.index.schema import key_prefix
from blockyard.proto.index.twin import TwinPrefixIndex
from redis.asyncio import Redis

_MOVE_CLOCK = """
local prefix, milliseconds = KEYS[1], tonumber(ARGV[1])
for _, berth in ipairs(redis.call('ZRANGE', prefix .. 'leases', 0, -1)) do
  redis.call('ZINCRBY', prefix .. 'leases', -milliseconds, berth)
end
for _, field in ipairs({'beat', 'since'}) do
  if redis.call('HEXISTS', prefix .. 'state', field) == 1 then
    redis.call('HINCRBY', prefix .. 'state', field, -milliseconds)
  end
end
"""


class IndexHarness(Protocol):
    @property
    def index(self) -> PrefixIndex: ...
    async def advance(self, seconds: float) -> None: ...
    async def flush(self) -> None: ...
    async def num_entries(self) -> int: ...
    def limited(self, max_berths: int) -> PrefixIndex: ...


class TwinHarness:
    def __init__(self) -> None:
        self._now_seconds = 1000.0
        self.index = TwinPrefixIndex(lambda: self._now_seconds)

    async def advance(self, seconds: float) -> None:
        self._now_seconds += seconds

    async def flush(self) -> None:
        self.index.flush()

    async def num_entries(self) -> int:
        return sum(map(len, self.index._buckets))

    def limited(self, max_berths: int) -> PrefixIndex:
        return TwinPrefixIndex(lambda: self._now_seconds, max_berths=max_berths)


class RedisHarness:
    def __init__(self, client: Redis, *, cluster: str, shard: int = 0) -> None:
        self.client = client
        self.cluster = cluster
        self.prefix = key_prefix(cluster, shard)
        self._shard = shard
        self.index = RedisPrefixIndex(client, cluster, shard=shard)

    async def advance(self, seconds: float) -> None:
        await self._run(_MOVE_CLOCK, round(seconds * 1000))

    async def flush(self) -> None:
        """Delete this cluster's keys alone: other tests share the server."""
        keys = [key async for key in self.client.scan_iter(match=f"{self.prefix}*", count=1000)]
        if keys:
            await self.client.delete(*keys)

    async def num_entries(self) -> int:
        keys = [key async for key in self.client.scan_iter(match=f"{self.prefix}b:*", count=1000)]
        return sum([await self._value(self.client.hlen(key)) for key in keys])

    def limited(self, max_berths: int) -> PrefixIndex:
        return RedisPrefixIndex(self.client, self.cluster, shard=self._shard, max_berths=max_berths)

    async def _run(self, script: str, *arguments: int) -> Any:
        return await self._value(self.client.eval(script, 1, self.prefix, *arguments))

    async def _value(self, reply: Any) -> Any:
        return await reply


class UnreliableIndex:
    """Loses requests and replies on the way to a real index, as a bad network does. Asks `fate` before each
    call: "deliver", "lose_request" or "lose_reply"."""

    def __init__(self, index: PrefixIndex, fate: Any) -> None:
        self._index = index
        self._fate = fate

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any, **keywords: Any) -> Any:
            fate = self._fate(name)
            if fate == "lose_request":
                raise PrefixIndexError(ErrorKind.CONNECTION, "the request was lost")
            reply = await getattr(self._index, name)(*arguments, **keywords)
            if fate == "lose_reply":
                raise PrefixIndexError(ErrorKind.TIMEOUT, "the reply was lost")
            return reply

        return call


def record(worker_id: str = "w0", incarnation: str = "1") -> WorkerRecord:
    return WorkerRecord(
        worker_id=WorkerId(worker_id),
        incarnation=Incarnation(incarnation),
        address="127.0.0.1:7000",
        fingerprint="ab" * 16,
        block_size=16,
    )


def chain(length: int, label: str = "chain") -> tuple[bytes, ...]:
    """Block names, root first."""
    return tuple(sha256(f"{label}/{position}".encode()).digest()[:16] for position in range(length))


async def purge_all(index: PrefixIndex) -> list[PurgeProgress]:
    """Walks until nothing is under way any more; the slices it took."""
    slices = [await index.purge(slice_buckets=512)]
    while slices[-1].active:
        slices.append(await index.purge(slice_buckets=512))
    return slices


def free_of(slices: list[PurgeProgress]) -> set[int]:
    return {number for progress in slices for number in progress.freed}
