"""`blockyard workers`, `blocks`, `index` and `explain`: read-only commands, through any router."""

import sys

import click
from blockyard.deploy.commands.printing import as_dict, asking, console, naming_workers, show
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
    """List the workers as a router sees them.

    \b
    - free, cached, used: blocks of its KV cache. Cached blocks hold prefixes
      that requests can reuse.
    - hit rate: share of prompt tokens read from cached blocks since the
      worker's start."""
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
    """Show the block pool of WORKER as a map. Default: of every worker."""
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
@click.option("--model", help="Model whose index it is. Default: the cluster's first one.")
@cluster_option
@router_option
@connection_options
@output_option
def index(model: str | None, cluster: str, routers: tuple[str, ...], output: str) -> None:
    """Show the prefix index: its state, size, lag and accuracy.

    \b
    - names: distinct block names in the index (with a stride: one per group)
    - bytes: size of the names in Redis, estimated from a sample
    - berths: incarnations of workers, live ones and ended ones to be purged
    - lag: age of the oldest change that the index has not confirmed
    - look-ups: all for placement, failed or late ones, and ones skipped while
      the index did not answer
    - stale: share of blocks promised on chosen workers but not reused

    \b
    For each worker:
    - entries: names that the index should hold for it
    - pending: changes that the index has not confirmed
    - lag s: age of the oldest pending change
    - resyncs: how often all its blocks were republished
    - errors: failed calls to the index

    Look-ups and stale blocks are counted by the router that answers, since its start. A - means that there is no value
    yet; the reason stands beside it."""
    with asking(cluster, routers) as client:
        info = client.index_info(model)
    show(output, as_dict(info) | index_view.derived(info), index_view.index_view(info))


@click.command()
@click.argument("prompt")
@click.option("--session-id", help="The conversation's name, as in `generate`.")
@click.option("--cache-salt", help="As in `generate`: only requests with the same salt share prefixes.")
@click.option(
    "--public-prefix", is_flag=True, default=None, help="As in `generate`: share prefixes beyond the tenant."
)
@click.option("--lora-name", help="As in `generate`: the adapter of the request.")
@click.option("--tenant", help="Tenant of the request.")
@click.option("--model", help="As in `generate`.")
@cluster_option
@router_option
@connection_options
@output_option
def explain(
    prompt: str,
    session_id: str | None,
    cache_salt: str | None,
    public_prefix: bool | None,
    lora_name: str | None,
    tenant: str | None,
    model: str | None,
    cluster: str,
    routers: tuple[str, ...],
    output: str,
) -> None:
    """Show where PROMPT would run, and its cost on each worker. Runs nothing. `-` reads the prompt from stdin."""
    text = sys.stdin.read() if prompt == "-" else prompt
    with asking(cluster, routers, tenant) as client:
        explained = client.explain_placement(
            text,
            session_id=session_id,
            cache_salt=cache_salt,
            public_prefix=public_prefix,
            lora_name=lora_name,
            model=model,
        )
    show(output, as_dict(explained), explained_view(explained))
