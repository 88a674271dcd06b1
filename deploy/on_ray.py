"""What a command does as a Ray driver: make the cluster's supervisor, ask it, end it.

Owns the names by which actors are found: each cluster has a namespace of its own. Imports ray only inside
`driver`'s reach, because Ray reads its credentials once, at import.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blockyard.deploy import ray_head
from blockyard.deploy.state import ClusterState

if TYPE_CHECKING:
    from blockyard.deploy.supervisor import ClusterSpec, SupervisorReport

SUPERVISOR_NAME = "supervisor"
CALL_SECONDS = 15.0
POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What the Ray cluster has."""

    node_cpus: tuple[float, ...]
    """Of each living node that has any."""
    num_gpus: float


def namespace(cluster: str) -> str:
    return f"blockyard-{cluster}"


_WITHOUT_HEAD = (
    "if its head has died, workers and routers serve on until Ray's reconnect time is over "
    f"({ray_head.RECONNECT_SECONDS} s unless {ray_head.RECONNECT_VARIABLE} says otherwise), but none is replaced: "
    "`blockyard down`, then `blockyard up`"
)


@contextlib.contextmanager
def driver(cluster: ClusterState) -> Iterator[dict[str, Any]]:
    """Inside, this process is a Ray driver in the cluster's namespace; yields Ray's address_info. The
    functions below work only there. Raises ValueError for a cluster whose Ray has not been started."""
    if cluster.ray_address is None:
        raise ValueError(f"Ray of cluster {cluster.cluster!r} has not been started")
    try:
        info = ray_head.connect(
            cluster.ray_address, namespace=namespace(cluster.cluster), token_path=cluster.ray_token_path
        )
    except ray_head.RayConnectError as error:
        if not cluster.routers:
            raise
        raise ray_head.RayConnectError(f"{error}; {_WITHOUT_HEAD}") from error
    import ray

    try:
        yield info
    finally:
        ray.shutdown()


def hardware() -> Hardware:
    import ray

    resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    node_cpus = tuple(node["CPU"] for node in resources if node.get("CPU"))
    return Hardware(node_cpus=node_cpus, num_gpus=sum(node.get("GPU", 0.0) for node in resources))


def create_supervisor(spec: "ClusterSpec") -> None:
    """Returns at once; the supervisor outlives this driver and any death but `shut_down`."""
    import ray
    from blockyard.deploy.supervisor import Supervisor

    supervisor = ray.remote(Supervisor).options(
        name=SUPERVISOR_NAME, lifetime="detached", max_restarts=-1, max_task_retries=-1, num_cpus=0
    )
    supervisor.remote(spec)


def supervisor_report() -> "SupervisorReport":
    """Who should run and how each is doing."""
    import ray

    supervisor: Any = ray.get_actor(SUPERVISOR_NAME)
    report: SupervisorReport = ray.get(supervisor.report.remote(), timeout=CALL_SECONDS)
    return report


def restart(name: str, grace_seconds: float, waiting: Callable[["SupervisorReport"], None]) -> None:
    """Returns once a worker or router has drained, stopped and serves afresh; `waiting` is called meanwhile. Raises
    RuntimeError where it does not come back."""
    import ray
    from ray.exceptions import RayTaskError

    supervisor: Any = ray.get_actor(SUPERVISOR_NAME)
    asked = supervisor.restart.remote(name, grace_seconds)
    while not ray.wait([asked], timeout=POLL_SECONDS)[0]:
        waiting(supervisor_report())
    try:
        ray.get(asked)
    except RayTaskError as error:
        raise RuntimeError(str(error.cause)) from None


def shut_down(drain_seconds: float) -> None:
    """Ends routers, workers and supervisor, in this order."""
    import ray

    try:
        supervisor = ray.get_actor(SUPERVISOR_NAME)
    except ValueError:
        return  # It was never made, and it alone makes the others.
    ray.get(supervisor.shut_down.remote(drain_seconds), timeout=drain_seconds + CALL_SECONDS)
    ray.kill(supervisor)
