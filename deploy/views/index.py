"""View of `blockyard index`: the prefix index, and ratios of its counts. Makes no calls and prints nothing."""

from collections.abc import Iterable

from blockyard.deploy.views.views import plain_table
from blockyard.proto.v1 import cluster_pb2
from rich.console import Group, RenderableType
from rich.text import Text

_ENTRIES = "entries: distinct block names; `workers` counts every cached block, even several with one name"
_SILENT = "- in a worker's row: it has not reported yet, because it has just joined or runs without Redis"
_STYLES = {"EXACT": "green", "DEGRADED": "yellow", "ABSENT": "red"}


def derived(info: cluster_pb2.IndexInfo) -> dict[str, float | None]:
    """Return the bytes per name, the share of promised blocks that were stale, and the largest lag of any worker.

    A ratio is None if nothing was counted.
    """
    return {
        "bytes_per_name": _ratio(info.bytes, info.names),
        "stale_ratio": _ratio(info.stale_blocks, info.promised_blocks),
        "lag_seconds": max((worker.index.lag_seconds for worker in info.workers), default=0.0),
    }


def index_view(info: cluster_pb2.IndexInfo) -> RenderableType:
    state = _state_name(info.state)
    heading = Text.assemble("prefix index  ", (state, _STYLES.get(state, "red")))
    if info.state_reason:
        heading.append(f"  {info.state_reason}")
    if info.state == cluster_pb2.INDEX_STATE_ABSENT:
        return heading
    totals = plain_table(("what", "how much"), _totals(info))
    is_silent = not all(worker.HasField("index") for worker in info.workers)
    notes = [_ENTRIES, _SILENT] if is_silent else [_ENTRIES]
    return Group(heading, totals, _workers(info.workers), Text("\n".join(notes), style="dim"))


def _totals(info: cluster_pb2.IndexInfo) -> list[tuple[str, str]]:
    """Return rows of totals: sizes of the whole index, and look-ups and blocks of the router that answered."""
    ratios = derived(info)
    bytes_per_name, stale_ratio = ratios["bytes_per_name"], ratios["stale_ratio"]
    milliseconds = (1000 * info.lookup_p50_seconds, 1000 * info.lookup_p99_seconds)
    uncounted = _why_uncounted(info)
    size = [
        f"{info.names:,}{_stride(info.stride_blocks)}",
        f"{info.bytes:,}" + (f" ({bytes_per_name:.1f} a name)" if bytes_per_name else ""),
        f"{info.live_berths:,} live, {info.dead_berths:,} to be purged",
    ]
    return [
        *zip(("names", "bytes", "berths"), [f"- ({uncounted})"] * 3 if uncounted else size, strict=True),
        ("lag", f"{ratios['lag_seconds']:.2f} s at most"),
        (
            "look-ups",
            f"{info.lookups:,}, {info.failed_lookups:,} failed, {info.skipped_lookups:,} skipped"
            + (f"; p50 {milliseconds[0]:.2f} ms, p99 {milliseconds[1]:.2f} ms" if any(milliseconds) else ""),
        ),
        (
            "stale",
            "- (this router has placed no request by the index yet)"
            if stale_ratio is None
            else f"{stale_ratio:.2%} of {info.promised_blocks:,} blocks promised",
        ),
    ]


def _why_uncounted(info: cluster_pb2.IndexInfo) -> str:
    """Return why names, bytes and berths were not counted in Redis, or "" if they were.

    A counted index has at least one berth, the integer by which a worker's incarnation stands in it.
    """
    if info.live_berths or info.dead_berths:
        return ""
    if not info.workers:
        return "not counted: no worker that would publish to the index is ready"
    if info.state != cluster_pb2.INDEX_STATE_EXACT:
        return "not counted: see the state above"
    return "not counted: Redis did not answer in time, or routers lack the right to count (see SECURITY.md)"


def _stride(stride_blocks: int) -> str:
    return f", one for {stride_blocks} blocks" if stride_blocks > 1 else ""


def _workers(workers: Iterable[cluster_pb2.IndexedWorker]) -> RenderableType:
    headings = ("worker", "state", "entries", "pending", "lag s", "resyncs", "errors")
    return plain_table(headings, [_row(worker) for worker in workers])


def _row(worker: cluster_pb2.IndexedWorker) -> tuple[str, ...]:
    if not worker.HasField("index"):
        return (worker.worker_id, "-", "-", "-", "-", "-", "-")
    index = worker.index
    counts = (f"{count:,}" for count in (index.resyncs, index.errors))
    return (
        worker.worker_id,
        _state_name(index.state),
        f"{index.entries:,}",
        f"{index.pending:,}",
        f"{index.lag_seconds:.2f}",
        *counts,
    )


def _state_name(state: cluster_pb2.IndexState) -> str:
    return cluster_pb2.IndexState.Name(state).removeprefix("INDEX_STATE_")


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
