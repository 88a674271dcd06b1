"""A Redis that is out of memory: leases go on, and what is removed is removed."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from blockyard.deploy.machine.redis_server import start_private_redis
from blockyard.proto.index.contract import (
    Batch,
    ErrorKind,
    PrefixIndexError,
    RenewResult,
)
from blockyard.proto.index.redis import connect
from blockyard.proto.v1.cluster_pb2 import IndexState
from blockyard.worker.indexing.publisher import IndexPublisher
from blockyard.worker.indexing.report import index_message

from tests.redis_servers import each_server
from tests.unit.index.harness import RedisHarness, chain, record


@pytest.fixture(params=each_server())
async def full(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RedisHarness]:
    process = start_private_redis(tmp_path, executable=request.param)
    try:
        async with connect(process.url, timeout_seconds=5.0) as client:
            yield RedisHarness(client, cluster="full")
    finally:
        process.stop()


async def fill_memory(harness: RedisHarness) -> None:
    await harness.client.config_set("maxmemory", 1)


async def free_memory(harness: RedisHarness) -> None:
    await harness.client.config_set("maxmemory", 0)


async def test_where_memory_is_full_leases_go_on_and_blocks_leave(full: RedisHarness) -> None:
    index = full.index
    berth = await index.register(record("a"), lease_seconds=60)
    await index.apply(berth, Batch(sequence=1, added=chain(8)))
    await fill_memory(full)
    assert await index.renew(berth, lease_seconds=60) is RenewResult.FULL
    grows = Batch(sequence=2, removed=chain(8)[:3:-1], added=chain(9, "other"))
    for _ in range(2):
        with pytest.raises(PrefixIndexError) as caught:
            await index.apply(berth, grows)
        assert caught.value.kind is ErrorKind.FULL
    assert [holder.depth for holder in await index.lookup(chain(8))] == [4], "what was removed is removed"
    assert not await index.lookup(chain(9, "other"))
    await free_memory(full)
    await index.apply(berth, grows)
    assert [holder.depth for holder in await index.lookup(chain(9, "other"))] == [9]
    assert await index.renew(berth, lease_seconds=60, applied_sequence=2) is RenewResult.OK


async def test_a_batch_that_takes_no_more_than_it_gives_back_passes_a_full_redis(full: RedisHarness) -> None:
    index = full.index
    berth = await index.register(record("a"), lease_seconds=60)
    await index.apply(berth, Batch(sequence=1, added=chain(8)))
    await fill_memory(full)
    await index.apply(berth, Batch(sequence=2, removed=chain(8)[::-1], added=chain(8, "other")))
    assert [holder.depth for holder in await index.lookup(chain(8, "other"))] == [8]


async def test_a_full_redis_takes_registrations_and_is_purged(full: RedisHarness) -> None:
    index = full.index
    gone = await index.register(record("gone"), lease_seconds=60)
    await index.apply(gone, Batch(sequence=1, added=chain(8)))
    await fill_memory(full)
    await index.retire(gone)
    assert await index.register(record("new"), lease_seconds=60)
    while (await index.purge(slice_buckets=4096)).active:
        pass
    assert await full.num_entries() == 0


async def test_a_publisher_says_full_until_a_renewal_finds_memory(full: RedisHarness) -> None:
    now = 0.0
    publisher = IndexPublisher(full.index, record("a"), clock=lambda: now)
    for _ in range(2):  # register, purge
        await publisher._do_what_is_most_urgent()
    assert not index_message(publisher.state()).cut_off
    await fill_memory(full)
    now = 2.0
    await publisher._do_what_is_most_urgent()
    message = index_message(publisher.state())
    assert (message.cut_off, message.state) == (True, IndexState.INDEX_STATE_DEGRADED)
    assert message.state_reason == "is refused by Redis, which is out of memory (maxmemory)"
    await publisher._purge()
    assert index_message(publisher.state()).cut_off, "a purge takes no memory, so its success tells nothing"
    await free_memory(full)
    now = 4.0
    await publisher._do_what_is_most_urgent()
    assert not index_message(publisher.state()).cut_off
    await publisher.close()
