"""A cluster keeps the size and the models that were asked for, on real Ray processes. The tests run in order."""

import os
import shutil
import signal
from pathlib import Path

import pytest
from blockyard.router.client import NotFoundError

from tests.system.asking import QUESTIONS, WAIT_SECONDS, ask, load
from tests.system.harness import Cluster, eventually
from tests.system.processes import MODEL


def supervised(cluster: Cluster) -> dict[str, str]:
    places = cluster.command.json("status")["places"]
    return {place["name"]: place["phase"] for place in places if place["kind"] == "worker"}


def test_more_workers_than_there_is_room_for_are_refused_before_anything_is_changed(cluster: Cluster) -> None:
    assert cluster.command.json("scale", "1")["removed"] == ["worker-1"]
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
