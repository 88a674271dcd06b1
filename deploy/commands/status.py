"""`blockyard status`: which processes should run, which do run, and what the routers see.

Asks each router and Ray concurrently, within one time budget. Names the parts that do not answer in time, and prints
the answers of the others. views/views.py owns how it looks.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from blockyard.deploy.commands.printing import as_dict, known_cluster, show
from blockyard.deploy.lifecycle import driver as on_ray
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
"""Time limit for each router and for the supervisor, which are all asked at the same time."""
MAX_ASKED = 32
"""Limit on the routers that are asked at the same time."""


@click.command()
@cluster_option
@found_option
@connection_options
@output_option
def status(cluster: str, address: str | None, output: str) -> None:
    """Show the processes that should run, and those that do.

    Also shows what the routers see, and names each router that does not answer. It answers within ten seconds. If the
    supervisor or Ray does not answer, it prints what the routers report, names the silent part, and ends with exit
    code 1."""
    budget, remembered = Budget.of_this_process(), known_cluster(cluster, address)
    with wrong_values_are_usage():
        connection = client_connection()
    # Fork the child before a thread starts: a fork copies no threads.
    child = on_ray.looking(remembered, budget, LOOK_SECONDS)
    with ThreadPoolExecutor(MAX_ASKED) as threads:

        def ask(addresses: Iterable[str]) -> dict[str, Future[ClusterInfo | str]]:
            seconds = budget.step_seconds(LOOK_SECONDS)
            return {each: threads.submit(_cluster_info, each, seconds, connection) for each in addresses}

        asked = ask(remembered.routers)
        seen, silence = None, None
        try:
            seen = child.answer(budget.left_seconds, on_ray.silence_of(remembered))
        except (RuntimeError, ValueError, OSError, ModuleNotFoundError) as error:
            silence = error
        report, living = (None, []) if seen is None else (seen.report, seen.living)
        now = routers_now(remembered.routers, report)
        asked |= ask(each for each in now if each not in asked)
        answers = {each: asked[each].result() for each in now}
    info = views.seen_by_routers(answers)
    document = {
        "supervisor_pid": None if report is None else report.pid,
        "code": None if report is None else report.code,
        "places": [] if report is None else _replicas(report),
        "nodes": [asdict(node) for node in living],
        "cluster": None if info is None else as_dict(info),
        "router_errors": {each: answer for each, answer in answers.items() if isinstance(answer, str)},
    }
    show(output, document, views.status_view(remembered, report, answers, living))
    if silence is not None:
        raise silence


def _replicas(report: "SupervisorReport") -> list[dict[str, Any]]:
    return [
        views.replica_dict(replica) | {"error_age_seconds": report.error_age_seconds(replica)}
        for replica in report.replicas
    ]


def routers_now(remembered: Sequence[str], report: "SupervisorReport | None") -> tuple[str, ...]:
    """Return the routers' addresses, each once: those of `up`, unless the supervisor knows newer ones."""
    if report is None:
        return tuple(dict.fromkeys(remembered))
    routers = (replica for replica in report.replicas if replica.kind == "router")
    known = tuple(dict.fromkeys(router.address for router in routers if router.address))
    return known or tuple(dict.fromkeys(remembered))


def _cluster_info(address: str, seconds: float, connection: dict[str, Any]) -> ClusterInfo | str:
    """Return one router's view of the cluster, or the reason why there is none."""
    try:
        with Client(address, timeout_seconds=seconds, retries=0, **connection) as client:
            return client.cluster_info()
    except (BlockyardError, ValueError) as error:
        return str(error)
