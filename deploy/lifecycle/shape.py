"""How many workers there will be and what each takes of its node. Pure.

Owns the default shares and the refusal of what no node can hold, which Ray would wait for without a word. Does not own
where Ray puts whom.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockyard.deploy.lifecycle.serving import ClusterStartError
from blockyard.deploy.views.quantities import counted

if TYPE_CHECKING:
    from blockyard.deploy.settings.wanted_cluster import UpOptions

MAX_CPUS_BESIDE_GPU = 4.0
"""A worker with a GPU plans and samples on few threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The workers of a cluster: how many, and what each takes."""

    num_workers: int
    num_cpus: float
    num_gpus: float


def shape_of(options: "UpOptions", node_cpus: Sequence[float], num_gpus: float) -> Shape:
    """On nodes with so many CPUs each, and GPUs together. Raises ClusterStartError for what they cannot hold."""
    if not node_cpus:
        raise ClusterStartError("the Ray cluster has no CPU")
    num_workers, gpus_each = _workers_to_place(options, num_gpus)
    share = options.cpus_per_worker or cpus_per_worker(node_cpus, num_workers)
    cpus_each = min(share, MAX_CPUS_BESIDE_GPU) if gpus_each else share
    _check_fits(num_workers, cpus_each, gpus_each, node_cpus, num_gpus)
    return Shape(num_workers=num_workers, num_cpus=cpus_each, num_gpus=gpus_each)


def cpus_per_worker(node_cpus: Sequence[float], num_workers: int) -> float:
    """As many whole CPUs as let all workers fit on the nodes, for Ray sets a worker's threads from them;
    where there are more workers than CPUs, a part of one."""
    for share in range(int(max(node_cpus)), 0, -1):
        if sum(int(cpus // share) for cpus in node_cpus) >= num_workers:
            return float(share)
    return min(node_cpus) / math.ceil(num_workers / len(node_cpus))


def room_on(cpus: float, shape: Shape) -> int:
    """Workers for which a node has the CPUs. Shares of a CPU need not add up to the last bit."""
    return int((cpus + 1e-6) / shape.num_cpus)


def _workers_to_place(options: "UpOptions", gpus_of_cluster: float) -> tuple[int, float]:
    """How many, and how many GPUs each takes."""
    if options.engine.device == "cpu" or gpus_of_cluster < 1:
        if options.engine.device == "cuda":
            raise ClusterStartError("--device cuda, but the Ray cluster has no GPU")
        return options.num_workers or 1, 0.0
    return options.num_workers or int(gpus_of_cluster), 1.0


def _check_fits(
    num_workers: int, cpus_each: float, gpus_each: float, node_cpus: Sequence[float], num_gpus: float
) -> None:
    if gpus_each and num_workers * gpus_each > num_gpus:
        raise ClusterStartError(
            f"--workers {num_workers} take a GPU each, and the Ray cluster has {num_gpus:g}"
        )
    shape = Shape(num_workers=num_workers, num_cpus=cpus_each, num_gpus=gpus_each)
    room = sum(room_on(cpus, shape) for cpus in node_cpus)
    if room < num_workers:
        nodes = ", ".join(f"{cpus:g}" for cpus in node_cpus)
        raise ClusterStartError(
            f"no room for {counted(num_workers, 'worker')} of {counted(cpus_each, 'CPU')} each: "
            f"the nodes have {nodes} CPUs, room for {room} (--workers, --cpus-per-worker)"
        )
