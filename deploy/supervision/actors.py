"""The Ray actors of a cluster: how one is adopted or made, called within a deadline, and what its failure is called.

Owns the only place that says what Ray is asked for. Does not own who should run (supervisor.py).
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from typing import Any, TypeVar

import ray
from blockyard.deploy.machine.deaths import DeathWatch
from blockyard.deploy.machine.processes import command_of
from blockyard.deploy.supervision.liveness import HungError
from blockyard.deploy.supervision.replicas import (
    SUPERVISOR_NAME,
    ClusterSpec,
    OtherCodeError,
    Place,
    router_config,
)
from blockyard.router.actor import RouterActor
from blockyard.worker.actor import WorkerActor
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

START_SECONDS = 600.0
CALL_SECONDS = 5.0
ACTOR_TITLES = ("ray::WorkerActor", "ray::RouterActor")
"""These are Ray's names for their processes."""
KILLED_FOR_MEMORY = "Ray killed its process: its node was short of memory"
_RAYS_WORDS = {
    "node has died": "its node died",
    "NODE_OUT_OF_MEMORY": KILLED_FOR_MEMORY,
    "killed by `ray.kill`": "its process was ended by Ray",
}
"""By a part of what Ray says of an actor that has died."""
Reply = TypeVar("Reply")


def adopt_or_create(spec: ClusterSpec, place: Place) -> Any:
    """The actor of this name: the one that lives, or a new one."""
    options = {
        "name": place.name,
        "namespace": spec.namespace,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": 0,
    }
    if place.kind == "router":
        router = router_config(spec.router, place)
        where = {spec.router_resource: 1.0} if spec.router_resource else {}
        made = ray.remote(RouterActor).options(**options, num_cpus=0, resources=where)
        return made.remote(router, place.name, SUPERVISOR_NAME)
    config = replace(spec.worker, worker_id=place.name)
    resources = {"num_cpus": spec.num_cpus_per_worker, "num_gpus": spec.num_gpus_per_worker}
    # Spread: a node that dies takes as few workers with it as can be.
    options |= {"scheduling_strategy": "SPREAD"}
    return ray.remote(WorkerActor).options(**options, **resources).remote(config)


def living_names() -> frozenset[str]:
    """The actors of this process's namespace that live or are being made."""
    return frozenset(ray.util.list_named_actors())


def end_process(node_id: str, pid: int) -> None:
    """Of an actor that hangs. Ray's own kill asks the process first; one that froze before Ray was connected to it is
    never asked, and keeps its CPUs. Returns at once."""
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    ray.remote(_sigkill).options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(pid)


def is_actor(pid: int) -> bool:
    """Whether a worker or router runs there: on another machine the number is another program's."""
    return "".join(command_of(pid)[:1]).startswith(ACTOR_TITLES)


def _sigkill(pid: int) -> None:
    """Unless it has gone, and its number is another program's."""
    if is_actor(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def answer(reference: Awaitable[Reply], timeout_seconds: float) -> Reply:
    async with asyncio.timeout(timeout_seconds):
        return await reference


async def all_of(*calls: Awaitable[object]) -> None:
    """Waits for each; who has died or hangs is found out by its own `until_stopped`, not here."""
    await asyncio.gather(*calls, return_exceptions=True)


class DiedError(RuntimeError):
    """An actor's process has ended by itself, or its node has; the text says how."""


@contextlib.asynccontextmanager
async def death_told() -> AsyncIterator[DeathWatch]:
    """Inside, the death of an actor is a DiedError, from what Ray says and what the kernel says of the process that is
    watched."""
    with contextlib.closing(DeathWatch()) as death:
        try:
            yield death
        except OutOfMemoryError:
            raise DiedError(KILLED_FOR_MEMORY) from None
        except RayActorError as error:
            raise DiedError(told_by_ray(str(error)) or await death.told() or "its process died") from None


def told_by_ray(words: str) -> str:
    """What Ray says of an actor's death, beyond a lost connection; empty for nothing."""
    return next((told for part, told in _RAYS_WORDS.items() if part in words), "")


def reason(error: Exception) -> str:
    match error:
        case OtherCodeError() | HungError() | DiedError():
            return str(error)
        case RayTaskError():
            return f"{type(error.cause).__name__}: {error.cause}"
        case TimeoutError():
            return f"did not start within {START_SECONDS:.0f} s"
        case _:
            return f"{type(error).__name__}: {error}"
