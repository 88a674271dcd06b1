"""What the guardian of a head starts again, on programs that bear the names of Ray's."""

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
from blockyard.deploy.guardian import (
    DASHBOARD,
    GCS,
    MAX_PAUSE_SECONDS,
    RAYLET,
    STEADY_SECONDS,
    Part,
    next_pause_seconds,
    parts_of,
)
from blockyard.deploy.processes import (
    STOPPED,
    command_of,
    end_session,
    is_alive,
    session_members,
    state_of,
)
from blockyard.deploy.ray_head import (
    SUPERVISOR_TITLE,
    RayConnectError,
    RayletDiedError,
    check_alive,
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
    subprocess.Popen([sys.executable, f"{folder}/ray/dashboard/dashboard.py"])
    subprocess.Popen(["ray::Worker", *wait], executable=sys.executable)
    subprocess.Popen(["ray::Supervisor", *wait], executable=sys.executable)
""")


@pytest.fixture
def session(tmp_path: Path) -> Iterator[int]:
    """Of a guardian that has started its head."""
    for name in (GCS, RAYLET):
        (tmp_path / name).symlink_to(os.path.realpath(sys.executable))
    (tmp_path / "ray/dashboard").mkdir(parents=True)
    (tmp_path / "ray/dashboard/dashboard.py").write_text("import time; time.sleep(600)")
    for name in ("raylet.sock", "store.sock"):
        (tmp_path / name).touch()
    started = tmp_path / "started"
    command = [sys.executable, "-m", "blockyard.deploy.guardian", str(started)]
    head = [sys.executable, "-c", HEAD, str(tmp_path)]
    guardian = subprocess.Popen([*command, *head], start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        until(started.exists)
        until(lambda: len(parts_of(guardian.pid)) == 3)
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
    before = parts_of(session)[RAYLET]
    worker = next(one for one in session_members(session) if cmdline(one.pid).startswith(b"ray::"))
    kill(before.process.pid)
    until(lambda: is_other(session, before))
    after = parts_of(session)[RAYLET]
    assert not any("=first" in word for word in after.command)
    assert [word.partition("=")[0] for word in after.command] == [
        word.partition("=")[0] for word in before.command
    ]
    assert after.environment == before.environment
    assert not (tmp_path / "raylet.sock").exists()
    assert not (tmp_path / "store.sock").exists()
    until(lambda: not is_alive(worker))


def is_other(session: int, before: Part) -> bool:
    now = parts_of(session).get(before.name)
    return now is not None and now.process != before.process


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_dashboard_that_died_is_started_again_and_the_raylet_left_alone(session: int) -> None:
    before = parts_of(session)
    kill(before[DASHBOARD].process.pid)
    until(lambda: is_other(session, before[DASHBOARD]))
    after = parts_of(session)
    assert after[DASHBOARD].command == before[DASHBOARD].command
    assert after[RAYLET].process == before[RAYLET].process


def test_a_guardian_ends_with_the_control_service(session: int) -> None:
    kill(parts_of(session)[GCS].process.pid)
    until(lambda: session not in {member.pid for member in session_members(session)})
    with pytest.raises(RayConnectError, match="gcs_server has died"):
        check_alive(session)


def test_a_command_asks_no_ray_whose_raylet_is_stopped(session: int) -> None:
    check_alive(session)
    with stopped(parts_of(session)[RAYLET].process.pid), pytest.raises(RayletDiedError, match="is stopped"):
        check_alive(session)


def test_a_command_does_not_wait_for_a_supervisor_that_is_stopped(session: int) -> None:
    until(
        lambda: any(command_of(member.pid)[:1] == [SUPERVISOR_TITLE] for member in session_members(session))
    )
    assert not is_supervisor_stopped(session)
    (supervisor,) = (
        member.pid for member in session_members(session) if command_of(member.pid)[:1] == [SUPERVISOR_TITLE]
    )
    with stopped(supervisor):
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


def test_a_part_that_dies_again_and_again_is_started_less_and_less_often() -> None:
    pauses = [0.0]
    for _ in range(7):
        pauses.append(next_pause_seconds(pauses[-1], alive_seconds=1.0))
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, MAX_PAUSE_SECONDS, MAX_PAUSE_SECONDS]
    assert next_pause_seconds(pauses[-1], alive_seconds=STEADY_SECONDS) == 0.0
