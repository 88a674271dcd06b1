"""Workers of two ranks on real Ray: the tokens of one process, and one replica in life and death.

The tests of the first cluster run in order: each leaves a cluster that serves.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from blockyard.router.client import Client
from blockyard.worker.llm import LLM, SamplingParams

from tests.system.harness import Cluster, Command, eventually, remembered_state, running

from .ray_nodes import operators_head, second_node
from .rig import CHECKPOINT

ENGINE = ("--model", "demo", "--device", "cpu", "--dtype", "float32", "--kv-cache-memory", "9MiB")
RANKS = ("--tensor-parallel-size", "2")
PROMPTS = ("def main():", "class Pool:\n    def __init__(self", "for block in")
NUM_TOKENS = 200
HEAL_SECONDS = 120.0
Place = dict[str, Any]
LIST_GROUPS = """
import json, ray, sys

ray.init(address=sys.argv[1], log_to_driver=False)
table = [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
print(json.dumps({group["name"]: list(group["bundles_to_node_id"].values()) for group in table}))
"""
"""Run in a process of its own, because Ray reads its credentials once."""


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """Return the tokens of one process that has the whole model."""
    llm = LLM(str(CHECKPOINT), device="cpu", dtype="float32", kv_cache_memory=18 * 2**20)
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    answers = llm.generate(PROMPTS, sampling, ignore_eos=True)
    return [list(answer.outputs[0].token_ids) for answer in answers]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    command = Command(home=tmp_path_factory.mktemp("home"), cluster="ranks")
    with running(command, "up", *ENGINE, *RANKS, "--workers", "2", "--router-port", "0") as cluster:
        yield cluster


def stream_tokens(client: Client, prompt: str, begun: threading.Barrier | None = None) -> list[int]:
    tokens: list[int] = []
    for delta in client.stream(prompt, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True):
        tokens += delta.token_ids
        if begun is not None and len(tokens) >= 5:
            begun.wait()
            begun = None
    return tokens


def pids(place: Place) -> list[int]:
    return [rank["pid"] for rank in place["ranks"]]


def is_running(pid: int) -> bool:
    """Tell whether a process runs. Return False for one that has ended and is still listed."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def groups(address: str | None, token_path: str | Path | None) -> dict[str, list[str]]:
    """Return the nodes of each placement group's bundles on a Ray, by its name."""
    result = subprocess.run(
        [sys.executable, "-c", LIST_GROUPS, str(address)],
        env={**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=HEAL_SECONDS,
    )
    found: dict[str, list[str]] = json.loads(result.stdout.splitlines()[-1])
    return found


def groups_of(cluster: Cluster) -> dict[str, list[str]]:
    return groups(cluster.state.ray_address, cluster.state.ray_token_path)


def test_two_ranks_answer_with_the_tokens_of_one_process(cluster: Cluster, alone: list[list[int]]) -> None:
    with cluster.client() as client:
        assert [stream_tokens(client, prompt) for prompt in PROMPTS] == alone
    for name in ("worker-0", "worker-1"):
        place = cluster.command.place(name)
        assert pids(place)[0] == place["pid"]
        assert len(set(pids(place))) == 2
    assert set(groups_of(cluster)) == {"blockyard-ranks worker-0", "blockyard-ranks worker-1"}
    logs = cluster.command.run("logs", "worker-0", "--prefix")
    assert "worker-0 rank 1 " in logs.stdout


@pytest.mark.parametrize(("rank", "kind"), [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_the_end_of_a_rank_ends_the_replica_and_its_requests_go_on_elsewhere(
    cluster: Cluster, alone: list[list[int]], rank: int, kind: signal.Signals
) -> None:
    before = cluster.command.place("worker-0")
    with cluster.client() as client, ThreadPoolExecutor(len(PROMPTS)) as threads:
        begun = threading.Barrier(len(PROMPTS) + 1, timeout=HEAL_SECONDS)
        streams = [threads.submit(stream_tokens, client, prompt, begun) for prompt in PROMPTS]
        begun.wait()
        os.kill(pids(before)[rank], kind)
        assert [stream.result() for stream in streams] == alone

        def is_replaced() -> bool:
            place = cluster.command.place("worker-0")
            return place["phase"] == "serving" and place["incarnation"] != before["incarnation"]

        assert eventually(is_replaced, seconds=HEAL_SECONDS)
        assert not any(map(is_running, pids(before)))
        assert not set(pids(before)) & set(pids(cluster.command.place("worker-0")))
        assert len(groups_of(cluster)) == 2
        assert [stream_tokens(client, prompt) for prompt in PROMPTS] == alone


def test_a_supervisor_that_comes_back_adopts_all_ranks(cluster: Cluster) -> None:
    before, held = cluster.command.json("status"), groups_of(cluster)
    os.kill(before["supervisor_pid"], signal.SIGKILL)

    def is_back() -> bool:
        told = cluster.command.run("status", "--output", "json")
        return told.returncode == 0 and f'"supervisor_pid": {before["supervisor_pid"]},' not in told.stdout

    assert eventually(is_back, seconds=HEAL_SECONDS)
    for name in ("worker-0", "worker-1"):
        (was,) = (place for place in before["places"] if place["name"] == name)
        assert eventually(
            lambda name=name: cluster.command.place(name)["phase"] == "serving", seconds=HEAL_SECONDS
        )  # type: ignore[misc]
        place = cluster.command.place(name)
        assert (place["incarnation"], place["ranks"]) == (was["incarnation"], was["ranks"])
    assert groups_of(cluster) == held


def test_a_worker_that_was_drained_and_has_ended_holds_no_group_until_it_is_restarted(
    cluster: Cluster,
) -> None:
    ranks = pids(cluster.command.place("worker-1"))
    assert cluster.command.run("drain", "worker-1").returncode == 0
    assert eventually(lambda: cluster.command.place("worker-1")["phase"] == "draining", seconds=HEAL_SECONDS)
    os.kill(ranks[1], signal.SIGKILL)
    assert eventually(lambda: cluster.command.place("worker-1")["phase"] == "stopped", seconds=HEAL_SECONDS)
    assert eventually(lambda: not any(map(is_running, ranks)), seconds=10)
    assert set(groups_of(cluster)) == {"blockyard-ranks worker-0"}
    assert cluster.command.run("restart", "worker-1").returncode == 0
    assert len(groups_of(cluster)) == 2


def test_a_worker_that_leaves_takes_its_ranks_and_their_group_along(cluster: Cluster) -> None:
    leaving = pids(cluster.command.place("worker-1"))
    assert cluster.command.json("scale", "1")["removed"] == ["worker-1"]
    assert eventually(lambda: not any(map(is_running, leaving)), seconds=10)
    assert set(groups_of(cluster)) == {"blockyard-ranks worker-0"}


def test_ranks_that_no_node_has_room_for_are_on_two_nodes(alone: list[list[int]], tmp_path: Path) -> None:
    command = Command(home=tmp_path / "home", cluster="spread")
    with operators_head(num_cpus=1) as head, second_node(head, num_cpus=1):
        up = command.run("up", *ENGINE, *RANKS, "--workers", "1", "--address", head.address)
        assert up.returncode == 0, up.stderr
        assert "no node has room for all ranks of 1 worker" in " ".join(up.stderr.split())
        state = remembered_state(command)
        try:
            place = command.place("worker-0")
            assert len({rank["node_id"] for rank in place["ranks"]}) == 2
            assert groups(head.address, head.token_path) == {
                "blockyard-spread worker-0": [rank["node_id"] for rank in place["ranks"]]
            }
            with Client(list(state.routers), timeout_seconds=60.0) as client:
                assert [stream_tokens(client, prompt) for prompt in PROMPTS] == alone
            assert "no node has room for all 2 ranks of worker-0" in command.run("logs", "supervisor").stdout
        finally:
            assert command.run("down", "--drain", "0").returncode == 0
        assert groups(head.address, head.token_path) == {}
