"""View of `blockyard top`: rates between two polls of the workers, and a screen of them. Pure.

Owns the definition of the rates, and the layout at 80 columns and more. commands/watch.py polls.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any

from blockyard.deploy.views.quantities import counted
from blockyard.deploy.views.views import ANY_WIDTH, has_roles, state_text
from blockyard.proto.v1 import cluster_pb2
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

SPARKS = "▁▂▃▄▅▆▇█"
MAX_HISTORY = 60
"""Number of last polls whose rates the sparkline shows."""
WIDE_COLUMNS = 100
"""Width of a terminal, in columns, from which the lag, the reasons of states and pulls are shown."""
BAR_CELLS = 8
SUMMED = (
    "running",
    "waiting",
    "used_blocks",
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
    "preemptions",
    "pulled_blocks",
    "lent_blocks",
    "pulling_bytes",
    "lending_bytes",
    "failed_pulls",
)
"""Numbers of a worker that mean something as the sum over workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The routers' answer to one poll."""

    at_seconds: float
    """Time of the poll, on this process's monotonic clock."""
    info: cluster_pb2.ClusterInfo
    workers: tuple[cluster_pb2.Worker, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRow:
    """One worker, with its rates since the poll before."""

    worker: str
    model: str
    role: str
    state: str
    ranks: int
    """Processes that share the model."""
    running: int
    waiting: int
    kv_usage: float
    """Share of the worker's blocks that sequences hold."""
    hit_rate: float | None
    """Share of prompt tokens read from cached blocks since the poll before, or since the start if no prompt came since.

    None if no prompt ever came."""
    prompt_tokens_per_second: float
    generated_tokens_per_second: float
    preemptions: int
    pulled_blocks_per_second: float
    """Blocks that arrive from other workers."""
    lent_blocks_per_second: float
    """Blocks that are sent to other workers."""
    pulling_bytes: int
    """Bytes still to arrive."""
    lending_bytes: int
    """Bytes still to be sent."""
    failed_pulls: int
    """Pulls that brought fewer blocks than they should have, since the worker's start."""
    index_lag_seconds: float | None


def rows_of(now: Look, before: Look | None) -> list[WorkerRow]:
    """Return a row for each worker. Without a poll before, rates are 0 and hit rates count from the worker's start."""
    earlier = {} if before is None else {worker.incarnation: worker.load for worker in before.workers}
    seconds = 0.0 if before is None else now.at_seconds - before.at_seconds
    return [_row(worker, earlier.get(worker.incarnation), seconds) for worker in now.workers]


def totals_of(now: Look, before: Look | None) -> list[WorkerRow]:
    """Return a row for all workers of each model together, or none if the cluster serves one model."""
    if len(now.info.models) < 2:
        return []
    earlier = {} if before is None else {worker.incarnation: worker.load for worker in before.workers}
    seconds = 0.0 if before is None else now.at_seconds - before.at_seconds
    return [_total(model.id, now.workers, earlier, seconds) for model in now.info.models]


def _total(
    model: str,
    workers: Iterable[cluster_pb2.Worker],
    earlier: Mapping[str, cluster_pb2.WorkerLoad],
    seconds: float,
) -> WorkerRow:
    own = [worker for worker in workers if worker.model == model]
    total = cluster_pb2.Worker(
        worker_id=model,
        model=model,
        total_blocks=sum(worker.total_blocks for worker in own),
        load=_sum(worker.load for worker in own),
    )
    # A worker that was not there before adds to no rate.
    base = _sum(earlier.get(worker.incarnation, worker.load) for worker in own) if earlier else None
    ready = sum(worker.state == cluster_pb2.WORKER_STATE_READY for worker in own)
    return replace(_row(total, base, seconds), state=f"{ready} of {len(own)}", ranks=1)


def _sum(loads: Iterable[cluster_pb2.WorkerLoad]) -> cluster_pb2.WorkerLoad:
    loads = list(loads)
    return cluster_pb2.WorkerLoad(**{name: sum(getattr(load, name) for load in loads) for name in SUMMED})


def _row(worker: cluster_pb2.Worker, before: cluster_pb2.WorkerLoad | None, seconds: float) -> WorkerRow:
    load = worker.load
    base = cluster_pb2.WorkerLoad() if before is None else before
    prompt, cached = load.prompt_tokens - base.prompt_tokens, load.cached_tokens - base.cached_tokens
    if prompt <= 0 or not 0 <= cached <= prompt:
        prompt, cached = load.prompt_tokens, load.cached_tokens
    has_rate = before is not None and seconds > 0

    def rate(total: int, earlier: int) -> float:
        # Counters decrease if two routers answer out of order.
        return max(total - earlier, 0) / seconds if has_rate else 0.0

    return WorkerRow(
        worker=worker.worker_id,
        model=worker.model,
        role=worker.role,
        state=cluster_pb2.WorkerState.Name(worker.state).removeprefix("WORKER_STATE_"),
        ranks=max(1, worker.num_ranks),
        running=load.running,
        waiting=load.waiting,
        kv_usage=load.used_blocks / worker.total_blocks if worker.total_blocks else 0.0,
        hit_rate=cached / prompt if prompt else None,
        prompt_tokens_per_second=rate(load.prompt_tokens, base.prompt_tokens),
        generated_tokens_per_second=rate(load.generated_tokens, base.generated_tokens),
        preemptions=load.preemptions,
        pulled_blocks_per_second=rate(load.pulled_blocks, base.pulled_blocks),
        lent_blocks_per_second=rate(load.lent_blocks, base.lent_blocks),
        pulling_bytes=load.pulling_bytes,
        lending_bytes=load.lending_bytes,
        failed_pulls=load.failed_pulls,
        index_lag_seconds=worker.index.lag_seconds if worker.HasField("index") else None,
    )


def total_rate(rows: Iterable[WorkerRow]) -> float:
    """Return the tokens that all workers together generate per second."""
    return sum(row.generated_tokens_per_second for row in rows)


def as_document(now: Look, rows: Sequence[WorkerRow], totals: Sequence[WorkerRow] = ()) -> dict[str, Any]:
    """Return the document for one line of `--output json`. `totals` are those of each model, if there are several."""
    info = now.info
    return {
        "cluster": info.cluster,
        "model": info.model.id,
        "requests_running": info.requests_running,
        "requests_waiting": info.requests_waiting,
        "migrations": info.migrations,
        "index_state": cluster_pb2.IndexState.Name(info.index_state).removeprefix("INDEX_STATE_"),
        "generated_tokens_per_second": total_rate(rows),
        "models": [_total_document(row) for row in totals],
        "workers": [asdict(row) for row in rows],
    }


def _total_document(total: WorkerRow) -> dict[str, Any]:
    of_workers = ("worker", "role", "ranks", "state", "index_lag_seconds")
    return {name: value for name, value in asdict(total).items() if name not in of_workers}


def sparkline(rates: Sequence[float], columns: int) -> str:
    """Draw the last rates, one a column, relative to the largest. Negative, infinite and NaN rates count as 0."""
    shown = [rate if isfinite(rate) and rate > 0 else 0.0 for rate in rates[-columns:]]
    most = max(shown, default=0.0)
    return "".join(SPARKS[int(rate / most * (len(SPARKS) - 1)) if most else 0] for rate in shown)


def bar(share: float, cells: int = BAR_CELLS) -> str:
    filled = round(min(max(share, 0.0), 1.0) * cells)
    return "█" * filled + "░" * (cells - filled)


def screen(
    now: Look,
    rows: Sequence[WorkerRow],
    rates: Sequence[float],
    *,
    columns: int,
    totals: Sequence[WorkerRow] = (),
    trouble: str = "",
) -> RenderableType:
    """Draw one screen.

    `rates` are the total rates, the latest last. `totals` are the rows of several models: the workers of each are then
    below its own. `trouble` says why the numbers are out of date, or is "".
    """
    info = now.info
    index = cluster_pb2.IndexState.Name(info.index_state).removeprefix("INDEX_STATE_")
    models = ", ".join(model.id for model in info.models) or info.model.id
    head = Text(
        f"{info.cluster}: {models} on {info.workers_ready} of {counted(info.workers_known, 'worker')}",
        "bold",
    )
    summary = Text(
        f"router: {info.requests_running} running, {info.requests_waiting} waiting, "
        f"{counted(info.migrations, 'migration')}; index {index}"
    )
    latest = rates[-1] if rates else 0.0
    rate_text = f"{latest:>9,.0f} tokens/s "
    spark = Text.assemble(rate_text, (sparkline(rates, max(columns - len(rate_text) - 1, 1)), "cyan"))
    lines = [head, summary, spark]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    error_lines = (Text(trouble, "red"),) if trouble else ()
    return Group(*lines, _table(now, rows, columns, totals), *error_lines)


def _table(now: Look, rows: Sequence[WorkerRow], columns: int, totals: Sequence[WorkerRow]) -> Table:
    is_wide, is_unbounded = columns >= WIDE_COLUMNS, columns >= ANY_WIDTH
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    widest = (None, None) if is_unbounded else (16, 40 if is_wide else 10)
    for heading, most in zip(("worker", "state"), widest, strict=True):
        table.add_column(heading, no_wrap=True, overflow="ellipsis", max_width=most)
    shows_roles = has_roles(now.workers)
    if shows_roles:
        table.add_column("role", no_wrap=True)
    table.add_column("run", justify="right", no_wrap=True)
    table.add_column("wait", justify="right", no_wrap=True)
    table.add_column("KV used", no_wrap=True)
    for heading in ("hits", "in/s", "out/s", "preempt"):
        table.add_column(heading, justify="right", no_wrap=True)
    if is_wide:
        table.add_column("lag s", justify="right", no_wrap=True)
    # Most clusters pull nothing.
    shows_pulls = is_wide and any(
        worker.load.pulled_blocks or worker.load.lent_blocks for worker in now.workers
    )
    for heading in ("pull/s", "lend/s") if shows_pulls else ():
        table.add_column(heading, justify="right", no_wrap=True)
    pairs = list(zip(now.workers, rows, strict=True))
    shown: list[tuple[cluster_pb2.Worker | None, WorkerRow]] = []
    for total in totals:
        shown += [(None, total), *(pair for pair in pairs if pair[1].model == total.model)]
    of_models = {total.model for total in totals}
    shown += [pair for pair in pairs if pair[1].model not in of_models]
    for worker, row in shown:
        cells: list[RenderableType] = [
            Text(row.worker if row.ranks == 1 else f"{row.worker} x{row.ranks}"),
            _state(worker, row, is_wide=is_wide),
            *([Text(row.role)] if shows_roles else []),
            *(Text(str(count)) for count in (row.running, row.waiting)),
            Text(f"{bar(row.kv_usage)} {row.kv_usage:4.0%}"),
            Text("-" if row.hit_rate is None else f"{row.hit_rate:.0%}"),
            Text(f"{row.prompt_tokens_per_second:,.0f}"),
            Text(f"{row.generated_tokens_per_second:,.0f}"),
            Text(str(row.preemptions)),
        ]
        if is_wide:
            cells.append(Text("-" if row.index_lag_seconds is None else f"{row.index_lag_seconds:.2f}"))
        if shows_pulls:
            rates = (row.pulled_blocks_per_second, row.lent_blocks_per_second)
            cells += [Text(f"{rate:,.0f}") for rate in rates]
        table.add_row(*cells, style="bold" if worker is None else None)
    return table


def _state(worker: cluster_pb2.Worker | None, row: WorkerRow, *, is_wide: bool) -> Text:
    """Return a worker's state, or without a worker the number of a model's workers that are ready."""
    if worker is None:
        return Text(row.state)
    state = state_text(worker)
    return state if is_wide else Text(row.state, state.style)
