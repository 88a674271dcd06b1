"""Processes of this machine: their sessions and ends, signals to a command, deadlines, and one `up` at a time."""

import contextlib
import ctypes
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from blockyard.deploy.machine import deaths, state
from blockyard.deploy.machine.deadline import ANSWER_SECONDS, Child
from blockyard.deploy.machine.deaths import DeathWatch
from blockyard.deploy.machine.processes import (
    ProcessIdentity,
    end_session,
    identify,
    is_alive,
    listening_ports,
    session_members,
)
from blockyard.deploy.ray.head_probes import HTTP2_SETTINGS
from blockyard.deploy.supervision.actors import DiedError, deaths_as_errors
from ray.exceptions import RayActorError

from tests.unit.deploy.incarnations import until

from .rig import blockyard, python

MEMBER = "import os, time; os.setpgrp(); print(os.getpid(), flush=True); time.sleep(60)"
LEADER = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {MEMBER!r}]); time.sleep(60)"


@pytest.fixture
def session() -> Iterator[tuple[ProcessIdentity, ProcessIdentity]]:
    """The leader of a session, and a grandchild that left its process group as Ray's workers do."""
    command = [sys.executable, "-c", LEADER]
    leader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert leader.stdout is not None
    grandchild = int(leader.stdout.readline())
    identities = identify(leader.pid), identify(grandchild)
    first, second = identities
    assert first is not None
    assert second is not None
    yield first, second
    for identity in session_members(leader.pid):
        os.kill(identity.pid, signal.SIGKILL)
    leader.stdout.close()
    leader.wait()


@pytest.mark.parametrize("is_leader_dead", [False, True])
def test_a_session_ends_with_members_that_left_its_process_group(
    session: tuple[ProcessIdentity, ProcessIdentity], is_leader_dead: bool
) -> None:
    leader, member = session
    of_another_life = ProcessIdentity(pid=leader.pid, start_ticks=leader.start_ticks - 1)
    end_session(leader.pid, [of_another_life])
    assert is_alive(leader), "a session whose number passed to others is left alone"
    assert is_alive(member)
    if is_leader_dead:
        os.kill(leader.pid, signal.SIGKILL)
    end_session(leader.pid, [leader, member] if is_leader_dead else [leader])
    assert not is_alive(member)
    assert is_leader_dead or not is_alive(leader)


def test_a_process_that_has_gone_is_not_alive_though_nobody_reaped_it_and_listens_nowhere() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    identity = identify(child.pid)
    assert identity is not None
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(identity)
    child.wait()
    with pytest.raises(OSError, match="No such file"):
        listening_ports(child.pid)


GRANDCHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE)
print(child.pid, flush=True)
sys.stdin.readline()
child.communicate(b"go")
"""

TO_EXIT = "import os, sys; sys.stdin.readline(); os._exit(3)"

TO_WAIT = "import time; time.sleep(60)"


@contextlib.contextmanager
def grandchild(program: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """Yield a process that we cannot wait for, and its parent, which waits for it once its input is closed."""
    parent = subprocess.Popen(
        [sys.executable, "-c", GRANDCHILD, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    try:
        yield pid, parent
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        parent.communicate()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
async def test_the_signal_that_killed_it_is_named_before_its_parent_takes_note(
    number: signal.Signals,
) -> None:
    with grandchild(TO_WAIT) as (pid, _), contextlib.closing(DeathWatch()) as death:
        death.watch(pid)
        os.kill(pid, number)
        assert await death.reason() == f"its process was killed by {number.name}"


async def test_its_exit_code_is_told_after_its_parent_has_taken_note() -> None:
    with grandchild(TO_EXIT) as (pid, parent), contextlib.closing(DeathWatch()) as death:
        death.watch(pid)
        parent.communicate()
        told = await death.reason()
        assert told in ("its process exited with code 3", ""), "older kernels do not say"


@pytest.mark.parametrize(("looks", "told"), [(0, "for memory, by the kernel"), (2, "by SIGKILL")])
async def test_only_a_kill_for_memory_of_just_now_explains_a_sigkill(
    looks: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deaths, "MEMORY_SECONDS", 0.01 if looks else 60.0)
    kills, num_looks = [0], [0]

    def count() -> int:
        num_looks[0] += 1
        return kills[0]

    with grandchild(TO_WAIT) as (pid, _), contextlib.closing(DeathWatch(count)) as death:
        death.watch(pid)
        kills[0], num_looks[0] = 1, 0
        await until(lambda: num_looks[0] >= looks)
        os.kill(pid, signal.SIGKILL)
        assert await death.reason() == f"its process was killed {told}" + (" (SIGKILL)" if not looks else "")


async def test_nothing_is_told_of_one_that_had_gone_before(caplog: pytest.LogCaptureFixture) -> None:
    with grandchild(TO_EXIT) as (pid, parent):
        parent.communicate()
        with contextlib.closing(DeathWatch()) as death:
            death.watch(pid)
            assert await death.reason() == ""
    assert caplog.records == []


async def test_where_ray_lost_a_connection_the_kernel_tells_of_an_actors_death() -> None:
    async def killed() -> None:
        with grandchild(TO_WAIT) as (pid, _):
            async with deaths_as_errors() as death:
                death.watch(pid)
                os.kill(pid, signal.SIGKILL)
                raise RayActorError(
                    error_msg="Worker exit type: SYSTEM_ERROR Worker exit detail: End of file"
                )

    with pytest.raises(DiedError, match="killed by SIGKILL"):
        await killed()


SECONDS = 60.0
TICK_SECONDS = 0.02

"""Twice the unit in which Linux tells when a process began."""

SETTINGS_FRAME = b"\0\0\0" + HTTP2_SETTINGS + b"\0\0\0\0\0"


def test_a_process_that_has_just_begun_has_its_start_counted() -> None:
    begun = time.monotonic()
    imported = "from blockyard.deploy.machine.deadline import Budget; "
    told = python(f"{imported}print(Budget.of_this_process().left_seconds)").stdout
    took_seconds = time.monotonic() - begun
    assert ANSWER_SECONDS - took_seconds - TICK_SECONDS <= float(told) < ANSWER_SECONDS


def test_what_a_child_finds_or_raises_is_the_answer() -> None:
    def raises(send: Callable[[Any], None]) -> None:
        raise RuntimeError("nobody is there")

    assert Child(lambda send: send(("found", 3))).answer(SECONDS, "silent") == ("found", 3)
    with pytest.raises(RuntimeError, match="nobody is there"):
        Child(raises).answer(SECONDS, "silent")


def test_a_child_that_hangs_with_pythons_lock_is_given_up_and_ended() -> None:
    reading, writing = os.pipe()

    def hangs(send: Callable[[Any], None]) -> None:
        os.write(writing, f"{os.getpid()}".encode())
        ctypes.PyDLL(None).sleep(600)  # It keeps the lock, as Ray does while it joins.

    child = Child(hangs)
    pid = int(os.read(reading, 20))
    with pytest.raises(TimeoutError, match="Ray is silent"):
        child.answer(0.2, "Ray is silent")
    assert not Path(f"/proc/{pid}").exists()
    os.close(reading)
    os.close(writing)


def test_a_child_that_dies_is_silent_and_its_end_is_told() -> None:
    with pytest.raises(TimeoutError, match=r"Ray is silent \(the process that asked has ended with code 7\)"):
        Child(lambda send: os._exit(7)).answer(SECONDS, "Ray is silent")


@contextmanager
def frozen_ray() -> Iterator[str]:
    """The address of one that greets and then says nothing, as where its raylet or its control service hangs."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = list[socket.socket]()

        def greet() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                taken.append(connection)
                connection.sendall(SETTINGS_FRAME)

        greeting = threading.Thread(target=greet)
        greeting.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            greeting.join()
            for connection in taken:
                connection.close()


def test_every_command_says_that_a_ray_is_silent_or_gone_and_ends(home: Path) -> None:
    with frozen_ray() as address:
        state.save(state.ClusterState(cluster="default", model="m", secret="s", ray_address=address))
        lines = ("status", "scale 2", "restart", "down", f"doctor --address {address}")
        asked = {line.split()[0]: blockyard(*line.split()) for line in lines}
        # Ray itself waits for more than a minute.
        said = {name: process.communicate(timeout=SECONDS) for name, process in asked.items()}
    for name, (_, errors) in said.items():
        assert f"Error: Ray at {address} does not answer within the 8.5 s" in errors, name
        assert "compare it with the address that `ray start` prints" in errors, name
        assert "Traceback" not in errors
        assert asked[name].returncode == 1
    assert "no router answers" in said["status"][0]
    _, errors = blockyard("down").communicate(timeout=SECONDS)
    assert f"no Ray answers at {address}" in errors


def test_a_command_that_hangs_says_its_sentence_and_ends() -> None:
    hangs = "import time\nfrom blockyard.deploy.machine.deadline import answers_within\n"
    result = python(f"{hangs}with answers_within(0.2, 'nobody answers; try again'): time.sleep(600)")
    assert (result.returncode, result.stderr) == (1, "Error: nobody answers; try again\n")


SCRIPT = """
import os, signal, sys
from blockyard.deploy.machine.interruption import end_like_ctrl_c, raise_if_asked

class Lost:
    def __del__(self):
        os.kill(os.getpid(), int(sys.argv[1]))
        for _ in range(1000):
            pass

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # The tests may run under nohup.
end_like_ctrl_c()
raise_if_asked()
Lost()
print("went on", flush=True)
raise_if_asked()
print("never", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_within_a_librarys_callback_is_not_lost(number: signal.Signals) -> None:
    result = python(SCRIPT, str(int(number)))
    assert result.stdout == "went on\n"
    assert result.returncode == -signal.SIGINT
    assert "Exception ignored" in result.stderr


UNDOING = """
import os, pathlib, signal, sys, time
from blockyard.deploy.machine.interruption import end_like_ctrl_c
from blockyard.deploy.lifecycle.progress import StageProgress
from blockyard.deploy.lifecycle.serving import Progress

signal.signal(signal.SIGHUP, signal.SIG_DFL)
end_like_ctrl_c()
try:
    print("serves", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    os.kill(os.getpid(), signal.SIGTERM)
    with StageProgress() as progress:
        progress.report(Progress(stage="saying goodbye"))
        time.sleep(0.5)
        progress.report(Progress(stage="stopping processes"))
    print("down", file=sys.stderr, flush=True)
    pathlib.Path(sys.argv[1]).touch()
"""


def test_a_terminal_that_closes_and_a_second_signal_end_no_undoing(tmp_path: Path) -> None:
    done = tmp_path / "done"
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", UNDOING, str(done)])
    told = b""
    while b"serves" not in told:
        told += os.read(terminal, 1024)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert (done.exists(), os.waitstatus_to_exitcode(status)) == (True, 0)


def test_nohup_keeps_its_word() -> None:
    code = (
        "import os, signal\n"
        "from blockyard.deploy.machine.interruption import end_like_ctrl_c\n"
        "end_like_ctrl_c()\n"
        "os.kill(os.getpid(), signal.SIGHUP)\n"
        "print('goes on')\n"
    )
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        result = python(code)
    finally:
        signal.signal(signal.SIGHUP, ignored)
    assert (result.returncode, result.stdout) == (0, "goes on\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_gone_ends_no_start_and_no_end(unbuffered: str) -> None:
    code = (
        "import sys\n"
        "from blockyard.deploy.lifecycle.progress import StageProgress\n"
        "from blockyard.deploy.lifecycle.serving import Progress\n"
        "sys.stdin.readline()\n"
        "with StageProgress() as progress:\n"
        "    for number in range(3):\n"
        "        progress.report(Progress(stage=str(number), warning='unread'))\n"
        "print('to the end')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    assert process.stderr is not None
    process.stderr.close()
    process.stderr = None
    told, _ = process.communicate("\n", timeout=60)
    assert (process.returncode, told) == (0, "to the end\n")


NUM_COMMANDS = 4

TAKE = """
import sys
from blockyard.deploy.lifecycle.cluster import _take_name
from blockyard.deploy.settings.wanted_cluster import UpOptions
from blockyard.worker.config import EngineConfig
options = UpOptions(engine=EngineConfig(model="demo"))
print("ready", flush=True)
sys.stdin.readline()
try:
    print(_take_name(options).directory, flush=True)
except ValueError as error:
    print(error, flush=True)
sys.stdin.readline()  # It lives on, as an `up` that starts its cluster.
"""


@pytest.mark.parametrize("is_left_by_a_crash", [False, True])
def test_one_of_several_commands_takes_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_left_by_a_crash: bool
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    if is_left_by_a_crash:
        state.save(state.ClusterState(cluster="default", model="m", secret="s"))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    commands = [subprocess.Popen([sys.executable, "-c", TAKE], **pipes) for _ in range(NUM_COMMANDS)]
    try:
        assert [command.stdout.readline() for command in commands] == ["ready\n"] * NUM_COMMANDS
        for command in commands:
            command.stdin.write("go\n")
            command.stdin.flush()
        said = [command.stdout.readline().strip() for command in commands]
    finally:
        for command in commands:
            command.communicate(timeout=60.0)
    refused = [line for line in said if "cluster 'default' is up already" in line]
    (directory,) = set(said) - set(refused)
    assert len(refused) == NUM_COMMANDS - 1, said
    assert state.load("default").directory == directory


COMPLAINT = """
import sys
from pathlib import Path
from blockyard.deploy.lifecycle.progress import StageProgress
from blockyard.deploy.ray.head import words_kept
from blockyard.deploy.lifecycle.serving import Progress
from ray import NodeID

with StageProgress() as progress:
    for path in map(Path, sys.argv[1:]):
        with words_kept(path):
            NodeID.from_hex("half")
            progress.report(Progress(stage=f"goodbye to {path.name}"))
            print("by Python", file=sys.stderr)
print("after", file=sys.stderr)
NodeID.from_hex("after")
"""


def test_what_ray_complains_of_while_a_cluster_ends_is_kept_from_the_terminal(tmp_path: Path) -> None:
    log, nowhere = tmp_path / "log", tmp_path / "gone" / "other"
    result = python(COMPLAINT, str(log), str(nowhere))
    assert result.returncode == 0, result.stderr
    *told, complaint = (line.partition("] ")[2] or line for line in result.stderr.splitlines())
    assert told == ["goodbye to log", "by Python", "goodbye to other", "by Python", "after"]
    assert "hex string: after" in complaint, "else there was nothing to keep"
    assert "hex string: half" in log.read_text(encoding="utf-8")
