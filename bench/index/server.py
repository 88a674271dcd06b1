"""A private Redis for bench/index/__main__.py, and what a stretch of work cost there and here.

Server-side times are Redis's own: `INFO commandstats` for means, SLOWLOG for the time of each script, `INFO cpu` for
all that the process did, parsing and replying included. Does not own what is stored.
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
"""Above what one HGET inside a script takes, below any script of ours."""
MAX_SLOWLOG_ENTRIES = 20_000
SETTLE_SECONDS = 0.15
SETTLE_ATTEMPTS = 60


@dataclass(slots=True, kw_only=True)
class Spent:
    """Filled in when the stretch is over."""

    wall_seconds: float = 0.0
    client_cpu_seconds: float = 0.0
    server_cpu_seconds: float = 0.0
    microseconds_by_command: dict[str, float] = field(default_factory=dict)
    """All calls of one command together. A script's time contains that of the commands it calls."""
    script_microseconds: list[int] = field(default_factory=list)
    """Each script's time, in no useful order."""


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
    """Once nothing but the data is there: buffers of idle connections would count too, and so do tables that Redis is
    still moving to their new size."""
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
    """Says how busy others kept the machine. Linux only; elsewhere it knows the load average alone."""

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
        """`foreign_cpus` is how many processors others used, on average."""
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
    """Of this process and of children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _busy_seconds() -> float | None:
    """All processors together since boot; neither idle nor waiting for a disk."""
    try:
        first_line = Path("/proc/stat").read_text(encoding="utf-8").partition("\n")[0]
    except OSError:
        return None
    user, nice, system, _, _, interrupts, soft_interrupts, stolen = map(int, first_line.split()[1:9])
    ticks = user + nice + system + interrupts + soft_interrupts + stolen
    return ticks / os.sysconf("SC_CLK_TCK")
