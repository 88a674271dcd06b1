"""Placement of workers with several ranks: a Ray placement group for each incarnation, with a bundle for each rank.

Owns the groups' names, and the choice between one node and several. Ray kills every process in a group that is removed,
stopped ones too. So the removal ends all ranks of a worker. A worker of one rank has no group.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection
from typing import Any

from blockyard.deploy.supervision.leadership import ANSWER_SECONDS, SilentHeadError
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


async def place(spec: ClusterSpec, worker: str) -> Any:
    """Create the group of a worker that does not run, and return it. Its ranks start once Ray has reserved it.

    Remove a group that an earlier incarnation has left. If no node has room for all ranks, several nodes share them.
    """
    name = group_name(spec.namespace, worker)
    await asyncio.to_thread(_remove, name)
    group = await asyncio.to_thread(_created, spec, name, "STRICT_PACK")
    if await asyncio.to_thread(group.wait, ONE_NODE_SECONDS):
        return group
    logger.warning(
        "no node has room for all %d ranks of %s: they may be on several nodes, and exchange more slowly there",
        spec.num_ranks,
        worker,
    )
    await asyncio.to_thread(_remove, name)
    return await asyncio.to_thread(_created, spec, name, "PACK")


def free(spec: ClusterSpec, worker: str) -> None:
    """Remove a worker's group with all processes in it, if there is one. If Ray does not answer, `place` does it."""
    with contextlib.suppress(RayError, SilentHeadError):
        _remove(group_name(spec.namespace, worker))


def free_all_but(namespace: str, workers: Collection[str]) -> None:
    """Remove the groups of all workers of a namespace but these."""
    kept = {group_name(namespace, worker) for worker in workers}
    groups = placement_group_table().values()
    for group in groups:
        name = group["name"]
        if group["state"] != REMOVED and name.startswith(group_name(namespace, "")) and name not in kept:
            _remove(name)


def _created(spec: ClusterSpec, name: str, strategy: str) -> Any:
    return placement_group(bundles_of(spec), strategy=strategy, name=name, lifetime="detached")


def _remove(name: str) -> None:
    """Remove the group that has this name now.

    The removal names the group's id. So one that arrives late never ends a later worker of this name. Raise
    SilentHeadError if Ray's head is slow to tell the id: another supervisor may lead by then.
    """
    asked_at = time.monotonic()
    with contextlib.suppress(ValueError):  # There is none.
        group = get_placement_group(name)
        if time.monotonic() - asked_at > ANSWER_SECONDS:
            raise SilentHeadError
        remove_placement_group(group)
