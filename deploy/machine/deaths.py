"""Finds out how a process on this machine has ended: its signal or exit code, and whether it was an OOM kill.

Asks the kernel through a pidfd that is opened while the process lives, so the process need not be a child. Linux
answers since 6.15. Older kernels answer only until the parent has reaped the process. Does not own which processes are
watched (supervision/supervisor.py).
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import struct
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)
MEMORY_SECONDS = 2.0
"""Interval between readings of the OOM-kill counter."""
_LOOK_SECONDS = 0.02
_LOOKS = 50
"""One second of attempts. The kernel has the status within milliseconds, once the process is a zombie or reaped."""
_INFO = struct.Struct("=QQ11Ii")
"""The kernel's struct pidfd_info. The first field is a mask of valid fields, the last is the status."""
_GET_INFO = 0xC0000000 | _INFO.size << 16 | 0xFF << 8 | 11
"""PIDFD_GET_INFO, an ioctl that reads and writes _INFO."""
_HAS_STATUS = 1 << 3


def num_memory_kills() -> int:
    """Return the number of OOM kills in this process's control group so far.

    If the group has no counter, return the number on the whole machine. Return 0 if that cannot be read either.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        group = Path("/proc/self/cgroup").read_text(encoding="ascii").rpartition("0::")[2].strip()
        for counters in (Path(f"/sys/fs/cgroup{group}/memory.events"), Path("/proc/vmstat")):
            if counters.exists():
                lines = (line.split() for line in counters.read_text(encoding="ascii").splitlines())
                return next(int(count) for name, count in lines if name == "oom_kill")
    return 0


class DeathWatch:
    """Watches one process from `watch` until `close`. Needs a running event loop."""

    def __init__(self, memory_kills: Callable[[], int] = num_memory_kills) -> None:
        """Take `memory_kills`, which returns the number of OOM kills so far."""
        self._pid = 0
        self._pidfd: int | None = None
        self._count_kills = memory_kills
        self._kills = memory_kills(), memory_kills()
        """The last two readings of the OOM-kill counter. Kills that the first one counts were of other processes."""
        self._next_look: asyncio.TimerHandle | None = None

    def watch(self, pid: int) -> None:
        """Begin to watch a process, unless it has already ended. Call it once."""
        try:
            self._pid, self._pidfd = pid, os.pidfd_open(pid)
        except ProcessLookupError:
            return  # It has already ended.
        except OSError as error:
            logger.warning("if process %d ends, the log will not say how: %s", pid, error)
            return
        self._look()

    def close(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
        if self._pidfd is not None:
            os.close(self._pidfd)

    def _look(self) -> None:
        self._kills = self._kills[1], self._count_kills()
        self._next_look = asyncio.get_running_loop().call_later(MEMORY_SECONDS, self._look)

    async def reason(self) -> str:
        """Describe how the process ended. Wait up to one second for its status.

        Empty if the process lives, was not watched, or the kernel does not say.
        """
        for _ in range(_LOOKS if self._pidfd is not None else 0):
            if (status := self._status()) is not None:
                return ending(status, for_memory=self._count_kills() > self._kills[0])
            await asyncio.sleep(_LOOK_SECONDS)
        return ""

    def _status(self) -> int | None:
        """Return the process's wait status, as waitpid would, or None if the kernel does not give it."""
        assert self._pidfd is not None
        info = bytearray(_INFO.pack(_HAS_STATUS, *[0] * 13))
        with contextlib.suppress(OSError):
            fcntl.ioctl(self._pidfd, _GET_INFO, info)
            mask, *_, status = _INFO.unpack(info)
            if mask & _HAS_STATUS:
                return int(status)
        return _status_of_zombie(self._pid)


def ending(status: int, *, for_memory: bool) -> str:
    """Describe a wait status in words. `for_memory`: an OOM kill was counted shortly before."""
    if not os.WIFSIGNALED(status):
        return f"its process exited with code {os.WEXITSTATUS(status)}"
    number = os.WTERMSIG(status)
    if number == signal.SIGKILL and for_memory:
        return "its process was killed for memory, by the kernel (SIGKILL)"
    return f"its process was killed by {_name(number)}"


def _name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _status_of_zombie(pid: int) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        fields = (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
        if fields[0] == "Z":
            return int(fields[-1])
    return None
