"""Views of most commands: summaries, tables and single lines, as rich renderables that are plain without a terminal.

Owns wording and layout. Makes no calls and prints nothing. Shows where a secret is stored, never the secret itself.
pool_map.py draws pool maps.
"""

import json
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from blockyard.deploy.dashboard.sign_in import page_url
from blockyard.deploy.machine.check_results import Finding
from blockyard.deploy.machine.state import ClusterState
from blockyard.deploy.settings.size import ModelSize, left_bytes_of
from blockyard.deploy.views.quantities import counted, format_bytes, short_decimal
from blockyard.proto.naming.pooling import MODULES_FILE
from blockyard.proto.security.loopback import is_loopback
from blockyard.proto.v1 import cluster_pb2
from blockyard.router.client import Finish
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from blockyard.deploy.ray.nodes import RayNode
    from blockyard.deploy.settings.wanted_cluster import UpOptions
    from blockyard.deploy.supervision.replicas import Replica, SupervisorReport


_RARE_COUNTS: dict[str, Callable[[cluster_pb2.WorkerLoad], int]] = {
    "host": lambda load: load.host_cached_blocks,
    "preempted": lambda load: load.preemptions,
    "swapped": lambda load: load.swaps,
    "moved": lambda load: load.moves,
    "pulled": lambda load: load.pulled_blocks,
    "lent": lambda load: load.lent_blocks,
    "failed pulls": lambda load: load.failed_pulls,
}


ANY_WIDTH = 10_000
"""Width of a console that neither cuts nor folds lines."""
NO_WORKER = "No worker is registered with this router. `blockyard status` shows what each worker is doing."
_PHASE_STYLES = {
    "serving": "green",
    "not answering": "red",
    "refused": "red",
    "waiting": "red",
    "stopped": "red",
}


def workers_table(workers: Iterable[cluster_pb2.Worker]) -> RenderableType:
    workers = list(workers)
    if not workers:
        return Text(NO_WORKER, "yellow")
    # Most clusters have no host cache, no preemptions and no pulls. Then these columns are left out.
    extra = [
        (heading, count)
        for heading, count in _RARE_COUNTS.items()
        if any(count(worker.load) for worker in workers)
    ]
    roles = ("role",) if has_roles(workers) else ()
    models = ("model",) if len({worker.model for worker in workers}) > 1 else ()
    num_layouts = len({(worker.model, worker.kv_layout) for worker in workers})
    layouts = ("layout",) if num_layouts > len({worker.model for worker in workers}) else ()
    headings = ("state", "address", "device", "running", "waiting", "free", "cached", "used")
    table = FittingTable(
        "worker", *models, *roles, *layouts, *headings, *(heading for heading, _ in extra), "hit rate"
    )
    for worker in workers:
        load = worker.load
        table.add_row(
            worker.worker_id,
            *(worker.model for _ in models),
            *(worker.role for _ in roles),
            *(_layout_text(worker) for _ in layouts),
            state_text(worker),
            worker.address,
            device_text(worker),
            *(str(count) for count in (load.running, load.waiting)),
            *(str(count) for count in (load.free_blocks, load.cached_blocks, load.used_blocks)),
            *(str(count(load)) for _, count in extra),
            f"{load.cached_tokens / load.prompt_tokens:.0%}" if load.prompt_tokens else "-",
        )
    return table


def _layout_text(worker: cluster_pb2.Worker) -> str:
    """Return the order of a worker's blocks, such as `2xcpu-16/1:float32:2x2x16x16`, or `-` where it says none."""
    return worker.kv_layout.partition(" ")[0].removeprefix("layers=") or "-"


def device_text(worker: cluster_pb2.Worker) -> str:
    """Return the device of a worker, such as `cpu`, or those of its ranks, such as `2 x cpu`."""
    return f"{worker.num_ranks} x {worker.device}" if worker.num_ranks > 1 else worker.device


def has_roles(workers: Iterable[cluster_pb2.Worker]) -> bool:
    """Return whether any worker is meant for a part of each request only."""
    return any(worker.role not in ("", "both") for worker in workers)


def state_name(worker: cluster_pb2.Worker) -> str:
    return cluster_pb2.WorkerState.Name(worker.state).removeprefix("WORKER_STATE_")


def state_text(worker: cluster_pb2.Worker) -> Text:
    name = state_name(worker)
    reason = f" ({worker.state_reason})" if worker.state_reason else ""
    return Text(name + reason, style="green" if name == "READY" else "red")


def plain_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> RenderableType:
    table = FittingTable(*headings)
    for row in rows:
        table.add_row(*row)
    return table


def summary(cluster: ClusterState) -> RenderableType:
    """Return the summary that `up` prints at the end. Its only secret is the key in the live page's URL."""
    name, command = _named(cluster), command_name()
    lines = [
        _first_line(cluster),
        *(f"data type  {dtype}" for dtype in cluster.dtypes),
        *cpus_lines(cluster),
        *(f"router     {address}" for address in cluster.routers),
        *(f"OpenAI     {address} (the base URL ends in /v1)" for address in cluster.gateways),
        *dashboard_lines(cluster, signs_in=True),
        *metrics_lines(cluster),
        "try next:",
        *(
            []
            if _embeds(cluster.model)
            else [f'  {command} generate{name} "def main():"', f"  {command} chat{name}"]
        ),
        f"  {command} workers{name}        {command} blocks{name}",
        f"  {command} down{name}",
    ]
    return Text("\n".join(lines))


def serving(cluster: ClusterState, options: "UpOptions") -> RenderableType:
    """Return what `serve` prints once it serves: addresses, and a call to try."""
    scheme = "http" if options.security.tls is None else "https"
    urls = [f"{scheme}://{address}/v1" for address in cluster.gateways]
    lines = [
        _first_line(cluster),
        *(f"data type  {dtype}" for dtype in cluster.dtypes),
        *cpus_lines(cluster),
        *(f"HTTP       {url}" for url in urls),
        *(f"gRPC       {address}" for address in cluster.routers),
        *(f"alias      {alias}" for alias in options.served_names[1:]),
        *dashboard_lines(cluster, signs_in=True),
        "try:",
        *(_curl(url, options) for url in urls[:1]),
        "Ctrl-C ends it.",
    ]
    return Text("\n".join(lines))


def _curl(url: str, options: "UpOptions") -> str:
    """Return a curl command in short lines, because a folded line cannot be pasted into a shell."""
    security = options.security
    path, asked = "completions", {"prompt": "def main():", "max_tokens": 48}
    if _embeds(options.engine.model):
        path, asked = "embeddings", {"input": "def main():"}
    body = json.dumps({"model": options.served_names[0], **asked})
    parts = [
        f"curl {url}/{path}",
        *([] if security.tls is None else ["--cacert CA.pem"]),
        *([] if security.auth_file is None else ['-H "Authorization: Bearer $BLOCKYARD_TOKEN"']),
        '-H "Content-Type: application/json"',
        f"-d {shlex.quote(body)}",
    ]
    return "  " + " \\\n    ".join(parts)


def _embeds(model: str) -> bool:
    """Return whether a folder has a model that makes embeddings, and generates nothing."""
    return (Path(model).expanduser() / MODULES_FILE).is_file()


def _first_line(cluster: ClusterState) -> str:
    workers = counted(cluster.num_workers, "worker")
    if not is_loopback(cluster.host):
        reach = f"open to anybody who can reach {cluster.host}"
    elif cluster.head is None:
        reach = "its API open only to processes on its routers' machine (see --host)"
    else:
        reach = "its API open only to processes on this machine (see --host)"
    return f"cluster {cluster.cluster} serves {cluster.model} on {workers}, {reach}"


def cpus_lines(cluster: ClusterState) -> list[str]:
    """Return a line with the CPUs that each worker reserves, which decide whether another worker has room."""
    if not cluster.cpus_per_worker:
        return []
    return [f"CPUs       {cluster.cpus_per_worker:g} for each worker (see --cpus-per-worker)"]


def summary_dict(cluster: ClusterState) -> dict[str, object]:
    """Return the summary as a document for programs."""
    fields = (
        "cluster",
        "model",
        "num_workers",
        "cpus_per_worker",
        "routers",
        "gateways",
        "dtypes",
        "dashboard_url",
        "ray_token_path",
        "metrics_port",
    )
    return {name: getattr(cluster, name) for name in fields}


def command_name() -> str:
    """Return the command with which this shell finds `blockyard`."""
    installed = Path(sys.executable).parent / "blockyard"
    if shutil.which("blockyard") or not installed.exists():
        return "blockyard"
    return str(installed.relative_to(Path.cwd())) if installed.is_relative_to(Path.cwd()) else str(installed)


def dashboard_lines(cluster: ClusterState, *, signs_in: bool = False) -> list[str]:
    """Return lines on where the dashboard and the live page are. With `signs_in`, the page's URL contains its key."""
    if cluster.dashboard_url is None:
        return []
    token_path = cluster.ray_token_path
    has_key = signs_in and token_path is not None and Path(token_path).is_file()
    lines = [
        f"live page  {page_url(cluster.dashboard_url, token_path if has_key else None)}",
        f"           open it signed in: {command_name()} open{_named(cluster)}",
        f"dashboard  {cluster.dashboard_url}",
    ]
    if token_path is not None:
        lines.append(f"           it asks for a token once: cat {token_path}")
        lines.append("           (not the token of `ray get-auth-token`, which its dialog names)")
    if cluster.head is None:
        lines.append(
            "           the live page exists only if Ray's head was started with our hook: docs/live-page.md"
        )
    return lines


def _named(cluster: ClusterState) -> str:
    """Return the option that names the cluster in a command, or nothing for the default cluster."""
    return "" if cluster.cluster == "default" else f" --cluster {cluster.cluster}"


def metrics_lines(cluster: ClusterState, nodes: Sequence["RayNode"] = ()) -> list[str]:
    """Return the metrics address of each node, or of this machine if no nodes are given.

    Ray binds these ports to every interface and asks for no token.
    """
    if nodes:
        where = [(node.metrics_address, f", of node {node.name}" if len(nodes) > 1 else "") for node in nodes]
    else:
        here = f"{cluster.node_address}:{cluster.metrics_port}"
        where = [(here, "")] if cluster.metrics_port is not None else []
    lines = [f"metrics    http://{address}/metrics (ray_blockyard_*{whose})" for address, whose in where]
    return (
        [*lines, "           anybody who can reach that address can read them without a token"]
        if lines
        else []
    )


def replica_dict(replica: "Replica") -> dict[str, object]:
    fields = (
        "name",
        "kind",
        "address",
        "http_address",
        "pid",
        "node_id",
        "incarnation",
        "code",
        "num_starts",
        "refusal",
        "error",
    )
    ranks = [{"node_id": node_id, "pid": pid} for node_id, pid in replica.ranks]
    return {name: getattr(replica, name) for name in fields} | {"phase": replica.shown_phase, "ranks": ranks}


def status_view(
    cluster: ClusterState,
    report: "SupervisorReport | None",
    answers: Mapping[str, cluster_pb2.ClusterInfo | str],
    nodes: Sequence["RayNode"],
) -> RenderableType:
    """Return the view of `status`. Without a supervisor's report, it has only what the routers know.

    `answers` are the routers' views by their addresses, or the reasons why they give none.
    """
    num_workers = cluster.num_workers
    if report is not None:
        num_workers = sum(replica.kind == "worker" for replica in report.replicas)
    info = seen_by_routers(answers)
    counts = [Text(_counts(num_workers, info))] if info is not None else []
    reasons = {each: answer for each, answer in answers.items() if isinstance(answer, str)}
    for address, reason in reasons.items():
        counts.append(Text(reason if address in reason else f"the router at {address}: {reason}", "red"))
    if not answers:
        counts.append(Text("no router answers", "red"))
    if report is None:
        return Group(
            *counts, Text("the supervisor did not answer: the state of its processes is unknown", "red")
        )
    where = [*dashboard_lines(cluster), *metrics_lines(cluster, nodes)]
    table = _replica_table(report, nodes)
    return Group(*counts, Text(f"code {report.code}"), table, Text("\n".join(where)))


def seen_by_routers(
    answers: Mapping[str, cluster_pb2.ClusterInfo | str],
) -> cluster_pb2.ClusterInfo | None:
    """Return the view of the router that reaches most workers, with the requests of all routers. None: none answers."""
    told = [answer for answer in answers.values() if not isinstance(answer, str)]
    if not told:
        return None
    seen = cluster_pb2.ClusterInfo()
    seen.CopyFrom(max(told, key=lambda answer: answer.workers_ready))
    seen.requests_running = sum(answer.requests_running for answer in told)
    seen.requests_waiting = sum(answer.requests_waiting for answer in told)
    return seen


def _replica_table(report: "SupervisorReport", nodes: Sequence["RayNode"]) -> RenderableType:
    """Return a table of the workers and routers, with a column for the node if there are several nodes.

    A worker's own row is that of rank 0. Its other ranks follow.
    """
    names = {node.node_id: node.name for node in nodes}
    node_heading = ("node",) if len(nodes) > 1 else ()
    table = FittingTable("place", "phase", *node_heading, "address", "pid", "starts", "last error")
    for replica in report.replicas:
        phase = Text(replica.shown_phase, style=_PHASE_STYLES.get(replica.shown_phase, "yellow"))
        node = (names.get(replica.node_id, "-"),) if node_heading else ()
        facts = (replica.address, str(replica.pid or "-"), str(replica.num_starts))
        age_seconds = report.error_age_seconds(replica)
        age = f" ({ago(age_seconds)})" if replica.error and age_seconds is not None else ""
        error = replica.refusal or f"{replica.error}{age}"
        table.add_row(replica.name, phase, *node, *facts, Text(error, style="red"))
        for rank, (node_id, pid) in enumerate(replica.ranks[1:], start=1):
            node = (names.get(node_id, "-"),) if node_heading else ()
            table.add_row(f"{replica.name} rank {rank}", "", *node, "", str(pid), "", "")
    return table


def ago(seconds: float) -> str:
    """Format an age, for example `12 s ago`, in the largest unit of which there are at least two."""
    for unit, unit_seconds in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * unit_seconds:
            return f"{seconds // unit_seconds:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _counts(num_workers: int, info: cluster_pb2.ClusterInfo) -> str:
    index = "answers" if info.index_available else "does not answer: placement is by load"
    models = ", ".join(model.id for model in info.models) or info.model.id
    return (
        f"{models} on {info.workers_ready} of {counted(num_workers, 'worker')}, policy {info.policy}, "
        f"{info.requests_running} running, {info.requests_waiting} waiting; the prefix index {index}"
    )


def sizes_view(sizes: Sequence[ModelSize]) -> RenderableType:
    """Show the size of a worker of each model, and what workers that share a machine leave of it together."""
    tables = [size_view(one) for one in sizes]
    left_bytes, has_bytes = left_bytes_of(sizes), sizes[0].memory_bytes
    if len(sizes) == 1 or left_bytes is None or has_bytes is None:
        return Group(*tables)
    total = format_bytes(sum(one.shared_bytes for one in sizes))
    return Group(*tables, Text(f"a worker of each takes {total}, left: {_left(left_bytes, has_bytes)}"))


def size_view(sized: ModelSize) -> RenderableType:
    kv = sized.kv
    rows = [
        ("data type", str(sized.dtype)),
        *_memory_rows(sized),
        ("bytes a block", f"{kv.block_bytes:,}"),
        ("blocks", f"{kv.num_blocks:,} of {kv.block_size} tokens"),
        ("tokens", f"{kv.num_tokens:,}"),
        (
            "requests at once",
            f"{short_decimal(kv.max_concurrency(sized.max_model_len))} of {sized.max_model_len:,} tokens",
        ),
    ]
    ranks = sized.tensor_parallel_size
    holder = "a worker holds" if ranks == 1 else f"each of {ranks} ranks holds"
    return plain_table((holder, Path(sized.model).name), rows)


def _memory_rows(sized: ModelSize) -> Iterator[tuple[str, str]]:
    yield "weights", f"{format_bytes(sized.weights_bytes)} in {sized.dtype.name}"
    if sized.slots_bytes:
        yield "adapter slots", f"{format_bytes(sized.slots_bytes)} in {sized.dtype.name}"
    yield "KV cache", f"{format_bytes(sized.kv.total_bytes)} in {sized.kv_dtype}"
    if sized.draft_weights_bytes:
        yield "draft model", f"{format_bytes(sized.draft_weights_bytes)} of weights"
        yield "its KV cache", f"{format_bytes(sized.kv.draft_bytes)} of the same memory"
    if sized.process_bytes is None:
        yield "process", "not counted: on a GPU the worker measures it at its start"
    else:
        yield "process", f"{format_bytes(sized.process_bytes)}, as the demo model's; more for a large model"
    yield "total", format_bytes(sized.total_bytes)
    if sized.memory_bytes is not None and sized.left_bytes is not None:
        yield "left", _left(sized.left_bytes, sized.memory_bytes)


def _left(left_bytes: int, memory_bytes: int) -> str:
    if left_bytes < 0:
        return f"none: {format_bytes(-left_bytes)} more than the {format_bytes(memory_bytes)} that there are"
    return f"{format_bytes(left_bytes)} of {format_bytes(memory_bytes)}"


def finish_line(finish: Finish) -> str:
    moved = f", {counted(finish.migrations, 'migration')}" if finish.migrations else ""
    return (
        f"[{finish.worker_id}: {counted(finish.prompt_tokens, 'prompt token')}, {finish.cached_tokens} cached, "
        f"{finish.completion_tokens} generated in {finish.total_seconds:.2f} s, first after "
        f"{finish.time_to_first_token_seconds * 1000:.0f} ms, {finish.reason}, seed {finish.seed}{moved}]"
    )


def finding_line(finding: Finding) -> Text:
    style = {"ok": "green", "warn": "yellow", "fail": "red"}[finding.verdict]
    return Text.assemble((f"{finding.verdict:<5}", style), f"{finding.subject:<13} {finding.detail}")


class FittingTable:
    """Table of rows under headings.

    If the terminal is too narrow, each row becomes a name and lines of `heading value`. A column that is cut would show
    no number at all.
    """

    def __init__(self, *headings: str) -> None:
        self._headings = headings
        self._rows: list[tuple[RenderableType, ...]] = []

    def add_row(self, *cells: str | Text) -> None:
        self._rows.append(tuple(Text(cell) if isinstance(cell, str) else cell for cell in cells))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
        for heading in self._headings:
            table.add_column(heading, no_wrap=True)
        for row in self._rows:
            table.add_row(*row)
        if console.measure(table, options=options.update(width=ANY_WIDTH)).maximum <= options.max_width:
            yield table
            return
        for name, *cells in self._rows:
            yield name
            facts = [
                Text.assemble((f"{heading} ", "dim"), cell)
                for heading, cell in zip(self._headings[1:], cells, strict=True)
                if isinstance(cell, Text) and cell.plain
            ]
            yield Padding(Columns(facts, padding=(0, 3, 0, 0)), (0, 0, 0, 2))
