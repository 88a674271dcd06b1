"""Runs Ray's head and restarts its raylet and its dashboard when they die or hang.

    python -m blockyard.deploy.ray.guardian STARTED_FILE COMMAND...

It runs the command, which starts the head. Once the command succeeds it creates the file and watches the head's
processes from then on. It leads their session, so that a process that it starts ends with the others. It holds no
secret beyond the environment of Ray's processes.

Health checks (head_probes.py) run in threads, so that a silent process does not delay the loop. A process that hangs is
killed and then restarted.

A raylet's workers end with it. The raylet is restarted as another node of the same cluster. Ray's control service then
restarts the supervisor there, which restarts the other actors. The control service itself holds the cluster in memory,
so its death ends the cluster (docs/operating.md). Imports nothing heavy, because it lives as long as the cluster.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from blockyard.deploy.machine.processes import (
    STOPPED,
    ProcessIdentity,
    command_of,
    environment_of,
    group_of,
    identify,
    is_alive,
    listening_ports,
    session_members,
    state_of,
)
from blockyard.deploy.ray import head_probes
from blockyard.deploy.ray.head_probes import ProbeHistory

LOOK_SECONDS = 0.5
MAX_STOPPED_LOOKS = 40
"""Checks in a row that find a process stopped before it is killed as hung."""
MAX_PAUSE_SECONDS = 30.0
"""Longest pause between two starts of one program. The pause is zero at first, then one second, and then doubles."""
STEADY_SECONDS = 60.0
"""Lifetime after which the pauses begin again at zero."""
GCS, RAYLET, DASHBOARD = "gcs_server", "raylet", "dashboard"
_NODE_ID_BYTES = 28
_WORKER_TITLE = "ray::"


@dataclass(slots=True, kw_only=True)
class Probe:
    """A health check in flight."""

    answer: Future[bool]
    asked_at: float
    is_late: bool = False


@dataclass(slots=True, kw_only=True)
class HeadProgram:
    """One program of the head, with its command and environment."""

    name: str
    process: ProcessIdentity
    command: list[str]
    environment: dict[str, str]
    num_stopped_looks: int = 0
    history: ProbeHistory = field(default_factory=ProbeHistory)
    probe: Probe | None = None
    pause_seconds: float = 0.0
    started_at: float = 0.0


def name_of(command: list[str]) -> str:
    """Return which of the head's programs this command runs: GCS, RAYLET or DASHBOARD. Empty for any other command."""
    if not command:
        return ""
    if Path(command[0]).name in (GCS, RAYLET):
        return Path(command[0]).name
    return DASHBOARD if any(word.endswith("/ray/dashboard/dashboard.py") for word in command[1:4]) else ""


def programs_of(session: int) -> dict[str, HeadProgram]:
    found = {}
    for member in session_members(session):
        command = command_of(member.pid)
        if name := name_of(command):
            environment = environment_of(member.pid)
            found[name] = HeadProgram(name=name, process=member, command=command, environment=environment)
    return found


def as_new_node(command: list[str], node_id: str) -> list[str]:
    """Return a raylet's command with another node id, because the control service rejects the id of a dead node.

    Raise ValueError for a command without a node id.
    """
    old = _value(command, "--node_id")
    return [word.replace(old, node_id) for word in command]


def next_pause_seconds(last_seconds: float, alive_seconds: float) -> float:
    """Return the pause between this restart of a program and the next one.

    The program has lived for `alive_seconds`. The pause before was `last_seconds`.
    """
    if alive_seconds >= STEADY_SECONDS:
        return 0.0
    return min(MAX_PAUSE_SECONDS, max(1.0, 2.0 * last_seconds))


def _value(command: list[str], option: str) -> str:
    """Return an option's value. Raise ValueError if the command lacks it."""
    for word in command:
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    raise ValueError(f"its command has no {option}")


def does_answer(program: HeadProgram, *, seconds: float) -> bool:
    """Tell whether a program answers in time.

    A raylet with TLS, or a program that cannot be asked, counts as answering.
    """
    if program.name == RAYLET and program.environment.get("RAY_USE_TLS") == "1":
        return True
    try:
        token = head_probes.ray_token(program.environment)
        if program.name == RAYLET:
            return head_probes.does_raylet_answer(
                listening_ports(program.process.pid), token, seconds=seconds
            )
        address = _value(program.command, "--host"), int(_value(program.command, "--port"))
        return head_probes.does_dashboard_answer(address, token, seconds=seconds)
    except (OSError, ValueError):
        return True


class Guardian:
    """Watches the head's programs in the session that this process leads."""

    def __init__(self, session: int) -> None:
        self._session = session
        self._programs = programs_of(session)
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="probes")

    def watch(self) -> None:
        """Restart the raylet and the dashboard when they die or hang, until Ray's control service has ended."""
        woke_at = time.monotonic()
        while is_alive(self._programs[GCS].process):
            last_at, woke_at = woke_at, time.monotonic()
            is_late = woke_at - last_at > LOOK_SECONDS + head_probes.LATE_SECONDS
            for name in (RAYLET, DASHBOARD):
                if (program := self._programs.get(name)) is not None:
                    self._look(program, is_late=is_late)
            time.sleep(LOOK_SECONDS)
            _reap()
        _say("Ray's control service has ended")

    def _look(self, program: HeadProgram, *, is_late: bool) -> None:
        if is_alive(program.process):
            is_stopped = state_of(program.process.pid) == STOPPED
            program.num_stopped_looks = program.num_stopped_looks + 1 if is_stopped else 0
            self._ask(program, is_late=is_late)
            if program.num_stopped_looks >= MAX_STOPPED_LOOKS or program.history.hangs:
                _say(f"{program.name} {'is stopped' if is_stopped else 'does not answer'} and is killed")
                _kill(program.process)
        elif time.monotonic() >= program.started_at + program.pause_seconds:
            self._start_again(program)

    def _ask(self, program: HeadProgram, *, is_late: bool) -> None:
        """Read the answer to the last health check, and start another when it is time."""
        probe, now = program.probe, time.monotonic()
        if probe is not None:
            probe.is_late |= is_late
            if not probe.answer.done() or now < probe.asked_at + head_probes.QUESTION_SECONDS:
                return
            program.history = program.history.after(answered=probe.answer.result(), was_late=probe.is_late)
            program.probe = None
        with contextlib.suppress(RuntimeError):  # No thread is available now. The next check tries again.
            answer = self._threads.submit(does_answer, program, seconds=head_probes.QUESTION_SECONDS)
            program.probe = Probe(answer=answer, asked_at=now)

    def _start_again(self, program: HeadProgram) -> None:
        """Restart a program. A failed start is retried after a pause, like a process that dies at once."""
        _say(f"{program.name} has died and is started again")
        now = time.monotonic()
        program.pause_seconds = next_pause_seconds(program.pause_seconds, now - program.started_at)
        program.started_at, program.num_stopped_looks = now, 0
        program.history, program.probe = ProbeHistory(), None
        try:
            if program.name == RAYLET:
                self._make_room(program)
            process = subprocess.Popen(
                program.command,
                env=program.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,
            )
        except (OSError, ValueError) as error:
            _say(f"{program.name} could not be started: {error}")
        else:
            program.process = identify(process.pid) or program.process

    def _make_room(self, raylet: HeadProgram) -> None:
        """Kill a dead raylet's workers, remove its sockets, and give its command a new node id."""
        self._end_workers()
        for option in ("--raylet_socket_name", "--store_socket_name"):
            Path(_value(raylet.command, option)).unlink(missing_ok=True)
        raylet.command = as_new_node(raylet.command, secrets.token_hex(_NODE_ID_BYTES))

    def _end_workers(self) -> None:
        """Kill the workers of a dead raylet and the processes that they started. They would keep ports and devices."""
        members = session_members(self._session)
        titles = {member.pid: "".join(command_of(member.pid)[:1]) for member in members}
        workers = {pid for pid, title in titles.items() if title.startswith(_WORKER_TITLE)}
        for member in members:
            if member.pid in workers or group_of(member.pid) in workers:
                _kill(member)


def _kill(process: ProcessIdentity) -> None:
    if is_alive(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _say(what: str) -> None:
    with contextlib.suppress(OSError):  # For example, the disk is full.
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {what}", flush=True)


def main() -> int:
    started, *command = sys.argv[1:]
    code = subprocess.call(command)
    if code == 0:
        guardian = Guardian(os.getsid(0))
        Path(started).touch()
        guardian.watch()
    return code


if __name__ == "__main__":
    sys.exit(main())
