"""Finds and reads the logs of a cluster's processes, as files of this machine or through Ray.

Ray keeps each actor's stderr in a file on its node, worker-ID-JOB-PID.err, and rotates it to .err.1, .err.2 and so on.
With a head that `up` started, all files are on this machine, and are read whether Ray runs or not. With a joined Ray,
its dashboard reads them, because it reaches every node. Does not own the format of lines (machine/log_lines.py).
"""

import contextlib
import http.client
import json
import os
import queue
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import IO, Any, Protocol

from blockyard.deploy.machine.log_lines import process_name
from blockyard.deploy.machine.state import ClusterState
from blockyard.deploy.supervision.incidents import FIND_SECONDS, Incidents
from blockyard.deploy.supervision.replicas import SUPERVISOR_NAME, namespace

HEAD_BYTES = 65536
"""Length of the beginning of a log that is searched for Ray's markers."""
READ_SECONDS = 30.0
"""A node must send the next part of a log within this time."""
REOPEN_SECONDS = 1.0
MAX_ACTORS = 10_000
_FILE = re.compile(r"worker-\w+-\w+-(?P<pid>\d+)\.err(\.(?P<age>\d+))?")
_JOB = re.compile(rb"^:job_id:(\w+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFile:
    """The log of one process."""

    key: str
    name: str
    parts: tuple[str, ...]
    """Names of its files, the oldest first. The process writes to the last."""
    node_id: str = ""
    is_over: bool = False
    """Whether its process is known to have ended."""


class Logs(Protocol):
    """The logs of one cluster."""

    def files(self) -> list[LogFile]:
        """Return the logs that exist now. Raise ConnectionError or, if their folder is gone, FileNotFoundError."""

    def lines(self, file: LogFile, *, to_the_end: bool) -> Iterator[bytes]:
        """Yield the lines of a log since the last call. Raise OSError if it cannot be read.

        `to_the_end` includes the last line even if it is not finished yet.
        """


def logs_of(cluster: ClusterState, seconds: float) -> Logs:
    """Return the reader for a cluster's logs. `seconds`: how long a joined Ray may take to list its logs.

    Raise ValueError if the cluster's Ray has not been started or has no dashboard.
    """
    if cluster.head is not None and cluster.logs_directory is not None:
        return LocalLogs(Path(cluster.logs_directory))
    if cluster.ray_address is None or cluster.logs_directory is None:
        raise ValueError(f"Ray of cluster {cluster.cluster!r} has not been started: it has no logs yet")
    if cluster.dashboard_url is None:
        raise ValueError(
            f"the Ray at {cluster.ray_address} has no dashboard, which is needed to read its nodes' logs: find them in "
            f"{cluster.logs_directory} of each node"
        )
    return RayLogs(cluster.dashboard_url, namespace(cluster.cluster), _ray_token(cluster), seconds)


@dataclass(slots=True)
class LocalLogs:
    """Reads the log files of a head that runs or ran on this machine."""

    directory: Path
    _read: dict[str, tuple[int, int]] = field(default_factory=dict, init=False)
    """Inode that was read last and the offset in it, by key."""

    def files(self) -> list[LogFile]:
        found: list[tuple[bytes, LogFile]] = []
        for key, parts in _by_process(self._listed()).items():
            name, job = self._described(parts[0], key)
            if name is not None:
                found.append((job, LogFile(key=key, name=name, parts=parts)))
        # The first supervisor belongs to this cluster. Another cluster may have joined the same Ray later.
        first = min((job for job, file in found if file.name == SUPERVISOR_NAME), default=None)
        return [file for job, file in found if first is None or job in (first, b"")]

    def lines(self, file: LogFile, *, to_the_end: bool) -> Iterator[bytes]:
        inode, offset = self._read.get(file.key, (0, 0))
        # List the folder again, because a file that was rotated since `files` has another name.
        parts = [self.directory / part for part in _by_process(self._listed()).get(file.key, ())]
        inodes = [_inode(part) for part in parts]
        first = inodes.index(inode) if inode in inodes else 0
        for part in parts[first:]:
            with contextlib.suppress(FileNotFoundError), part.open("rb") as opened:
                found = os.fstat(opened.fileno()).st_ino
                position = offset if found == inode else 0
                opened.seek(position)
                for line in opened:
                    if not line.endswith(b"\n") and part == parts[-1] and not to_the_end:
                        break
                    position += len(line)
                    self._read[file.key] = (found, position)
                    yield line

    def _listed(self) -> list[str]:
        try:
            return os.listdir(self.directory)
        except OSError as error:
            raise FileNotFoundError(
                f"the logs of this cluster are gone: {self.directory}: {error.strerror}"
            ) from None

    def _described(self, part: str, key: str) -> tuple[str | None, bytes]:
        """Return the name and Ray job of the process that wrote this file. The name is None if it is not ours.

        If the log's beginning was rotated away, the name is made of the pid.
        """
        try:
            with (self.directory / part).open("rb") as file:
                head = file.read(HEAD_BYTES)
        except OSError:
            return None, b""
        job = _JOB.search(head)
        if job is None:
            return (f"pid-{key}" if head else None), b""
        return process_name(head), job[1]


def _by_process(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Group actors' log files by pid, each group from the oldest file to the one that is written to."""
    found: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for name in names:
        match = _FILE.fullmatch(name)
        if match is not None:
            found[match["pid"]].append((int(match["age"] or 0), name))
    return {
        pid: tuple(name for _, name in sorted(parts, reverse=True)) for pid, parts in sorted(found.items())
    }


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return -1


class RayLogs:
    """Reads the logs of one namespace's actors on all nodes, through Ray's dashboard."""

    def __init__(self, url: str, namespace: str, token: str | None, seconds: float) -> None:
        self._url = url
        self._namespace = namespace
        self._token = token
        self._seconds = seconds
        self._followed: dict[str, queue.SimpleQueue[bytes]] = {}

    def files(self) -> list[LogFile]:
        filters = {"filter_keys": "ray_namespace", "filter_predicates": "=", "filter_values": self._namespace}
        found = self._asked("actors", {"limit": MAX_ACTORS, "detail": "true", **filters})["result"]
        return [file for actor in found if (file := self._file_of(actor)) is not None]

    def lines(self, file: LogFile, *, to_the_end: bool) -> Iterator[bytes]:
        """Yield all lines at the first call, and later the new ones.

        A thread follows the log from then on, unless its process has ended or `to_the_end` is set.
        """
        following = self._followed.get(file.key)
        if following is not None:
            while not following.empty():
                yield following.get()
            return
        num_bytes = 0
        for part in file.parts:
            num_bytes = 0
            with self._opened("logs/file", _where(file, part), READ_SECONDS) as answer:
                for line in answer:
                    num_bytes += len(line)
                    yield line
        following = self._followed[file.key] = queue.SimpleQueue()
        if not to_the_end and file.parts and not file.is_over:
            arguments = (_where(file, file.parts[-1]), num_bytes, following)
            threading.Thread(target=self._follow, args=arguments, daemon=True).start()

    def _follow(
        self, where: Mapping[str, Any], num_bytes: int, following: "queue.SimpleQueue[bytes]"
    ) -> None:
        """Put the lines after the first `num_bytes` of a log into `following`, until this process ends.

        Never give up, because a node that does not answer now may answer later.
        """
        while True:
            with contextlib.suppress(ConnectionError), self._opened("logs/stream", where, None) as answer:
                skipped = 0
                while skipped < num_bytes and (head := answer.read(min(num_bytes - skipped, HEAD_BYTES))):
                    skipped += len(head)
                for line in answer:
                    num_bytes += len(line)
                    following.put(line)
            time.sleep(REOPEN_SECONDS)

    def _file_of(self, actor: Mapping[str, Any]) -> LogFile | None:
        """Return an actor's log, or None if it has not run yet or its node has gone with its logs."""
        pid, node_id, name = actor["pid"], actor["node_id"], actor["name"]
        if not pid or not node_id or not name:
            return None
        is_over = actor["state"] == "DEAD"
        try:
            groups = self._asked("logs", {"node_id": node_id, "glob": f"worker-*-{pid}.err*"})
        except ConnectionError:
            if is_over:
                return None
            raise
        parts = _by_process([name for names in groups.values() for name in names]).get(str(pid), ())
        return LogFile(key=f"{node_id} {pid}", name=name, parts=parts, node_id=node_id, is_over=is_over)

    def _asked(self, what: str, query: Mapping[str, Any]) -> Any:
        with self._opened(what, query, self._seconds) as answer:
            try:
                return json.load(answer)["data"]["result"]
            except (ValueError, KeyError, TypeError):
                raise ConnectionError(f"the program at {self._url} is not Ray's dashboard") from None

    @contextlib.contextmanager
    def _opened(self, what: str, query: Mapping[str, Any], seconds: float | None) -> Iterator[IO[bytes]]:
        request = urllib.request.Request(f"{self._url}/api/v0/{what}?{urllib.parse.urlencode(query)}")
        if self._token is not None:
            request.add_header("Authorization", f"Bearer {self._token}")
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                yield answer
        except urllib.error.HTTPError as error:
            raise ConnectionError(f"Ray's dashboard at {self._url} refuses: {_why(error)}") from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or str(error) or type(error).__name__
            raise ConnectionError(
                f"Ray's dashboard at {self._url}, which reads the nodes' logs, does not answer: {reason}"
            ) from None


def _where(file: LogFile, part: str) -> dict[str, Any]:
    return {"node_id": file.node_id, "filename": part, "lines": -1}


def _why(error: urllib.error.HTTPError) -> str:
    if error.code in (401, 403):
        return "it wants Ray's token (RAY_AUTH_TOKEN_PATH)"
    return f"{error.code} {error.reason}"


def _ray_token(cluster: ClusterState) -> str | None:
    """Return Ray's token: from the cluster's own token file, else from RAY_AUTH_TOKEN, else from Ray's other files."""
    given = os.environ.get("RAY_AUTH_TOKEN")
    path = cluster.ray_token_path or os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"
    if given and cluster.ray_token_path is None:
        return given
    try:
        return Path(path).expanduser().read_text(encoding="ascii").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


@dataclass(slots=True)
class SupervisorLog:
    """Follows the logs of a cluster's supervisor, and of its successors."""

    logs: Logs
    _incidents: Incidents = field(default_factory=Incidents, init=False)
    _files: list[LogFile] = field(default_factory=list, init=False)
    _found_at: float = field(default=-inf, init=False)

    def due_lines(self, now: float) -> list[str]:
        """Read on in the logs, and return the lines to print about incidents. Ignore a log that cannot be read.

        A log that comes from a joined Ray's dashboard may hold anything. `serve` must not end because of it.
        """
        with contextlib.suppress(OSError, LookupError, TypeError, ValueError):
            if now - self._found_at >= FIND_SECONDS:
                self._found_at = now
                self._files = [file for file in self.logs.files() if file.name == SUPERVISOR_NAME]
            for file in self._files:
                for line in self.logs.lines(file, to_the_end=False):
                    self._incidents.read(line.decode("utf-8", errors="replace").rstrip())
        return list(self._incidents.due_lines(now))
