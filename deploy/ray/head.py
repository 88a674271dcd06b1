"""A local Ray head with its dashboard: started as one session of processes, left serving, ended by session.

Owns how Ray is started and joined. Does not own what runs on it. Never `ray stop`: it ends every Ray on the
machine.

Ray binds its GCS and metrics ports to every interface, only the dashboard obeys loopback; so a head of ours
always asks for a token, kept in a file that only its owner reads. Ray reads RAY_AUTH_MODE once, when it is
first imported: nothing in deploy/ imports ray before `use_token`.
"""

import contextlib
import logging
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockyard.deploy.dashboard.metrics_tab import GRAFANA_VARIABLE, TAB_VARIABLE
from blockyard.deploy.dashboard.start_hook import HOOK, HOOK_VARIABLE, TOKEN_FILE_VARIABLE
from blockyard.deploy.machine.interruption import handlers_kept
from blockyard.deploy.machine.processes import STOPPED, command_of, end_session, session_members, state_of
from blockyard.deploy.ray.guardian import GCS, RAYLET
from blockyard.deploy.ray.head_probes import HTTP2_HEAD_BYTES, HTTP2_PREFACE, HTTP2_SETTINGS

START_SECONDS = 120.0
START_ATTEMPTS = 3
DASHBOARD_PORT = 8265
"""Where people look for it; another port is taken where this one is."""
CONNECT_SECONDS = 3.0
_BY_ITSELF = (
    "it is started again, and all others after it: `blockyard status` in a minute, or `blockyard down`"
)
METRICS_REPORT_INTERVAL_MS = 1000
GRAFANA_UID = "blockyard"
"""Of deploy/grafana/dashboard.json."""
NO_TOKEN_HINT = "; if it asks for a token, set RAY_AUTH_MODE=token, with the token in ~/.ray/auth_token"
RECONNECT_SECONDS = 600
"""For so long after Ray's control service has died its nodes, and so our workers, wait for it and serve on; then they
end. Ray's own 60 s would be its operator's time to notice."""
RECONNECT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
MEMORY_MONITOR_VARIABLE = "RAY_memory_monitor_refresh_ms"
MEMORY_MONITOR_OFF = "0"
"""At 95 % of the machine's memory Ray kills its own workers, whoever took it. Ours hold what they hold from the start
on: killing them frees little and ends a cluster for another program's sake. Without it the kernel takes the largest."""
OBJECT_STORE_BYTES = 100_000_000
"""Near Ray's minimum: tokens never pass through the object store."""
SUPERVISOR_TITLE = "ray::Supervisor"
"""This is Ray's name for its process."""
_POLL_SECONDS = 0.05
_LOG_TAIL_BYTES = 2000


class RayStartError(RuntimeError):
    """The head did not come up. The message ends with the tail of its log."""


class _HeadEnded(RayStartError):
    """It ended by itself."""


class RayConnectError(RuntimeError):
    """There is no Ray where one was said to be, or it refuses us."""


class RayletDiedError(RayConnectError):
    """Workers and routers ended with it, and come back with the next one."""


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
    page_token_path: Path | None = None,
    page_in_metrics_tab: bool = False,
    spawned: Callable[[int], None] = lambda session: None,
    waiting: Callable[[], None] = lambda: None,
) -> RayHead:
    """Starts a head whose files all lie in `directory`, and returns once it takes connections. Calls `spawned`
    with its session as soon as it has one and again once all of it runs, and `waiting` at each look. The live page
    shows routers the token in `page_token_path`, and fills Ray's Metrics tab if it is to (metrics_tab.py).

    Raises RayStartError if it does not come up within START_SECONDS, or ends by itself START_ATTEMPTS times;
    nothing is left then."""
    temp_dir, token_path, log_path = directory / "ray", directory / "ray-token", directory / "ray-head.log"
    started_path = directory / "ray-started"
    token_path.touch(mode=0o600)
    token_path.write_text(secrets.token_hex(32), encoding="ascii")
    environment = _environment(token_path)
    if page_token_path is not None:
        environment[TOKEN_FILE_VARIABLE] = str(page_token_path)
    if page_in_metrics_tab:
        environment[TAB_VARIABLE] = "1"
    for attempt in range(START_ATTEMPTS):
        started_path.unlink(missing_ok=True)
        guarded = [sys.executable, "-m", "blockyard.deploy.ray.guardian", str(started_path)]
        process = _spawn([*guarded, *_command(temp_dir, num_cpus)], environment, log_path)
        try:
            spawned(process.pid)
            _wait_until_started(started_path, process, log_path, waiting)
            address = (temp_dir / "ray_current_cluster").read_text(encoding="ascii").strip()
            # By more of them: its first process might die.
            spawned(process.pid)
        except BaseException as error:
            _kill_session(process)
            # Another head may have taken one of the ports between our look and its use.
            if isinstance(error, _HeadEnded) and attempt + 1 < START_ATTEMPTS:
                continue
            raise
        process.returncode = 0  # The guardian outlives us on purpose: Popen need not warn that it still runs.
        return RayHead(address=address, session=process.pid, token_path=token_path)
    raise AssertionError("the last attempt returns or raises")


def _spawn(command: list[str], environment: dict[str, str], log_path: Path) -> subprocess.Popen[bytes]:
    with log_path.open("wb") as log:
        return subprocess.Popen(
            command,
            env={**os.environ, **environment},
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


def operators_token_path() -> str | None:
    """Where the token of the operator's own Ray lies, so that later commands find it from any shell. None where Ray
    asks for none, or has it from a variable, which is not kept."""
    if os.environ.get("RAY_AUTH_MODE") != "token" or os.environ.get("RAY_AUTH_TOKEN"):
        return None
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser().absolute()
    return str(path) if path.is_file() else None


def connect(
    address: str, *, namespace: str, token_path: str | None, wheel: Path | None = None
) -> dict[str, Any]:
    """Joins a cluster as a driver that prints nothing; returns Ray's address_info. What it starts has the package from
    `wheel`, if given.

    Raises RayConnectError at once where nothing listens: Ray itself would try for minutes."""
    check_listening(address)
    use_token(token_path)
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    with _refusals_told(address), handlers_kept():
        context: Any = ray.init(
            address=address,
            namespace=namespace,
            logging_level=logging.ERROR,
            log_to_driver=False,
            runtime_env=None if wheel is None else {"py_modules": [str(wheel)]},
        )
    info: dict[str, Any] = context.address_info
    return info


def control_service(address: str, *, token_path: str | None) -> Any:
    """Asks Ray's control service as its own tools do: a GcsClient, which is no driver and so makes no job. Its class is
    not public, but has been the same from Ray 2.52 to 2.60. Raises as `connect` does."""
    check_listening(address)
    use_token(token_path)
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    with _refusals_told(address):
        return GcsClient(address=address)


@contextlib.contextmanager
def _refusals_told(address: str) -> Iterator[None]:
    from ray.exceptions import RayError

    try:
        yield
    except (RayError, ConnectionError) as error:
        hint = "" if os.environ.get("RAY_AUTH_MODE") == "token" else NO_TOKEN_HINT
        raise RayConnectError(f"Ray at {address} does not let us in: {error}{hint}") from error


@contextlib.contextmanager
def words_kept(path: Path) -> Iterator[None]:
    """Send what Ray's C++ code writes to stderr to a file. What Python writes to sys.stderr is not affected.

    The C++ code complains about a cluster that is partly gone, in messages that do not help an operator.
    """
    heard, ours = os.dup(2), sys.stderr
    try:
        try:
            kept = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError:
            kept = os.open(os.devnull, os.O_WRONLY)
        with os.fdopen(heard, "w", buffering=1, errors="replace", closefd=False) as sys.stderr:
            os.dup2(kept, 2)
            os.close(kept)
            yield
    finally:
        sys.stderr = ours
        os.dup2(heard, 2)
        os.close(heard)


def host_and_port(address: str) -> tuple[str, int]:
    """Raises ValueError."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit():
        raise ValueError(f"Ray's address is host:port, not {address!r}")
    return host, int(port)


def check_alive(session: int) -> None:
    """Of the head that was started here. Raises RayConnectError for one that is dead or stopped: Ray itself would wait
    for it for a minute."""
    states = {
        Path(argv[0]).name: state_of(member.pid)
        for member in session_members(session)
        if (argv := command_of(member.pid))
    }
    for name in (GCS, RAYLET):
        if name in states and states[name] != STOPPED:
            continue
        what = "is stopped" if name in states else "has died"
        if name == RAYLET:
            raise RayletDiedError(f"no Ray answers: its {name} {what}; {_BY_ITSELF}")
        raise RayConnectError(f"no Ray answers: its {name} {what}")


def is_supervisor_stopped(session: int) -> bool:
    """Looks at the head that was started here; one on another node is not seen."""
    return any(
        state_of(member.pid) == STOPPED
        for member in session_members(session)
        if command_of(member.pid)[:1] == [SUPERVISOR_TITLE]
    )


def check_listening(address: str) -> None:
    """Raises RayConnectError where nothing does, or something that is no Ray; ValueError for what is no address."""
    try:
        with socket.create_connection(host_and_port(address), timeout=CONNECT_SECONDS) as connection:
            is_ray = os.environ.get("RAY_USE_TLS") == "1" or _speaks_http2(connection)
    except OSError as error:
        raise RayConnectError(f"no Ray answers at {address}: {error.strerror or error}") from error
    if not is_ray:
        raise RayConnectError(
            f"what answers at {address} is no Ray: `ray start` prints its address, whose port is not the dashboard's"
        )


def _speaks_http2(connection: socket.socket) -> bool:
    """As gRPC does, and so Ray's control service: its first frame is one of settings."""
    connection.sendall(HTTP2_PREFACE)
    answer = b""
    while len(answer) < HTTP2_HEAD_BYTES and (more := connection.recv(HTTP2_HEAD_BYTES - len(answer))):
        answer += more
    return answer[3:4] == HTTP2_SETTINGS


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


def moved_dashboard(address: str) -> str | None:
    """Return a warning for a dashboard that is not on its usual port, from its host:port."""
    port = address.rpartition(":")[2]
    if port == str(DASHBOARD_PORT):
        return None
    return f"port {DASHBOARD_PORT} is taken: the dashboard and the live page are served on {port}"


def _command(temp_dir: Path, num_cpus: int) -> list[str]:
    """Port 0 lets Ray pick. So does no port at all for the other ports of agents, where Ray 2.52 does not pick for 0.
    The dashboard and the client server take no 0."""
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--disable-usage-stats"),
        *("--port=0", "--dashboard-agent-listen-port=0", f"--ray-client-server-port={free_port()}"),
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
        # The live page; an operator's own hook goes first, and then there is none.
        HOOK_VARIABLE: os.environ.get(HOOK_VARIABLE, HOOK),
        RECONNECT_VARIABLE: os.environ.get(RECONNECT_VARIABLE, str(RECONNECT_SECONDS)),
        MEMORY_MONITOR_VARIABLE: os.environ.get(MEMORY_MONITOR_VARIABLE, MEMORY_MONITOR_OFF),
        # Two ports that are fixed otherwise and would clash with another head on this machine.
        "AUTOSCALER_METRIC_PORT": str(free_port()),
        "DASHBOARD_METRIC_PORT": str(free_port()),
        **_grafana(token_path.parent),
        # No idle Python workers beside our actors: they cost memory and the start's CPU.
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
    }


def _grafana(directory: Path) -> dict[str, str]:
    """Where the operator has said which Grafana there is, Ray's Metrics tab shows our dashboard in it. Ray would write
    one of its own under the same uid to where a Grafana may find it."""
    if GRAFANA_VARIABLE not in os.environ:
        return {}
    ours = {
        "RAY_GRAFANA_DATA_DASHBOARD_UID": GRAFANA_UID,
        "RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR": str(directory / "ray-grafana"),
    }
    return {name: os.environ.get(name, value) for name, value in ours.items()}


def _wait_until_started(
    started_path: Path, process: subprocess.Popen[bytes], log_path: Path, waiting: Callable[[], None]
) -> None:
    """The guardian makes this file once `ray start` has ended well, which leaves the head running."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if started_path.exists():
            return
        waiting()
        time.sleep(_POLL_SECONDS)
    tail = log_path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
    if process.poll() is not None:
        raise _HeadEnded(f"the Ray head ended while it started\n{tail}")
    raise RayStartError(f"the Ray head did not come up within {START_SECONDS:.0f} s\n{tail}")


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Ours beyond doubt: started by us a moment ago, and numbers are not reused that fast."""
    end_session(process.pid, session_members(process.pid))
