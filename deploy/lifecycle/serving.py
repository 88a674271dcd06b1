"""Waits until a started cluster serves, and reports progress meanwhile.

Owns the deadlines and what counts as an error. Does not own starting anything (cluster.py,
supervision/supervisor.py).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockyard.deploy.lifecycle import driver as on_ray
from blockyard.deploy.views.quantities import counted
from blockyard.kernels.cpu import extension as cpu_extension

if TYPE_CHECKING:
    from blockyard.deploy.supervision.replicas import Replica, SupervisorReport

SERVE_SECONDS = 600.0
"""Deadline for all to serve. Loading a large model from a slow disk takes minutes."""
CONNECT_SECONDS = 30.0
FIRST_WORD_SECONDS = 60.0
"""Deadline for the supervisor's first answer. Its imports take long on a busy machine."""
_POLL_SECONDS = 0.1
STARTING, DOWNLOADING, LOADING = "starting workers", "downloading the model", "loading the model"
COMPILING, WARMING = "compiling kernels (first start on this machine)", "warming up"
STAGES = (STARTING, DOWNLOADING, LOADING, COMPILING, WARMING)
"""Stages of a start in their order. A start may skip some."""


class ClusterStartError(RuntimeError):
    """The cluster cannot start, or did not start to serve. `up` then stops what it has started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a start at one moment."""

    stage: str
    done: int = 0
    total: int | None = None
    """None if progress cannot be counted."""
    detail: str = ""
    """Progress in words."""
    warning: str = ""
    """A problem that the operator should know about and that does not stop the start."""


Report = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """Addresses at which clients are served. An address that several routers share appears once."""

    routers: tuple[str, ...]
    gateways: tuple[str, ...]
    dtypes: tuple[str, ...]
    """Data types that workers compute in, each once, with the reason. With several models, after the model's id."""


def wait_until_all_serve(report: Report) -> Serving:
    """Wait until every worker and router serves. Raise ClusterStartError with the reason if one does not start."""
    deadline = time.monotonic() + SERVE_SECONDS
    stage = STAGES[0]
    while time.monotonic() < deadline:
        seen = on_ray.supervisor_report(FIRST_WORD_SECONDS)
        everyone = seen.replicas
        serving = [replica for replica in everyone if replica.phase == "serving"]
        is_downloading = any(replica.phase == "downloading" for replica in everyone)
        if is_downloading:
            deadline = time.monotonic() + SERVE_SECONDS
        stage = next_stage(stage, everyone, is_compiling=cpu_extension.is_being_built())
        report(Progress(stage=stage, done=len(serving), total=len(everyone), detail=_who_serves(everyone)))
        if len(serving) == len(everyone):
            split = [replica for replica in everyone if len({node for node, _ in replica.ranks}) > 1]
            if split:
                report(Progress(stage=stage, warning=split_over_nodes(counted(len(split), "worker"))))
            routers = [replica for replica in everyone if replica.kind == "router"]
            gateways = (replica.http_address for replica in routers if replica.http_address)
            return Serving(
                routers=tuple(dict.fromkeys(replica.address for replica in routers)),
                gateways=tuple(dict.fromkeys(gateways)),
                dtypes=data_types(seen),
            )
        for replica in everyone:
            # The supervisor would keep trying. A command should rather report the problem at once.
            if replica.error and not replica.num_starts:
                raise ClusterStartError(f"{replica.name} does not start: {replica.error}")
        time.sleep(_POLL_SECONDS)
    waiting = [replica.name for replica in on_ray.supervisor_report().replicas if replica.phase != "serving"]
    raise ClusterStartError(f"{', '.join(waiting)} did not serve within {SERVE_SECONDS:.0f} s")


def data_types(seen: "SupervisorReport") -> tuple[str, ...]:
    """Return the data types that workers compute in, each once. With several models, each follows its model's id."""
    of_model = "{model}: {dtype}" if len(seen.models) > 1 else "{dtype}"
    return tuple(
        dict.fromkeys(
            of_model.format(model=replica.model or seen.models[0], dtype=replica.dtype)
            for replica in seen.replicas
            if replica.dtype
        )
    )


def split_over_nodes(workers: str) -> str:
    """Return the warning for workers that no node can hold with all their ranks."""
    return (
        f"no node has room for all ranks of {workers}: the ranks are on several nodes. What they exchange is not "
        "encrypted where these are several machines"
    )


def next_stage(stage: str, replicas: Sequence["Replica"], *, is_compiling: bool) -> str:
    """Return the current stage, never an earlier one than `stage`, because workers are at different stages."""
    if is_compiling:
        now = COMPILING
    elif stage == COMPILING:
        now = WARMING
    elif any(replica.phase == "downloading" for replica in replicas):
        now = DOWNLOADING
    elif any(replica.pid for replica in replicas if replica.kind == "worker"):
        now = LOADING
    else:
        now = STARTING
    return max(stage, now, key=STAGES.index)


def _who_serves(replicas: Sequence["Replica"]) -> str:
    """Format, for example, `1 of 2 workers and 1 of 1 router serve`."""
    counts = [
        f"{sum(replica.phase == 'serving' for replica in of_kind)} of {counted(len(of_kind), kind)}"
        for kind in ("worker", "router")
        if (of_kind := [replica for replica in replicas if replica.kind == kind])
    ]
    return f"{' and '.join(counts)} serve"


def wait_until_connected(num_workers: int, report: Report) -> None:
    """Wait until every router reports a session with every worker. Raise ClusterStartError after CONNECT_SECONDS.

    The routers' own reports are needed, because a client of a shared port cannot choose the router that answers.
    """
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        routers = [replica for replica in on_ray.supervisor_report().replicas if replica.kind == "router"]
        least = min(routers, key=lambda replica: replica.num_ready_workers)
        if least.num_ready_workers >= num_workers:
            return
        done = least.num_ready_workers
        detail = f"{done} of {counted(num_workers, 'worker')}"
        report(Progress(stage="joining routers and workers", done=done, total=num_workers, detail=detail))
        if time.monotonic() > deadline:
            raise ClusterStartError(
                f"{least.name} at {least.address} reaches {done} of {counted(num_workers, 'worker')}"
            )
        time.sleep(_POLL_SECONDS)
