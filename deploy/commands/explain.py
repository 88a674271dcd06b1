"""`blockyard explain`: where a prompt would run, and why."""

import sys

import click
from blockyard.deploy import views
from blockyard.deploy.commands.shown import as_dict, asking, show
from blockyard.deploy.options import cluster_option, output_option, router_option
from blockyard.deploy.security import connection_options
from blockyard.proto.v1 import cluster_pb2
from rich.console import Group, RenderableType
from rich.text import Text

_TERMS = ("queue_ms", "prefill_ms", "host_load_ms", "decode_ms", "memory_ms", "others_ms", "total_ms", "cost")
"""Of a candidate, in the order in which they add up."""


@click.command()
@click.argument("prompt")
@click.option("--session-id", help="The conversation's name, as in `generate`.")
@click.option("--cache-salt", help="As in `generate`: prefixes are shared with the same salt alone.")
@click.option(
    "--public-prefix", is_flag=True, default=None, help="As in `generate`: shared beyond the token's tenant."
)
@click.option("--tenant", help="As whose request it would be placed.")
@cluster_option
@router_option
@connection_options
@output_option
def explain(
    prompt: str,
    session_id: str | None,
    cache_salt: str | None,
    public_prefix: bool | None,
    tenant: str | None,
    cluster: str,
    routers: tuple[str, ...],
    output: str,
) -> None:
    """Where PROMPT (`-` reads it from stdin) would run, and what each worker would cost. Runs nothing."""
    text = sys.stdin.read() if prompt == "-" else prompt
    with asking(cluster, routers, tenant) as client:
        explained = client.explain_placement(
            text, session_id=session_id, cache_salt=cache_salt, public_prefix=public_prefix
        )
    show(output, as_dict(explained), explained_view(explained))


def explained_view(explained: cluster_pb2.ExplainPlacementResponse) -> RenderableType:
    """Cheapest first; times in ms."""
    if not explained.chosen_worker_id:
        return Text("no worker would take it now", "red")
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
    told = Text("tokens, and estimates in ms; the least cost is chosen", "dim")
    return Group(heading, views.plain_table(headings, rows), told)
