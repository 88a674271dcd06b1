"""`blockyard workers`, `blocks`, `index` and `explain`: the commands that only look, through any router."""

import sys

import click
from blockyard.deploy.commands.shown import as_dict, asking, console, naming_workers, show
from blockyard.deploy.settings.options import cluster_option, output_option, router_option
from blockyard.deploy.settings.security import connection_options
from blockyard.deploy.views import index as index_view
from blockyard.deploy.views import pool_map, views
from blockyard.deploy.views.explained import explained_view
from blockyard.worker.inspection.pool_map import block_cells


@click.command()
@cluster_option
@router_option
@connection_options
@output_option
def workers(cluster: str, routers: tuple[str, ...], output: str) -> None:
    """The workers as a router sees them.

    \b
    free, cached, used  blocks of its KV cache: cached ones hold a prefix that requests can reuse
    hit rate            prompt tokens read from cached blocks, of all since its start"""
    with asking(cluster, routers) as client:
        known = client.list_workers()
    show(output, [as_dict(worker) for worker in known], views.workers_table(known))


@click.command()
@click.argument("worker", required=False)
@cluster_option
@router_option
@connection_options
@output_option
def blocks(worker: str | None, cluster: str, routers: tuple[str, ...], output: str) -> None:
    """Each worker's block pool as a map, or one worker's."""
    with asking(cluster, routers) as client, naming_workers(client, worker):
        names = [worker] if worker else [known.worker_id for known in client.list_workers()]
        pools = [client.block_pool(name) for name in names]
    if output == "json":
        show(output, [{**as_dict(pool), "cells": block_cells(pool)} for pool in pools], "")
        return
    if not pools:
        console().print(views.workers_table(()))
    for pool in pools:
        console().print(pool_map.pool_map(pool))


@click.command()
@cluster_option
@router_option
@connection_options
@output_option
def index(cluster: str, routers: tuple[str, ...], output: str) -> None:
    """The prefix index: its state, size and lag, and how fast and how right it is.

    \b
    names     different names of blocks in it (with a stride: of groups of them)
    bytes     what they take in Redis, estimated from a sample
    berths    lives of workers in it, and ended ones whose names are yet to go
    lag       age of the oldest change of any worker that it has not confirmed
    look-ups  for placement: all; failed or late; skipped while it did not answer
    stale     of the blocks that it promised of chosen workers: those not reused

    \b
    Of each worker:
    entries   names that the index should hold of it
    pending   changes that it has not confirmed; lag s: the oldest one's age
    resyncs   how often it was told everything anew; errors: calls that failed

    Look-ups and stale are of the router that answers, since its start. A - stands where nothing was counted or told
    yet, with the reason beside it."""
    with asking(cluster, routers) as client:
        info = client.index_info()
    show(output, as_dict(info) | index_view.derived(info), index_view.index_view(info))


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
