"""Two Ray nodes, joined as docs/deploying.md says.

The second one is used once the cluster is scaled, and its death fails no request. A node with other code is refused or
given ours.
"""

import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from blockyard.deploy.ray.head import RayHead
from blockyard.deploy.ray.shipping import build_wheel
from blockyard.proto.naming.code_version import code_version
from blockyard.router.client import Client

from tests.system.harness import Cluster, Command, eventually, remembered_state

from .ray_nodes import operators_head, second_node

SIMULATED = (
    *("--model", "demo", "--engine", "simulated", "--device", "cpu", "--kv-cache-memory", "18MiB"),
    *("--simulated-step-seconds", "0.02", "--cpus-per-worker", "1"),
)
NUM_STREAMS = 6
NUM_TOKENS = 300
WAIT_SECONDS = 120.0


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    with operators_head(num_cpus=2) as head:
        yield head


@contextmanager
def serving(command: Command, head: RayHead, *arguments: str) -> Iterator[Cluster]:
    result = command.run("up", *SIMULATED, "--address", head.address, *arguments)
    assert result.returncode == 0, result.stderr
    try:
        yield Cluster(command=command, state=remembered_state(command))
    finally:
        assert command.run("down", "--drain", "0").returncode == 0


def workers(command: Command) -> list[dict[str, Any]]:
    return [place for place in command.json("status")["places"] if place["kind"] == "worker"]


def phases(command: Command) -> list[str]:
    return [place["phase"] for place in workers(command)]


def where(places: list[dict[str, Any]]) -> dict[str, set[str]]:
    """Return the workers of each node."""
    nodes = {place["node_id"] for place in places}
    return {node: {place["name"] for place in places if place["node_id"] == node} for node in nodes}


def workers_by_metrics(command: Command) -> dict[str, set[str]]:
    """Return the workers that each node's metrics port reports."""
    told = {}
    for node in command.json("status")["nodes"]:
        with urllib.request.urlopen(f"http://{node['metrics_address']}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        told[node["node_id"]] = set(
            re.findall(r'^ray_blockyard_blocks_free{.*worker="([^"]+)"', text, re.MULTILINE)
        )
    return told


def stream_tokens(client: Client, seed: int, begun: threading.Barrier | None = None) -> list[int]:
    tokens: list[int] = []
    for delta in client.stream(f"def f{seed}(x):", seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True):
        tokens += delta.token_ids
        if begun is not None and len(tokens) >= 5:
            begun.wait()
            begun = None
    return tokens


def test_a_second_node_that_joins_is_used_and_its_death_fails_nobody(head: RayHead, tmp_path: Path) -> None:
    command = Command(home=tmp_path / "home", cluster="nodes")
    with serving(command, head, "--workers", "2") as cluster, cluster.client() as client:
        assert all(router.startswith("127.0.0.1:") for router in cluster.state.routers), (
            "unless --host says so"
        )
        refused = command.run("scale", "4")
        assert refused.returncode == 1
        assert "2 more workers of 1 CPU each will not fit" in refused.stderr
        assert "room for 0" in refused.stderr
        with second_node(head, num_cpus=2) as node, ThreadPoolExecutor(max_workers=NUM_STREAMS) as threads:
            assert command.json("scale", "4")["added"] == ["worker-2", "worker-3"]
            assert eventually(lambda: phases(command) == ["serving"] * 4, seconds=WAIT_SECONDS)
            places = workers(command)
            first, second = places[0]["node_id"], places[2]["node_id"]
            assert [place["node_id"] for place in places] == [first, first, second, second]
            assert {place["pid"] for place in places[2:]} <= node.pids()
            assert eventually(lambda: workers_by_metrics(command) == where(places), seconds=WAIT_SECONDS)
            expected = list(threads.map(lambda seed: stream_tokens(client, seed), range(NUM_STREAMS)))
            begun = threading.Barrier(NUM_STREAMS + 1, timeout=WAIT_SECONDS)
            streams = [threads.submit(stream_tokens, client, seed, begun) for seed in range(NUM_STREAMS)]
            begun.wait()
            node.end()
            assert [stream.result() for stream in streams] == expected
        assert eventually(lambda: phases(command)[2:] != ["serving"] * 2, seconds=WAIT_SECONDS)
        assert command.json("scale", "2", "--grace-seconds", "1")["removed"] == ["worker-2", "worker-3"]
        assert phases(command) == ["serving"] * 2


@pytest.fixture(scope="module")
def other_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the package as an older node has it: one line differs."""
    folder = tmp_path_factory.mktemp("other")
    target = folder / "installed"
    install = [
        "-m",
        "pip",
        "install",
        "--no-index",
        "--quiet",
        f"--target={target}",
        str(build_wheel(folder)),
    ]
    subprocess.run([sys.executable, *install], check=True, timeout=WAIT_SECONDS)
    with (target / "blockyard/worker/sampling/sampler.py").open("a") as source:
        source.write("# older\n")
    return target


def test_a_node_with_other_code_is_refused_and_with_shipped_code_it_serves(
    head: RayHead, other_copy: Path, tmp_path: Path
) -> None:
    command = Command(home=tmp_path / "home", cluster="mixed")
    with second_node(head, num_cpus=2, python_path=other_copy):
        not_up = command.run("up", *SIMULATED, "--address", head.address, "--workers", "4")
        assert not_up.returncode == 1
        assert "install the same on every node, or ship it with --ship-code" in not_up.stderr
        dry = command.run("up", "--dry-run", *SIMULATED, "--address", head.address, "--workers", "4")
        assert (dry.returncode, "or ship it with --ship-code" in dry.stdout) == (1, True), dry.stderr
        looked = doctor(head)
        assert looked.returncode == 0, looked.stdout
        reached = [line for line in looked.stdout.splitlines() if "ports: reaches all nodes" in line]
        assert len(reached) == len(set(reached)) == 2, "two nodes of one machine are told apart"
        assert "`up` needs --ship-code" in looked.stdout
        with serving(command, head, "--workers", "4", "--ship-code") as cluster:
            status = command.json("status")
            assert {place["code"] for place in status["places"]} == {status["code"]} == {code_version()}
            assert len({place["node_id"] for place in workers(command)}) == 2
            with cluster.client() as client:
                assert client.generate("def", max_tokens=8, ignore_eos=True).finish.completion_tokens == 8


def test_a_node_with_other_code_that_joins_later_gets_no_worker(
    head: RayHead, other_copy: Path, tmp_path: Path
) -> None:
    command = Command(home=tmp_path / "home", cluster="later")
    with serving(command, head, "--workers", "2"), second_node(head, num_cpus=2, python_path=other_copy):
        refused = command.run("scale", "3", "--wait-for-nodes")
        assert refused.returncode == 1
        assert "worker-2 does not start: its node has blockyard 0.1.0+" in refused.stderr
        assert f"the cluster runs {code_version()}" in refused.stderr
        assert command.json("scale", "2")["removed"] == ["worker-2"]


def doctor(head: RayHead) -> "subprocess.CompletedProcess[str]":
    """Run a command that takes no --cluster, unlike the commands of `Command`."""
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "blockyard.deploy.cli",
            "doctor",
            "--model",
            "demo",
            "--address",
            head.address,
        ],
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )
