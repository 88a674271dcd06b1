"""Ray head: starts a local head with its dashboard as one session of processes, and connects to Ray clusters.

Owns how Ray is started and joined. Does not own what runs on it. Never runs `ray stop`, which ends every Ray on the
machine.

Ray binds its GCS and metrics ports to every interface. Only the dashboard can be limited to loopback. So our head
always asks for a token, which is in a file that only its owner can read. Ray reads RAY_AUTH_MODE once, when it is first
imported. So nothing in deploy/ imports ray before `use_token`.
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
from blockyard.deploy.ray import node_probe
from blockyard.deploy.ray.guardian import GCS, RAYLET
from blockyard.deploy.ray.head_probes import HTTP2_HEAD_BYTES, HTTP2_PREFACE, HTTP2_SETTINGS
from blockyard.deploy.ray.node_probe import RECONNECT_VARIABLE
from blockyard.deploy.ray.nodes import RECONNECT_SECONDS
from blockyard.proto.runtime.niceness import NICENESS_VARIABLE

START_SECONDS = 120.0
START_ATTEMPTS = 3
DASHBOARD_PORT = 8265
"""Ray's usual port, where people expect the dashboard. If it is taken, the dashboard gets another one."""
CONNECT_SECONDS = 3.0
_BY_ITSELF = (
    "it is being restarted, then workers and routers: run `blockyard status` in a minute, or `blockyard down`"
)
METRICS_REPORT_INTERVAL_MS = 5000
GRAFANA_UID = "blockyard"
"""Uid of deploy/grafana/dashboard.json."""
_RIGHT_TOKEN = (
    "copy the token file of the machine on which Ray's head was started, or name it by RAY_AUTH_TOKEN_PATH"
)
NO_TOKEN_HINT = "; if it asks for a token, set RAY_AUTH_MODE=token, with the token in ~/.ray/auth_token"
MEMORY_MONITOR_VARIABLE = "RAY_memory_monitor_refresh_ms"
MEMORY_MONITOR_OFF = "0"
"""Switches off Ray's memory monitor, which kills Ray's workers at 95 % of the machine's memory, whichever program uses
it. Our workers hold their memory from the start, so killing them frees little. Without the monitor, the kernel kills
the largest process."""
OBJECT_STORE_BYTES = 100_000_000
"""Near Ray's minimum, because tokens never pass through the object store."""
SUPERVISOR_TITLE = "ray::Supervisor"
"""Ray's name for the supervisor's process."""
_POLL_SECONDS = 0.05
_LOG_TAIL_BYTES = 2000


class RayStartError(RuntimeError):
    """The head did not start. The message ends with the tail of its log."""


class _HeadEnded(RayStartError):
    """The head ended by itself while it started."""


class RayConnectError(RuntimeError):
    """No Ray answers at the given address, or Ray refuses us."""


class RayletDiedError(RayConnectError):
    """The raylet died or is stopped. Workers and routers end with it and come back with the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayHead:
    """A running head."""

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
    """Start a head with all its files in `directory`, and return once it accepts connections.

    Call `spawned` with its session as soon as that exists, and again once all its processes run. Call `waiting` at
    each poll. `page_token_path` is the token file that the live page uses with routers. `page_in_metrics_tab` puts the
    live page into Ray's Metrics tab (metrics_tab.py).

    Raise RayStartError if it does not start within START_SECONDS, or ends by itself START_ATTEMPTS times. Then no
    process is left.
    """
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
            # Record more processes of the session, because its first one might die.
            spawned(process.pid)
        except BaseException as error:
            _kill_session(process)
            # Another head may have taken one of the ports between our check and its use.
            if isinstance(error, _HeadEnded) and attempt + 1 < START_ATTEMPTS:
                continue
            raise
        process.returncode = (
            0  # The guardian outlives us on purpose. This stops Popen's warning that it still runs.
        )
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
    """Set this process's credentials for Ray, before ray is imported. None keeps the operator's own.

    Raise RayConnectError if they are in a file that cannot be read. Ray itself would abort this process.
    """
    if token_path is not None:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN_PATH"] = token_path
    if os.environ.get("RAY_AUTH_MODE") != "token" or os.environ.get("RAY_AUTH_TOKEN"):
        return
    path = _token_file()
    try:
        why = "" if path.read_text(encoding="ascii").strip() else "it is empty"
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "it holds no token"
    if why:
        raise RayConnectError(f"Ray's token file {path} cannot be used: {why}; {_RIGHT_TOKEN}")


def _token_file() -> Path:
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser().absolute()


def operators_token_path() -> str | None:
    """Return the token file of the operator's own Ray, so that later commands find it from any shell.

    Return None if Ray asks for no token, if the file is missing, or if the token is in an environment variable. Such a
    token is never stored.
    """
    if os.environ.get("RAY_AUTH_MODE") != "token" or os.environ.get("RAY_AUTH_TOKEN"):
        return None
    path = _token_file()
    return str(path) if path.is_file() else None


def connect(
    address: str, *, namespace: str, token_path: str | None, wheel: Path | None = None
) -> dict[str, Any]:
    """Join a Ray cluster as a driver that prints nothing. Return Ray's address_info.

    Actors that the driver starts get the package from `wheel`, if given. Raise RayConnectError at once if nothing
    listens there, where Ray itself would retry for minutes. Raise it too if Ray does not let us in.
    """
    control_service(address, token_path=token_path)  # It says why Ray refuses us, and a driver does not.
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    with _refusals_explained(address), handlers_kept():
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
    """Return a client of Ray's control service, as Ray's own tools use. It is no driver, so it creates no job.

    Its class GcsClient is not public, but it is the same from Ray 2.52 to 2.60. Raise as `connect` does.
    """
    check_listening(address)
    use_token(token_path)
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    with _refusals_explained(address), words_kept(Path(os.devnull)):
        return GcsClient(address=address)


@contextlib.contextmanager
def _refusals_explained(address: str) -> Iterator[None]:
    from ray.exceptions import RayError

    try:
        yield
    except (RayError, ConnectionError) as error:
        hint = "" if os.environ.get("RAY_AUTH_MODE") == "token" else NO_TOKEN_HINT
        if "InvalidAuthToken" in str(error) and not hint:
            ours = "RAY_AUTH_TOKEN" if os.environ.get("RAY_AUTH_TOKEN") else _token_file()
            raise RayConnectError(
                f"Ray at {address} refuses the token in {ours}: it was started with another one; {_RIGHT_TOKEN}"
            ) from error
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
    """Split an address. Raise ValueError if it is not host:port."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit() or "/" in address:
        raise ValueError(f"Ray's address is host:port, not {address!r}")
    return host, int(port)


def address_of_this_machine() -> str:
    """Return the address of the one Ray cluster of which a node runs on this machine. Raise ValueError otherwise."""
    option = "--gcs-address="
    found = {
        argument.removeprefix(option)
        for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
        if (argv := command_of(pid)) and Path(argv[0]).name == RAYLET
        for argument in argv
        if argument.startswith(option)
    }
    if len(found) != 1:
        which = (
            f"several Rays run here: {', '.join(sorted(found))}" if found else "no Ray runs on this machine"
        )
        raise ValueError(f"{which}: name the address host:port")
    return found.pop()


def check_alive(session: int) -> None:
    """Raise RayConnectError if the control service or the raylet of a head on this machine is dead or stopped.

    Ray itself would wait a minute. `session` is the head's session of processes.
    """
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
    """Tell whether the supervisor is stopped, as by SIGSTOP. It is found only in this session of processes."""
    return any(
        state_of(member.pid) == STOPPED
        for member in session_members(session)
        if command_of(member.pid)[:1] == [SUPERVISOR_TITLE]
    )


def takes_connections(address: str) -> bool:
    try:
        socket.create_connection(host_and_port(address), timeout=CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def check_listening(address: str) -> None:
    """Raise RayConnectError if no Ray listens at this address, ValueError if it is not host:port."""
    try:
        with socket.create_connection(host_and_port(address), timeout=CONNECT_SECONDS) as connection:
            is_ray = os.environ.get("RAY_USE_TLS") == "1" or _speaks_http2(connection)
    except OSError as error:
        raise RayConnectError(f"no Ray answers at {address}: {error.strerror or error}") from error
    if not is_ray:
        raise RayConnectError(
            f"the program at {address} is not Ray: use the address that `ray start` prints, not the dashboard's port"
        )


def _speaks_http2(connection: socket.socket) -> bool:
    """Send HTTP/2's preface. Tell whether the answer begins with settings, as Ray's control service answers (gRPC)."""
    connection.sendall(HTTP2_PREFACE)
    answer = b""
    while len(answer) < HTTP2_HEAD_BYTES and (more := connection.recv(HTTP2_HEAD_BYTES - len(answer))):
        answer += more
    return answer[3:4] == HTTP2_SETTINGS


def reconnect_seconds() -> float:
    """Return how long the processes of a head that we start outlive its control service."""
    return node_probe.reconnect_seconds({RECONNECT_VARIABLE: str(RECONNECT_SECONDS), **os.environ})


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
    """Return a warning if the dashboard's address (host:port) does not have the usual port, or None."""
    port = address.rpartition(":")[2]
    if port == str(DASHBOARD_PORT):
        return None
    return f"port {DASHBOARD_PORT} is taken: the dashboard and the live page are served on {port}"


def _command(temp_dir: Path, num_cpus: int) -> list[str]:
    """Return the command that starts the head.

    Port 0 lets Ray pick a port. For the agents' other ports Ray 2.52 picks one only if none is given. The dashboard and
    the client server do not accept 0.
    """
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--disable-usage-stats"),
        *("--port=0", "--dashboard-agent-listen-port=0", f"--ray-client-server-port={free_port()}"),
        *("--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={_dashboard_port()}"),
        *("--log-style=record", "--log-color=false", "--include-log-monitor=false"),
        *(f"--temp-dir={temp_dir}", f"--num-cpus={num_cpus}", f"--object-store-memory={OBJECT_STORE_BYTES}"),
    ]


def _environment(token_path: Path) -> dict[str, str]:
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_path),
        # Temporary files of its processes are removed with the cluster's folder.
        "TMPDIR": str(token_path.parent),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # Ray's own default of 15 lets any other program take the cores of workers and routers.
        NICENESS_VARIABLE: os.environ.get(NICENESS_VARIABLE, "0"),
        # Saves a fifth of the CPU that an idle head takes. Only Ray's own debug logs lack the statistics.
        "RAY_event_stats": "0",
        "RAY_metrics_report_interval_ms": str(METRICS_REPORT_INTERVAL_MS),
        # Adds the live page. An operator's own hook replaces it.
        HOOK_VARIABLE: os.environ.get(HOOK_VARIABLE, HOOK),
        RECONNECT_VARIABLE: os.environ.get(RECONNECT_VARIABLE, str(RECONNECT_SECONDS)),
        MEMORY_MONITOR_VARIABLE: os.environ.get(MEMORY_MONITOR_VARIABLE, MEMORY_MONITOR_OFF),
        # By default these two ports are fixed, so they would clash with another head on this machine.
        "AUTOSCALER_METRIC_PORT": str(free_port()),
        "DASHBOARD_METRIC_PORT": str(free_port()),
        **_grafana(token_path.parent),
        # No idle Python workers, because they cost memory and slow the start down.
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
    }


def _grafana(directory: Path) -> dict[str, str]:
    """Return variables that make Ray's Metrics tab show our Grafana dashboard. Empty if the operator named no Grafana.

    Ray writes a dashboard of its own with the same uid. It goes to a folder where Grafana does not find it.
    """
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
    """Wait for the file that the guardian creates once `ray start` has succeeded and left the head running.

    Call `waiting` at each poll. Raise RayStartError if the head ends, or START_SECONDS pass.
    """
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if started_path.exists():
            return
        waiting()
        time.sleep(_POLL_SECONDS)
    tail = log_path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
    if process.poll() is not None:
        raise _HeadEnded(f"the Ray head ended while it started\n{tail}")
    raise RayStartError(f"the Ray head did not start within {START_SECONDS:.0f} s\n{tail}")


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """End the session of a process that we have just started. Its number cannot have been reused yet."""
    end_session(process.pid, session_members(process.pid))
