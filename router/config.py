"""Every setting of a router, with its unit, in one frozen value."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from blockyard.proto.metrics.readings import MetricNames
from blockyard.proto.runtime.logs import LogConfig
from blockyard.proto.security.tls_files import ServerTls, SessionTls
from blockyard.router.admission.fair_queue import checked_weights
from blockyard.router.placement.config import PlacementConfig, PolicyName
from blockyard.router.tokenizing.model_facts import GenerationConfig

DEFAULT_MAX_OUTPUTS = 16
DEFAULT_MAX_BEAM_WIDTH = 16
DEFAULT_MAX_REQUESTS = 1024
DEFAULT_MAX_TOKENS_ADMITTED = 4_000_000
DEFAULT_MAX_QUEUE_SECONDS = 120.0
DEFAULT_SUSPECT_SECONDS = 1.5
DEFAULT_LOST_SECONDS = 2.5
DEFAULT_STALL_SECONDS = 60.0
DEFAULT_MAX_MIGRATIONS = 3
DEFAULT_TIMEOUT_SECONDS = 600.0
DEFAULT_NO_WORKER_SECONDS = 30.0
DEFAULT_SLOW_READER_SECONDS = 30.0
DEFAULT_TOKENIZER_PROCESSES = 1
_ORIGIN = re.compile(r"https?://(?:[a-z0-9.-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")
"""Scheme, host and port in lower case, without a path."""


def check_limits(
    *,
    max_requests: int,
    max_tokens_admitted: int,
    max_queue_seconds: float,
    tenant_weights: Mapping[str, float],
) -> None:
    """Of a router's config and of what starts routers, which refuses bad ones before Ray runs. Raises ValueError."""
    if max_requests < 1:
        raise ValueError(f"max_requests must be at least 1, not {max_requests}")
    if max_tokens_admitted < 1:
        raise ValueError(f"max_tokens_admitted must be at least 1, not {max_tokens_admitted}")
    if not max_queue_seconds > 0:
        raise ValueError(f"max_queue_seconds must be above 0, not {max_queue_seconds:g}")
    checked_weights(tenant_weights)


def check_waits(
    *, default_timeout_seconds: float, no_worker_seconds: float, slow_reader_seconds: float
) -> None:
    """The same for what calls are given of time. Raises ValueError."""
    for name, value in (
        ("default_timeout_seconds", default_timeout_seconds),
        ("slow_reader_seconds", slow_reader_seconds),
    ):
        if not value > 0:
            raise ValueError(f"{name} must be above 0, not {value:g}")
    if not no_worker_seconds >= 0:
        raise ValueError(f"no_worker_seconds must not be negative, not {no_worker_seconds:g}")


def check_patience(
    *, suspect_seconds: float, lost_seconds: float, stall_seconds: float, max_migrations: int
) -> None:
    """The same for when a worker is given up. Raises ValueError."""
    if not 0 < suspect_seconds < lost_seconds:
        raise ValueError(
            f"need 0 < suspect_seconds < lost_seconds, not {suspect_seconds:g} and {lost_seconds:g}"
        )
    if not stall_seconds > 0:
        raise ValueError(f"stall_seconds must be above 0, not {stall_seconds:g}")
    if max_migrations < 0:
        raise ValueError(f"max_migrations must be at least 0, not {max_migrations}")


def checked_origins(origins: Iterable[str]) -> tuple[str, ...]:
    """Web origins as browsers write them. Raises ValueError."""
    checked = tuple(origins)
    for origin in checked:
        if not _ORIGIN.fullmatch(origin):
            raise ValueError(
                f"an origin is like https://chat.example or http://127.0.0.1:3000, not {origin!r}"
            )
    return checked


def check_tokenizer_processes(tokenizer_processes: int) -> None:
    """Raises ValueError."""
    if tokenizer_processes < 1:
        raise ValueError(f"tokenizer_processes must be at least 1, not {tokenizer_processes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """One router process. Raises ValueError for bad values."""

    model: str
    """Local folder, or hub name with or without `@REVISION`: the router reads tokenizer and config, never the
    weights."""
    tokenizer: str | None = None
    """Another folder or hub name, for the tokenizer and the chat template. The workers must have the same."""
    chat_template: str | None = field(default=None, repr=False)
    """The text of a Jinja template that replaces the tokenizer's own."""
    model_names: tuple[str, ...] = ()
    """Names of the model for clients: its id, then aliases. If empty, tokenizing/model_facts.py names it."""
    generation_config: GenerationConfig = "auto"
    """`auto` takes the sampling defaults of the model's generation_config.json; `none` ignores them."""
    cluster: str = "default"
    cluster_secret: str = field(default="", repr=False)
    host: str = "127.0.0.1"
    """The interface to bind."""
    advertise_host: str | None = None
    """What clients are told of a Ray actor. None: `host`, or the node's address where `host` is none or every
    interface."""
    port: int = 0
    """0 takes a free one."""
    http_port: int | None = None
    """Of the OpenAI-compatible gateway on the same interface, with the same TLS and tokens: 0 takes a free one, None
    opens none."""
    cors_origins: tuple[str, ...] = ()
    """Scripts of web pages from these origins, such as "https://chat.example", may call the gateway."""
    auth_file: str | None = None
    """The clients' tokens (admission/auth.py), read again when it changes. None: every caller may call everything."""
    page_token_sha256: str | None = field(default=None, repr=False)
    """Of the live page's own token, known beside the auth file's (deploy/settings/page_token.py)."""
    tls: ServerTls | None = None
    """Of the public port. None: in plaintext."""
    session_tls: SessionTls | None = None
    """Of the sessions with workers. None: certificates that follow from the cluster secret; plaintext without one."""
    redis_url: str | None = field(default=None, repr=False)
    workers: tuple[str, ...] = ()
    """Addresses "host:port" known from the start; others are learned from the supervisor, or discovered."""
    discovers_workers: bool = True
    """Connect to the workers whose records in Redis are signed with the cluster secret. Off where a supervisor says
    which there are: then what is in Redis decides nothing but where a prefix is looked for first."""
    policy: PolicyName = "prefix"
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    max_requests: int = DEFAULT_MAX_REQUESTS
    """Admitted at once, queued and running together; beyond it RESOURCE_EXHAUSTED. One with several outputs or beams
    counts as so many."""
    max_tokens_admitted: int = DEFAULT_MAX_TOKENS_ADMITTED
    """Prompt tokens admitted at once, estimated from bytes until they are counted. A longer prompt is let in only when
    nothing else is: set it well above the model's context."""
    max_queue_seconds: float = DEFAULT_MAX_QUEUE_SECONDS
    """A request that found no worker for so long is refused, with advice when to come back."""
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    """Shares of the waiting line and of the limits by tenant; 1 for who is not named."""
    tokenizer_processes: int = DEFAULT_TOKENIZER_PROCESSES
    """Prompts that are tokenised at once, beside those of long texts (tokenizing/service.py)."""
    loop_tick_seconds: float = 0.005
    """How often the event loop is watched: a pause is told too long by so much at most. 1 ms takes 3 % of a core."""
    reuse_port: bool = False
    """Several router processes of one machine listen on the one port; the kernel deals connections out."""
    max_outputs: int = DEFAULT_MAX_OUTPUTS
    """Of one request (`n`)."""
    max_beam_width: int = DEFAULT_MAX_BEAM_WIDTH
    default_timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    """For a call without a deadline."""
    slow_reader_seconds: float = DEFAULT_SLOW_READER_SECONDS
    """A client that takes nothing for so long while output is being written to it is cut off."""
    no_worker_seconds: float = DEFAULT_NO_WORKER_SECONDS
    """How long requests wait, within their deadlines, while no worker is ready: longer than the restart of one
    takes, so that a worker's death fails nothing that has not started. Health says NOT_SERVING at once."""
    priority_ageing_seconds: float = 10.0
    """Waiting that makes up for one step of priority, as in the workers."""
    suspect_seconds: float = DEFAULT_SUSPECT_SECONDS
    """Silence after which a worker gets nothing new. Workers are asked for a sign of life each half second."""
    lost_seconds: float = DEFAULT_LOST_SECONDS
    """Silence after which a worker is given up and its requests are placed elsewhere."""
    stall_seconds: float = DEFAULT_STALL_SECONDS
    """A worker that answers, but whose engine has had work for so long without finishing a step, is given up as well.
    It must be longer than the longest step of the model."""
    max_migrations: int = DEFAULT_MAX_MIGRATIONS
    """Workers that a request may lose and still go on elsewhere; 0 switches replay off."""
    metrics_names: MetricNames = "blockyard"
    """`vllm` adds vLLM's names at the gateway's /metrics and at the router's own metrics port."""
    log: LogConfig = field(default_factory=LogConfig)
    """Of an actor; a process of its own has the environment's."""

    def __post_init__(self) -> None:
        check_limits(
            max_requests=self.max_requests,
            max_tokens_admitted=self.max_tokens_admitted,
            max_queue_seconds=self.max_queue_seconds,
            tenant_weights=self.tenant_weights,
        )
        if not 0 < self.loop_tick_seconds <= 1:
            raise ValueError(f"loop_tick_seconds must be above 0 and at most 1, not {self.loop_tick_seconds}")
        check_tokenizer_processes(self.tokenizer_processes)
        if self.max_outputs < 1 or self.max_beam_width < 1:
            raise ValueError("max_outputs and max_beam_width must be at least 1")
        if not self.priority_ageing_seconds >= 0:
            raise ValueError(
                f"priority_ageing_seconds must not be negative, not {self.priority_ageing_seconds:g}"
            )
        check_waits(
            default_timeout_seconds=self.default_timeout_seconds,
            no_worker_seconds=self.no_worker_seconds,
            slow_reader_seconds=self.slow_reader_seconds,
        )
        check_patience(
            suspect_seconds=self.suspect_seconds,
            lost_seconds=self.lost_seconds,
            stall_seconds=self.stall_seconds,
            max_migrations=self.max_migrations,
        )
