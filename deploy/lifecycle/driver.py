"""What a command does as a Ray driver: make the cluster's supervisor, ask it, end it. A look needs no driver.

Owns the names by which actors are found: each cluster has a namespace of its own. Imports ray only inside
`driver`'s reach, because Ray reads its credentials once, at import.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockyard.deploy.machine.deadline import Budget, Child
from blockyard.deploy.machine.interruption import handlers_kept
from blockyard.deploy.machine.state import ClusterState
from blockyard.deploy.ray import head as ray_head
from blockyard.deploy.supervision.replicas import SUPERVISOR_NAME

if TYPE_CHECKING:
    from blockyard.deploy.ray.nodes import RayNode
    from blockyard.deploy.supervision.replicas import ClusterSpec, SupervisorReport

CALL_SECONDS = 15.0
HELLO_SECONDS = 4.0
"""A supervisor has so long for its first word to a command."""
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


_IN_A_MINUTE = (
    "one that hangs is started again within a minute, and `blockyard workers` asks the routers meanwhile"
)


def silence_of(cluster: ClusterState) -> str:
    """What is said of a Ray that does not answer in time."""
    which = "" if cluster.cluster == "default" else f" --cluster {cluster.cluster}"
    ends = f"`blockyard down{which}` ends what is left"
    if cluster.head is None:
        ends = f"`blockyard down --forget{which}` forgets a Ray that is gone for good"
    return (
        f"Ray at {cluster.ray_address} does not answer; `blockyard workers{which}` asks the routers, who need no Ray, "
        f"and {ends}"
    )


@contextlib.contextmanager
def driver(cluster: ClusterState, wheel: Path | None = None) -> Iterator[dict[str, Any]]:
    """Inside, this process is a Ray driver in the cluster's namespace; yields Ray's address_info. The functions below
    work only there. Actors made there have the package from `wheel`, if given, and so have those that they make. Raises
    ValueError for a cluster whose Ray has not been started."""
    with _connecting(cluster) as address:
        info = ray_head.connect(
            address, namespace=namespace(cluster.cluster), token_path=cluster.ray_token_path, wheel=wheel
        )
    import ray

    with _rays_words_on_stderr():
        try:
            yield info
        finally:
            with handlers_kept():
                ray.shutdown()


@contextlib.contextmanager
def _connecting(cluster: ClusterState) -> Iterator[str]:
    """Yields Ray's address, unless a head that was started here is known not to answer. Raises as `driver` does, and
    says what goes on without a head."""
    if cluster.ray_address is None:
        raise ValueError(f"Ray of cluster {cluster.cluster!r} has not been started")
    try:
        if cluster.head is not None:
            ray_head.check_alive(cluster.head.session)
            if ray_head.is_supervisor_stopped(cluster.head.session):
                raise RuntimeError(f"the supervisor is stopped and does not answer: {_IN_A_MINUTE}")
        yield cluster.ray_address
    except ray_head.RayConnectError as error:
        if not cluster.routers or isinstance(error, ray_head.RayletDiedError):
            raise
        raise ray_head.RayConnectError(f"{error}; {_WITHOUT_HEAD}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Holds what Ray and the supervisor say of a cluster."""

    report: "SupervisorReport"
    living: "list[RayNode]"


def looking(cluster: ClusterState, budget: Budget, supervisor_seconds: float) -> Child:
    """A look by a child, whose answer is Seen. It is no driver. Raises as `driver` and `supervisor_report` do."""

    def look(send: Callable[[Any], None]) -> None:
        with _connecting(cluster) as address:
            service = ray_head.control_service(address, token_path=cluster.ray_token_path)
        if not cluster.is_supervised:
            raise ValueError(f"cluster {cluster.cluster!r} is still starting: it has no supervisor yet")
        send(_seen(service, cluster.cluster, budget.step_seconds(supervisor_seconds)))

    return Child(look)


def _seen(service: Any, cluster: str, seconds: float) -> Seen:
    from blockyard.deploy.dashboard.announcement import key_of
    from blockyard.deploy.ray.nodes import living_nodes
    from blockyard.deploy.supervision import reports
    from ray.exceptions import RayError

    def read() -> bytes | None:
        stored: bytes | None = service.internal_kv_get(
            key_of(cluster), namespace=reports.NAMESPACE, timeout=seconds
        )
        return stored

    try:
        report = reports.next_report(read, seconds)
        return Seen(report=report, living=living_nodes(service, seconds))
    except reports.SilentSupervisorError as error:
        raise RuntimeError(f"{error}: {_IN_A_MINUTE}") from None
    except RayError as error:
        raise RuntimeError(f"Ray's control service does not answer ({type(error).__name__})") from None


def check_answers(cluster: ClusterState, *, asks_supervisor: bool = True) -> None:
    """For a command that is to be a driver: Ray itself would keep it waiting for minutes. Raises TimeoutError where Ray
    does not answer within the command's budget, and what `driver` and `supervisor_report` raise."""
    budget = Budget.of_this_process()

    def look(send: Callable[[Any], None]) -> None:
        with driver(cluster):
            send(supervisor_report(budget.step_seconds(HELLO_SECONDS)) if asks_supervisor else None)

    Child(look).answer(budget.left_seconds, silence_of(cluster))


def check_lets_in(address: str) -> None:
    """Checks as `check_answers` does, for a Ray without a cluster of ours."""

    def look(send: Callable[[Any], None]) -> None:
        with joined(address):
            send(None)

    Child(look).answer(Budget.of_this_process().left_seconds, f"Ray at {address} does not answer")


@contextlib.contextmanager
def joined(address: str) -> Iterator[None]:
    """Inside, this process is a driver of no cluster of ours, with the operator's own credentials."""
    ray_head.connect(address, namespace="blockyard-doctor", token_path=None)
    import ray

    with _rays_words_on_stderr():
        try:
            yield
        finally:
            with handlers_kept():
                ray.shutdown()


def _rays_words_on_stderr() -> contextlib.AbstractContextManager[object]:
    """Ray prints what befalls nodes wherever a driver is, on stdout, which is for a command's answer."""
    return contextlib.redirect_stdout(sys.stderr)


def hardware() -> Hardware:
    import ray

    resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    node_cpus = tuple(node["CPU"] for node in resources if node.get("CPU"))
    return Hardware(node_cpus=node_cpus, num_gpus=sum(node.get("GPU", 0.0) for node in resources))


def room() -> list[Mapping[str, float]]:
    """What is free on each living node, by the resource's name."""
    from ray._private import state

    return list(state.available_resources_per_node().values())  # type: ignore[no-untyped-call]


class NameTakenError(RuntimeError):
    """A cluster of this name is up on this Ray, or comes up."""


def refuse_if_taken(cluster: str) -> None:
    """Raises NameTakenError where the name has a supervisor on this Ray."""
    import ray

    with contextlib.suppress(ValueError):
        ray.get_actor(SUPERVISOR_NAME)
        raise NameTakenError(
            f"this Ray has a cluster called {cluster!r} already, brought up from elsewhere: name this one otherwise "
            "(--cluster), or take that one down"
        )


def create_supervisor(spec: "ClusterSpec") -> None:
    """Returns at once; the supervisor outlives this driver and any death but `shut_down`. Raises NameTakenError where
    there is one: of two that come at once Ray lets one have the name."""
    import ray
    from blockyard.deploy.supervision.desired_state import RayDesiredStateStore
    from blockyard.deploy.supervision.supervisor import Supervisor

    refuse_if_taken(spec.router.cluster)
    # What was asked of a cluster of this name that is gone.
    RayDesiredStateStore(spec.namespace).forget_now()
    supervisor = ray.remote(Supervisor).options(
        name=SUPERVISOR_NAME, lifetime="detached", max_restarts=-1, max_task_retries=-1, num_cpus=0
    )
    try:
        supervisor.remote(spec)
    except ValueError:
        refuse_if_taken(spec.router.cluster)
        raise


def supervisor_report(timeout_seconds: float = CALL_SECONDS) -> "SupervisorReport":
    """Who should run and how each is doing. Raises RuntimeError where the supervisor does not say."""
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    supervisor: Any = ray.get_actor(SUPERVISOR_NAME)
    try:
        report: SupervisorReport = ray.get(supervisor.report.remote(), timeout=timeout_seconds)
    except GetTimeoutError:
        raise RuntimeError(
            f"the supervisor did not answer within {timeout_seconds:.1f} s: {_IN_A_MINUTE}"
        ) from None
    except RayError as error:
        what = type(error).__name__
        raise RuntimeError(f"the supervisor does not answer ({what}): {_IN_A_MINUTE}") from None
    return report


def restart(name: str, grace_seconds: float, waiting: Callable[["SupervisorReport"], None]) -> None:
    """Returns once a worker or router has drained, stopped and serves afresh; `waiting` is called meanwhile. Raises
    RuntimeError where it does not come back."""
    _ask(lambda supervisor: supervisor.restart.remote(name, grace_seconds), waiting)


def scale(num_workers: int, grace_seconds: float, waiting: Callable[["SupervisorReport"], None]) -> None:
    """Returns once so many workers are in use and those beyond are gone; `waiting` is called meanwhile. Raises
    RuntimeError where a new one does not start."""
    _ask(lambda supervisor: supervisor.scale.remote(num_workers, grace_seconds), waiting)


def _ask(call: Callable[[Any], Any], waiting: Callable[["SupervisorReport"], None]) -> None:
    import ray
    from ray.exceptions import RayActorError, RayTaskError

    try:
        asked = call(ray.get_actor(SUPERVISOR_NAME))
        while not ray.wait([asked], timeout=POLL_SECONDS)[0]:
            waiting(supervisor_report())
        ray.get(asked)
    except RayTaskError as error:
        raise RuntimeError(str(error.cause)) from None
    except RayActorError:
        raise RuntimeError("the supervisor has ended meanwhile") from None


def shut_down(drain_seconds: float) -> None:
    """Ends routers, workers and supervisor, in this order."""
    import ray

    try:
        supervisor = ray.get_actor(SUPERVISOR_NAME)
    except ValueError:
        return  # It was never made, and it alone makes the others.
    supervisor_report(HELLO_SECONDS)  # One that hangs says goodbye to nobody.
    ray.get(supervisor.shut_down.remote(drain_seconds), timeout=drain_seconds + CALL_SECONDS)
    ray.kill(supervisor)
