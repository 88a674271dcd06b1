"""`blockyard drain`, `resume`, `flush` and `scale` change which workers serve, and what they cache."""

from dataclasses import asdict

import click
from blockyard.deploy.commands.shown import (
    as_dict,
    asking,
    connected,
    naming_workers,
    show,
    which_cluster,
)
from blockyard.deploy.lifecycle import administration, scaling
from blockyard.deploy.lifecycle import driver as on_ray
from blockyard.deploy.lifecycle.progress import StageProgress
from blockyard.deploy.machine import state
from blockyard.deploy.machine.deadline import ANSWER_SECONDS
from blockyard.deploy.settings.options import cluster_option, grace_option, output_option, router_option
from blockyard.deploy.settings.security import connection_options


@click.command()
@click.argument("worker")
@grace_option
@click.option(
    "--force", is_flag=True, help="Drain it even if no other worker takes requests: they wait then."
)
@cluster_option
@router_option
@connection_options
@output_option
def drain(
    worker: str, grace_seconds: float, force: bool, cluster: str, routers: tuple[str, ...], output: str
) -> None:
    """Let WORKER take nothing new, and wait until nothing runs there: what outlives the grace goes on elsewhere."""
    # A drain lasts as long as its operator wishes; that no router answers is said at once.
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
    """Take a drain of WORKER back."""
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
    """Empty the prefix cache of WORKER, or of all."""
    with asking(cluster, routers) as client, naming_workers(client, worker):
        flushed = client.flush_cache(worker)
    show(output, as_dict(flushed), administration.flushed_line(flushed))


@click.command()
@click.argument("num_workers", metavar="WORKERS", type=click.IntRange(min=1))
@grace_option
@click.option(
    "--wait-for-nodes",
    "waits_for_nodes",
    is_flag=True,
    help="Where there is no room yet: wait, up to ten minutes, for somebody or an autoscaler to add nodes.",
)
@cluster_option
@output_option
def scale(num_workers: int, grace_seconds: float, waits_for_nodes: bool, cluster: str, output: str) -> None:
    """Run WORKERS workers from now on.

    New ones take requests once they are warm. Of those beyond, the highest numbers leave: they drain, what outlives the
    grace goes on elsewhere, and they end. A worker that was drained and taken out counts, and stays out until
    `blockyard restart` has it back."""
    remembered = state.load(cluster)
    on_ray.check_answers(remembered)
    with StageProgress() as progress:
        scaled = scaling.scale(
            remembered,
            num_workers,
            grace_seconds=grace_seconds,
            waits_for_nodes=waits_for_nodes,
            report=progress.report,
        )
    show(output, asdict(scaled), scaled.line())
