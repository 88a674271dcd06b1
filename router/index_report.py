"""What a router says of the whole prefix index: whether it can be relied on, how large it is, how fast and how right.

Owns how the workers' own words and this router's look-ups become one state. Does not own either of them
(worker/index_report.py, prefix_index.py). What stands in a reason is for operators and names no error of Redis.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from blockyard.proto.prefix_index import IndexInfo
from blockyard.proto.v1 import cluster_pb2
from blockyard.router.cluster_view import ClusterView
from blockyard.router.fleet import Fleet
from blockyard.router.prefix_index import PrefixLookup

Parts = Mapping[str, cluster_pb2.WorkerIndex | None]
"""By worker id, what each ready worker said of its part; None of one that said nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexCondition:
    state: cluster_pb2.IndexState
    reason: str = ""
    """Why it is not EXACT."""


def index_condition(answers: bool | None, parts: Parts) -> IndexCondition:
    """`answers` says whether look-ups are answered; None: there is no index."""
    if answers is None:
        return IndexCondition(
            state=cluster_pb2.INDEX_STATE_ABSENT, reason="the routers were started without Redis"
        )
    if not answers:
        return IndexCondition(state=cluster_pb2.INDEX_STATE_DEGRADED, reason="Redis does not answer")
    late = [
        worker_id
        for worker_id, part in sorted(parts.items())
        if part is None or part.state != cluster_pb2.INDEX_STATE_EXACT
    ]
    if not late:
        return IndexCondition(state=cluster_pb2.INDEX_STATE_EXACT)
    others = f", and {len(late) - 1} more of {len(parts)} workers" if len(late) > 1 else ""
    reason = f"{late[0]} {_shortcoming(parts[late[0]])}{others}"
    return IndexCondition(state=cluster_pb2.INDEX_STATE_DEGRADED, reason=reason)


def _shortcoming(part: cluster_pb2.WorkerIndex | None) -> str:
    if part is None:
        return "tells the index nothing"
    if part.pending:
        return f"has {part.pending} changes unconfirmed for {part.lag_seconds:.1f} s"
    return "gets no answer from Redis"


async def current_condition(lookup: PrefixLookup | None, view: ClusterView) -> IndexCondition:
    """Asks the index whether it answers, unless somebody just did."""
    if lookup is not None:
        await lookup.refresh()
    return index_condition(lookup.answers if lookup is not None else None, _parts(view))


async def index_info(lookup: PrefixLookup | None, fleet: Fleet) -> cluster_pb2.IndexInfo:
    """Counts the whole index: for operators, not for each request."""
    if lookup is None:
        absent = index_condition(None, {})
        return cluster_pb2.IndexInfo(state=absent.state, state_reason=absent.reason)
    size = await lookup.info()
    await lookup.refresh()
    view = fleet.view
    condition = index_condition(lookup.answers and size is not None, _parts(view))
    message = cluster_pb2.IndexInfo(
        state=condition.state,
        state_reason=condition.reason,
        stride_blocks=fleet.identity.index_stride_blocks if fleet.identity else 0,
        lookups=lookup.num_lookups,
        failed_lookups=lookup.errors.total(),
        skipped_lookups=lookup.num_skipped,
        lookup_p50_seconds=quantile(lookup.durations_seconds, 0.5),
        lookup_p99_seconds=quantile(lookup.durations_seconds, 0.99),
        promised_blocks=view.promised_blocks,
        stale_blocks=view.stale_blocks,
        workers=[
            cluster_pb2.IndexedWorker(worker_id=worker_id, index=part)
            for worker_id, part in sorted(_parts(view).items())
        ],
    )
    if size is not None:
        _add_size(message, size)
    return message


def _add_size(message: cluster_pb2.IndexInfo, size: IndexInfo) -> None:
    message.names, message.bytes = size.names, size.bytes
    message.live_berths, message.dead_berths = size.live_berths, size.dead_berths


def _parts(view: ClusterView) -> dict[str, cluster_pb2.WorkerIndex | None]:
    return {worker.worker_id: worker.index for worker in view.ready()}


def quantile(values: Iterable[float], share: float) -> float:
    """The least value that `share` of them do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0
