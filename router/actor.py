"""A router inside a Ray actor: the only file of router/ that knows Ray.

Owns what Ray adds to a RouterServer: the node's address, its metrics each second, a call that ends with the actor, and
the end of a supervisor that hangs.
Clients speak gRPC to the router itself; nothing of a request passes through Ray.
"""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import ray
from blockyard.proto.metrics.ray import keep_reporting
from blockyard.proto.naming.code_version import code_version
from blockyard.proto.runtime.logs import configure_logging
from blockyard.proto.runtime.sigterm import end_at_sigterm
from blockyard.proto.runtime.tasks import BackgroundTasks
from blockyard.proto.security.loopback import is_every_interface
from blockyard.router.config import RouterConfig
from blockyard.router.supervision import SupervisorWatch


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedRouter:
    """Where one router serves."""

    address: str
    http_address: str
    """Of its gateway; empty where it has none."""
    pid: int
    node_id: str
    code: str
    """The code version that runs here."""


class RouterActor:
    """Made an actor by the supervisor. Raises from `start` what the server raises."""

    def __init__(self, config: RouterConfig, router_id: str, supervisor: str) -> None:
        """`supervisor` is the name of the actor that made this one."""
        end_at_sigterm()
        # Ray keeps each actor's stderr as a file in the dashboard's Logs tab.
        configure_logging(config.log, router_id=router_id)
        self._router_id = router_id
        node_host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        host = config.host or node_host
        self._advertise_host = config.advertise_host or (node_host if is_every_interface(host) else host)
        # Here, because whoever names this class to Ray, `up` and the supervisor, would load all of a router with it.
        from blockyard.router.server import RouterServer

        self._server = RouterServer(replace(config, host=host), owns_process=True, router_id=router_id)
        # `start` raises the failure of its task. The other two tasks catch every exception.
        self._tasks = BackgroundTasks(on_failure=None)
        self._starting: asyncio.Task[StartedRouter] | None = None
        self._watch = SupervisorWatch(lambda: asyncio.to_thread(_end_supervisor, supervisor))
        self._watching: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return self._router_id

    async def whereabouts(self) -> tuple[str, int]:
        """Its node and its process: by them one that hangs is ended."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    async def start(self) -> StartedRouter:
        """Idempotent: a supervisor that adopts a running router asks again."""
        if self._starting is None:
            self._starting = self._tasks.start(self._start(), name="start")
        return await asyncio.shield(self._starting)

    async def set_workers(self, addresses: Sequence[str]) -> int:
        """How many workers are ready here: those named before that have been reached."""
        self._watch.told()
        self._server.set_workers(addresses)
        return self._server.num_ready_workers

    async def ready_incarnations(self) -> tuple[str, ...]:
        """The lives of workers that get requests from here."""
        return self._server.ready_incarnations

    async def until_stopped(self) -> None:
        """Answers by the actor's death, which Ray reports to the caller within milliseconds, and raises RuntimeError
        for a router that lives and serves no more."""
        await self._server.failed.wait()
        raise RuntimeError("the router has failed; its log says why")

    async def stop(self, grace_seconds: float) -> None:
        """Refuses new requests and lets running ones finish; the caller ends the actor."""
        if self._watching is not None:
            self._watching.cancel()
        await self._server.stop(grace_seconds)
        await self._tasks.aclose()

    async def _start(self) -> StartedRouter:
        address = await self._server.start()
        reporting = keep_reporting(self._server.metric_source, lambda: self._server.readings)
        self._tasks.start(reporting, name="metrics")
        self._watching = self._tasks.start(self._watch.run(), name="supervisor watch")
        return StartedRouter(
            address=self._told(address),
            http_address=self._told(self._server.http_address),
            pid=os.getpid(),
            node_id=ray.get_runtime_context().get_node_id(),
            code=code_version(),
        )

    def _told(self, address: str) -> str:
        return address and f"{self._advertise_host}:{address.rpartition(':')[2]}"


def _end_supervisor(name: str) -> None:
    """Kills its process, on whatever node it is; Ray starts it again."""
    ray.kill(ray.get_actor(name), no_restart=False)
