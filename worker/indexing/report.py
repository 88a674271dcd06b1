"""What a worker says of its own part of the prefix index: whether it can be relied on, and in numbers.

Owns the rule that tells EXACT from DEGRADED. Does not own what it is told from (publisher.py) nor what a router
makes of all workers' parts. Pure.
"""

from blockyard.proto.index.contract import ErrorKind
from blockyard.proto.v1.cluster_pb2 import IndexState, WorkerIndex
from blockyard.worker.indexing.state import PublisherState

MAX_LAG_SECONDS = 1.0
"""An index that knows everything but younger changes is called exact."""
_NO_ANSWER = (ErrorKind.TIMEOUT, ErrorKind.CONNECTION, ErrorKind.LOADING)


def is_exact(state: PublisherState) -> bool:
    """Whether the index holds what the caches hold, but for the youngest changes."""
    return not shortcoming(state)


def shortcoming(state: PublisherState) -> str:
    """Why the index is not exact, in words that follow the worker's name; empty if it is."""
    if state.last_error is not None:
        if state.last_error in _NO_ANSWER:
            return "gets no answer from Redis"
        return f"is refused by Redis ({state.last_error.value.replace('_', ' ')})"
    if state.berth is None:
        return "takes a place in the index: it had none yet, or Redis lost it"
    if state.is_resyncing:
        return f"tells the index all that it holds, {state.num_pending:,} changes are left"
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
    )


def num_entries(state: PublisherState) -> int:
    """Names that the index should hold of this worker, each once: what is anywhere includes what is on the GPU."""
    tells_anywhere = state.berth is not None and state.berth.anywhere is not None
    return state.num_anywhere if tells_anywhere else state.num_entries
