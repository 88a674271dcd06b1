"""The guardian of a Ray head: which processes it restarts, shown on programs with the names of Ray's."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from blockyard.deploy.machine.processes import (
    STOPPED,
    command_of,
    end_session,
    identify,
    is_alive,
    session_members,
    state_of,
)
from blockyard.deploy.ray.guardian import (
    DASHBOARD,
    GCS,
    LOOK_SECONDS,
    RAYLET,
    HeadProgram,
    does_answer,
    programs_of,
)
from blockyard.deploy.ray.head import (
    SUPERVISOR_TITLE,
    RayConnectError,
    RayletDiedError,
    check_alive,
    free_port,
    is_supervisor_stopped,
)

WAIT_SECONDS = 60.0
HEAD = textwrap.dedent("""
    import subprocess, sys
    folder = sys.argv[1]
    wait = ["-c", "import time; time.sleep(600)"]
    subprocess.Popen([f"{folder}/gcs_server", *wait])
    sockets = [f"--raylet_socket_name={folder}/raylet.sock", f"--store_socket_name={folder}/store.sock"]
    subprocess.Popen([f"{folder}/raylet", *wait, *sockets, "--node_id=first", "--agent=--node-id=first"])
    address = ["--host=127.0.0.1", f"--port={sys.argv[2]}"]
    subprocess.Popen([sys.executable, f"{folder}/ray/dashboard/dashboard.py", *address])
    subprocess.Popen(["ray::Worker", *wait], executable=sys.executable)
    subprocess.Popen(["ray::Supervisor", *wait], executable=sys.executable)
""")


SLEEPING = "import time; time.sleep(600)"
FALLING_SILENT = textwrap.dedent("""
    import http.server, sys, time
    class Handler(http.server.BaseHTTPRequestHandler):
        num_asked = 0
        def do_GET(self):
            Handler.num_asked += 1
            if Handler.num_asked > 3:
                time.sleep(600)
            self.send_response(200)
            self.end_headers()
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[2].partition("=")[2])), Handler).serve_forever()
""")


@pytest.fixture
def session(tmp_path: Path) -> Iterator[int]:
    """A guardian that has started its head leads it."""
    with guarded(tmp_path) as leader:
        yield leader


IMPATIENT = "guardian.MAX_STOPPED_LOOKS = 4"
"""It kills a stopped process after two seconds instead of twenty."""
ASKS_OFTEN = "head_probes.QUESTION_SECONDS, head_probes.HUNG_SECONDS = 1.0, 3.0"
ALWAYS_LATE = (
    "head_probes.QUESTION_SECONDS, head_probes.HUNG_SECONDS, head_probes.LATE_SECONDS = 0.5, 1.0, -0.1"
)
"""Every pause is too long for it."""


@contextmanager
def guarded(folder: Path, settings: str = "", *, dashboard: str = SLEEPING) -> Iterator[int]:
    for name in (GCS, RAYLET):
        (folder / name).symlink_to(os.path.realpath(sys.executable))
    (folder / "ray/dashboard").mkdir(parents=True)
    (folder / "ray/dashboard/dashboard.py").write_text(dashboard)
    for name in ("raylet.sock", "store.sock"):
        (folder / name).touch()
    started = folder / "started"
    program = f"from blockyard.deploy.ray import guardian, head_probes; {settings}\nguardian.main()"
    head = [sys.executable, "-c", HEAD, str(folder), str(free_port())]
    command = [sys.executable, "-c", program, str(started), *head]
    with (folder / "log").open("ab") as log:
        guardian = subprocess.Popen(command, start_new_session=True, stdout=log)
    try:
        until(started.exists)
        until(lambda: len(programs_of(guardian.pid)) == 3)
        yield guardian.pid
    finally:
        end_session(guardian.pid, session_members(guardian.pid))
        guardian.wait()


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_a_raylet_that_died_is_started_as_another_node_without_what_it_left(
    session: int, tmp_path: Path
) -> None:
    before = programs_of(session)[RAYLET]
    worker = next(one for one in session_members(session) if cmdline(one.pid).startswith(b"ray::"))
    kill(before.process.pid)
    until(lambda: is_other(session, before))
    after = programs_of(session)[RAYLET]
    assert not any("=first" in word for word in after.command)
    assert [word.partition("=")[0] for word in after.command] == [
        word.partition("=")[0] for word in before.command
    ]
    assert after.environment == before.environment
    assert not (tmp_path / "raylet.sock").exists()
    assert not (tmp_path / "store.sock").exists()
    until(lambda: not is_alive(worker))


def is_other(session: int, before: HeadProgram) -> bool:
    now = programs_of(session).get(before.name)
    return now is not None and now.process != before.process


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_dashboard_that_died_is_started_again_and_the_raylet_left_alone(session: int) -> None:
    before = programs_of(session)
    kill(before[DASHBOARD].process.pid)
    until(lambda: is_other(session, before[DASHBOARD]))
    after = programs_of(session)
    assert after[DASHBOARD].command == before[DASHBOARD].command
    assert after[RAYLET].process == before[RAYLET].process


@pytest.mark.parametrize("name", [RAYLET, DASHBOARD])
def test_a_part_that_stays_stopped_is_killed_and_started_again(tmp_path: Path, name: str) -> None:
    with guarded(tmp_path, IMPATIENT) as leader:
        before = programs_of(leader)
        os.kill(before[name].process.pid, signal.SIGSTOP)
        until(lambda: is_other(leader, before[name]))
        assert not is_alive(before[name].process)
        (other,) = {RAYLET, DASHBOARD} - {name}
        assert programs_of(leader)[other].process == before[other].process


def test_a_part_that_lives_and_answers_no_more_is_killed_and_started_again(tmp_path: Path) -> None:
    with guarded(tmp_path, ASKS_OFTEN, dashboard=FALLING_SILENT) as leader:
        before = programs_of(leader)
        until(lambda: is_other(leader, before[DASHBOARD]))
        assert not is_alive(before[DASHBOARD].process)
        assert "dashboard does not answer and is killed" in (tmp_path / "log").read_text()
        assert programs_of(leader)[RAYLET].process == before[RAYLET].process


def test_a_guardian_that_wakes_late_each_time_kills_no_part_for_its_silence(tmp_path: Path) -> None:
    with guarded(tmp_path, ALWAYS_LATE, dashboard=FALLING_SILENT) as leader:
        before = programs_of(leader)
        until(lambda: not does_answer(before[DASHBOARD], seconds=1.0))
        time.sleep(10 * LOOK_SECONDS)
        assert programs_of(leader)[DASHBOARD].process == before[DASHBOARD].process
        assert "does not answer" not in (tmp_path / "log").read_text()


def test_what_cannot_be_asked_is_not_held_to_be_silent() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    process = identify(child.pid)
    assert process is not None

    def answers(name: str, command: list[str], **environment: str) -> bool:
        return does_answer(
            HeadProgram(name=name, process=process, command=command, environment=environment), seconds=1.0
        )

    try:
        assert not answers(RAYLET, [])
        assert not answers(DASHBOARD, ["--host=127.0.0.1", f"--port={free_port()}"])
        assert answers(RAYLET, [], RAY_USE_TLS="1")
        assert answers(RAYLET, [], RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH="/nowhere")
        assert answers(DASHBOARD, ["--host=127.0.0.1"])
    finally:
        child.kill()
        child.wait()
    assert answers(RAYLET, []), "it has gone"


def test_a_start_that_fails_is_tried_again(session: int, tmp_path: Path) -> None:
    before = programs_of(session)
    (tmp_path / RAYLET).unlink()
    kill(before[RAYLET].process.pid)
    until(lambda: (tmp_path / "log").read_text().count("raylet could not be started") >= 2)
    (tmp_path / RAYLET).symlink_to(os.path.realpath(sys.executable))
    until(lambda: is_other(session, before[RAYLET]))
    kill(before[DASHBOARD].process.pid)
    until(lambda: is_other(session, before[DASHBOARD]))


def test_a_guardian_whose_log_has_no_room_goes_on(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to("/dev/full")
    with guarded(tmp_path) as leader:
        for _ in range(2):
            before = programs_of(leader)[DASHBOARD]
            kill(before.process.pid)
            until(lambda before=before: is_other(leader, before))


def test_a_guardian_ends_with_the_control_service(session: int) -> None:
    kill(programs_of(session)[GCS].process.pid)
    until(lambda: session not in {member.pid for member in session_members(session)})
    with pytest.raises(RayConnectError, match="gcs_server has died"):
        check_alive(session)


def test_a_command_neither_asks_a_stopped_raylet_nor_waits_for_a_stopped_supervisor(session: int) -> None:
    def supervisors() -> list[int]:
        members = (member.pid for member in session_members(session))
        return [pid for pid in members if command_of(pid)[:1] == [SUPERVISOR_TITLE]]

    check_alive(session)
    raylet = programs_of(session)[RAYLET].process.pid
    with stopped(raylet), pytest.raises(RayletDiedError, match="is stopped"):
        check_alive(session)
    until(lambda: supervisors() != [])
    assert not is_supervisor_stopped(session)
    with stopped(supervisors()[0]):
        assert is_supervisor_stopped(session)
    until(lambda: not is_supervisor_stopped(session))


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    until(lambda: state_of(pid) == STOPPED)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
