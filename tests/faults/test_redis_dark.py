"""A Redis that answers look-ups and takes no changes: rows 57 and 58 of the fault matrix, on each Redis and Valkey here.

Every row asserts what redis_course.survives asserts. The state is DEGRADED soon, and placement goes without the index.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..redis_servers import each_server  # noqa: TID252
from .redis_course import survives
from .redis_rig import RedisCluster, num_errors, redis_cluster_in

TOLD_SECONDS = 1.0
"""Bound on the time until the state is DEGRADED and placement goes without the index. Tests allow ten times it."""
LEASES_SECONDS = 6.0
"""Longer than the leases of all workers."""


@pytest.fixture(params=each_server(are_all_quick=False))
def own_cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisCluster]:
    with redis_cluster_in(tmp_path, executable=request.param) as cluster:
        yield cluster


@pytest.mark.slow_fault
@pytest.mark.fault(57)
async def test_a_full_redis_is_told_and_served_without(
    own_cluster: RedisCluster, measured: dict[str, Any]
) -> None:
    redis = own_cluster.redis
    survived = await survives(
        own_cluster,
        measured,
        harm=lambda: redis.run("CONFIG", "SET", "maxmemory", "1"),
        heal=lambda: redis.run("CONFIG", "SET", "maxmemory", "0"),
        hold_seconds=LEASES_SECONDS,
    )
    assert survived.told_seconds is not None
    assert survived.fallback_seconds is not None
    assert survived.told_seconds < 10 * TOLD_SECONDS
    assert survived.fallback_seconds < 10 * TOLD_SECONDS
    assert survived.num_indexed_at_last == 0
    assert survived.num_resyncs == 0, "the leases were renewed though memory was full"
    assert num_errors(survived.index) > 0
    assert "out of memory (maxmemory)" in own_cluster.router.log_text()
    measured["note"] += (
        f"; told after {survived.told_seconds:.2f} s, placed without after {survived.fallback_seconds:.2f} s"
    )
