"""Placement of workers with several ranks: a Ray placement group for each incarnation, with a bundle for each rank.

Owns the groups' names, and the choice between one node and several. Ray kills every process in a group that is removed,
stopped ones too. So the removal ends all ranks of a worker. A worker of one rank has no group.
"""

import asyncio
import contextlib
import logging
from collections.abc import Collection
from typing import Any

from blockyard.deploy.supervision.leadership import Claim, NotLeadingError
from blockyard.deploy.supervision.replicas import ClusterSpec
from ray.exceptions import RayError
from ray.util import get_placement_group, placement_group, placement_group_table, remove_placement_group

logger = logging.getLogger(__name__)

ONE_NODE_SECONDS = 5.0
"""Time for one node to have room for all ranks of a worker. After it they may be on several."""
REMOVED = "REMOVED"


def group_name(namespace: str, worker: str) -> str:
    """Return the name of a worker's group. It contains the namespace, because Ray's list of groups has none."""
    return f"{namespace} {worker}"


def bundles_of(spec: ClusterSpec) -> list[dict[str, float]]:
    """Return the resources of each rank of a worker."""
    each = {
        "CPU": spec.num_cpus_per_worker / spec.num_ranks,
        "GPU": spec.num_gpus_per_worker / spec.num_ranks,
    }
    return [{name: amount for name, amount in each.items() if amount}] * spec.num_ranks


async def place(spec: ClusterSpec, worker: str, claim: Claim) -> Any:
    """Create the group of a worker that does not run, and return it. Its ranks start once Ray has reserved it.

    Remove a group that an earlier incarnation has left. If no node has room for all ranks, several nodes share them.
    Raise NotLeadingError if the claim does not hold.
    """
    name = group_name(spec.namespace, worker)
    await asyncio.to_thread(_remove, name, claim)
    group = await asyncio.to_thread(_created, spec, name, "STRICT_PACK", claim)
    if await asyncio.to_thread(group.wait, ONE_NODE_SECONDS):
        return group
    logger.warning(
        "no node has room for all %d ranks of %s: they may be on several nodes, and exchange more slowly there",
        spec.num_ranks,
        worker,
    )
    await asyncio.to_thread(_remove, name, claim)
    return await asyncio.to_thread(_created, spec, name, "PACK", claim)


def free(spec: ClusterSpec, worker: str, claim: Claim) -> None:
    """Remove a worker's group with all processes in it, if there is one. If Ray does not answer, `place` does it."""
    with contextlib.suppress(RayError, NotLeadingError):
        _remove(group_name(spec.namespace, worker), claim)


def free_all_but(namespace: str, workers: Collection[str], claim: Claim) -> None:
    """Remove the groups of all workers of a namespace but these."""
    kept = {group_name(namespace, worker) for worker in workers}
    groups = placement_group_table().values()
    for group in groups:
        name = group["name"]
        if group["state"] != REMOVED and name.startswith(group_name(namespace, "")) and name not in kept:
            with contextlib.suppress(RayError, NotLeadingError):  # `place` removes it later.
                _remove(name, claim)


def _created(spec: ClusterSpec, name: str, strategy: str, claim: Claim) -> Any:
    claim.check()
    return placement_group(bundles_of(spec), strategy=strategy, name=name, lifetime="detached")


def _remove(name: str, claim: Claim) -> None:
    """Remove the group that has this name now.

    The removal names the group's id. So one that arrives late never ends a later worker of this name. Raise
    NotLeadingError if the claim does not hold once the id is known: then it may be the group of another supervisor.
    """
    with contextlib.suppress(ValueError):  # There is none.
        group = get_placement_group(name)
        claim.check()
        remove_placement_group(group)
