"""Every setting of a router, with its unit, in frozen values.

A field with a help text is an option of `python -m blockyard.router`; those of RouterLimits are settings of
`blockyard up` too (proto/runtime/settings.py).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from os.path import isabs
from typing import Any

from blockyard.proto.limits import MAX_PORT
from blockyard.proto.metrics.readings import MetricNames
from blockyard.proto.naming.model_files import model_names
from blockyard.proto.runtime.logs import LogConfig
from blockyard.proto.runtime.settings import Group, check_settings, described, setting
from blockyard.proto.security.tls_files import ServerTls, SessionTls
from blockyard.router.admission.fair_queue import checked_weights, parse_weights
from blockyard.router.parsing.formats import ReasoningParser, ToolParser
from blockyard.router.placement.config import PlacementConfig, PolicyName, parse_placement
from blockyard.router.tokenizing.model_facts import GenerationConfig

FAILURES: Group = "Failures"
DEFAULT_MAX_OUTPUTS = 16
DEFAULT_MAX_BEAM_WIDTH = 16
DEFAULT_SUSPECT_SECONDS = 1.5
DEFAULT_LOST_SECONDS = 2.5
DEFAULT_STALL_SECONDS = 60.0
DEFAULT_MAX_MIGRATIONS = 3
DEFAULT_NO_WORKER_SECONDS = 30.0
_ORIGIN = re.compile(r"https?://(?:[a-z0-9.-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")
"""Scheme, host and port in lower case, without a path."""


def checked_origins(origins: Iterable[str]) -> tuple[str, ...]:
    """Return the web origins. Raises ValueError for one that is not as browsers write it."""
    checked = tuple(origins)
    for origin in checked:
        if not _ORIGIN.fullmatch(origin):
            raise ValueError(
                f"an origin is like https://chat.example or http://127.0.0.1:3000, not {origin!r}"
            )
    return checked


def checked_addresses(addresses: Iterable[str]) -> tuple[str, ...]:
    """Return the workers' addresses. Raises ValueError for one without a host or a port."""
    checked = tuple(addresses)
    for address in checked:
        host, _, port = address.rpartition(":")
        is_port = port.isascii() and port.isdigit() and 1 <= int(port) <= MAX_PORT
        if not host or not is_port:
            raise ValueError(f"--worker must be HOST:PORT, such as 127.0.0.1:50061, not {address!r}")
    return checked


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One of the models that a router serves, and where its workers are known."""

    model: str
    """A local folder, or a hub name with or without `@REVISION`."""
    names: tuple[str, ...]
    """Names for clients. The first is the model's id."""
    tokenizer: str | None = None
    chat_template: str | None = field(default=None, repr=False)
    index: str = ""
    """Name of the model's own part of the prefix index. Empty: the part of the model that its cluster began with."""
    addition: str = ""
    """Tells a model that was removed and added again from the one before."""

    @property
    def id(self) -> str:
        return self.names[0]


def further_models(models: Iterable[str]) -> tuple[ServedModel, ...]:
    """Return the models that a router serves beside its first one. Each has an index by its own name."""
    found = []
    for model in models:
        names = model_names(model)
        found.append(ServedModel(model=model, names=names, index=names[0]))
    return tuple(found)


def check_models(models: Iterable[ServedModel]) -> None:
    """Raise ValueError if two models have a name or an index in common."""
    seen: set[str] = set()
    indexes: set[str] = set()
    for model in models:
        if shared := seen.intersection(model.names):
            raise ValueError(
                f"two models are called {min(shared)!r}: each name must mean one model (--model-name)"
            )
        if model.index in indexes:
            raise ValueError(f"{model.id}: another model has its index {model.index!r}")
        seen.update(model.names)
        indexes.add(model.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLimits:
    """Settings of a router that `blockyard up` has too. Raises ValueError for bad values."""

    max_outputs: int = setting(
        DEFAULT_MAX_OUTPUTS, help="Maximum outputs (`n`) that a request may ask for.", minimum=1
    )
    max_beam_width: int = setting(
        DEFAULT_MAX_BEAM_WIDTH, help="Maximum beams that a request may ask for.", minimum=1
    )
    max_requests: int = setting(
        1024,
        help="Maximum requests that each router holds at once, waiting and running. More are refused with "
        "RESOURCE_EXHAUSTED. A request counts once for each of its outputs or beams.",
        minimum=1,
    )
    max_tokens_admitted: int = setting(
        4_000_000,
        help="Maximum prompt tokens that each router holds at once, estimated from bytes until they are counted. A "
        "longer prompt is admitted only when no other request is.",
        minimum=1,
    )
    max_queue_seconds: float = setting(
        120.0,
        help="A request that finds no worker within this time is refused, with the delay for a retry.",
        above=0,
    )
    tenant_weights: Mapping[str, float] = field(
        default_factory=dict,
        metadata=described(
            "A tenant's share of the waiting line and of the limits; other tenants have 1. An empty NAME stands for "
            "calls that name no tenant. May be given more than once.",
            flag="--tenant-weight",
            metavar="NAME=WEIGHT",
            parse=parse_weights,
            is_repeated=True,
        ),
    )
    default_timeout_seconds: float = setting(600.0, help="Time limit of a call without a deadline.", above=0)
    no_worker_seconds: float = setting(
        DEFAULT_NO_WORKER_SECONDS,
        help="Time that requests wait, within their deadlines, while no worker is ready. It should be longer than a "
        "worker's restart.",
        minimum=0,
        group=FAILURES,
    )
    slow_reader_seconds: float = setting(
        30.0,
        help="A client that reads nothing for this time, while output is written to it, is disconnected.",
        above=0,
    )
    suspect_seconds: float = setting(
        DEFAULT_SUSPECT_SECONDS,
        help="A worker that is silent for this time gets no new requests. Workers are asked every half second.",
        group=FAILURES,
    )
    lost_seconds: float = setting(
        DEFAULT_LOST_SECONDS,
        help="A worker that is silent for this time is given up, and its requests move to other workers.",
        group=FAILURES,
    )
    stall_seconds: float = setting(
        DEFAULT_STALL_SECONDS,
        help="A worker that answers but finishes no step for this time is given up. It must be longer than the "
        "model's longest step.",
        above=0,
        group=FAILURES,
    )
    max_migrations: int = setting(
        DEFAULT_MAX_MIGRATIONS,
        help="Maximum workers that a request may lose and still continue on another. 0 disables replay.",
        minimum=0,
        group=FAILURES,
    )
    tool_parser: ToolParser = setting(
        "auto",
        help="Format of the model's tool calls in chats over HTTP. `auto` takes the one that the chat template shows, "
        "`template` the tokenizer's response template, `none` leaves calls in the text.",
    )
    reasoning_parser: ReasoningParser = setting(
        "auto",
        help="Format of the model's reasoning in chats over HTTP. `auto` takes the one that the chat template shows, "
        "`none` leaves it in the text.",
    )
    batch_dir: str | None = setting(
        None,
        help="Folder on the local disk for /v1/files and /v1/batches: a full path. Routers of one machine share it, "
        "and one of them runs the batches. Default: no batches.",
        metavar="FOLDER",
    )
    keep_answers_seconds: float = setting(
        1800.0,
        help="Time for which the token ids of a session's answers are kept in Redis, sealed with the cluster secret. "
        "The session's next prompt then repeats them exactly. 0 keeps none.",
        minimum=0,
    )
    tokenizer_processes: int = setting(
        1,
        help="Short prompts that each router tokenises at once. Texts above 64 Ki characters have a process of their "
        "own.",
        minimum=1,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        checked_weights(self.tenant_weights)
        if self.batch_dir is not None and not isabs(self.batch_dir):
            raise ValueError(f"batch_dir must be a full path, not {self.batch_dir!r}")
        if not 0 < self.suspect_seconds < self.lost_seconds:
            raise ValueError(
                f"need 0 < suspect_seconds < lost_seconds, not {self.suspect_seconds:g} and {self.lost_seconds:g}"
            )

    def as_settings(self) -> dict[str, Any]:
        """Return the limits as keyword arguments of RouterConfig."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(RouterLimits):
    """Settings of one router process. Raises ValueError for bad values."""

    model: str = field(
        metadata=described(
            "Model: a local folder, or a hub name with or without `@REVISION`. The router reads its tokenizer and "
            "config, never its weights."
        )
    )
    tokenizer: str | None = setting(
        None,
        help="Another folder or hub name, for the tokenizer and the chat template. The workers must have the same.",
        metavar="MODEL",
    )
    chat_template: str | None = field(default=None, repr=False)
    """Text of a Jinja template that replaces the tokenizer's own."""
    model_names: tuple[str, ...] = setting(
        (),
        help="Names of the model for clients: the first is its id, others are aliases that requests may use. Default: "
        "a hub model's full name and its short one, or a folder's last part.",
        flag="--model-name",
        metavar="NAME",
        is_repeated=True,
    )
    index: str = field(default="", repr=False)
    """Name of the first model's index, as in ServedModel."""
    addition: str = field(default="", repr=False)
    """The first model's, as in ServedModel."""
    further_models: tuple[ServedModel, ...] = field(
        default=(),
        metadata=described(
            "Another model behind the same address. May be given more than once. Its workers are found through Redis, "
            "and have --index-model.",
            flag="--further-model",
            metavar="MODEL",
            parse=further_models,
            is_repeated=True,
        ),
    )
    generation_config: GenerationConfig = setting(
        "auto",
        help="Defaults of sampling parameters that a request omits. `auto` takes those of the model's "
        "generation_config.json, `none` ignores them.",
    )
    cluster: str = setting("default", help="Name of the cluster.")
    cluster_secret: str = field(default="", repr=False)
    host: str = setting("127.0.0.1", help="Interface to bind.")
    advertise_host: str | None = None
    """Host in the addresses that a Ray actor gives to clients. None: `host`, or the node's address if `host` is empty
    or every interface."""
    port: int = setting(
        0, help="Port of gRPC. 0 takes a free one, which the log names.", minimum=0, maximum=MAX_PORT
    )
    http_port: int | None = setting(
        None,
        help="Port of OpenAI's API, on the same interface and with the same TLS and tokens. 0 takes a free one, which "
        "the log names. Default: not served.",
        minimum=0,
        maximum=MAX_PORT,
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        help="Web pages of this origin, such as https://chat.example, may call --http-port. May be given more than "
        "once.",
        flag="--cors-origin",
        metavar="ORIGIN",
        parse=checked_origins,
        is_repeated=True,
    )
    auth_file: str | None = setting(
        None,
        help="File of the tokens that clients must show (`blockyard token new`), read again when it changes. Default: "
        "every caller may call everything.",
        metavar="FILE",
    )
    page_token_sha256: str | None = field(default=None, repr=False)
    """Hash of the live page's own token, valid beside those of the auth file (deploy/settings/page_token.py)."""
    tls: ServerTls | None = None
    """TLS of the public port. None: plaintext."""
    session_tls: SessionTls | None = None
    """TLS of the sessions with workers. None: certificates derived from the cluster secret; plaintext without one."""
    redis_url: str | None = field(default=None, repr=False)
    workers: tuple[str, ...] = setting(
        (),
        help="Address of a worker. May be given more than once. Others are found through Redis.",
        flag="--worker",
        metavar="HOST:PORT",
        parse=checked_addresses,
        is_repeated=True,
    )
    discovers_workers: bool = True
    """Connect to the workers whose records in Redis are signed with the cluster secret. False where a supervisor names
    the workers: Redis then decides only where a prefix is looked for first."""
    policy: PolicyName = setting(
        "prefix",
        help="How routers choose a worker. `prefix`: by the estimated time to the first token. The other policies are "
        "simpler, for comparison.",
    )
    no_pull: bool = setting(
        False,
        help="Never let a worker fetch cached blocks from another one. It computes what it lacks.",
    )
    placement: PlacementConfig = field(
        default_factory=PlacementConfig,
        metadata=described(
            "A placement setting, such as near_equal_ms=2. May be given more than once.",
            metavar="NAME=VALUE",
            parse=parse_placement,
            is_repeated=True,
        ),
    )
    loop_tick_seconds: float = setting(
        0.005,
        help="Interval at which a busy event loop is watched, and the most by which a pause is overstated. For an idle "
        "loop both may be four times as long.",
        above=0,
        maximum=1,
    )
    reuse_port: bool = setting(
        False,
        help="Share the port with other routers of this machine. The kernel distributes connections among them.",
    )
    priority_ageing_seconds: float = 10.0
    """Waiting time that makes up for one step of priority, as on the workers."""
    metrics_names: MetricNames = setting(
        "blockyard",
        help="`vllm` adds vLLM's metric names, for dashboards made for vLLM, to /metrics of the gateway and of the "
        "router's own port.",
    )
    log: LogConfig = field(default_factory=LogConfig)
    """Logging of a router in a Ray actor. `python -m blockyard.router` takes its own options and the environment."""

    def __post_init__(self) -> None:
        RouterLimits.__post_init__(self)
        if not self.priority_ageing_seconds >= 0:
            raise ValueError(
                f"priority_ageing_seconds must not be negative, not {self.priority_ageing_seconds:g}"
            )
        check_models(self.models)

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """All models, the default one first."""
        first = ServedModel(
            model=self.model,
            names=model_names(self.model, self.model_names),
            tokenizer=self.tokenizer,
            chat_template=self.chat_template,
            index=self.index,
            addition=self.addition,
        )
        return (first, *self.further_models)

    def with_models(self, models: Sequence[ServedModel]) -> "RouterConfig":
        """Return the config with these models in place of its own."""
        first, *others = models
        return replace(
            self,
            model=first.model,
            model_names=first.names,
            tokenizer=first.tokenizer,
            chat_template=first.chat_template,
            index=first.index,
            addition=first.addition,
            further_models=tuple(others),
        )
