"""Ray driver of commands: creates a cluster's supervisor, calls it and ends it.

Owns the names by which actors are found: each cluster has a namespace of its own. `looking` reads a report without
becoming a driver. Imports ray only inside functions, because Ray reads its credentials once, at import.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockyard.deploy.machine.deadline import ANSWER_SECONDS, Budget, Child
from blockyard.deploy.machine.interruption import handlers_kept
from blockyard.deploy.machine.processes import is_alive
from blockyard.deploy.machine.state import ClusterState, which
from blockyard.deploy.ray import head as ray_head
from blockyard.deploy.supervision.replicas import SUPERVISOR_NAME, namespace

if TYPE_CHECKING:
    from blockyard.deploy.ray.nodes import RayNode
    from blockyard.deploy.supervision.desired_state import DesiredState
    from blockyard.deploy.supervision.model_plans import ModelPlan
    from blockyard.deploy.supervision.replicas import ClusterSpec, SupervisorReport
    from blockyard.router.config import ServedModel

CALL_SECONDS = 15.0
HELLO_SECONDS = 4.0
"""Deadline for a supervisor's first answer to a command."""
POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Resources of the Ray cluster."""

    node_cpus: tuple[float, ...]
    """CPUs of each living node that has any."""
    num_gpus: float
    node_gpus: tuple[float, ...]
    """GPUs of the same nodes."""


_IN_A_MINUTE = "if it hangs, it is restarted within a minute; meanwhile `blockyard workers` asks the routers"


def _silent(address: str | None) -> str:
    """Return what is known of a Ray that gives no answer in time. If nobody listened there, `connect` had said so."""
    return (
        f"Ray at {address} does not answer within the {ANSWER_SECONDS} s of a command, though a program takes "
        "connections there: Ray is busy or hangs, or the address is another program's. Try again, or compare it with "
        "the address that `ray start` prints"
    )


def without_head(cluster: ClusterState) -> str:
    """Return what works without Ray's control service, for how long, and the way out."""
    seconds = cluster.reconnect_seconds
    until = (
        f"{seconds:g} s after its death"
        if seconds
        else "a minute after its death, unless its nodes wait longer"
    )
    way_out = f"`blockyard down{which(cluster.cluster)}`, then `blockyard up`"
    if cluster.head is None:
        way_out = (
            f"`blockyard down --forget{which(cluster.cluster)}`, start Ray again on every node, then `blockyard up`. A "
            "head that keeps its state in Redis (RAY_REDIS_ADDRESS) is only to be stopped and started again"
        )
    return (
        "if its control service (gcs_server) has died, workers and routers keep serving until Ray ends them all, "
        f"{until}, and none is replaced meanwhile: {way_out}"
    )


def silence_of(cluster: ClusterState) -> str:
    """Return the error message for a Ray that does not answer in time."""
    named = which(cluster.cluster)
    ends = f"`blockyard down{named}` ends what is left"
    if cluster.head is None:
        ends = f"`blockyard down --forget{named}` forgets a Ray that is gone for good"
    return f"{_silent(cluster.ray_address)}; `blockyard workers{named}` asks the routers, which need no Ray, and {ends}"


@contextlib.contextmanager
def driver(cluster: ClusterState, wheel: Path | None = None) -> Iterator[dict[str, Any]]:
    """Make this process a Ray driver in the cluster's namespace inside the block. Yield Ray's address_info.

    The functions below work only there. Actors created there, and actors that those create, get the package from
    `wheel`, if given. Raise ValueError if the cluster's Ray has not been started.
    """
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
    """Yield Ray's address. Raise at once if a head on this machine is dead or stopped, or its supervisor is stopped.

    Add to a RayConnectError, also one of the block, what still works without a head. Raise ValueError if the cluster's
    Ray has not been started.
    """
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
        raise ray_head.RayConnectError(f"{error}; {without_head(cluster)}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAnswers:
    """Answers of Ray and the supervisor about a cluster."""

    report: "SupervisorReport"
    living: "list[RayNode]"


def looking(cluster: ClusterState, budget: Budget, supervisor_seconds: float) -> Child:
    """Start a child process that answers with ClusterAnswers, without becoming a driver.

    Its `answer` raises as `driver` does, and ValueError if the cluster has no supervisor yet.
    """

    def look(send: Callable[[Any], None]) -> None:
        with _connecting(cluster) as address:
            service = ray_head.control_service(address, token_path=cluster.ray_token_path)
        if not cluster.is_supervised:
            raise ValueError(f"cluster {cluster.cluster!r} is still starting: it has no supervisor yet")
        _check_is_of(service, cluster, budget.step_seconds())
        send(_cluster_answers(service, cluster.cluster, budget.step_seconds(supervisor_seconds)))

    return Child(look)


def _cluster_answers(service: Any, cluster: str, seconds: float) -> ClusterAnswers:
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
        return ClusterAnswers(report=report, living=living_nodes(service, seconds))
    except reports.SilentSupervisorError as error:
        raise RuntimeError(f"{error}: {_IN_A_MINUTE}") from None
    except RayError as error:
        what = type(error).__name__
        raise RuntimeError(
            f"Ray's control service does not answer within {seconds:.1f} s ({what}): try again"
        ) from None


def check_answers(cluster: ClusterState, *, asks_supervisor: bool = True) -> None:
    """Check that Ray and, if `asks_supervisor`, the supervisor answer, before a command becomes a driver.

    A child process asks, because Ray would keep the command waiting for minutes.

    Raise TimeoutError if Ray does not answer within the command's budget, EndedElsewhereError or AnotherClusterError
    if it runs no such cluster, and what `driver` and `supervisor_report` raise.
    """
    budget = Budget.of_this_process()

    def look(send: Callable[[Any], None]) -> None:
        with _connecting(cluster) as address:
            service = ray_head.control_service(address, token_path=cluster.ray_token_path)
        _check_is_of(service, cluster, budget.step_seconds())
        with driver(cluster):
            send(supervisor_report(budget.step_seconds(HELLO_SECONDS)) if asks_supervisor else None)

    Child(look).answer(budget.left_seconds, silence_of(cluster))


def _check_is_of(service: Any, cluster: ClusterState, seconds: float) -> None:
    """Raise EndedElsewhereError or AnotherClusterError if Ray does not run this cluster. Not while `up` starts it."""
    from blockyard.deploy.supervision.handles import check_is_of

    if cluster.starter is None or not is_alive(cluster.starter):
        check_is_of(service, cluster, seconds)


def find(cluster: str, address: str) -> ClusterState:
    """Return a cluster's state as Ray at this address knows it, without this machine's file.

    Raise ValueError if it runs no such cluster, TimeoutError if Ray is silent, RayConnectError if it refuses.
    """
    budget = Budget.of_this_process()

    def look(send: Callable[[Any], None]) -> None:
        service = ray_head.control_service(address, token_path=None)
        from blockyard.deploy.supervision import handles

        token_path = ray_head.operators_token_path()
        send(handles.find(service, cluster, address, token_path, budget.step_seconds()))

    found: ClusterState = Child(look).answer(budget.left_seconds, _silent(address))
    return found


def desired_state(cluster: ClusterState) -> "DesiredState":
    """Return what should run in a cluster, as Ray's store has it. Raise what `check_answers` raises."""
    budget = Budget.of_this_process()

    def look(send: Callable[[Any], None]) -> None:
        with _connecting(cluster) as address:
            service = ray_head.control_service(address, token_path=cluster.ray_token_path)
        from blockyard.deploy.supervision.handles import desired_of

        _check_is_of(service, cluster, budget.step_seconds())
        send(desired_of(service, cluster.cluster, budget.step_seconds()))

    found: DesiredState | None = Child(look).answer(budget.left_seconds, silence_of(cluster))
    if found is None:
        raise ValueError(f"cluster {cluster.cluster!r} is still starting: try again")
    return found


def check_lets_in(address: str) -> None:
    """Check that Ray answers and accepts our credentials, for a Ray without a cluster of ours.

    Raise TimeoutError if Ray is silent, RayConnectError if it refuses.
    """

    def look(send: Callable[[Any], None]) -> None:
        with joined(address):
            send(None)

    Child(look).answer(Budget.of_this_process().left_seconds, _silent(address))


@contextlib.contextmanager
def joined(address: str) -> Iterator[None]:
    """Make this process a Ray driver outside of any cluster of ours, with the operator's own credentials."""
    ray_head.connect(address, namespace="blockyard-doctor", token_path=None)
    import ray

    with _rays_words_on_stderr():
        try:
            yield
        finally:
            with handlers_kept():
                ray.shutdown()


def _rays_words_on_stderr() -> contextlib.AbstractContextManager[object]:
    """Send Ray's messages about nodes to stderr. A driver prints them on stdout, which is for a command's answer."""
    return contextlib.redirect_stdout(sys.stderr)


def hardware() -> Hardware:
    import ray

    living = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    nodes = [node for node in living if node["Resources"].get("CPU")]
    return Hardware(
        node_cpus=tuple(node["Resources"]["CPU"] for node in nodes),
        num_gpus=sum(node["Resources"].get("GPU", 0.0) for node in living),
        node_gpus=tuple(node["Resources"].get("GPU", 0.0) for node in nodes),
    )


def room() -> list[Mapping[str, float]]:
    """Return the free resources of each living node, by the resource's name."""
    from ray._private import state

    return list(state.available_resources_per_node().values())  # type: ignore[no-untyped-call]


class NameTakenError(RuntimeError):
    """A cluster of this name is up or starting on this Ray."""


def refuse_if_taken(cluster: str) -> None:
    """Raise NameTakenError if a supervisor of this name runs on this Ray."""
    import ray

    with contextlib.suppress(ValueError):
        ray.get_actor(SUPERVISOR_NAME)
        raise NameTakenError(
            f"this Ray already has a cluster called {cluster!r}, started from another place: give this one another "
            "name (--cluster), or use that one: `blockyard status` and `blockyard down` find it with --address"
        )


def create_supervisor(spec: "ClusterSpec") -> None:
    """Create the supervisor and return at once. It outlives this driver and ends only by `shut_down`.

    Raise NameTakenError if there is one. If two are created at once, Ray gives the name to one of them.
    """
    import ray
    from blockyard.deploy.supervision.desired_state import RayDesiredStateStore
    from blockyard.deploy.supervision.supervisor import Supervisor

    refuse_if_taken(spec.router.cluster)
    # The desired state may be from an earlier cluster of this name.
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
    """Ask the supervisor for its report. Raise RuntimeError if it does not answer, ValueError if there is none."""
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
    """Restart a worker or router and return once it is in use. Call `waiting` with reports meanwhile.

    Raise RuntimeError if it does not come back.
    """
    _ask(lambda supervisor: supervisor.restart.remote(name, grace_seconds), waiting)


def restart_at_once(
    names: Sequence[str], grace_seconds: float, waiting: Callable[["SupervisorReport"], None]
) -> None:
    """Restart workers all at once and return once they are in use. Call `waiting` with reports meanwhile.

    Raise RuntimeError if one does not come back.
    """
    _ask(lambda supervisor: supervisor.restart_at_once.remote(list(names), grace_seconds), waiting)


def scale(
    num_workers: int, grace_seconds: float, model: str, waiting: Callable[["SupervisorReport"], None]
) -> None:
    """Scale a model to `num_workers`. Return once all are in use and surplus ones are gone. "": the first one served.

    Call `waiting` with reports meanwhile.

    Raise RuntimeError if a new worker does not start.
    """
    _ask(lambda supervisor: supervisor.scale.remote(num_workers, grace_seconds, model), waiting)


def plan_model(
    model: "ServedModel", num_workers: int, settings: Mapping[str, Any], cpus_per_worker: float | None
) -> "ModelPlan":
    """Return the plan of one more model, as the supervisor makes it (Goal.plan). Nothing is changed.

    Raise RuntimeError for a wrong setting, and for a name that another model has.
    """
    plan: ModelPlan = _ask(
        lambda supervisor: supervisor.plan_model.remote(model, num_workers, settings, cpus_per_worker),
        lambda report: None,
    )
    return plan


def add_model(plan: "ModelPlan", waiting: Callable[["SupervisorReport"], None]) -> None:
    """Serve one more model. Return once all routers use all of its workers. Call `waiting` with reports meanwhile.

    Raise RuntimeError if it cannot be served.
    """
    _ask(lambda supervisor: supervisor.add_model.remote(plan), waiting)


def plan_update(model: str, path: str | None, num_workers: int | None) -> "ModelPlan":
    """Return the plan of other workers for a model (Goal.plan_update). Nothing is changed. Raise RuntimeError."""
    plan: ModelPlan = _ask(
        lambda supervisor: supervisor.plan_update.remote(model, path, num_workers), lambda report: None
    )
    return plan


def update_model(
    plan: "ModelPlan", grace_seconds: float, waiting: Callable[["SupervisorReport"], None]
) -> None:
    """Serve a model from other workers. Return once those of before are gone. Call `waiting` with reports meanwhile.

    Raise RuntimeError if the update fails. Everything is then as before.
    """
    _ask(lambda supervisor: supervisor.update_model.remote(plan, grace_seconds), waiting)


def remove_model(model_id: str, grace_seconds: float, waiting: Callable[["SupervisorReport"], None]) -> None:
    """Stop serving a model. Return once its workers are gone. Call `waiting` with reports meanwhile.

    Raise RuntimeError for an unknown model, and for the last one.
    """
    _ask(lambda supervisor: supervisor.remove_model.remote(model_id, grace_seconds), waiting)


def _ask(call: Callable[[Any], Any], waiting: Callable[["SupervisorReport"], None]) -> Any:
    """Return the answer to a call of the supervisor. Call `waiting` with reports meanwhile. Raise RuntimeError."""
    import ray
    from ray.exceptions import RayActorError, RayTaskError

    try:
        asked = call(ray.get_actor(SUPERVISOR_NAME))
        while not ray.wait([asked], timeout=POLL_SECONDS)[0]:
            waiting(supervisor_report())
        return ray.get(asked)
    except RayTaskError as error:
        raise RuntimeError(str(error.cause)) from None
    except RayActorError:
        raise RuntimeError("the supervisor has ended meanwhile") from None


def shut_down(drain_seconds: float) -> None:
    """End routers, workers and the supervisor, in this order. Routers first drain for at most `drain_seconds`.

    Do nothing without a supervisor. Raise RuntimeError if it does not answer.
    """
    import ray
    from ray.exceptions import ActorDiedError, RayTaskError

    try:
        supervisor = ray.get_actor(SUPERVISOR_NAME)
    except ValueError:
        return  # Without a supervisor there are no other actors, because it creates them.
    supervisor_report(HELLO_SECONDS)  # Fails early if the supervisor hangs.
    try:
        ray.get(supervisor.shut_down.remote(drain_seconds), timeout=drain_seconds + CALL_SECONDS)
    except RayTaskError as error:
        raise RuntimeError(str(error.cause)) from None
    except ActorDiedError:  # Another command has ended the cluster meanwhile.
        return
    ray.kill(supervisor)
