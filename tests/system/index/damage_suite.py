"""Damage to the index, by another writer or by updates lost after a confirmed write, is detected and repaired."""

import asyncio
import random

import pytest
from blockyard.proto.index.contract import (
    Batch,
    Berth,
    PrefixIndexError,
    RenewResult,
    SpotCheck,
)
from blockyard.proto.index.schema import bucket_of, pack_berths
from blockyard.worker.indexing.publisher import IndexPublisher
from blockyard.worker.indexing.state import PublisherConfig

from tests.unit.index.harness import RedisHarness, chain, purge_all, record

LEASE_SECONDS = 60.0
QUICK = PublisherConfig(
    lease_seconds=0.3,
    flush_seconds=0.002,
    purge_seconds=0.02,
    purge_slice_seconds=0.002,
    resync_jitter_seconds=0.005,
    first_backoff_seconds=0.005,
    max_backoff_seconds=0.02,
    damage_rest_seconds=0.0,
)
HELD = chain(300)


async def checked(harness: RedisHarness, berth: Berth) -> RenewResult:
    check = SpotCheck(record=record("a"), held=HELD)
    return await harness.index.renew(berth, lease_seconds=LEASE_SECONDS, applied_sequence=1, check=check)


@pytest.mark.parametrize(
    ("key", "field", "value"),
    [
        ("names", "1", b"x\0y"),
        ("identities", "a\0001", b"17"),
        ("berth:1", "address", b"elsewhere:1"),
        (f"b:{bucket_of(HELD[3]):03x}", HELD[3][1:8], pack_berths([2, 9])),
        (f"b:{bucket_of(HELD[3]):03x}", HELD[3][1:8], b"odd"),
    ],
)
async def test_a_value_overwritten_is_damage(
    key: str, field: str | bytes, value: bytes, redis_harness: RedisHarness
) -> None:
    berth = await redis_harness.index.register(record("a"), lease_seconds=LEASE_SECONDS)
    await redis_harness.index.apply(berth, Batch(sequence=1, added=HELD))
    assert await checked(redis_harness, berth) is RenewResult.OK
    await redis_harness.client.hset(redis_harness.prefix + key, field, value)
    assert await checked(redis_harness, berth) is RenewResult.DAMAGED


async def until_told(publisher: IndexPublisher) -> None:
    async with asyncio.timeout(10):
        while publisher.state().berth is None or publisher.state().num_pending:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


FIXED_KEYS = ("leases", "state", "names", "identities", "free", "condemned", "berth:1", "berth:2")


@pytest.mark.parametrize("rubbish", ["string", "list"])
@pytest.mark.parametrize("key", FIXED_KEYS)
async def test_a_key_of_another_type_is_made_anew(
    key: str, rubbish: str, redis_harness: RedisHarness
) -> None:
    """Whatever stands on it, a publisher comes back, and its index equals the truth."""
    client, index = redis_harness.client, redis_harness.index
    publisher = IndexPublisher(index, record("a"), config=QUICK)
    publisher.record(HELD, ())
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(publisher.run())
        await until_told(publisher)
        await client.delete(redis_harness.prefix + key)
        if rubbish == "string":
            await client.set(redis_harness.prefix + key, b"not of our making" * 1000)
        else:
            await redis_harness._value(client.rpush(redis_harness.prefix + key, b"x", b"7"))
        await until_whole(redis_harness, publisher)
        await publisher.close()


@pytest.mark.parametrize(
    ("key", "command", "arguments"),
    [
        ("state", "HSET", ("next", "many")),
        ("state", "HSET", ("next", "9" * 30)),
        ("state", "HSET", ("beat", "soon", "since", "then", "cursor", "here")),
        ("free", "SADD", ("x", "0", "-1", "1.5", "70000", "1")),
        ("leases", "ZADD", ("1e300", "x", "1e300", "70000", "5", "y")),
        ("identities", "HSET", ("a\0001", "x")),
        ("condemned", "SADD", ("x", "1")),
        ("berth:1", "HSET", ("sequence", "one", "lease", "long")),
        ("berth:1", "HSET", ("epoch", "0")),
        ("leases", "ZADD", ("-inf", "nan", "9e15", "inf")),
        ("names", "HSET", ("nan", "x")),
        ("identities", "HSET", ("a\0001", "nan")),
        ("state", "HSET", ("cursor", "nan")),
        ("state", "HSET", ("cursor", "1e300")),
        ("state", "HSET", ("cursor", "-1.5")),
        ("state", "HSET", ("next", "nan", "beat", "nan", "beat_lease", "nan", "since", "nan")),
    ],
)
async def test_a_value_that_is_not_of_our_making_stops_nobody(
    key: str, command: str, arguments: tuple[str, ...], redis_harness: RedisHarness
) -> None:
    publisher = IndexPublisher(redis_harness.index, record("a"), config=QUICK)
    publisher.record(HELD, ())
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(publisher.run())
        await until_told(publisher)
        await redis_harness.client.execute_command(command, redis_harness.prefix + key, *arguments)
        assert publisher.rebuild()
        await asyncio.sleep(0.05)
        await until_whole(redis_harness, publisher)
        await publisher.close()


@pytest.mark.parametrize("cursor", ["nan", "inf", "1e300", "-7", "0.5", "here"])
async def test_a_walk_comes_to_its_end_wherever_somebody_has_put_it(
    cursor: str, redis_harness: RedisHarness
) -> None:
    gone = await redis_harness.index.register(record("gone"), lease_seconds=LEASE_SECONDS)
    await redis_harness.index.retire(gone)
    await redis_harness.client.hset(
        f"{redis_harness.prefix}state", mapping={"cursor": cursor, "since": cursor}
    )
    await redis_harness.client.zadd(f"{redis_harness.prefix}leases", {"nan": 0})
    freed: set[int] = set()
    for _ in range(40):
        freed |= set((await redis_harness.index.purge(slice_buckets=512)).freed)
    assert gone.number in freed


async def until_whole(harness: RedisHarness, publisher: IndexPublisher) -> None:
    async with asyncio.timeout(20):
        while True:
            await asyncio.sleep(0.02)
            try:
                found = [(holder.worker_id, holder.depth) for holder in await harness.index.lookup(HELD)]
                named = [known.worker_id for known in await harness.index.directory()]
            except PrefixIndexError:
                continue
            state = publisher.state()
            if (found, named) == ([("a", len(HELD))], ["a"]) and state.berth and state.last_error is None:
                return


async def test_a_bucket_full_of_rubbish_is_whole_again_after_a_resync_and_a_purge(
    redis_harness: RedisHarness,
) -> None:
    client, prefix, chooser = redis_harness.client, redis_harness.prefix, random.Random(3)
    publisher = IndexPublisher(redis_harness.index, record("a"), config=QUICK)
    publisher.record(HELD, ())
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(publisher.run())
        await until_told(publisher)
        for name in HELD:
            rubbish = chooser.choice([b"odd", b"", pack_berths([1, 7])[::-1], chooser.randbytes(200_000)])
            await client.hset(f"{prefix}b:{bucket_of(name):03x}", name[1:8], rubbish)
        await until_whole(redis_harness, publisher)
        await publisher.close()
    for _ in range(2):
        # A walk that was under way knows nothing of the berth that was given up last.
        await purge_all(redis_harness.index)
    assert await redis_harness.num_entries() == 0


@pytest.mark.parametrize(
    "rubbish", [b"\x07\x00\x01\x00", b"\x01\x00\x01\x00", b"\x01\x00x", b"\x01\x00" * 65_536]
)
async def test_the_purge_leaves_no_value_of_another_make_though_a_live_berth_is_in_it(
    rubbish: bytes, redis_harness: RedisHarness
) -> None:
    """Its owner never told of it, and would never ask."""
    index, prefix = redis_harness.index, redis_harness.prefix
    alive = await index.register(record("alive"), lease_seconds=LEASE_SECONDS)
    await index.apply(alive, Batch(sequence=1, added=chain(3)))
    await index.retire(await index.register(record("gone"), lease_seconds=LEASE_SECONDS))
    assert alive.number == 1
    await redis_harness.client.hset(f"{prefix}b:fff", b"7 bytes", rubbish)
    await purge_all(index)
    assert await redis_harness.num_entries() == 3


async def test_a_lease_that_nobody_would_write_is_struck_out(redis_harness: RedisHarness) -> None:
    index, leases = redis_harness.index, f"{redis_harness.prefix}leases"
    alive = await index.register(record("alive"), lease_seconds=LEASE_SECONDS)
    await redis_harness.client.zadd(leases, {"4711": 9e15, "nobody": 9e15})
    await purge_all(index)
    for _ in range(4):
        await redis_harness.advance(0.9 * LEASE_SECONDS)
        await index.renew(alive, lease_seconds=LEASE_SECONDS)
    await purge_all(index)
    assert await redis_harness.client.zrange(leases, 0, -1) == [str(alive.number).encode()]


async def test_where_a_key_was_of_another_type_everything_is_walked_over(redis_harness: RedisHarness) -> None:
    client, prefix = redis_harness.client, redis_harness.prefix
    for key in ("names", "b:fff"):
        await client.set(prefix + key, "not of our making")
    await redis_harness.index.register(record("a"), lease_seconds=LEASE_SECONDS)
    await purge_all(redis_harness.index)
    assert not await client.exists(f"{prefix}b:fff")
