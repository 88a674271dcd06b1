"""`blockyard status`: which processes should run, which do run, and what the routers see.

Asks the routers and Ray concurrently, within one time budget. Names the parts that do not answer in time, and prints
the answers of the others. views/views.py owns how it looks.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from blockyard.deploy.commands.printing import as_dict, known_cluster, show
from blockyard.deploy.lifecycle import driver as on_ray
from blockyard.deploy.machine import state
from blockyard.deploy.machine.deadline import Budget
from blockyard.deploy.settings.options import cluster_option, found_option, output_option
from blockyard.deploy.settings.security import client_connection, connection_options
from blockyard.deploy.settings.setting import wrong_values_are_usage
from blockyard.deploy.views import views
from blockyard.proto.v1.cluster_pb2 import ClusterInfo
from blockyard.router.client import BlockyardError, Client

if TYPE_CHECKING:
    from blockyard.deploy.supervision.replicas import SupervisorReport

LOOK_SECONDS = 3.0
"""Time limit for the routers, which are asked at the same time as the supervisor."""


@click.command()
@cluster_option
@found_option
@connection_options
@output_option
def status(cluster: str, address: str | None, output: str) -> None:
    """Show the processes that should run, and those that do.

    Also shows what the routers see. It answers within ten seconds. If the supervisor or Ray does not answer, it prints
    what the routers report, names the silent part, and ends with exit code 1."""
    budget, remembered = Budget.of_this_process(), known_cluster(cluster, address)
    with wrong_values_are_usage():
        connection = client_connection()
    # Fork the child before the thread starts: a fork copies no threads.
    child = on_ray.looking(remembered, budget, on_ray.HELLO_SECONDS)
    with ThreadPoolExecutor(1) as routers:
        asked = routers.submit(_cluster_info, remembered, budget.step_seconds(LOOK_SECONDS), connection)
        seen, silence = None, None
        try:
            seen = child.answer(budget.left_seconds, on_ray.silence_of(remembered))
        except (RuntimeError, ValueError, OSError, ModuleNotFoundError) as error:
            silence = error
        info, trouble = asked.result()
    report, living = (None, []) if seen is None else (seen.report, seen.living)
    document = {
        "supervisor_pid": None if report is None else report.pid,
        "code": None if report is None else report.code,
        "places": [] if report is None else _replicas(report),
        "nodes": [asdict(node) for node in living],
        "cluster": None if info is None else as_dict(info),
        "cluster_error": trouble,
    }
    show(output, document, views.status_view(remembered, report, info, living, trouble))
    if silence is not None:
        raise silence


def _replicas(report: "SupervisorReport") -> list[dict[str, Any]]:
    return [
        views.replica_dict(replica) | {"error_age_seconds": report.error_age_seconds(replica)}
        for replica in report.replicas
    ]


def _cluster_info(
    remembered: state.ClusterState, seconds: float, connection: dict[str, Any]
) -> tuple[ClusterInfo | None, str]:
    """Return the routers' view of the cluster, or None and the reason. `status` shows the rest all the same."""
    try:
        addresses = list(remembered.routers)
        with Client(addresses, timeout_seconds=seconds, retries=0, **connection) as client:
            return client.cluster_info(), ""
    except (BlockyardError, ValueError) as error:
        return None, str(error)
