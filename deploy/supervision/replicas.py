"""Who should run in a cluster, and how each of them is doing: the values that the supervisor keeps and tells.

Owns names, phases, and the pure rules of ports and pauses. Does not own making anything so (supervisor.py).

    place: STARTING -> SERVING <-> DRAINING -> (death) -> WAITING, longer each time -> STARTING
                                      |-> (death) -> STOPPED, until somebody asks for it again
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from blockyard.router.config import RouterConfig
from blockyard.worker.config import WorkerConfig

FIRST_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 10.0
SUPERVISOR_NAME = "supervisor"
PUSH_SECONDS = 2.0
"""Routers are told again this often, in case a call was lost."""
JOINING_SECONDS = 0.1
"""This soon while routers reach one worker after the other; less and less often where one of them never reaches all,
as with a worker that they refuse."""

DEFAULT_HUNG_SECONDS = 20.0
"""Far above any pause of a sound event loop, on a busy machine too."""

Kind = Literal["worker", "router"]
Phase = Literal["starting", "downloading", "serving", "draining", "waiting", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """What should run. The configs are templates: each place gets its own id and port."""

    namespace: str
    worker: WorkerConfig
    num_workers: int
    num_cpus_per_worker: float
    num_gpus_per_worker: float
    router: RouterConfig
    num_routers: int
    router_resource: str | None = None
    """A Ray resource: routers run only where there is some of it."""
    code: str = ""
    """The code that all must have; empty: whatever they have."""
    hung_seconds: float = DEFAULT_HUNG_SECONDS
    """A worker or router that serves and answers nothing for so long is killed and started again."""


@dataclass(slots=True, kw_only=True)
class Place:
    """One worker or router that should run, and how it is doing."""

    name: str
    kind: Kind
    phase: Phase = "starting"
    address: str = ""
    http_address: str = ""
    """Of a router's gateway, where it has one."""
    pid: int = 0
    node_id: str = ""
    incarnation: str = ""
    code: str = ""
    """The code version that it said it runs."""
    dtype: str = ""
    """Of a worker: the data type that it computes in, and why."""
    num_ready_workers: int = 0
    """Of a router: the workers that it had a session with when it was last told of them."""
    serving_since: float | None = None
    """By the supervisor's monotonic clock."""
    num_starts: int = 0
    num_failures_in_a_row: int = 0
    num_missed: int = 0
    """The supervisor's looks in a row that it did not answer."""
    is_leaving: bool = False
    """It was told to stop: its end is no failure, and another is started at once."""
    is_retiring: bool = False
    """It was told to stop for good: the cluster shrinks."""
    error: str = ""
    """Why the last one ended or did not start: a kind of failure, never a prompt."""
    failed_at: float | None = None
    """Time of that error, by the supervisor's monotonic clock."""

    @property
    def was_taken_out(self) -> bool:
        """Somebody drained it, and not to start it afresh."""
        return self.phase == "draining" and not self.is_leaving

    @property
    def told_phase(self) -> str:
        """For people: a process that is frozen serves nobody."""
        return "not answering" if self.is_up and self.num_missed else self.phase

    @property
    def is_up(self) -> bool:
        return self.phase in ("serving", "draining")


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorReport:
    """Who should run and how each is doing."""

    pid: int
    """The supervisor's own."""
    code: str
    """The code version that it runs."""
    places: list[Place]
    cpus_per_worker: float
    gpus_per_worker: float
    at_seconds: float
    """Time of the report, by the supervisor's monotonic clock. A reader may be on another machine."""

    def error_age_seconds(self, place: Place) -> float | None:
        """Return the age of a process's last error, or None without one."""
        return None if place.failed_at is None else max(0.0, self.at_seconds - place.failed_at)


def worker_name(number: int) -> str:
    return f"worker-{number}"


def number_of(name: str) -> int:
    return int(name.rpartition("-")[2])


def places_of(spec: ClusterSpec, num_workers: int) -> list[Place]:
    workers = [Place(name=worker_name(number), kind="worker") for number in range(num_workers)]
    return workers + [Place(name=f"router-{number}", kind="router") for number in range(spec.num_routers)]


def taken_out_of(workers: Iterable[Place], before: frozenset[str]) -> frozenset[str]:
    """Those that somebody drained; one that is being adopted is what it was."""
    return frozenset(
        place.name
        for place in workers
        if place.was_taken_out or place.phase == "stopped" or (place.name in before and not place.is_up)
    )


class OtherCodeError(RuntimeError):
    """A node has another copy of the package than the command that brought the cluster up."""


def check_code(place: Place, wanted: str) -> None:
    """Raises OtherCodeError."""
    if wanted and place.code != wanted:
        raise OtherCodeError(
            f"its node has blockyard {place.code}, the cluster runs {wanted}: install the same there, or bring the "
            "cluster up with --ship-code"
        )


def router_config(router: RouterConfig, place: Place) -> RouterConfig:
    """With the ports of this one. They are kept over a restart, so that clients find it where it was. At first routers
    share them, or stand side by side from them; with 0 each takes a free one."""
    http_port = router.http_port
    if http_port is not None:
        http_port = _own_port(http_port, place.http_address, place, is_shared=router.reuse_port)
    port = _own_port(router.port, place.address, place, is_shared=router.reuse_port)
    return replace(router, port=port, http_port=http_port)


def _own_port(first_port: int, address: str, place: Place, *, is_shared: bool) -> int:
    if address:
        return int(address.rpartition(":")[2])
    if is_shared or not first_port:
        return first_port
    return first_port + number_of(place.name)


def backoff_seconds(num_failures_in_a_row: int) -> float:
    """Doubles from FIRST_BACKOFF_SECONDS to MAX_BACKOFF_SECONDS. The first death is answered almost at
    once."""
    doublings = max(0, min(num_failures_in_a_row - 1, 16))
    return min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0**doublings)


def push_pause_seconds(last_seconds: float, *, are_joined: bool, has_news: bool) -> float:
    """Until the routers are told again. `has_news`: the places changed, or routers reached more or fewer of them."""
    if are_joined:
        return PUSH_SECONDS
    return JOINING_SECONDS if has_news else min(PUSH_SECONDS, 2 * last_seconds)
