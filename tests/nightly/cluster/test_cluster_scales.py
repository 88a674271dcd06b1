"""A cluster grows and shrinks under load, on real Ray processes: no request fails, prefixes are still found, and
nothing is left.

The tests run in order: the last ends the cluster.
"""

import asyncio
import os
import shutil
import signal
from pathlib import Path

import pytest
from blockyard.deploy.lifecycle.cluster import leftovers
from blockyard.deploy.machine.processes import session_members
from blockyard.proto.index.redis import RedisPrefixIndex, connect
from blockyard.proto.v1 import cluster_pb2
from blockyard.router.client import NotFoundError

from tests.system.harness import Cluster, eventually, remembered_state
from tests.system.processes import MODEL

from .test_cluster_restarts import QUESTIONS, WAIT_SECONDS, ask, load

READY = cluster_pb2.WORKER_STATE_READY


def supervised(cluster: Cluster) -> dict[str, str]:
    places = cluster.command.json("status")["places"]
    return {place["name"]: place["phase"] for place in places if place["kind"] == "worker"}


def test_a_cluster_grows_and_shrinks_under_load_and_fails_nobody(cluster: Cluster) -> None:
    with cluster.client() as client:
        expected = {question: ask(client, question).token_ids for question in QUESTIONS}
    with load(cluster) as running:
        grown = cluster.command.json("scale", "3")
        assert (grown["added"], grown["removed"]) == (["worker-2"], [])
        assert supervised(cluster) == dict.fromkeys(("worker-0", "worker-1", "worker-2"), "serving")
        assert {worker.worker_id for worker in running.client.list_workers() if worker.state == READY} == {
            "worker-0",
            "worker-1",
            "worker-2",
        }
        before = len(running.answers)
        # A grace so short that some requests are moved, not only finished.
        shrunk = cluster.command.json("scale", "1", "--grace-seconds", "0.3")
        assert shrunk["removed"] == ["worker-1", "worker-2"]
        assert eventually(lambda: len(running.answers) >= before + len(QUESTIONS), seconds=WAIT_SECONDS)
    assert all(answer.token_ids == expected[question] for question, answer in running.answers)
    assert sum(answer.finish.migrations for _, answer in running.answers) == 0, "a drain counts as no death"


def test_who_left_is_in_no_list_and_not_in_the_index(cluster: Cluster) -> None:
    assert supervised(cluster) == {"worker-0": "serving"}
    assert remembered_state(cluster.command).num_workers == 1
    with cluster.client() as client:
        assert eventually(
            lambda: [worker.worker_id for worker in client.list_workers()] == ["worker-0"],
            seconds=WAIT_SECONDS,
        )
    assert asyncio.run(indexed(cluster)) == ["worker-0"]


async def indexed(cluster: Cluster) -> list[str]:
    """Return the workers that the index takes for alive."""
    assert cluster.state.router_redis_url is not None
    async with connect(cluster.state.router_redis_url, timeout_seconds=5.0) as redis:
        return [
            str(record.worker_id)
            for record in await RedisPrefixIndex(redis, cluster.state.cluster).directory()
        ]


def test_prefixes_are_still_found(cluster: Cluster) -> None:
    with cluster.client() as client:
        asked = [ask(client, question, max_tokens=2) for _ in range(2) for question in QUESTIONS]
    answers = asked[-len(QUESTIONS) :]
    prompt_tokens = sum(answer.finish.prompt_tokens for answer in answers)
    cached_tokens = sum(answer.finish.cached_tokens for answer in answers)
    print(f"{cached_tokens} of {prompt_tokens} prompt tokens were cached")
    assert cached_tokens >= 0.7 * prompt_tokens


def test_more_workers_than_there_is_room_for_are_refused_before_anything_is_changed(cluster: Cluster) -> None:
    result = cluster.command.run("scale", "9")
    assert result.returncode == 1
    assert "8 more workers of 0.5 CPUs each will not fit: the Ray cluster has room for" in result.stderr
    assert supervised(cluster) == {"worker-0": "serving"}


def test_a_supervisor_that_dies_keeps_the_number_that_was_asked_for(cluster: Cluster) -> None:
    os.kill(cluster.command.json("status")["supervisor_pid"], signal.SIGKILL)
    assert eventually(lambda: supervised(cluster) == {"worker-0": "serving"}, seconds=WAIT_SECONDS)
    assert cluster.command.json("scale", "2", "--grace-seconds", "0")["added"] == ["worker-1"]


def test_the_model_that_the_cluster_began_with_is_removed_under_load_and_fails_nobody(
    cluster: Cluster, tmp_path: Path
) -> None:
    folder = shutil.copytree(MODEL, tmp_path / "second")
    refused = cluster.command.run("model", "remove", "demo")
    assert refused.returncode == 1
    assert "demo is the only model" in refused.stderr
    with cluster.client() as client:
        expected = {question: ask(client, question).token_ids for question in QUESTIONS}
        added = cluster.command.json("model", "add", str(folder))
        assert added["workers"] == ["second-worker-0"]
        with load(cluster, "second") as running:
            # Both name the first model, the second by naming none.
            ending = [
                client.stream("a = 1", model=name, max_tokens=100, ignore_eos=True) for name in ("demo", None)
            ]
            for stream in ending:
                next(stream)
            before = len(running.answers)
            cluster.command.json("model", "remove", "demo")
            assert [1 + sum(len(delta.token_ids) for delta in stream) for stream in ending] == [100, 100]
            assert eventually(lambda: len(running.answers) >= before + len(QUESTIONS), seconds=WAIT_SECONDS)
        assert all(answer.token_ids == expected[question] for question, answer in running.answers)
        with pytest.raises(NotFoundError):
            ask(client, QUESTIONS[0], model="demo")
        assert ask(client, QUESTIONS[0]).token_ids == expected[QUESTIONS[0]], "the second is the default now"
    assert supervised(cluster) == {"second-worker-0": "serving"}
    os.kill(cluster.command.json("status")["supervisor_pid"], signal.SIGKILL)
    assert eventually(lambda: supervised(cluster) == {"second-worker-0": "serving"}, seconds=WAIT_SECONDS)


def test_down_leaves_nothing(cluster: Cluster) -> None:
    before = remembered_state(cluster.command)
    assert before.head is not None
    assert before.redis is not None
    assert len(session_members(before.head.session)) > 5
    result = cluster.command.run("down")
    assert result.returncode == 0, result.stderr
    assert leftovers(before) == []
    assert not cluster.command.home.exists()
