"""The fixtures of tests/unit/router, and a Redis for each module."""

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
import redis
from blockyard.deploy.machine.redis_server import RedisProcess, start_private_redis
from blockyard.proto.index.redis import connect

from tests.unit.router.conftest import router as router
from tests.unit.router.conftest import tokenizer as tokenizer
from tests.unit.router.conftest import worker as worker


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    started = start_private_redis(tmp_path_factory.mktemp("redis"), password="of-the-admin")
    yield started
    started.stop()


@pytest.fixture
def operator(server: RedisProcess) -> Iterator["redis.Redis"]:
    """An operator's connection to a Redis that is empty."""
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        yield client


@pytest_asyncio.fixture
async def client(server: RedisProcess) -> AsyncIterator[redis.asyncio.Redis]:
    made = connect(server.url, timeout_seconds=5.0, has_deadlines=True)
    yield made
    await made.aclose()
