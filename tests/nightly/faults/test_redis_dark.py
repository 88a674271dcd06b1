"""A Redis that answers and takes no changes, and one that fails over: rows 57 to 59, on each Redis and Valkey here.

The state is DEGRADED soon, and placement goes without the index. Then it is as before.
"""

import asyncio
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis as redis_client
from blockyard.deploy.settings import redis_given
from blockyard.deploy.settings.wanted_cluster import UpOptions
from blockyard.proto.index.schema import key_prefix
from blockyard.router.client import AsyncClient
from blockyard.worker.config import EngineConfig

from tests.redis_servers import each_server
from tests.system.load import until
from tests.system.processes import SECRET, free_port, processes

from .redis_course import prompt, survives
from .redis_rig import DEGRADED, WORKER_OPTIONS, RedisCluster, num_errors, redis_cluster_in
from .sentinel_rig import Watched, sentinels_in

TOLD_SECONDS = 1.0
"""Bound on the time until the state is DEGRADED and placement goes without the index. Tests allow ten times it."""
LEASES_SECONDS = 6.0
"""Longer than the leases of all workers."""


@pytest.fixture(params=each_server())
def own_cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisCluster]:
    with redis_cluster_in(tmp_path, executable=request.param) as cluster:
        yield cluster


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


@pytest.fixture(params=each_server())
def in_cluster_mode(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Yield the URL of a server with half of the slots, among them that of the prefix of the index's keys."""
    port = free_port()
    command = [
        request.param,
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--dir",
        str(tmp_path),
        "--save",
        "",
    ]
    command += ["--cluster-enabled", "yes", "--cluster-require-full-coverage", "no", "--requirepass", SECRET]
    with (tmp_path / "redis.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        with redis_client.Redis(port=port, password=SECRET) as client:
            _until_answering(client)
            first = int(client.execute_command("CLUSTER", "KEYSLOT", key_prefix("default"))) // 8192 * 8192
            client.execute_command("CLUSTER", "ADDSLOTS", *range(first, first + 8192))
        yield f"redis://:{SECRET}@127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()


def _until_answering(client: "redis_client.Redis") -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            client.ping()
            return
        except redis_client.RedisError:
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.05)


@pytest.mark.fault(58)
async def test_cluster_mode_is_refused_and_who_starts_by_hand_serves_without(
    in_cluster_mode: str, measured: dict[str, Any], tmp_path: Path
) -> None:
    options = UpOptions(engine=EngineConfig(model="demo"), redis_url=in_cluster_mode)
    with pytest.raises(ValueError, match="runs in Cluster mode") as refused:
        await asyncio.to_thread(redis_given.check, options)
    assert SECRET not in str(refused.value)
    with processes(tmp_path) as started:
        worker = started.add_worker("w0", *WORKER_OPTIONS)
        router = started.add_router("router", workers=[worker.address])
        for process in (worker, router):
            process.environment["BLOCKYARD_REDIS_URL"] = in_cluster_mode
        started.start(worker, router)
        async with AsyncClient(router.address, timeout_seconds=30.0) as client:
            for number in range(5):
                await client.generate(prompt(number), max_tokens=4, ignore_eos=True)
            assert not (await client.explain_placement(prompt(0))).index_available

            async def tells_why() -> bool:
                info = await client.index_info()
                return info.state == DEGRADED and "Cluster mode" in info.state_reason

            took = await until(tells_why, "the state tells why", seconds=10 * TOLD_SECONDS)
    measured |= {"failed": 0, "recovery_seconds": took, "note": "`up` refuses it; told by who serves without"}


@pytest.fixture(params=each_server())
def watched(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Watched]:
    with sentinels_in(tmp_path, request.param) as watched:
        yield watched


@pytest.fixture
def watched_cluster(watched: Watched, tmp_path: Path) -> Iterator[RedisCluster]:
    with redis_cluster_in(tmp_path, given=(watched.primary, watched.url)) as cluster:
        yield cluster


ENDS: dict[str, Callable[[Watched], object]] = {
    "killed": lambda watched: watched.primary.kill(),
    "stopped": lambda watched: watched.primary.signal(signal.SIGSTOP),
}


@pytest.mark.fault(59)
@pytest.mark.parametrize("end", ENDS)
async def test_after_a_failover_by_sentinel_the_index_is_right_again(
    end: str, watched: Watched, watched_cluster: RedisCluster, measured: dict[str, Any]
) -> None:
    """The first address of the URL answers nothing."""

    def harm() -> None:
        ENDS[end](watched)
        watched_cluster.redis = watched.replica

    def is_over() -> None:
        deadline = time.monotonic() + 60
        while not watched.is_primary(watched.replica):
            assert time.monotonic() < deadline, "the Sentinels did not fail over"
            time.sleep(0.05)

    try:
        survived = await survives(watched_cluster, measured, harm=harm, heal=is_over)
    finally:
        if end == "stopped":
            watched.primary.signal(signal.SIGCONT)
    assert num_errors(survived.index) > 0
    for log in watched_cluster.processes.logs():
        assert SECRET not in log.read_text()
