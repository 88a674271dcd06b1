"""Report on the whole prefix index: its state, its size, and the speed and accuracy of look-ups. Also tells placement
whether the workers are cut off from the index.

Owns how the workers' reports and this router's look-ups become one state. Does not own either of them
(worker/indexing/report.py, prefix_lookup.py). A reason is written for operators and quotes no error of Redis.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from blockyard.proto.index.contract import Incarnation, IndexInfo, WorkerId
from blockyard.proto.index.shards import index_title, shard_name
from blockyard.proto.v1 import cluster_pb2
from blockyard.router.cluster.fleet import Fleet
from blockyard.router.cluster.view import ClusterView
from blockyard.router.dispatch.prefix_lookup import IndexHealth, PrefixLookup

logger = logging.getLogger(__name__)

WATCH_SECONDS = 0.1
"""Greatest age of what IndexWatch tells. It looks at every worker, which is too much for each placement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One ready incarnation's part of the index. Two incarnations of one worker have a part each."""

    worker_id: WorkerId
    incarnation: Incarnation
    index: cluster_pb2.WorkerIndex | None
    """The incarnation's last report on its part. None: it has reported nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexCondition:
    state: cluster_pb2.IndexState
    reason: str = ""
    """Why the state is not EXACT, for operators. Empty if it is."""
    is_available: bool = False
    """True if the index answers look-ups within placement's timeout."""


def index_condition(
    health: IndexHealth | None, parts: Sequence[Part], *, timeout_seconds: float
) -> IndexCondition:
    """Return the state of the index. `health` None: there is no index. `timeout_seconds` bounds a look-up."""
    if health is None:
        return IndexCondition(
            state=cluster_pb2.INDEX_STATE_ABSENT, reason="the routers were started without Redis"
        )
    reason = _reason(health, parts, timeout_seconds)
    return IndexCondition(
        state=cluster_pb2.INDEX_STATE_DEGRADED if reason else cluster_pb2.INDEX_STATE_EXACT,
        reason=reason,
        is_available=health.answers and health.in_time and not is_cut_off(parts),
    )


def _reason(health: IndexHealth, parts: Sequence[Part], timeout_seconds: float) -> str:
    """Return why the index is not reliable, or ""."""
    if not health.answers:
        return "Redis does not answer"
    late = [(part.worker_id, shortcoming) for part in parts if (shortcoming := _shortcoming(part, health))]
    if late:
        others = f", and {len(late) - 1} more of {len(parts)} workers" if len(late) > 1 else ""
        without = ": placement runs without the index for now" if is_cut_off(parts) else ""
        return " ".join(late[0]) + others + without
    if not health.in_time:
        return f"look-ups take longer than {1000 * timeout_seconds:g} ms: placement runs without the index for now"
    return ""


def _shortcoming(part: Part, health: IndexHealth) -> str:
    """Return why one worker's part is not exact, or "".

    The worker reports on the Redis that it publishes to, which may not be this router's.
    """
    if part.index is None:
        return "publishes nothing to the index"
    if part.index.state != cluster_pb2.INDEX_STATE_EXACT:
        return part.index.state_reason or "reports that its part is not exact"
    if (part.worker_id, part.incarnation) not in health.standing:
        return "is not in this router's index, which lost its data, or has another Redis or cluster name"
    return ""


def is_cut_off(parts: Sequence[Part]) -> bool:
    """Return True if at least half of the reporting workers are cut off from the index.

    Then Redis may answer look-ups and still miss most of what is cached. One worker alone counts as that worker's own
    trouble, unless it is half of the cluster.
    """
    reports = [part.index for part in parts if part.index is not None]
    num_cut_off = sum(report.cut_off for report in reports)
    return 2 * num_cut_off >= len(reports) > 0


class IndexWatch:
    """Tells placement whether the workers are cut off from a shard of the index, and logs each change."""

    def __init__(self, view: ClusterView, clock: Callable[[], float], num_shards: int = 1) -> None:
        self._view = view
        self._clock = clock
        self._looked_at = -math.inf
        self._is_cut_off = [False] * num_shards

    def is_cut_off(self, shard: int = 0) -> bool:
        now = self._clock()
        if now - self._looked_at >= WATCH_SECONDS:
            self._looked_at = now
            parts, num_shards = _parts(self._view), len(self._is_cut_off)
            for each in range(num_shards):
                self._update(each, parts_on(each, num_shards, parts))
        return self._is_cut_off[shard]

    def _update(self, shard: int, parts: Sequence[Part]) -> None:
        before, self._is_cut_off[shard] = self._is_cut_off[shard], is_cut_off(parts)
        title = index_title(shard, len(self._is_cut_off))
        if self._is_cut_off[shard] and not before:
            first = next(part for part in parts if part.index is not None and part.index.cut_off)
            reason = first.index.state_reason if first.index is not None else ""
            logger.warning(
                "%s is cut off: worker %s %s; requests are placed without it", title, first.worker_id, reason
            )
        elif before and not self._is_cut_off[shard]:
            logger.warning("the workers reach %s again; placement uses it", title)


async def current_condition(lookup: PrefixLookup | None, view: ClusterView) -> IndexCondition:
    """Return the state of the index. It is at most about a second old."""
    if lookup is None:
        return index_condition(None, (), timeout_seconds=0.0)
    num_shards = lookup.num_shards
    healths = await asyncio.gather(*(lookup.health(shard) for shard in range(num_shards)))
    parts, timeout_seconds = _parts(view), lookup.timeout_seconds
    return joined(
        [
            index_condition(health, parts_on(shard, num_shards, parts), timeout_seconds=timeout_seconds)
            for shard, health in enumerate(healths)
        ]
    )


def joined(conditions: Sequence[IndexCondition], title: Callable[[int], str] | None = None) -> IndexCondition:
    """Return the state of an index from those of its shards, or of models with these titles.

    It is EXACT if each is, and available if one is.
    """
    first = conditions[0]
    if len(conditions) == 1 or first.state == cluster_pb2.INDEX_STATE_ABSENT:
        return first
    called = title or (lambda shard: shard_name(shard, len(conditions)))
    late = [
        f"{called(number)}: {condition.reason}"
        for number, condition in enumerate(conditions)
        if condition.reason
    ]
    return IndexCondition(
        state=cluster_pb2.INDEX_STATE_DEGRADED if late else cluster_pb2.INDEX_STATE_EXACT,
        reason="; ".join(late),
        is_available=any(condition.is_available for condition in conditions),
    )


async def index_info(lookup: PrefixLookup | None, fleet: Fleet) -> cluster_pb2.IndexInfo:
    """Return the index's state and size, and the speed and accuracy of look-ups.

    It counts the whole index: for operators, not for each request.
    """
    size = await lookup.info() if lookup is not None else None
    condition = await current_condition(lookup, fleet.view)
    if lookup is None:
        return cluster_pb2.IndexInfo(state=condition.state, state_reason=condition.reason)
    view = fleet.view
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
            cluster_pb2.IndexedWorker(worker_id=part.worker_id, index=part.index) for part in _parts(view)
        ],
    )
    if size is not None:
        _add_size(message, size)
    return message


def _add_size(message: cluster_pb2.IndexInfo, size: IndexInfo) -> None:
    message.names, message.bytes = size.names, size.bytes
    message.live_berths, message.dead_berths = size.live_berths, size.dead_berths


def _parts(view: ClusterView) -> list[Part]:
    parts = [
        Part(worker_id=worker.worker_id, incarnation=worker.incarnation, index=worker.index)
        for worker in view.ready()
    ]
    return sorted(parts, key=lambda part: (part.worker_id, part.incarnation))


def parts_on(shard: int, num_shards: int, parts: Sequence[Part]) -> Sequence[Part]:
    """Return the workers' parts on one of the router's servers."""
    return [_part_on(shard, num_shards, part) for part in parts]


def _part_on(shard: int, num_shards: int, part: Part) -> Part:
    """Return a worker's part on one server. It is not exact if the worker has another number of servers."""
    index = part.index
    if index is None:
        return part
    num_published = len(index.shards) or 1
    if num_published != num_shards:
        reason = f"publishes to {_servers(num_published)}, and this router reads {_servers(num_shards)}"
        index = cluster_pb2.WorkerIndex(state=cluster_pb2.INDEX_STATE_DEGRADED, state_reason=reason)
    elif num_shards == 1 or index.state == cluster_pb2.INDEX_STATE_EXACT:
        return part  # exact on each
    else:
        index = index.shards[shard]
    return replace(part, index=index)


def _servers(num_servers: int) -> str:
    return "one Redis server" if num_servers == 1 else f"{num_servers} Redis servers"


def quantile(values: Iterable[float], share: float) -> float:
    """Return the least value that `share` of the values do not exceed, or 0 if there are none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0
