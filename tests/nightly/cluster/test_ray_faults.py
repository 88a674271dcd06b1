"""Faults of a cluster that only Ray can cause: a dead node, a dead head, a worker that its supervisor cannot start."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from blockyard.deploy.machine.processes import command_of, end_session, is_alive, session_members
from blockyard.deploy.ray.head import RayHead, free_port, start_head
from blockyard.deploy.ray.node_probe import RECONNECT_VARIABLE
from blockyard.proto.v1 import cluster_pb2
from blockyard.router.client import Client
from blockyard.router.client.errors import BlockyardError
from blockyard.router.client.results import Completion, completion

from tests.system.harness import Cluster, Command, eventually, remembered_state, running

from .ray_nodes import documented_head
from .rig import CHECKPOINT

READY = cluster_pb2.WORKER_STATE_READY
NUM_STREAMS = 8
NUM_TOKENS = 400
SIMULATED = (
    *("--engine", "simulated", "--device", "cpu", "--kv-cache-memory", "18MiB"),
    *("--simulated-step-seconds", "0.02"),
)
HEAL_SECONDS = 120.0
STREAM_SECONDS = 120.0
RECONNECT_SECONDS = 30
SHORT_SECONDS = 20


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Two workers on a copy of the demo model, which a test may damage."""
    model = tmp_path / "model"
    shutil.copytree(CHECKPOINT, model)
    command = Command(home=tmp_path / "home", cluster="faulty")
    with running(command, "up", "--model", str(model), "--workers", "2", *SIMULATED) as cluster:
        yield cluster


def stream_once(
    client: Client, seed: int, begun: threading.Barrier | None = None
) -> tuple[Completion, float]:
    """Return an answer, and its longest pause."""
    pieces, times = [], [time.monotonic()]
    for delta in client.stream(
        f"def f{seed}(x):",
        seed=seed,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        timeout_seconds=STREAM_SECONDS,
    ):
        pieces.append(delta)
        times.append(time.monotonic())
        if begun is not None and len(pieces) == 5:
            begun.wait()
    return completion(pieces), max(after - before for before, after in itertools.pairwise(times[5:]))


@contextmanager
def disturbed(cluster: Cluster, measured: dict[str, Any]) -> Iterator[Client]:
    """Run streams while the body does its worst. Each must bring the tokens of the run before."""
    with cluster.client() as client, ThreadPoolExecutor(max_workers=NUM_STREAMS) as threads:
        seeds = range(NUM_STREAMS)
        reference = list(threads.map(lambda seed: stream_once(client, seed)[0], seeds))
        begun = threading.Barrier(NUM_STREAMS + 1, timeout=60)
        running = [threads.submit(stream_once, client, seed, begun) for seed in seeds]
        begun.wait()
        yield client
        finished = [future.result() for future in running]
        measured.update(
            failed=0,
            migrated=sum(answer.finish.migrations > 0 for answer, _ in finished),
            recovery_seconds=max(pause for _, pause in finished),
        )
        assert [answer.token_ids for answer, _ in finished] == [answer.token_ids for answer in reference]


@pytest.mark.fault(29)
def test_a_worker_that_cannot_start_says_why_and_the_others_serve_on(
    cluster: Cluster, measured: dict[str, Any]
) -> None:
    config = Path(str(cluster.command.home.parent)) / "model" / "config.json"
    sound = config.read_text()
    with disturbed(cluster, measured):
        config.write_text("{}")
        os.kill(cluster.command.place("worker-1")["pid"], signal.SIGKILL)

        def says_why() -> bool:
            place = cluster.command.place("worker-1")
            return place["phase"] != "serving" and bool(place["error"])

        assert eventually(says_why, seconds=HEAL_SECONDS)
    time.sleep(5.0)
    place = cluster.command.place("worker-1")
    # The number of tries and the time between them are not visible outside: that part of the row is not asserted.
    measured["note"] = f"told: {place['error'][:60]}"
    assert "Traceback" not in place["error"]
    config.write_text(sound)
    with cluster.client() as client:
        healed = lambda: sum(worker.state == READY for worker in client.list_workers()) == 2  # noqa: E731
        assert eventually(healed, seconds=HEAL_SECONDS)


@pytest.fixture
def patient_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two workers on a Ray that waits RECONNECT_SECONDS for its head."""
    monkeypatch.setenv(RECONNECT_VARIABLE, str(RECONNECT_SECONDS))
    command = Command(home=tmp_path / "home", cluster="patient")
    result = command.run("up", "--model", "demo", "--workers", "2", *SIMULATED)
    assert result.returncode == 0, result.stderr
    try:
        yield Cluster(command=command, state=remembered_state(command))
    finally:
        down = command.run("down", "--drain", "0")
        assert down.returncode == 0, down.stderr


@pytest.mark.fault(34)
def test_streams_go_on_when_the_head_of_ray_has_died_and_its_end_is_told(
    patient_cluster: Cluster, measured: dict[str, Any]
) -> None:
    cluster = patient_cluster
    assert cluster.state.head is not None
    with ThreadPoolExecutor(max_workers=1) as thread, cluster.client() as onlooker:
        with disturbed(cluster, measured) as client:
            os.kill(_member(cluster.state.head.session, b"gcs_server"), signal.SIGKILL)
            died = time.monotonic()
            serves = thread.submit(_last_served, onlooker)
            assert client.generate("def", max_tokens=4, ignore_eos=True).finish.completion_tokens == 4
        told = cluster.command.run("status")
        served_seconds = serves.result(10 * RECONNECT_SECONDS) - died
    for status in (told, cluster.command.run("status")):
        assert status.returncode != 0
        assert "no Ray answers" in status.stderr
        assert "keep serving until" in status.stderr
        assert "Traceback" not in status.stderr
    measured["note"] = f"served for {served_seconds:.0f} s more, of {RECONNECT_SECONDS} configured"
    assert served_seconds >= 0.8 * RECONNECT_SECONDS


@pytest.mark.fault(86)
def test_a_joined_ray_whose_control_service_died_is_told_with_its_own_time_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: dict[str, Any]
) -> None:
    """The operator started Ray with SHORT_SECONDS, and waits until Ray has really ended all of it."""
    command, port = Command(home=tmp_path / "home", cluster="joined"), free_port()
    directory = Path(tempfile.mkdtemp(prefix="by-fault-", dir="/tmp"))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(directory / "token"))
    address = f"127.0.0.1:{port}"
    two = ("--workers", "2", "--cpus-per-worker", "0.5")
    up = ("up", "--model", "demo", *two, *SIMULATED, "--address", address)
    try:
        with documented_head(directory, port, **{RECONNECT_VARIABLE: str(SHORT_SECONDS)}) as head:
            started = command.run(*up)
            assert started.returncode == 0, started.stderr
            assert (
                f"after {SHORT_SECONDS} s: start these nodes with {RECONNECT_VARIABLE}=600" in started.stderr
            )
            cluster = Cluster(command=command, state=remembered_state(command))
            with disturbed(cluster, measured):
                os.kill(_member(head.session, b"gcs_server"), signal.SIGKILL)
            died = time.monotonic()
            for told in (command.run("status"), command.run("down"), command.run("scale", "3")):
                assert told.returncode == 1
                assert f"until Ray ends them all, {SHORT_SECONDS} s after its death" in told.stderr
                assert "`blockyard down --forget --cluster joined`" in told.stderr
            pids = [member for member in session_members(head.session) if _is_ours(member.pid)]
            assert eventually(lambda: not any(map(is_alive, pids)), seconds=10 * SHORT_SECONDS)
            measured["note"] = f"ended {time.monotonic() - died:.0f} s later, of {SHORT_SECONDS} said"
        forgotten = command.run("down", "--forget")
        assert forgotten.returncode == 0, forgotten.stderr
        assert "Ray was not asked, and no worker or router was ended" in forgotten.stdout
        assert f"Neither Ray at {address} nor a router takes connections" in forgotten.stdout
        with documented_head(directory, port):
            again = command.run(*up)
            assert again.returncode == 0, again.stderr
            assert RECONNECT_VARIABLE not in again.stderr, "the document's own commands need no warning"
            with Client(list(remembered_state(command).routers)) as client:
                assert client.generate("def", max_tokens=4, ignore_eos=True).finish.completion_tokens == 4
            assert command.run("down", "--drain", "0").returncode == 0
    finally:
        shutil.rmtree(directory)


def _is_ours(pid: int) -> bool:
    return command_of(pid)[:1] in (["ray::WorkerActor"], ["ray::RouterActor"])


def _last_served(client: Client) -> float:
    """Return when the last of many requests was answered, one after the other until the first that fails."""
    last = time.monotonic()
    while True:
        try:
            client.generate("def", max_tokens=1, timeout_seconds=20.0)
        except BlockyardError:
            return last
        last = time.monotonic()
        time.sleep(0.2)


def _member(session: int, name: bytes) -> int:
    """Return the process of a session whose program has this name."""
    (pid,) = (
        member.pid
        for member in session_members(session)
        if name in Path(f"/proc/{member.pid}/cmdline").read_bytes().split(b"\0")[0]
    )
    return pid


@pytest.fixture
def two_nodes() -> Iterator[tuple[RayHead, "subprocess.Popen[bytes]"]]:
    """Start an operator's Ray of two nodes. The folder's path must be short: Ray puts sockets in it."""
    directory = Path(tempfile.mkdtemp(prefix="by-fault-", dir="/tmp"))
    head = start_head(directory, num_cpus=4)
    recorded = session_members(head.session)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_AUTH_MODE", "token")
        environment.setenv("RAY_AUTH_TOKEN_PATH", str(head.token_path))
        join = ["start", "--address", head.address, "--num-cpus", "4", "--block"]
        with (directory / "node.log").open("wb") as log:
            node = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", *join],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            yield head, node
        finally:
            end_session(node.pid, session_members(node.pid))
            node.wait(10)
            end_session(head.session, recorded)
            shutil.rmtree(directory)


@pytest.mark.fault(33)
def test_the_death_of_a_node_moves_all_that_ran_there(
    two_nodes: tuple[RayHead, "subprocess.Popen[bytes]"], tmp_path: Path, measured: dict[str, Any]
) -> None:
    head, node = two_nodes
    assert eventually(lambda: _has_raylet(node.pid), seconds=60)
    command = Command(home=tmp_path / "home", cluster="nodes")
    # More than one node has room for, so that no worker waits for those of the other node; the router stays.
    placed = ("--workers", "6", "--cpus-per-worker", "1", "--router-resource", "node:__internal_head__")
    up = ("up", "--model", "demo", *SIMULATED, *placed, "--address", head.address)
    assert eventually(lambda: command.run(*up).returncode == 0, seconds=60), command.run(*up).stderr
    there = {member.pid for member in session_members(node.pid)}
    try:
        places = [place for place in command.json("status")["places"] if place["kind"] == "worker"]
        lost = [place["name"] for place in places if place["pid"] in there]
        assert 0 < len(lost) < len(places)
        with disturbed(Cluster(command=command, state=remembered_state(command)), measured):
            for pid in there:
                os.kill(pid, signal.SIGKILL)
        measured["note"] = f"{len(lost)} of {len(places)} workers were on it"
    finally:
        command.run("down", "--drain", "0")


def _has_raylet(session: int) -> bool:
    try:
        return bool(_member(session, b"raylet"))
    except (ValueError, OSError):
        return False
