"""A router inside a Ray actor: the only file of router/ that knows Ray.

Owns what Ray adds to a RouterServer: the node's address, and a call that ends with the actor. Clients speak
gRPC to the router itself; nothing of a request passes through Ray.
"""

import asyncio
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import ray
from blockyard.router.config import RouterConfig
from blockyard.router.server import RouterServer

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedRouter:
    """Where one router serves."""

    address: str
    pid: int
    node_id: str


class RouterActor:
    """Made an actor by the supervisor. Raises from `start` what the server raises."""

    def __init__(self, config: RouterConfig, router_id: str) -> None:
        # Ray keeps each actor's stderr as a file in the dashboard's Logs tab.
        logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
        self._router_id = router_id
        host: str = config.host or ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._server = RouterServer(replace(config, host=host), owns_process=True)
        self._starting: asyncio.Task[StartedRouter] | None = None

    def __repr__(self) -> str:
        return self._router_id

    async def start(self) -> StartedRouter:
        """Idempotent: a supervisor that adopts a running router asks again."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def set_workers(self, addresses: Sequence[str]) -> int:
        """How many workers are ready here: those named before that have been reached."""
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
        await self._server.stop(grace_seconds)

    async def _start(self) -> StartedRouter:
        address = await self._server.start()
        return StartedRouter(
            address=address, pid=os.getpid(), node_id=ray.get_runtime_context().get_node_id()
        )
