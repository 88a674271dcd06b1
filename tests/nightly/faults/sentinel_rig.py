"""A primary Redis with a replica, and Sentinels that fail over between the two.

Owns these servers and the URL that names them. Does not own the cluster of Blockyard (redis_rig.py) or the faults.
"""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis as redis_client

from tests.system.processes import SECRET, free_port

from .redis_rig import RedisServer

SERVICE = "blockyard"
NUM_SENTINELS = 3
START_SECONDS = 20.0
_CONFIG = """\
port {port}
bind 127.0.0.1
dir {folder}
requirepass {secret}
sentinel monitor {service} 127.0.0.1 {primary} 2
sentinel auth-pass {service} {secret}
sentinel sentinel-pass {secret}
sentinel down-after-milliseconds {service} 1000
sentinel failover-timeout {service} 5000
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    primary: RedisServer
    replica: RedisServer
    url: str
    """Names one address where nothing listens, then the Sentinels."""
    sentinel_ports: tuple[int, ...]

    def is_primary(self, server: RedisServer) -> bool:
        """Return True if every Sentinel takes this server for the primary."""
        for port in self.sentinel_ports:
            with redis_client.Redis(port=port, password=SECRET) as sentinel:
                if sentinel.sentinel_get_master_addr_by_name(SERVICE)[1] != server.process.port:
                    return False
        return True


@contextmanager
def sentinels_in(folder: Path, executable: Path) -> Iterator[Watched]:
    primary, replica = (RedisServer(folder / name, executable) for name in ("primary", "replica"))
    started: list[subprocess.Popen[bytes]] = []
    try:
        for server in (primary, replica):
            server.run("CONFIG", "SET", "masterauth", SECRET)
        replica.run("REPLICAOF", "127.0.0.1", primary.process.port)
        _until(lambda: _link(replica) == "up", "the replica follows its primary")
        ports = tuple(free_port() for _ in range(NUM_SENTINELS))
        for port in ports:
            started.append(_sentinel(folder / f"sentinel-{port}", executable, port, primary))
        hosts = ",".join(f"127.0.0.1:{port}" for port in (1, *ports))
        watched = Watched(
            primary=primary,
            replica=replica,
            url=f"redis+sentinel://default:{SECRET}@{hosts}/{SERVICE}/0?sentinel_password={SECRET}",
            sentinel_ports=ports,
        )
        _until(lambda: _knows_all(ports), "the Sentinels know the replica and each other")
        yield watched
    finally:
        for process in started:
            process.kill()
            process.wait()
        for server in (primary, replica):
            server.process.stop()


def _sentinel(folder: Path, executable: Path, port: int, primary: RedisServer) -> subprocess.Popen[bytes]:
    folder.mkdir()
    config = folder / "sentinel.conf"
    config.write_text(
        _CONFIG.format(port=port, folder=folder, secret=SECRET, service=SERVICE, primary=primary.process.port)
    )
    with (folder / "log").open("wb") as log:
        return subprocess.Popen([executable, config, "--sentinel"], stdout=log, stderr=log)


def _link(replica: RedisServer) -> str:
    with replica.client() as straight:
        return str(straight.info("replication")["master_link_status"])


def _knows_all(ports: tuple[int, ...]) -> bool:
    for port in ports:
        with redis_client.Redis(port=port, password=SECRET) as sentinel:
            state = sentinel.sentinel_master(SERVICE)
            if (state["num-slaves"], state["num-other-sentinels"]) != (1, NUM_SENTINELS - 1):
                return False
    return True


def _until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            if is_so():
                return
        except redis_client.RedisError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"not within {START_SECONDS:.0f} s: {what}")
