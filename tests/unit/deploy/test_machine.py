"""Deadlines, causes of a process's end, ports, and the checks before Ray starts or is joined: without a process."""

import contextlib
import errno
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import grpc
import pytest
from blockyard.deploy.machine.deadline import (
    ANSWER_SECONDS,
    MAX_START_SECONDS,
    MIN_STEP_SECONDS,
    Budget,
    answers_within,
)
from blockyard.deploy.machine.deaths import DeathWatch, ending
from blockyard.deploy.machine.processes import listening_ports
from blockyard.deploy.ray.head import (
    DASHBOARD_PORT,
    MEMORY_MONITOR_VARIABLE,
    RayConnectError,
    _dashboard_port,
    _environment,
    check_listening,
    moved_dashboard,
)
from blockyard.deploy.supervision.actors import DiedError, deaths_as_errors, reason_by_ray
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import OutOfMemoryError, RayActorError

from .rig import listening


@given(age_seconds=st.floats(-1.0, 1000.0), wanted_seconds=st.lists(st.floats(0.01, 20.0), max_size=8))
def test_steps_that_all_take_what_they_may_end_within_the_budget(
    age_seconds: float, wanted_seconds: list[float]
) -> None:
    now = 100.0
    budget = Budget(age_seconds, clock=lambda: now)
    assert budget.left_seconds >= ANSWER_SECONDS - MAX_START_SECONDS - 1e-9
    for wanted in wanted_seconds:
        step_seconds = budget.step_seconds(wanted)
        assert MIN_STEP_SECONDS <= step_seconds <= max(wanted, MIN_STEP_SECONDS)
        now += step_seconds
    counted_seconds = min(max(age_seconds, 0.0), MAX_START_SECONDS)
    assert now - 100.0 + counted_seconds <= ANSWER_SECONDS + len(wanted_seconds) * MIN_STEP_SECONDS
    assert budget.left_seconds >= 0.0


def test_a_command_that_answers_in_time_is_left_alone() -> None:
    said: list[str] = []
    with answers_within(0.1, "too late", give_up=said.append):
        pass
    time.sleep(0.2)
    assert said == []


EXITED = 3 << 8


@pytest.mark.parametrize(
    ("status", "for_memory", "told"),
    [
        (signal.SIGKILL, False, "its process was killed by SIGKILL"),
        (signal.SIGKILL, True, "its process was killed for memory, by the kernel (SIGKILL)"),
        (signal.SIGSEGV, True, "its process was killed by SIGSEGV"),
        (signal.SIGSEGV | 0x80, False, "its process was killed by SIGSEGV"),
        (signal.SIGRTMIN + 1, False, "its process was killed by signal 35"),
        (EXITED, False, "its process exited with code 3"),
        (0, False, "its process exited with code 0"),
    ],
)
def test_a_status_is_told_in_words(status: int, for_memory: bool, told: str) -> None:
    assert ending(status, for_memory=for_memory) == told


async def test_nothing_is_told_of_one_that_lives() -> None:
    with contextlib.closing(DeathWatch()) as death:
        death.watch(os.getpid())
        assert await death.reason() == ""


async def test_a_process_that_cannot_be_watched_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", refused)
    with contextlib.closing(DeathWatch()) as death:
        death.watch(os.getpid())
        assert await death.reason() == ""
    assert "the log will not say how: [Errno 24] Too many open files" in caplog.text


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RayActorError(error_msg="The actor died because its node has died. Node Id: 1"), "its node died"),
        (RayActorError(error_msg="Worker exit type: SYSTEM_ERROR"), "its process died"),
        (OutOfMemoryError("Task was killed due to the node running low on memory"), "short of memory"),
    ],
)
async def test_an_actors_death_is_told_by_ray_where_ray_knows_more_than_the_kernel(
    error: Exception, told: str
) -> None:
    with pytest.raises(DiedError, match=told):
        async with deaths_as_errors():
            raise error
    short = "Ray killed its process: its node was short of memory"
    assert reason_by_ray("Worker exit type: NODE_OUT_OF_MEMORY") == short


def test_the_dashboard_moves_where_its_port_is_taken_and_that_is_told() -> None:
    with socket.socket() as occupant:
        occupant.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past connections of a dashboard
        with suppress(OSError):  # taken by somebody else: as good
            occupant.bind(("127.0.0.1", DASHBOARD_PORT))
            occupant.listen()
        assert _dashboard_port() != DASHBOARD_PORT
    assert moved_dashboard(f"127.0.0.1:{DASHBOARD_PORT}") is None
    assert moved_dashboard("127.0.0.1:4711") == (
        "port 8265 is taken: the dashboard and the live page are served on 4711"
    )


def test_neither_a_web_server_nor_one_that_says_nothing_is_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as web:
        Thread(target=web.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{web.server_port}"
        with pytest.raises(RayConnectError, match=f"the program at {address} is not Ray"):
            check_listening(address)
        web.shutdown()
    monkeypatch.setattr("blockyard.deploy.ray.head.CONNECT_SECONDS", 0.2)
    with listening() as port, pytest.raises(RayConnectError, match="no Ray answers at"):
        check_listening(f"127.0.0.1:{port}")


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


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_ports_of_a_process_are_those_at_which_it_takes_connections(
    family: socket.AddressFamily, host: str
) -> None:
    before = listening_ports(os.getpid())
    with socket.socket(family) as server, socket.socket(family) as bound:
        try:
            server.bind((host, 0))
        except OSError:
            pytest.skip(f"this machine has no {host}")
        bound.bind((host, 0))
        server.listen()
        port = server.getsockname()[1]
        with socket.create_connection((host, port)):
            assert listening_ports(os.getpid()) == before | {port}
    assert listening_ports(os.getpid()) == before
