"""What to bring up: the one value that `up`, its dry run and the demo are given.

Owns its defaults, and the refusal of values that cannot be whatever the machine is like. Does not own the options that
make it (up_options.py), nor what only the machine or Ray knows (lifecycle/preflight.py, lifecycle/shape.py).
"""

from dataclasses import dataclass, field

from blockyard.deploy.machine import state
from blockyard.deploy.machine.redis_server import configured_redis_url
from blockyard.deploy.ray.head import host_and_port
from blockyard.deploy.settings.limits import RouterLimits, WorkerLimits
from blockyard.deploy.settings.security import SecurityOptions
from blockyard.deploy.supervision.replicas import DEFAULT_HUNG_SECONDS
from blockyard.proto.index.redis import check_url
from blockyard.proto.limits import MAX_PORT
from blockyard.proto.metrics.readings import MetricNames
from blockyard.proto.naming.model_files import model_names
from blockyard.proto.runtime.logs import LogConfig
from blockyard.proto.security.loopback import LOOPBACK, is_loopback
from blockyard.router.config import DEFAULT_MAX_BEAM_WIDTH, DEFAULT_MAX_OUTPUTS
from blockyard.router.placement.config import PlacementConfig, PolicyName
from blockyard.router.tokenizing.model_facts import GenerationConfig
from blockyard.worker.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """What to bring up."""

    engine: EngineConfig
    model_names: tuple[str, ...] = ()
    """Names of the model for clients: its id, then aliases. If empty, model_facts.py names it."""
    generation_config: GenerationConfig = "auto"
    """Whether the sampling defaults of the model's generation_config.json apply."""
    chat_template: str | None = None
    """The text of a Jinja template that replaces the model's own."""
    download_dir: str | None = None
    """Where files of the hub are kept on this machine. None: where HF_HUB_CACHE or HF_HOME says."""
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
    worker_limits: WorkerLimits = field(default_factory=WorkerLimits)
    metrics_names: MetricNames = "blockyard"
    """`vllm` adds vLLM's names at the gateways' /metrics."""
    log: LogConfig = field(default_factory=LogConfig)
    security: SecurityOptions = field(default_factory=SecurityOptions)
    cpus_per_worker: float | None = None
    """None: the cluster's CPUs in equal shares."""
    host: str = LOOPBACK
    """The interface that routers bind, of whatever node they land on; an IPv6 address in brackets."""
    router_port: int = 0
    """0 takes a free one."""
    http_port: int | None = None
    """Of the routers' gateways (OpenAI's API); 0 takes a free one, None opens none."""
    movable_ports: frozenset[str] = frozenset()
    """Holds router_port or http_port if nobody asked for it: the next free port then replaces a taken one."""
    cors_origins: tuple[str, ...] = ()
    """Scripts of web pages from these origins may call the gateways."""
    separate_ports: bool = False
    """Each router has a port of its own, from that of the first on; else they share it and the kernel deals
    connections out."""
    address: str | None = None
    """An existing Ray cluster to join; None starts a local one."""
    redis_url: str | None = None
    """The workers', who write; None starts a private Redis."""
    router_redis_url: str | None = None
    """The routers', who only read; None: the workers'."""
    ships_code: bool = False
    """Nodes take the package from here, whatever they have."""
    router_resource: str | None = None
    """A Ray resource: routers run only where there is some of it."""
    hung_seconds: float = DEFAULT_HUNG_SECONDS
    """A worker or router that answers its supervisor nothing for so long is killed and started again."""
    live_page_in_metrics_tab: bool = False
    """Of the Ray that is started here; in place of Ray's own charts."""

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
        for name in ("max_outputs", "max_beam_width"):
            # The routers refuse it too, but only once Ray runs.
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    @property
    def served_names(self) -> tuple[str, ...]:
        """Its id, then aliases."""
        return model_names(self.engine.model, self.model_names)

    @property
    def exposure(self) -> str | None:
        """A warning of what strangers may do; None where only users of the routers' own machines reach them, or where
        clients need a token over TLS."""
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
        """The routers take so many ports of each kind, in a row."""
        return self.num_routers if self.separate_ports else 1

    @property
    def given_redis_url(self) -> str | None:
        """None: there is to be a private one."""
        return self.redis_url or configured_redis_url()
