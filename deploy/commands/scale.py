"""`blockyard scale`: more or fewer workers, without losing a request."""

from dataclasses import asdict

import click
from blockyard.deploy import on_ray, scaling, state
from blockyard.deploy.commands.shown import show
from blockyard.deploy.options import cluster_option, grace_option, output_option
from blockyard.deploy.progress import StageProgress


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
