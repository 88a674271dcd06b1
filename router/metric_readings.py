"""Metric readings of a router at one moment, under the names of the table (proto/metrics/table.py).

Owns where each value is found. Does not own request metrics (generation/metrics.py) or how readings leave the process
(actor.py, __main__.py). Called on the event loop once a second. It looks at each held request.
"""

from collections import Counter

from blockyard.proto.metrics.readings import Histogram, Readings, Source, labels_of
from blockyard.proto.metrics.table import ROUTER_METRICS
from blockyard.proto.naming.model_files import model_names
from blockyard.proto.v1 import cluster_pb2
from blockyard.router.config import RouterConfig
from blockyard.router.dispatch.index_report import current_condition
from blockyard.router.dispatch.prefix_lookup import PrefixLookup
from blockyard.router.generation.answer_store import AnswerStore
from blockyard.router.generation.generation import RouterParts


def router_source(config: RouterConfig, router_id: str) -> Source:
    """Describe a router's metrics and their labels for the exporters."""
    model = model_names(config.model, config.model_names)[0]
    labels = labels_of("router", router_id, cluster=config.cluster, model=model)
    return Source(table=ROUTER_METRICS, labels=labels, names=config.metrics_names)


async def router_readings(parts: RouterParts, config: RouterConfig, loop_lag: Histogram) -> Readings:
    """Return all readings of now. The index is asked for its state, unless its last answer is fresh."""
    condition = await current_condition(parts.placer.prefix_lookup, parts.fleet.view)
    if parts.placer.prefix_lookup is not None:
        parts.placer.index_watch.is_cut_off()  # logs a change also while no request comes
    return {
        **parts.metrics.readings(),
        **parts.relay.pulls.readings(),
        **_requests(parts, config),
        **_fleet(parts),
        **_index(parts.placer.prefix_lookup, condition.state),
        **_answers(parts.answer_store),
        "loop_lag_seconds": loop_lag.read(),
    }


def _requests(parts: RouterParts, config: RouterConfig) -> Readings:
    num_waiting = parts.registry.num_waiting()
    return {
        "router_running": len(parts.registry.records()) - num_waiting,
        "router_waiting": num_waiting,
        "requests_admitted": parts.ledger.requests,
        "requests_limit": config.max_requests,
        "prompt_tokens_admitted": parts.ledger.tokens,
        "prompt_tokens_limit": config.max_tokens_admitted,
        "migrations": parts.relay.num_migrations,
        "router_splits": parts.relay.num_splits,
        "router_draining": int(parts.registry.is_draining),
    }


def _fleet(parts: RouterParts) -> Readings:
    view = parts.fleet.view
    return {
        "workers": Counter(view.state(worker).name.lower() for worker in view.workers()),
        "promised_blocks": view.promised_blocks,
        "stale_blocks": view.stale_blocks,
        "reused_blocks": view.reused_blocks,
    }


def _answers(store: AnswerStore | None) -> Readings:
    return {
        "spliced_tokens": store.num_spliced_tokens if store else 0,
        "answer_store_failures": store.errors.total() + store.num_skipped if store else 0,
    }


def _index(lookup: PrefixLookup | None, state: cluster_pb2.IndexState) -> Readings:
    return {
        "router_index_state": state,
        "index_lookups": lookup.num_lookups if lookup else 0,
        "index_failed_lookups": lookup.errors.total() if lookup else 0,
        "index_skipped_lookups": lookup.num_skipped if lookup else 0,
    }
