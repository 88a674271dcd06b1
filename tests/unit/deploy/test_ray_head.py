"""A Ray head starts beside another one, and an existing service at the address is checked before Ray waits for it."""

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import grpc
import pytest
from blockyard.deploy.ray.head import (
    DASHBOARD_PORT,
    MEMORY_MONITOR_VARIABLE,
    RayConnectError,
    _dashboard_port,
    _environment,
    check_listening,
    moved_dashboard,
)


def test_the_dashboard_moves_where_its_port_is_taken() -> None:
    with socket.socket() as occupant:
        occupant.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past connections of a dashboard
        with suppress(OSError):  # taken by somebody else: as good
            occupant.bind(("127.0.0.1", DASHBOARD_PORT))
            occupant.listen()
        assert _dashboard_port() != DASHBOARD_PORT


def test_a_dashboard_on_another_port_is_told_with_the_port() -> None:
    assert moved_dashboard(f"127.0.0.1:{DASHBOARD_PORT}") is None
    assert moved_dashboard("127.0.0.1:4711") == (
        "port 8265 is taken: the dashboard and the live page are served on 4711"
    )


def test_a_web_server_is_no_ray_and_that_is_said_at_once() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as web:
        Thread(target=web.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{web.server_port}"
        with pytest.raises(RayConnectError, match=f"the program at {address} is not Ray"):
            check_listening(address)
        web.shutdown()


def test_who_says_nothing_at_all_is_no_ray_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockyard.deploy.ray.head.CONNECT_SECONDS", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(RayConnectError, match="no Ray answers at"):
            check_listening(f"127.0.0.1:{silent.getsockname()[1]}")


def test_what_speaks_grpc_may_be_ray() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    check_listening(f"127.0.0.1:{port}")
    server.stop(None)


def test_rays_memory_monitor_is_off_unless_the_operator_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MEMORY_MONITOR_VARIABLE, raising=False)
    assert _environment(Path("token"))[MEMORY_MONITOR_VARIABLE] == "0"
    monkeypatch.setenv(MEMORY_MONITOR_VARIABLE, "250")
    assert _environment(Path("token"))[MEMORY_MONITOR_VARIABLE] == "250"


COMPLAINT = """
import sys
from pathlib import Path
from blockyard.deploy.lifecycle.progress import StageProgress
from blockyard.deploy.ray.head import words_kept
from blockyard.deploy.lifecycle.serving import Progress
from ray import NodeID

with StageProgress() as progress:
    for path in map(Path, sys.argv[1:]):
        with words_kept(path):
            NodeID.from_hex("half")
            progress.report(Progress(stage=f"goodbye to {path.name}"))
            print("by Python", file=sys.stderr)
print("after", file=sys.stderr)
NodeID.from_hex("after")
"""


def test_what_ray_complains_of_while_a_cluster_ends_is_kept_from_the_terminal(tmp_path: Path) -> None:
    log, nowhere = tmp_path / "log", tmp_path / "gone" / "other"
    result = subprocess.run(
        [sys.executable, "-c", COMPLAINT, str(log), str(nowhere)], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    *told, complaint = (line.partition("] ")[2] or line for line in result.stderr.splitlines())
    assert told == ["goodbye to log", "by Python", "goodbye to other", "by Python", "after"]
    assert "hex string: after" in complaint, "else there was nothing to keep"
    assert "hex string: half" in log.read_text(encoding="utf-8")
