"""A real Prometheus scrapes a real cluster on Ray and agrees with its clients. The last test breaks the cluster."""

import json
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from blockyard.deploy.demo.prompts import DEMO_GROUPS
from blockyard.deploy.grafana import dashboard
from blockyard.proto.metrics.prometheus import bounds
from blockyard.proto.metrics.readings import Kind
from blockyard.proto.metrics.table import METRICS, ROUTER_METRICS, WORKER_METRICS
from blockyard.router.client import Completion, InvalidRequestError

from tests.system.harness import UP, Cluster, Command, eventually, remembered_state
from tests.unit.metrics.tables import EXPRESSIONS

from .grafana import healthy_grafana
from .prometheus import Prometheus, free_address, prometheus
from .promtool import needs_prometheus

pytestmark = [needs_prometheus, pytest.mark.timeout(600)]

SCRAPED_SECONDS = 60.0
"""Ray reports each second, Prometheus asks each second; ten times that, and more."""
WORKERS = ("worker-0", "worker-1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    cluster: Cluster
    prometheus: Prometheus

    def settles(self, expression: str, expected: float) -> bool:
        return eventually(
            lambda: self.prometheus.number(expression) == pytest.approx(expected), seconds=SCRAPED_SECONDS
        )


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    command = Command(home=tmp_path_factory.mktemp("home"), cluster="metrics")
    address = free_address()
    with healthy_grafana() as grafana, pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_GRAFANA_HOST", grafana)
        environment.setenv("RAY_PROMETHEUS_HOST", f"http://{address}")
        result = command.run(*UP)
        assert result.returncode == 0, result.stderr
        cluster = Cluster(command=command, state=remembered_state(command))
        try:
            target = f"127.0.0.1:{cluster.state.metrics_port}"
            with prometheus(tmp_path_factory.mktemp("prometheus"), ray=[target], address=address) as asked:
                yield Watched(cluster=cluster, prometheus=asked)
        finally:
            command.run("down", "--drain", "0")


@pytest.fixture(scope="module")
def answers(watched: Watched) -> list[Completion]:
    """Return the clients' answers: groups of chats with common prefixes, one with two outputs, and a refused one."""
    with watched.cluster.client() as client:

        def ask(chat: tuple[str, str]) -> Completion:
            messages = [
                {"role": role, "content": text} for role, text in zip(("system", "user"), chat, strict=True)
            ]
            return client.generate(messages=messages, max_tokens=12, temperature=0.7, seed=3)

        chats = [(group.system_prompt, question) for group in DEMO_GROUPS for question in group.questions]
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(ask, chats))
        found.append(client.generate("import os\n", n=2, max_tokens=8, ignore_eos=True))
        with pytest.raises(InvalidRequestError):
            client.generate("import os\n", max_tokens=8, temperature=-1.0)
    return found


def test_sums_equal_what_clients_saw(watched: Watched, answers: list[Completion]) -> None:
    outputs = [output.finish for answer in answers for output in answer.outputs]
    stopped = sum(finish.reason == "stop" for finish in outputs)
    generated = sum(finish.completion_tokens for finish in outputs)
    prompt = sum(answer.outputs[0].finish.prompt_tokens for answer in answers)
    cached = sum(answer.outputs[0].finish.cached_tokens for answer in answers)
    assert cached > 0, "no prompt found its prefix: a sum of hits would prove nothing"
    for expression, expected in {
        'sum(blockyard_requests_total{outcome="OK"})': len(answers),
        'sum(blockyard_requests_total{outcome="INVALID_REQUEST"})': 1,
        "sum(blockyard_requests_total)": len(answers) + 1,
        'sum(blockyard_outputs_total{reason="stop"})': stopped,
        "sum(blockyard_outputs_total)": len(outputs),
        "sum(blockyard_router_generated_tokens_total)": generated,
        "sum(blockyard_router_prompt_tokens_total)": prompt,
        "sum(blockyard_router_cached_tokens_total)": cached,
        "sum(blockyard_prompt_tokens_total)": prompt,
        "sum(blockyard_cached_tokens_total)": cached,
        "sum(blockyard_time_to_first_token_seconds_count)": len(answers),
        "sum(blockyard_queue_seconds_count)": len(answers),
        "sum(blockyard_request_seconds_count)": len(answers),
        "sum(blockyard_prefill_seconds_count)": len(answers),
        "sum(blockyard_request_prompt_tokens_sum)": prompt,
        "sum(blockyard_request_generated_tokens_sum)": generated,
        'sum(blockyard_tenant_requests_total{tenant="other"})': len(answers) + 1,
        "sum(blockyard_tenant_generated_tokens_total)": generated,
        "sum(blockyard_migrations_total)": 0,
        'sum(blockyard_workers{state="ready"})': 2,
        "sum(blockyard_running) + sum(blockyard_waiting) + sum(blockyard_router_running)": 0,
    }.items():
        assert watched.settles(expression, expected), (
            expression,
            expected,
            watched.prometheus.vector(expression),
        )


def test_times_are_not_longer_than_what_clients_waited(watched: Watched, answers: list[Completion]) -> None:
    """Histograms' sums are exact, which Ray's own are not; the times are those in each answer."""
    first_token = sum(answer.outputs[0].finish.time_to_first_token_seconds for answer in answers[:-1])
    told = watched.prometheus.number("sum(blockyard_time_to_first_token_seconds_sum)")
    assert first_token == pytest.approx(told, rel=0.2)
    whole = watched.prometheus.number("sum(blockyard_request_seconds_sum)")
    assert whole >= told
    for metric in (metric for metric in ROUTER_METRICS if metric.kind is Kind.HISTOGRAM):
        buckets = watched.prometheus.vector(f'blockyard_{metric.name}_bucket{{router="router-0"}}')
        assert {labels["le"] for labels, _ in buckets} == set(bounds(metric)), (
            "a bucket without events is there too: quantiles need its 0"
        )
    quantile = "histogram_quantile(0.5, sum by (le) (blockyard_time_to_first_token_seconds_bucket))"
    assert 0 < watched.prometheus.number(quantile) < 60


def test_every_metric_of_the_table_is_there_with_its_kind_and_nothing_else(
    watched: Watched, answers: list[Completion]
) -> None:
    outputs = sum(len(answer.outputs) for answer in answers)
    assert watched.settles("sum(blockyard_outputs_total)", outputs)
    assert watched.settles(
        'count(blockyard_running) + count(blockyard_workers{state="ready"})', len(WORKERS) + 1
    )
    listed = set(watched.prometheus.ask("label/__name__/values"))
    ours = {name for name in listed if "blockyard" in name}
    # A counter of Ray appears with the first event. Nothing was preempted, split, pulled or guessed. No worker was
    # lost, no call of Redis failed, no call was turned away before it was read, and no request had a session.
    silent = {
        *("preemptions", "swaps", "moves", "evictions", "migrations", "stale_blocks"),
        "router_splits",
        *("refused_calls", "tenant_refusals", "pulled_blocks", "lent_blocks", "failed_pulls"),
        *(metric.name for metric in ROUTER_METRICS if metric.name.startswith("router_pull")),
        *("guarded_prompts", "spliced_tokens", "answer_store_failures", "drafted_tokens", "accepted_tokens"),
        *("index_errors", "index_resyncs", "index_damages", "index_failed_lookups", "index_skipped_lookups"),
    }
    known = {name for metric in METRICS for name in metric.series}
    assert ours <= known, ours - known
    for metric in METRICS:
        assert metric.name in silent or set(metric.series) <= ours, metric.name
    types = watched.prometheus.ask("metadata")
    for metric in METRICS:
        for name in metric.series:
            # A histogram leaves as gauges: Ray's counters would lack its empty buckets.
            kind = "counter" if metric.kind is Kind.COUNTER else "gauge"
            raw = f"ray_{name}"
            # Of a counter, metadata names what is counted.
            entries = types.get(raw, types.get(raw.removesuffix("_total"), []))
            assert all(entry["type"] == kind for entry in entries), (name, entries)


def test_series_are_few_and_labelled_by_who_they_are_of(watched: Watched, answers: list[Completion]) -> None:
    for metric in WORKER_METRICS[:3]:
        labels = [labels for labels, _ in watched.prometheus.vector(metric.series[0])]
        assert sorted(series["worker"] for series in labels) == list(WORKERS)
        assert {(series["cluster"], series["model_name"]) for series in labels} == {("metrics", "demo")}
    for metric in ROUTER_METRICS:
        for name in metric.series:
            allowed = {"router", "cluster", "model_name", "le", metric.label} - {""}
            for labels, _ in watched.prometheus.vector(name):
                assert (labels["cluster"], labels["model_name"]) == ("metrics", "demo")
                added = {
                    "__name__",
                    "instance",
                    "job",
                    "Component",
                    "NodeAddress",
                    "SessionName",
                    "Version",
                    "WorkerId",
                }
                assert set(labels) - added <= allowed, labels
    num_series = watched.prometheus.number('count({__name__=~"blockyard_.+"})')
    assert num_series < 320, num_series


def test_every_question_of_the_dashboard_is_answered(watched: Watched, answers: list[Completion]) -> None:
    # A rate is of what changed between two scrapes: all of the answers may have been there at the first.
    assert watched.settles('sum(blockyard_requests_total{outcome="OK"})', len(answers))
    with watched.cluster.client() as client:
        client.generate("import os\n", max_tokens=8, ignore_eos=True)
    variables = {"$__rate_interval": "10m", "$cluster": "metrics"}
    variables |= dict.fromkeys(("$model", "$worker", "$router"), ".*")
    pattern = re.compile("|".join(map(re.escape, variables)))
    asked = {pattern.sub(lambda found: variables[found[0]], expression) for expression in EXPRESSIONS}
    silent = [
        "preemptions",
        "evictions",
        "stale_blocks",
        "migrations",
        "tenant_refusals",
        "pulled",
        "lent",
        "router_pull",
    ]
    wanted = {expression for expression in asked if not any(name in expression for name in silent)}

    def empty() -> set[str]:
        return {expression for expression in wanted if not watched.prometheus.vector(expression)}

    assert eventually(lambda: not empty(), seconds=SCRAPED_SECONDS), empty()


def test_alerts_are_loaded_and_none_fires_on_a_sound_cluster(
    watched: Watched, answers: list[Completion]
) -> None:
    groups = watched.prometheus.ask("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) > 10
    assert [rule["name"] for rule in rules if rule["health"] == "err"] == []
    assert watched.prometheus.vector('ALERTS{alertstate="firing"}') == []


def test_rays_metrics_tab_embeds_our_dashboard_and_finds_prometheus(watched: Watched) -> None:
    state = watched.cluster.state
    assert state.ray_token_path is not None
    token = Path(state.ray_token_path).read_text(encoding="ascii")

    def ask(path: str) -> Any:
        asked = urllib.request.Request(
            f"{state.dashboard_url}/api/{path}", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(asked, timeout=30) as reply:
            return json.load(reply)

    assert ask("prometheus_health")["result"] is True
    grafana = ask("grafana_health")
    assert grafana["result"] is True
    assert grafana["data"]["dashboardUids"]["data"] == dashboard.UID
    assert grafana["data"]["dashboardDatasource"]


def test_a_dead_worker_shows_as_lost_and_its_return_as_ready(watched: Watched) -> None:
    fewer = 'min_over_time(blockyard_workers{state="ready"}[1m])'

    def dies_and_is_missed() -> bool:
        os.kill(watched.cluster.command.place("worker-0")["pid"], signal.SIGKILL)
        return eventually(lambda: watched.prometheus.number(fewer) < 2, seconds=SCRAPED_SECONDS / 4)

    # It is back after two seconds, and a scrape may come before and after that.
    assert any(dies_and_is_missed() for _ in range(4))
    assert watched.settles('sum(blockyard_workers{state="ready"})', 2)
