"""Replicas: the workers and routers that should run in a cluster, and the state of each.

Owns names, phases, and the pure rules of ports and pauses. Does not own starting or stopping anything (supervisor.py).

    replica: STARTING -> SERVING <-> DRAINING -> (death) -> WAITING, longer each time -> STARTING
                                        |-> (death) -> STOPPED, until an operator restarts it
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from blockyard.deploy.supervision.model_plans import ModelPlan
from blockyard.proto.roles import Role
from blockyard.router.config import RouterConfig, ServedModel
from blockyard.worker.config import WorkerConfig

FIRST_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 10.0
SUPERVISOR_NAME = "supervisor"
PUSH_SECONDS = 2.0
"""Routers are told the workers' addresses again this often, in case a call was lost."""
JOINING_SECONDS = 0.1
"""Pause between calls while routers connect to more and more workers. It doubles while nothing changes, as with a
worker that routers refuse."""

DEFAULT_HUNG_SECONDS = 20.0
"""Default of `hung_seconds`, far above any pause of a sound event loop, on a busy machine too."""

_WORKER_NAME = re.compile(r"(?:[a-z0-9.-]+-)?worker-\d+")

Kind = Literal["worker", "router"]
Phase = Literal["starting", "downloading", "serving", "draining", "waiting", "stopped"]


NAMESPACE_PREFIX = "blockyard-"


def namespace(cluster: str) -> str:
    """Return the Ray namespace of a cluster's actors."""
    return NAMESPACE_PREFIX + cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """Workers and routers that should run. The configs are templates: each replica gets its own id and port."""

    namespace: str
    worker: WorkerConfig
    num_workers: int
    num_cpus_per_worker: float
    num_gpus_per_worker: float
    router: RouterConfig
    num_routers: int
    num_prefill_workers: int = 0
    """Workers with the role `prefill`, those of the lowest numbers. The others have the template's role."""
    router_resource: str | None = None
    """Ray resource that each router takes one of, so that routers run only on nodes that have it."""
    code: str = ""
    """Code version that every node must have. Empty accepts any."""
    further_models: tuple[ModelPlan, ...] = ()
    """Models beside the first one, as `up` started them."""
    handle: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the cluster for commands, without secrets (machine/state.py). They are kept in Ray's store."""
    hung_seconds: float = DEFAULT_HUNG_SECONDS
    """Silence after which the supervisor kills a serving worker or router and starts it again."""

    @property
    def first_model(self) -> ServedModel:
        """Return the model that the cluster begins with, whose workers are those of this spec."""
        return self.router.models[0]

    @property
    def num_ranks(self) -> int:
        """Ranks of each worker. They are one replica: the end of one ends all."""
        return self.worker.engine.tensor_parallel_size

    def of_model(self, plan: ModelPlan | None) -> "ClusterSpec":
        """Return the spec with the workers of a further model, or unchanged for the first model's."""
        if plan is None:
            return self
        worker = replace(
            self.worker,
            engine=plan.engine,
            model_name=plan.id,
            index_model=plan.served.index,
            role="both",
        )
        return replace(
            self,
            worker=worker,
            num_workers=plan.num_workers,
            num_prefill_workers=0,
            num_cpus_per_worker=plan.num_cpus_per_worker,
            num_gpus_per_worker=plan.num_gpus_per_worker,
        )


@dataclass(slots=True, kw_only=True)
class Replica:
    """One worker or router that should run, and its state."""

    name: str
    kind: Kind
    model: str = ""
    """Id of a worker's model. Empty for a router."""
    phase: Phase = "starting"
    address: str = ""
    http_address: str = ""
    """Address of a router's HTTP gateway, if it has one."""
    pid: int = 0
    node_id: str = ""
    ranks: tuple[tuple[str, int], ...] = ()
    """Node id and process id of each rank, if a worker has several. The first is the worker's own process."""
    incarnation: str = ""
    code: str = ""
    """Code version that the process reports."""
    dtype: str = ""
    """Data type that a worker computes in, and why."""
    num_ready_workers: int = 0
    """Workers with which a router had a session when it was last told their addresses."""
    serving_since: float | None = None
    """Start of serving, by the supervisor's monotonic clock."""
    num_starts: int = 0
    num_failures_in_a_row: int = 0
    num_missed: int = 0
    """Health checks in a row without an answer."""
    is_leaving: bool = False
    """Whether the supervisor stops it. Its end is then no failure, and the next start has the shortest pause."""
    is_retiring: bool = False
    """Whether the supervisor stops it for good, because the cluster shrinks."""
    refusal: str = ""
    """Why a router refuses this worker, which runs. Empty: none does."""
    error: str = ""
    """Why the last process ended or did not start. It never quotes a prompt."""
    failed_at: float | None = None
    """Time of that error, by the supervisor's monotonic clock."""

    @property
    def was_taken_out(self) -> bool:
        """Tell whether an operator drains the replica: it drains, and the supervisor does not stop it."""
        return self.phase == "draining" and not self.is_leaving

    @property
    def shown_phase(self) -> str:
        """Return the phase to show to people. A silent process is shown as such, and a worker that a router refuses."""
        if not self.is_up:
            return self.phase
        return "not answering" if self.num_missed else "refused" if self.refusal else self.phase

    @property
    def is_up(self) -> bool:
        return self.phase in ("serving", "draining")


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorReport:
    """Replicas that should run and their states, as the supervisor reports them."""

    pid: int
    """Process id of the supervisor."""
    code: str
    """Code version that the supervisor runs."""
    replicas: list[Replica]
    cpus_per_worker: float
    gpus_per_worker: float
    models: tuple[str, ...] = ()
    """Ids of the models. Requests that name none mean the first."""
    further_shares: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """CPUs and GPUs of each worker of a further model, by the model's id."""
    at_seconds: float
    """Time of the report by the supervisor's monotonic clock, because a reader may be on another machine."""

    def share(self, model: str) -> tuple[float, float]:
        """Return the CPUs and GPUs of each worker of a model."""
        return self.further_shares.get(model, (self.cpus_per_worker, self.gpus_per_worker))

    def error_age_seconds(self, replica: Replica) -> float | None:
        """Return the age of a replica's last error when the report was made, or None without an error."""
        return None if replica.failed_at is None else max(0.0, self.at_seconds - replica.failed_at)


def worker_name(number: int, plan: ModelPlan | None = None) -> str:
    """Return a worker's name. Those of a further model begin with the model's name."""
    return f"{'' if plan is None else plan.workers_prefix}worker-{number}"


def is_worker_name(name: str) -> bool:
    """Tell whether an actor's name is that of a worker, and not of a router or of one of a worker's other ranks."""
    return _WORKER_NAME.fullmatch(name) is not None


def model_of(name: str, plans: Iterable[ModelPlan], *, first: str) -> str:
    """Return the model of a worker with this name: `first` without a prefix.

    A name of no model that is served gives no model's id.
    """
    prefix = name.rpartition("worker-")[0]
    if not prefix:
        return first
    return next((plan.id for plan in plans if plan.workers_prefix == prefix), prefix)


def number_of(name: str) -> int:
    return int(name.rpartition("-")[2])


def workers_of(plan: ModelPlan, model: str = "") -> list[Replica]:
    """Return the workers of a further model, as those of its id or of another name."""
    return [
        Replica(name=worker_name(number, plan), kind="worker", model=model or plan.id)
        for number in range(plan.num_workers)
    ]


def replicas_of(spec: ClusterSpec, num_workers: int, plans: Iterable[ModelPlan] = ()) -> list[Replica]:
    first = spec.first_model.id
    workers = [Replica(name=worker_name(number), kind="worker", model=first) for number in range(num_workers)]
    for plan in plans:
        workers += workers_of(plan)
    return workers + [Replica(name=f"router-{number}", kind="router") for number in range(spec.num_routers)]


def worker_config(spec: ClusterSpec, replica: Replica) -> WorkerConfig:
    """Return the configuration of one worker."""
    is_for_prefill = number_of(replica.name) < spec.num_prefill_workers
    role: Role = "prefill" if is_for_prefill else spec.worker.role
    return replace(spec.worker, worker_id=replica.name, role=role)


def taken_out_of(workers: Iterable[Replica], before: frozenset[str]) -> frozenset[str]:
    """Return the names of workers that operators have taken out by a drain, and not restarted since.

    A worker of `before` that is not up yet counts as well, because a restarted supervisor may be about to adopt it.
    """
    return frozenset(
        replica.name
        for replica in workers
        if replica.was_taken_out
        or replica.phase == "stopped"
        or (replica.name in before and not replica.is_up)
    )


class OtherCodeError(RuntimeError):
    """A node has other code than the command that started the cluster."""


def check_code(replica: Replica, wanted: str) -> None:
    """Raise OtherCodeError if the process does not run the wanted code."""
    if wanted and replica.code != wanted:
        raise OtherCodeError(
            f"its node has blockyard {replica.code}, the cluster runs {wanted}: install the same there, or bring the "
            "cluster up with --ship-code"
        )


def router_config(router: RouterConfig, replica: Replica) -> RouterConfig:
    """Return the config with this router's own ports.

    A restarted router keeps its ports, so that clients find it again. A new one shares the template's ports
    (`reuse_port`) or adds its number to them. Port 0 takes any free port.
    """
    http_port = router.http_port
    if http_port is not None:
        http_port = _own_port(http_port, replica.http_address, replica, is_shared=router.reuse_port)
    port = _own_port(router.port, replica.address, replica, is_shared=router.reuse_port)
    return replace(router, port=port, http_port=http_port)


def _own_port(first_port: int, address: str, replica: Replica, *, is_shared: bool) -> int:
    if address:
        return int(address.rpartition(":")[2])
    if is_shared or not first_port:
        return first_port
    return first_port + number_of(replica.name)


def backoff_seconds(num_failures_in_a_row: int) -> float:
    """Return the pause before the next start. Failures double it, from FIRST_BACKOFF_SECONDS to MAX_BACKOFF_SECONDS."""
    doublings = max(0, min(num_failures_in_a_row - 1, 16))
    return min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0**doublings)


def push_pause_seconds(last_seconds: float, *, are_joined: bool, has_news: bool) -> float:
    """Return the pause until routers are told the workers' addresses again.

    `are_joined`: every router has a session with every serving worker. `has_news`: a replica has changed, or routers
    have sessions with more or fewer workers. `last_seconds` is the last pause.
    """
    if are_joined:
        return PUSH_SECONDS
    return JOINING_SECONDS if has_news else min(PUSH_SECONDS, 2 * last_seconds)
