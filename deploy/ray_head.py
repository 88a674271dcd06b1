"""A local Ray head with its dashboard: started as one session of processes, left serving, ended by session.

Owns how Ray is started and joined. Does not own what runs on it. Never `ray stop`: it ends every Ray on the
machine.

Ray binds its GCS and metrics ports to every interface, only the dashboard obeys loopback; so a head of ours
always asks for a token, kept in a file that only its owner reads. Ray reads RAY_AUTH_MODE once, when it is
first imported: nothing in deploy/ imports ray before `use_token`.
"""

import logging
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockyard.deploy.interruption import handlers_kept
from blockyard.deploy.processes import end_session, session_members

START_SECONDS = 60.0
START_ATTEMPTS = 3
DASHBOARD_PORT = 8265
"""Where people look for it; another port is taken where this one is."""
CONNECT_SECONDS = 5.0
METRICS_REPORT_INTERVAL_MS = 1000
RECONNECT_SECONDS = 600
"""For so long after Ray's control service has died its nodes, and so our workers, wait for it and serve on; then they
end. Ray's own 60 s would be its operator's time to notice."""
RECONNECT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
OBJECT_STORE_BYTES = 100_000_000
"""Near Ray's minimum: tokens never pass through the object store."""
_POLL_SECONDS = 0.05
_LOG_TAIL_BYTES = 2000


class RayStartError(RuntimeError):
    """The head did not come up. The message ends with the tail of its log."""


class _HeadEnded(RayStartError):
    """It ended by itself."""


class RayConnectError(RuntimeError):
    """There is no Ray where one was said to be, or it refuses us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayHead:
    """A head that runs."""

    address: str
    session: int
    token_path: Path


def start_head(
    directory: Path,
    *,
    num_cpus: int,
    spawned: Callable[[int], None] = lambda session: None,
    waiting: Callable[[], None] = lambda: None,
) -> RayHead:
    """Starts a head whose files all lie in `directory`, and returns once it takes connections. Calls `spawned`
    with its session as soon as it has one and again once all of it runs, and `waiting` at each look.

    Raises RayStartError if it does not come up within START_SECONDS, or ends by itself START_ATTEMPTS times;
    nothing is left then."""
    temp_dir, token_path, log_path = directory / "ray", directory / "ray-token", directory / "ray-head.log"
    token_path.touch(mode=0o600)
    token_path.write_text(secrets.token_hex(32), encoding="ascii")
    for attempt in range(START_ATTEMPTS):
        process = _spawn(_command(temp_dir, num_cpus), token_path, log_path)
        try:
            spawned(process.pid)
            address = _wait_for_address(temp_dir / "ray_current_cluster", process, log_path, waiting)
            # Whom the session was known by has ended; from now on it is known by those who stay.
            spawned(process.pid)
        except BaseException as error:
            _kill_session(process)
            # Another head may have taken one of the ports between our look and its use.
            if isinstance(error, _HeadEnded) and attempt + 1 < START_ATTEMPTS:
                continue
            raise
        return RayHead(address=address, session=process.pid, token_path=token_path)
    raise AssertionError("the last attempt returns or raises")


def _spawn(command: list[str], token_path: Path, log_path: Path) -> subprocess.Popen[bytes]:
    with log_path.open("wb") as log:
        return subprocess.Popen(
            command,
            env={**os.environ, **_environment(token_path)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def use_token(token_path: str | None) -> None:
    """Sets this process's credentials for Ray, before ray is imported. None keeps the operator's own."""
    if token_path is not None:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN_PATH"] = token_path


def connect(address: str, *, namespace: str, token_path: str | None) -> dict[str, Any]:
    """Joins a cluster as a driver that prints nothing; returns Ray's address_info.

    Raises RayConnectError at once where nothing listens: Ray itself would try for minutes."""
    _check_listening(address)
    use_token(token_path)
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray.exceptions import RayError

    try:
        with handlers_kept():
            context: Any = ray.init(
                address=address, namespace=namespace, logging_level=logging.ERROR, log_to_driver=False
            )
    except (RayError, ConnectionError) as error:
        raise RayConnectError(f"Ray at {address} does not let us in: {error}") from error
    info: dict[str, Any] = context.address_info
    return info


def _check_listening(address: str) -> None:
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit():
        raise ValueError(f"Ray's address is host:port, not {address!r}")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise RayConnectError(f"no Ray answers at {address}: {error.strerror or error}") from error


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _dashboard_port() -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", DASHBOARD_PORT))
        except OSError:
            return free_port()
    return DASHBOARD_PORT


def _command(temp_dir: Path, num_cpus: int) -> list[str]:
    """Port 0 lets Ray pick; the dashboard and the client server take no 0."""
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--disable-usage-stats"),
        *("--port=0", "--dashboard-agent-listen-port=0", "--dashboard-agent-grpc-port=0"),
        *("--runtime-env-agent-port=0", "--metrics-export-port=0", f"--ray-client-server-port={free_port()}"),
        *("--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={_dashboard_port()}"),
        *("--log-style=record", "--log-color=false"),
        *(f"--temp-dir={temp_dir}", f"--num-cpus={num_cpus}", f"--object-store-memory={OBJECT_STORE_BYTES}"),
    ]


def _environment(token_path: Path) -> dict[str, str]:
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_path),
        # What its processes leave in their temporary folder goes with the cluster's own.
        "TMPDIR": str(token_path.parent),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_metrics_report_interval_ms": str(METRICS_REPORT_INTERVAL_MS),
        RECONNECT_VARIABLE: os.environ.get(RECONNECT_VARIABLE, str(RECONNECT_SECONDS)),
        # Two ports that are fixed otherwise and would clash with another head on this machine.
        "AUTOSCALER_METRIC_PORT": str(free_port()),
        "DASHBOARD_METRIC_PORT": str(free_port()),
        # No idle Python workers beside our actors: they cost memory and the start's CPU.
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
    }


def _wait_for_address(
    address_path: Path, process: subprocess.Popen[bytes], log_path: Path, waiting: Callable[[], None]
) -> str:
    """Ray writes its address there before `ray start` ends, which leaves the head running."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        waiting()
        time.sleep(_POLL_SECONDS)
    if process.poll() == 0 and address_path.exists():
        return address_path.read_text(encoding="ascii").strip()
    tail = log_path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
    if process.poll() is not None:
        raise _HeadEnded(f"the Ray head ended while it started\n{tail}")
    raise RayStartError(f"the Ray head did not come up within {START_SECONDS:.0f} s\n{tail}")


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Ours beyond doubt: started by us a moment ago, and numbers are not reused that fast."""
    end_session(process.pid, session_members(process.pid))
