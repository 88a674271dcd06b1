"""Views of the commands: each is compared with a stored text, in snapshots/, and its rules are tested here."""

import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from blockyard.deploy.cli import main
from blockyard.deploy.commands.printing import console
from blockyard.deploy.dashboard.prompt_queries import VERDICTS
from blockyard.deploy.dashboard.sign_in import page_key
from blockyard.deploy.machine.state import ClusterState
from blockyard.deploy.ray.nodes import RayNode
from blockyard.deploy.settings.security import SecurityOptions
from blockyard.deploy.supervision.replicas import Replica
from blockyard.deploy.views import views
from blockyard.deploy.views.explained import explained_view
from blockyard.deploy.views.index import derived, index_view
from blockyard.deploy.views.pool_map import cells_of_map, host_lines, pool_map
from blockyard.deploy.views.quantities import counted, format_bytes, short_decimal
from blockyard.deploy.views.top import Look, rows_of, screen
from blockyard.deploy.views.views import (
    ago,
    dashboard_lines,
    metrics_lines,
    plain_table,
    replica_dict,
    serving,
    status_view,
    summary,
    workers_table,
)
from blockyard.proto.naming.pooling import MODULES_FILE
from blockyard.proto.security.tls_files import ServerTls
from blockyard.proto.v1 import cluster_pb2
from blockyard.proto.v1.cluster_pb2 import (
    ClusterInfo,
    ExplainPlacementResponse,
    IndexedWorker,
    IndexInfo,
    IndexState,
    PlacementCandidate,
    PullOption,
    Worker,
    WorkerIndex,
    WorkerLoad,
)
from blockyard.worker.inspection.pool_map import MAX_CELLS, block_cells, map_text, merged_cells

from .rig import HEAD, options_of, printed, report_of

Snapshot = Callable[[str], None]
READY, FREE = cluster_pb2.WORKER_STATE_READY, cluster_pb2.BLOCK_STATE_FREE
USED, CACHED = cluster_pb2.BLOCK_STATE_USED, cluster_pb2.BLOCK_STATE_CACHED
NODES = tuple(
    RayNode(node_id=id, name=f"10.0.0.{number}", metrics_address=f"10.0.0.{number}:400{number}")
    for number, id in ((1, "aaaa"), (2, "bbbb"))
)
CLUSTER = ClusterState(cluster="default", model="demo", secret="s", num_workers=3, head=HEAD)


def titled(**views: Any) -> str:
    """Return what each view prints, below its name."""
    return "\n".join(
        f"== {name.replace('_', ' ')}\n{view if isinstance(view, str) else printed(view, width=160)}"
        for name, view in views.items()
    )


def test_the_table_of_workers_has_a_column_for_what_any_of_them_has(snapshot: Snapshot) -> None:
    def worker(name: str, load: WorkerLoad | None = None, **facts: Any) -> Worker:
        return Worker(worker_id=name, state=READY, device="cpu", address="here", load=load, **facts)

    native, plain = "layers=2xcpu-16/1:float32 rank=0/1", "layers=2xplain/1:float32 rank=0/1"
    calm = WorkerLoad(running=1, waiting=2, free_blocks=5, cached_blocks=4, used_blocks=3)
    busy = WorkerLoad(
        host_cached_blocks=17,
        preemptions=5,
        swaps=2,
        moves=3,
        pulled_blocks=40,
        lent_blocks=7,
        failed_pulls=1,
        prompt_tokens=8,
        cached_tokens=2,
    )
    layouts = [worker("w0", model="a", kv_layout=native), worker("w1", model="a", kv_layout=plain)]
    snapshot(
        titled(
            none=workers_table([]),
            calm=workers_table([worker("w0", calm, role="both"), worker("w1", num_ranks=2)]),
            busy=workers_table([worker("w0"), worker("w1", busy)]),
            roles=workers_table([worker("w0", role="prefill"), worker("w1", role="decode")]),
            models_of_one_layout_each=workers_table(
                [worker("w0", model="a", kv_layout=native), worker("w1", model="b", kv_layout=plain)]
            ),
            layouts_of_one_model=workers_table([*layouts, worker("w2", model="a")]),
        )
    )


def test_status_tells_places_errors_and_metrics_as_far_as_they_are_known(snapshot: Snapshot) -> None:
    error = "its process was killed by SIGKILL"
    workers = [
        Replica(name="worker-0", kind="worker", node_id="aaaa", phase="serving", pid=7, num_starts=1),
        Replica(name="worker-1", kind="worker", node_id="bbbb", error=error, failed_at=50.0),
    ]
    ranks = (("aaaa", 11), ("bbbb", 12))
    of_ranks = Replica(name="worker-0", kind="worker", node_id="aaaa", pid=11, ranks=ranks)
    assert replica_dict(of_ranks)["ranks"] == [{"node_id": id, "pid": pid} for id, pid in ranks]
    report = report_of(*workers, at_seconds=250.0)
    measured = replace(CLUSTER, metrics_port=4001, node_address="10.0.0.1")
    near = ClusterInfo(
        model={"id": "demo"}, policy="prefix", workers_ready=2, requests_running=3, requests_waiting=1
    )
    cut_off = ClusterInfo(policy="prefix", workers_ready=1, requests_running=4, requests_waiting=2)
    answers = {"10.0.0.1:1": cut_off, "10.0.0.2:1": "it is late", "10.0.0.3:1": near}
    refused = {"10.0.0.1:1": "no router answers at 10.0.0.1:1: refused"}
    snapshot(
        titled(
            one_node=status_view(measured, report, {"10.0.0.1:1": near}, NODES[:1]),
            two_nodes=status_view(measured, report, {}, NODES),
            ranks=status_view(CLUSTER, report_of(of_ranks), {}, NODES),
            routers_alone=status_view(CLUSTER, None, answers, ()),
            nobody=status_view(CLUSTER, None, refused, ()),
        )
    )
    assert metrics_lines(measured, NODES[:1]) == metrics_lines(measured)
    assert metrics_lines(replace(measured, metrics_port=None)) == []


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        *((0.2, "0 s ago"), (119, "119 s ago"), (120, "2 min ago"), (7199, "119 min ago")),
        *((7200, "2 h ago"), (200_000, "2 days ago")),
    ],
)
def test_an_age_is_in_the_largest_unit_of_which_there_are_two(seconds: float, told: str) -> None:
    assert ago(seconds) == told


def test_what_up_and_serve_say_once_they_serve(
    snapshot: Snapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(views, "command_name", lambda: "blockyard")
    Path("embedder").mkdir()
    Path("embedder", MODULES_FILE).write_text("[]")
    places = {"gateways": ("127.0.0.1:8000",), "routers": ("127.0.0.1:50051",)}
    served = replace(CLUSTER, **places, dtypes=("float32: as --dtype says",), cpus_per_worker=2.0)
    options = options_of("serve demo --served-model-name it\\'s b")
    security = SecurityOptions(auth_file="tokens.json", tls=ServerTls(cert="c.pem", key="c.key"))
    embedding = replace(CLUSTER, model="embedder", gateways=places["gateways"])
    dashboard = {"dashboard_url": "http://127.0.0.1:8265", "ray_token_path": "/no/such/token"}
    text = titled(
        serve=serving(served, options),
        guarded=serving(replace(served, host="0.0.0.0"), replace(options, security=security)),
        embeddings=serving(embedding, options_of("serve embedder")),
        up=summary(replace(served, **dashboard, metrics_port=4001, node_address="10.0.0.1")),
        up_of_embeddings=summary(embedding),
        joined=summary(replace(served, cluster="mine", head=None, num_workers=1, **dashboard)),
    )
    snapshot(text)
    calls = text.partition("try:\n")[2].partition("Ctrl-C")[0].splitlines()
    assert max(map(len, calls)) <= 80, "a folded line cannot be pasted into a shell"


def test_only_what_is_asked_to_sign_in_shows_the_live_pages_key_never_rays_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-token-of-rays\n", encoding="utf-8")
    where = {"dashboard_url": "http://127.0.0.1:65535", "ray_token_path": str(tmp_path / "token")}
    cluster = replace(CLUSTER, cluster="c", **where)
    shown, signing_in = (dashboard_lines(cluster, signs_in=signs_in) for signs_in in (False, True))
    assert "#token=" not in "".join(shown)
    assert f"#token={page_key('a-token-of-rays')}" in signing_in[0]
    assert max(map(len, signing_in[:2])) <= 80
    assert "a-token-of-rays" not in "".join(shown + signing_in)


@pytest.mark.parametrize("colours", ["", "1"])
def test_in_a_pipe_no_row_is_cut_or_folded(colours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", colours)
    monkeypatch.setenv("COLUMNS", "80")
    output = StringIO()
    monkeypatch.setattr(sys, "stdout", output)
    reason = "another model than the first worker has " * 8
    worker = Worker(worker_id="worker-of-a-long-name-0", address="here", state_reason=reason)
    seen = Look(at_seconds=1.0, info=ClusterInfo(), workers=(worker,))
    to = console()
    to.print(workers_table([worker]))
    to.print(screen(seen, rows_of(seen, None), [], columns=to.width))
    rows = [line for line in output.getvalue().splitlines() if worker.worker_id in line]
    assert len(rows) == 2
    assert all(reason.strip() in row for row in rows)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_no_terminal_is_too_narrow_for_a_tables_numbers(width: int) -> None:
    headings = ("worker", "cached", "uncached", "queued prefill", "cost", "last error")
    rows = [(f"worker-{number}", "12,345", "67,890", f"{number}.5", "1,234.5", "") for number in range(3)]
    told = printed(plain_table(headings, rows), width=width)
    assert max(map(len, told.splitlines())) <= width
    for row in rows:
        assert all(cell in told.split() for cell in row if cell)
    assert told.count("cost") == (1 if width >= 80 else 3)


def test_explain_shows_terms_pulls_and_splits(snapshot: Snapshot) -> None:
    def option(source: str, verdict: cluster_pb2.PullVerdict, saved_ms: float) -> PullOption:
        return PullOption(
            source_id=source, verdict=verdict, pulled_tokens=4096, time_ms=12.25, saved_ms=saved_ms
        )

    def explained(*candidates: PlacementCandidate, **facts: Any) -> Any:
        return explained_view(
            ExplainPlacementResponse(
                chosen_worker_id="a", policy="prefix", index_available=True, candidates=candidates, **facts
            )
        )

    sources = [
        option("b", cluster_pb2.PULL_VERDICT_CHOSEN, 800.0),
        option("c", cluster_pb2.PULL_VERDICT_OTHER_SOURCE, 799.0),
        option("d", cluster_pb2.PULL_VERDICT_TIE, -3.0),
        PullOption(source_id="e", verdict=cluster_pb2.PULL_VERDICT_UNMEASURED),
        PullOption(source_id="f", verdict=cluster_pb2.PULL_VERDICT_MEMORY),
    ]
    pulling = PlacementCandidate(
        worker_id="a", pulled_tokens=4096, pull_ms=12.25, pulled_from="b", pull_options=sources
    )
    split = cluster_pb2.SplitPlacement(
        is_chosen=True,
        prefill=PlacementCandidate(worker_id="p", uncached_tokens=8000, total_ms=900.0),
        decode=PlacementCandidate(worker_id="d", pulled_tokens=7984, total_ms=40.0),
        split_ms=940.0,
        local_ms=2700.0,
    )
    candidates = [PlacementCandidate(worker_id=f"w{n}", cached_tokens=12_345, cost=6.5 + n) for n in range(2)]
    narrow = printed(explained(*candidates), width=80)
    assert "…" not in narrow
    chosen = explained(split=split)
    split.is_chosen = False
    snapshot(titled(plain=narrow, pulls=explained(pulling), split=chosen, no_split=explained(split=split)))
    verdicts = PullOption.DESCRIPTOR.fields_by_name["verdict"].enum_type.values
    assert {value.number for value in verdicts} - {0} == set(VERDICTS)


FULL_INDEX = IndexInfo(
    state=IndexState.INDEX_STATE_DEGRADED,
    state_reason="w1 has 512 changes unconfirmed for 3.2 s",
    names=1_000,
    bytes=17_000,
    live_berths=3,
    dead_berths=1,
    stride_blocks=4,
    lookups=20,
    failed_lookups=2,
    skipped_lookups=5,
    promised_blocks=400,
    stale_blocks=10,
    lookup_p50_seconds=0.0002,
    lookup_p99_seconds=0.0011,
    workers=[
        IndexedWorker(worker_id="w0", index=WorkerIndex(state=IndexState.INDEX_STATE_EXACT, entries=700)),
        IndexedWorker(
            worker_id="w1",
            index=WorkerIndex(
                state=IndexState.INDEX_STATE_DEGRADED, pending=512, lag_seconds=3.2, resyncs=2, errors=9
            ),
        ),
        IndexedWorker(worker_id="w2"),
    ],
)


def test_index_tells_counts_and_why_some_are_missing(snapshot: Snapshot) -> None:
    unknown = [IndexedWorker(worker_id="w0")]
    full = printed(index_view(FULL_INDEX))
    absent = IndexInfo(state=IndexState.INDEX_STATE_ABSENT, state_reason="the routers have no Redis")
    snapshot(
        titled(
            full=full,
            without_workers=index_view(IndexInfo(state=IndexState.INDEX_STATE_DEGRADED)),
            uncounted_degraded=index_view(IndexInfo(state=IndexState.INDEX_STATE_DEGRADED, workers=unknown)),
            uncounted_exact=index_view(IndexInfo(state=IndexState.INDEX_STATE_EXACT, workers=unknown)),
            absent=index_view(absent),
        )
    )
    known = {"bytes_per_name": 17.0, "stale_ratio": 0.025, "lag_seconds": 3.2}
    assert derived(FULL_INDEX) == pytest.approx(known)
    assert derived(IndexInfo()) == {"bytes_per_name": None, "stale_ratio": None, "lag_seconds": 0.0}
    lines = (main.commands["index"].help or "").splitlines()
    explained = {line.strip().removeprefix("- ").partition(":")[0] for line in lines}
    headings = {line.split()[0] for line in full.splitlines()[2:8]}
    assert headings | {"entries", "pending", "resyncs"} <= explained, "each row is explained in the help"


def pool_of(*runs: tuple[cluster_pb2.BlockState, int, int]) -> cluster_pb2.BlockPool:
    """Return a pool of runs of (state, length, references)."""
    sums = {state: sum(length for other, length, _ in runs if other == state) for state, _, _ in runs}
    return cluster_pb2.BlockPool(
        worker_id="worker-7",
        incarnation="abc",
        block_size=16,
        bytes_per_block=1024,
        free_blocks=sums.get(FREE, 0),
        cached_blocks=sums.get(CACHED, 0),
        used_blocks=sums.get(USED, 0),
        total_blocks=sum(sums.values()),
        evictions=5,
        load=WorkerLoad(running=2, waiting=1, preemptions=4),
        runs=[cluster_pb2.BlockRun(state=s, length=length, references=refs) for s, length, refs in runs],
    )


MIXED = ((USED, 2, 1), (USED, 3, 6), (USED, 1, 40), (CACHED, 70, 0), (FREE, 57, 0))


def test_the_map_of_a_pool_shows_each_block_in_order(snapshot: Snapshot) -> None:
    pool = pool_of(*MIXED)
    assert block_cells(pool) == "11" + "666" + "+" + "c" * 70 + "." * 57
    assert cells_of_map(map_text(pool)) == block_cells(pool)
    assert merged_cells("..c.c1..21+.....", 4) == "c1+.", "of merged blocks the busiest shows"
    plain = printed(pool_map(pool))
    host = cluster_pb2.BlockPool(host_cache_blocks=512, load=WorkerLoad(host_cached_blocks=17, swaps=3))
    pool.MergeFrom(host)
    snapshot(titled(plain=plain, with_a_host_cache=pool_map(pool)))
    pool.host_cache_blocks = 0
    assert host_lines(pool) == ["host memory: 3 of 4 preemptions moved their blocks there"]


def test_a_pool_of_any_size_fits_the_picture() -> None:
    page = printed(pool_map(pool_of((FREE, 30_000, 0), (USED, 1, 1))))
    assert page.count(".") <= MAX_CELLS + 3
    assert "15 blocks each" in page
    assert "1" in page.splitlines()[-2]
    lines = map_text(pool_of((FREE, 500_000, 0), (CACHED, 1, 0))).splitlines()
    assert len(lines) <= 4 + MAX_CELLS // 64
    assert lines[-1].endswith("c")
    assert "245 blocks each" in lines[3]


def test_numbers_are_told_as_people_read_them() -> None:
    assert [counted(count, "worker") for count in (0, 1, 1024)] == ["0 workers", "1 worker", "1,024 workers"]
    assert [counted(share, "CPU") for share in (1.0, 0.5, 2.0)] == ["1 CPU", "0.5 CPUs", "2 CPUs"]
    told = [short_decimal(value) for value in (20480.0, 341.328, 0.5, 0.0)]
    assert told == ["20,480", "341.33", "0.50", "0"]


@pytest.mark.parametrize(
    ("count", "told"),
    [
        *((0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (2**20 - 1, "1.0 MiB")),
        *((2**30 - 2**14, "1.0 GiB"), (1023.9 * 2**20, "1023.9 MiB"), (5 * 2**60, "5242880.0 TiB")),
    ],
)
def test_bytes_are_in_the_largest_unit_of_which_there_is_one(count: float, told: str) -> None:
    assert format_bytes(count) == told
