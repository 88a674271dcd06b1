"""Systems that one run compares, and their process groups: starts, measures and ends them.

Owns the commands of the systems. Does not own what a system does (peers/, ours_run.py, served_run.py).
"""

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from blockyard.worker.startup.openmp import SPIN_COUNT

from bench.engine.peers.protocol import Course, Request, Settings
from bench.router.processes import CpuClock, cpu_clock, foreign_cores, tree

ROOT = Path(__file__).parents[2]
PEERS = Path(__file__).parent / "peers"
SERVED, SERVED_PLAINTEXT = "blockyard, served", "blockyard, served in plaintext"
"""Our engine through a router. The variant with plaintext between router and worker shows the cost of mutual TLS."""
LOAD_SECONDS = 600.0
RUN_SECONDS = 3600.0
STOP_SECONDS = 10.0
GUARD_SECONDS = 0.5
POLL_SECONDS = 0.02
MAX_ANSWER_BYTES = 2**28
TCMALLOC = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")
LIBRARIES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64")


class SystemEnded(Exception):
    """A system's process ended before its answer. The message contains the end of its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Command and settings of a system."""

    name: str
    command: tuple[str, ...]
    settings: Settings
    env: Mapping[str, str] = field(default_factory=dict)
    is_ours: bool = False
    takes_preload: bool = True
    """Whether an allocator may be preloaded. OpenVINO aborts with another allocator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of one workload."""

    courses: tuple[Course, ...]
    foreign_cores: float
    """Cores that other programs or virtual machines used during the trial."""
    cores: float
    """Cores that the system used."""

    @property
    def seconds(self) -> float:
        """Time from the first request's arrival to the last token."""
        return max(course.last for course in self.courses)


class Running:
    """A system whose process is ready."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path, hello: dict[str, Any]) -> None:
        self._process = process
        self._log = log
        self.versions: dict[str, str] = hello["versions"]
        self.notes: str = hello["notes"]
        self.load_seconds: float = hello["load_seconds"]

    async def run(self, requests: Sequence[Request]) -> Trial:
        """Run the requests. Raise ValueError if tokens are missing, SystemEnded, and TimeoutError after RUN_SECONDS."""
        before = self._clock()
        answer = await _ask(
            self._process,
            [[request.arrival_seconds, request.token_ids, request.max_tokens] for request in requests],
            RUN_SECONDS,
            self._log,
        )
        after = self._clock()
        courses = tuple(Course(**course) for course in answer["courses"])
        for request, course in zip(requests, courses, strict=True):
            if course.num_tokens != request.max_tokens:
                raise ValueError(f"a request got {course.num_tokens} of {request.max_tokens} tokens")
        elapsed = after.now - before.now
        return Trial(
            courses=courses,
            foreign_cores=foreign_cores(before, after),
            cores=(after.measured - before.measured) / elapsed,
        )

    async def kill(self) -> None:
        """Kill the process group. Its memory and cores are free once this returns."""
        await end_group(self._process, signal.SIGKILL)

    def _clock(self) -> CpuClock:
        return cpu_clock([self._process.pid])


@asynccontextmanager
async def running(system: System, folder: Path, memory_bytes: int) -> AsyncIterator[Running | str]:
    """Start a system and yield it, or yield why it is absent. No process of an absent system is left.

    A system that takes more than `memory_bytes` is killed. A peer that sizes its cache by the machine would take the
    memory that other systems use.
    """
    if shutil.which(system.command[0]) is None:
        yield f"there is no {Path(system.command[0]).name} at the given path"
        return
    log = folder / f"{system.name.replace(' ', '-').replace('/', '-')}.log"
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *system.command,
            cwd=ROOT,
            env={**os.environ, **system.env},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=file,
            limit=MAX_ANSWER_BYTES,
            start_new_session=True,
        )
    guard = asyncio.create_task(_guard(process, memory_bytes, log))
    try:
        try:
            hello = await _ask(process, system.settings, LOAD_SECONDS, log)
        except SystemEnded as ended:
            hello = {"absent": str(ended)}
        except TimeoutError:
            hello = {"absent": f"it was not ready within {LOAD_SECONDS:.0f} s"}
        if "absent" in hello:
            await end_group(process)
            yield hello["absent"]
        else:
            yield Running(process, log, hello)
    finally:
        guard.cancel()
        await end_group(process)


async def _guard(process: asyncio.subprocess.Process, memory_bytes: int, log: Path) -> None:
    while process.returncode is None:
        if (resident := _resident_bytes(process.pid)) > memory_bytes:
            with log.open("a", encoding="utf-8") as file:
                file.write(f"killed by the benchmark at {resident / 2**30:.1f} GiB of memory\n")
            return _signal_group(process, signal.SIGKILL)
        await asyncio.sleep(GUARD_SECONDS)


def _resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and its descendants. 0 once it is gone."""
    return sum(_pages(child) for child in tree(pid)) * os.sysconf("SC_PAGE_SIZE")


def _pages(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0


async def _ask(process: asyncio.subprocess.Process, message: object, seconds: float, log: Path) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(message).encode() + b"\n")
    async with asyncio.timeout(seconds):
        line = await process.stdout.readline()
    if not line:
        raise SystemEnded(f"it has ended: {_tail(log)}")
    return json.loads(line)


def _tail(log: Path) -> str:
    """Return the last line of a log, which says most, and then the end of the log."""
    text = log.read_text(encoding="utf-8", errors="replace").strip()
    return f"{text.rpartition(chr(10))[2]}\n{text[-3000:]}"


async def end_group(process: asyncio.subprocess.Process, *numbers: int) -> None:
    """End the process group of a group leader, which includes workers and routers that it started.

    Sends the signals one after the other, by default SIGTERM and SIGKILL. Returns once all members are gone, or
    STOP_SECONDS after the last signal.
    """
    for number in numbers or (signal.SIGTERM, signal.SIGKILL):
        _signal_group(process, number)
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                while process.returncode is None or _members(process):  # noqa: ASYNC110 - of others' children
                    await asyncio.sleep(POLL_SECONDS)


def _signal_group(process: asyncio.subprocess.Process, number: int) -> None:
    if _members(process):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def _members(process: asyncio.subprocess.Process) -> list[int]:
    """Return the live members of a process's group.

    The kernel reuses the number once the leader is reaped and the group is empty. A live process with this number is
    then a stranger, and the result is empty.
    """
    living = [
        pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _group(pid) == process.pid
    ]
    return [] if process.returncode is not None and process.pid in living else living


def _group(pid: int) -> int | None:
    """Return a process's group, or None if it has ended, reaped or not."""
    try:
        state, _, group, *_ = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(group)


def our_systems(
    settings: Settings, *, backends: Sequence[str], is_served: bool, is_unshared: bool, ranks: int = 1
) -> list[System]:
    """Return our engine on each backend, and on request in several ranks, without a shared cache, and through worker
    and router."""
    settings = {**settings, "backend": backends[0], "shares": True}
    stored = settings.get("kv_cache_dtype", "auto")
    suffix = "" if stored == "auto" else f", KV in {stored}"
    rows = [
        our_system(f"blockyard {backend}{suffix}", "ours_run", {**settings, "backend": backend})
        for backend in backends
    ]
    if ranks > 1:
        rows.append(our_system(f"blockyard, {ranks} ranks{suffix}", "ours_run", {**settings, "ranks": ranks}))
    if is_unshared:
        rows.append(our_system("blockyard, nothing shared", "ours_run", {**settings, "shares": False}))
    if is_served:
        rows.append(our_system(SERVED_PLAINTEXT, "served_run", {**settings, "session_tls": False}))
        rows.append(our_system(SERVED, "served_run", {**settings, "session_tls": True}))
    return rows


def our_system(name: str, module: str, settings: Settings) -> System:
    """Return a system that the module bench.engine.`module` runs."""
    command = (sys.executable, "-m", f"bench.engine.{module}")
    # As in a worker: PyTorch's own kernels keep PyTorch's spin count.
    env = {} if settings["backend"] == "torch" else {"GOMP_SPINCOUNT": str(SPIN_COUNT)}
    return System(name=name, command=command, settings=settings, is_ours=True, env=env)


def peers(
    settings: Settings, pythons: Mapping[str, Path], converted: Path | None, *, batchings: Sequence[str]
) -> list[System]:
    """Return the peers (transformers, vllm, openvino) whose Python is given."""
    rows: list[System] = []
    if "transformers" in pythons:
        for batching in batchings:
            name = f"transformers, {batching}"
            rows.append(
                peer_system(name, "transformers", pythons["transformers"], {**settings, "batching": batching})
            )
    if "vllm" in pythons:
        row = peer_system("vllm", "vllm", pythons["vllm"], settings)
        rows.append(replace(row, env={**row.env, "LD_PRELOAD": openmp_of(pythons["vllm"])}))
    if "openvino" in pythons:
        settings = {**settings, "converted": str(converted)}
        for name, kv_dtype in (("openvino-genai", None), ("openvino-genai, exact KV", settings["dtype"])):
            row = peer_system(name, "openvino", pythons["openvino"], {**settings, "kv_dtype": kv_dtype})
            rows.append(replace(row, takes_preload=False))
    return rows


def peer_system(name: str, script: str, python: Path, settings: Settings) -> System:
    """Return a system that the script peers/`script`_run.py runs, with the Python of its own environment."""
    # Run a file, not a module, so that our folder `kernels` does not hide a package of that name.
    command = (str(python), str(PEERS / f"{script}_run.py"))
    return System(name=name, command=command, settings=settings, env={"PYTHONPATH": ""})


def with_env(system: System, environment: Mapping[str, str]) -> System:
    """Add variables to a system's environment. Its own stay as they are."""
    return replace(system, env={**environment, **system.env})


def with_preload(system: System, libraries: Sequence[str]) -> System:
    """Preload libraries into a peer. Our own systems keep the C library's allocator, as workers do."""
    if system.is_ours or not system.takes_preload:
        return system
    known = [*libraries, *filter(None, [system.env.get("LD_PRELOAD", "")])]
    return replace(system, env={**system.env, "LD_PRELOAD": ":".join(known)}) if known else system


def tcmalloc() -> str | None:
    """Return the path of Debian's libtcmalloc-minimal4 or full libtcmalloc, or None if neither is installed."""
    paths = (Path(folder) / name for folder in LIBRARIES for name in TCMALLOC)
    return next((str(path) for path in paths if path.exists()), None)


def openmp_of(python: Path) -> str:
    """Return the path of Intel's OpenMP, which vLLM's CPU build needs preloaded, in vLLM's environment, or ""."""
    return next((str(path) for path in python.parents[1].glob("lib*/**/libiomp5.so")), "")
