"""Until a cluster that was started serves: who is up, who reaches whom, and what is said of it meanwhile.

Owns how long that may take and what is an error. Does not own starting anything (cluster.py, supervisor.py).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from blockyard.deploy import on_ray
from blockyard.deploy.quantities import counted
from blockyard.kernels import cpu_extension

SERVE_SECONDS = 600.0
"""Loading a large model from a slow disk takes minutes."""
CONNECT_SECONDS = 30.0
FIRST_WORD_SECONDS = 60.0
"""Of the supervisor, which has much to import on a busy machine."""
_POLL_SECONDS = 0.1


class ClusterStartError(RuntimeError):
    """The cluster did not come to serve; what had been started was stopped again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One look at a start under way."""

    stage: str
    done: int = 0
    total: int | None = None
    """None: it cannot be counted."""
    detail: str = ""
    """How far it is, in words."""
    warning: str = ""
    """What the operator should know, and what keeps nothing from going on."""


Report = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """Where clients are served: addresses, one that several routers share once."""

    routers: tuple[str, ...]
    gateways: tuple[str, ...]
    dtypes: tuple[str, ...]
    """The data types that workers compute in, each once, and why."""


def wait_until_all_serve(report: Report) -> Serving:
    """Raises ClusterStartError when one keeps failing, with its reason."""
    deadline = time.monotonic() + SERVE_SECONDS
    while time.monotonic() < deadline:
        everyone = on_ray.supervisor_report(FIRST_WORD_SECONDS).places
        serving = [place for place in everyone if place.phase == "serving"]
        is_downloading = any(place.phase == "downloading" for place in everyone)
        if is_downloading:
            deadline = time.monotonic() + SERVE_SECONDS
        report(_loading(is_downloading, len(serving), len(everyone)))
        if len(serving) == len(everyone):
            routers = [place for place in everyone if place.kind == "router"]
            gateways = (place.http_address for place in routers if place.http_address)
            return Serving(
                routers=tuple(dict.fromkeys(place.address for place in routers)),
                gateways=tuple(dict.fromkeys(gateways)),
                dtypes=tuple(dict.fromkeys(place.dtype for place in everyone if place.dtype)),
            )
        for place in everyone:
            # The supervisor would go on trying; a command had better say at once what is wrong.
            if place.error and not place.num_starts:
                raise ClusterStartError(f"{place.name} does not start: {place.error}")
        time.sleep(_POLL_SECONDS)
    waiting = [place.name for place in on_ray.supervisor_report().places if place.phase != "serving"]
    raise ClusterStartError(f"{', '.join(waiting)} did not serve within {SERVE_SECONDS:.0f} s")


def _loading(is_downloading: bool, num_serving: int, total: int) -> Progress:
    stage = "loading the model"
    if is_downloading:
        stage = "downloading the model"
    elif cpu_extension.is_being_built():
        stage = "compiling kernels (first start on this machine)"
    return Progress(stage=stage, done=num_serving, total=total, detail=f"{num_serving} of {total} serve")


def wait_until_connected(num_workers: int, report: Report) -> None:
    """Until every router has a session with every worker, by their own word: behind one port no client can choose
    which of them answers."""
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        routers = [place for place in on_ray.supervisor_report().places if place.kind == "router"]
        least = min(routers, key=lambda place: place.num_ready_workers)
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
