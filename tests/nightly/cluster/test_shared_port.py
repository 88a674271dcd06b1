"""Several router processes behind one port: they share the clients, and the death of one causes a pause at most."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from blockyard.proto.v1 import cluster_pb2
from blockyard.proto.v1.cluster_pb2_grpc import ClusterServiceStub
from blockyard.router.client import Client

from tests.system.harness import Cluster, Command, eventually, running

from .rig import CHECKPOINT, SIMULATED

NUM_ROUTERS = 2
NUM_CONNECTIONS = 16
"""All connections go to the same one of two processes once in 32,768 runs."""
HEAL_SECONDS = 60.0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    command = Command(home=tmp_path_factory.mktemp("home"), cluster="shared")
    with running(command, "up", *SIMULATED, "--routers", str(NUM_ROUTERS)) as cluster:
        yield cluster


def router_places(cluster: Cluster) -> list[dict[str, Any]]:
    places = cluster.command.json("status")["places"]
    return [place for place in places if place["kind"] == "router"]


def connections(address: str, pid: int) -> int:
    """Count the established client connections that a process holds on the port."""
    port = int(address.rpartition(":")[2])
    inodes = {link.readlink().name for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    # gRPC listens for IPv4 on sockets of IPv6.
    tables = [Path(f"/proc/{pid}/net/{kind}").read_text() for kind in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return sum(
        row[1].endswith(f":{port:04X}") and row[3] == "01" and f"socket:[{row[9]}]" in inodes for row in rows
    )


def test_every_process_gets_a_share_of_the_connections(shared: Cluster) -> None:
    (address,) = shared.state.routers
    pids = [place["pid"] for place in router_places(shared)]
    assert len({*pids}) == NUM_ROUTERS
    before = {pid: connections(address, pid) for pid in pids}
    channels = [
        grpc.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1), ("number", number)))
        for number in range(NUM_CONNECTIONS)
    ]
    for channel in channels:
        stub = ClusterServiceStub(channel)  # type: ignore[no-untyped-call]
        stub.GetClusterInfo(cluster_pb2.GetClusterInfoRequest(), timeout=10)
    gained = {pid: connections(address, pid) - before[pid] for pid in pids}
    for channel in channels:
        channel.close()
    assert sum(gained.values()) == NUM_CONNECTIONS
    assert all(gained.values()), "the kernel gave everybody to one process"


def test_a_killed_process_fails_no_request_of_clients_that_stood_on_it_and_comes_back(
    shared: Cluster,
) -> None:
    (address,) = shared.state.routers
    victim = router_places(shared)[0]
    clients = [Client(address, timeout_seconds=60.0) for _ in range(NUM_CONNECTIONS)]
    before = connections(address, victim["pid"])

    def ask(client: Client) -> int:
        return client.generate("one two", max_tokens=4, ignore_eos=True).finish.completion_tokens

    with ThreadPoolExecutor(max_workers=8) as threads:
        assert list(threads.map(ask, clients)) == [4] * NUM_CONNECTIONS
        assert connections(address, victim["pid"]) > before, "nobody stood on it"
        os.kill(victim["pid"], signal.SIGKILL)
        assert list(threads.map(ask, clients)) == [4] * NUM_CONNECTIONS
    for client in clients:
        client.close()

    def healed() -> bool:
        reborn = shared.command.place(victim["name"])
        return bool(reborn["phase"] == "serving" and reborn["pid"] != victim["pid"])

    assert eventually(healed, seconds=HEAL_SECONDS)
    assert {place["address"] for place in router_places(shared)} == {address}


def test_another_cluster_is_not_let_on_the_port(shared: Cluster) -> None:
    (address,) = shared.state.routers
    port = address.rpartition(":")[2]
    stranger = subprocess.run(
        [sys.executable, "-m", "blockyard.router", "--model", str(CHECKPOINT), "--port", port],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert stranger.returncode == 1
    assert "is the port taken?" in stranger.stderr
