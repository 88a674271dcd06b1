"""Rank actors: the ranks of a worker beside rank 0, each in a Ray actor that rank 0's actor creates (actor.py).

Owns how they are created, named and watched. Does not own what ranks compute or exchange (parallel/): steps never pass
through Ray. Ray ends them with their creator. They are in the bundles of its placement group, bundle 0 is rank 0's.
"""

import asyncio
import importlib
import os
from pathlib import Path
from typing import Any, NoReturn

import ray
from blockyard.proto.runtime.logs import configure_logging
from blockyard.proto.runtime.niceness import take_usual_priority
from blockyard.proto.runtime.sigterm import end_at_sigterm
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

    def run(self, leader_address: str) -> None:
        """Load the rank's part of the model and compute it in every step, until the worker ends."""
        bound_spinning()
        configure_logging(self._config.log, worker_id=rank_name(self._config.worker_id, self._rank))
        take_usual_priority()
        # Imported here, because processes that only name this class to Ray would load torch with it.
        ranks = importlib.import_module("blockyard.worker.parallel.ranks")
        ranks.run_rank(leader_address, self._config.cluster_secret, self._config.cluster)


class RankActors:
    """All ranks of a worker beside rank 0, as rank 0's actor has them."""

    def __init__(self, config: WorkerConfig) -> None:
        """Create the actors at once. Raise RuntimeError if this actor is in no placement group."""
        group = ray.util.get_current_placement_group()
        if group is None:
            raise RuntimeError("an actor of several ranks needs a placement group with a bundle for each")
        self._actors = [
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

    async def whereabouts(self) -> list[Whereabouts]:
        """Return where each rank is, in their order. Wait until all processes have begun."""
        return list(await asyncio.gather(*(actor.whereabouts.remote() for actor in self._actors)))

    async def run(self, leader_address: str) -> NoReturn:
        """Run all ranks. Raise RuntimeError when the first of them ends, with the reason."""
        async with asyncio.TaskGroup() as runs:
            for rank, actor in enumerate(self._actors, start=1):
                runs.create_task(_until_ended(rank, actor.run.remote(leader_address)))
        raise AssertionError("a rank ended without a reason")


async def _until_ended(rank: int, run: Any) -> NoReturn:
    try:
        await run
    except RayTaskError as error:
        raise RuntimeError(f"rank {rank}: {type(error.cause).__name__}: {error.cause}") from None
    except RayActorError:
        raise RuntimeError(f"the process of rank {rank} has ended") from None
    raise RuntimeError(f"rank {rank} has ended")
