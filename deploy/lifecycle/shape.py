"""Shape of a cluster: the number of workers, and each one's share of its node. Pure.

Owns the default shares, and refuses a share that no node can hold: Ray would silently wait for it. Does not own the
choice of nodes, which is Ray's.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockyard.deploy.lifecycle.serving import ClusterStartError
from blockyard.deploy.views.quantities import counted

if TYPE_CHECKING:
    from blockyard.deploy.lifecycle.driver import Hardware
    from blockyard.deploy.settings.wanted_cluster import UpOptions

MAX_CPUS_BESIDE_GPU = 4.0
"""Limit on the CPUs of a worker with a GPU. It needs few threads, for scheduling and sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Number of workers, and the resources of each, which its ranks share equally."""

    num_workers: int
    num_cpus: float
    num_gpus: float
    num_ranks: int = 1
    """Ranks of each worker. Each rank is whole on one node."""
    num_models: int = 1
    """Models with this number of workers each."""

    @property
    def all_workers(self) -> int:
        """Return the number of workers of all models."""
        return self.num_workers * self.num_models


def shape_of(options: "UpOptions", node_cpus: Sequence[float], num_gpus: float) -> Shape:
    """Return the shape for nodes with these CPUs each and `num_gpus` in all.

    Raise ClusterStartError if they cannot hold the workers.
    """
    if not node_cpus:
        raise ClusterStartError("the Ray cluster has no CPU")
    num_ranks = options.engine.tensor_parallel_size
    num_workers, has_gpus = _workers_to_place(options, num_gpus)
    if options.num_prefill_workers >= num_workers:
        raise ClusterStartError(
            f"--prefill-workers {options.num_prefill_workers} leave none of {counted(num_workers, 'worker')} to decode"
        )
    if options.cpus_per_worker is None:
        share = cpus_per_rank(node_cpus, num_workers * num_ranks * options.num_models)
    else:
        share = options.cpus_per_worker / num_ranks
    share = min(share, MAX_CPUS_BESIDE_GPU) if has_gpus else share
    shape = Shape(
        num_workers=num_workers,
        num_cpus=share * num_ranks,
        num_gpus=float(num_ranks * has_gpus),
        num_ranks=num_ranks,
        num_models=options.num_models,
    )
    _check_fits(shape, node_cpus, num_gpus)
    return shape


def cpus_per_rank(node_cpus: Sequence[float], num_ranks: int) -> float:
    """Return the largest whole number of CPUs with which all ranks of all workers fit on the nodes.

    It is whole because Ray sets a process's threads from it. With more ranks than CPUs it is a fraction.
    """
    for share in range(int(max(node_cpus)), 0, -1):
        if sum(int(cpus // share) for cpus in node_cpus) >= num_ranks:
            return float(share)
    return min(node_cpus) / math.ceil(num_ranks / len(node_cpus))


def room_on(cpus: float, shape: Shape, gpus: float = math.inf) -> int:
    """Return for how many ranks a node has CPUs and GPUs. The small addend allows for rounding of fractions."""
    by_cpus = int((cpus + 1e-6) / (shape.num_cpus / shape.num_ranks))
    return int(min(by_cpus, gpus)) if shape.num_gpus else by_cpus


def whole_workers(rooms: Iterable[int], shape: Shape) -> list[int]:
    """Return how many workers are on each node with all of their ranks. `rooms` are the ranks that fit on each node.

    Nodes are filled in order. Workers that are not counted have ranks on several nodes.
    """
    left, whole = shape.all_workers, []
    for room in rooms:
        whole.append(min(left, room // shape.num_ranks))
        left -= whole[-1]
    return whole


def rooms(hardware: "Hardware", shape: Shape) -> list[int]:
    """Return how many ranks fit on each node."""
    nodes = zip(hardware.node_cpus, hardware.node_gpus, strict=True)
    return [room_on(cpus, shape, gpus) for cpus, gpus in nodes]


def shape_on(options: "UpOptions", hardware: "Hardware") -> Shape:
    """Return the shape for this hardware. Raise ClusterStartError if it cannot hold the workers."""
    return shape_of(options, hardware.node_cpus, hardware.num_gpus)


def _workers_to_place(options: "UpOptions", gpus_of_cluster: float) -> tuple[int, bool]:
    """Return the number of workers, and whether they take GPUs. Raise ClusterStartError for `cuda` without a GPU."""
    if options.engine.device == "cpu" or gpus_of_cluster < 1:
        if options.engine.device == "cuda":
            raise ClusterStartError("--device cuda, but the Ray cluster has no GPU")
        return options.num_workers or 1, False
    gpus_per_worker = options.engine.tensor_parallel_size * options.num_models
    return options.num_workers or max(1, int(gpus_of_cluster) // gpus_per_worker), True


def _check_fits(shape: Shape, node_cpus: Sequence[float], num_gpus: float) -> None:
    if shape.num_gpus and shape.all_workers * shape.num_gpus > num_gpus:
        each = "a GPU" if shape.num_ranks == 1 else f"{shape.num_gpus:g} GPUs (--tensor-parallel-size)"
        raise ClusterStartError(
            f"--workers {shape.num_workers}{_of_models(shape)} take {each} each, and the Ray cluster has {num_gpus:g}"
        )
    room = sum(room_on(cpus, shape) for cpus in node_cpus) // shape.num_ranks
    if room < shape.all_workers:
        nodes = ", ".join(f"{cpus:g}" for cpus in node_cpus)
        ranks = "" if shape.num_ranks == 1 else f" for {shape.num_ranks} ranks"
        raise ClusterStartError(
            f"no room for {counted(shape.all_workers, 'worker')} of {counted(shape.num_cpus, 'CPU')}{ranks} each: "
            f"the nodes have {nodes} CPUs, room for {room} (--workers, --cpus-per-worker)"
        )


def _of_models(shape: Shape) -> str:
    return f" of each of {shape.num_models} models" if shape.num_models > 1 else ""
