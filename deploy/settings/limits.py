"""What a cluster's routers admit and bear, and its workers, as values and as settings of `up`.

Does not own what the limits mean (router/config.py, router/admission/ledger.py, router/admission/fair_queue.py,
worker/config.py).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from blockyard.deploy.settings.setting import Command, checked_by, field_settings, taken
from blockyard.router.admission.fair_queue import parse_weights
from blockyard.router.config import (
    DEFAULT_LOST_SECONDS,
    DEFAULT_MAX_MIGRATIONS,
    DEFAULT_MAX_QUEUE_SECONDS,
    DEFAULT_MAX_REQUESTS,
    DEFAULT_MAX_TOKENS_ADMITTED,
    DEFAULT_NO_WORKER_SECONDS,
    DEFAULT_SLOW_READER_SECONDS,
    DEFAULT_STALL_SECONDS,
    DEFAULT_SUSPECT_SECONDS,
    DEFAULT_TIMEOUT_SECONDS,
    DEFAULT_TOKENIZER_PROCESSES,
    check_limits,
    check_patience,
    check_tokenizer_processes,
    check_waits,
)
from blockyard.worker.config import DEFAULT_LEASE_SECONDS, DEFAULT_MAX_WAITING, check_worker_limits


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLimits:
    """Of each router. The names are RouterConfig's. Raises ValueError for bad values."""

    max_requests: int = DEFAULT_MAX_REQUESTS
    max_tokens_admitted: int = DEFAULT_MAX_TOKENS_ADMITTED
    max_queue_seconds: float = DEFAULT_MAX_QUEUE_SECONDS
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    default_timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    no_worker_seconds: float = DEFAULT_NO_WORKER_SECONDS
    slow_reader_seconds: float = DEFAULT_SLOW_READER_SECONDS
    suspect_seconds: float = DEFAULT_SUSPECT_SECONDS
    lost_seconds: float = DEFAULT_LOST_SECONDS
    stall_seconds: float = DEFAULT_STALL_SECONDS
    max_migrations: int = DEFAULT_MAX_MIGRATIONS
    tokenizer_processes: int = DEFAULT_TOKENIZER_PROCESSES

    def __post_init__(self) -> None:
        check_limits(
            max_requests=self.max_requests,
            max_tokens_admitted=self.max_tokens_admitted,
            max_queue_seconds=self.max_queue_seconds,
            tenant_weights=self.tenant_weights,
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
        check_tokenizer_processes(self.tokenizer_processes)

    def as_settings(self) -> dict[str, Any]:
        """For RouterConfig."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Of each worker, beside its engine. The names are WorkerConfig's. Raises ValueError for bad values."""

    lease_seconds: float = DEFAULT_LEASE_SECONDS
    max_waiting: int = DEFAULT_MAX_WAITING

    def __post_init__(self) -> None:
        check_worker_limits(lease_seconds=self.lease_seconds, max_waiting=self.max_waiting)

    def as_settings(self) -> dict[str, Any]:
        """For WorkerConfig."""
        return asdict(self)


ROUTER_HELP = {
    "max_requests": "The most requests that each router holds at once, waiting and running; more are refused.",
    "max_tokens_admitted": "The most prompt tokens that each router holds at once; a prompt above it is let in only "
    "alone.",
    "max_queue_seconds": "A request that found no worker for so long is refused.",
    "tenant_weights": "A tenant's share of the waiting line and of the limits beside the others', who have 1; without "
    "a NAME that of all calls that name no tenant. May be given more than once.",
    "default_timeout_seconds": "For a call without a deadline.",
    "no_worker_seconds": "How long requests wait, within their deadlines, while no worker is ready: longer than a "
    "restart of one takes.",
    "slow_reader_seconds": "A client that takes nothing for so long while output is written to it is cut off.",
    "suspect_seconds": "A worker that is silent for so long gets nothing new.",
    "lost_seconds": "A worker that is silent for so long is given up, and its requests go on elsewhere.",
    "stall_seconds": "A worker that answers but has finished no step for so long is given up: more than the model's "
    "longest step.",
    "max_migrations": "Workers that a request may lose and still go on elsewhere; 0 switches replay off.",
    "tokenizer_processes": "Short prompts that each router tokenises at once. Texts above 64 Ki characters have a "
    "process of their own.",
}
"""By field of RouterLimits."""
WORKER_HELP = {
    "lease_seconds": "How long the prefix index believes a worker alive without a word of it.",
    "max_waiting": "Requests that wait inside a worker; beyond them the router keeps the others.",
}
"""By field of WorkerLimits."""


_OF_FAILURES = ("no_worker_seconds", "suspect_seconds", "lost_seconds", "stall_seconds", "max_migrations")
"""Fields of RouterLimits whose options are among those of failures."""


def limit_options(command: Command) -> Command:
    """Adds a setting for each limit; `router_limits` and `worker_limits` take them back."""
    weights = {
        "flag": "--tenant-weight",
        "multiple": True,
        "callback": checked_by(parse_weights),
        "metavar": "NAME=WEIGHT",
    }
    failures = {"group": "Failures"}
    special: dict[str, dict[str, Any]] = {"tenant_weights": weights, **dict.fromkeys(_OF_FAILURES, failures)}
    add_routers = field_settings(RouterLimits, "limits", ROUTER_HELP, **special)
    return add_routers(field_settings(WorkerLimits, "worker", WORKER_HELP, lease_seconds=failures)(command))


def router_limits(values: dict[str, Any]) -> RouterLimits:
    """Takes the limits out of a command's arguments. Raises ValueError."""
    limits: RouterLimits = taken(RouterLimits, values)
    return limits


def worker_limits(values: dict[str, Any]) -> WorkerLimits:
    """The same for the workers'."""
    limits: WorkerLimits = taken(WorkerLimits, values)
    return limits
