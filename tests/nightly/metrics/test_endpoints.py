"""`--metrics-port`: a router and a worker without Ray serve the same names, and report a wrong port."""

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from blockyard.proto.metrics.readings import Kind, Metric
from blockyard.proto.metrics.table import ROUTER_METRICS, WORKER_METRICS
from prometheus_client.parser import text_string_to_metric_families

from tests.system.harness import eventually

from .prometheus import prometheus
from .promtool import needs_prometheus

MODEL = Path(__file__).parents[3] / "deploy" / "demo_model" / "checkpoint"
OF_BOTH = ("--model", str(MODEL), "--cluster", "c7", "--model-name", "m7")
COMMANDS = {
    "router": [*OF_BOTH, "alias", "--router-id", "r7", "--metrics-port", "0"],
    "worker": [*OF_BOTH, "--worker-id", "w7", "--engine", "simulated", "--kv-cache-memory", str(8 * 2**20)],
}
TABLES = {"router": ROUTER_METRICS, "worker": WORKER_METRICS}


@contextmanager
def process(kind: str, *options: str) -> Iterator[str]:
    """The URL at which it serves its metrics."""
    command = [sys.executable, "-m", f"blockyard.{kind}", *COMMANDS[kind], *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ}) as running:
        try:
            assert running.stderr is not None
            lines = "".join(_until_serving(running.stderr))
            url = re.search(r"metrics at (http\S+)", lines)
            assert url is not None, lines
            yield url[1]
        finally:
            running.send_signal(signal.SIGTERM)
            running.communicate(timeout=60)
    assert running.returncode == 0


def _until_serving(lines: Iterator[str]) -> Iterator[str]:
    said = ""
    for line in lines:
        said += line
        yield line
        if "metrics at" in said and ("serving" in said or "serves at" in said):
            return


def page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return str(reply.read().decode())


def labels_of(metric: Metric) -> set[str]:
    return ({metric.label} if metric.label else set()) | ({"le"} if metric.kind is Kind.HISTOGRAM else set())


@pytest.mark.parametrize("kind", ["router", "worker"])
def test_all_of_the_table_is_served_with_its_kind_and_labels_from_the_start(kind: str) -> None:
    with process(kind) as url:
        assert eventually(lambda: TABLES[kind][-1].full_name in page(url), seconds=30.0)
        families = {family.name: family for family in text_string_to_metric_families(page(url))}
    assert set(families) == {metric.full_name for metric in TABLES[kind]}
    for metric in TABLES[kind]:
        family = families[metric.full_name]
        assert (family.type, family.documentation) == (metric.kind.value, metric.meaning)
        whose = {kind: kind[0] + "7", "cluster": "c7", "model_name": "m7"}
        assert set().union(*(sample.labels for sample in family.samples)) == set(whose) | labels_of(metric)
        assert all(whose.items() <= sample.labels.items() for sample in family.samples)


@pytest.mark.parametrize("kind", ["router", "worker"])
def test_vllms_names_stand_beside_ours_with_the_same_values(kind: str) -> None:
    with process(kind, "--metrics-names", "vllm") as url:
        assert eventually(lambda: TABLES[kind][-1].full_name in page(url), seconds=30.0)
        families = {family.name: family for family in text_string_to_metric_families(page(url))}
    assert set(families) == {name for metric in TABLES[kind] for name in (metric.full_name, *metric.vllm)}, (
        "nothing else"
    )
    for metric in TABLES[kind]:
        for name in metric.vllm:
            ours, theirs = families[metric.full_name], families[name]
            assert theirs.type == ours.type
            assert {sample.labels["model_name"] for sample in theirs.samples} == {"m7"}
            assert len(theirs.samples) == len(ours.samples)


def test_a_name_of_vllm_is_spelled_as_it_spells_it() -> None:
    """The names are those in vLLM's source; clients query the same."""
    names = (
        *("num_requests_running{", "num_requests_waiting{", "time_to_first_token_seconds_bucket{"),
        *("prompt_tokens_total{", "generation_tokens_total{", "prefix_cache_hits_total{"),
        *("prefix_cache_queries_total{", "e2e_request_latency_seconds_sum{"),
        "inter_token_latency_seconds_count{",
    )
    with process("router", "--metrics-names", "vllm") as url:
        assert eventually(lambda: "vllm:num_requests_running" in page(url), seconds=30.0)
        text = page(url)
    assert [name for name in names if f"\nvllm:{name}" not in text] == []
    assert re.search(r'\nvllm:request_success_total\{[^}]*finished_reason="stop"', text)
    with process("worker", "--metrics-names", "vllm") as url:
        text = page(url)
    assert "\nvllm:kv_cache_usage_perc{" in text
    assert "\nvllm:num_preemptions_total{" in text


@needs_prometheus
def test_prometheus_lints_and_scrapes_a_process_without_ray_under_the_same_names(tmp_path: Path) -> None:
    with process("worker") as url, prometheus(tmp_path, plain=[url.split("/")[2]]) as asked:
        lint = ["promtool", "check", "metrics"]
        judged = subprocess.run(lint, input=page(url), capture_output=True, text=True, timeout=60)
        assert judged.returncode == 0, judged.stderr
        assert eventually(lambda: bool(asked.vector("blockyard_blocks_free")), seconds=30.0)
        assert [labels["worker"] for labels, _ in asked.vector("blockyard_blocks_free")] == ["w7"]


def test_a_port_that_cannot_be_had_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for port in ("65536", str(taken.getsockname()[1])):
            command = [
                sys.executable,
                "-m",
                "blockyard.router",
                "--model",
                str(MODEL),
                "--metrics-port",
                port,
            ]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert ended.returncode == 1
            assert f"--metrics-port {port}" in ended.stderr
            assert "Traceback" not in ended.stderr
