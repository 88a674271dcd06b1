"""Workers that are drained and restarted under load, on real Ray processes: no request fails, and the tokens do not
change.

The tests run in order: each leaves a cluster that serves.
"""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from blockyard.proto.v1 import cluster_pb2
from blockyard.router.client import Client

from tests.system.asking import QUESTIONS, SYSTEM, WAIT_SECONDS, ask, load
from tests.system.harness import Cluster, eventually


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> dict[str, tuple[int, ...]]:
    """Return the tokens of each question while nothing else happens."""
    with cluster.client() as client:
        return {question: ask(client, question).token_ids for question in QUESTIONS}


def state_of(client: Client, worker_id: str) -> tuple[int, str]:
    known = [worker for worker in client.list_workers() if worker.worker_id == worker_id]
    best = max(known, key=lambda worker: worker.state == cluster_pb2.WORKER_STATE_READY)
    return best.state, best.incarnation


@pytest.mark.fault(31)
def test_a_rolling_restart_under_load_fails_nobody_and_changes_no_token(
    cluster: Cluster, undisturbed: dict[str, tuple[int, ...]], measured: dict[str, Any]
) -> None:
    names = ("worker-0", "worker-1")
    before = {name: cluster.command.place(name) for name in names}
    with load(cluster) as running:
        num_before = len(running.answers)
        # A grace so short that some requests are moved, not only finished.
        result = cluster.command.run("restart", *names, "--grace-seconds", "0.3")
        assert result.returncode == 0, result.stderr
        num_during = len(running.answers) - num_before
        assert eventually(lambda: len(running.answers) >= num_before + num_during + 6, seconds=WAIT_SECONDS)
    assert "restarted worker-0, worker-1" in result.stdout
    after = {name: cluster.command.place(name) for name in names}
    for name in names:
        assert after[name]["incarnation"] != before[name]["incarnation"]
        assert after[name]["num_starts"] == before[name]["num_starts"] + 1
        assert (after[name]["phase"], after[name]["error"]) == ("serving", "")
    moved = sum(answer.finish.migrations for _, answer in running.answers)
    measured.update(failed=0, note=f"{num_during} answers during the restart of two workers")
    assert num_during > 0
    assert all(answer.token_ids == undisturbed[question] for question, answer in running.answers)
    assert moved == 0, "a drain counts as no death"


def test_the_hit_rate_recovers_after_the_restart(cluster: Cluster) -> None:
    with cluster.client() as client:
        answers = [ask(client, question, max_tokens=2) for _ in range(2) for question in QUESTIONS]
    prompt_tokens = sum(answer.finish.prompt_tokens for answer in answers[-len(QUESTIONS) :])
    cached_tokens = sum(answer.finish.cached_tokens for answer in answers[-len(QUESTIONS) :])
    print(f"{cached_tokens} of {prompt_tokens} prompt tokens were cached in the second round")
    assert cached_tokens >= 0.7 * prompt_tokens


def test_a_drained_worker_gets_nothing_until_it_is_resumed(
    cluster: Cluster, undisturbed: dict[str, tuple[int, ...]]
) -> None:
    with load(cluster) as running:
        drained = cluster.command.json("drain", "worker-0", "--grace-seconds", "0.2")
        assert drained["worker"] == "worker-0"
        state, _ = state_of(running.client, "worker-0")
        assert state == cluster_pb2.WORKER_STATE_DRAINING
        assert running.client.block_pool("worker-0").used_blocks == 0
        assert eventually(
            lambda: cluster.command.place("worker-0")["phase"] == "draining", seconds=WAIT_SECONDS
        )
        generated = running.client.block_pool("worker-0").load.generated_tokens
        num_answers = len(running.answers)
        assert eventually(lambda: len(running.answers) >= num_answers + 4, seconds=WAIT_SECONDS)
        assert running.client.block_pool("worker-0").load.generated_tokens == generated
        assert cluster.command.run("resume", "worker-0").returncode == 0
        ready = cluster_pb2.WORKER_STATE_READY
        assert eventually(lambda: state_of(running.client, "worker-0")[0] == ready, seconds=WAIT_SECONDS)
    assert all(answer.token_ids == undisturbed[question] for question, answer in running.answers)


def test_a_flush_empties_every_cache(cluster: Cluster) -> None:
    with cluster.client() as client:
        ask(client, QUESTIONS[0], max_tokens=2)
        flushed = cluster.command.json("flush")
        assert int(flushed["flushed_blocks"]) > 0
        assert [client.block_pool(name).cached_blocks for name in ("worker-0", "worker-1")] == [0, 0]
        assert ask(client, QUESTIONS[0], max_tokens=2).finish.cached_tokens == 0
        assert ask(client, QUESTIONS[0], max_tokens=2).finish.cached_tokens > 0


def test_a_worker_that_was_taken_out_and_dies_stays_out_until_it_is_asked_for(cluster: Cluster) -> None:
    assert cluster.command.run("drain", "worker-1").returncode == 0
    assert eventually(lambda: cluster.command.place("worker-1")["phase"] == "draining", seconds=WAIT_SECONDS)
    os.kill(cluster.command.place("worker-1")["pid"], signal.SIGKILL)
    assert eventually(lambda: cluster.command.place("worker-1")["phase"] == "stopped", seconds=WAIT_SECONDS)
    result = cluster.command.run("restart", "worker-1")
    assert result.returncode == 0, result.stderr
    assert cluster.command.place("worker-1")["phase"] == "serving"
    with cluster.client() as client:
        assert state_of(client, "worker-1")[0] == cluster_pb2.WORKER_STATE_READY


def test_a_router_restarts_where_its_clients_look_for_it_and_loses_no_running_stream(
    cluster: Cluster,
) -> None:
    before = cluster.command.place("router-0")
    with cluster.client() as client, ThreadPoolExecutor(max_workers=1) as threads:
        expected = ask(client, QUESTIONS[0]).token_ids
        begun = threading.Event()
        stream = threads.submit(stream_tokens, client, QUESTIONS[0], begun)
        assert begun.wait(WAIT_SECONDS)
        result = cluster.command.run("restart", "router-0")
        assert result.returncode == 0, result.stderr
        assert stream.result() == expected
    after = cluster.command.place("router-0")
    assert (after["phase"], after["address"]) == ("serving", before["address"])
    assert after["pid"] != before["pid"]
    with cluster.client() as client:
        assert ask(client, QUESTIONS[0]).token_ids == expected


def stream_tokens(client: Client, question: str, begun: threading.Event) -> tuple[int, ...]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    tokens: list[int] = []
    for delta in client.stream(messages=messages, max_tokens=100, ignore_eos=True, seed=7):
        tokens += delta.token_ids
        begun.set()
    return tuple(tokens)


def test_an_unknown_name_is_refused_before_anything_stops(cluster: Cluster) -> None:
    before = _started(cluster)
    result = cluster.command.run("restart", "worker-0", "worker-9")
    assert result.returncode == 1
    assert "'worker-9'" in result.stderr
    assert _started(cluster) == before
    refused = cluster.command.run("drain", "worker-9")
    assert refused.returncode == 1
    assert "no worker is called 'worker-9'" in refused.stderr


def _started(cluster: Cluster) -> list[dict[str, object]]:
    """Return all workers and routers without the age of their last error, which grows meanwhile."""
    places = cluster.command.json("status")["places"]
    return [{name: value for name, value in place.items() if name != "error_age_seconds"} for place in places]
