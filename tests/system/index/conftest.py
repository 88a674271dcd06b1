"""One real Redis a session, the one that `up` would start. Each test gets an empty index on it."""

import uuid
from collections.abc import AsyncIterator, Iterator

import pytest
from blockyard.deploy.machine.redis_server import RedisProcess, start_private_redis
from blockyard.proto.index.redis import connect

SUITES = ("unit.index.contract_suite", "unit.index.host_tier_suite", "system.index.redis_suite")
pytest.register_assert_rewrite(*(f"tests.{name}" for name in (*SUITES, "system.index.damage_suite")))

from tests.unit.index.harness import IndexHarness, RedisHarness  # noqa: E402


@pytest.fixture(scope="session")
def redis_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    process = start_private_redis(tmp_path_factory.mktemp("redis"))
    yield process
    process.stop()


@pytest.fixture
async def redis_harness(redis_process: RedisProcess) -> AsyncIterator[RedisHarness]:
    async with connect(redis_process.url, timeout_seconds=5.0) as client:
        yield RedisHarness(client, cluster=f"test-{uuid.uuid4().hex}")


@pytest.fixture
def harness(redis_harness: RedisHarness) -> IndexHarness:
    return redis_harness
