"""Redis that is away for minutes when others start, or that two clusters share. Belongs to rows 35 and 36 of the
matrix."""

import signal
from typing import Any

import pytest
from blockyard.proto.index.schema import key_prefix
from blockyard.router.client import AsyncClient

from tests.system.load import until
from tests.system.processes import SECRET

from .chaos_proxy import ChaosProxyThread
from .redis_course import prompt, survives
from .redis_rig import DEGRADED, EXACT, REBUILD_SECONDS, WORKER_OPTIONS, RedisCluster, indexed

OTHER = "other"


@pytest.mark.fault(35)
async def test_who_starts_without_redis_serves_and_catches_up_and_two_clusters_share_one(
    redis_cluster: RedisCluster, measured: dict[str, Any]
) -> None:
    """The second cluster has another name on the same Redis, which it cannot reach at first."""
    started = redis_cluster.processes
    with ChaosProxyThread(redis_cluster.redis.address) as proxy:
        proxy.refuse()
        worker = started.add_worker("late-worker", *WORKER_OPTIONS, "--cluster", OTHER)
        router = started.add_router("late-router", "--cluster", OTHER, workers=[worker.address])
        for process in (worker, router):
            process.environment["BLOCKYARD_REDIS_URL"] = f"redis://:{SECRET}@{proxy.address}/0"
        with started.extra(worker, router):
            async with AsyncClient(router.address, timeout_seconds=30.0) as client:
                for number in range(5):
                    await client.generate(prompt(number), max_tokens=4, ignore_eos=True)
                assert (await client.cluster_info()).index_state == DEGRADED
                proxy.heal()

                async def is_exact() -> bool:
                    return (await client.cluster_info()).index_state == EXACT

                took = await until(is_exact, "the late ones are EXACT", seconds=10 * REBUILD_SECONDS)
                held = {block.name[:8] for block in await client.list_blocks(worker.name) if block.name}
                with redis_cluster.redis.client() as straight:
                    assert indexed(straight, key_prefix(OTHER)) == {worker.name: held}
            async with redis_cluster.client() as client:
                await redis_cluster.until_equal(client)
                assert len(await client.list_workers()) == len(redis_cluster.workers)
    measured |= {"failed": 0, "recovery_seconds": took, "note": "away at the start of worker and router"}


@pytest.mark.fault(36)
async def test_two_minutes_without_redis_are_like_two_seconds(
    redis_cluster: RedisCluster, measured: dict[str, Any]
) -> None:
    redis = redis_cluster.redis
    survived = await survives(
        redis_cluster,
        measured,
        harm=lambda: redis.signal(signal.SIGSTOP),
        heal=lambda: redis.signal(signal.SIGCONT),
        hold_seconds=120.0,
    )
    assert survived.index.skipped_lookups > survived.index.failed_lookups, (
        "the breaker kept most of them away"
    )
