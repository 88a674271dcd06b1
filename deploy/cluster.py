"""Brings a cluster up and takes it down: Redis, Ray, the supervisor, and the state file that remembers them.

Owns the order of things and the undoing of a start that failed or was interrupted. Does not own how each part
runs.

    up:   state file -> private Redis -> Ray head -> supervisor -> workers + routers serve
    down: routers drain, workers say goodbye -> supervisor -> Ray's session -> Redis -> files -> state file
"""

import contextlib
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from blockyard.deploy import on_ray, ray_head, state
from blockyard.deploy.interruption import raise_if_asked, undisturbed
from blockyard.deploy.limits import RouterLimits
from blockyard.deploy.processes import end_session, identify, is_alive, owns_session, session_members
from blockyard.deploy.redis_server import RedisProcess, configured_redis_url, start_private_redis
from blockyard.deploy.security import SecurityOptions, redis_user
from blockyard.deploy.serving import (
    ClusterStartError,
    Progress,
    Report,
    wait_until_all_serve,
    wait_until_connected,
)
from blockyard.deploy.shared_port import MAX_PORT, reserved_port
from blockyard.deploy.state import ClusterState, HeadState, RedisState
from blockyard.router.config import (
    DEFAULT_MAX_BEAM_WIDTH,
    DEFAULT_MAX_OUTPUTS,
    RouterConfig,
)
from blockyard.router.placement_config import PlacementConfig, PolicyName
from blockyard.worker.config import EngineConfig, WorkerConfig
from blockyard.worker.model.config import load_config

if TYPE_CHECKING:
    from blockyard.deploy.supervisor import ClusterSpec

MAX_CPUS_BESIDE_GPU = 4.0
"""A worker with a GPU plans and samples on few threads."""
DRAIN_SECONDS = 5.0
MAX_TEMP_LENGTH = 25
"""A unix socket's path has 107 characters at most; Ray's part and ours take about 80."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """What to bring up."""

    engine: EngineConfig
    model_name: str | None = None
    """What clients call the model; None: its folder's or hub name's last part."""
    cluster: str = "default"
    num_workers: int | None = None
    """None: one for each GPU of the Ray cluster, or one on a machine without any."""
    num_routers: int = 1
    policy: PolicyName = "prefix"
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    max_outputs: int = DEFAULT_MAX_OUTPUTS
    """Of one request (`n`)."""
    max_beam_width: int = DEFAULT_MAX_BEAM_WIDTH
    limits: RouterLimits = field(default_factory=RouterLimits)
    security: SecurityOptions = field(default_factory=SecurityOptions)
    cpus_per_worker: float | None = None
    """None: the cluster's CPUs in equal shares."""
    router_port: int = 0
    """0 takes a free one."""
    separate_ports: bool = False
    """Each router has a port of its own, from that of the first on; else they share it and the kernel deals
    connections out."""
    address: str | None = None
    """An existing Ray cluster to join; None starts a local one."""
    redis_url: str | None = None
    """The workers', who write; None starts a private Redis."""
    router_redis_url: str | None = None
    """The routers', who only read; None: the workers'."""

    def __post_init__(self) -> None:
        state.checked_name(self.cluster)
        if self.num_workers is not None and self.num_workers < 1:
            raise ValueError(f"a cluster needs at least one worker, not {self.num_workers}")
        if self.num_routers < 1:
            raise ValueError(f"a cluster needs at least one router, not {self.num_routers}")
        last_port = self.router_port + self.num_routers - 1
        if self.separate_ports and self.router_port and last_port > MAX_PORT:
            raise ValueError(
                f"{self.num_routers} routers with a port each from {self.router_port} on would need ports up to "
                f"{last_port}: {MAX_PORT} is the last"
            )
        for name in ("max_outputs", "max_beam_width"):
            # The routers refuse it too, but only once Ray runs.
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


def up(options: UpOptions, report: Report = lambda progress: None) -> ClusterState:
    """Returns once every worker and router serves. On any failure, Ctrl-C included, undoes what it has done.

    Raises ClusterStartError, RedisStartError, RayStartError, or ValueError for a cluster that is up
    already or a model that the engine cannot run."""
    _refuse_if_up(options.cluster)
    options.security.check()
    if Path(options.engine.model).is_dir():
        load_config(Path(options.engine.model))
    cluster = ClusterState(
        cluster=options.cluster,
        model=options.model_name or Path(options.engine.model).name,
        secret=secrets.token_hex(32),
        directory=str(_make_directory()),
        starter=identify(os.getpid()),
    )
    state.save(cluster)

    def told(progress: Progress) -> None:
        raise_if_asked()
        report(progress)

    try:
        cluster = _start_redis(cluster, options, told)
        cluster = _start_ray(cluster, options, told)
        cluster = _start_serving(cluster, options, told)
        raise_if_asked()
        return cluster
    except BaseException:
        with undisturbed():
            report(Progress(stage="stopping what was started"))
            down(state.load(options.cluster), drain_seconds=0.0)
        raise


def down(
    cluster: ClusterState,
    *,
    drain_seconds: float = DRAIN_SECONDS,
    forget: bool = False,
    report: Report = lambda progress: None,
) -> None:
    """Stops what `up` started, by pid, and removes its files. On a cluster that we joined only our actors
    end, and it must answer."""
    report(Progress(stage="saying goodbye to routers and workers"))
    if not forget:
        _say_goodbye(cluster, drain_seconds)
    report(Progress(stage="stopping processes"))
    if cluster.head is not None:
        end_session(cluster.head.session, cluster.head.processes)
    if cluster.redis is not None and identify(cluster.redis.process.pid) == cluster.redis.process:
        _redis_process(cluster, cluster.redis).stop()
    if cluster.directory is not None:
        shutil.rmtree(cluster.directory, ignore_errors=True)
    state.forget(cluster.cluster)


def leftovers(cluster: ClusterState) -> list[str]:
    """What of a cluster that is down is still there: nothing, or `down` has failed."""
    left = [f"process {process.pid}" for process in cluster.recorded_processes() if is_alive(process)]
    if cluster.head is not None:
        left += [f"process {process.pid}" for process in session_members(cluster.head.session)]
    paths = (cluster.directory and Path(cluster.directory), state.state_path(cluster.cluster))
    return sorted({*left, *(str(path) for path in paths if path and path.exists())})


def cpus_per_worker(node_cpus: Sequence[float], num_workers: int) -> float:
    """As many whole CPUs as let all workers fit on the nodes, for Ray sets a worker's threads from them;
    where there are more workers than CPUs, a part of one."""
    for share in range(int(max(node_cpus)), 0, -1):
        if sum(int(cpus // share) for cpus in node_cpus) >= num_workers:
            return float(share)
    return min(node_cpus) / math.ceil(num_workers / len(node_cpus))


def _say_goodbye(cluster: ClusterState, drain_seconds: float) -> None:
    if cluster.ray_address is None:
        return
    if cluster.head is None:
        with on_ray.driver(cluster):
            on_ray.shut_down(drain_seconds)
    elif owns_session(cluster.head.session, cluster.head.processes):
        # A Ray that no longer answers must not keep us from ending its processes.
        with contextlib.suppress(Exception), on_ray.driver(cluster):
            on_ray.shut_down(drain_seconds)


def _refuse_if_up(cluster: str) -> None:
    """A state file whose processes have all gone is what a crash left: it is tidied away."""
    try:
        existing = state.load(cluster)
    except state.NoSuchClusterError:
        return
    if existing.anything_alive():
        raise ValueError(
            f"cluster {cluster!r} is up already: use it, or `blockyard down --cluster {cluster}`"
        )
    if existing.directory is not None:
        shutil.rmtree(existing.directory, ignore_errors=True)
    state.forget(cluster)


def _make_directory() -> Path:
    """Short enough for the sockets that Ray makes in it, whatever TMPDIR says."""
    parent = tempfile.gettempdir()
    directory = Path(tempfile.mkdtemp(prefix="by-", dir=parent if len(parent) <= MAX_TEMP_LENGTH else "/tmp"))
    return directory.resolve()


def _start_redis(cluster: ClusterState, options: UpOptions, report: Report) -> ClusterState:
    url = options.redis_url or configured_redis_url()
    if url is not None:
        return _saved(replace(cluster, redis_url=url, router_redis_url=options.router_redis_url or url))
    report(Progress(stage="starting Redis"))
    assert cluster.directory is not None
    worker, router = redis_user("worker", cluster.cluster), redis_user("router", cluster.cluster)
    server = start_private_redis(
        Path(cluster.directory) / "redis", password=secrets.token_hex(16), users=(worker, router)
    )
    process = identify(server.pid)
    assert process is not None
    redis = RedisState(process=process, port=server.port, log_path=str(server.log_path))
    return _saved(
        replace(cluster, redis_url=server.url_of(worker), router_redis_url=server.url_of(router), redis=redis)
    )


def _start_ray(cluster: ClusterState, options: UpOptions, report: Report) -> ClusterState:
    if options.address is not None:
        # Remembered only once it has answered: nothing of ours is there before.
        return replace(cluster, ray_address=options.address)
    stage = Progress(stage="starting Ray and its dashboard")
    report(stage)
    assert cluster.directory is not None
    head = ray_head.start_head(
        Path(cluster.directory),
        num_cpus=len(os.sched_getaffinity(0)),
        spawned=lambda session: state.save(replace(cluster, head=_head_state(session))),
        waiting=lambda: report(stage),
    )
    return _saved(
        replace(
            cluster,
            ray_address=head.address,
            ray_token_path=str(head.token_path),
            head=_head_state(head.session),
        )
    )


def _head_state(session: int) -> HeadState:
    return HeadState(session=session, processes=tuple(session_members(session)))


def _start_serving(cluster: ClusterState, options: UpOptions, report: Report) -> ClusterState:
    with on_ray.driver(cluster) as info:
        state.save(cluster)
        hardware = on_ray.hardware()
        num_workers, num_gpus = _workers_to_place(options, hardware.num_gpus)
        share = options.cpus_per_worker or cpus_per_worker(hardware.node_cpus, num_workers)
        num_cpus = min(share, MAX_CPUS_BESIDE_GPU) if num_gpus else share
        dashboard = info.get("webui_url")
        cluster = _saved(
            replace(
                cluster,
                num_workers=num_workers,
                dashboard_url=f"http://{dashboard}" if dashboard else None,
                metrics_port=info.get("metrics_export_port"),
                logs_directory=str(Path(info["session_dir"]) / "logs"),
            )
        )
        spec = _spec(cluster, options, num_workers, num_gpus, num_cpus)
        with _router_port(spec.router) as port:
            on_ray.create_supervisor(replace(spec, router=replace(spec.router, port=port)))
            routers = wait_until_all_serve(report)
        cluster = _saved(replace(cluster, routers=routers))
        wait_until_connected(num_workers, report)
    return cluster


def _router_port(router: RouterConfig) -> contextlib.AbstractContextManager[int]:
    """What the supervisor gives out: one that all share is chosen here, so that those on other nodes share it too."""
    return (
        reserved_port(router.host, router.port) if router.reuse_port else contextlib.nullcontext(router.port)
    )


def _workers_to_place(options: UpOptions, gpus_of_cluster: float) -> tuple[int, float]:
    """How many, and how many GPUs each takes."""
    if options.engine.device == "cpu" or gpus_of_cluster < 1:
        if options.engine.device == "cuda":
            raise ClusterStartError("--device cuda, but the Ray cluster has no GPU")
        return options.num_workers or 1, 0.0
    return options.num_workers or int(gpus_of_cluster), 1.0


def _spec(
    cluster: ClusterState, options: UpOptions, num_workers: int, num_gpus: float, num_cpus: float
) -> "ClusterSpec":
    from blockyard.deploy.supervisor import ClusterSpec

    # On a cluster of several nodes everyone is reached by the address of the node it lands on.
    host = "127.0.0.1" if options.address is None else ""
    worker = WorkerConfig(
        engine=options.engine,
        stall_seconds=options.limits.stall_seconds,
        cluster=cluster.cluster,
        cluster_secret=cluster.secret,
        session_tls=options.security.session_tls,
        host=host,
        redis_url=cluster.redis_url,
    )
    router = RouterConfig(
        model=options.engine.model,
        model_name=options.model_name,
        cluster=cluster.cluster,
        cluster_secret=cluster.secret,
        host=host,
        port=options.router_port,
        reuse_port=options.num_routers > 1 and not options.separate_ports,
        redis_url=cluster.router_redis_url,
        auth_file=options.security.auth_file,
        tls=options.security.tls,
        session_tls=options.security.session_tls,
        policy=options.policy,
        placement=options.placement,
        max_outputs=options.max_outputs,
        max_beam_width=options.max_beam_width,
        **options.limits.as_settings(),
    )
    return ClusterSpec(
        namespace=on_ray.namespace(cluster.cluster),
        worker=worker,
        num_workers=num_workers,
        num_cpus_per_worker=num_cpus,
        num_gpus_per_worker=num_gpus,
        router=router,
        num_routers=options.num_routers,
    )


def _redis_process(cluster: ClusterState, redis: RedisState) -> RedisProcess:
    return RedisProcess(
        url=cluster.redis_url or "", port=redis.port, pid=redis.process.pid, log_path=Path(redis.log_path)
    )


def _saved(cluster: ClusterState) -> ClusterState:
    state.save(cluster)
    return cluster
