"""Redis that answers, but wrongly: a stale replica, denied, far away. Rows 39 to 41.

Every row asserts what redis_course.survives asserts.
"""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.system.processes import SECRET

from .redis_course import survives
from .redis_rig import RedisCluster, RedisServer, num_errors

LATENCY_SECONDS = 0.02
NUM_QUESTIONS = 40
DENIALS: dict[str, tuple[tuple[str, ...], bool]] = {
    "user off": (("off",), True),
    "password changed": (("resetpass", ">another"), True),
    "no scripts": (("-@scripting",), False),
    "no keys": (("resetkeys", "~other:*"), False),
    "no sorted sets": (("-@sortedset",), False),
}
"""Changes to the cluster's user, and whether its clients must log in again."""


@pytest.mark.fault(39)
async def test_after_a_failover_to_a_stale_replica_what_it_missed_is_made_good(
    redis_cluster: RedisCluster, measured: dict[str, Any], tmp_path: Path
) -> None:
    primary, proxy = redis_cluster.redis, redis_cluster.proxy
    replica = RedisServer(tmp_path / "replica")
    replica.run("CONFIG", "SET", "masterauth", SECRET)
    replica.run("REPLICAOF", "127.0.0.1", primary.process.port)

    def fail_over() -> None:
        """The replica has missed a second of changes, and does not know yet that it is the primary now."""
        _until_replicated(replica)
        replica.run("REPLICAOF", "NO", "ONE")
        time.sleep(1.0)
        primary.kill()
        replica.run("REPLICAOF", "127.0.0.1", primary.process.port)
        redis_cluster.redis = replica
        proxy.point_at(replica.address)

    survived = await survives(
        redis_cluster,
        measured,
        harm=fail_over,
        heal=lambda: replica.run("REPLICAOF", "NO", "ONE"),
        hold_seconds=3.0,
        # A worker that published nothing while it was cut off has nothing to republish.
        resyncs=1,
    )
    assert num_errors(survived.index) > 0, "a replica refuses what is written"


def _until_replicated(replica: RedisServer) -> None:
    deadline = time.monotonic() + 20
    while True:
        with replica.client() as straight:
            if straight.info("replication")["master_link_status"] == "up":
                return
        assert time.monotonic() < deadline, "the replica gets nothing from its primary"
        time.sleep(0.05)


@pytest.mark.fault(40)
@pytest.mark.parametrize(
    "denial",
    [
        "user off",
        *((name) for name in DENIALS if name != "user off"),
    ],
)
async def test_a_redis_that_denies_is_counted_and_served_without(
    denial: str, redis_cluster: RedisCluster, measured: dict[str, Any]
) -> None:
    redis = redis_cluster.redis
    rules, logs_in_again = DENIALS[denial]

    def deny() -> None:
        redis.run("ACL", "SETUSER", "default", *rules)
        if logs_in_again:
            redis.end_connections()

    def permit() -> None:
        redis.run("ACL", "SETUSER", "default", "on", "resetkeys", "~*", "+@all", "resetpass", f">{SECRET}")

    try:
        survived = await survives(redis_cluster, measured, harm=deny, heal=permit)
    finally:
        permit()
    assert num_errors(survived.index) > 0
    assert survived.index.failed_lookups > 0, "the router's own look-ups were refused too"


@pytest.mark.fault(41)
async def test_a_redis_20_ms_away_costs_one_round_trip_a_request(
    redis_cluster: RedisCluster, measured: dict[str, Any]
) -> None:
    redis, proxy = redis_cluster.redis, redis_cluster.proxy
    survived = await survives(
        redis_cluster,
        measured,
        harm=lambda: proxy.latency(LATENCY_SECONDS),
        heal=proxy.heal,
        is_degraded=False,
        hold_seconds=3.0,
    )
    assert survived.added_p50_ms < 10_000 * LATENCY_SECONDS
    num_asked = num_answered = 0
    async with redis_cluster.client() as client:
        before, began = _num_scripts(redis), time.monotonic()
        while num_answered < NUM_QUESTIONS:
            # On a busy machine Redis may answer too late. Such a question has cost a round trip, or none.
            assert num_asked < 10 * NUM_QUESTIONS, "Redis answers too few look-ups in time"
            explained = await client.explain_placement(f"question {num_asked} " * 30)
            num_asked, num_answered = num_asked + 1, num_answered + explained.index_available
        num_scripts, took = _num_scripts(redis) - before, time.monotonic() - began
    # Beside them each process renews its lease or reads the directory each second, and may purge.
    assert num_answered <= num_scripts <= num_asked + 10 * (1 + took)


def _num_scripts(redis: RedisServer) -> int:
    with redis.client() as straight:
        return int(straight.info("commandstats")["cmdstat_evalsha"]["calls"])
