"""UpOptions: the cluster to start, as one value for `up`, its dry run and the demo.

Owns its defaults, and refuses values that are wrong on any machine. Does not own the options that make it
(up_options.py), nor the checks that need the machine or Ray (lifecycle/preflight.py, lifecycle/shape.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from blockyard.deploy.machine import state
from blockyard.deploy.machine.redis_server import configured_redis_url
from blockyard.deploy.ray.head import host_and_port
from blockyard.deploy.settings.exported import Additions
from blockyard.deploy.settings.options import further_model
from blockyard.deploy.settings.security import SecurityOptions
from blockyard.deploy.supervision.replicas import DEFAULT_HUNG_SECONDS
from blockyard.proto.index.redis import check_urls
from blockyard.proto.index.shards import split_urls
from blockyard.proto.limits import MAX_PORT
from blockyard.proto.metrics.readings import MetricNames
from blockyard.proto.naming.model_files import model_names
from blockyard.proto.runtime.logs import LogConfig
from blockyard.proto.runtime.settings import Group, check_settings, setting
from blockyard.proto.security.loopback import LOOPBACK, is_loopback
from blockyard.router.config import RouterLimits, ServedModel, check_models
from blockyard.router.placement.config import PlacementConfig, PolicyName
from blockyard.router.tokenizing.model_facts import GenerationConfig
from blockyard.worker.config import EngineConfig, WorkerLimits

SERVE_PORTS: Mapping[str, int | None] = {"router_port": 50051, "http_port": 8000}
"""Default ports of `serve`. If one is taken, the next free one is used."""
ADDRESSES: Group = "Addresses"
JOINED: Group = "Existing Ray cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """The cluster to start. Raises ValueError for bad values.

    A field with a help text is a setting of `up` (proto/runtime/settings.py). Other fields are described in
    RouterConfig, or in the class that is their type.
    """

    engine: EngineConfig
    model_names: tuple[str, ...] = ()
    """Names for clients. If empty, the names follow from the model's folder or hub name (`served_names`)."""
    further_models: tuple[str, ...] = setting(
        (),
        help="Another model behind the same address, with the same settings and as many workers. May be given more "
        "than once, also as a second --model.",
        flag="--further-model",
        metavar="MODEL",
        is_repeated=True,
        group="Model",
    )
    """Models beside the first one, as folders or hub names."""
    generation_config: GenerationConfig = "auto"
    chat_template: str | None = setting(
        None, help="File of a Jinja template for chats. Default: the tokenizer's own.", group="Model"
    )
    """Text of the template: the option reads the file."""
    download_dir: str | None = setting(
        None, help="Folder for files from the hub. Default: HF_HUB_CACHE or HF_HOME.", group="Model"
    )
    cluster: str = "default"
    num_workers: int | None = setting(
        None,
        help="Number of workers. Default: one for each GPU, or one on a machine without GPUs.",
        flag="--workers",
    )
    num_prefill_workers: int = setting(
        0,
        help="Number of workers with the role `prefill`: worker-0 and the following. The others have --role. Needs "
        "--host-cache-gib.",
        flag="--prefill-workers",
        minimum=0,
    )
    num_routers: int = setting(1, help="Number of routers. Each serves any client.", flag="--routers")
    policy: PolicyName = "prefix"
    no_pull: bool = False
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    limits: RouterLimits = field(default_factory=RouterLimits)
    worker_limits: WorkerLimits = field(default_factory=WorkerLimits)
    metrics_names: MetricNames = "blockyard"
    log: LogConfig = field(default_factory=LogConfig)
    security: SecurityOptions = field(default_factory=SecurityOptions)
    cpus_per_worker: float | None = setting(
        None, help="CPUs of each worker. Default: the cluster's CPUs in equal shares."
    )
    host: str = setting(
        LOOPBACK,
        help="Address that routers bind, also with --address. By default only their own machine reaches them; 0.0.0.0 "
        "is every interface.",
        group=ADDRESSES,
    )
    """Address without a port; an IPv6 address is in brackets."""
    router_port: int = setting(
        0,
        help="Port of gRPC. 0 takes a free one. Default: a free one; for `serve` "
        f"{SERVE_PORTS['router_port']}, or the next free one.",
        group=ADDRESSES,
    )
    http_port: int | None = setting(
        None,
        help="Port of OpenAI's API (docs/gateway.md). 0 takes a free one. Default: not served; for `serve` "
        f"{SERVE_PORTS['http_port']}, or the next free one.",
        group=ADDRESSES,
    )
    movable_ports: frozenset[str] = frozenset()
    """Names of the ports that the user did not ask for (router_port, http_port). The next free port replaces a taken
    one."""
    cors_origins: tuple[str, ...] = ()
    separate_ports: bool = setting(
        False,
        help="Give each router a port of its own, from --router-port on, instead of one shared port.",
        group=ADDRESSES,
    )
    address: str | None = setting(
        None,
        help="Address host:port of an existing Ray cluster, `auto` for the one on this machine, or `local` to start "
        "one. Default: RAY_ADDRESS, if set, and otherwise `local`.",
        group=JOINED,
    )
    ships_code: bool = setting(
        False,
        help="With --address: send this command's own code to the nodes, in place of what they have installed.",
        flag="--ship-code",
        group=JOINED,
    )
    router_resource: str | None = setting(
        None,
        help="With --address: routers run only on nodes with this Ray resource, one router for each unit.",
        metavar="NAME",
        group=JOINED,
    )
    live_page_in_metrics_tab: bool = setting(
        False,
        help="Without Grafana: show the live page in the Metrics tab of Ray's dashboard, in place of Ray's charts.",
    )
    hung_seconds: float = setting(
        DEFAULT_HUNG_SECONDS,
        help="A worker or router that does not answer its supervisor for this time is killed and restarted.",
        above=0,
        group="Failures",
    )
    redis_url: str | None = setting(
        None,
        help="Redis of the prefix index. Several URLs, with commas between, share the prefixes. Default: a private one "
        "is started. A URL with a password comes only by the variable.",
    )
    """URLs of the Redis servers to which workers write."""
    written: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The same settings as a configuration file has them, for `blockyard export`. Empty if no command gave them."""
    additions: Additions = field(default_factory=Additions)
    """Models and adapters beside the first model. They are added once the cluster serves."""
    router_redis_url: str | None = setting(
        None,
        help="URLs of the same servers for routers, in the same order, with a user that only reads (SECURITY.md). "
        "Default: --redis-url.",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        state.checked_name(self.cluster)
        if self.num_workers is not None and self.num_workers < 1:
            raise ValueError(f"a cluster needs at least one worker, not {self.num_workers}")
        if self.num_prefill_workers and (not self.engine.host_cache_gib or self.no_pull):
            raise ValueError(
                "with --prefill-workers the other workers fetch blocks: they need --host-cache-gib, and no --no-pull"
            )
        if self.further_models:
            self._check_several()
        if not all(self.model_names):
            raise ValueError("a model's name must not be empty")
        if self.num_routers < 1:
            raise ValueError(f"a cluster needs at least one router, not {self.num_routers}")
        if self.address is not None:
            host_and_port(self.address)
            if self.download_dir is not None:
                raise ValueError(
                    "--download-dir is a folder of this machine: for a Ray cluster of your own set HF_HUB_CACHE "
                    "where its nodes start"
                )
        urls = [url for url in (self.given_redis_url, self.router_redis_url) if url is not None]
        for url in urls:
            check_urls(url)
        if len({len(split_urls(url)) for url in urls}) > 1:
            raise ValueError(
                "--redis-url and --router-redis-url must name the same servers, in the same order"
            )
        for first_port in (self.router_port, self.http_port or 0):
            last_port = first_port + self.num_routers - 1
            if self.separate_ports and first_port and last_port > MAX_PORT:
                raise ValueError(
                    f"{self.num_routers} routers with a port each from {first_port} on would need ports up to "
                    f"{last_port}: {MAX_PORT} is the last"
                )

    def _check_several(self) -> None:
        """Raise ValueError for a setting that is one model's, or for two models with a name in common."""
        for flag, value in (
            ("--tokenizer", self.engine.tokenizer),
            ("--draft-model", self.engine.draft_model),
            ("--chat-template", self.chat_template),
            ("--prefill-workers", self.num_prefill_workers),
        ):
            if value:
                raise ValueError(
                    f"{flag} is for one model, and this cluster begins with several: add the others later "
                    "(`blockyard model add`)"
                )
        check_models(self.served_models)

    @property
    def num_models(self) -> int:
        return 1 + len(self.further_models)

    @property
    def served_models(self) -> tuple[ServedModel, ...]:
        """All models for clients, the default one first."""
        first = ServedModel(
            model=self.engine.model,
            names=self.served_names,
            tokenizer=self.engine.tokenizer,
            chat_template=self.chat_template,
        )
        return (first, *map(further_model, self.further_models))

    def each_model(self) -> "list[UpOptions]":
        """Return the options of each model, as if it were the only one."""
        return [
            replace(
                self,
                engine=replace(self.engine, model=model.model),
                model_names=model.names,
                further_models=(),
            )
            for model in self.served_models
        ]

    @property
    def served_names(self) -> tuple[str, ...]:
        """The model's id for clients, then its aliases."""
        return model_names(self.engine.model, self.model_names)

    @property
    def exposure(self) -> str | None:
        """Warning of what strangers on the network may do.

        None if only the routers' own machines reach them, or if clients need a token over TLS."""
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
        """Number of consecutive ports that the routers take for gRPC, and as many for HTTP."""
        return self.num_routers if self.separate_ports else 1

    @property
    def given_redis_url(self) -> str | None:
        """URL of the operator's Redis, from the option or its variable. None: a private one is started."""
        return self.redis_url or configured_redis_url()
