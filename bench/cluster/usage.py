"""CPU time and memory of a system by the role of its processes, read from /proc."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.router.processes import machine_seconds, seconds_of

Processes = Callable[[], Mapping[int, str]]
"""Returns the living processes of a system: the role of each by its pid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """CPU seconds of a system between two moments, by role."""

    wall_seconds: float
    cpu_seconds: Mapping[str, float]
    foreign_cores: float
    """Cores that other programs or virtual machines used meanwhile, without the client."""

    @property
    def total_seconds(self) -> float:
        return sum(self.cpu_seconds.values())


class Meter:
    """Measures from its construction to `read`. A process that ends in between counts until its last sight only."""

    def __init__(self, processes: Processes, client_pid: int) -> None:
        self._processes = processes
        self._client_pid = client_pid
        self._before = self._seconds()
        self._client_before = seconds_of(client_pid)
        self._machine_before, self._began = machine_seconds(), time.monotonic()

    def read(self) -> Usage:
        wall_seconds = time.monotonic() - self._began
        machine = machine_seconds() - self._machine_before
        client = seconds_of(self._client_pid) - self._client_before
        used: Counter[str] = Counter()
        for pid, (role, seconds) in self._seconds().items():
            used[role] += seconds - self._before.get(pid, (role, 0.0))[1]
        foreign = max(machine - client - used.total(), 0.0)
        return Usage(wall_seconds=wall_seconds, cpu_seconds=dict(used), foreign_cores=foreign / wall_seconds)

    def _seconds(self) -> dict[int, tuple[str, float]]:
        return {pid: (role, seconds_of(pid)) for pid, role in self._processes().items()}


def memory_bytes(processes: Processes) -> dict[str, int]:
    """Return the memory of each role. Pages that several processes share count in parts (PSS)."""
    used: Counter[str] = Counter()
    for pid, role in processes().items():
        used[role] += _pss_bytes(pid)
    return dict(used)


def _pss_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
