"""Report on this worker's part of the prefix index: whether it can be relied on, and its figures.

Owns the rule that separates EXACT from DEGRADED. Does not own its inputs (publisher.py) or what a router makes of all
workers' parts. Pure.
"""

from collections.abc import Sequence

from blockyard.proto.index.contract import ErrorKind
from blockyard.proto.index.shards import shard_name
from blockyard.proto.v1.cluster_pb2 import IndexState, WorkerIndex
from blockyard.worker.indexing.state import PublisherState

MAX_LAG_SECONDS = 1.0
"""An index that misses only younger changes counts as exact."""
_NO_ANSWER = (ErrorKind.TIMEOUT, ErrorKind.CONNECTION, ErrorKind.LOADING)


def is_exact(state: PublisherState) -> bool:
    """Return whether the index is known to hold what the caches hold, except for the youngest changes."""
    return not shortcoming(state)


def shortcoming(state: PublisherState) -> str:
    """Return why the index is not exact, in words that follow the worker's name. Empty if it is exact."""
    if state.last_error is not None:
        if state.last_error in _NO_ANSWER:
            return "gets no answer from Redis"
        if state.last_error is ErrorKind.FULL:
            return "is refused by Redis, which is out of memory (maxmemory)"
        if state.last_error is ErrorKind.CLUSTER_MODE:
            return "is refused by Redis, which runs in Cluster mode"
        return f"is refused by Redis ({state.last_error.value.replace('_', ' ')})"
    if state.berth is None:
        return "registers in the index: it was not registered yet, or Redis lost it"
    if state.is_resyncing:
        return f"republishes all its blocks, {state.num_pending:,} changes are left"
    if state.lag_seconds > MAX_LAG_SECONDS:
        return f"has {state.num_pending:,} changes unconfirmed for {state.lag_seconds:.1f} s"
    return ""


def index_message(state: PublisherState) -> WorkerIndex:
    exact, degraded = IndexState.INDEX_STATE_EXACT, IndexState.INDEX_STATE_DEGRADED
    reason = shortcoming(state)
    return WorkerIndex(
        state=degraded if reason else exact,
        state_reason=reason,
        entries=num_entries(state),
        pending=state.num_pending,
        lag_seconds=state.lag_seconds,
        resyncs=state.num_resyncs,
        errors=state.num_errors,
        damages=state.num_damages,
        cut_off=state.last_error is not None or state.berth is None,
    )


def sharded_message(states: Sequence[PublisherState]) -> WorkerIndex:
    """Return the report on an index of one or more servers. It is exact if each server's part is."""
    parts = [index_message(state) for state in states]
    if len(parts) == 1:
        return parts[0]
    late = [(shard, part) for shard, part in enumerate(parts) if part.state_reason]
    return WorkerIndex(
        state=late[0][1].state if late else parts[0].state,
        state_reason=f"{late[0][1].state_reason} ({shard_name(late[0][0], len(parts))})" if late else "",
        entries=sum(part.entries for part in parts),
        pending=sum(part.pending for part in parts),
        lag_seconds=max(part.lag_seconds for part in parts),
        resyncs=sum(part.resyncs for part in parts),
        errors=sum(part.errors for part in parts),
        damages=sum(part.damages for part in parts),
        cut_off=all(part.cut_off for part in parts),
        shards=parts,
    )


def num_entries(state: PublisherState) -> int:
    """Return how many names the index should hold of this worker. Names anywhere include those on the GPU."""
    publishes_anywhere = state.berth is not None and state.berth.anywhere is not None
    return state.num_anywhere if publishes_anywhere else state.num_entries
