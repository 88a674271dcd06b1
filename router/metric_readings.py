"""Metric readings of a router at one moment, under the names of the table (proto/metrics/table.py).

Owns where each value is found. Does not own request metrics (generation/metrics.py) or how readings leave the process
(actor.py, __main__.py). Called on the event loop once a second. It looks at each held request.
"""

from collections import Counter

from blockyard.proto.metrics.readings import (
    MODEL_LABEL,
    Histogram,
    LabelledReadings,
    Readings,
    Source,
    labels_of,
)
from blockyard.proto.metrics.table import ROUTER_METRICS
from blockyard.proto.v1 import cluster_pb2
from blockyard.router.config import RouterConfig
from blockyard.router.dispatch.index_report import current_condition
from blockyard.router.dispatch.prefix_lookup import PrefixLookup
from blockyard.router.generation.answer_store import AnswerStore
from blockyard.router.generation.generation import RouterParts
from blockyard.router.model_groups import ModelGroups


def router_source(config: RouterConfig, router_id: str) -> Source:
    """Describe a router's metrics and their labels for the exporters."""
    labels = labels_of("router", router_id, cluster=config.cluster, model=config.models[0].id)
    return Source(table=ROUTER_METRICS, labels=labels, names=config.metrics_names)


async def router_readings(groups: ModelGroups, loop_lag: Histogram, access: Readings) -> LabelledReadings:
    """Return all readings of now, with a label for each model. What is the whole router's has the default model's.
    `access` are those of refused calls and of the files of tokens and certificates.

    The indexes are asked for their state, unless their last answers are fresh.
    """
    found = [({MODEL_LABEL: group.model.id}, await _model_readings(group.parts)) for group in groups]
    labels, first = found[0]
    of_router = {
        **_answers(groups.default.parts.answer_store),
        "router_draining": int(groups.registry.is_draining),
        "loop_lag_seconds": loop_lag.read(),
        **access,
    }
    return ((labels, {**first, **of_router}), *found[1:])


async def _model_readings(parts: RouterParts) -> Readings:
    condition = await current_condition(parts.placer.prefix_lookup, parts.fleet.view)
    if parts.placer.prefix_lookup is not None:
        parts.placer.index_watch.is_cut_off()  # logs a change also while no request comes
    return {
        **parts.metrics.readings(),
        **parts.relay.pulls.readings(),
        **_requests(parts),
        **_fleet(parts),
        **_index(parts.placer.prefix_lookup, condition.state),
    }


def _requests(parts: RouterParts) -> Readings:
    model = parts.facts.name
    num_waiting = parts.registry.num_waiting(model)
    max_requests, max_tokens = parts.ledger.limits
    return {
        "router_running": parts.registry.num_held(model) - num_waiting,
        "router_waiting": num_waiting,
        "requests_admitted": parts.ledger.requests,
        "requests_limit": max_requests,
        "prompt_tokens_admitted": parts.ledger.tokens,
        "prompt_tokens_limit": max_tokens,
        "migrations": parts.relay.num_migrations,
        "router_splits": parts.relay.num_splits,
        "guarded_prompts": parts.tokenizing.num_guarded,
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
