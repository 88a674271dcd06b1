"""Router server: one router process with its parts, its gRPC server, its background work, and its end.

Owns lifetimes, and where worker addresses come from. Those are the config, the supervisor (`set_workers`) and, without
a supervisor, records in the index that workers have signed with the cluster secret. Everything else is in the parts
(composition.py). Runs inside any asyncio loop.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import grpc
from blockyard.proto.index.contract import PrefixIndex, PrefixIndexError
from blockyard.proto.metrics.prometheus import exposition
from blockyard.proto.metrics.readings import Readings
from blockyard.proto.runtime.garbage_collection import kept_out_of_garbage_collection
from blockyard.proto.runtime.tasks import BackgroundTasks
from blockyard.proto.security.loopback import is_loopback
from blockyard.proto.security.tls import listen, server_credentials
from blockyard.proto.v1 import admin_pb2, cluster_pb2, inference_pb2
from blockyard.proto.v1.admin_pb2_grpc import add_AdminServiceServicer_to_server
from blockyard.proto.v1.cluster_pb2_grpc import add_ClusterServiceServicer_to_server
from blockyard.proto.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from blockyard.router.admission.rate_limits import NO_LIMIT
from blockyard.router.admission.token_file import TokenFile
from blockyard.router.calls.bounds import CallBounds
from blockyard.router.calls.exporting import tracing_of
from blockyard.router.calls.gate import CallGate
from blockyard.router.calls.generating import Calls, outputs_a_call
from blockyard.router.calls.intake import Intake
from blockyard.router.cluster.directory import Directory
from blockyard.router.cluster.fleet import Fleet
from blockyard.router.composition import DIRECTORY_SECONDS, build_parts
from blockyard.router.config import RouterConfig
from blockyard.router.generation.generation import RouterParts
from blockyard.router.loop_watch import LoopWatch
from blockyard.router.metric_readings import router_readings, router_source
from blockyard.router.openai.about import AboutRouter
from blockyard.router.openai.gateway import gateway
from blockyard.router.services.admin import AdminService
from blockyard.router.services.cluster import ClusterService
from blockyard.router.services.inference import InferenceService
from blockyard.router.services.interceptor import AuthInterceptor, BoundaryInterceptor
from blockyard.router.services.options import max_message_bytes, server_options
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger(__name__)

HEALTH_SECONDS = 0.2
MAX_DISCOVERED_WORKERS = 1024
"""Most workers found through Redis. A link takes memory and keeps trying to connect, even to a dead address."""
PAGES_A_LOOK = 4
"""Pages of 256 records, as many as the most discovered workers.

Forged records for all 65,535 berths take 64 rounds, and about 40 ms of each second.
"""
READINGS_SECONDS = 1.0
CLOSE_SECONDS = 1.0
"""Time for calls that outlive the grace period to receive their error."""
SERVICES = tuple(
    descriptor.services_by_name[name].full_name
    for descriptor, name in (
        (inference_pb2.DESCRIPTOR, "InferenceService"),
        (cluster_pb2.DESCRIPTOR, "ClusterService"),
        (admin_pb2.DESCRIPTOR, "AdminService"),
    )
)


class RouterServer:
    """Server of one router: `start`, serve, `stop`, each once.

    A background task that fails ends the server, is logged and sets `failed`.
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        owns_process: bool = False,
        router_id: str = "router",
        tracer_provider: "TracerProvider | None" = None,
    ) -> None:
        """`owns_process`: nothing else runs in the process, so the garbage collector may be tuned for this server.

        `router_id` is its name in metrics and traces. `tracer_provider` makes the spans of its requests. Without one,
        they are exported where the environment says (calls/exporting.py).
        """
        self._config = config
        self._router_id = router_id
        self._tracer_provider = tracer_provider
        self.metric_source = router_source(config, router_id)
        self._owns_process = owns_process
        self.failed = asyncio.Event()
        """Set when a background task has failed and nothing is served any more. Only a new process helps."""
        self.loop_watch = LoopWatch(config.loop_tick_seconds)
        self.http_address = ""
        """Address of the gateway once it serves. Empty: none."""
        self.intake = Intake()
        """Bounds requests that have not arrived completely."""
        self._supervised: tuple[str, ...] = ()
        self._listed: dict[PrefixIndex, frozenset[str]] = {}
        """Addresses of the workers that each server of the index lists."""
        self._forged: dict[PrefixIndex, int] = {}
        self.readings: Readings = {}
        """Metrics, at most a second old. Empty until the server serves."""
        self._fleet: Fleet | None = None
        self._stopping = asyncio.Event()
        self._grace_seconds = 0.0
        # Has the one task that `start` begins and `stop` awaits.
        self._tasks = BackgroundTasks(on_failure=None)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Start to serve and return the address "host:port".

        Raises OSError, ValueError or TokenizingError for a model folder that cannot be used, and RuntimeError for a
        port that cannot be bound.
        """
        started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        serving = self._serving = self._tasks.start(self._serve(started), name="router")
        await asyncio.wait((started, serving), return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            started.cancel()
            await serving
        return started.result()

    async def stop(self, grace_seconds: float) -> None:
        """Refuse new requests, report NOT_SERVING, and let running requests finish within the grace period. Then
        close."""
        self._grace_seconds = grace_seconds
        self._stopping.set()
        if self._serving is not None:
            await asyncio.wait((self._serving,))
            error = self._serving.exception()
            if error is not None and not self.failed.is_set():
                raise error

    @property
    def num_ready_workers(self) -> int:
        return len(self._fleet.view.ready()) if self._fleet is not None else 0

    @property
    def ready_incarnations(self) -> tuple[str, ...]:
        """Return the incarnations of the workers that this router may send requests to."""
        return tuple(worker.incarnation for worker in self._fleet.view.ready()) if self._fleet else ()

    def set_workers(self, addresses: Sequence[str]) -> None:
        """Set the supervisor's list of addresses "host:port". The config's and discovered workers stay."""
        self._supervised = tuple(addresses)
        self._tell_fleet()

    async def _serve(self, started: "asyncio.Future[str]") -> None:
        # Read first what an operator may have got wrong: the rest takes seconds.
        config = self._config
        page_token = config.page_token_sha256
        token_file = TokenFile(config.auth_file, page_token_sha256=page_token) if config.auth_file else None
        credentials = server_credentials(self._config.tls)
        gate = CallGate(None if token_file is None else lambda: token_file.tokens)
        async with AsyncExitStack() as stack:
            parts, shards = await build_parts(self._config, stack)
            if self._owns_process:
                stack.enter_context(kept_out_of_garbage_collection())
            self._fleet = parts.fleet
            self._tell_fleet()
            # The group is inside, because the caller of `start` must not get an error of `_listen` in a group.
            bounds = CallBounds(
                ledger=parts.ledger,
                default_timeout_seconds=config.default_timeout_seconds,
                limit_of_tenant=lambda tenant: (
                    NO_LIMIT if token_file is None else token_file.tokens.limit_of_tenant(tenant)
                ),
            )
            calls = Calls(
                parts,
                bounds,
                tracing=await stack.enter_async_context(tracing_of(self._router_id, self._tracer_provider)),
                slow_reader_seconds=config.slow_reader_seconds,
                outputs_a_call=outputs_a_call(config.max_requests),
            )
            await parts.adapters.refresh()
            listening = self._listen(calls, gate, credentials)
            async with (
                listening as (address, health_service),
                gateway(calls, gate, self.intake, self._config, self._about()) as (http_address, batches),
                asyncio.TaskGroup() as tasks,
            ):
                self.http_address = http_address
                duties = [
                    parts.fleet.run(),
                    parts.adapters.follow(),
                    self._keep_health(parts, health_service),
                    self._keep_readings(parts),
                    self.loop_watch.run(),
                ]
                if config.discovers_workers:
                    duties += [self._follow_directory(index, parts.fleet) for index in shards]
                if batches is not None:
                    duties.append(batches.run())
                if token_file is not None:
                    duties.append(token_file.follow())
                background = [tasks.create_task(self._background(duty)) for duty in duties]
                started.set_result(address)
                logger.info("router serving %s on %s", parts.facts.name, address)
                _warn_of_openness(self._config)
                await self._stopping.wait()
                await self._drain(parts, health_service)
                for task in background:
                    task.cancel()
        logger.info("router stopped; event loop: %s", self.loop_watch.seen)

    def _about(self) -> AboutRouter:
        return AboutRouter(
            version=_version(),
            started=int(time.time()),
            exposition=lambda: exposition(self.metric_source, self.readings),
        )

    async def _background(self, duty: Coroutine[None, None, None]) -> None:
        try:
            await duty
        except Exception:
            logger.critical("the router has failed and stopped serving", exc_info=True)
            self.failed.set()
            raise

    @asynccontextmanager
    async def _listen(
        self, calls: Calls, gate: CallGate, credentials: grpc.ServerCredentials | None
    ) -> AsyncIterator[tuple[str, health.aio.HealthServicer]]:
        config = self._config
        # Without `reuse_port` a taken port must be an error, not a share of its traffic.
        facts = calls.parts.facts
        text_bytes = facts.max_text_bytes(facts.max_position_embeddings)
        options = (*server_options(text_bytes=text_bytes), ("grpc.so_reuseport", int(config.reuse_port)))
        boundary = BoundaryInterceptor(gate, self.intake, message_bytes=max_message_bytes(text_bytes))
        interceptors: list[grpc.aio.ServerInterceptor] = [boundary]
        if config.auth_file is not None:
            interceptors.insert(0, AuthInterceptor(gate))
        server = grpc.aio.server(interceptors=interceptors, options=options)
        cluster = ClusterService(
            calls.parts, calls.bounds, cluster=config.cluster, version=_version(), policy=config.policy
        )
        add_InferenceServiceServicer_to_server(InferenceService(calls), server)  # type: ignore[no-untyped-call]
        add_ClusterServiceServicer_to_server(cluster, server)  # type: ignore[no-untyped-call]
        add_AdminServiceServicer_to_server(AdminService(calls.parts, calls.bounds), server)  # type: ignore[no-untyped-call]
        health_service = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
        reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        try:
            port = listen(server, f"{config.host}:{config.port}", credentials)
        except RuntimeError:
            raise RuntimeError(f"cannot listen on {config.host}:{config.port}: is the port taken?") from None
        await server.start()
        try:
            yield f"{config.host}:{port}", health_service
        finally:
            await server.stop(CLOSE_SECONDS)

    async def _drain(self, parts: RouterParts, health_service: health.aio.HealthServicer) -> None:
        parts.registry.is_draining = True
        await health_service.enter_graceful_shutdown()
        try:
            async with asyncio.timeout(self._grace_seconds):
                await parts.registry.until_idle()
        except TimeoutError:
            logger.warning(
                "%d requests were still running after the grace period", len(parts.registry.records())
            )

    async def _keep_health(self, parts: RouterParts, health_service: health.aio.HealthServicer) -> None:
        """Report SERVING over gRPC's health service while a worker is ready. Poll, because a worker's silence is no
        event."""
        reported = None
        while True:
            is_ready = bool(parts.fleet.view.ready())
            if is_ready is not reported and not parts.registry.is_draining:
                reported = is_ready
                response = health_pb2.HealthCheckResponse
                status = response.SERVING if is_ready else response.NOT_SERVING
                for service in ("", *SERVICES):
                    await health_service.set(service, status)
            await asyncio.sleep(HEALTH_SECONDS)

    async def _keep_readings(self, parts: RouterParts) -> None:
        while True:
            self.readings = await router_readings(parts, self._config, self.loop_watch.lag)
            await asyncio.sleep(READINGS_SECONDS)

    async def _follow_directory(self, index: PrefixIndex, fleet: Fleet) -> None:
        """Tell the fleet the addresses of workers with signed records in the index on one server, PAGES_A_LOOK pages at
        a time. A worker that one of several servers lists is known.

        A record of an ended worker may still be there, or be written back. No other process can pass for that worker
        (tls.py).
        """
        directory = Directory(
            secret=self._config.cluster_secret,
            cluster=self._config.cluster,
            max_addresses=MAX_DISCOVERED_WORKERS,
            has_failed=fleet.has_failed,
        )
        # A cancellation at the moment of a time-out may be lost in the Redis client, so it alone must not end this.
        while not self._stopping.is_set():
            try:
                async with asyncio.timeout(DIRECTORY_SECONDS):
                    for _ in range(PAGES_A_LOOK):
                        directory.take(await index.directory_page(directory.next_after))
                        if directory.next_after == 0:
                            break
            except (PrefixIndexError, TimeoutError):
                logger.debug("the index returned no list of workers")
            self._note_forged(index, directory.num_forged)
            self._listed[index] = directory.addresses
            self._tell_fleet()
            await asyncio.sleep(DIRECTORY_SECONDS)

    def _note_forged(self, index: PrefixIndex, number: int) -> None:
        if number and not self._forged.get(index):
            logger.error("%d records of workers in Redis are not signed by this cluster: ignored", number)
        self._forged[index] = number

    def _tell_fleet(self) -> None:
        if self._fleet is not None:
            listed = (address for addresses in self._listed.values() for address in addresses)
            self._fleet.set_addresses({*self._config.workers, *self._supervised, *listed})


def _warn_of_openness(config: RouterConfig) -> None:
    if is_loopback(config.host):
        return
    if config.auth_file is None:
        logger.warning("no auth file: anyone who reaches %s may call every method", config.host)
    if config.tls is None:
        logger.warning("no TLS: prompts and tokens cross %s in plaintext", config.host)


def _version() -> str:
    try:
        return version("blockyard")
    except PackageNotFoundError:
        return "unknown"
