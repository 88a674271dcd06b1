"""Rank actors: the ranks of a worker beside rank 0, each in a Ray actor that rank 0's actor creates (actor.py).

Owns how they are created, named and watched. Does not own what ranks compute or exchange (ranks.py): steps never pass
through Ray. Ray ends them with their creator. Each has a bundle of its placement group, in which bundle 0 is rank 0's.
"""

import asyncio
import importlib
import os
from pathlib import Path
from typing import Any

import ray
from blockyard.proto.runtime.logs import configure_logging
from blockyard.proto.runtime.niceness import take_usual_priority
from blockyard.proto.runtime.sigterm import end_at_sigterm
from blockyard.proto.runtime.tasks import cancel_and_wait
from blockyard.worker.config import WorkerConfig
from blockyard.worker.startup.openmp import bound_spinning
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

Whereabouts = tuple[str, int]
"""Ray node id and process id."""


def rank_name(worker_id: str, rank: int) -> str:
    return f"{worker_id} rank {rank}"


def whereabouts() -> Whereabouts:
    """Return where this actor is."""
    return ray.get_runtime_context().get_node_id(), os.getpid()


class RankActor:
    """One rank. Raises from `run` what ends it."""

    def __init__(self, config: WorkerConfig, rank: int) -> None:
        end_at_sigterm()
        self._config = config
        self._rank = rank

    def __repr__(self) -> str:
        return f"{rank_name(self._config.worker_id, self._rank)}({Path(self._config.engine.model).name})"

    def whereabouts(self) -> Whereabouts:
        """Return where this rank is. The answer shows that its process has begun."""
        return whereabouts()

    def run(self, leader_address: str, secret: str) -> None:
        """Load the rank's part of the model and compute it in every step, until the worker ends."""
        bound_spinning()
        configure_logging(self._config.log, worker_id=rank_name(self._config.worker_id, self._rank))
        take_usual_priority()
        # Imported here, because processes that only name this class to Ray would load torch with it.
        ranks = importlib.import_module("blockyard.worker.ranks")
        # Ray ends this process with rank 0's, but notices nothing while its control service is away.
        ranks.run_rank(
            self._rank, leader_address, secret, self._config.cluster, on_loss=lambda _: os._exit(1)
        )


class RankActors:
    """All ranks of a worker beside rank 0, as rank 0's actor has them."""

    def __init__(self, config: WorkerConfig) -> None:
        """Create the actors at once. Raise RuntimeError if this actor is in no placement group."""
        group = ray.util.get_current_placement_group()
        if group is None:
            raise RuntimeError("an actor of several ranks needs a placement group with a bundle for each")
        self._actors: list[Any] = [
            ray.remote(RankActor)
            .options(
                name=rank_name(config.worker_id, rank),
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank),
            )
            .remote(config, rank)
            for rank, bundle in enumerate(group.bundle_specs)
            if rank
        ]
        # Asked now, because a rank that runs answers nothing.
        self._places: list[Any] = [actor.whereabouts.remote() for actor in self._actors]

    async def whereabouts(self) -> list[Whereabouts]:
        """Return where each rank is, in their order. Wait until all processes have begun."""
        return list(await asyncio.gather(*self._places))

    async def until_one_ends(self, leader_address: str, secret: str) -> str:
        """Run all ranks. Return why the first of them ended."""
        runs = [
            asyncio.ensure_future(_end_of(rank, actor.run.remote(leader_address, secret)))
            for rank, actor in enumerate(self._actors, start=1)
        ]
        try:
            ended, _ = await asyncio.wait(runs, return_when=asyncio.FIRST_COMPLETED)
            return ended.pop().result()
        finally:
            await cancel_and_wait(*runs)


async def _end_of(rank: int, run: Any) -> str:
    """Wait for a rank's end, and return the reason."""
    try:
        await run
    except RayTaskError as error:
        return f"rank {rank} has failed: {type(error.cause).__name__}: {error.cause}"
    except RayActorError:
        return f"the process of rank {rank} has ended"
    return f"rank {rank} has stopped"
