"""Router actor: a RouterServer inside Ray. The only file of router/ that knows Ray.

Owns the node's address, the report of metrics to Ray, a call that ends with the actor, and the end of a supervisor that
hangs.
Clients speak gRPC to the router itself. No request passes through Ray.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import ray
from blockyard.proto.metrics.ray import keep_reporting
from blockyard.proto.naming.code_version import code_version
from blockyard.proto.runtime.grace import DEFAULT_GRACE_SECONDS
from blockyard.proto.runtime.logs import configure_logging
from blockyard.proto.runtime.niceness import take_usual_priority
from blockyard.proto.runtime.sigterm import end_at_sigterm
from blockyard.proto.runtime.tasks import BackgroundTasks
from blockyard.proto.security.loopback import is_every_interface
from blockyard.router.config import RouterConfig, ServedModel
from blockyard.router.supervision import Attempts, SupervisorWatch

logger = logging.getLogger(__name__)

FRESH_SECONDS = 5.0
"""Age of an answer of Ray up to which a router acts on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedRouter:
    """Addresses, process and node of one started router."""

    address: str
    http_address: str
    """Address of the router's HTTP gateway. Empty: it has none."""
    pid: int
    node_id: str
    code: str
    """Version of the code that the process runs."""


class RouterActor:
    """Ray actor with one router, which the supervisor creates. `start` raises what RouterServer.start raises."""

    def __init__(
        self, config: RouterConfig, router_id: str, supervisor: str, check_leader: Callable[[], None]
    ) -> None:
        """`supervisor` is the name of the actor that created this one.

        `check_leader` raises an error if that one does not lead any more.
        """
        end_at_sigterm()
        check_leader()
        # Ray keeps each actor's stderr as a file in the dashboard's Logs tab.
        configure_logging(config.log, router_id=router_id)
        take_usual_priority()
        self._router_id = router_id
        node_host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        host = config.host or node_host
        self._advertise_host = config.advertise_host or (node_host if is_every_interface(host) else host)
        # Imported here: `up` and the supervisor import this class for Ray, and should not load the whole router.
        from blockyard.router.server import RouterServer

        self._server = RouterServer(replace(config, host=host), owns_process=True, router_id=router_id)
        # `start` raises the failure of its task. The other two tasks catch every exception.
        self._tasks = BackgroundTasks(on_failure=None)
        self._starting: asyncio.Task[StartedRouter] | None = None
        self._watch = SupervisorWatch(
            lambda is_silent: asyncio.to_thread(_end_supervisor, supervisor, is_silent)
        )
        self._watching: asyncio.Task[None] | None = None
        self._changing: asyncio.Task[None] | None = None
        """Serves the models that the supervisor has named last."""
        self._attempts = Attempts()
        self._epoch = 0
        """The newest epoch of a supervisor that has called."""

    def __repr__(self) -> str:
        return self._router_id

    async def whereabouts(self) -> tuple[str, int]:
        """Return the actor's node id and process id, by which the supervisor kills it if it hangs."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    async def start(self) -> StartedRouter:
        """Start the server and return where it serves. Idempotent: a supervisor that adopts a running router calls it
        again."""
        if self._starting is None:
            self._starting = self._tasks.start(self._start(), name="start")
        return await asyncio.shield(self._starting)

    async def set_workers(
        self, addresses: Mapping[str, Sequence[str]], models: Sequence[ServedModel], epoch: int
    ) -> int:
        """Set the supervisor's models, the default one first, and the addresses of their workers by the models' ids.

        Models that come or go do so soon after. Return how many workers are ready in this router now. Ignore a
        supervisor of an older epoch: its call was on its way while another one took over.
        """
        if epoch < self._epoch:
            return self._server.num_ready_workers
        self._epoch = epoch
        self._watch.heard()
        for model in models:
            self._server.set_workers(addresses.get(model.id, ()), model.id)
        wanted = tuple(models)
        if wanted != self._server.models and self._changing is None and self._attempts.is_due(wanted):
            self._changing = self._tasks.start(self._change_models(models), name="models")
        return self._server.num_ready_workers

    async def set_models(
        self, models: Sequence[ServedModel], grace_seconds: float, check_leader: Callable[[], None]
    ) -> None:
        """Serve these models and no others. Return once calls for others have ended.

        Raises what `check_leader` raises, if the caller does not lead any more.
        """
        await asyncio.to_thread(check_leader)
        await self._server.set_models(models, grace_seconds=grace_seconds)

    async def _change_models(self, models: Sequence[ServedModel]) -> None:
        try:
            await self._server.set_models(models, grace_seconds=DEFAULT_GRACE_SECONDS)
        except Exception as error:
            self._attempts.failed(tuple(models), error)
        finally:
            self._changing = None

    async def ready_incarnations(self) -> tuple[str, ...]:
        """Return the incarnations of the workers that this router may send requests to."""
        return self._server.ready_incarnations

    async def adapter_names(self) -> frozenset[str]:
        """Return the names of all models' adapters, which a further model may not have."""
        return self._server.adapter_names

    async def refused_models(self) -> Mapping[str, str]:
        """Return the models that this router cannot serve, and why, by their ids. It tries them again."""
        return self._server.refused

    async def refused_workers(self) -> Mapping[str, str]:
        """Return why this router refuses workers, by their incarnations."""
        return self._server.refused_workers

    async def until_stopped(self) -> None:
        """Wait until the router fails. If the actor dies, Ray ends this call within milliseconds.

        Raises RuntimeError if the process lives but the router has failed.
        """
        await self._server.failed.wait()
        raise RuntimeError("the router has failed; its log says why")

    async def stop(self, grace_seconds: float, check_leader: Callable[[], None]) -> None:
        """Refuse new requests and let running ones finish. The caller then ends the actor.

        The call may arrive late. Raises what `check_leader` raises, if the caller does not lead any more.
        """
        await asyncio.to_thread(check_leader)
        if self._watching is not None:
            self._watching.cancel()
        await self._server.stop(grace_seconds)
        await self._tasks.aclose()

    async def _start(self) -> StartedRouter:
        address = await self._server.start()
        reporting = keep_reporting(self._server.metric_source, lambda: self._server.model_readings)
        self._tasks.start(reporting, name="metrics")
        self._watching = self._tasks.start(self._watch.run(), name="supervisor watch")
        return StartedRouter(
            address=self._advertised(address),
            http_address=self._advertised(self._server.http_address),
            pid=os.getpid(),
            node_id=ray.get_runtime_context().get_node_id(),
            code=code_version(),
        )

    def _advertised(self, address: str) -> str:
        return address and f"{self._advertise_host}:{address.rpartition(':')[2]}"


def _end_supervisor(name: str, is_silent: Callable[[], bool]) -> None:
    """Kill the supervisor's process, on any node. Ray starts it again.

    Do nothing if Ray answers late, or if the supervisor has called meanwhile: this router itself was cut off.
    """
    asked_at = time.monotonic()
    supervisor = ray.get_actor(name)
    if is_silent() and time.monotonic() - asked_at < FRESH_SECONDS:
        ray.kill(supervisor, no_restart=False)
