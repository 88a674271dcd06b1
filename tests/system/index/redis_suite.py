"""Behaviour that only a real Redis shows: garbage, refusals, errors, memory and latency."""

import random
import time
from pathlib import Path

import pytest
from blockyard.deploy.machine.redis_server import RedisProcess, start_private_redis
from blockyard.proto.index.contract import (
    MAX_BATCH_NAMES,
    MAX_BERTHS,
    ApplyResult,
    Batch,
    ErrorKind,
    Incarnation,
    PrefixIndexError,
    WorkerId,
)
from blockyard.proto.index.erase import erase
from blockyard.proto.index.redis import RedisPrefixIndex, connect
from blockyard.proto.index.schema import MAX_BISECTED_BLOCKS, bucket_of, key_prefix, pack_berths
from blockyard.router.dispatch.prefix_lookup import (
    BreakerState,
    LookupResult,
    PrefixLookup,
    PrefixLookupConfig,
)
from redis.asyncio import Redis

from tests.redis_servers import each_server
from tests.unit.index.harness import RedisHarness, chain, free_of, purge_all, record

BLOCKS_A_CHAIN = 450
MAX_BYTES_A_BLOCK = 40


async def fill(
    index: RedisPrefixIndex, worker_id: str, names: list[bytes], *, anywhere: list[bytes] | None = None
) -> None:
    """`anywhere` for a worker with a host cache."""
    berth = await index.register(record(worker_id), lease_seconds=600, has_host_cache=anywhere is not None)
    longest = max(len(names), len(anywhere or ()))
    for sequence, start in enumerate(range(0, longest, MAX_BATCH_NAMES), start=1):
        end = start + MAX_BATCH_NAMES
        batch = Batch(
            sequence=sequence,
            added=tuple(names[start:end]),
            anywhere_added=tuple((anywhere or [])[start:end]),
        )
        assert await index.apply(berth, batch) is ApplyResult.OK


async def test_bytes_a_block_stay_under_the_floor_also_after_a_purge(tmp_path: Path) -> None:
    process = start_private_redis(tmp_path)
    try:
        async with connect(process.url, timeout_seconds=10) as client:
            index = RedisPrefixIndex(client, "memory")
            names = [name for number in range(333) for name in chain(BLOCKS_A_CHAIN, f"chain-{number}")]
            empty_bytes = await used_bytes(client)
            await fill(index, "w0", names)
            before = (await used_bytes(client) - empty_bytes) / len(names)
            await client.config_resetstat()
            info = await index.info()
            slice_us = (await client.info("commandstats"))["cmdstat_evalsha"]["usec_per_call"]
            berth = await index.register(record("w1"), lease_seconds=600)
            for sequence, start in enumerate(range(0, len(names), MAX_BATCH_NAMES), start=1):
                added = tuple(names[start : start + MAX_BATCH_NAMES])
                await index.apply(berth, Batch(sequence=sequence, added=added))
            await index.retire(berth)
            await purge_all(index)
            after = (await used_bytes(client) - empty_bytes) / len(names)
    finally:
        process.stop()
    print(
        f"\n{len(names)} blocks, r=1: {before:.1f} B a block, {after:.1f} B after a purge of a second holder"
    )
    print(f"info(): {info.bytes / info.names:.1f} B a block, {slice_us} us of Redis a slice")
    assert info.names == len(names)
    assert info.bytes / info.names == pytest.approx(before, rel=0.3)
    assert slice_us < 10_000
    assert before <= MAX_BYTES_A_BLOCK
    assert after <= MAX_BYTES_A_BLOCK


async def used_bytes(client: Redis) -> int:
    return int((await client.info("memory"))["used_memory"])


@pytest.mark.parametrize("has_host_cache", [False, True])
@pytest.mark.parametrize("holders", [1, 8, 64])
async def test_lookup_of_a_long_chain_prints_its_latency(
    redis_harness: RedisHarness, holders: int, has_host_cache: bool
) -> None:
    """The assertion catches a loop over blocks, ten times slower, not a slow machine."""
    names = chain(BLOCKS_A_CHAIN)
    for number in range(holders):
        on_gpu = list(names if number == 0 else names[:375])
        anywhere = list(names[:420] if number else names) if has_host_cache else None
        await fill(redis_harness.index, f"w{number}", on_gpu, anywhere=anywhere)
    await redis_harness.client.config_resetstat()
    round_trips = []
    for _ in range(300):
        start = time.perf_counter()
        found = await redis_harness.index.lookup(names)
        round_trips.append(time.perf_counter() - start)
    assert sorted(holder.depth for holder in found) == [375] * (holders - 1) + [BLOCKS_A_CHAIN]
    in_host_memory = [45] * (holders - 1) if has_host_cache else [0] * (holders - 1)
    assert sorted(holder.host_blocks for holder in found) == [0, *in_host_memory]
    median_ms = sorted(round_trips)[150] * 1e3
    server_us = (await redis_harness.client.info("commandstats"))["cmdstat_evalsha"]["usec_per_call"]
    tiers = "two tiers" if has_host_cache else "one tier"
    print(
        f"\nlook-up of 450 blocks, {holders} holders, {tiers}: p50 {median_ms:.2f} ms, {server_us} us in Redis"
    )
    calls = (await redis_harness.client.info("commandstats"))["cmdstat_hget"]["calls"] / 300
    assert calls <= 30


async def test_depths_are_rounded_down_where_hundreds_of_holders_end_at_as_many_blocks(
    redis_harness: RedisHarness,
) -> None:
    names, held = chain(BLOCKS_A_CHAIN), {}
    for number in range(400):
        held[f"w{number}"] = depth = 1 + number * BLOCKS_A_CHAIN // 400
        await fill(redis_harness.index, f"w{number}", list(names[:depth]))
    await redis_harness.client.config_resetstat()
    found = {holder.worker_id: holder.depth for holder in await redis_harness.index.lookup(names)}
    stats = await redis_harness.client.info("commandstats")
    assert found.keys() == held.keys()
    assert all(held[worker_id] - 24 < depth <= held[worker_id] for worker_id, depth in found.items())
    assert stats["cmdstat_hget"]["calls"] <= MAX_BISECTED_BLOCKS + 12


async def test_a_look_up_reads_identities_again_only_after_a_registration(
    redis_harness: RedisHarness,
) -> None:
    index, names = redis_harness.index, chain(2)
    await fill(index, "a", list(names))
    await index.lookup(names)
    await redis_harness.client.config_resetstat()
    for _ in range(5):
        assert [holder.worker_id for holder in await index.lookup(names)] == ["a"]
    assert "cmdstat_hgetall" not in await redis_harness.client.info("commandstats")
    await fill(index, "b", list(names))
    assert {holder.worker_id for holder in await index.lookup(names)} == {"a", "b"}


async def test_garbage_never_raises_out_of_a_lookup(redis_harness: RedisHarness) -> None:
    client, prefix, names = redis_harness.client, redis_harness.prefix, chain(16)
    await fill(redis_harness.index, "a", list(names))
    seeded = random.Random(7)
    rubbish = [b"", b"x", b"xyz", pack_berths([9, 9000]), b"\xff" * 600]
    for name in names[1:]:
        await client.hset(f"{prefix}b:{bucket_of(name):03x}", name[1:8], seeded.choice(rubbish))
    await client.set(f"{prefix}b:{bucket_of(chain(1, 'x')[0]):03x}", "not a hash")
    assert {holder.depth for holder in await redis_harness.index.lookup(names)} <= set(range(1, 17))
    assert await redis_harness.index.lookup(chain(1, "x")) == []


async def test_keys_of_another_type_or_version_are_ignored(redis_harness: RedisHarness) -> None:
    client, prefix = redis_harness.client, redis_harness.prefix
    await client.hset(prefix.replace(":v1:", ":v0:") + "b:000", "field", "value")
    await fill(redis_harness.index, "a", list(chain(4)))
    await client.hset(f"{prefix}names", "1", "no separator")
    assert await redis_harness.index.lookup(chain(4)) == []
    await client.hset(f"{prefix}berth:1", "block_size", "sixteen")
    assert await redis_harness.index.directory() == []
    for key in ("names", "berth:1"):
        await client.set(f"{prefix}{key}", "not of our making")
    assert await redis_harness.index.lookup(chain(4)) == []
    assert await redis_harness.index.directory() == []


async def test_without_leases_the_index_is_damaged_and_not_empty(redis_harness: RedisHarness) -> None:
    await fill(redis_harness.index, "a", list(chain(4)))
    await redis_harness.client.set(f"{redis_harness.prefix}leases", "not of our making")
    assert await kind_of(redis_harness.index.lookup(chain(4))) is ErrorKind.DAMAGED
    assert await kind_of(redis_harness.index.directory()) is ErrorKind.DAMAGED


async def test_a_writer_replaces_garbage_in_its_way(redis_harness: RedisHarness) -> None:
    client, prefix, names = redis_harness.client, redis_harness.prefix, chain(3)
    for name in (names[0], names[2]):
        await client.set(f"{prefix}b:{bucket_of(name):03x}", "not a hash")
    await client.hset(f"{prefix}b:{bucket_of(names[1]):03x}", names[1][1:8], "odd")
    await fill(redis_harness.index, "a", list(names))
    assert [holder.depth for holder in await redis_harness.index.lookup(names)] == [3]


async def test_info_counts_no_garbage_and_no_bytes_where_redis_refuses_to_tell(
    redis_harness: RedisHarness,
) -> None:
    client, prefix = redis_harness.client, redis_harness.prefix
    await fill(redis_harness.index, "a", list(chain(20)))
    taken = {f"{bucket_of(name):03x}" for name in chain(20)}
    free = next(f"{number:03x}" for number in range(4096) if f"{number:03x}" not in taken)
    await client.set(f"{prefix}b:{free}", "not a hash")
    assert (await redis_harness.index.info()).names == 20
    await client.acl_setuser(
        "frugal", enabled=True, nopass=True, keys="*", categories=["+@all"], commands=["-memory"]
    )
    port = client.connection_pool.connection_kwargs["port"]
    async with connect(f"redis://frugal:any@127.0.0.1:{port}", timeout_seconds=2) as frugal:
        info = await RedisPrefixIndex(frugal, redis_harness.cluster).info()
    assert (info.names, info.bytes, info.live_berths) == (20, 0, 1)


async def test_the_purge_strikes_out_garbage_and_berths_nobody_knows(redis_harness: RedisHarness) -> None:
    client, prefix = redis_harness.client, redis_harness.prefix
    await fill(redis_harness.index, "a", list(chain(8)))
    gone = await redis_harness.index.register(record("gone"), lease_seconds=60)
    await redis_harness.index.retire(gone)
    await client.hset(f"{prefix}b:000", "a field too long", pack_berths([1]))
    await client.hset(f"{prefix}b:001", "7 bytes", pack_berths([4711]))
    await client.set(f"{prefix}b:fff", "not a hash")
    assert free_of(await purge_all(redis_harness.index)) == {gone.number}
    assert await redis_harness.num_entries() == 8
    assert not await client.exists(f"{prefix}b:fff")


async def test_a_worker_whose_lease_entry_vanished_is_unknown(redis_harness: RedisHarness) -> None:
    """The purge would strike out its blocks: it must learn that, rather than keep a berth full of holes."""
    berth = await redis_harness.index.register(record("a"), lease_seconds=60)
    await redis_harness.client.delete(f"{redis_harness.prefix}leases")
    assert await redis_harness.index.apply(berth, Batch(sequence=1)) is ApplyResult.UNKNOWN


async def test_the_highest_berth_number_fits_its_two_bytes(redis_harness: RedisHarness) -> None:
    await redis_harness.client.hset(f"{redis_harness.prefix}state", "next", MAX_BERTHS - 1)
    await fill(redis_harness.index, "last", list(chain(5)))
    assert [holder.depth for holder in await redis_harness.index.lookup(chain(5))] == [5]
    with pytest.raises(PrefixIndexError, match="all 65535 berths are taken"):
        await redis_harness.index.register(record("one more"), lease_seconds=60)


async def test_buckets_stay_compact_at_two_hundred_holders(redis_harness: RedisHarness) -> None:
    for number in range(200):
        await fill(redis_harness.index, f"w{number}", list(chain(1)))
    key = f"{redis_harness.prefix}b:{bucket_of(chain(1)[0]):03x}"
    assert await redis_harness.client.object("encoding", key) in (b"ziplist", b"listpack")
    assert len(await redis_harness.index.lookup(chain(1))) == 200


@pytest.mark.parametrize("executable", each_server())
async def test_each_refusal_of_redis_has_its_own_kind(executable: Path, tmp_path: Path) -> None:
    process = start_private_redis(tmp_path, password="correct horse", executable=executable)
    try:
        async with connect(process.url, timeout_seconds=2) as client:
            index = RedisPrefixIndex(client, "kinds")
            berth = await index.register(record("a"), lease_seconds=60)
            await client.acl_setuser("reader", enabled=True, nopass=True, keys="*", commands=["+ping"])
            full = Batch(sequence=1, added=chain(3))
            await client.config_set("maxmemory", 1)
            assert await kind_of(index.apply(berth, full)) is ErrorKind.FULL
            await client.config_set("maxmemory", 0)
            await client.replicaof("127.0.0.1", "1")
            assert await kind_of(index.apply(berth, full)) is ErrorKind.READ_ONLY
            await client.replicaof("NO", "ONE")
            assert await index.apply(berth, full) is ApplyResult.OK
        for login in ("", ":wrong@", "reader:any@"):
            async with connect(f"redis://{login}127.0.0.1:{process.port}", timeout_seconds=2) as client:
                assert await kind_of(RedisPrefixIndex(client, "kinds").lookup(chain(1))) is ErrorKind.DENIED
    finally:
        process.stop()
    async with connect(process.url, timeout_seconds=2) as client:
        assert await kind_of(RedisPrefixIndex(client, "kinds").directory()) is ErrorKind.CONNECTION


async def kind_of(call: object) -> ErrorKind:
    with pytest.raises(PrefixIndexError) as caught:
        await call  # type: ignore[misc]
    assert "correct horse" not in str(caught.value)
    return caught.value.kind


@pytest.mark.parametrize("cluster", ["", "a b", "a:b", "{a}", "x" * 65])
def test_a_cluster_name_that_cannot_stand_in_a_key_is_refused(
    redis_process: RedisProcess, cluster: str
) -> None:
    with pytest.raises(ValueError, match="cluster name must match"):
        RedisPrefixIndex(connect(redis_process.url, timeout_seconds=1), cluster)


async def test_an_erased_index_is_gone_and_those_of_other_models_stay(redis_harness: RedisHarness) -> None:
    client, cluster = redis_harness.client, redis_harness.cluster
    for model in ("", "a/b", "other"):
        await fill(RedisPrefixIndex(client, cluster, model=model), "w0", chain(200, model or "first"))

    async def keys() -> set[bytes]:
        return {key async for key in client.scan_iter(f"blockyard:{cluster}:*", count=1000)}

    before = await keys()
    gone = {key for key in before if key.startswith(key_prefix(cluster, model="a/b").encode())}
    assert await erase(client, cluster, model="a/b") == len(gone) > 200 / MAX_BATCH_NAMES
    assert await keys() == before - gone
    assert await erase(client, cluster, model="a/b") == 0


async def test_a_worker_whose_second_lease_entry_vanished_is_unknown(redis_harness: RedisHarness) -> None:
    berth = await redis_harness.index.register(record("a"), lease_seconds=60, has_host_cache=True)
    await redis_harness.client.zrem(f"{redis_harness.prefix}leases", str(berth.anywhere))
    assert await redis_harness.index.apply(berth, Batch(sequence=2)) is ApplyResult.UNKNOWN


async def test_an_index_without_a_lease_is_unavailable_at_once_and_available_at_once(
    redis_harness: RedisHarness,
) -> None:
    lookup = PrefixLookup(redis_harness.index, config=PrefixLookupConfig(timeout_seconds=5.0))
    known = {WorkerId("a"): Incarnation("1")}
    for _ in range(5):
        assert await lookup.lookup(chain(3), known) == LookupResult(available=False)
    assert (lookup.breaker_state(), lookup.errors) == (BreakerState.CLOSED, {ErrorKind.NO_LEASE: 5})
    await redis_harness.index.register(record("a"), lease_seconds=60)
    assert await lookup.lookup(chain(3), known) == LookupResult(available=True)
    assert await lookup.lookup(chain(3), known, is_cut_off=True) == LookupResult(available=False)
    assert (lookup.num_lookups, lookup.num_skipped) == (6, 1)
