"""Worker metrics: its load and its part of the index, under the names of the table (proto/metrics/table.py).

Pure. Does not own how they are counted (engine.py, indexing/publisher.py) or exported (actor.py, __main__.py).
"""

from blockyard.proto.metrics.readings import Readings, Source, labels_of
from blockyard.proto.metrics.table import WORKER_METRICS
from blockyard.proto.naming.model_files import model_names
from blockyard.proto.v1.cluster_pb2 import IndexState, WorkerIndex
from blockyard.worker.config import WorkerConfig
from blockyard.worker.engine_types import EngineLoad

FROM_LOAD = (
    "running",
    "waiting",
    "host_cached_blocks",
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
    "preemptions",
    "swaps",
    "moves",
    "drafted_tokens",
    "accepted_tokens",
    "pulled_blocks",
    "lent_blocks",
    "failed_pulls",
    "pulling_bytes",
    "lending_bytes",
    "pull_setup_seconds",
    "pull_bytes_per_second",
)
"""Figures with the same name in the load and in the table."""


def worker_source(config: WorkerConfig) -> Source:
    """Describe a worker's metrics and their labels for the exporters."""
    model = config.model_name or model_names(config.engine.model)[0]
    labels = labels_of("worker", config.worker_id, cluster=config.cluster, model=model)
    return Source(table=WORKER_METRICS, labels=labels, names=config.metrics_names)


def worker_readings(
    load: EngineLoad,
    index: WorkerIndex | None,
    *,
    num_evictions: int,
    stalled_seconds: float,
    is_draining: bool,
) -> Readings:
    """Return the value of every worker metric by its name. `index` is None where the worker has no part in the
    index."""
    index = index or WorkerIndex(state=IndexState.INDEX_STATE_ABSENT)
    total_blocks = load.free_blocks + load.cached_blocks + load.used_blocks
    return {
        **{name: getattr(load, name) for name in FROM_LOAD},
        "kv_usage_ratio": load.used_blocks / total_blocks,
        "blocks_free": load.free_blocks,
        "blocks_cached": load.cached_blocks,
        "blocks_used": load.used_blocks,
        "evictions": num_evictions,
        "stalled_seconds": stalled_seconds,
        "draining": int(is_draining),
        "index_state": index.state,
        "index_lag_seconds": index.lag_seconds,
        "index_entries": index.entries,
        "index_errors": index.errors,
        "index_resyncs": index.resyncs,
        "index_damages": index.damages,
    }
