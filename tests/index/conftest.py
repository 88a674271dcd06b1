"""Every real Redis and Valkey for the index's tests, and one harness that drives the product and its twin alike."""

import uuid
from collections.abc import AsyncIterator, Iterator

import pytest
from blockyard.deploy.machine.redis_server import RedisProcess, start_private_redis
from blockyard.proto.index.redis import connect

from ..redis_servers import each_server  # noqa: TID252
from .harness import IndexHarness, RedisHarness, TwinHarness


@pytest.fixture(scope="session", params=each_server(are_all_quick=False))
def redis_process(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisProcess]:
    process = start_private_redis(tmp_path_factory.mktemp("redis"), executable=request.param)
    yield process
    process.stop()


@pytest.fixture(scope="session", params=["twin", *each_server(are_all_quick=False)])
def backend(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisProcess | None]:
    """None: the twin."""
    if request.param == "twin":
        yield None
        return
    process = start_private_redis(tmp_path_factory.mktemp("redis"), executable=request.param)
    yield process
    process.stop()


@pytest.fixture
async def harness(backend: RedisProcess | None) -> AsyncIterator[IndexHarness]:
    """All implementations behind one interface; each test gets an empty index."""
    if backend is None:
        yield TwinHarness()
        return
    async with connect(backend.url, timeout_seconds=5.0) as client:
        yield RedisHarness(client, cluster=f"test-{uuid.uuid4().hex}")


@pytest.fixture
async def redis_harness(redis_process: RedisProcess) -> AsyncIterator[RedisHarness]:
    async with connect(redis_process.url, timeout_seconds=5.0) as client:
        yield RedisHarness(client, cluster=f"test-{uuid.uuid4().hex}")
