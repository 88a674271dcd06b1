"""Processes of the router benchmark: starts, queries, measures and ends them.

Owns child processes and their CPU time (from /proc, on Linux). Does not own what they do, or the figures.
"""

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECRET_VARIABLE = "BLOCKYARD_CLUSTER_SECRET"
ROOT = Path(__file__).parents[2]
START_SECONDS = 60.0
STOP_SECONDS = 10.0
POLL_SECONDS = 0.05
MAX_ANSWER_BYTES = 2**28
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


class Workers:
    """A process of scripted workers."""

    def __init__(
        self, process: asyncio.subprocess.Process, ports: Sequence[int], secret: str = "", root: Path = ROOT
    ) -> None:
        """Hold a process. With a secret, the workers serve over TLS. `root` has the code of workers and router."""
        self._process = process
        self.secret = secret
        self.root = root
        self.addresses = tuple(f"127.0.0.1:{port}" for port in ports)

    async def take_stamps(self) -> dict[int, dict[str, Any]]:
        """Return, for requests since the last call, the times of arrival and of each token's emission."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"stamps\n")
        return {int(number): stamps for number, stamps in (await _answer(self._process)).items()}


@asynccontextmanager
async def running_workers(
    module: str, *arguments: str, secret: str = "", root: Path = ROOT
) -> AsyncIterator[Workers]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        cwd=root,
        env={**code_of(root), SECRET_VARIABLE: secret},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=MAX_ANSWER_BYTES,
    )
    async with _ended(process):
        yield Workers(process, await _answer(process), secret, root)


def code_of(root: Path) -> dict[str, str]:
    """Return an environment in which `blockyard` is the code of the checkout `root`.

    For another checkout than this one, a link in it, .typing/blockyard, takes the place of the installed package.
    """
    if root == ROOT:
        return dict(os.environ)
    package = root / ".typing" / "blockyard"
    if not package.exists():
        package.parent.mkdir(exist_ok=True)
        package.symlink_to("..", target_is_directory=True)
    return {**os.environ, "PYTHONPATH": str(package.parent)}


async def _answer(process: asyncio.subprocess.Process) -> Any:
    assert process.stdout is not None
    async with asyncio.timeout(START_SECONDS):
        line = await process.stdout.readline()
    if not line:
        raise RuntimeError("the process of scripted workers has ended")
    return json.loads(line)


@asynccontextmanager
async def running_server(
    command: Sequence[str],
    log: Path,
    is_ready: Callable[[], Awaitable[bool]],
    env: Mapping[str, str],
    root: Path = ROOT,
) -> AsyncIterator[int]:
    """Start a server and yield its pid once it is ready. Raise RuntimeError with the end of its log if it fails."""
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=root, env={**code_of(root), **env}, stdout=file, stderr=file
        )
    async with _ended(process):
        deadline = time.monotonic() + START_SECONDS
        while not await is_ready():
            if process.returncode is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[2]} did not become ready:\n{_tail(log)}")
            await asyncio.sleep(POLL_SECONDS)
        yield process.pid


@asynccontextmanager
async def _ended(process: asyncio.subprocess.Process) -> AsyncIterator[None]:
    try:
        yield
    finally:
        if process.stdin is not None:
            process.stdin.close()
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-2000:]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuClock:
    """CPU seconds so far: of the measured processes, of the benchmark, and of the whole machine."""

    now: float
    """Seconds on the machine's monotonic clock."""
    measured: float
    ours: float
    """CPU seconds of this benchmark and its descendants, including the measured ones."""
    machine: float


def foreign_cores(before: CpuClock, after: CpuClock) -> float:
    """Return the cores that programs other than this benchmark, or other virtual machines, used in between."""
    foreign = (after.machine - after.ours) - (before.machine - before.ours)
    return max(foreign, 0.0) / (after.now - before.now)


def cpu_clock(measured: Iterable[int]) -> CpuClock:
    """Read the clocks of this process's descendants, some of which are `measured` with all of theirs."""
    seconds = {pid: seconds_of(pid) for pid in tree(os.getpid())}
    return CpuClock(
        now=time.monotonic(),
        measured=sum(seconds.get(member, 0.0) for pid in measured for member in tree(pid)),
        ours=sum(seconds.values()),
        machine=machine_seconds(),
    )


def tree(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    return [pid, *(member for child in _children(pid) for member in tree(child))]


def seconds_of(pid: int) -> float:
    """Return the CPU seconds of a process and of its ended threads. 0: it is gone.

    Usual figures have ticks of 10 ms. The clock's number is Linux's, as clock_getcpuclockid(3) gives it.
    """
    with suppress(OSError):
        return time.clock_gettime((~pid << 3) | 2)
    return 0.0


def _children(pid: int) -> list[int]:
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            children += map(int, task.read_text(encoding="ascii").split())
    return children


def machine_seconds() -> float:
    """Return the machine's CPU seconds without idle time and disk waits, but with time stolen by a hypervisor."""
    user, nice, system, _idle, _iowait, irq, softirq, stolen, *_ = map(
        int, Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + softirq + stolen) / _TICKS_A_SECOND
