"""The benchmark of the whole path: its figures, roles of processes, and a run of our own cluster with a tiny load."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from blockyard.deploy.bench.measures import Objectives, Sample
from blockyard.deploy.bench.summaries import Traffic, summary

from bench.cluster.figures import figures_of, floors_of
from bench.cluster.systems import OURS, our_role
from bench.cluster.trials import Idle, Results, Trial
from bench.cluster.usage import Usage
from bench.cluster.workloads import LOADS, TOKENS_A_WORD
from bench.router.processes import ROOT

PEER, OTHER_PEER = "vllm, sglang-router cache_aware", "vllm, sglang-router round_robin"
RUN_SECONDS = 240.0


def trial(seed: int, *, seconds: float, first: float, cached: int, cpu: float) -> Trial:
    """Make a trial of one request with 11 tokens and a prompt of 100."""
    sample = Sample(number=0, due=0.0, sent=0.0, arrivals=[first, seconds])
    sample = replace(sample, prompt_tokens=100, output_tokens=11, cached_tokens=cached)
    return Trial(
        about="one request",
        seed=seed,
        summary=summary(Traffic(samples=[sample], seconds=seconds), Objectives()),
        usage=Usage(wall_seconds=seconds, cpu_seconds={"workers": cpu - 1, "router": 1.0}, foreign_cores=0.0),
    )


def measured() -> Results:
    results = Results()
    for seed in range(3):
        results.add("float32", "chat", OURS, trial(seed, seconds=5.0, first=1.0, cached=80, cpu=6.0))
        results.add("float32", "chat", PEER, trial(seed, seconds=10.0, first=4.0, cached=60, cpu=12.0))
        results.add("float32", "chat", OTHER_PEER, trial(seed, seconds=11.0, first=2.0, cached=90, cpu=10.0))
        usage = Usage(wall_seconds=10.0, cpu_seconds={"workers": 0.1, "ray": 0.9}, foreign_cores=0.0)
        idle = Idle(usage=usage, memory_bytes={"workers": 2**30, "ray": 2**20})
        results.idle.setdefault("float32", {}).setdefault(OURS, []).append(idle)
    return results


def test_each_figure_is_compared_with_the_peer_that_is_best_in_it() -> None:
    figures = figures_of(measured())
    assert figures["whole_path"]["float32"]["chat"]["ratios"] == {
        "output_tokens_per_second": 2.0,
        "first_token_p50_ms": 0.5,
        "cpu_seconds": 0.6,
        "hit_rate": pytest.approx(-0.1),
    }
    assert figures["whole_path"]["float32"]["chat"]["systems"][OURS]["median"]["cpu_seconds_by_role"] == {
        "router": 1.0,
        "workers": 5.0,
    }
    assert figures["idle"]["float32"][OURS]["cores_by_role"] == {"ray": 0.09, "workers": 0.01}


def test_floors_judge_ratios_hit_rate_and_idle_cost() -> None:
    held = {floor.name: floor.holds for floor in floors_of(figures_of(measured()))}
    assert held == {
        "tokens/s over the best peer's, chat, float32": True,
        "first token p50 over the best peer's, chat, float32": True,
        "hit rate less the best peer's, chat, float32": False,
        "CPU seconds over the best peer's, chat, float32": True,
        "idle cores, float32": False,
    }


def test_a_run_without_peers_or_with_few_seeds_is_not_judged() -> None:
    results = Results()
    results.add("float32", "chat", OURS, trial(0, seconds=5.0, first=1.0, cached=80, cpu=6.0))
    assert floors_of(figures_of(results)) == []


@pytest.mark.parametrize(
    ("command", "role"),
    [
        (["ray::WorkerActor.until_stopped"], "workers"),
        (["ray::RouterActor"], "router"),
        (["python", "-P", "-m", "blockyard.router.tokenizing.process", "59"], "tokenizer"),
        (["/x/raylet", "--raylet_socket_name=/tmp/x"], "ray"),
        ([], "ray"),
    ],
)
def test_roles_are_told_by_command_lines(command: list[str], role: str) -> None:
    assert our_role(command) == role


def test_the_shared_prefix_load_is_64_requests_at_once_in_8_groups() -> None:
    requests = LOADS["shared-prefix"].make(0).requests
    assert len(requests) == 64
    assert len({request.prompt[0].base for request in requests}) == 8
    assert {request.prompt[0].length * TOKENS_A_WORD for request in requests} == {512}


@pytest.mark.slow
def test_our_own_cluster_is_measured_with_a_tiny_load(tmp_path: Path) -> None:
    words = ["--quick", "--idle-seconds", "1", "--output", str(tmp_path)]
    subprocess.run(
        [sys.executable, "-m", "bench.cluster", *words],
        cwd=ROOT,
        check=True,
        timeout=RUN_SECONDS,
        capture_output=True,
    )
    (path,) = tmp_path.glob("*-cluster.json")
    figures = json.loads(path.read_text(encoding="utf-8"))["figures"]
    (row,) = figures["whole_path"]["float32"]["quick"]["systems"][OURS]["trials"]
    assert (row["failed"], row["output_tokens"]) == (0, 8 * 8)
    assert row["hit_rate"] > 0
    assert row["cpu_seconds_by_role"]["workers"] > 0
    assert figures["idle"]["float32"][OURS]["memory_mib_by_role"]["router"] > 0
