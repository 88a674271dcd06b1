"""`blockyard serve`: in the foreground until Ctrl-C.

It serves this machine alone, or others with TLS and a token as SECURITY.md says: a stranger in another network
namespace.
"""

import json
import os
import pty
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from blockyard.deploy.machine.state import HOME_VARIABLE
from blockyard.deploy.ray.head import DASHBOARD_PORT

from tests.system.harness import Command, remembered_state
from tests.unit.security.certificates import Authority

from .rig import DOWN_SECONDS, Served, processes_of, until_it_serves

SIMULATED = ("--engine", "simulated", "--device", "cpu", "--kv-cache-memory", "18MiB")
SERVE_SECONDS = 240.0
CALL_SECONDS = 60.0
NEAR, FAR = "10.78.0.1", "10.78.0.2"
SECURITY = Path(__file__).parents[3] / "SECURITY.md"


@contextmanager
def serving(command: Command, *arguments: str) -> Iterator[Served]:
    """Serve for the context, end it by Ctrl-C, and check that nothing is left."""
    with command.start("serve", "demo", *arguments, stdin=subprocess.DEVNULL) as process:
        served = None
        try:
            served = Served(process=process, told=until_it_serves(process))
            yield served
        finally:
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=DOWN_SECONDS)
            if served is not None:
                served.errors.append(errors)
    assert (process.returncode, processes_of(command.home)) == (0, [])
    assert f"cluster {command.cluster} is down: all of its processes have ended" in errors
    assert not command.home.exists() or list(command.home.iterdir()) == []


def test_serve_tells_that_a_worker_ended_at_sigterm_and_is_back_and_status_tells_when(tmp_path: Path) -> None:
    command = Command(home=tmp_path / "home", cluster="told")
    with serving(command, *SIMULATED, "--port", "0", "--router-port", "0") as served:
        assert served.process.stderr is not None
        state = remembered_state(command)
        (node,) = command.json("status")["nodes"]
        assert node["metrics_address"] == f"{state.node_address}:{state.metrics_port}"
        os.kill(command.place("worker-0")["pid"], signal.SIGTERM)
        told = []
        for line in served.process.stderr:
            told += [line] if "worker-0" in line else []
            if len(told) == 2:
                break
        place = command.place("worker-0")
        assert (place["phase"], place["error_age_seconds"] > 0) == ("serving", True)
    assert re.match(r"\d\d:\d\d:\d\d worker-0 has ended: its process (died|was killed by SIGTERM)$", told[0])
    assert re.match(r"\d\d:\d\d:\d\d worker-0 serves again at \S+$", told[1])


def test_serve_takes_all_down_when_its_terminal_closes_and_its_session_is_told_to_end(tmp_path: Path) -> None:
    command = Command(home=tmp_path / "home", cluster="closed")
    arguments = ("serve", "demo", *SIMULATED, "--port", "0", "--router-port", "0", "--cluster", "closed")
    pid, terminal = pty.fork()
    if pid == 0:
        environment = {**os.environ, HOME_VARIABLE: str(command.home)}
        module = (sys.executable, "-m", "blockyard.deploy.cli")
        os.execve(sys.executable, (*module, *arguments), environment)
    told = b""
    while b"Ctrl-C" not in told:
        told += os.read(terminal, 1024)
    os.close(terminal)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    _, status = os.waitpid(pid, 0)
    assert (os.waitstatus_to_exitcode(status), processes_of(command.home)) == (0, [])
    assert not command.home.exists() or list(command.home.iterdir()) == []


def run(*command: str, **options: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, capture_output=True, text=True, timeout=CALL_SECONDS, check=False, **options
    )  # type: ignore[call-overload,no-any-return]


def test_serve_answers_curl_by_the_line_that_it_prints_and_ends_on_ctrl_c(tmp_path: Path) -> None:
    command = Command(home=tmp_path / "home", cluster="serve")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused = command.run("serve", "demo", *SIMULATED, "--port", port)
        assert (refused.returncode, f"port {port} is taken" in refused.stderr) == (1, True)
    with dashboard_port_taken(), serving(command, *SIMULATED) as served:
        first, *_ = served.told.splitlines()
        assert (
            first
            == "cluster serve serves demo on 1 worker, its API open only to processes on this machine (see --host)"
        )
        curl = served.told.partition("try:\n")[2].partition("Ctrl-C")[0]
        answered = run("sh", "-c", curl)
        assert json.loads(answered.stdout)["model"] == "demo", answered.stderr
        address = served.value("gRPC")
        asked = command.run("generate", "--router", address, "--max-tokens", "4", "def f(x):")
        assert asked.returncode == 0, asked.stderr
    port = served.value("dashboard").rpartition(":")[2]
    moved = f"port {DASHBOARD_PORT} is taken: the dashboard and the live page are served on {port}"
    assert moved in " ".join("".join(served.errors).split())


@contextmanager
def dashboard_port_taken() -> Iterator[None]:
    with ExitStack() as stack:
        with suppress(OSError):  # taken by somebody else: as good
            stack.enter_context(socket.create_server(("127.0.0.1", DASHBOARD_PORT)))
        yield


@pytest.fixture
def stranger() -> Iterator[tuple[str, ...]]:
    """Yield the beginning of a command that runs in a network namespace of its own, where this machine is NEAR."""
    if any(shutil.which(program) is None for program in ("ip", "unshare", "nsenter")):
        pytest.skip("ip, unshare and nsenter are needed")
    with subprocess.Popen(("unshare", "--net", "sh", "-c", "echo; exec cat"), stdin=-1, stdout=-1) as far:
        try:
            assert far.stdout is not None
            if not far.stdout.readline():
                pytest.skip("no network namespace can be made")
            inside = ("nsenter", f"--net=/proc/{far.pid}/ns/net")
            made = run(
                "ip", "link", "add", "by-near", "type", "veth", "peer", "by-far", "netns", str(far.pid)
            )
            if made.returncode:
                pytest.skip(f"no virtual link can be made: {made.stderr.strip()[:100]}")
            for line in (
                f"ip address add {NEAR}/24 dev by-near",
                "ip link set by-near up",
                f"{shlex.join(inside)} ip address add {FAR}/24 dev by-far",
                f"{shlex.join(inside)} ip link set by-far up",
            ):
                done = run(*line.split())
                assert done.returncode == 0, done.stderr
            yield inside
        finally:
            far.terminate()  # the link goes with its namespace


def test_a_stranger_reaches_it_over_tls_with_a_token_as_security_md_says(
    stranger: tuple[str, ...], tmp_path: Path
) -> None:
    command = Command(home=tmp_path / "home", cluster="open")
    authority = Authority(tmp_path)
    pair = authority.pair("router", address=NEAR)
    auth_file = str(tmp_path / "tokens.json")
    new = (sys.executable, "-m", "blockyard.deploy.cli", "token", "new", "--name", "ann", "--role", "user")
    token = run(*new, "--tenant", "acme", "--auth-file", auth_file).stdout.strip()
    documented = next(
        line
        for line in SECURITY.read_text(encoding="utf-8").splitlines()
        if line.startswith("blockyard serve ")
    )
    given = {"FOLDER": "demo", "tokens.json": auth_file, "router.pem": pair.cert, "router.key": pair.key}
    _, _, model, *arguments = (given.get(word, word) for word in shlex.split(documented))
    assert (model, "--host" in arguments) == ("demo", True)
    with serving(command, *arguments, *SIMULATED) as served:
        assert "open to anybody who can reach 0.0.0.0" in served.told
        url = served.value("HTTP").replace("127.0.0.1", NEAR)
        router = served.value("gRPC").replace("127.0.0.1", NEAR)
        curl = (*stranger, "curl", "--silent", "--show-error", "--cacert", authority.ca, f"{url}/models")
        assert "demo" in run(*curl, "-H", f"Authorization: Bearer {token}").stdout
        assert json.loads(run(*curl).stdout)["error"]["code"] == "unauthenticated"
        untrusting = [word for word in curl if word not in ("--cacert", authority.ca)]
        assert run(*untrusting).returncode != 0
        ask = (
            *(*stranger, sys.executable, "-m", "blockyard.deploy.cli", "generate", "--router", router),
            *("--tls-ca", authority.ca, "--max-tokens", "4", "def f(x):"),
        )
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
        answered = run(*ask, env={**environment, "BLOCKYARD_TOKEN": token})
        assert answered.returncode == 0, answered.stderr
        refused = run(*ask, env=environment)
        assert (refused.returncode, "needs a token" in refused.stderr) == (1, True)
