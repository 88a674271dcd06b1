"""`blockyard drain`, `resume`, `flush`, `pull`, `scale` and `lora` change what serves and what is cached."""

import sys
from dataclasses import asdict

import click
from blockyard.deploy.commands.printing import (
    as_dict,
    asking,
    connected,
    known_cluster,
    naming_workers,
    show,
    which_cluster,
)
from blockyard.deploy.lifecycle import administration, scaling
from blockyard.deploy.lifecycle import driver as on_ray
from blockyard.deploy.lifecycle.progress import StageProgress
from blockyard.deploy.machine.deadline import ANSWER_SECONDS
from blockyard.deploy.settings.options import (
    cluster_option,
    found_option,
    grace_option,
    output_option,
    router_option,
    waits_option,
)
from blockyard.deploy.settings.security import connection_options
from blockyard.deploy.views.adapters import adapter_line, adapters_table, workers_with

PULL_SECONDS = 65.0
"""Deadline of a pull's call. The pull itself takes a minute at most."""
READ_SECONDS = 65.0
"""Deadline of a call that has workers read an adapter. They take a minute at most."""

adapters_model_option = click.option(
    "--model", help="Model of the adapter. Default: the first one, as `model list` shows."
)


@click.command()
@click.argument("worker")
@grace_option
@click.option(
    "--force", is_flag=True, help="Drain it even if no other worker takes requests. New requests then wait."
)
@cluster_option
@router_option
@connection_options
@output_option
def drain(
    worker: str, grace_seconds: float, force: bool, cluster: str, routers: tuple[str, ...], output: str
) -> None:
    """Stop sending WORKER new requests, and wait until it runs none.

    Requests that still run after the grace period move to another worker."""
    # A drain has no deadline of its own. This call has one, so that a silent router is an error at once.
    with asking(cluster, routers) as client:
        ready = administration.ready_workers(client.list_workers())
    if force and ready == [worker]:
        click.echo(administration.last_line(worker, which_cluster(cluster, routers)), err=True)
    with connected(cluster, routers, ANSWER_SECONDS) as client, naming_workers(client, worker):
        moved = client.drain_worker(worker, grace_seconds=grace_seconds, force=force)
    show(output, {"worker": worker, "moved": moved}, administration.drained_line(worker, moved))


@click.command()
@click.argument("worker")
@cluster_option
@router_option
@connection_options
@output_option
def resume(worker: str, cluster: str, routers: tuple[str, ...], output: str) -> None:
    """Undo a drain of WORKER: it takes new requests again."""
    with asking(cluster, routers) as client, naming_workers(client, worker):
        client.resume_worker(worker)
    show(output, {"worker": worker, "resumed": True}, f"{worker} takes new requests")


@click.command()
@click.argument("worker", required=False)
@cluster_option
@router_option
@connection_options
@output_option
def flush(worker: str | None, cluster: str, routers: tuple[str, ...], output: str) -> None:
    """Empty the prefix cache of WORKER. Default: of all workers."""
    with asking(cluster, routers) as client, naming_workers(client, worker):
        flushed = client.flush_cache(worker)
    show(output, as_dict(flushed), administration.flushed_line(flushed))


@click.command()
@click.argument("worker")
@click.argument("prompt")
@click.option(
    "--from", "source", metavar="WORKER", help="Worker that lends the blocks. Default: the one with most."
)
@click.option("--cache-salt", help="As in `generate`: only requests with the same salt share prefixes.")
@click.option(
    "--public-prefix", is_flag=True, default=None, help="As in `generate`: share prefixes beyond the tenant."
)
@click.option(
    "--lora-name", help="As in `generate`: the adapter of the requests that are to find the blocks."
)
@click.option("--tenant", help="Tenant of the requests that are to find the blocks.")
@cluster_option
@router_option
@connection_options
@output_option
def pull(
    worker: str,
    prompt: str,
    source: str | None,
    cache_salt: str | None,
    public_prefix: bool | None,
    lora_name: str | None,
    tenant: str | None,
    cluster: str,
    routers: tuple[str, ...],
    output: str,
) -> None:
    """Have WORKER fetch the cached blocks of PROMPT from another worker. `-` reads the prompt from stdin.

    No request need ask for them. It takes a minute at most."""
    text = sys.stdin.read() if prompt == "-" else prompt
    with connected(cluster, routers, PULL_SECONDS, tenant) as client, naming_workers(client, worker):
        pulled = client.pull_prefix(
            worker,
            text,
            source_id=source,
            cache_salt=cache_salt,
            public_prefix=public_prefix,
            lora_name=lora_name,
        )
    show(output, as_dict(pulled), administration.pulled_line(worker, pulled))


@click.command()
@click.argument("num_workers", metavar="WORKERS", type=click.IntRange(min=1))
@grace_option
@waits_option
@click.option(
    "--model", default="", help="Model whose workers they are. Default: the first one, as `model list` shows."
)
@cluster_option
@found_option
@output_option
def scale(
    num_workers: int,
    grace_seconds: float,
    waits_for_nodes: bool,
    model: str,
    cluster: str,
    address: str | None,
    output: str,
) -> None:
    """Change the number of workers to WORKERS.

    New workers take requests once they are warm. To scale down, the workers with the highest numbers drain and end.
    Their requests that still run after the grace period move to other workers. A worker that was drained and taken out
    counts too, and stays out until `blockyard restart` brings it back."""
    remembered = known_cluster(cluster, address)
    on_ray.check_answers(remembered)
    with StageProgress() as progress:
        scaled = scaling.scale(
            remembered,
            num_workers,
            model=model,
            grace_seconds=grace_seconds,
            waits_for_nodes=waits_for_nodes,
            report=progress.report,
        )
    show(output, asdict(scaled), scaled.line())


@click.group()
def lora() -> None:
    """Add, remove and list the LoRA adapters that requests may name."""


@lora.command()
@click.argument("name")
@click.argument("path")
@adapters_model_option
@click.option("--tenant", default="", help="Tenant that alone may use it. Default: everybody may.")
@cluster_option
@router_option
@connection_options
@output_option
def add(
    name: str,
    path: str,
    model: str | None,
    tenant: str,
    cluster: str,
    routers: tuple[str, ...],
    output: str,
) -> None:
    """Let requests use the adapter in the folder PATH as NAME, with its model.

    PATH lies within the adapter folder of each worker (--adapter-dir). One worker of the model reads it first, and all
    others only if it can be served. If NAME exists, new requests get the new content, and those that run keep the old
    one. No model has NAME, and no adapter of another model."""
    with connected(cluster, routers, READ_SECONDS) as client:
        adapter = client.add_adapter(name, path, tenant=tenant, model=model)
    show(output, as_dict(adapter), f"added {adapter_line(adapter)}")


@lora.command()
@click.argument("name")
@adapters_model_option
@cluster_option
@router_option
@connection_options
@output_option
def remove(name: str, model: str | None, cluster: str, routers: tuple[str, ...], output: str) -> None:
    """Forget the adapter NAME. Requests that use it go on to their end."""
    with asking(cluster, routers) as client:
        client.remove_adapter(name, model=model)
    show(output, {"name": name, "removed": True}, f"removed {name}")


@lora.command("list")
@adapters_model_option
@cluster_option
@router_option
@connection_options
@output_option
def list_adapters(model: str | None, cluster: str, routers: tuple[str, ...], output: str) -> None:
    """List the adapters of one model, and the workers that have each in the memory of their device."""
    with asking(cluster, routers) as client:
        adapters, workers = client.list_adapters(model=model), client.list_workers()
    document = [{**as_dict(adapter), "workers": workers_with(adapter, workers)} for adapter in adapters]
    show(output, document, adapters_table(adapters, workers))
