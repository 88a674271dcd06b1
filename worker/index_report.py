"""What a worker says of its own part of the prefix index: whether it can be relied on, and in numbers.

Owns the rule that tells EXACT from DEGRADED. Does not own what it is told from (publisher.py) nor what a router
makes of all workers' parts. Pure.
"""

from blockyard.proto.v1.cluster_pb2 import IndexState, WorkerIndex
from blockyard.worker.publisher import PublisherState

MAX_LAG_SECONDS = 1.0
"""An index that knows everything but younger changes is called exact."""


def is_exact(state: PublisherState) -> bool:
    """Whether the index holds what the caches hold, but for the youngest changes."""
    return (
        state.berth is not None
        and not state.is_resyncing
        and state.last_error is None
        and state.lag_seconds <= MAX_LAG_SECONDS
    )


def index_message(state: PublisherState) -> WorkerIndex:
    exact, degraded = IndexState.INDEX_STATE_EXACT, IndexState.INDEX_STATE_DEGRADED
    return WorkerIndex(
        state=exact if is_exact(state) else degraded,
        entries=num_entries(state),
        pending=state.num_pending,
        lag_seconds=state.lag_seconds,
        resyncs=state.num_resyncs,
        errors=state.num_errors,
    )


def num_entries(state: PublisherState) -> int:
    """Names that the index should hold of this worker, each once: what is anywhere includes what is on the GPU."""
    tells_anywhere = state.berth is not None and state.berth.anywhere is not None
    return state.num_anywhere if tells_anywhere else state.num_entries
