"""Measures the cost of work in a private Redis and in its client, for bench/index/__main__.py.

Server-side times come from Redis: means from `INFO commandstats`, and times of scripts from SLOWLOG. The CPU time from
`INFO cpu` includes parsing and replying. Does not own the data.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

SLOWLOG_MICROSECONDS = 10
"""Longer than one HGET inside a script, and shorter than any script of ours."""
MAX_SLOWLOG_ENTRIES = 20_000
SETTLE_SECONDS = 0.15
SETTLE_ATTEMPTS = 60


@dataclass(slots=True, kw_only=True)
class Spent:
    """Cost of a piece of work. Filled in at its end."""

    wall_seconds: float = 0.0
    client_cpu_seconds: float = 0.0
    server_cpu_seconds: float = 0.0
    microseconds_by_command: dict[str, float] = field(default_factory=dict)
    """Sum over all calls of a command. A script's time contains that of the commands it calls."""
    script_microseconds: list[int] = field(default_factory=list)
    """Times of the single calls of scripts, unordered."""


@asynccontextmanager
async def measured(client: Redis) -> AsyncIterator[Spent]:
    spent = Spent()
    await client.config_set("slowlog-max-len", MAX_SLOWLOG_ENTRIES)
    await client.config_set("slowlog-log-slower-than", SLOWLOG_MICROSECONDS)
    await client.slowlog_reset()
    await client.config_resetstat()
    server_cpu = await _server_cpu_seconds(client)
    wall, client_cpu = time.perf_counter(), time.process_time()
    yield spent
    spent.wall_seconds = time.perf_counter() - wall
    spent.client_cpu_seconds = time.process_time() - client_cpu
    spent.server_cpu_seconds = await _server_cpu_seconds(client) - server_cpu
    for name, numbers in (await client.info("commandstats")).items():
        spent.microseconds_by_command[name.removeprefix("cmdstat_")] = numbers["usec"]
    spent.script_microseconds = [
        entry["duration"]
        for entry in await client.slowlog_get(MAX_SLOWLOG_ENTRIES)
        if entry["command"].startswith(b"EVALSHA")
    ]
    await client.config_set("slowlog-log-slower-than", -1)
    await client.slowlog_reset()


async def used_memory_bytes(client: Redis) -> int:
    """Return Redis's used memory once it has settled.

    Closes idle connections, whose buffers would count, and waits until Redis has finished resizing its tables.
    """
    await client.connection_pool.disconnect()
    before = -1
    for _ in range(SETTLE_ATTEMPTS):
        now = int((await client.info("memory"))["used_memory"])
        if now == before and (await client.info("clients"))["connected_clients"] == 1:
            return now
        before = now
        await asyncio.sleep(SETTLE_SECONDS)
    raise RuntimeError(f"Redis's memory did not settle within {SETTLE_ATTEMPTS * SETTLE_SECONDS:.0f} s")


async def _server_cpu_seconds(client: Redis) -> float:
    known = await client.info("cpu")
    return float(known["used_cpu_user"]) + float(known["used_cpu_sys"])


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineClock:
    """Measures how busy other programs kept the machine. Without Linux, only the load average is known."""

    started: float
    busy_seconds: float | None
    own_seconds: float
    load_average: float

    @classmethod
    async def start(cls, client: Redis) -> "MachineClock":
        return cls(
            started=time.monotonic(),
            busy_seconds=_busy_seconds(),
            own_seconds=_own_seconds() + await _server_cpu_seconds(client),
            load_average=os.getloadavg()[0],
        )

    async def stop(self, client: Redis) -> dict[str, Any]:
        """Return the load since the start. `foreign_cpus` is the mean number of processors used by other programs."""
        busy, wall = _busy_seconds(), time.monotonic() - self.started
        own = _own_seconds() + await _server_cpu_seconds(client) - self.own_seconds
        known = busy is not None and self.busy_seconds is not None
        return {
            "seconds": round(wall, 1),
            "load_average_before": round(self.load_average, 2),
            "load_average_after": round(os.getloadavg()[0], 2),
            "foreign_cpus": round((busy - self.busy_seconds - own) / wall, 3) if known else None,  # type: ignore[operator]
        }


def _own_seconds() -> float:
    """Return the CPU seconds of this process and of children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _busy_seconds() -> float | None:
    """Return the CPU seconds of all processors since boot, without idle time and waiting for disks."""
    try:
        first_line = Path("/proc/stat").read_text(encoding="utf-8").partition("\n")[0]
    except OSError:
        return None
    user, nice, system, _, _, interrupts, soft_interrupts, stolen = map(int, first_line.split()[1:9])
    ticks = user + nice + system + interrupts + soft_interrupts + stolen
    return ticks / os.sysconf("SC_CLK_TCK")
