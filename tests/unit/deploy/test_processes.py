"""Ending whole sessions of real processes, and only those that certainly belong to the cluster."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from blockyard.deploy.machine.processes import (
    ProcessIdentity,
    end_session,
    identify,
    is_alive,
    listening_ports,
    session_members,
)

GRANDCHILD = "import os, time; os.setpgrp(); print(os.getpid(), flush=True); time.sleep(60)"
LEADER = (
    f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {GRANDCHILD!r}]); time.sleep(60)"
)


@pytest.fixture
def session() -> Iterator[tuple[ProcessIdentity, ProcessIdentity]]:
    """The leader of a session, and a grandchild that left its process group as Ray's workers do."""
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
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


def test_a_session_ends_with_members_that_left_its_process_group(
    session: tuple[ProcessIdentity, ProcessIdentity],
) -> None:
    leader, grandchild = session
    end_session(leader.pid, [leader])
    assert not is_alive(leader)
    assert not is_alive(grandchild)


def test_a_session_ends_when_its_leader_has_died_already(
    session: tuple[ProcessIdentity, ProcessIdentity],
) -> None:
    leader, grandchild = session
    os.kill(leader.pid, signal.SIGKILL)
    end_session(leader.pid, [leader, grandchild])
    assert not is_alive(grandchild)


def test_a_session_whose_number_passed_to_others_is_left_alone(
    session: tuple[ProcessIdentity, ProcessIdentity],
) -> None:
    leader, grandchild = session
    of_another_life = ProcessIdentity(pid=leader.pid, start_ticks=leader.start_ticks - 1)
    end_session(leader.pid, [of_another_life])
    assert is_alive(leader)
    assert is_alive(grandchild)


def test_a_process_that_has_gone_is_not_alive_though_nobody_reaped_it() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"], stdout=subprocess.PIPE)
    identity = identify(child.pid)
    assert identity is not None
    assert child.stdout is not None
    child.stdout.read()  # Its end closes the pipe.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(identity)
    child.stdout.close()
    child.wait()


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_ports_of_a_process_are_those_at_which_it_takes_connections(
    family: socket.AddressFamily, host: str
) -> None:
    before = listening_ports(os.getpid())
    with socket.socket(family) as server, socket.socket(family) as bound:
        try:
            server.bind((host, 0))
        except OSError:
            pytest.skip(f"this machine has no {host}")
        bound.bind((host, 0))
        server.listen()
        port = server.getsockname()[1]
        with socket.create_connection((host, port)):
            assert listening_ports(os.getpid()) == before | {port}
    assert listening_ports(os.getpid()) == before
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    with pytest.raises(OSError, match="No such file"):
        listening_ports(child.pid)
