"""Hit rate, throughput, and the resources of processes and Redis are as before after a fault. I7, for the faults that
lose state: a worker's cache, the index, a router's memory."""

import signal
from typing import Any

import pytest

from .recovery import recovers
from .redis_rig import RedisCluster

FROZEN_SECONDS = 5.0
"""Longer than it takes until the worker counts as lost."""


@pytest.mark.fault(16)
async def test_a_worker_that_was_killed_and_started_again_costs_nothing_for_long(
    redis_cluster: RedisCluster, measured: dict[str, Any]
) -> None:
    worker = redis_cluster.workers[0]
    await recovers(
        redis_cluster, measured, harm=worker.kill, heal=lambda: redis_cluster.processes.start(worker)
    )


@pytest.mark.fault(20)
async def test_a_worker_that_was_frozen_costs_nothing_once_it_is_back(
    redis_cluster: RedisCluster, measured: dict[str, Any]
) -> None:
    worker = redis_cluster.workers[0]
    await recovers(
        redis_cluster,
        measured,
        harm=lambda: worker.signal(signal.SIGSTOP),
        heal=lambda: worker.signal(signal.SIGCONT),
        hold_seconds=FROZEN_SECONDS,
    )


@pytest.mark.fault(35)
async def test_a_redis_that_came_back_empty_costs_no_hits(
    redis_cluster: RedisCluster, measured: dict[str, Any]
) -> None:
    redis = redis_cluster.redis
    await recovers(redis_cluster, measured, harm=redis.kill, heal=redis.start)


@pytest.mark.fault(38)
async def test_a_redis_that_was_flushed_costs_no_hits(
    redis_cluster: RedisCluster, measured: dict[str, Any]
) -> None:
    redis = redis_cluster.redis
    await recovers(
        redis_cluster, measured, harm=lambda: redis.run("FLUSHALL"), heal=lambda: None, hold_seconds=0.0
    )


@pytest.mark.fault(44)
async def test_a_router_that_was_killed_finds_the_prefixes_again(
    redis_cluster: RedisCluster, measured: dict[str, Any]
) -> None:
    router = redis_cluster.router
    await recovers(
        redis_cluster,
        measured,
        harm=router.kill,
        heal=lambda: redis_cluster.processes.start(router),
        may_fail=True,
    )
