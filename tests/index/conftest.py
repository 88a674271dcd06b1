"""A real Redis for the index's tests, and one harness that drives the product and its twin alike."""

import uuid
from collections.abc import AsyncIterator, Iterator

import pytest
from blockyard.deploy.redis_server import RedisProcess, start_private_redis
from blockyard.proto.redis_prefix_index import connect

from .harness import IndexHarness, RedisHarness, TwinHarness


@pytest.fixture(scope="session")
def redis_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    process = start_private_redis(tmp_path_factory.mktemp("redis"))
    yield process
    process.stop()


@pytest.fixture(params=["twin", "redis"])
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[IndexHarness]:
    """Both implementations behind one interface; each test gets an empty index."""
    if request.param == "twin":
        yield TwinHarness()
        return
    process: RedisProcess = request.getfixturevalue("redis_process")
    async with connect(process.url, timeout_seconds=5.0) as client:
        yield RedisHarness(client, cluster=f"test-{uuid.uuid4().hex}")


@pytest.fixture
async def redis_harness(redis_process: RedisProcess) -> AsyncIterator[RedisHarness]:
    async with connect(redis_process.url, timeout_seconds=5.0) as client:
        yield RedisHarness(client, cluster=f"test-{uuid.uuid4().hex}")
