"""Writes, removals and purges of a prefix index with a million entries over 64 workers, beside llm-d's schema.

Part of bench/index/__main__.py. The writers are coroutines of one process, each with one batch in flight. The two CPU
times show whether that process or Redis is the limit.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from blockyard.proto.index.contract import MAX_BATCH_NAMES
from blockyard.proto.index.redis import RedisPrefixIndex
from redis.asyncio import Redis

from bench.index.llmd import LlmdIndex, pod_entry
from bench.index.load import (
    CACHED_BLOCKS,
    CLUSTER,
    PROBE_SEED,
    Names,
    Writer,
    add_all,
    die_and_purge,
    make_names,
    num_names,
    prompt_of,
    register_all,
)
from bench.index.server import Spent, measured, used_memory_bytes
from bench.index.sharing import LookUpTimes, time_lookups
from bench.reporting import percentile

EVICTIONS = 2000
"""Number of blocks that are evicted from llm-d's index, one at a time."""
CALM_SECONDS = 1.0
PAUSE_PER_CALL = 8.0
"""Pause of the resting writers after a batch, as a multiple of the batch's duration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteScale:
    workers: int = 64
    names_a_worker: int = 15_625
    peer_names_a_worker: int = 1024
    lookups: int = 200
    repeats: int = 5

    @property
    def entries(self) -> int:
        return self.workers * self.names_a_worker


async def measure_writes(client: Redis, scale: WriteScale) -> dict[str, Any]:
    """Measure both schemas in turns, each in an empty Redis. The last turn leaves our entries there."""
    names = [make_names(1000 + number, scale.names_a_worker) for number in range(scale.workers)]
    ours, theirs = [], []
    for _ in range(scale.repeats):
        theirs.append(await _write_theirs(client, [some[: scale.peer_names_a_worker] for some in names]))
        removal = await _evict_theirs(client, names[0][: min(EVICTIONS, scale.peer_names_a_worker)])
        await client.flushall()
        empty = await used_memory_bytes(client)
        index = RedisPrefixIndex(client, CLUSTER)
        writers = await register_all(index, scale.workers)
        async with measured(client) as spent:
            await add_all(writers, names)
        ours.append(spent)
    assert await num_names(client) == scale.entries
    bytes_a_block = (await used_memory_bytes(client) - empty) / scale.entries
    peer_entries = scale.workers * scale.peer_names_a_worker
    return {
        "entries": scale.entries,
        "blockyard": _rates(ours, scale.entries) | _holds(ours),
        "llmd": _rates(theirs, peer_entries) | {"evictions_per_second": round(removal)},
        "bytes_a_block": round(bytes_a_block, 1),
        "lookup": await _lookups_when_full(client, index, names, scale),
        "removal_and_purge": await _remove_and_purge(client, index, writers, names),
    }


async def _write_theirs(client: Redis, names_of_each: Sequence[Names]) -> Spent:
    await client.flushall()
    peer = LlmdIndex(client)

    async def write(worker: int, names: Names) -> None:
        for first in range(0, len(names), MAX_BATCH_NAMES):
            await peer.add(names[first : first + MAX_BATCH_NAMES], pod_entry(worker))

    async with measured(client) as spent, asyncio.TaskGroup() as group:
        for worker, names in enumerate(names_of_each):
            group.create_task(write(worker, names))
    return spent


async def _evict_theirs(client: Redis, names: Names) -> float:
    """Evict blocks one after another, like the events of one pod. Return evicted blocks per second."""
    peer, started = LlmdIndex(client), time.perf_counter()
    for name in reversed(names):
        await peer.evict(name, pod_entry(0))
    return len(names) / (time.perf_counter() - started)


def _rates(turns: Sequence[Spent], entries: int) -> dict[str, Any]:
    walls = sorted(entries / spent.wall_seconds for spent in turns)
    return {
        "entries_per_second": round(median(walls)),
        "entries_per_second_spread": {"lowest": round(walls[0]), "highest": round(walls[-1])},
        "entries_per_server_cpu_second": round(median(entries / spent.server_cpu_seconds for spent in turns)),
        "entries_per_client_cpu_second": round(median(entries / spent.client_cpu_seconds for spent in turns)),
    }


def _holds(turns: Sequence[Spent]) -> dict[str, Any]:
    """Return percentiles of the time for which one batch occupied Redis, in microseconds."""
    each = [microseconds for spent in turns for microseconds in spent.script_microseconds]
    return {
        "batch_p50_us": percentile(each, 0.5),
        "batch_p99_us": percentile(each, 0.99),
        "batch_max_us": max(each),
    }


async def _lookups_when_full(
    client: Redis, index: RedisPrefixIndex, names: Sequence[Names], scale: WriteScale
) -> dict[str, Any]:
    """Time look-ups of prompts of which one worker holds the first 375 blocks."""
    times = LookUpTimes()
    prompts = [prompt_of(names[n % scale.workers][:CACHED_BLOCKS], n) for n in range(scale.lookups)]
    for _ in range(scale.repeats):
        await time_lookups(client, index.lookup, prompts, times, "evalsha")
    return times.figures()


async def _remove_and_purge(
    client: Redis, index: RedisPrefixIndex, writers: Sequence[Writer], names: Sequence[Names]
) -> dict[str, Any]:
    """Measure a quarter of the workers removing all their names, and another quarter dying."""
    quarter = max(1, len(writers) // 4)
    async with measured(client) as removing, asyncio.TaskGroup() as group:
        for number in range(quarter):
            group.create_task(writers[number].remove(names[number]))
    async with measured(client) as purging:
        changed, slices = await die_and_purge(index, writers[quarter : 2 * quarter])
    entries = quarter * len(names[0])
    assert changed == entries, f"the purge changed {changed} entries, not {entries}"
    return {
        "removed_entries_per_second": round(entries / removing.wall_seconds),
        "purged_entries": changed,
        "purge_seconds": round(purging.wall_seconds, 3),
        "purged_entries_per_second": round(changed / purging.wall_seconds),
        "purge_slices": slices,
        "purge_slice_p99_us": percentile(purging.script_microseconds, 0.99),
        "purge_slice_max_us": max(purging.script_microseconds),
    }


async def measure_effect_on_others(client: Redis, url: str, scale: WriteScale) -> dict[str, Any]:
    """Measure PINGs and look-ups of another process: alone, beside writers without pauses, and with pauses."""
    names = [make_names(1000 + number, scale.names_a_worker) for number in range(scale.workers)]
    figures: dict[str, Any] = {}
    for case, pause_per_call in (("calm", None), ("flat_out", 0.0), ("resting", PAUSE_PER_CALL)):
        await client.flushall()
        index = RedisPrefixIndex(client, CLUSTER)
        holder, *writers = await register_all(index, 1 + scale.workers)
        await holder.add(make_names(PROBE_SEED, CACHED_BLOCKS))
        async with _probe(url) as times:
            started = time.perf_counter()
            if pause_per_call is None:
                await asyncio.sleep(CALM_SECONDS)
            else:
                for writer in writers:
                    writer.pause_per_call = pause_per_call
                await add_all(writers, names)
            seconds = time.perf_counter() - started
        figures[case] = {
            "seconds": round(seconds, 2),
            **{
                f"{what}_{label}_us": round(percentile(values, share))
                for what, values in times.items()
                for label, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
            },
        }
    return figures


@asynccontextmanager
async def _probe(url: str) -> AsyncIterator[dict[str, list[float]]]:
    """Run the probe process. Yield times in microseconds, which are filled in at the end of the context."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bench.index.probe",
        cwd=Path(__file__).parents[2],
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    times: dict[str, list[float]] = {}
    try:
        process.stdin.write(f"{url}\n".encode())
        await process.stdout.readline()
        yield times
        answer, _ = await process.communicate(b"")
        times.update(json.loads(answer))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
