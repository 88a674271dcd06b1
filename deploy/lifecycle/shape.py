"""Shape of a cluster: the number of workers, and each one's share of its node. Pure.

Owns the default shares, and refuses a share that no node can hold: Ray would silently wait for it. Does not own the
choice of nodes, which is Ray's.
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
"""Limit on the CPUs of a worker with a GPU. It needs few threads, for scheduling and sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Number of workers, and the resources of each."""

    num_workers: int
    num_cpus: float
    num_gpus: float


def shape_of(options: "UpOptions", node_cpus: Sequence[float], num_gpus: float) -> Shape:
    """Return the shape for nodes with these CPUs each and `num_gpus` in all.

    Raise ClusterStartError if they cannot hold the workers.
    """
    if not node_cpus:
        raise ClusterStartError("the Ray cluster has no CPU")
    num_workers, gpus_each = _workers_to_place(options, num_gpus)
    if options.num_prefill_workers >= num_workers:
        raise ClusterStartError(
            f"--prefill-workers {options.num_prefill_workers} leave none of {counted(num_workers, 'worker')} to decode"
        )
    share = options.cpus_per_worker or cpus_per_worker(node_cpus, num_workers)
    cpus_each = min(share, MAX_CPUS_BESIDE_GPU) if gpus_each else share
    _check_fits(num_workers, cpus_each, gpus_each, node_cpus, num_gpus)
    return Shape(num_workers=num_workers, num_cpus=cpus_each, num_gpus=gpus_each)


def cpus_per_worker(node_cpus: Sequence[float], num_workers: int) -> float:
    """Return the largest whole number of CPUs with which all workers fit on the nodes.

    It is whole because Ray sets a worker's threads from it. With more workers than CPUs it is a fraction.
    """
    for share in range(int(max(node_cpus)), 0, -1):
        if sum(int(cpus // share) for cpus in node_cpus) >= num_workers:
            return float(share)
    return min(node_cpus) / math.ceil(num_workers / len(node_cpus))


def room_on(cpus: float, shape: Shape) -> int:
    """Return for how many workers a node has CPUs. The small addend allows for rounding of fractions."""
    return int((cpus + 1e-6) / shape.num_cpus)


def _workers_to_place(options: "UpOptions", gpus_of_cluster: float) -> tuple[int, float]:
    """Return the number of workers, and the GPUs of each. Raise ClusterStartError for `cuda` without a GPU."""
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
