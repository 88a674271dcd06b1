"""Worker actor: a worker inside a Ray actor. Only this file and rank_actor.py of worker/ know Ray.

Owns what Ray adds to a WorkerServer: metrics, the pool map in Ray's session logs, and actors of the other ranks. Also
owns a call that ends with the actor. Does not own serving. Tokens never pass through Ray.
"""

import asyncio
import importlib
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from blockyard.proto.metrics.ray import keep_reporting
from blockyard.proto.metrics.readings import of_one_model
from blockyard.proto.naming.code_version import code_version
from blockyard.proto.naming.model_files import resolve_tokenizer
from blockyard.proto.runtime.garbage_collection import kept_out_of_garbage_collection
from blockyard.proto.runtime.logs import configure_logging
from blockyard.proto.runtime.niceness import take_usual_priority
from blockyard.proto.runtime.sigterm import end_at_sigterm
from blockyard.proto.runtime.tasks import BackgroundTasks
from blockyard.worker.config import WorkerConfig
from blockyard.worker.metrics import worker_source
from blockyard.worker.rank_actor import RankActors, whereabouts
from blockyard.worker.startup.openmp import bound_spinning

if TYPE_CHECKING:
    from blockyard.worker.server import WorkerServer


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedWorker:
    """Address and identity of one incarnation that serves."""

    address: str
    pid: int
    incarnation: str
    node_id: str
    code: str
    """The code version that runs here."""
    dtype: str
    """The data type of the model's computation, and why it was chosen."""
    ranks: tuple[tuple[str, int], ...] = ()
    """Ray node id and process id of each rank, if there are several. The first is this process."""


class WorkerActor:
    """Made an actor by the supervisor. Raises from `start` what the engine raises."""

    def __init__(self, config: WorkerConfig, check_leader: Callable[[], None]) -> None:
        """`check_leader` raises an error if the supervisor that asked for this actor does not lead any more."""
        end_at_sigterm()
        check_leader()
        self._worker_id = config.worker_id
        self._model = Path(config.engine.model).name
        self._config = config
        self._server: WorkerServer | None = None
        """None until the server's libraries have been imported."""
        self._started: StartedWorker | None = None
        self._starts = BackgroundTasks(on_failure=None)
        self._starting: asyncio.Task[StartedWorker] | None = None
        self._reports = BackgroundTasks()
        self._ranks = BackgroundTasks()
        self._lost = ""
        """Why a rank has ended. Empty while all run."""
        self._serving = ExitStack()

    def __repr__(self) -> str:
        return f"{self._worker_id}({self._model})"

    async def whereabouts(self) -> tuple[str, int]:
        """Return the actor's Ray node and its process id, by which a hanging actor can be ended."""
        return whereabouts()

    async def fetch_model(self) -> None:
        """Download the model if only the hub has it. This may take hours. Raises ValueError if it is nowhere."""
        await asyncio.to_thread(_fetch, self._config)

    async def start(self) -> StartedWorker:
        """Start to serve, and return the address and identity. Idempotent: a supervisor that adopts a running worker
        calls it again."""
        if self._starting is None:
            self._starting = self._starts.start(self._start(), name="start")
        return await asyncio.shield(self._starting)

    async def until_stopped(self) -> None:
        """Never return: Ray reports the actor's death to the caller within milliseconds.

        Raises RuntimeError if the engine has failed.
        """
        assert self._server is not None
        await self._server.failed.wait()
        raise RuntimeError(self._lost or "the engine has failed; the worker's log says why")

    async def is_draining(self) -> bool:
        """Return whether the worker drains, whoever asked for that. An answer during the start shows that it is
        alive."""
        return self._server is not None and self._started is not None and self._server.is_draining

    async def changed_files(self) -> str:
        """Return which of the model's files have changed since this worker read them, in words. Empty: none."""
        if self._server is None or self._started is None:
            return ""
        return await asyncio.to_thread(self._server.changed_files)

    async def stop(self, grace_seconds: float, check_leader: Callable[[], None]) -> None:
        """Stop the metrics, drain, and leave routers and index. The caller ends the actor.

        The call may arrive late. Raises what `check_leader` raises, if the caller does not lead any more.
        """
        await asyncio.to_thread(check_leader)
        await self._reports.aclose()
        await self._ranks.aclose()
        if self._server is not None:
            await self._server.stop(grace_seconds)
        await self._starts.aclose()
        self._serving.close()

    async def _start(self) -> StartedWorker:
        bound_spinning()
        others = RankActors(self._config) if self._config.engine.tensor_parallel_size > 1 else None
        # Imported in a thread, so that the actor answers meanwhile. Not imported earlier, because `up` and the
        # supervisor name this class to Ray, and would load torch with it.
        server = await asyncio.to_thread(importlib.import_module, "blockyard.worker.server")
        config = _placed(self._config)
        leader = None if others is None else await asyncio.to_thread(_leader, config)
        self._server = server.WorkerServer(config, leader)
        # Ray keeps each actor's stderr as a file in the dashboard's Logs tab.
        log, worker_id = self._config.log, self._config.worker_id
        configure_logging(log, worker_id=worker_id, incarnation=self._server.incarnation)
        take_usual_priority()
        address = await self._serve(others, leader)
        self._serving.enter_context(kept_out_of_garbage_collection())
        reporting = keep_reporting(worker_source(self._config), of_one_model(self._server.stats))
        self._reports.start(reporting, name="metrics")
        self._started = StartedWorker(
            address=address,
            pid=os.getpid(),
            incarnation=self._server.incarnation,
            node_id=ray.get_runtime_context().get_node_id(),
            code=code_version(),
            dtype=self._server.dtype,
            ranks=() if others is None else (whereabouts(), *await others.whereabouts()),
        )
        return self._started

    async def _serve(self, others: RankActors | None, leader: Any) -> str:
        """Start the server, and return its address. The end of another rank fails the start, and later the server.

        Raises RuntimeError if a rank ends meanwhile, and what the server raises.
        """
        assert self._server is not None
        if others is None:
            return await self._server.start()
        server = self._server
        ending = self._ranks.start(others.until_one_ends(leader.address, leader.secret), name="ranks")
        starting = self._starts.start(server.start(), name="server")
        await asyncio.wait({starting, ending}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            raise RuntimeError(ending.result())

        def fail(ended: "asyncio.Task[str]") -> None:
            if not ended.cancelled():
                self._lost = ended.result()
                server.failed.set()

        address = await starting
        ending.add_done_callback(fail)
        return address


def _fetch(config: WorkerConfig) -> None:
    # Imported here, because processes that only name the actor's class to Ray would import it too.
    from blockyard.worker.model.config import resolve_model

    resolve_tokenizer(config.engine.tokenizer, resolve_model(config.engine.model))
    if config.engine.draft_model is not None:
        resolve_model(config.engine.draft_model)


def _leader(config: WorkerConfig) -> Any:
    """Return rank 0's end of the connections to the other ranks, which listens from now on."""
    ranks = importlib.import_module("blockyard.worker.ranks")
    return ranks.RankLeader(
        config.engine, secret=config.cluster_secret, cluster=config.cluster, host=config.host
    )


def _placed(config: WorkerConfig) -> WorkerConfig:
    """Return the config with what only the node knows: its address, and the folder of the dashboard's Logs tab."""
    node_id = ray.get_runtime_context().get_node_id()
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    node = next(node for node in nodes if node["NodeID"] == node_id)
    # `<session>/sockets/raylet` is the only public value that tells this node's session folder.
    logs = Path(node["RayletSocketName"]).parent.parent / "logs"
    return replace(
        config,
        host=config.host or node["NodeManagerAddress"],
        pool_map_path=str(logs / f"blockyard-{config.worker_id}.log"),
    )
