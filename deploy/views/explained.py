"""View of `blockyard explain`: each candidate worker with its estimated times and its cost, and each possible pull."""

from collections.abc import Iterable, Iterator

from blockyard.deploy.dashboard.prompt_queries import UNPRICED, VERDICTS
from blockyard.deploy.views import views
from blockyard.proto.v1 import cluster_pb2
from rich.console import Group, RenderableType
from rich.text import Text

_TOKENS = {
    "cached_tokens": "cached",
    "host_cached_tokens": "host",
    "pulled_tokens": "pulled",
    "uncached_tokens": "uncached",
}
_TERMS = {
    "queue_ms": "queue",
    "prefill_ms": "prefill",
    "host_load_ms": "host load",
    "pull_ms": "pull",
    "decode_ms": "decode",
    "memory_ms": "memory",
    "adapter_ms": "adapter",
    "interference_ms": "interference",
    "total_ms": "total",
    "cost": "cost",
}
"""Fields of a candidate: the estimated times, their sum `total_ms`, and the `cost` that the policy compares."""
_OF_PULLS = frozenset({"pulled_tokens", "pull_ms"})
"""Fields that are left out where nothing can be pulled."""
_OF_ADAPTERS = frozenset({"adapter_ms"})
"""Fields that are left out where no candidate has to load an adapter."""


def explained_view(explained: cluster_pb2.ExplainPlacementResponse) -> RenderableType:
    """Return a table of the candidates, cheapest first. Times are in ms."""
    if not explained.chosen_worker_id:
        return Text("no worker would take this request now", "red")
    index = "" if explained.index_available else "; the prefix index does not answer"
    heading = Text(f"{explained.chosen_worker_id}, by policy {explained.policy}{index}", "bold")
    has_pulls = any(candidate.pull_options for candidate in explained.candidates)
    loads_adapter = any(candidate.adapter_ms for candidate in explained.candidates)
    hidden = (frozenset() if has_pulls else _OF_PULLS) | (frozenset() if loads_adapter else _OF_ADAPTERS)
    tokens, terms = (
        {field: name for field, name in fields.items() if field not in hidden} for fields in (_TOKENS, _TERMS)
    )
    rows = [
        (
            candidate.worker_id,
            *(f"{getattr(candidate, field):,}" for field in tokens),
            *(f"{getattr(candidate, field):,.1f}" for field in terms),
        )
        for candidate in explained.candidates
    ]
    table = views.plain_table(("worker", *tokens.values(), *terms.values()), rows)
    legend = Text("tokens, and estimates in ms; the worker with the lowest cost is chosen", "dim")
    split = [_split_line(explained.split)] if explained.HasField("split") else []
    return Group(heading, table, legend, *_pull_lines(explained.candidates), *split)


def _split_line(split: cluster_pb2.SplitPlacement) -> Text:
    """Return a line for the best way to begin the request on one worker and to continue it on another."""
    first, second = split.prefill, split.decode
    ends = f"split: {first.worker_id} computes {first.uncached_tokens:,} tokens"
    ends += f", {second.worker_id} fetches {second.pulled_tokens:,} and continues"
    costs = f"{split.split_ms:,.1f} ms ({first.total_ms:,.1f} + {second.total_ms:,.1f})"
    whole = f", on one worker {split.local_ms:,.1f}" if split.local_ms else ""
    return Text(f"{ends}: {costs}{whole}; {'chosen' if split.is_chosen else 'not chosen'}")


def _pull_lines(candidates: Iterable[cluster_pb2.PlacementCandidate]) -> Iterator[Text]:
    """Yield a line for each way to pull a part of the prompt."""
    for candidate in candidates:
        for option in candidate.pull_options:
            ends = f"{candidate.worker_id} could pull from {option.source_id}"
            if option.verdict not in UNPRICED:
                saves = "saves" if option.saved_ms >= 0 else "costs"
                ends += f" {option.pulled_tokens:,} tokens in {option.time_ms:,.1f} ms"
                ends += f", which {saves} {abs(option.saved_ms):,.1f} ms"
            yield Text(f"{ends}; {VERDICTS.get(option.verdict, 'unknown')}")
