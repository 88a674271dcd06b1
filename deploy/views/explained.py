"""View of `blockyard explain`: each candidate worker with its estimated times and its cost."""

from blockyard.deploy.views import views
from blockyard.proto.v1 import cluster_pb2
from rich.console import Group, RenderableType
from rich.text import Text

_TERMS = (
    "queue_ms",
    "prefill_ms",
    "host_load_ms",
    "decode_ms",
    "memory_ms",
    "interference_ms",
    "total_ms",
    "cost",
)
"""Fields of a candidate: the estimated times, their sum `total_ms`, and the `cost` that the policy compares."""


def explained_view(explained: cluster_pb2.ExplainPlacementResponse) -> RenderableType:
    """Return a table of the candidates, cheapest first. Times are in ms."""
    if not explained.chosen_worker_id:
        return Text("no worker would take this request now", "red")
    index = "" if explained.index_available else "; the prefix index does not answer"
    heading = Text(f"{explained.chosen_worker_id}, by policy {explained.policy}{index}", "bold")
    names = (*(term.removesuffix("_ms").replace("_", " ") for term in _TERMS[:-1]), "cost")
    headings = ("worker", "cached", "host", "uncached", *names)
    rows = [
        (
            candidate.worker_id,
            *(
                f"{tokens:,}"
                for tokens in (
                    candidate.cached_tokens,
                    candidate.host_cached_tokens,
                    candidate.uncached_tokens,
                )
            ),
            *(f"{getattr(candidate, term):,.1f}" for term in _TERMS),
        )
        for candidate in explained.candidates
    ]
    legend = Text("tokens, and estimates in ms; the worker with the lowest cost is chosen", "dim")
    return Group(heading, views.plain_table(headings, rows), legend)
