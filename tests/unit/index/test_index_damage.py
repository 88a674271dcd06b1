"""Damage to the index, by another writer or by updates lost after a confirmed write, is detected and repaired."""

import asyncio
import random
import time
from typing import Any

import pytest
from blockyard.proto.index.contract import (
    ApplyResult,
    Batch,
    Berth,
    ErrorKind,
    PrefixIndexError,
    RenewResult,
    SpotCheck,
)
from blockyard.proto.index.redis import error_kind
from blockyard.proto.index.schema import bucket_of, pack_berths
from blockyard.proto.index.twin import TwinPrefixIndex
from blockyard.worker.indexing.net_difference import NetDifference
from blockyard.worker.indexing.publisher import IndexPublisher
from blockyard.worker.indexing.report import index_message
from blockyard.worker.indexing.spot_checks import MAX_GONE, MAX_HELD, SpotChecks
from blockyard.worker.indexing.state import PublisherConfig
from redis.exceptions import ResponseError

from .harness import IndexHarness, RedisHarness, chain, purge_all, record

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


async def renewed(harness: IndexHarness, berth: Berth, **names: tuple[bytes, ...]) -> RenewResult:
    return await harness.index.renew(
        berth, lease_seconds=LEASE_SECONDS, applied_sequence=1, check=SpotCheck(record=record("a"), **names)
    )


@pytest.mark.parametrize("has_host_cache", [False, True])
async def test_a_check_agrees_with_what_was_told_and_with_nothing_else(
    has_host_cache: bool, harness: IndexHarness
) -> None:
    names, others = chain(6), chain(2, "others")
    berth = await harness.index.register(
        record("a"), lease_seconds=LEASE_SECONDS, has_host_cache=has_host_cache
    )
    anywhere = names if has_host_cache else ()
    batch = Batch(sequence=1, added=names[:4], anywhere_added=anywhere)
    assert await harness.index.apply(berth, batch) is ApplyResult.OK
    assert await renewed(harness, berth) is RenewResult.OK
    assert (
        await renewed(harness, berth, held=names[:4], gone=others, anywhere_held=anywhere) is RenewResult.OK
    )
    assert await renewed(harness, berth, held=names) is RenewResult.DAMAGED
    assert await renewed(harness, berth, gone=names[3:]) is RenewResult.DAMAGED
    wrong_anywhere = RenewResult.DAMAGED if has_host_cache else RenewResult.OK
    assert await renewed(harness, berth, anywhere_held=others) is wrong_anywhere
    assert await renewed(harness, berth, anywhere_gone=names) is wrong_anywhere


async def test_a_check_that_fails_still_extends_the_lease(harness: IndexHarness) -> None:
    berth = await harness.index.register(record("a"), lease_seconds=LEASE_SECONDS)
    await harness.index.apply(berth, Batch(sequence=1, added=chain(2)))
    await harness.advance(0.9 * LEASE_SECONDS)
    assert await renewed(harness, berth, held=chain(3)) is RenewResult.DAMAGED
    await harness.advance(0.9 * LEASE_SECONDS)
    assert [holder.depth for holder in await harness.index.lookup(chain(3))] == [2]


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
    assert await renewed(redis_harness, berth, held=HELD) is RenewResult.OK
    await redis_harness.client.hset(redis_harness.prefix + key, field, value)
    assert await renewed(redis_harness, berth, held=HELD) is RenewResult.DAMAGED


def test_checks_go_round_all_that_the_index_was_told() -> None:
    difference, checks = NetDifference(), SpotChecks()
    difference.record(chain(2 * MAX_HELD + 50), ())
    assert checks.take(difference) == ((), ()), "nothing is told yet"
    checks.restart()
    difference.take_added(2 * MAX_HELD)
    asked = [checks.take(difference)[0] for _ in range(3)]
    assert [name for names in asked for name in names] == list(chain(2 * MAX_HELD))
    assert checks.take(difference)[0] == asked[0]


def test_what_was_told_as_removed_is_asked_for_once_unless_it_came_back() -> None:
    difference, checks, names = NetDifference(), SpotChecks(), chain(MAX_GONE + 2)
    checks.removed(names)
    difference.record(names[:1], ())
    assert checks.take(difference) == ((), names[1:MAX_GONE])
    assert checks.take(difference) == ((), names[MAX_GONE:])
    assert checks.take(difference) == ((), ())


class _ForgetfulIndex(TwinPrefixIndex):
    """Confirms a batch and keeps only a part of it."""

    def __init__(self, forgotten: str) -> None:
        super().__init__(time.monotonic)
        self.forgotten = forgotten

    async def apply(self, berth: Berth, batch: Batch) -> ApplyResult:
        names: dict[str, Any] = {part: getattr(batch, part) for part in ("added", "removed")}
        if names.get(self.forgotten):
            names[self.forgotten], self.forgotten = (), ""
        return await super().apply(berth, Batch(sequence=batch.sequence, **names))


@pytest.mark.parametrize("forgotten", ["added", "removed"])
async def test_news_lost_behind_a_confirmed_batch_are_told_again(forgotten: str) -> None:
    index = _ForgetfulIndex(forgotten)
    publisher = IndexPublisher(index, record("a"), config=QUICK)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(publisher.run())
        publisher.record(chain(9), ())
        await until_told(publisher)
        publisher.record((), tuple(reversed(chain(9)[5:])))
        async with asyncio.timeout(10):
            while [holder.depth for holder in await index.lookup(chain(9))] != [5]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert index_message(publisher.state()).damages == 1
        await publisher.close()


async def until_told(publisher: IndexPublisher) -> None:
    async with asyncio.timeout(10):
        while publisher.state().berth is None or publisher.state().num_pending:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_damage_that_comes_again_and_again_is_not_answered_each_time() -> None:
    index = TwinPrefixIndex(time.monotonic)
    config = PublisherConfig(lease_seconds=0.06, damage_rest_seconds=60.0, resync_jitter_seconds=0.0)
    publisher = IndexPublisher(index, record("a"), config=config)
    publisher.record(chain(9), ())
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(publisher.run())
        await until_told(publisher)
        for _ in range(20):
            for bucket in index._buckets:
                bucket.clear()
            await asyncio.sleep(0.02)
        assert publisher.state().num_damages == 1
        await publisher.close()


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


def test_a_wrong_type_has_a_kind_of_its_own() -> None:
    text = "@user_script:8: WRONGTYPE Operation against a key holding the wrong kind of value"
    assert error_kind(ResponseError(text)) is ErrorKind.DAMAGED


async def test_a_clock_set_back_keeps_no_dead_worker_alive(harness: IndexHarness) -> None:
    alive = await harness.index.register(record("alive"), lease_seconds=LEASE_SECONDS)
    await harness.index.apply(alive, Batch(sequence=1, added=chain(3)))
    dead = await harness.index.register(record("dead"), lease_seconds=LEASE_SECONDS)
    await harness.index.apply(dead, Batch(sequence=1, added=chain(3)))
    await harness.advance(-3600)
    await harness.index.renew(alive, lease_seconds=LEASE_SECONDS)
    await harness.advance(0.9 * LEASE_SECONDS)
    await harness.index.renew(alive, lease_seconds=LEASE_SECONDS)
    await harness.advance(0.2 * LEASE_SECONDS)
    assert [holder.worker_id for holder in await harness.index.lookup(chain(3))] == ["alive"]
    for _ in range(4):
        await harness.advance(0.9 * LEASE_SECONDS)
        await harness.index.renew(alive, lease_seconds=LEASE_SECONDS)
    assert dead.number in {number for slice in await purge_all(harness.index) for number in slice.freed}


async def test_a_clock_set_forward_costs_nobody_the_berth(harness: IndexHarness) -> None:
    berth = await harness.index.register(record("a"), lease_seconds=LEASE_SECONDS)
    await harness.index.apply(berth, Batch(sequence=1, added=chain(3)))
    await harness.advance(3600)
    assert all(not progress.freed for progress in await purge_all(harness.index))
    assert await harness.index.renew(berth, lease_seconds=LEASE_SECONDS) is RenewResult.OK
    assert all(not progress.freed for progress in await purge_all(harness.index))
    assert [holder.depth for holder in await harness.index.lookup(chain(3))] == [3]
