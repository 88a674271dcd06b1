"""Routers and workers as users of their own in a real Redis: each can do its work, and nothing besides."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path

import pytest
import redis
from blockyard.deploy.redis_server import RedisProcess, start_private_redis
from blockyard.deploy.security import redis_user
from blockyard.proto.block_hash import NAME_BYTES
from blockyard.proto.index_schema import key_prefix
from blockyard.proto.prefix_index import (
    ApplyResult,
    Batch,
    ErrorKind,
    Incarnation,
    PrefixIndexError,
    RenewResult,
    WorkerId,
    WorkerRecord,
)
from blockyard.proto.redis_prefix_index import RedisPrefixIndex, connect
from blockyard.router.client import AsyncClient

from .rig import SIMULATED, processes, until, until_ready

CLUSTER = "default"
RECORD = WorkerRecord(
    worker_id=WorkerId("w0"),
    incarnation=Incarnation("1"),
    address="127.0.0.1:7000",
    fingerprint="ab" * 16,
    block_size=16,
)
NAMES = tuple(sha256(bytes([position])).digest()[:NAME_BYTES] for position in range(40))


class Server:
    """A private Redis as `up` starts it."""

    def __init__(self, folder: Path) -> None:
        self.worker, self.router = redis_user("worker", CLUSTER), redis_user("router", CLUSTER)
        self.process: RedisProcess = start_private_redis(
            folder, password="of-the-admin", users=(self.worker, self.router)
        )
        self.worker_url = self.process.url_of(self.worker)
        self.router_url = self.process.url_of(self.router)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("redis"))
    yield made
    made.process.stop()


@asynccontextmanager
async def index_as(url: str, cluster: str = CLUSTER) -> AsyncIterator[RedisPrefixIndex]:
    client = connect(url, timeout_seconds=5.0)
    try:
        yield RedisPrefixIndex(client, cluster)
    finally:
        await client.aclose()


async def test_a_worker_writes_its_part_and_a_router_reads_it(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    async with index_as(server.worker_url) as worker, index_as(server.router_url) as router:
        berth = await worker.register(RECORD, lease_seconds=10.0, has_host_cache=True)
        batch = Batch(sequence=1, removed=(), added=NAMES, anywhere_removed=(), anywhere_added=NAMES)
        assert await worker.apply(berth, batch) is ApplyResult.OK
        assert await worker.renew(berth, lease_seconds=10.0, applied_sequence=1) is RenewResult.OK
        (holder,) = await router.lookup(NAMES)
        assert (holder.worker_id, holder.depth) == ("w0", len(NAMES))
        assert await router.directory() == [RECORD]
        size = await router.info()
        assert (size.names, size.live_berths, size.dead_berths, size.bytes > 0) == (len(NAMES), 2, 0, True)
        gone = Batch(sequence=2, removed=NAMES, added=(), anywhere_removed=NAMES, anywhere_added=())
        assert await worker.apply(berth, gone) is ApplyResult.OK
        await worker.retire(berth)
        while (await worker.purge(slice_buckets=512)).active:
            pass
        assert not (await worker.register(RECORD, lease_seconds=0.01)).anywhere
        await asyncio.sleep(0.1)
        await worker.directory()
    assert "Redis keeps its own bounds" not in caplog.text


async def test_a_router_cannot_write_not_even_by_the_workers_scripts(server: Server) -> None:
    async with index_as(server.worker_url) as worker, index_as(server.router_url) as router:
        berth = await worker.register(RECORD, lease_seconds=10.0)
        batch = Batch(sequence=1, removed=(), added=NAMES, anywhere_removed=(), anywhere_added=())
        for write in (
            lambda: router.register(RECORD, lease_seconds=10.0),
            lambda: router.apply(berth, batch),
            lambda: router.renew(berth, lease_seconds=10.0),
            lambda: router.retire(berth),
        ):
            with pytest.raises(PrefixIndexError) as caught:
                await write()
            assert caught.value.kind is ErrorKind.DENIED
        assert await router.lookup(NAMES) == []
    with redis.Redis.from_url(server.process.url) as admin, redis.Redis.from_url(server.router_url) as reader:

        def stored() -> dict[bytes, bytes | None]:
            return {key: admin.dump(key) for key in admin.keys("*")}

        before = stored()
        key = f"{key_prefix(CLUSTER)}leases"
        for command in (("ZADD", key, 1, "x"), ("DEL", key), ("EVAL", "return 1", 0), ("SET", key, 1)):
            with pytest.raises(redis.exceptions.NoPermissionError):
                reader.execute_command(*command)
        writing = reader.execute_command("SCRIPT", "LOAD", f"return redis.call('DEL', '{key}')")
        with pytest.raises(redis.RedisError, match=r"(?i)acl|perm|can't run"):
            reader.execute_command("EVALSHA", writing, 1, key)
        assert stored() == before


@pytest.mark.parametrize("role", ["worker_url", "router_url"])
async def test_neither_sees_another_clusters_keys_nor_the_server(server: Server, role: str) -> None:
    url = getattr(server, role)
    async with index_as(url, "another") as other:
        with pytest.raises(PrefixIndexError) as caught:
            await other.lookup(NAMES)
        assert caught.value.kind is ErrorKind.DENIED
    with redis.Redis.from_url(server.process.url) as admin, redis.Redis.from_url(url) as user:
        admin.set("else", "secret")
        for command in (
            ("GET", "else"),
            ("KEYS", "*"),
            ("SCAN", 0),
            ("FLUSHALL",),
            ("CONFIG", "SET", "dir", "/"),
            ("ACL", "LIST"),
            ("MONITOR",),
            ("SHUTDOWN",),
            ("SUBSCRIBE", "x"),
            ("DEBUG", "SLEEP", 0),
            ("REPLICAOF", "NO", "ONE"),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                user.execute_command(*command)


def test_nobody_comes_in_without_a_password(server: Server) -> None:
    for options in ({}, {"username": "blockyard-router", "password": "guess"}, {"password": "guess"}):
        with (
            redis.Redis(port=server.process.port, **options) as stranger,
            pytest.raises(redis.exceptions.AuthenticationError),
        ):
            stranger.ping()


@pytest.mark.cluster
async def test_real_routers_and_workers_live_on_these_rights(server: Server, tmp_path: Path) -> None:
    with processes(tmp_path) as cluster:
        worker = cluster.add_worker("worker-0", *SIMULATED)
        worker.environment["BLOCKYARD_REDIS_URL"] = server.worker_url
        router = cluster.add_router("router-0")
        router.environment["BLOCKYARD_REDIS_URL"] = server.router_url
        cluster.start(worker, router)
        async with AsyncClient(router.address) as client:
            # By the directory alone: nobody told the router where the worker is.
            await until_ready(client, "worker-0", seconds=60.0)
            prompt = "def f(x): return x + 1\n" * 20
            await client.generate(prompt, max_tokens=4)

            async def is_found() -> bool:
                return bool((await client.lookup_prefix(prompt)).holders)

            await until(is_found, seconds=30)
            info = await client.index_info()
            assert info.failed_lookups == 0
            assert info.names > 0
            assert info.bytes > 0
            assert info.live_berths > 0
        for process in (worker, router):
            text = process.log_text().lower()
            assert "noperm" not in text
            assert "permission" not in text
