"""UpOptions: the cluster to start, as one value for `up`, its dry run and the demo.

Owns its defaults, and refuses values that are wrong on any machine. Does not own the options that make it
(up_options.py), nor the checks that need the machine or Ray (lifecycle/preflight.py, lifecycle/shape.py).
"""

from dataclasses import dataclass, field

from blockyard.deploy.machine import state
from blockyard.deploy.machine.redis_server import configured_redis_url
from blockyard.deploy.machine.shared_port import MAX_PORT
from blockyard.deploy.ray.head import host_and_port
from blockyard.deploy.settings.security import SecurityOptions
from blockyard.deploy.supervision.replicas import DEFAULT_HUNG_SECONDS
from blockyard.proto.index.redis import check_url
from blockyard.proto.metrics.readings import MetricNames
from blockyard.proto.naming.model_files import model_names
from blockyard.proto.runtime.logs import LogConfig
from blockyard.proto.security.loopback import LOOPBACK, is_loopback
from blockyard.router.config import RouterLimits
from blockyard.router.placement.config import PlacementConfig, PolicyName
from blockyard.router.tokenizing.model_facts import GenerationConfig
from blockyard.worker.config import EngineConfig, WorkerLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """The cluster to start. RouterConfig describes the fields of routers. Raises ValueError for bad values."""

    engine: EngineConfig
    model_names: tuple[str, ...] = ()
    """If empty, model_facts.py names the model."""
    generation_config: GenerationConfig = "auto"
    chat_template: str | None = None
    """Text of the template, not its file."""
    download_dir: str | None = None
    """Folder of this machine for files of the hub. None: HF_HUB_CACHE or HF_HOME."""
    cluster: str = "default"
    num_workers: int | None = None
    """None: one for each GPU of the Ray cluster, or one on a machine without any."""
    num_routers: int = 1
    policy: PolicyName = "prefix"
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    limits: RouterLimits = field(default_factory=RouterLimits)
    worker_limits: WorkerLimits = field(default_factory=WorkerLimits)
    metrics_names: MetricNames = "blockyard"
    log: LogConfig = field(default_factory=LogConfig)
    security: SecurityOptions = field(default_factory=SecurityOptions)
    cpus_per_worker: float | None = None
    """None: the cluster's CPUs in equal shares."""
    host: str = LOOPBACK
    """Interface that routers bind on the node where each runs; an IPv6 address in brackets."""
    router_port: int = 0
    """0 takes a free one."""
    http_port: int | None = None
    """Port of OpenAI's API. 0 takes a free one, None opens none."""
    movable_ports: frozenset[str] = frozenset()
    """Names of the ports that the user did not ask for (router_port, http_port). The next free port replaces a taken
    one."""
    cors_origins: tuple[str, ...] = ()
    separate_ports: bool = False
    """Each router has a port of its own, counted from the first one's. Otherwise all share one port, and the kernel
    distributes connections."""
    address: str | None = None
    """An existing Ray cluster to join; None starts a local one."""
    redis_url: str | None = None
    """Redis for workers, which write. None starts a private Redis."""
    router_redis_url: str | None = None
    """Redis for routers, which only read. None: the workers' URL."""
    ships_code: bool = False
    """Send this machine's package to the nodes, in place of the installed one."""
    router_resource: str | None = None
    """A Ray resource. Routers run only on nodes that have it."""
    hung_seconds: float = DEFAULT_HUNG_SECONDS
    """A worker or router that does not answer its supervisor for this time is killed and restarted."""
    live_page_in_metrics_tab: bool = False
    """Show the live page in place of Ray's own charts, in the Ray that is started here."""

    def __post_init__(self) -> None:
        state.checked_name(self.cluster)
        if self.num_workers is not None and self.num_workers < 1:
            raise ValueError(f"a cluster needs at least one worker, not {self.num_workers}")
        if not all(self.model_names):
            raise ValueError("a model's name must not be empty")
        if self.num_routers < 1:
            raise ValueError(f"a cluster needs at least one router, not {self.num_routers}")
        if not self.hung_seconds > 0:
            raise ValueError(f"hung_seconds must be above 0, not {self.hung_seconds:g}")
        if self.address is not None:
            host_and_port(self.address)
            if self.download_dir is not None:
                raise ValueError(
                    "--download-dir is a folder of this machine: for a Ray cluster of your own set HF_HUB_CACHE "
                    "where its nodes start"
                )
        for url in (self.given_redis_url, self.router_redis_url):
            if url is not None:
                check_url(url)
        for first_port in (self.router_port, self.http_port or 0):
            last_port = first_port + self.num_routers - 1
            if self.separate_ports and first_port and last_port > MAX_PORT:
                raise ValueError(
                    f"{self.num_routers} routers with a port each from {first_port} on would need ports up to "
                    f"{last_port}: {MAX_PORT} is the last"
                )

    @property
    def served_names(self) -> tuple[str, ...]:
        """The model's id for clients, then its aliases."""
        return model_names(self.engine.model, self.model_names)

    @property
    def exposure(self) -> str | None:
        """A warning of what strangers may do. None if only the routers' own machines reach them, or if clients need a
        token over TLS."""
        if is_loopback(self.host):
            return None
        if self.security.auth_file is None:
            return (
                f"WHOEVER REACHES {self.host} MAY CALL EVERYTHING, administration included: give --auth-file "
                "(`blockyard token new`), or keep to loopback"
            )
        if self.security.tls is None:
            return f"prompts and tokens go over {self.host} in plaintext: give --tls-cert and --tls-key"
        return None

    @property
    def num_ports(self) -> int:
        """Number of consecutive ports of each kind that the routers take."""
        return self.num_routers if self.separate_ports else 1

    @property
    def given_redis_url(self) -> str | None:
        """URL of the operator's Redis. None: a private one is started."""
        return self.redis_url or configured_redis_url()
