"""Tables of the commands: their columns, widths and notes."""

import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from blockyard.deploy.commands.printing import console
from blockyard.deploy.dashboard.prompt_queries import VERDICTS
from blockyard.deploy.dashboard.sign_in import page_key
from blockyard.deploy.machine.state import ClusterState
from blockyard.deploy.ray.nodes import RayNode
from blockyard.deploy.supervision.replicas import Replica, SupervisorReport
from blockyard.deploy.views.explained import explained_view
from blockyard.deploy.views.top import Look, rows_of, screen
from blockyard.deploy.views.views import (
    dashboard_lines,
    metrics_lines,
    plain_table,
    replica_dict,
    status_view,
    summary,
    workers_table,
)
from blockyard.proto.v1 import cluster_pb2
from rich.console import Console, RenderableType

HEAD = RayNode(node_id="aaaa", name="10.0.0.1", metrics_address="10.0.0.1:4001")
OTHER = RayNode(node_id="bbbb", name="10.0.0.2", metrics_address="10.0.0.2:4002")


def printed(view: RenderableType, *, width: int = 200) -> str:
    output = StringIO()
    Console(file=output, width=width).print(view)
    return output.getvalue()


def lines_of(*loads: cluster_pb2.WorkerLoad) -> list[list[str]]:
    workers = [
        cluster_pb2.Worker(worker_id=f"w{number}", device="cpu", address="here", load=load)
        for number, load in enumerate(loads)
    ]
    return [line.split() for line in printed(workers_table(workers)).splitlines()]


def test_without_a_worker_there_is_a_sentence_and_no_empty_table() -> None:
    told = printed(workers_table(()))
    assert told.startswith("No worker is registered with this router.")
    assert "hit rate" not in told


def test_layouts_of_blocks_are_listed_where_workers_of_one_model_differ() -> None:
    def table(*layouts: tuple[str, str]) -> str:
        workers = [cluster_pb2.Worker(model=model, kv_layout=layout) for model, layout in layouts]
        return printed(workers_table(workers))

    native, plain = "layers=2xcpu-16/1:float32 rank=0/1", "layers=2xplain/1:float32 rank=0/1"
    assert "layout" not in table(("a", native), ("a", native), ("b", plain))
    for both in ((native, plain), (native, "")):
        told = table(*(("a", layout) for layout in both))
        assert "layout" in told
        assert "2xcpu-16/1:float32 " in told
    assert "2xplain/1:float32 " in table(("a", native), ("a", plain))


@pytest.mark.parametrize("colours", ["", "1"])
def test_in_a_pipe_no_row_is_cut_or_folded(colours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", colours)
    monkeypatch.setenv("COLUMNS", "80")
    output = StringIO()
    monkeypatch.setattr(sys, "stdout", output)
    reason = "another model than the first worker has " * 8
    worker = cluster_pb2.Worker(worker_id="worker-of-a-long-name-0", address="here", state_reason=reason)
    seen = Look(at_seconds=1.0, info=cluster_pb2.ClusterInfo(), workers=(worker,))
    to = console()
    to.print(workers_table([worker]))
    to.print(screen(seen, rows_of(seen, None), [], columns=to.width))
    rows = [line for line in output.getvalue().splitlines() if worker.worker_id in line]
    assert len(rows) == 2
    assert all(reason.strip() in row for row in rows)


def test_host_memory_has_a_column_once_a_worker_keeps_blocks_there() -> None:
    plain, host = (cluster_pb2.WorkerLoad(used_blocks=3, host_cached_blocks=blocks) for blocks in (0, 17))
    assert "host" not in lines_of(plain)[0]
    headings, first, second = lines_of(plain, host)
    column = headings.index("host")
    assert (first[column], second[column]) == ("0", "17")


def test_preemptions_and_swaps_have_columns_once_a_worker_has_some() -> None:
    calm = cluster_pb2.WorkerLoad(used_blocks=3)
    crowded = cluster_pb2.WorkerLoad(used_blocks=3, preemptions=5, swaps=2)
    assert not {"preempted", "swapped"} & set(lines_of(calm)[0])
    headings, *rows = lines_of(calm, crowded)
    assert [[row[headings.index(name)] for name in ("preempted", "swapped")] for row in rows] == [
        ["0", "0"],
        ["5", "2"],
    ]


def status_on(*nodes: RayNode) -> str:
    replicas = [
        Replica(name=f"worker-{number}", kind="worker", node_id=id)
        for number, id in enumerate(("aaaa", "bbbb"))
    ]
    report = SupervisorReport(
        pid=1, code="c", replicas=replicas, cpus_per_worker=1.0, gpus_per_worker=0.0, at_seconds=0.0
    )
    cluster = ClusterState(cluster="default", model="demo", secret="s", metrics_port=4001)
    return printed(status_view(cluster, report, {}, nodes))


def test_status_tells_each_nodes_metrics_port_and_which_node_a_place_is_on() -> None:
    told = status_on(HEAD, OTHER)
    for node in (HEAD, OTHER):
        assert f"http://{node.metrics_address}/metrics (ray_blockyard_*, of node {node.name})" in told
    rows = {line.split()[0]: line.split()[2] for line in told.splitlines() if line.startswith("worker-")}
    assert rows == {"worker-0": "10.0.0.1", "worker-1": "10.0.0.2"}


def test_status_tells_node_and_pid_of_each_rank() -> None:
    ranks = (("aaaa", 11), ("bbbb", 12))
    worker = Replica(name="worker-0", kind="worker", node_id="aaaa", pid=11, ranks=ranks)
    report = SupervisorReport(
        pid=1, code="c", replicas=[worker], cpus_per_worker=2.0, gpus_per_worker=0.0, at_seconds=0.0
    )
    cluster = ClusterState(cluster="default", model="demo", secret="s")
    told = printed(status_view(cluster, report, {}, (HEAD, OTHER)))
    rows = [line.split() for line in told.splitlines() if line.startswith("worker-0")]
    assert rows[0][:5] == ["worker-0", "starting", "10.0.0.1", "11", "0"]
    assert rows[1] == ["worker-0", "rank", "1", "10.0.0.2", "12"]
    assert replica_dict(worker)["ranks"] == [{"node_id": "aaaa", "pid": 11}, {"node_id": "bbbb", "pid": 12}]


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0.2, "0 s ago"),
        (119, "119 s ago"),
        (120, "2 min ago"),
        (7199, "119 min ago"),
        (7200, "2 h ago"),
        (200_000, "2 days ago"),
    ],
)
def test_status_tells_how_long_ago_the_last_error_was(seconds: float, told: str) -> None:
    killed = Replica(
        name="worker-0", kind="worker", error="its process was killed by SIGKILL", failed_at=50.0
    )
    report = SupervisorReport(
        pid=1,
        code="c",
        replicas=[killed],
        cpus_per_worker=1.0,
        gpus_per_worker=0.0,
        at_seconds=50.0 + seconds,
    )
    cluster = ClusterState(cluster="default", model="demo", secret="s")
    shown = printed(status_view(cluster, report, {}, ()))
    assert f"its process was killed by SIGKILL ({told})" in shown


def test_without_the_supervisors_word_status_tells_what_the_routers_say() -> None:
    cluster = ClusterState(cluster="default", model="demo", secret="s", num_workers=3)
    info = cluster_pb2.ClusterInfo(workers_ready=2, index_available=True)
    told = printed(status_view(cluster, None, {"10.0.0.1:1": info}, ()))
    assert "on 2 of 3 workers" in told
    assert "the supervisor did not answer" in told


def test_status_names_each_router_that_does_not_answer_and_adds_the_requests_of_the_others() -> None:
    cluster = ClusterState(cluster="c", model="m", secret="s", directory="/d", host="0.0.0.0")
    near = cluster_pb2.ClusterInfo(policy="prefix", workers_ready=2, requests_running=3, requests_waiting=1)
    cut_off = cluster_pb2.ClusterInfo(policy="prefix", workers_ready=1, requests_running=4)
    answers = {"10.0.0.1:1": cut_off, "10.0.0.2:1": "it is late", "10.0.0.3:1": near}
    told = printed(status_view(cluster, None, answers, ()))
    assert " on 2 of " in told
    assert "7 running, 1 waiting" in told
    assert "the router at 10.0.0.2:1: it is late" in told
    assert "10.0.0.1" not in told
    refused = printed(
        status_view(cluster, None, {"10.0.0.1:1": "no router answers at 10.0.0.1:1: refused"}, ())
    )
    assert refused.startswith("no router answers at 10.0.0.1:1: refused")
    assert "no router answers" in printed(status_view(cluster, None, {}, ()))


def test_with_one_node_status_names_no_nodes() -> None:
    told = status_on(HEAD)
    assert "http://10.0.0.1:4001/metrics (ray_blockyard_*)" in told
    assert "node" not in told


def test_up_and_status_tell_one_metrics_address_and_that_it_is_open() -> None:
    cluster = ClusterState(
        cluster="default", model="demo", secret="s", metrics_port=4001, node_address="10.0.0.1"
    )
    assert metrics_lines(cluster) == [
        "metrics    http://10.0.0.1:4001/metrics (ray_blockyard_*)",
        "           anybody who can reach that address can read them without a token",
    ]
    assert metrics_lines(cluster, [HEAD]) == metrics_lines(cluster)
    assert metrics_lines(replace(cluster, metrics_port=None)) == []


def test_where_the_dashboard_wants_our_token_its_own_advice_is_contradicted() -> None:
    joined = ClusterState(cluster="default", model="demo", secret="s", dashboard_url="http://127.0.0.1:8265")
    assert "get-auth-token" not in "".join(dashboard_lines(joined))
    ours = replace(joined, ray_token_path="token")
    assert "not the token of `ray get-auth-token`" in "".join(dashboard_lines(ours))


def test_only_what_is_asked_to_sign_in_shows_the_live_pages_key_never_rays_token(tmp_path: Path) -> None:
    token_path = tmp_path / "token"
    token_path.write_text("a-token-of-rays\n", encoding="utf-8")
    cluster = ClusterState(
        cluster="c",
        model="demo",
        secret="s",
        dashboard_url="http://127.0.0.1:65535",
        ray_token_path=str(token_path),
    )
    shown, signing_in = (dashboard_lines(cluster, signs_in=signs_in) for signs_in in (False, True))
    assert "#token=" not in "".join(shown)
    assert f"#token={page_key('a-token-of-rays')}" in signing_in[0]
    assert max(map(len, signing_in[:2])) <= 80
    assert "a-token-of-rays" not in "".join(shown + signing_in)
    assert "open --cluster c" in signing_in[1]


def test_up_offers_no_generation_of_a_model_that_makes_embeddings(tmp_path: Path) -> None:
    cluster = ClusterState(cluster="default", model=str(tmp_path), secret="s")
    assert {"generate", "chat"} <= set(printed(summary(cluster)).split())
    (tmp_path / "modules.json").write_text("[]")
    told = set(printed(summary(cluster)).split())
    assert not {"generate", "chat"} & told
    assert {"workers", "down"} <= told


def test_pulls_and_loans_have_columns_once_a_worker_has_some() -> None:
    calm = cluster_pb2.WorkerLoad(used_blocks=3)
    busy = cluster_pb2.WorkerLoad(used_blocks=3, pulled_blocks=40, lent_blocks=7, failed_pulls=1)
    assert not {"pulled", "lent"} & set(lines_of(calm)[0])
    told = printed(workers_table([cluster_pb2.Worker(worker_id="w", load=busy)])).splitlines()
    assert "pulled  lent  failed pulls" in told[0]
    assert told[1].split()[-4:-1] == ["40", "7", "1"]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_no_terminal_is_too_narrow_for_a_tables_numbers(width: int) -> None:
    headings = ("worker", "cached", "uncached", "queued prefill", "cost", "last error")
    rows = [(f"worker-{number}", "12,345", "67,890", f"{number}.5", "1,234.5", "") for number in range(3)]
    told = printed(plain_table(headings, rows), width=width)
    assert max(map(len, told.splitlines())) <= width
    for row in rows:
        assert all(cell in told.split() for cell in row if cell)
    assert told.count("cost") == (1 if width >= 80 else 3)


def test_explain_names_each_term_at_80_columns() -> None:
    candidates = [
        cluster_pb2.PlacementCandidate(worker_id=f"worker-{number}", cached_tokens=12_345, cost=6.5 + number)
        for number in range(2)
    ]
    explained = cluster_pb2.ExplainPlacementResponse(
        chosen_worker_id="worker-0", policy="prefix", candidates=candidates
    )
    told = printed(explained_view(explained), width=80)
    assert "…" not in told
    assert told.count("12,345") == 2
    assert "cost 6.5" in told
    assert "cost 7.5" in told


def test_explain_says_of_each_source_whether_it_is_chosen_and_why_not() -> None:
    def option(
        source: str, verdict: cluster_pb2.PullVerdict, saved_ms: float = 0.0
    ) -> cluster_pb2.PullOption:
        return cluster_pb2.PullOption(
            source_id=source, verdict=verdict, pulled_tokens=4096, time_ms=12.25, saved_ms=saved_ms
        )

    pulling = cluster_pb2.PlacementCandidate(
        worker_id="a",
        pulled_tokens=4096,
        pull_ms=12.25,
        pulled_from="b",
        pull_options=[
            option("b", cluster_pb2.PULL_VERDICT_CHOSEN, 800.0),
            option("c", cluster_pb2.PULL_VERDICT_OTHER_SOURCE, 799.0),
        ],
    )
    computing = cluster_pb2.PlacementCandidate(
        worker_id="d",
        pull_options=[
            option("b", cluster_pb2.PULL_VERDICT_TIE, -3.0),
            cluster_pb2.PullOption(source_id="c", verdict=cluster_pb2.PULL_VERDICT_UNMEASURED),
            cluster_pb2.PullOption(source_id="c", verdict=cluster_pb2.PULL_VERDICT_MEMORY),
        ],
    )
    explained = cluster_pb2.ExplainPlacementResponse(
        chosen_worker_id="a", policy="prefix", index_available=True, candidates=[pulling, computing]
    )
    told = printed(explained_view(explained)).splitlines()
    assert told[1].split()[:5] == ["worker", "cached", "host", "pulled", "uncached"]
    assert told[-5:] == [
        "a could pull from b 4,096 tokens in 12.2 ms, which saves 800.0 ms; chosen",
        "a could pull from c 4,096 tokens in 12.2 ms, which saves 799.0 ms; "
        "not chosen: the other source saves as much or more",
        "d could pull from b 4,096 tokens in 12.2 ms, which costs 3.0 ms; not chosen: it saves too little",
        "d could pull from c; not possible: no host cache, or its rates are not measured yet",
        "d could pull from c; not chosen: the worker's memory is short",
    ]


def test_explain_has_words_for_each_verdict() -> None:
    values = cluster_pb2.PullOption.DESCRIPTOR.fields_by_name["verdict"].enum_type.values
    assert {value.number for value in values} - {0} == set(VERDICTS)


def test_explain_has_no_column_for_pulls_where_nothing_can_be_pulled() -> None:
    explained = cluster_pb2.ExplainPlacementResponse(
        chosen_worker_id="a", candidates=[cluster_pb2.PlacementCandidate(worker_id="a")]
    )
    assert "pull" not in printed(explained_view(explained))
