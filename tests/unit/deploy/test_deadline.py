"""No command waits longer than its budget for a service that does not answer."""

import ctypes
import os
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
from blockyard.deploy.machine import state
from blockyard.deploy.machine.deadline import (
    ANSWER_SECONDS,
    MAX_START_SECONDS,
    MIN_STEP_SECONDS,
    Budget,
    Child,
    answers_within,
)
from blockyard.deploy.ray.head_probes import HTTP2_SETTINGS
from hypothesis import given
from hypothesis import strategies as st

SECONDS = 60.0
TICK_SECONDS = 0.02
"""Twice the unit in which Linux tells when a process began."""
SETTINGS_FRAME = b"\0\0\0" + HTTP2_SETTINGS + b"\0\0\0\0\0"


@given(
    age_seconds=st.floats(-1.0, 1000.0),
    wanted_seconds=st.lists(st.floats(0.01, 20.0), max_size=8),
)
def test_steps_that_all_take_what_they_may_end_within_the_budget(
    age_seconds: float, wanted_seconds: list[float]
) -> None:
    now = 100.0
    budget = Budget(age_seconds, clock=lambda: now)
    assert budget.left_seconds >= ANSWER_SECONDS - MAX_START_SECONDS - 1e-9
    for wanted in wanted_seconds:
        step_seconds = budget.step_seconds(wanted)
        assert MIN_STEP_SECONDS <= step_seconds <= max(wanted, MIN_STEP_SECONDS)
        now += step_seconds
    counted_seconds = min(max(age_seconds, 0.0), MAX_START_SECONDS)
    assert now - 100.0 + counted_seconds <= ANSWER_SECONDS + len(wanted_seconds) * MIN_STEP_SECONDS
    assert budget.left_seconds >= 0.0


def test_a_process_that_has_just_begun_has_its_start_counted() -> None:
    says = (
        "from blockyard.deploy.machine.deadline import Budget; print(Budget.of_this_process().left_seconds)"
    )
    begun = time.monotonic()
    told = subprocess.run([sys.executable, "-c", says], capture_output=True, text=True, check=True)
    took_seconds = time.monotonic() - begun
    assert ANSWER_SECONDS - took_seconds - TICK_SECONDS <= float(told.stdout) < ANSWER_SECONDS


def test_what_a_child_finds_or_raises_is_the_answer() -> None:
    def raises(send: Callable[[Any], None]) -> None:
        raise RuntimeError("nobody is there")

    assert Child(lambda send: send(("found", 3))).answer(SECONDS, "silent") == ("found", 3)
    with pytest.raises(RuntimeError, match="nobody is there"):
        Child(raises).answer(SECONDS, "silent")


def test_a_child_that_hangs_with_pythons_lock_is_given_up_and_ended() -> None:
    def hangs(send: Callable[[Any], None]) -> None:
        send_pid(os.getpid())
        ctypes.PyDLL(None).sleep(600)  # It keeps the lock, as Ray does while it joins.

    reading, writing = os.pipe()

    def send_pid(pid: int) -> None:
        os.write(writing, f"{pid}".encode())

    child = Child(hangs)
    pid = int(os.read(reading, 20))
    with pytest.raises(TimeoutError, match="Ray is silent"):
        child.answer(0.2, "Ray is silent")
    assert not Path(f"/proc/{pid}").exists()
    os.close(reading)
    os.close(writing)


def test_a_child_that_dies_is_silent() -> None:
    with pytest.raises(TimeoutError, match="Ray is silent"):
        Child(lambda send: os._exit(1)).answer(SECONDS, "Ray is silent")


def test_the_end_of_a_child_is_told_apart_from_its_silence() -> None:
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


@pytest.mark.ci
def test_every_command_says_that_a_ray_is_silent_and_ends(tmp_path: Path) -> None:
    with frozen_ray() as address:
        joined = state.ClusterState(cluster="default", model="m", secret="s", ray_address=address)
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv(state.HOME_VARIABLE, str(tmp_path))
            state.save(joined)
        asked = {
            words[0]: subprocess.Popen(
                [sys.executable, "-m", "blockyard.deploy.cli", *words],
                env={**os.environ, state.HOME_VARIABLE: str(tmp_path)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for words in (
                ("status",),
                ("scale", "2"),
                ("restart",),
                ("down",),
                ("doctor", "--address", address),
            )
        }
        # Ray itself waits for more than a minute.
        said = {name: process.communicate(timeout=SECONDS) for name, process in asked.items()}
    for name, (_, errors) in said.items():
        assert f"Error: Ray at {address} does not answer within the 8.5 s" in errors, name
        assert "compare it with the address that `ray start` prints" in errors, name
        assert "Traceback" not in errors
        assert asked[name].returncode == 1
    assert "no router answers" in said["status"][0]


def test_a_command_that_hangs_says_its_sentence_and_ends() -> None:
    hangs = "import time\nfrom blockyard.deploy.machine.deadline import answers_within\n"
    hangs += "with answers_within(0.2, 'nobody answers; try again'): time.sleep(600)"
    result = subprocess.run(
        [sys.executable, "-c", hangs], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stderr) == (1, "Error: nobody answers; try again\n")


def test_a_command_that_answers_in_time_is_left_alone() -> None:
    said: list[str] = []
    with answers_within(1.0, "too late", give_up=said.append):
        pass
    time.sleep(1.2)
    assert said == []
