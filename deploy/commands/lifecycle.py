"""`blockyard up`, `down` and `restart`: the commands that start and end what runs.

Owns words, tables and options. What is done lives in cluster.py and administration.py, what a dry run finds out in
dry_run.py.
"""

from typing import Any

import click
from blockyard.deploy import administration, dry_run, effective, on_ray, state, views
from blockyard.deploy import cluster as clusters
from blockyard.deploy.commands.shown import show
from blockyard.deploy.interruption import end_like_ctrl_c
from blockyard.deploy.options import cluster_option, grace_option, output_option
from blockyard.deploy.progress import StageProgress
from blockyard.deploy.up_options import up_options, up_settings


@click.command()
@up_settings
@click.option(
    "--dry-run",
    "is_dry",
    is_flag=True,
    help="Start nothing: say what would be placed where, by which settings, and what would keep it from working. Exit "
    "code 1 if anything would.",
)
@output_option
def up(is_dry: bool, output: str, **values: Any) -> None:
    """Bring a cluster up and wait until it serves.

    Each setting may also come by the environment, as BLOCKYARD_UP_ and its name, or by a file (--config)."""
    context = click.get_current_context()
    settings = effective.effective(context)
    options = up_options(values)
    if is_dry:
        plan = dry_run.examine(options)
        document = plan.as_dict() | {"configuration": effective.as_document(settings, context)}
        show(output, document, dry_run.plan_view(plan, settings))
        context.exit(0 if plan.would_work else 1)
    end_like_ctrl_c()
    with StageProgress() as progress:
        started = clusters.up(options, progress.report)
    show(output, views.summary_dict(started), views.summary(started))


@click.command()
@cluster_option
@click.option("--drain", "drain_seconds", type=float, default=clusters.DRAIN_SECONDS, show_default=True)
@click.option(
    "--forget", is_flag=True, help="Do not ask Ray: for a joined Ray cluster that is gone for good."
)
@output_option
def down(cluster: str, drain_seconds: float, forget: bool, output: str) -> None:
    """Stop everything that `up` started."""
    remembered = state.load(cluster)
    if remembered.head is None and remembered.ray_address is not None and not forget:
        on_ray.check_answers(remembered, asks_supervisor=False)
    with StageProgress() as progress:
        clusters.down(remembered, drain_seconds=drain_seconds, forget=forget, report=progress.report)
    show(output, {"cluster": cluster, "down": True}, f"cluster {cluster} is down, nothing of it is left")


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@grace_option
@cluster_option
@output_option
def restart(names: tuple[str, ...], grace_seconds: float, cluster: str, output: str) -> None:
    """Restart workers and routers, one after the other, without losing a request. Default: all of them.

    Each drains first, and the next waits until it serves again. A cluster with one router serves nobody while that one
    restarts."""
    remembered = state.load(cluster)
    on_ray.check_answers(remembered)
    with StageProgress() as progress:
        restarted = administration.restart(
            remembered, names, grace_seconds=grace_seconds, report=progress.report
        )
    show(output, {"restarted": restarted}, f"restarted {', '.join(restarted)}")
