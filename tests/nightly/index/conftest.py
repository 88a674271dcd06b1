"""Every real Redis and Valkey for the index's tests, and several servers that share the prefixes."""

from collections.abc import Iterator

import pytest
from blockyard.deploy.machine.redis_server import RedisProcess, start_private_redis

from tests.redis_servers import each_server
from tests.system.index.conftest import redis_harness as redis_harness


@pytest.fixture(scope="session", params=each_server())
def redis_process(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisProcess]:
    process = start_private_redis(tmp_path_factory.mktemp("redis"), executable=request.param)
    yield process
    process.stop()


@pytest.fixture(scope="session", params=[2, 3])
def shards(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[RedisProcess]]:
    """Several servers that share the prefixes."""
    processes = [start_private_redis(tmp_path_factory.mktemp("shard")) for _ in range(request.param)]
    yield processes
    for process in processes:
        process.stop()
