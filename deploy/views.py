"""What the commands say: summaries, tables and single lines, as rich renderables that are plain without a
terminal.

Owns words and looks; asks nobody and prints nothing. Never shows a secret, only where it lies. Pool maps are
in pool_map.py.
"""

import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from blockyard.deploy.doctor import Finding
from blockyard.deploy.size import ModelSize
from blockyard.deploy.state import ClusterState
from blockyard.proto.v1 import cluster_pb2
from blockyard.router.client import Finish
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from blockyard.deploy.supervisor import Place


_RARE_COUNTS: dict[str, Callable[[cluster_pb2.WorkerLoad], int]] = {
    "host": lambda load: load.host_cached_blocks,
    "preempted": lambda load: load.preemptions,
    "swapped": lambda load: load.swaps,
}


def workers_table(workers: Iterable[cluster_pb2.Worker]) -> Table:
    workers = list(workers)
    # Most clusters have no host cache and enough memory: then these columns would only take room.
    extra = [
        (heading, count)
        for heading, count in _RARE_COUNTS.items()
        if any(count(worker.load) for worker in workers)
    ]
    headings = ("worker", "state", "address", "device", "running", "waiting", "free", "cached", "used")
    table = _table(*headings, *(heading for heading, _ in extra), "hit rate")
    for worker in workers:
        load = worker.load
        table.add_row(
            worker.worker_id,
            state_text(worker),
            worker.address,
            worker.device,
            *(str(count) for count in (load.running, load.waiting)),
            *(str(count) for count in (load.free_blocks, load.cached_blocks, load.used_blocks)),
            *(str(count(load)) for _, count in extra),
            f"{load.cached_tokens / load.prompt_tokens:.0%}" if load.prompt_tokens else "-",
        )
    return table


def state_text(worker: cluster_pb2.Worker) -> Text:
    name = cluster_pb2.WorkerState.Name(worker.state).removeprefix("WORKER_STATE_")
    reason = f" ({worker.state_reason})" if worker.state_reason else ""
    return Text(name + reason, style="green" if name == "READY" else "red")


def plain_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = _table(*headings)
    for row in rows:
        table.add_row(*row)
    return table


def summary(cluster: ClusterState) -> RenderableType:
    """What `up` says at the end. Shows where secrets lie, never what they are."""
    name = "" if cluster.cluster == "default" else f" --cluster {cluster.cluster}"
    command = command_name()
    lines = [
        f"cluster {cluster.cluster} serves {cluster.model} on {cluster.num_workers} workers",
        *(f"router     {address}" for address in cluster.routers),
        *dashboard_lines(cluster),
        "try next:",
        f'  {command} generate{name} "def main():"',
        f"  {command} chat{name}        {command} workers{name}        {command} blocks{name}",
        f"  {command} down{name}",
    ]
    return Text("\n".join(lines))


def command_name() -> str:
    """`blockyard` as the shell here would find it."""
    installed = Path(sys.executable).parent / "blockyard"
    if shutil.which("blockyard") or not installed.exists():
        return "blockyard"
    return str(installed.relative_to(Path.cwd())) if installed.is_relative_to(Path.cwd()) else str(installed)


def dashboard_lines(cluster: ClusterState) -> list[str]:
    """Where the dashboard is, and what it asks for."""
    if cluster.dashboard_url is None:
        return []
    lines = [f"dashboard  {cluster.dashboard_url}"]
    if cluster.ray_token_path is not None:
        lines.append(f"           it asks for a token once: cat {cluster.ray_token_path}")
    if cluster.metrics_port is not None:
        lines.append(f"gauges     http://127.0.0.1:{cluster.metrics_port}/metrics (ray_blockyard_*)")
    return lines


def place_dict(place: "Place") -> dict[str, object]:
    fields = ("name", "kind", "phase", "address", "pid", "node_id", "incarnation", "num_starts", "error")
    return {name: getattr(place, name) for name in fields}


def status_view(
    cluster: ClusterState, places: Iterable["Place"], info: cluster_pb2.ClusterInfo | None
) -> RenderableType:
    rows = [
        (place.name, place.phase, place.address, str(place.pid or "-"), str(place.num_starts), place.error)
        for place in places
    ]
    counts = "no router answers" if info is None else _counts(cluster, info)
    headings = ("place", "phase", "address", "pid", "starts", "last error")
    return Group(Text(counts), plain_table(headings, rows), Text("\n".join(dashboard_lines(cluster))))


def _counts(cluster: ClusterState, info: cluster_pb2.ClusterInfo) -> str:
    index = "answers" if info.index_available else "is away: placement goes by load"
    return (
        f"{info.model.id} on {info.workers_ready} of {cluster.num_workers} workers, policy {info.policy}, "
        f"{info.requests_running} running, {info.requests_waiting} waiting; the prefix index {index}"
    )


def size_view(sized: ModelSize) -> RenderableType:
    kv = sized.kv
    rows = [
        ("bytes a block", f"{kv.block_bytes:,}"),
        ("blocks", f"{kv.num_blocks:,} of {kv.block_size} tokens"),
        ("tokens", f"{kv.num_tokens:,}"),
        (
            "requests at once",
            f"{kv.max_concurrency(sized.max_model_len):,.2f} of {sized.max_model_len:,} tokens",
        ),
    ]
    return plain_table((sized.dtype, Path(sized.model).name), rows)


def finish_line(finish: Finish) -> str:
    return (
        f"[{finish.worker_id}: {finish.prompt_tokens} prompt tokens, {finish.cached_tokens} cached, "
        f"{finish.completion_tokens} generated in {finish.total_seconds:.2f} s, first after "
        f"{finish.time_to_first_token_seconds * 1000:.0f} ms, {finish.reason}, seed {finish.seed}]"
    )


def finding_line(finding: Finding) -> Text:
    style = {"ok": "green", "warn": "yellow", "fail": "red"}[finding.verdict]
    return Text.assemble((f"{finding.verdict:<5}", style), f"{finding.subject:<14}{finding.detail}")


def _table(*headings: str) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    return table
