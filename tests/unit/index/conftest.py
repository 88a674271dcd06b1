"""Every real Redis and Valkey for the index's tests, and one harness that drives the product and its twin alike."""

import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest
from blockyard.deploy.machine.redis_server import RedisProcess, start_private_redis
from blockyard.proto.index.redis import connect

from tests.redis_servers import each_server

from .harness import IndexHarness, RedisHarness, ShardedHarness, TwinHarness

SHARDS = {"2 shards": 2, "3 shards": 3}


@pytest.fixture(scope="session", params=each_server(are_all_quick=False))
def redis_process(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisProcess]:
    process = start_private_redis(tmp_path_factory.mktemp("redis"), executable=request.param)
    yield process
    process.stop()


@pytest.fixture(scope="session", params=SHARDS)
def shards(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[RedisProcess]]:
    """Several servers that share the prefixes."""
    processes = [start_private_redis(tmp_path_factory.mktemp("shard")) for _ in range(SHARDS[request.param])]
    yield processes
    for process in processes:
        process.stop()


@pytest.fixture(scope="session", params=["twin", *SHARDS, *each_server(are_all_quick=False)])
def backend(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[RedisProcess]]:
    """Yield the servers. None: the twin."""
    if request.param == "twin":
        yield []
        return
    executables = [None] * SHARDS[request.param] if request.param in SHARDS else [request.param]
    processes = [
        start_private_redis(tmp_path_factory.mktemp("redis"), executable=executable)
        for executable in executables
    ]
    yield processes
    for process in processes:
        process.stop()


@pytest.fixture
async def harness(backend: list[RedisProcess]) -> AsyncIterator[IndexHarness]:
    """All implementations behind one interface; each test gets an empty index."""
    if not backend:
        yield TwinHarness()
        return
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(connect(process.url, timeout_seconds=5.0)) for process in backend
        ]
        cluster = f"test-{uuid.uuid4().hex}"
        if len(clients) == 1:
            yield RedisHarness(clients[0], cluster=cluster)
        else:
            yield ShardedHarness(clients, cluster=cluster)


@pytest.fixture
async def redis_harness(redis_process: RedisProcess) -> AsyncIterator[RedisHarness]:
    async with connect(redis_process.url, timeout_seconds=5.0) as client:
        yield RedisHarness(client, cluster=f"test-{uuid.uuid4().hex}")
