"""Redis killed, hung, cut off, flushed and slow, under load: rows 35 to 38 and 41 of the fault matrix.

Every row asserts what redis_course.survives asserts. No request fails, and placement and the event loop go on. The
index reports that it is unreliable; soon it is reliable again and equals the workers' truth.
"""

import signal
from typing import Any

import pytest

from .redis_course import survives
from .redis_rig import NUM_WORKERS, RedisCluster, num_errors


@pytest.mark.fault(35)
async def test_redis_killed_and_back_empty_is_told_everything_anew(
    redis_cluster: RedisCluster, measured: dict[str, Any]
) -> None:
    redis = redis_cluster.redis
    survived = await survives(redis_cluster, measured, harm=redis.kill, heal=redis.start, resyncs=NUM_WORKERS)
    assert survived.index.failed_lookups + survived.index.skipped_lookups > 0
    assert num_errors(survived.index) > 0


@pytest.mark.fault(36)
async def test_a_stopped_redis_holds_nobody_up(redis_cluster: RedisCluster, measured: dict[str, Any]) -> None:
    redis = redis_cluster.redis
    survived = await survives(
        redis_cluster,
        measured,
        harm=lambda: redis.signal(signal.SIGSTOP),
        heal=lambda: redis.signal(signal.SIGCONT),
        hold_seconds=4.0,
    )
    assert survived.index.failed_lookups + survived.index.skipped_lookups > 0


@pytest.mark.fault(36)
async def test_a_paused_redis_holds_nobody_up(redis_cluster: RedisCluster, measured: dict[str, Any]) -> None:
    redis = redis_cluster.redis
    await survives(redis_cluster, measured, harm=lambda: redis.run("CLIENT", "PAUSE", 2500), hold_seconds=2.5)


@pytest.mark.fault(37)
async def test_a_redis_that_is_cut_off_silently_holds_nobody_up(
    redis_cluster: RedisCluster, measured: dict[str, Any]
) -> None:
    proxy = redis_cluster.proxy
    await survives(redis_cluster, measured, harm=proxy.black_hole, heal=proxy.heal)


@pytest.mark.fault(37)
async def test_a_redis_that_refuses_connections_holds_nobody_up(
    redis_cluster: RedisCluster, measured: dict[str, Any]
) -> None:
    proxy = redis_cluster.proxy
    await survives(redis_cluster, measured, harm=proxy.refuse, heal=proxy.heal)


@pytest.mark.fault(38)
async def test_after_flushall_everything_is_told_anew(
    redis_cluster: RedisCluster, measured: dict[str, Any]
) -> None:
    redis = redis_cluster.redis
    await survives(
        redis_cluster,
        measured,
        harm=lambda: redis.run("FLUSHALL"),
        hold_seconds=0.0,
        is_degraded=False,
        resyncs=NUM_WORKERS,
    )


@pytest.mark.fault(38)
async def test_forgotten_scripts_are_loaded_again(
    redis_cluster: RedisCluster, measured: dict[str, Any]
) -> None:
    redis = redis_cluster.redis
    survived = await survives(
        redis_cluster,
        measured,
        harm=lambda: redis.run("SCRIPT", "FLUSH"),
        hold_seconds=1.0,
        is_degraded=False,
    )
    assert survived.num_resyncs == 0
