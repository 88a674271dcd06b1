"""Routers and workers as Redis users of their own in a real Redis: each can do its work, and nothing else."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import redis
from blockyard.deploy.machine.redis_server import RedisProcess, redis_user, start_private_redis
from blockyard.proto.index.acl import COMMANDS, Role
from blockyard.proto.index.contract import (
    ApplyResult,
    Batch,
    ErrorKind,
    Incarnation,
    PrefixIndexError,
    RenewResult,
    SpotCheck,
    WorkerId,
    WorkerRecord,
)
from blockyard.proto.index.redis import RedisPrefixIndex, connect
from blockyard.proto.index.schema import bucket_of, key_prefix
from blockyard.proto.naming.block_hash import NAME_BYTES
from blockyard.router.client import AsyncClient
from blockyard.router.dispatch.prefix_lookup import PrefixLookupConfig
from blockyard.router.generation.answer_store import AnswerStore
from blockyard.router.sealed_records import RecordName, SealedRecords

from tests.redis_servers import each_server
from tests.system.load import until_ready
from tests.system.processes import SIMULATED, processes
from tests.unit.router.rig import until

from .redis_commands import CLUSTER, commands_of, is_permitted, is_permitted_by_dry_run

ADMINS_PASSWORD = "of-the-admin"
ROLES: tuple[Role, ...] = ("router", "worker")
RECORD = WorkerRecord(
    worker_id=WorkerId("w0"),
    incarnation=Incarnation("1"),
    address="127.0.0.1:7000",
    fingerprint="ab" * 16,
    block_size=16,
)
NAMES = tuple(sha256(bytes([position])).digest()[:NAME_BYTES] for position in range(40))
OTHER_NAMES = tuple(sha256(bytes([position])).digest()[:NAME_BYTES] for position in range(40, 50))
NUM_HOLDERS = 60
DONE_OTHERWISE = {"hsetnx"}
"""Commands that save another: a script that is refused one does its work with two."""


class Server:
    """A private Redis as `up` starts it."""

    def __init__(self, folder: Path, executable: Path) -> None:
        self.worker, self.router = redis_user("worker", CLUSTER), redis_user("router", CLUSTER)
        self.process: RedisProcess = start_private_redis(
            folder, password=ADMINS_PASSWORD, users=(self.worker, self.router), executable=executable
        )
        self.worker_url = self.process.url_of(self.worker)
        self.router_url = self.process.url_of(self.router)

    def url_of(self, role: Role) -> str:
        return self.worker_url if role == "worker" else self.router_url


@pytest.fixture(scope="module", params=each_server())
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("redis"), request.param)
    yield made
    made.process.stop()


@pytest.fixture
def flushed(server: Server) -> Server:
    """Without keys, scripts and statistics."""
    with redis.Redis.from_url(server.process.url) as admin:
        admin.flushall()
        admin.script_flush()
        admin.config_resetstat()
    return server


@asynccontextmanager
async def index_as(
    url: str, cluster: str = CLUSTER, *, is_reader: bool = False
) -> AsyncIterator[RedisPrefixIndex]:
    client = connect(url, timeout_seconds=5.0)
    try:
        yield RedisPrefixIndex(client, cluster, is_reader=is_reader)
    finally:
        await client.aclose()


async def test_a_worker_writes_its_part_and_a_router_reads_it(flushed: Server) -> None:
    server = flushed
    async with (
        index_as(server.worker_url) as worker,
        index_as(server.router_url, is_reader=True) as router,
    ):
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


async def test_a_router_changes_no_key_of_the_index_by_the_commands_of_its_records(flushed: Server) -> None:
    """No key of the index is a string, and these commands refuse every other type."""
    async with index_as(flushed.worker_url) as worker:
        berth = await worker.register(RECORD, lease_seconds=10.0, has_host_cache=True)
        batch = Batch(sequence=1, removed=(), added=NAMES, anywhere_removed=(), anywhere_added=())
        assert await worker.apply(berth, batch) is ApplyResult.OK
        await worker.retire(
            await worker.register(replace(RECORD, worker_id=WorkerId("w1")), lease_seconds=10.0)
        )
        assert await worker.claim("up", lease_seconds=10.0)
        await walk_over_all(worker)
    with (
        redis.Redis.from_url(flushed.process.url) as admin,
        redis.Redis.from_url(flushed.router_url) as reader,
    ):
        keys = admin.keys("*")
        assert len(keys) > 8
        before = {key: admin.dump(key) for key in keys}
        for key in keys:
            for command in (("APPEND", key, "x"), ("GETEX", key, "EXAT", 1), ("GETEX", key, "EX", 1)):
                with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
                    reader.execute_command(*command)
        assert {key: admin.dump(key) for key in admin.keys("*")} == before


async def test_a_router_cannot_write_not_even_by_the_workers_scripts(server: Server) -> None:
    async with (
        index_as(server.worker_url) as worker,
        index_as(server.router_url, is_reader=True) as router,
    ):
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
        body = f"return redis.call('DEL', '{key}')"
        for command in (
            ("ZADD", key, 1, "x"),
            ("DEL", key),
            ("EVAL", "return 1", 0),
            ("SET", key, 1),
            ("SCRIPT", "LOAD", body),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                reader.execute_command(*command)
        writing = admin.script_load(body)
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
            ("CONFIG", "GET", "requirepass"),
            ("ACL", "LIST"),
            ("MONITOR",),
            ("SHUTDOWN",),
            ("SUBSCRIBE", "x"),
            ("DEBUG", "SLEEP", 0),
            ("REPLICAOF", "NO", "ONE"),
        ):
            # From 7 on DEBUG is refused to all, before any user's rights are checked.
            with pytest.raises(redis.ResponseError, match=r"permission|enable-debug-command"):
                user.execute_command(*command)


@pytest.mark.parametrize("role", ROLES)
def test_a_user_may_call_what_is_on_its_list_and_no_other_command_of_the_server(
    role: Role, server: Server
) -> None:
    """Every command of the server is sent. Where the server has a dry run, that is asked as well."""
    with redis.Redis.from_url(server.process.url) as admin:
        commands = commands_of(admin)
        by_dry_run = {command for command in commands if is_permitted_by_dry_run(admin, role, command)}
    sent = {command for command in commands if is_permitted(server.url_of(role), command)}
    assert len(commands) > 250
    assert "config|get" in {command.name for command in commands}
    assert {command.name for command in sent if not command.is_open_to_all} == set(COMMANDS[role])
    assert by_dry_run in (set(), sent)


@pytest.mark.parametrize("role", ROLES)
async def test_without_any_one_command_of_its_list_a_user_cannot_do_its_part(
    role: Role, flushed: Server
) -> None:
    async def do_its_part() -> None:
        if role == "router":
            await be_a_router(flushed.router_url)
        else:
            await be_a_worker(flushed.worker_url, flushed.process.url)

    await many_holders(flushed.process.url)
    await do_its_part()
    with redis.Redis.from_url(flushed.process.url) as admin:
        for command in COMMANDS[role]:
            # Redis 6.2 removes a subcommand only with its whole command.
            admin.execute_command("ACL", "SETUSER", f"blockyard-{role}", f"-{command.partition('|')[0]}")
            if command in DONE_OTHERWISE:
                assert admin.info("commandstats")[f"cmdstat_{command}"]["calls"]
                await do_its_part()
            else:
                with pytest.raises((PrefixIndexError, redis.exceptions.NoPermissionError, AssertionError)):
                    await do_its_part()
            admin.execute_command("ACL", "SETUSER", f"blockyard-{role}", f"+{command}")
        await do_its_part()


async def be_a_worker(url: str, admins_url: str) -> None:
    """Do everything that a worker does, with the rarer branches of each script."""
    prefix = key_prefix(CLUSTER)
    with redis.Redis.from_url(admins_url) as admin:
        async with connect(url, timeout_seconds=5.0) as client:
            assert await client.ping()
            admin.flushall()
            index = RedisPrefixIndex(client, CLUSTER)
            admin.set(f"{prefix}names", "of another type")
            berth = await index.register(RECORD, lease_seconds=10.0, has_host_cache=True)
            admin.set(f"{prefix}b:{bucket_of(NAMES[0]):03x}", "of another type")
            told = Batch(sequence=1, added=NAMES, anywhere_added=NAMES)
            assert await index.apply(berth, told) is ApplyResult.OK
            # As if the clock had been set back.
            admin.hset(f"{prefix}state", "beat", str(2**50))
            check = SpotCheck(record=RECORD, held=NAMES)
            assert await index.renew(berth, lease_seconds=10.0, check=check) is RenewResult.OK
            gone = Batch(sequence=2, removed=NAMES[20:], anywhere_removed=NAMES[20:])
            assert await index.apply(berth, gone) is ApplyResult.OK
            other = replace(RECORD, worker_id=WorkerId("w1"))
            await index.retire(await index.register(other, lease_seconds=10.0))
            await walk_over_all(index)
            async with index_as(admins_url) as whole:
                assert (await whole.info()).names == 20
            assert (await index.register(other, lease_seconds=10.0)).number == 3, "a number that was freed"


async def walk_over_all(index: RedisPrefixIndex) -> None:
    """Walk twice: a walk in progress does not know the workers that have gone since."""
    for _ in range(2):
        while (await index.purge(slice_buckets=512)).active:
            pass


async def be_a_router(url: str) -> None:
    async with connect(url, timeout_seconds=5.0) as client:
        assert await client.ping()
        index = RedisPrefixIndex(client, CLUSTER, is_reader=True)
        # With many holders the identities are read all at once.
        assert len(await index.lookup(NAMES)) == NUM_HOLDERS
        assert [holder.worker_id for holder in await index.lookup(OTHER_NAMES)] == ["many-0"]
        assert len(await index.directory()) == NUM_HOLDERS
        size = await index.info()
        assert (size.live_berths, size.dead_berths, size.bytes > 0) == (NUM_HOLDERS, 0, True)
        records = SealedRecords([client], cluster=CLUSTER, secret="of-the-cluster")
        name = RecordName(kind="response", tenant="acme", record_id=secrets.token_hex(8))
        assert await records.put(name, b"text")
        assert await records.get(name) == b"text"
        await records.delete(name)
        assert await records.get(name) is None
        await keep_an_answer(client)


async def keep_an_answer(client: redis.asyncio.Redis) -> None:
    name = f"talk-{time.monotonic()}".encode()
    patient = PrefixLookupConfig(timeout_seconds=5.0)
    store = AnswerStore([client], cluster=CLUSTER, secret="s" * 32, keep_seconds=60, config=patient)
    await store.add(name, b"answer")
    assert await store.read(name) == b"answer"
    assert not store.errors


async def many_holders(url: str) -> None:
    async with index_as(url) as index:
        for number in range(NUM_HOLDERS):
            record = replace(RECORD, worker_id=WorkerId(f"many-{number}"))
            berth = await index.register(record, lease_seconds=600.0)
            added = NAMES if number else NAMES + OTHER_NAMES
            assert await index.apply(berth, Batch(sequence=1, added=added)) is ApplyResult.OK


async def test_after_a_loss_of_all_scripts_a_worker_loads_them_and_routers_find_again(
    flushed: Server,
) -> None:
    async with (
        index_as(flushed.worker_url) as worker,
        index_as(flushed.router_url, is_reader=True) as router,
    ):
        assert (await router.lookup(NAMES), await router.directory()) == ([], [])
        assert (await router.info()).names == 0
        berth = await worker.register(RECORD, lease_seconds=10.0)
        assert await worker.apply(berth, Batch(sequence=1, added=NAMES)) is ApplyResult.OK
        assert len(await router.lookup(NAMES)) == 1
        with redis.Redis.from_url(flushed.process.url) as admin:
            admin.script_flush()
        assert await router.lookup(NAMES) == []
        assert await worker.renew(berth, lease_seconds=10.0) is RenewResult.OK
        assert len(await router.lookup(NAMES)) == 1
        assert await router.directory() == [RECORD]
        assert (await router.info()).names == len(NAMES)


def test_nobody_comes_in_without_a_password(server: Server) -> None:
    for options in ({}, {"username": "blockyard-router", "password": "guess"}, {"password": "guess"}):
        with (
            redis.Redis(port=server.process.port, **options) as stranger,
            pytest.raises(redis.exceptions.AuthenticationError),
        ):
            stranger.ping()


async def test_real_routers_and_workers_live_on_these_rights(server: Server, tmp_path: Path) -> None:
    with processes(tmp_path) as cluster:
        worker = cluster.add_worker("worker-0", *SIMULATED)
        worker.environment["BLOCKYARD_REDIS_URL"] = server.worker_url
        router = cluster.add_router("router-0")
        router.environment["BLOCKYARD_REDIS_URL"] = server.router_url
        cluster.start(worker, router)
        async with AsyncClient(router.address) as client:
            # The directory alone gives the router the worker's address.
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
