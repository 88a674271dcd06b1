"""Niceness of actors: the low priority that Ray gives its workers is taken back, or reported."""

import os
import subprocess
import sys

import pytest
from blockyard.proto.runtime.niceness import NICENESS_VARIABLE

CHILD = """
import logging, os, sys, threading
from blockyard.proto.runtime.niceness import take_usual_priority

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
threading.Thread(target=threading.Event().wait, daemon=True).start()
for thread in os.listdir("/proc/self/task"):
    os.setpriority(os.PRIO_PROCESS, int(thread), 3 + os.getpriority(os.PRIO_PROCESS, os.getppid()))
{drop}
take_usual_priority()
usual = os.getpriority(os.PRIO_PROCESS, os.getppid())
print([os.getpriority(os.PRIO_PROCESS, int(thread)) - usual for thread in os.listdir("/proc/self/task")])
"""
BECOME_UNPRIVILEGED = "os.setgid(65534); os.setuid(65534)"


def last_lines(drop: str = "", **variables: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != NICENESS_VARIABLE}
    result = subprocess.run(
        [sys.executable, "-c", CHILD.format(drop=drop)],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.splitlines()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may lower a niceness")
def test_every_thread_gets_the_niceness_of_the_raylet() -> None:
    said, niceness = last_lines()
    assert niceness == "[0, 0]"
    assert "which Ray had set" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_without_the_right_a_warning_names_the_variable() -> None:
    said, niceness = last_lines(BECOME_UNPRIVILEGED)
    assert niceness == "[3, 3]"
    assert f"{NICENESS_VARIABLE}=0" in said


def test_a_niceness_that_an_operator_has_set_is_kept() -> None:
    assert last_lines(**{NICENESS_VARIABLE: "3"}) == ["[3, 3]"]
