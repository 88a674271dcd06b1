"""The state of the prefix index, from the publisher of a real worker to `blockyard index`, with Redis and without."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis
from blockyard.deploy.cli import main
from blockyard.deploy.machine.redis_server import RedisProcess, start_private_redis
from blockyard.proto.index.redis import connect
from blockyard.proto.v1 import cluster_pb2
from blockyard.router.client import AsyncClient
from click.testing import CliRunner
from redis.asyncio import Redis

from tests.unit.router.rig import Router, is_ready, request, running_router, until, worker_of_model

from .rig import SIMULATED, worker

EXACT = cluster_pb2.INDEX_STATE_EXACT
DEGRADED = cluster_pb2.INDEX_STATE_DEGRADED
ABSENT = cluster_pb2.INDEX_STATE_ABSENT
PROMPT = "import os\n" * 80
STRIDE_BLOCKS = 2
BARE = {"index_stride_tokens": 16 * STRIDE_BLOCKS, "host_cache_gib": 0.0}


@asynccontextmanager
async def real_worker(redis_url: str | None, number: int = 0) -> AsyncIterator[str]:
    own = worker(number, redis_url=redis_url, **SIMULATED, **BARE)
    address = await own.start()
    try:
        yield address
    finally:
        await own.stop(0)


async def index_info(router: Router) -> cluster_pb2.IndexInfo:
    info: cluster_pb2.IndexInfo = await router.cluster.GetIndexInfo(cluster_pb2.GetIndexInfoRequest())
    return info


async def cluster_info(router: Router) -> cluster_pb2.ClusterInfo:
    info: cluster_pb2.ClusterInfo = await router.cluster.GetClusterInfo(cluster_pb2.GetClusterInfoRequest())
    return info


async def is_in_state(router: Router, state: cluster_pb2.IndexState) -> bool:
    return (await index_info(router)).state == state


async def all_is_told(router: Router) -> bool:
    """Return whether the index holds all entries of the workers, as the pongs after the last batch report them."""
    info = await index_info(router)
    return 0 < info.names == sum(worker.index.entries for worker in info.workers)


async def command(router: Router, *options: str) -> str:
    """Return the output of `blockyard index`. Run it in a thread, because the router serves on this one."""
    arguments = ["index", "--router", router.address, *options]
    result = await asyncio.to_thread(CliRunner().invoke, main, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


async def test_from_exact_to_degraded_and_back_with_numbers(tmp_path: Path) -> None:
    own = start_private_redis(tmp_path)
    try:
        async with running_router(redis_url=own.url) as router, real_worker(own.url):
            await until(lambda: is_ready(router))
            await until(lambda: is_in_state(router, EXACT))
            await router.inference.Generate(request(PROMPT))
            await until(lambda: all_is_told(router))
            await until(lambda: is_held(router))
            found = await router.cluster.LookupPrefix(cluster_pb2.LookupPrefixRequest(prompt=PROMPT))
            (holder,) = found.holders
            assert holder.cached_blocks > STRIDE_BLOCKS
            assert holder.cached_blocks == found.prompt_blocks - found.prompt_blocks % STRIDE_BLOCKS
            async with AsyncClient(router.address) as client:
                info = await client.index_info()
            assert (info.state, info.state_reason) == (EXACT, "")
            assert info.stride_blocks == STRIDE_BLOCKS
            assert holder.cached_blocks // STRIDE_BLOCKS <= info.names < found.prompt_blocks
            assert info.bytes > info.names
            assert (info.live_berths, info.dead_berths) == (1, 0)
            assert info.lookups > 0
            assert 0 < info.lookup_p50_seconds <= info.lookup_p99_seconds
            (told,) = info.workers
            assert (told.worker_id, told.index.state, told.index.entries) == ("worker-0", EXACT, info.names)
            shown = json.loads(await command(router, "--output", "json"))
            assert shown["state"] == "INDEX_STATE_EXACT"
            assert shown["bytes_per_name"] == pytest.approx(info.bytes / info.names)

            await asyncio.to_thread(own.stop)
            # The worker may say so before the router has asked Redis again.
            await until(lambda: has_reason(router, "Redis does not answer"), seconds=50)
            assert (await cluster_info(router)).index_state == DEGRADED
            text = await command(router)
            assert "DEGRADED  Redis does not answer" in text
            assert str(own.port) not in text
            assert (await router.inference.Generate(request(PROMPT))).outputs, "served all the same"
            await until(lambda: worker_is(router, DEGRADED), seconds=50)

            own = await asyncio.to_thread(start_private_redis, tmp_path, port=own.port)
            await until(lambda: is_in_state(router, EXACT), seconds=50)
            assert (await cluster_info(router)).index_available
            assert (await index_info(router)).workers[0].index.resyncs == 1
    finally:
        own.stop()


async def is_held(router: Router) -> bool:
    """Return whether a look-up finds the prompt. Redis may answer too late for one."""
    found = await router.cluster.LookupPrefix(cluster_pb2.LookupPrefixRequest(prompt=PROMPT))
    return bool(found.holders)


async def has_reason(router: Router, reason: str) -> bool:
    return (await index_info(router)).state_reason == reason


async def worker_is(router: Router, state: cluster_pb2.IndexState) -> bool:
    listed = await router.cluster.ListWorkers(cluster_pb2.ListWorkersRequest())
    return [worker.index.state for worker in listed.workers] == [state]


async def test_without_redis_the_index_is_absent() -> None:
    async with running_router() as router, real_worker(None) as address:
        router.server.set_workers([address])
        await until(lambda: is_ready(router))
        assert await is_in_state(router, ABSENT)
        told = await cluster_info(router)
        assert (told.index_state, told.index_available) == (ABSENT, False)
        listed = await router.cluster.ListWorkers(cluster_pb2.ListWorkersRequest())
        assert not listed.workers[0].HasField("index")
        assert "ABSENT" in await command(router)


async def test_a_worker_that_tells_nothing_degrades_the_index_and_one_of_another_stride_is_refused(
    server: RedisProcess, operator: "redis.Redis"
) -> None:
    silent = worker_of_model("silent", index_stride_blocks=STRIDE_BLOCKS)
    async with running_router(redis_url=server.url) as router, router.workers(silent):
        info = await index_info(router)
        assert (info.state, info.state_reason) == (DEGRADED, "silent publishes nothing to the index")
        assert not info.workers[0].HasField("index")
        async with worker_of_model("odd", index_stride_blocks=3) as odd:
            router.server.set_workers([silent.address, odd.address])
            await until(lambda: is_refused(router, odd.address))
            listed = await router.cluster.ListWorkers(cluster_pb2.ListWorkersRequest())
            reasons = {worker.worker_id: worker.state_reason for worker in listed.workers}
            assert reasons["odd"] == "index stride of 3 blocks, the first worker's is 2"


async def test_a_worker_that_tells_another_index_degrades_this_one(server, operator):
    async with (
        running_router(redis_url=server.url) as router,
        real_worker(server.url),
        real_worker(server.url.removesuffix("/0") + "/1", 1) as address,
    ):
        router.server.set_workers([address])
        await until(lambda: both_are_exact(router))
        await until(lambda: is_in_state(router, DEGRADED))
        info = await index_info(router)
        assert info.state_reason.startswith("worker-1 is not in this router's index")
        assert (info.live_berths, (await cluster_info(router)).index_available) == (1, True)


async def both_are_exact(router: Router) -> bool:
    """Return whether both workers report an exact index."""
    return [worker.index.state for worker in (await index_info(router)).workers] == [EXACT, EXACT]


async def test_who_only_asks_makes_no_look_ups_and_a_flood_of_questions_makes_one_count(server, operator):
    async with running_router(redis_url=server.url) as router, real_worker(server.url):
        await until(lambda: is_in_state(router, EXACT))
        async with connect(server.url, timeout_seconds=5.0) as client:
            before = await num_scripts(client)
            infos = await asyncio.gather(*(index_info(router) for _ in range(50)))
            # A count takes 16 scripts; the worker and the directory's follower ask too.
            assert await num_scripts(client) - before < 5 * 16
        assert {info.lookups for info in infos} == {0}


async def num_scripts(client: Redis) -> int:
    return int((await client.info("commandstats")).get("cmdstat_evalsha", {}).get("calls", 0))


async def is_refused(router: Router, address: str) -> bool:
    return (await router.states()).get(address) == cluster_pb2.WORKER_STATE_REFUSED


async def test_a_worker_that_one_of_two_servers_lists_is_found_and_the_dead_one_is_named(server, operator):
    urls = f"redis://127.0.0.1:1/0,{server.url}"
    async with running_router(redis_url=urls) as router, real_worker(urls):
        await until(lambda: is_ready(router))
        await until(lambda: has_reason(router, "shard 1 of 2: Redis does not answer"))
        info = await index_info(router)
        assert info.state == DEGRADED
        assert info.live_berths == 1, "the server that answers is counted"
        assert (await cluster_info(router)).index_available
        (worker,) = info.workers
        assert [part.state for part in worker.index.shards] == [DEGRADED, EXACT]
        assert worker.index.state_reason.endswith("(shard 1 of 2)")
        assert not worker.index.cut_off
