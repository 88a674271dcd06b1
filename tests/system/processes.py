"""A cluster of real processes on localhost, without Ray: workers, routers and a private Redis.

Owns starting, signalling and ending them, and their logs. Does not own load (load.py) or what must hold
(invariants.py). Synchronous, so that a module's tests share one cluster across event loops.
"""

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from blockyard import deploy
from blockyard.deploy.machine.redis_server import RedisProcess, start_private_redis

MODEL = Path(deploy.__file__).parent / "demo_model" / "checkpoint"
SECRET = "correct-horse-of-the-fault-matrix"
START_SECONDS = 90.0
STOP_SECONDS = 20.0
PORTS = range(20_000, 30_000)
"""Ports below those that the kernel gives to outgoing connections, so that a dead worker finds its own free again."""
TASKS = re.compile(r"event loop: .*?(\d+) tasks")
SERVES = re.compile(r"(?:worker \S+ serves at|router serving \S+ on) ([^\s\"]+)")
SIMULATED = ("--engine", "simulated", "--device", "cpu", "--kv-cache-memory", str(18 * 2**20))
"""384 blocks of 16 tokens."""
DETERMINISTIC = ("--device", "cpu", "--deterministic", "--kv-cache-memory", str(36 * 2**20))
"""The demo model itself, so that tokens can be compared: 768 blocks."""


@dataclass(slots=True, kw_only=True, eq=False)
class Process:
    """One worker or router, through all its incarnations."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]
    log: Path
    address: str = ""
    popen: "subprocess.Popen[bytes] | None" = None
    log_start: int = 0
    """Offset in the log where this incarnation begins."""

    @property
    def pid(self) -> int:
        assert self.popen is not None
        return self.popen.pid

    @property
    def is_running(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    def spawn(self) -> None:
        assert not self.is_running
        self.log_start = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                self.command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def await_address(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not (found := SERVES.search(self.log_text())):
            assert self.is_running, f"{self.name} ended at its start:\n{self.log_text()[-2000:]}"
            assert time.monotonic() < deadline, f"{self.name} does not serve:\n{self.log_text()[-2000:]}"
            time.sleep(0.02)
        self.address = found[1]

    def log_text(self) -> str:
        """Return the log of this incarnation."""
        return self.log.read_bytes()[self.log_start :].decode(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal. Return after a SIGSTOP once all threads have stopped, which takes time on a busy machine."""
        os.kill(self.pid, number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def loop_word(self, pattern: "re.Pattern[str]") -> "re.Match[str]":
        """Ask the process about its event loop by SIGUSR1, and return the line that it logs."""
        seen = len(pattern.findall(self.log_text()))
        self.signal(signal.SIGUSR1)
        deadline = time.monotonic() + 10
        while len(found := list(pattern.finditer(self.log_text()))) == seen:
            assert time.monotonic() < deadline, f"{self.name} says nothing of its event loop"
            time.sleep(0.01)
        return found[-1]

    def num_tasks(self) -> int:
        """Return the number of tasks in its event loop now."""
        return int(self.loop_word(TASKS)[1])

    def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        assert self.popen is not None
        self.popen.kill()
        self.popen.wait(STOP_SECONDS)

    def stop(self) -> int:
        """Send SIGTERM and return the exit code."""
        assert self.popen is not None
        self.popen.terminate()
        return self.popen.wait(STOP_SECONDS)

    def wait(self, seconds: float) -> int:
        assert self.popen is not None
        return self.popen.wait(seconds)


@dataclass(slots=True, kw_only=True)
class Processes:
    """Processes of one test module, in one folder."""

    folder: Path
    redis: RedisProcess | None
    workers: dict[str, Process] = field(default_factory=dict)
    routers: dict[str, Process] = field(default_factory=dict)

    def add_worker(self, name: str, *options: str, model: Path = MODEL) -> Process:
        """Add a worker without starting it. Its port is reserved, so that a later incarnation has the same address."""
        port = str(free_port())
        arguments = ("--model", str(model), "--worker-id", name, "--port", port, "--metrics-port", "-1")
        worker = self._process(name, "blockyard.worker", *arguments, *options)
        worker.address = f"127.0.0.1:{port}"
        self.workers[name] = worker
        return worker

    def add_router(
        self, name: str, *options: str, workers: Iterable[str] = (), model: Path = MODEL
    ) -> Process:
        """Add a router without starting it. With Redis it discovers the workers; otherwise `workers` are their
        addresses."""
        told = [part for address in workers for part in ("--worker", address)]
        port = str(free_port())
        arguments = ("--model", str(model), "--model-name", "demo", "--port", port, *told)
        self.routers[name] = router = self._process(name, "blockyard.router", *arguments, *options)
        router.address = f"127.0.0.1:{port}"
        return router

    def start(self, *processes: Process) -> None:
        """Start all at once, and return when all of them serve."""
        for process in processes:
            process.spawn()
        for process in processes:
            process.await_address()

    @contextmanager
    def extra(self, *processes: Process) -> Iterator[None]:
        """Start processes for the context, then forget them."""
        try:
            self.start(*processes)
            yield
        finally:
            for process in processes:
                _end(process)
                self.workers.pop(process.name, None)
                self.routers.pop(process.name, None)

    def end(self) -> None:
        for process in (*self.routers.values(), *self.workers.values()):
            _end(process)
        if self.redis is not None:
            self.redis.stop()

    def logs(self) -> list[Path]:
        return sorted(self.folder.rglob("*.log"))

    def _process(self, name: str, module: str, *arguments: str) -> Process:
        environment = {**os.environ, "BLOCKYARD_CLUSTER_SECRET": SECRET, "OMP_NUM_THREADS": "1"}
        environment.pop("BLOCKYARD_REDIS_URL", None)
        if self.redis is not None:
            environment["BLOCKYARD_REDIS_URL"] = self.redis.url
        return Process(
            name=name,
            command=(sys.executable, "-m", module, *arguments),
            environment=environment,
            log=self.folder / f"{name}.log",
        )


@contextmanager
def processes(folder: Path, *, with_redis: bool = False) -> Iterator[Processes]:
    """Yield an empty cluster, with Redis if asked for. All processes added to it end with the context."""
    redis = start_private_redis(folder / "redis", password=SECRET) if with_redis else None
    cluster = Processes(folder=folder, redis=redis)
    try:
        yield cluster
    finally:
        cluster.end()


def _end(process: Process) -> None:
    if process.is_running:
        process.signal(signal.SIGCONT)
        process.kill()


def free_port() -> int:
    """Return a port that this process has not given before: the receiver listens only later."""
    for port in itertools.islice(_ports, 200):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


def _ports_from_here() -> Iterator[int]:
    """Every port in a row, from a place of this process's own: test processes run side by side."""
    start = os.getpid() * 101 % len(PORTS)
    return itertools.chain(PORTS[start:], PORTS[:start])


_ports = itertools.cycle(_ports_from_here())
