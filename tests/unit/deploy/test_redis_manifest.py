"""The users of deploy/kuberay/base/redis.yaml on a real Redis: each has the rights for its task and no more."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
import yaml
from blockyard.deploy.machine.redis_server import find_redis_server
from blockyard.deploy.ray.head import free_port
from blockyard.proto.index.contract import Incarnation, WorkerId, WorkerRecord
from blockyard.proto.index.redis import RedisPrefixIndex, connect
from blockyard.proto.index.schema import key_prefix

from .commands import KUBERAY

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


@pytest.mark.ci
async def test_workers_write_the_index_and_routers_only_read_it(tmp_path: Path) -> None:
    record = WorkerRecord(
        worker_id=WorkerId("worker-0"),
        incarnation=Incarnation("life-0"),
        address="10.0.0.7:1",
        fingerprint="f",
        block_size=16,
    )
    with redis_with_users_of("index-users.sh", tmp_path) as port:
        async with (
            connect(url(port, "worker"), timeout_seconds=5.0) as writer,
            connect(url(port, "router"), timeout_seconds=5.0) as reader,
        ):
            await RedisPrefixIndex(writer, "default").register(record, lease_seconds=30.0)
            listed = await RedisPrefixIndex(reader, "default").directory()
            assert [known.address for known in listed] == ["10.0.0.7:1"]
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
