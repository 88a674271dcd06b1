"""Names processes so that they can be stopped later without ever hitting another program.

Owns (pid, start time) pairs, the members of a session, and their end. Does not own why a process runs.

A pid alone is reused; with its start time it is not. Ray gives its workers process groups of their own, but
none leaves the session that its head was started in, and a session's number is not given out again while a
member lives: so a cluster is "all of session S", believed as long as one recorded member is still who it was.
Reads /proc: Linux.
"""

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_POLL_SECONDS = 0.05
STOPPED = "T"
"""The state of a process after SIGSTOP."""
_LISTENING = "0A"
"""A socket's state in /proc/net/tcp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """One process for good: its pid, and when it started in clock ticks since boot."""

    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Status:
    state: str
    session: int
    start_ticks: int


def identify(pid: int) -> ProcessIdentity | None:
    """None if no such process lives."""
    status = _status(pid)
    return None if status is None else ProcessIdentity(pid=pid, start_ticks=status.start_ticks)


def is_alive(process: ProcessIdentity) -> bool:
    return identify(process.pid) == process


def session_members(session: int) -> list[ProcessIdentity]:
    """All living processes of a session, whoever their parents and groups are."""
    members = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (status := _status(int(entry))) is not None and status.session == session:
            members.append(ProcessIdentity(pid=int(entry), start_ticks=status.start_ticks))
    return members


def command_of(pid: int) -> list[str]:
    """Its program and arguments; empty for one that has gone."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [os.fsdecode(argument) for argument in text.split(b"\0")[:-1]]


def environment_of(pid: int) -> dict[str, str]:
    """Empty for one that has gone, or is somebody else's."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (os.fsdecode(entry).partition("=") for entry in text.split(b"\0") if entry)
    return {name: value for name, _, value in pairs}


def group_of(pid: int) -> int:
    """Its process group; 0 for one that has gone."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def state_of(pid: int) -> str:
    """One letter, as /proc has it; empty for one that has gone."""
    status = _status(pid)
    return "" if status is None else status.state


def listening_ports(pid: int) -> set[int]:
    """The TCP ports at which a process takes connections. Raises OSError for one that has gone."""
    sockets = {_link(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    ports = set()
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/{pid}/net/{table}")
        for line in path.read_text(encoding="ascii").splitlines()[1:] if path.exists() else []:
            fields = line.split()
            if fields[3] == _LISTENING and f"socket:[{fields[9]}]" in sockets:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def _link(descriptor: Path) -> str:
    """Empty for one that was closed meanwhile."""
    try:
        return os.readlink(descriptor)
    except FileNotFoundError:
        return ""


def owns_session(session: int, recorded: Iterable[ProcessIdentity]) -> bool:
    """Whether the session is still the one in which the recorded processes were started."""
    members = set(session_members(session))
    return any(process in members for process in recorded)


def end_session(session: int, recorded: Iterable[ProcessIdentity], *, timeout_seconds: float = 10.0) -> None:
    """SIGKILL to all of a session that is still ours. Raises TimeoutError naming what would not go."""
    if not owns_session(session, recorded):
        return
    deadline = time.monotonic() + timeout_seconds
    # Again and again: a member may have started another between our look and our signal.
    while members := session_members(session):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {[member.pid for member in members]} did not end")
        for member in members:
            _signal(member, signal.SIGKILL)
        _reap(members)
        time.sleep(_POLL_SECONDS)


def _signal(process: ProcessIdentity, number: signal.Signals) -> None:
    if is_alive(process):
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            return


def _reap(processes: Iterable[ProcessIdentity]) -> None:
    """Takes the exit status of those that are children of this very process."""
    for process in processes:
        try:
            os.waitpid(process.pid, os.WNOHANG)
        except ChildProcessError:
            continue


def _status(pid: int) -> _Status | None:
    """None for a process that has gone or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    # The name in parentheses may itself hold spaces and parentheses; fields are counted after the last one.
    fields = text.rpartition(")")[2].split()
    state, session, start_ticks = fields[0], int(fields[3]), int(fields[19])
    return None if state in "ZX" else _Status(state=state, session=session, start_ticks=start_ticks)
