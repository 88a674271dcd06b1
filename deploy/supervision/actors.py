"""Ray actors of a cluster: adopts, creates, calls and kills them, and puts their failures into words.

Owns the options with which actors are created. Does not own which actors should run (supervisor.py).
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

import ray
from blockyard.deploy.machine.deaths import DeathWatch
from blockyard.deploy.machine.processes import command_of
from blockyard.deploy.supervision.leadership import Claim, NotLeadingError
from blockyard.deploy.supervision.liveness import HungError
from blockyard.deploy.supervision.replicas import (
    SUPERVISOR_NAME,
    ClusterSpec,
    OtherCodeError,
    Replica,
    router_config,
    worker_config,
)
from blockyard.router.actor import RouterActor
from blockyard.worker.actor import WorkerActor
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

START_SECONDS = 600.0
CALL_SECONDS = 5.0
END_SECONDS = 30.0
"""Limit on the end of a silent process, for which Ray may have to start a process on its node."""
ACTOR_TITLES = ("ray::WorkerActor", "ray::RouterActor")
"""Beginnings of the process titles that Ray gives to workers and routers."""
KILLED_FOR_MEMORY = "Ray killed its process: its node was short of memory"
_RAYS_WORDS = {
    "node has died": "its node died",
    "NODE_OUT_OF_MEMORY": KILLED_FOR_MEMORY,
    "killed by `ray.kill`": "its process was ended by Ray",
}
"""Reasons of death in our words, by a part of Ray's text."""
Reply = TypeVar("Reply")


def adopt_or_create(spec: ClusterSpec, replica: Replica, group: Any, claim: Claim) -> Any:
    """Return the living actor that has this replica's name, or create it on Ray.

    A new actor ends itself at once if `claim` does not hold any more where it starts.

    `group` is the placement group for a worker of several ranks. Its actor is rank 0, which creates the others.
    """
    options = {
        "name": replica.name,
        "namespace": spec.namespace,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": 0,
    }
    if replica.kind == "router":
        router = router_config(spec.router, replica)
        where = {spec.router_resource: 1.0} if spec.router_resource else {}
        made = ray.remote(RouterActor).options(**options, num_cpus=0, resources=where)
        return made.remote(router, replica.name, SUPERVISOR_NAME, claim.check)
    config = worker_config(spec, replica)
    resources = {
        "num_cpus": spec.num_cpus_per_worker / spec.num_ranks,
        "num_gpus": spec.num_gpus_per_worker / spec.num_ranks,
    }
    # SPREAD, so that the death of a node ends as few workers as possible.
    strategy = "SPREAD" if group is None else PlacementGroupSchedulingStrategy(group, 0)
    options |= {"scheduling_strategy": strategy}
    return ray.remote(WorkerActor).options(**options, **resources).remote(config, claim.check)


def living_names() -> frozenset[str]:
    """Return the names of the actors in this process's namespace that live or are being created."""
    return frozenset(ray.util.list_named_actors())


async def end_process(actor: Any, node_id: str, pid: int, claim: Claim, *, if_silent: bool) -> bool:
    """Kill a silent actor's process by a task on its node. Return whether that was done within END_SECONDS.

    The silence may be that of a link, and a kill that was sent before the link dropped would end a healthy process
    minutes later. So the task itself asks the actor once more (`if_silent`), and Ray's head for the newest epoch. Ray's
    own kill cannot do that, and misses a process that froze before Ray was connected to it.
    """
    if not pid:
        try:
            node_id, pid = await asyncio.to_thread(_whereabouts_by_ray, actor)
        except RayError:
            return False
    if not pid:
        return False
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(_end_here).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    # In a thread, because the first call stores the function at Ray's head.
    ending = asyncio.create_task(asyncio.to_thread(task.remote, actor, pid, claim, if_silent))
    try:
        async with asyncio.timeout(END_SECONDS):
            return bool(await (await ending))
    except (RayError, TimeoutError):
        return False


def _whereabouts_by_ray(actor: Any) -> tuple[str, int]:
    """Return an actor's node id and process id as Ray's head knows them. The pid is 0 if it has no process."""
    found = ray._private.state.actors(actor._actor_id.hex())
    return (found["Address"]["NodeID"], found["Pid"] or 0) if found else ("", 0)


def _end_here(actor: Any, pid: int, claim: Claim, if_silent: bool) -> bool:
    """Kill the actor's process on this node, unless it answers or another supervisor leads. Return whether it ended."""
    if if_silent and ray.wait([actor.whereabouts.remote()], timeout=CALL_SECONDS)[0]:
        return False
    try:
        claim.check()
    except NotLeadingError:
        return False
    _sigkill(pid)
    return True


def is_actor(pid: int) -> bool:
    """Tell whether this pid is a worker or router of this machine, by its title."""
    return "".join(command_of(pid)[:1]).startswith(ACTOR_TITLES)


def _sigkill(pid: int) -> None:
    """Kill the process, unless it has ended and the kernel has given its pid to another program."""
    if is_actor(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def answer(reference: Awaitable[Reply], timeout_seconds: float) -> Reply:
    """Return an actor's reply. Raise TimeoutError if it does not come in time."""
    async with asyncio.timeout(timeout_seconds):
        return await reference


async def all_of(*calls: Awaitable[object]) -> None:
    """Wait for all calls and ignore failures. The supervisor's loop for each actor detects that it is dead or hangs."""
    await asyncio.gather(*calls, return_exceptions=True)


class DiedError(RuntimeError):
    """An actor's process or node has ended unasked. The text says how."""


class UnreachableError(RuntimeError):
    """An actor cannot be called, and may live."""


@contextlib.asynccontextmanager
async def deaths_as_errors() -> AsyncIterator[DeathWatch]:
    """Raise DiedError in place of Ray's error if an actor dies inside the block. Yield a DeathWatch.

    Raise UnreachableError if Ray has lost the connection to the actor, which may well live.

    The text gives the reason in Ray's words or, for a process that the DeathWatch watches, the kernel's.
    """
    with contextlib.closing(DeathWatch()) as death:
        try:
            yield death
        except OutOfMemoryError:
            raise DiedError(KILLED_FOR_MEMORY) from None
        except ActorUnavailableError:
            raise UnreachableError("the connection to it was lost") from None
        except RayActorError as error:
            raise DiedError(reason_by_ray(str(error)) or await death.reason() or "its process died") from None


def reason_by_ray(words: str) -> str:
    """Return, in our words, the reason that Ray gives for an actor's death. Empty if Ray knows none."""
    return next((text for part, text in _RAYS_WORDS.items() if part in words), "")


def reason(error: Exception) -> str:
    """Describe why a worker or router ended or did not start."""
    match error:
        case OtherCodeError() | HungError() | DiedError() | UnreachableError() | NotLeadingError():
            return str(error)
        case RayTaskError():
            return f"{type(error.cause).__name__}: {error.cause}"
        case TimeoutError():
            return f"did not start within {START_SECONDS:.0f} s"
        case _:
            return f"{type(error).__name__}: {error}"
