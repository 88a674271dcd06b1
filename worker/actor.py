"""A worker inside a Ray actor: the only file of worker/ that knows Ray.

Owns what Ray adds to a WorkerServer: gauges for `ray.util.metrics`, the place of the pool map in Ray's
session logs, and a call that ends with the actor. Does not own serving; tokens never pass through Ray.
"""

import asyncio
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from blockyard.worker.config import WorkerConfig
from blockyard.worker.server import WorkerServer
from ray.util.metrics import Gauge

GAUGE_SECONDS = 1.0
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
GAUGES = {
    "blocks_free": "Blocks of the KV pool that hold nothing.",
    "blocks_cached": "Unreferenced blocks kept for the prefix they hold.",
    "blocks_used": "Blocks held by running sequences.",
    "running": "Sequences running.",
    "waiting": "Sequences waiting.",
    "prompt_tokens": "Prompt tokens since the worker's start.",
    "generated_tokens": "Tokens generated since the worker's start.",
    "cached_tokens": "Prompt tokens reused from the prefix cache since the worker's start.",
    "preemptions": "Sequences that gave their blocks to others since the worker's start.",
    "swaps": "Preemptions that moved blocks to host memory since the worker's start.",
    "host_cached_blocks": "Evicted blocks that host memory keeps.",
    "index_lag_seconds": "Age of the oldest change of the cache that the prefix index has not confirmed.",
    "index_entries": "Names that the prefix index should hold of this worker.",
    "index_state": "What the prefix index knows of this worker: 1 no index, 2 exact, 3 degraded.",
    "index_errors": "Calls of the prefix index that failed since the worker's start.",
    "index_resyncs": "How often the prefix index was told everything anew since the worker's start.",
    "index_damages": "How often the prefix index did not say what it had been told since the worker's start.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedWorker:
    """Where one incarnation serves."""

    address: str
    pid: int
    incarnation: str
    node_id: str


class WorkerActor:
    """Made an actor by the supervisor. Raises from `start` what the engine raises."""

    def __init__(self, config: WorkerConfig) -> None:
        # Ray keeps each actor's stderr as a file in the dashboard's Logs tab.
        logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
        self._worker_id = config.worker_id
        self._model = Path(config.engine.model).name
        self._server = WorkerServer(_placed(config))
        self._starting: asyncio.Task[StartedWorker] | None = None
        self._reporting: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"{self._worker_id}({self._model})"

    async def start(self) -> StartedWorker:
        """Idempotent: a supervisor that adopts a running worker asks again."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def until_stopped(self) -> None:
        """Answers only by the actor's death, which Ray reports to the caller within milliseconds, or if the
        engine has failed, with RuntimeError."""
        await self._server.failed.wait()
        raise RuntimeError("the engine has failed; the worker's log says why")

    async def is_draining(self) -> bool:
        """Whether it takes nothing new, whoever said so."""
        return self._server.is_draining

    async def stop(self, grace_seconds: float) -> None:
        """Drains, and says goodbye to routers and index; the caller ends the actor."""
        if self._reporting is not None:
            self._reporting.cancel()
        await self._server.stop(grace_seconds)

    async def _start(self) -> StartedWorker:
        address = await self._server.start()
        self._reporting = asyncio.create_task(self._report_gauges())
        return StartedWorker(
            address=address,
            pid=os.getpid(),
            incarnation=self._server.incarnation,
            node_id=ray.get_runtime_context().get_node_id(),
        )

    async def _report_gauges(self) -> None:
        gauges = {name: Gauge(f"blockyard_{name}", about, ("worker",)) for name, about in GAUGES.items()}
        tags = {"worker": self._worker_id}
        while True:
            stats = self._server.stats()
            for name, gauge in gauges.items():
                gauge.set(stats[name], tags)
            await asyncio.sleep(GAUGE_SECONDS)


def _placed(config: WorkerConfig) -> WorkerConfig:
    """The config with what only the node knows: its address, and where the dashboard's Logs tab looks."""
    node_id = ray.get_runtime_context().get_node_id()
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    node = next(node for node in nodes if node["NodeID"] == node_id)
    # `<session>/sockets/raylet`: the one public place that tells this node's session folder.
    logs = Path(node["RayletSocketName"]).parent.parent / "logs"
    return replace(
        config,
        host=config.host or node["NodeManagerAddress"],
        pool_map_path=str(logs / f"blockyard-{config.worker_id}.log"),
    )
