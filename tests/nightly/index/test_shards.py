"""Several servers that share the prefixes, of which some are dark or in another order."""

import contextlib
import uuid
from collections.abc import AsyncIterator, Sequence

import pytest
from blockyard.deploy.machine.redis_server import RedisProcess
from blockyard.proto.index.contract import ErrorKind
from blockyard.proto.index.redis import RedisPrefixIndex, connect
from blockyard.router.dispatch.prefix_lookup import (
    PrefixLookup,
)

from tests.unit.index.harness import chain
from tests.unit.index.sharded_traffic import KNOWN, PATIENT, TrueWorker, check_random_traffic, running


@pytest.mark.parametrize(("stride_blocks", "seed"), [(1, 1), (2, 2)])
async def test_servers_say_each_true_depth_while_one_is_dark(
    shards: list[RedisProcess], stride_blocks: int, seed: int
) -> None:
    async with indexes_on([process.url for process in shards]) as indexes:
        await check_random_traffic(indexes, stride_blocks, seed)


@contextlib.asynccontextmanager
async def indexes_on(urls: Sequence[str]) -> AsyncIterator[list[RedisPrefixIndex]]:
    cluster = f"shards-{uuid.uuid4().hex}"
    async with contextlib.AsyncExitStack() as stack:
        yield [
            RedisPrefixIndex(
                await stack.enter_async_context(connect(url, timeout_seconds=1.0)), cluster, shard=shard
            )
            for shard, url in enumerate(urls)
        ]


async def test_servers_in_another_order_say_that_no_worker_is_there(shards: list[RedisProcess]) -> None:
    urls = [process.url for process in shards]
    async with indexes_on(urls) as indexes:
        moved = [
            RedisPrefixIndex(index._client, index._prefix.split(":")[1], shard=shard)
            for shard, index in enumerate([*indexes[1:], indexes[0]])
        ]
        worker = TrueWorker(indexes, 1, host_cache_blocks=0)
        async with running(worker.publisher):
            await worker.until_exact(range(len(shards)))
            lookup = PrefixLookup(*moved, config=PATIENT)
            for number in range(20):
                await lookup.lookup(chain(3, f"chain {number}"), KNOWN)
            assert lookup.errors == {ErrorKind.NO_LEASE: 20}
            assert not any([(await lookup.health(shard)).standing for shard in range(len(shards))])
