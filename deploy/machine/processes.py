"""Identifies processes, so that they can be stopped later without killing an unrelated program.

Owns (pid, start time) pairs, and listing and killing the members of a session. Does not own why a process runs.

The kernel reuses pids, but not a pid together with its start time. Ray gives its workers process groups of their own,
but no worker leaves the session in which its cluster's head process was started. The kernel does not reuse a
session's number while a member lives. So while one recorded process of a cluster lives, its whole session is that
cluster's. Reads /proc, so it needs Linux.
"""

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_POLL_SECONDS = 0.05
STOPPED = "T"
"""State of a process after SIGSTOP."""
_LISTENING = "0A"
"""State of a listening socket in /proc/net/tcp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """A process's pid and its start time in clock ticks since boot. The pair is never reused."""

    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Status:
    state: str
    session: int
    start_ticks: int


def identify(pid: int) -> ProcessIdentity | None:
    """Return the identity of the living process that has this pid, or None. A zombie does not live."""
    status = _status(pid)
    return None if status is None else ProcessIdentity(pid=pid, start_ticks=status.start_ticks)


def boot_id() -> str:
    """Return the id of this machine's boot. A pid and its start time are unique only together with it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def is_alive(process: ProcessIdentity) -> bool:
    return identify(process.pid) == process


def session_members(session: int) -> list[ProcessIdentity]:
    """Return all living processes of a session, whatever their parents and groups."""
    members = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (status := _status(int(entry))) is not None and status.session == session:
            members.append(ProcessIdentity(pid=int(entry), start_ticks=status.start_ticks))
    return members


def command_of(pid: int) -> list[str]:
    """Return a process's program and arguments. Empty if it has ended."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [os.fsdecode(argument) for argument in text.split(b"\0")[:-1]]


def environment_of(pid: int) -> dict[str, str]:
    """Return a process's environment. Empty if it has ended or belongs to another user."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (os.fsdecode(entry).partition("=") for entry in text.split(b"\0") if entry)
    return {name: value for name, _, value in pairs}


def group_of(pid: int) -> int:
    """Return a process's group, or 0 if it has ended."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def state_of(pid: int) -> str:
    """Return the letter that /proc gives for a process's state. Empty if it has ended."""
    status = _status(pid)
    return "" if status is None else status.state


def listening_ports(pid: int) -> set[int]:
    """Return the TCP ports on which a process listens. Raise OSError if it has ended or belongs to another user."""
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
    """Return what a descriptor refers to. Empty if it was closed meanwhile."""
    try:
        return os.readlink(descriptor)
    except FileNotFoundError:
        return ""


def owns_session(session: int, recorded: Iterable[ProcessIdentity]) -> bool:
    """Tell whether a recorded process still lives in the session. Then the session's number was not reused."""
    members = set(session_members(session))
    return any(process in members for process in recorded)


def end_session(session: int, recorded: Iterable[ProcessIdentity], *, timeout_seconds: float = 10.0) -> None:
    """Kill all processes of a session, and wait until they have ended.

    Do nothing if no recorded process lives there. Raise TimeoutError with the pids that do not end in time.
    """
    if not owns_session(session, recorded):
        return
    deadline = time.monotonic() + timeout_seconds
    # Repeat, because a member may start another process between our listing and our signal.
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
    """Reap those processes that have ended and are children of this one."""
    for process in processes:
        try:
            os.waitpid(process.pid, os.WNOHANG)
        except ChildProcessError:
            continue


def _status(pid: int) -> _Status | None:
    """Return a process's state, session and start time, or None if it has ended or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    # The name in parentheses may contain spaces and parentheses, so count fields after the last parenthesis.
    fields = text.rpartition(")")[2].split()
    state, session, start_ticks = fields[0], int(fields[3]), int(fields[19])
    return None if state in "ZX" else _Status(state=state, session=session, start_ticks=start_ticks)
