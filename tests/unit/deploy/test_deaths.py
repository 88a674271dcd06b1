"""The cause of a process's end, as the kernel reports it to a process that is not its parent."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from blockyard.deploy.machine import deaths
from blockyard.deploy.machine.deaths import DeathWatch, ending
from blockyard.deploy.supervision.actors import DiedError, deaths_as_errors, reason_by_ray
from ray.exceptions import OutOfMemoryError, RayActorError

from .incarnations import until

EXITED = 3 << 8
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


@pytest.mark.parametrize(
    ("status", "for_memory", "told"),
    [
        (signal.SIGKILL, False, "its process was killed by SIGKILL"),
        (signal.SIGKILL, True, "its process was killed for memory, by the kernel (SIGKILL)"),
        (signal.SIGSEGV, True, "its process was killed by SIGSEGV"),
        (signal.SIGSEGV | 0x80, False, "its process was killed by SIGSEGV"),
        (signal.SIGRTMIN + 1, False, "its process was killed by signal 35"),
        (EXITED, False, "its process exited with code 3"),
        (0, False, "its process exited with code 0"),
    ],
)
def test_a_status_is_told_in_words(status: int, for_memory: bool, told: str) -> None:
    assert ending(status, for_memory=for_memory) == told


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


async def test_nothing_is_told_of_one_that_lives() -> None:
    with contextlib.closing(DeathWatch()) as death:
        death.watch(os.getpid())
        assert await death.reason() == ""


async def test_nothing_is_told_of_one_that_had_gone_before(caplog: pytest.LogCaptureFixture) -> None:
    with grandchild(TO_EXIT) as (pid, parent):
        parent.communicate()
        with contextlib.closing(DeathWatch()) as death:
            death.watch(pid)
            assert await death.reason() == ""
    assert caplog.records == []


async def test_a_process_that_cannot_be_watched_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", refused)
    with contextlib.closing(DeathWatch()) as death:
        death.watch(os.getpid())
        assert await death.reason() == ""
    assert "the log will not say how: [Errno 24] Too many open files" in caplog.text


async def test_an_actors_death_is_told_by_ray_where_ray_knows_more_than_the_kernel() -> None:
    words = "The actor died because its node has died. Node Id: 1"
    for error, told in (
        (RayActorError(error_msg=words), "its node died"),
        (RayActorError(error_msg="Worker exit type: SYSTEM_ERROR"), "its process died"),
        (OutOfMemoryError("Task was killed due to the node running low on memory"), "short of memory"),
    ):
        with pytest.raises(DiedError, match=told):
            async with deaths_as_errors():
                raise error
    assert (
        reason_by_ray("Worker exit type: NODE_OUT_OF_MEMORY")
        == "Ray killed its process: its node was short of memory"
    )


async def test_where_ray_lost_a_connection_the_kernel_tells_of_an_actors_death() -> None:
    with pytest.raises(DiedError, match="killed by SIGKILL"):
        await killed()


async def killed() -> None:
    with grandchild(TO_WAIT) as (pid, _):
        async with deaths_as_errors() as death:
            death.watch(pid)
            os.kill(pid, signal.SIGKILL)
            raise RayActorError(error_msg="Worker exit type: SYSTEM_ERROR Worker exit detail: End of file")
