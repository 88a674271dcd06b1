"""The bench of the prefix index: it runs on a real Redis, its peer answers as ours does, its figures are right."""

import json
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from blockyard.deploy.machine.redis_server import RedisProcess, start_private_redis
from blockyard.proto.index.redis import RedisPrefixIndex, connect
from redis.asyncio import Redis

from bench.index.__main__ import QUICK, keep, measure
from bench.index.llmd import LlmdIndex, pod_entry
from bench.index.load import CLUSTER, die_and_purge, make_names, num_names, register_all


@pytest.fixture(scope="module")
def redis_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    process = start_private_redis(tmp_path_factory.mktemp("redis"))
    yield process
    process.stop()


@pytest.fixture
async def client(redis_process: RedisProcess) -> AsyncIterator[Redis]:
    async with connect(redis_process.url, timeout_seconds=10.0) as client:
        await client.flushall()
        yield client


async def test_a_quick_run_measures_every_part_and_keeps_a_report_with_its_picture(
    redis_process: RedisProcess, tmp_path: Path
) -> None:
    figures = await measure(redis_process.url, QUICK)
    report = keep(figures, tmp_path)
    picture = report.with_suffix(".png")
    kept = json.loads(report.with_suffix(".json").read_text(encoding="utf-8"))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"]({picture.name})" in report.read_text(encoding="utf-8")
    assert len(kept["floors"]) == len(QUICK.sharing.sharers) + 3
    assert kept["figures"]["sharing"].keys() == {str(number) for number in QUICK.sharing.sharers}
    for case in kept["figures"]["sharing"].values():
        assert case["blockyard_bytes_a_block"] > 0
        assert case["llmd_bytes_a_block_without_engine_keys"] < case["llmd_bytes_a_block"]
    shared_most = kept["figures"]["sharing"][str(max(QUICK.sharing.sharers))]
    assert shared_most["blockyard_bytes_a_block"] < shared_most["llmd_bytes_a_block"]
    purge = kept["figures"]["writes"]["removal_and_purge"]
    assert purge["purged_entries"] == QUICK.writes.entries // QUICK.writes.workers


async def test_the_peer_answers_as_brute_force_does_after_additions_and_evictions(client: Redis) -> None:
    peer, chance = LlmdIndex(client), random.Random(3)
    chain = make_names(1, 40)
    depths = {worker: chance.randint(1, 40) for worker in range(6)}
    for worker, depth in depths.items():
        await peer.add(chain[:depth], pod_entry(worker))
        for name in chain[depth // 2 : depth]:
            await peer.evict(name, pod_entry(worker))
        depths[worker] = depth // 2
    found = await peer.lookup(chain)
    assert found == {
        pod_entry(worker).partition("@")[0].encode(): depth for worker, depth in depths.items() if depth
    }
    num_left = max(depths.values())
    assert len([key async for key in client.scan_iter("engine:*")]) == num_left


async def test_a_death_and_a_purge_leave_what_the_living_hold(client: Redis) -> None:
    index = RedisPrefixIndex(client, CLUSTER)
    living, dying = await register_all(index, 2)
    shared, others = make_names(1, 600), make_names(2, 700)
    await living.add(shared)
    await dying.add(shared + others)
    changed, slices = await die_and_purge(index, [dying])
    assert changed == 1300
    assert slices > 1
    assert await num_names(client) == 600
    await living.remove(shared)
    assert await num_names(client) == 0
