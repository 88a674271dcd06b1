"""State file of a cluster: `up` writes it, and `down`, `status` and other commands find the cluster by it.

Owns one file for each cluster, `$BLOCKYARD_HOME/<cluster>.json` (default ~/.blockyard). Only its owner can read it,
because it holds the cluster secret and the Redis URL. Does not own the processes that it names.
"""

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from blockyard.deploy.machine.processes import ProcessIdentity, is_alive
from blockyard.proto.security.loopback import LOOPBACK

HOME_VARIABLE = "BLOCKYARD_HOME"
_ALWAYS_WRITTEN = ("cluster", "model", "secret", "routers", "head", "redis")
"""Fields that every version has written."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")


class NoSuchClusterError(ValueError):
    """There is no state file: the cluster was not started here, or `down` has ended it."""

    def __init__(self, cluster: str) -> None:
        known = known_clusters()
        others = f", only {', '.join(known)} (--cluster)" if known else ", and no other"
        super().__init__(f"no cluster {cluster!r} is known here{others}")
        self.cluster = cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadState:
    """The local Ray head that `up` started: one session of processes."""

    session: int
    processes: tuple[ProcessIdentity, ...]
    """Some of its first processes. While one of them lives, the session is ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisState:
    """The private Redis that `up` started."""

    process: ProcessIdentity
    port: int
    log_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """One cluster. `up` saves it again after each part that it starts, so that a failed `up` can be undone."""

    cluster: str
    model: str
    secret: str = field(repr=False)
    redis_url: str | None = field(default=None, repr=False)
    """URL by which workers reach Redis."""
    router_redis_url: str | None = field(default=None, repr=False)
    num_workers: int = 0
    cpus_per_worker: float = 0.0
    """CPUs of each worker. 0 if unknown: not decided yet, or saved by an older version."""
    ray_address: str | None = None
    ray_token_path: str | None = None
    """Token file for Ray and its dashboard. None if Ray asks for no token, or the operator gives it by a variable."""
    dashboard_url: str | None = None
    metrics_port: int | None = None
    """Port of this node's metrics, on every interface."""
    node_address: str = LOOPBACK
    """Address of this node, as Ray knows it."""
    logs_directory: str | None = None
    """Ray's session logs on this node, which the dashboard's Logs tab shows."""
    routers: tuple[str, ...] = ()
    gateways: tuple[str, ...] = ()
    """Addresses (host:port) where routers serve OpenAI's API."""
    dtypes: tuple[str, ...] = ()
    """Data types that workers computed in when the cluster started, each with the reason."""
    host: str = LOOPBACK
    """Address that routers bind to."""
    directory: str | None = None
    """Folder for everything that this cluster writes to disk. `down` removes it."""
    head: HeadState | None = None
    """None on a Ray cluster that we joined."""
    redis: RedisState | None = None
    """None if the operator named a Redis."""
    is_supervised: bool = False
    """Whether this cluster has created its supervisor on Ray. If not, `down` has no actors to end."""
    starter: ProcessIdentity | None = None
    """The `up` process that starts the cluster. While it lives, the name is taken."""

    def recorded_processes(self) -> tuple[ProcessIdentity, ...]:
        redis = () if self.redis is None else (self.redis.process,)
        return redis + (() if self.head is None else self.head.processes)

    def anything_alive(self) -> bool:
        """Tell whether the cluster may still run, or another process starts it.

        On a joined Ray it counts as alive until `down`.
        """
        joined = self.head is None and self.ray_address is not None
        starting = self.starter is not None and self.starter.pid != os.getpid() and is_alive(self.starter)
        return joined or starting or any(is_alive(process) for process in self.recorded_processes())


def checked_name(cluster: str) -> str:
    if not _NAME.fullmatch(cluster):
        raise ValueError(f"a cluster's name is 1-32 letters, digits, _ or -, not {cluster!r}")
    return cluster


def home() -> Path:
    return Path(os.environ.get(HOME_VARIABLE) or Path.home() / ".blockyard")


def state_path(cluster: str) -> Path:
    return home() / f"{checked_name(cluster)}.json"


def save(state: ClusterState) -> None:
    """Write the state file atomically. Other users can never read it, not even for a moment."""
    path = state_path(state.cluster)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(asdict(state), file, indent=2)
    partial.replace(path)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hold a lock inside the block, so that no other command with this home takes a cluster's name meanwhile."""
    home().mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(home(), os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def load(cluster: str) -> ClusterState:
    """Read a cluster's state file.

    Raise NoSuchClusterError, which names the known clusters, or ValueError for an unreadable or damaged file.
    """
    path = state_path(cluster)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NoSuchClusterError(cluster) from None
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    try:
        if wrong := _wrong_with(document):
            raise TypeError(wrong)
        return _from_document(document)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(_damaged(path, error)) from error


def forget(cluster: str) -> None:
    state_path(cluster).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # It holds other clusters, or it has been removed.
        home().rmdir()


def known_clusters() -> list[str]:
    return sorted(path.stem for path in home().glob("*.json"))


def _wrong_with(document: object) -> str:
    """Return why a document cannot be a ClusterState, as far as its top level shows, or an empty string."""
    if not isinstance(document, dict):
        return f"it holds no JSON object but a {type(document).__name__}"
    if missing := [name for name in _ALWAYS_WRITTEN if name not in document]:
        return f"it lacks {', '.join(missing)}"
    unknown = sorted(document.keys() - {known.name for known in fields(ClusterState)})
    return f"it has {', '.join(unknown)}, unknown to this version" if unknown else ""


def _damaged(path: Path, error: Exception) -> str:
    problem = f"{error} is missing" if isinstance(error, LookupError) else str(error)
    return (
        f"{path} does not say what `up` writes of a cluster: {problem}. If another version of Blockyard wrote it, "
        "run that version's `blockyard down`. Otherwise end the cluster's processes, then delete the file"
    )


def _from_document(document: dict[str, Any]) -> ClusterState:
    head, redis = document.pop("head"), document.pop("redis")
    document["routers"] = tuple(document["routers"])
    document["gateways"] = tuple(document.get("gateways", ()))
    document["dtypes"] = tuple(document.get("dtypes", ()))
    document.setdefault("is_supervised", True)  # An older version did not write it.
    if document.get("starter") is not None:
        document["starter"] = ProcessIdentity(**document["starter"])
    if head is not None:
        processes = tuple(ProcessIdentity(**process) for process in head.pop("processes"))
        document["head"] = HeadState(processes=processes, **head)
    if redis is not None:
        document["redis"] = RedisState(process=ProcessIdentity(**redis.pop("process")), **redis)
    return ClusterState(**document)
