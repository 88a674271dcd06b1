"""Router server: one router process with its models, its gRPC server, its background work, and its end.

Owns lifetimes, and the models and worker addresses that the supervisor sets. Everything else is in the groups of the
models (model_groups.py) and in their parts (composition.py). Runs inside any asyncio loop.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import grpc
from blockyard.proto.metrics.prometheus import exposition
from blockyard.proto.metrics.readings import LabelledReadings, Readings
from blockyard.proto.runtime.garbage_collection import kept_out_of_garbage_collection
from blockyard.proto.runtime.tasks import BackgroundTasks
from blockyard.proto.security.loopback import is_loopback
from blockyard.proto.security.tls import TlsWatch, listen, server_credentials
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
from blockyard.router.cluster.worker_view import LinkState
from blockyard.router.composition import build_group, build_shared
from blockyard.router.config import RouterConfig, ServedModel
from blockyard.router.generation.registry import RequestRegistry
from blockyard.router.loop_watch import LoopWatch
from blockyard.router.metric_readings import router_readings, router_source
from blockyard.router.model_groups import ModelGroups
from blockyard.router.openai.about import AboutRouter
from blockyard.router.openai.gateway import gateway
from blockyard.router.services.admin import AdminService
from blockyard.router.services.cluster import ClusterService
from blockyard.router.services.inference import InferenceService
from blockyard.router.services.interceptor import AuthInterceptor, BoundaryInterceptor
from blockyard.router.services.options import max_message_bytes, server_options
from blockyard.router.supervision import Attempts
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger(__name__)

HEALTH_SECONDS = 0.2
READINGS_SECONDS = 1.0
RENEW_SECONDS = 0.5
"""Time between two checks whether the workers of a model have other files than the router."""
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
        self._supervised: Mapping[str, tuple[str, ...]] = {}
        """Addresses of the supervisor's workers, by the id of their model."""
        self._changing = asyncio.Lock()
        """Held while models come and go."""
        self.refused: Mapping[str, str] = {}
        """Why models of the last `set_models` could not be built, by their ids."""
        self.outdated: dict[str, Attempts] = defaultdict(Attempts)
        """Attempts to build models anew whose workers have other files, by the models' ids."""
        self.model_readings: LabelledReadings = ()
        """Metrics, at most a second old. Empty until the server serves."""
        self._groups: ModelGroups | None = None
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
    def readings(self) -> Readings:
        """Return the metrics of the default model, and those of the whole router."""
        return self.model_readings[0][1] if self.model_readings else {}

    @property
    def num_ready_workers(self) -> int:
        return self._groups.num_ready_workers if self._groups is not None else 0

    @property
    def ready_incarnations(self) -> tuple[str, ...]:
        """Return the incarnations of the workers that this router may send requests to."""
        groups = self._groups or ()
        return tuple(worker.incarnation for group in groups for worker in group.parts.fleet.view.ready())

    @property
    def refused_workers(self) -> Mapping[str, str]:
        """Return why this router refuses workers, by their incarnations."""
        views = [worker for group in self._groups or () for worker in group.parts.fleet.view.workers()]
        return {
            worker.incarnation: worker.reason
            for worker in views
            if worker.link is LinkState.REFUSED and worker.hello is not None
        }

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """Return the models that are served now, the default one first."""
        return tuple(group.model for group in self._groups or ())

    @property
    def adapter_names(self) -> frozenset[str]:
        """Return the names of all models' adapters, as far as this router knows them."""
        return frozenset() if self._groups is None else self._groups.adapter_names

    @property
    def model_ids(self) -> tuple[str, ...]:
        return tuple(model.id for model in self.models)

    def set_workers(self, addresses: Sequence[str], model: str | None = None) -> None:
        """Set the supervisor's list of addresses "host:port" for a model. The config's and discovered workers stay.

        Without `model` the default one is meant.
        """
        model = (self.models or self._config.models)[0].id if model is None else model
        self._supervised = {**self._supervised, model: tuple(addresses)}
        self._tell_groups()

    async def set_models(self, models: Sequence[ServedModel], *, grace_seconds: float) -> None:
        """Serve exactly these models, the default one first. Return once new ones are served and others are gone.

        A model that goes takes no new call at once, and its running calls have the grace period. Raises what building
        a model raises. The other changes are then made all the same, but the last model that works stays.
        """
        assert models, "a router serves at least one model"
        async with self._changing:
            groups = self._groups
            if groups is None:
                return
            self._supervised = {model.id: self._supervised.get(model.id, ()) for model in models}
            # First what is new, because a router without any model could answer nothing.
            new = [model for model in models if model not in self.models]
            results = await asyncio.gather(
                *(groups.add(model, grace_seconds) for model in new), return_exceptions=True
            )
            self.refused = {
                model.id: str(error)
                for model, error in zip(new, results, strict=True)
                if isinstance(error, Exception)
            }
            groups.put_in_order(model.id for model in models)
            self._tell_groups()
            gone = [name for name in self.model_ids if name not in self._supervised]
            if len(gone) == len(groups):
                gone = gone[1:]
            await asyncio.gather(*(groups.remove(name, grace_seconds) for name in gone))
            for error in results:
                if isinstance(error, BaseException):
                    raise error

    async def _serve(self, started: "asyncio.Future[str]") -> None:
        # Read first what an operator may have got wrong: the rest takes seconds.
        config = self._config
        page_token = config.page_token_sha256
        token_file = TokenFile(config.auth_file, page_token_sha256=page_token) if config.auth_file else None
        credentials = server_credentials(self._config.tls)
        watches = [TlsWatch(tls) for tls in (config.tls, config.session_tls) if tls is not None]
        gate = (
            CallGate(None)
            if token_file is None
            else CallGate(lambda: token_file.tokens, lambda: token_file.suspended)
        )

        def access() -> Readings:
            return {
                "refused_calls": dict(gate.refused),
                "auth_file_valid": int(token_file is None or token_file.is_good),
                "tls_files_valid": int(all(watch.are_good() for watch in watches)),
            }

        async with AsyncExitStack() as stack:
            groups = await self._built_groups(stack)
            if self._owns_process:
                stack.enter_context(kept_out_of_garbage_collection())
            self._groups = groups
            self._tell_groups()
            # The group is inside, because the caller of `start` must not get an error of `_listen` in a group.
            bounds = CallBounds(
                default_timeout_seconds=config.default_timeout_seconds,
                limit_of_tenant=lambda tenant: (
                    NO_LIMIT if token_file is None else token_file.tokens.limit_of_tenant(tenant)
                ),
            )
            calls = Calls(
                groups,
                bounds,
                tracing=await stack.enter_async_context(tracing_of(self._router_id, self._tracer_provider)),
                slow_reader_seconds=config.slow_reader_seconds,
                outputs_a_call=outputs_a_call(config.max_requests),
            )
            listening = self._listen(calls, gate, credentials)
            async with (
                listening as (address, health_service),
                gateway(calls, gate, self.intake, self._config, self._about()) as (http_address, batches),
                asyncio.TaskGroup() as tasks,
            ):
                self.http_address = http_address
                duties = [
                    groups.raise_failure(),
                    self._keep_health(groups, health_service),
                    self._renew_outdated(groups),
                    self._keep_readings(groups, access),
                    self.loop_watch.run(),
                ]
                if batches is not None:
                    duties.append(batches.run())
                if token_file is not None:
                    duties.append(token_file.follow())
                background = [tasks.create_task(self._background(duty)) for duty in duties]
                started.set_result(address)
                logger.info("router serving %s on %s", ",".join(self.model_ids), address)
                _warn_of_openness(self._config)
                await self._stopping.wait()
                await self._drain(groups.registry, health_service)
                groups.stop()
                for task in background:
                    task.cancel()
        logger.info("router stopped; event loop: %s", self.loop_watch.seen)

    async def _built_groups(self, stack: AsyncExitStack) -> ModelGroups:
        """Build the group of each model in the config. Raises what building the first wrong one raises."""
        config = self._config
        shared = build_shared(config, stack)
        groups = await stack.enter_async_context(
            ModelGroups(
                partial(build_group, shared),
                max_requests=config.max_requests,
                max_tokens=config.max_tokens_admitted,
            )
        )
        for model in config.models:
            await groups.add(model)
        return groups

    def _tell_groups(self) -> None:
        for group in self._groups or ():
            group.set_workers(self._supervised.get(group.model.id, ()))

    def _about(self) -> AboutRouter:
        return AboutRouter(
            version=_version(),
            started=int(time.time()),
            exposition=lambda: exposition(self.metric_source, self.model_readings),
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
        text_bytes = calls.groups.max_text_bytes
        options = (*server_options(text_bytes=text_bytes), ("grpc.so_reuseport", int(config.reuse_port)))
        boundary = BoundaryInterceptor(gate, self.intake, message_bytes=max_message_bytes(text_bytes))
        interceptors: list[grpc.aio.ServerInterceptor] = [boundary]
        if config.auth_file is not None:
            interceptors.insert(0, AuthInterceptor(gate))
        server = grpc.aio.server(interceptors=interceptors, options=options)
        cluster = ClusterService(
            calls.groups, calls.bounds, cluster=config.cluster, version=_version(), policy=config.policy
        )
        add_InferenceServiceServicer_to_server(InferenceService(calls), server)  # type: ignore[no-untyped-call]
        add_ClusterServiceServicer_to_server(cluster, server)  # type: ignore[no-untyped-call]
        add_AdminServiceServicer_to_server(AdminService(calls.groups, calls.bounds), server)  # type: ignore[no-untyped-call]
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

    async def _drain(self, registry: RequestRegistry, health_service: health.aio.HealthServicer) -> None:
        registry.is_draining = True
        await health_service.enter_graceful_shutdown()
        try:
            async with asyncio.timeout(self._grace_seconds):
                await registry.until_idle()
        except TimeoutError:
            logger.warning("%d requests were still running after the grace period", len(registry.records()))

    async def _keep_health(self, groups: ModelGroups, health_service: health.aio.HealthServicer) -> None:
        """Report SERVING over gRPC's health service while a worker of any model is ready, and for each model, under its
        names, while one of its own is. Poll, because a worker's silence is no event."""
        response, reported = health_pb2.HealthCheckResponse, dict[str, object]()
        while True:
            is_ready = dict.fromkeys(("", *SERVICES), groups.num_ready_workers > 0)
            for group in groups:
                is_ready |= dict.fromkeys(group.model.names, group.num_ready_workers > 0)
            statuses = {
                service: response.SERVING if ready else response.NOT_SERVING
                for service, ready in is_ready.items()
            }
            gone = dict.fromkeys(reported.keys() - statuses.keys(), response.SERVICE_UNKNOWN)
            for service, status in (statuses | gone).items():
                if reported.get(service) != status and not groups.registry.is_draining:
                    reported[service] = status
                    await health_service.set(service, status)
            await asyncio.sleep(HEALTH_SECONDS)

    async def _renew_outdated(self, groups: ModelGroups) -> None:
        """Build a model anew when none of its workers serves, and some have other files than this router.

        The router then reads its own files again, and takes the identity of the first worker. Waiting calls get an
        error."""
        attempts = self.outdated
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            async with self._changing:
                for group in groups:
                    model, fleet = group.model, group.parts.fleet
                    if group.num_ready_workers:
                        attempts.pop(model.id, None)
                    if not fleet.is_outdated() or not attempts[model.id].is_due((model,)):
                        continue
                    logger.warning(
                        "all workers of %s have other files than this router: reading them", model.id
                    )
                    failure: Exception | None = None
                    try:
                        await groups.add(model, CLOSE_SECONDS)
                        self._tell_groups()
                    except (
                        Exception
                    ) as error:  # The files may be half copied: the next attempt reads them again.
                        failure = error
                    attempts[model.id].failed((model,), failure)

    async def _keep_readings(self, groups: ModelGroups, access: Callable[[], Readings]) -> None:
        while True:
            self.model_readings = await router_readings(groups, self.loop_watch.lag, access())
            await asyncio.sleep(READINGS_SECONDS)


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
