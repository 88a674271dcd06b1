"""`blockyard up`, `down`, `restart` and `status`: the commands that need Ray.

Owns words, tables and options. What is done lives in cluster.py and administration.py, what a dry run finds out in
dry_run.py.
"""

from dataclasses import asdict
from typing import Any

import click
from blockyard.deploy import administration, dry_run, effective, nodes, on_ray, state, views
from blockyard.deploy import cluster as clusters
from blockyard.deploy.commands.shown import as_dict, show
from blockyard.deploy.deadline import ANSWER_SECONDS, answers_within
from blockyard.deploy.interruption import end_like_ctrl_c
from blockyard.deploy.options import cluster_option, grace_option, output_option
from blockyard.deploy.progress import StageProgress
from blockyard.deploy.security import client_connection, connection_options
from blockyard.deploy.up_options import up_options, up_settings
from blockyard.proto.v1.cluster_pb2 import ClusterInfo
from blockyard.router.client import BlockyardError, Client

LOOK_SECONDS = 3.0
"""Of `status`, for the supervisor and for the routers."""


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
    with StageProgress() as progress:
        clusters.down(state.load(cluster), drain_seconds=drain_seconds, forget=forget, report=progress.report)
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
    with StageProgress() as progress:
        restarted = administration.restart(
            state.load(cluster), names, grace_seconds=grace_seconds, report=progress.report
        )
    show(output, {"restarted": restarted}, f"restarted {', '.join(restarted)}")


@click.command()
@cluster_option
@connection_options
@output_option
def status(cluster: str, output: str) -> None:
    """Who should run, who does, and what the routers see."""
    remembered = state.load(cluster)
    with answers_within(ANSWER_SECONDS, on_ray.silence_of(remembered)):
        with on_ray.driver(remembered):
            report, living = on_ray.supervisor_report(LOOK_SECONDS), nodes.living_nodes()
        info = _cluster_info(remembered)
    document = {
        "supervisor_pid": report.pid,
        "code": report.code,
        "places": [views.place_dict(place) for place in report.places],
        "nodes": [asdict(node) for node in living],
        "cluster": None if info is None else as_dict(info),
    }
    show(output, document, views.status_view(remembered, report, info, living))


def _cluster_info(remembered: state.ClusterState) -> ClusterInfo | None:
    """None while no router answers: what the supervisor says is worth showing all the same."""
    try:
        connection = client_connection()
        with Client(
            list(remembered.routers), timeout_seconds=LOOK_SECONDS, retries=0, **connection
        ) as client:
            return client.cluster_info()
    except (BlockyardError, ValueError):
        return None
