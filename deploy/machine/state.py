"""State file of a cluster: `up` writes it, and `down`, `status` and other commands find the cluster by it.

Owns one file for each cluster, `$BLOCKYARD_HOME/<cluster>.json` (default ~/.blockyard). Only its owner can read it,
because it holds the cluster secret and the Redis URL. A copy without these, the handle, is in Ray, where a machine
without the file finds the cluster (supervision/handles.py). Does not own the processes that it names.
"""

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from blockyard.deploy.machine.processes import ProcessIdentity, boot_id, is_alive
from blockyard.proto.security.loopback import LOOPBACK

HOME_VARIABLE = "BLOCKYARD_HOME"
_ALWAYS_WRITTEN = ("cluster", "model", "secret", "routers", "head", "redis")
"""Fields that every version has written."""
_ONLY_HERE = frozenset(
    ("secret", "redis_url", "router_redis_url", "ray_address", "ray_token_path", "starter", "elsewhere")
)
"""Fields that are secret, or that no other machine can use. A handle has none of them."""
_KNOWN_BY_RAY = ("model", "num_workers", "ray_address", "routers", "gateways")
"""Fields of which Ray knows the latest values."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")


class NoSuchClusterError(ValueError):
    """There is no state file: the cluster was not started here, or `down` has ended it."""

    def __init__(self, cluster: str) -> None:
        known = known_clusters()
        others = f", only {', '.join(known)} (--cluster)" if known else ", and no other"
        super().__init__(f"no cluster {cluster!r} is known here{others}")
        self.cluster = cluster


class EndedElsewhereError(RuntimeError):
    """Ray answers, and has no cluster of the state file's name any more."""


class AnotherClusterError(RuntimeError):
    """Ray has another cluster of this name than the state file is of."""


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
    identity: str = ""
    """Random text that tells this cluster from every other of its name. Empty if an older version started it."""
    machine: str = ""
    """Name of the machine on which `up` ran. It has the head, the private Redis and the folder, if there are any."""
    boot_id: str = ""
    """Id of that machine's boot. Processes and the folder are found only while it is the same."""
    elsewhere: tuple[str, ...] = ()
    """Parts of the cluster on `machine` that `down` cannot end from here."""
    num_workers: int = 0
    cpus_per_worker: float = 0.0
    """CPUs of each worker. 0 if unknown: not decided yet, or saved by an older version."""
    ray_address: str | None = None
    ray_token_path: str | None = None
    """Token file for Ray and its dashboard. None if Ray asks for no token, or the operator gives it by a variable."""
    dashboard_url: str | None = None
    reconnect_seconds: float | None = None
    """Time after which Ray ends all workers and routers once its control service has died. None if unknown."""
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


def which(cluster: str) -> str:
    """Return the option with which a command finds the cluster, after a space, or nothing for the default one."""
    return "" if cluster == "default" else f" --cluster {cluster}"


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
        why = getattr(error, "strerror", None) or f"it is no JSON document ({error})"
        raise ValueError(f"{path} cannot be read: {why}. {_written_anew(cluster)}") from error
    try:
        if wrong := _wrong_with(document):
            raise TypeError(wrong)
        return _from_document(document)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(_damaged(path, cluster, error)) from error


def handle_of(cluster: ClusterState) -> dict[str, Any]:
    """Return what another machine may know of a cluster."""
    return {name: value for name, value in asdict(cluster).items() if name not in _ONLY_HERE}


def of_handle(handle: Mapping[str, Any], **known: Any) -> ClusterState:
    """Return a cluster's state from its handle. `known` has fields that precede it.

    On another machine than that of `up`, the state has no processes and no folder, but names them as `elsewhere`.
    """
    names = {member.name for member in fields(ClusterState)} - _ONLY_HERE
    of_handle = {name: value for name, value in handle.items() if name in names}
    empty = {"model": "", "secret": "", "routers": (), "head": None, "redis": None}
    cluster = _from_document(empty | of_handle | known)
    if cluster.boot_id == boot_id():
        return cluster
    parts = {
        "its Ray head": cluster.head,
        "its private Redis": cluster.redis,
        cluster.directory: cluster.directory,
    }
    elsewhere = tuple(str(words) for words, part in parts.items() if part is not None)
    return replace(cluster, head=None, redis=None, directory=None, logs_directory=None, elsewhere=elsewhere)


def keep(found: ClusterState) -> tuple[ClusterState, str]:
    """Save a cluster that was found in Ray, so that later commands here find it. Return its state, and a note.

    What the file of the same cluster knows already stays. A file of another cluster is replaced only if nothing of that
    one is left here. If the file cannot be written, the note says why.
    """
    path = state_path(found.cluster)
    try:
        with alone():
            try:
                here = load(found.cluster)
            except ValueError:  # It is missing or damaged.
                here = None
            if here is not None and here.identity == found.identity != "":
                news = {name: getattr(found, name) for name in _KNOWN_BY_RAY}
                token_path = found.ray_token_path or here.ray_token_path
                found = replace(here, **news, ray_token_path=token_path, is_supervised=True)
                save(found)
                return found, ""
            if here is not None and (here.directory is not None or here.anything_alive()):
                return found, f"{path} is of another cluster of this name, and stays"
            save(found)
    except OSError as error:
        return found, f"{path} cannot be written: {error.strerror}. Later commands need --address too"
    return found, f"{path} remembers the cluster now: later commands here need no --address"


def update(cluster: ClusterState) -> None:
    """Save news of a cluster, if it has a file here. Another cluster's file stays as it is."""
    with contextlib.suppress(ValueError, OSError):
        if load(cluster.cluster).identity == cluster.identity:
            save(cluster)


def forget(cluster: ClusterState) -> None:
    """Delete a cluster's file, also a damaged one, but not that of another cluster of its name."""
    with contextlib.suppress(ValueError):
        if load(cluster.cluster).identity != cluster.identity:
            return
    state_path(cluster.cluster).unlink(missing_ok=True)
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


def _written_anew(cluster: str) -> str:
    return f"`blockyard status --address HEAD:6379{which(cluster)}` finds a cluster on Ray and writes the file anew"


def _damaged(path: Path, cluster: str, error: Exception) -> str:
    problem = f"{error} is missing" if isinstance(error, LookupError) else str(error)
    return (
        f"{path} does not say what `up` writes of a cluster: {problem}. If another version of Blockyard wrote it, "
        f"run that version's `blockyard down`. {_written_anew(cluster)}. Otherwise end the cluster's processes, then "
        "delete the file"
    )


def _from_document(document: dict[str, Any]) -> ClusterState:
    head, redis = document.pop("head"), document.pop("redis")
    document["routers"] = tuple(document["routers"])
    document["gateways"] = tuple(document.get("gateways", ()))
    document["dtypes"] = tuple(document.get("dtypes", ()))
    document["elsewhere"] = tuple(document.get("elsewhere", ()))
    document.setdefault("is_supervised", True)  # An older version did not write it.
    if document.get("starter") is not None:
        document["starter"] = ProcessIdentity(**document["starter"])
    if head is not None:
        processes = tuple(ProcessIdentity(**process) for process in head.pop("processes"))
        document["head"] = HeadState(processes=processes, **head)
    if redis is not None:
        document["redis"] = RedisState(process=ProcessIdentity(**redis.pop("process")), **redis)
    return ClusterState(**document)
