"""Faults of the machine: no more descriptors, a full disk, a missing folder, a clock that jumps."""

import asyncio
import mmap
import resource
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from blockyard.proto.v1 import cluster_pb2
from blockyard.router.client import AsyncClient

from tests.system.load import READY, answers, load, states, streams, until, until_ready
from tests.system.processes import SIMULATED, Processes, processes

from .invariants import Baseline, Usage, all_is_as_before, each_ended_once, same_tokens
from .rig import whole

NUM_STREAMS = 8
STEP = ("--simulated-step-seconds", "0.02")
NUM_CONNECTIONS = 40
HOUR_SECONDS = 3600


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Processes]:
    with processes(tmp_path, with_redis=True) as cluster:
        yield cluster


@pytest.mark.fault(49)
async def test_a_router_without_descriptors_keeps_its_streams_and_recovers(
    cluster: Processes, measured: dict[str, Any]
) -> None:
    router = cluster.add_router("r0")
    cluster.start(cluster.add_worker("w0", *SIMULATED, *STEP), router)
    async with whole(cluster) as client:
        reference = await answers(client, streams(NUM_STREAMS, max_tokens=150))
        limits = resource.prlimit(router.pid, resource.RLIMIT_NOFILE)
        async with load(client, streams(NUM_STREAMS, max_tokens=150)) as running, AsyncExitStack() as stack:
            await running.until_tokens(5)
            few = Usage.of(router.pid).descriptors + 4
            resource.prlimit(router.pid, resource.RLIMIT_NOFILE, (few, limits[1]))
            crowd = [AsyncClient(router.address, retries=0) for _ in range(NUM_CONNECTIONS)]
            for one in crowd:
                await stack.enter_async_context(one)
            told = await asyncio.gather(*(answers(one, _impatient()) for one in crowd))
            finished = await running.finished()
        resource.prlimit(router.pid, resource.RLIMIT_NOFILE, limits)
        refused = [stream for (stream,) in told if stream.error is not None]
        measured.update(
            failed=len(refused),
            note=f"of {NUM_CONNECTIONS} new connections; none of the old",
        )
        assert refused, "the limit was not felt"
        allowed = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
        assert {stream.code for stream in refused} <= allowed
        same_tokens(finished, reference)
        each_ended_once([*finished, *refused])
        async with AsyncClient(router.address, retries=5) as later:
            (stream,) = await answers(later, streams(1, prefix="later"))
        assert stream.error is None


def _impatient() -> list[Any]:
    wanted = streams(1, prefix="crowd", max_tokens=2)
    wanted[0].timeout_seconds = 3.0
    return wanted


@pytest.mark.fault(49)
async def test_a_full_disk_and_a_folder_that_is_gone_fail_no_request(
    cluster: Processes, tmp_path: Path, measured: dict[str, Any]
) -> None:
    """Every line that they log is refused with ENOSPC, and the pool map's folder vanishes."""
    maps = tmp_path / "maps"
    maps.mkdir()
    worker = cluster.add_worker("w0", *SIMULATED, *STEP, "--pool-map-path", str(maps / "map.txt"))
    router = cluster.add_router("r0")
    for process in (worker, router):
        process.command = ("sh", "-c", 'exec "$@" >/dev/full 2>&1', "sh", *process.command)
        process.spawn()
    async with AsyncClient(router.address, retries=0) as client:
        await until(lambda: _answers(client), "the router answers", seconds=90.0, every=0.2)
        await until_ready(client, worker.name)
        await until(lambda: (maps / "map.txt").exists(), "the map is written")
        shutil.rmtree(maps)
        finished = await answers(client, streams(NUM_STREAMS, max_tokens=150))
        measured.update(failed=sum(stream.error is not None for stream in finished), migrated=0)
        assert all(stream.error is None for stream in finished)
        assert (await states(client)) == {worker.name: READY}
        assert worker.is_running
        assert router.is_running


async def _answers(client: AsyncClient) -> bool:
    try:
        await client.cluster_info()
    except Exception:
        return False
    return True


CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
static long offset(void) {
  static volatile long *shared;
  if (!shared) {
    int file = open(getenv("FAULT_CLOCK_FILE"), O_RDONLY);
    shared = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
  }
  return *shared;
}
int clock_gettime(clockid_t id, struct timespec *out) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(id, out);
  if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) out->tv_sec += offset();
  return code;
}
int gettimeofday(struct timeval *out, void *zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  out->tv_sec = now.tv_sec;
  out->tv_usec = now.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}
"""


class WallClock:
    """Wall clock of the processes started with `environment`. Their monotonic clocks do not change."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler to build the clock with")
        library, source, shared = folder / "clock.so", folder / "clock.c", folder / "clock.offset"
        source.write_text(CLOCK)
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        shared.write_bytes(struct.pack("l", 0))
        self.environment = {"LD_PRELOAD": str(library), "FAULT_CLOCK_FILE": str(shared)}
        self._shared = shared

    def jump(self, seconds: int) -> None:
        with self._shared.open("r+b") as file, mmap.mmap(file.fileno(), 0) as offset:
            offset[:] = struct.pack("l", seconds)

    def told(self) -> float:
        """Return the time that a process with this clock sees."""
        command = [sys.executable, "-c", "import time; print(time.time())"]
        return float(subprocess.run(command, env=self.environment, capture_output=True, check=True).stdout)


async def _states_while_it_jumps(clock: WallClock, client: AsyncClient) -> set[int]:
    """Return the states that any worker had meanwhile."""
    seen: set[int] = set()
    for jump in (HOUR_SECONDS, -HOUR_SECONDS, 0):
        clock.jump(jump)
        assert abs(clock.told() - time.time() - jump) < 60
        for _ in range(20):
            seen |= set((await states(client)).values())
            await asyncio.sleep(0.05)
    return seen


@pytest.mark.fault(48)
async def test_a_wall_clock_that_jumps_changes_nothing(
    cluster: Processes, tmp_path: Path, measured: dict[str, Any]
) -> None:
    clock = WallClock(tmp_path)
    workers = [cluster.add_worker(f"w{number}", *SIMULATED, *STEP) for number in range(2)]
    router = cluster.add_router("r0")
    for process in (*workers, router):
        process.environment |= clock.environment
    cluster.start(*workers, router)
    async with whole(cluster) as client:
        reference = await answers(client, streams(NUM_STREAMS, max_tokens=400))
        baseline = Baseline.of(cluster)
        seen: set[int] = set()
        async with load(client, streams(NUM_STREAMS, max_tokens=400)) as running:
            await running.until_tokens(5)
            at = time.monotonic()
            seen |= await _states_while_it_jumps(clock, client)
            finished = await running.finished()
        # While idle, a worker sends a message each half second.
        seen |= await _states_while_it_jumps(clock, client)
        gap = max(stream.longest_gap(at) for stream in finished)
        migrated = sum(stream.finish.migrations for stream in finished if stream.finish is not None)
        measured.update(failed=0, migrated=migrated, recovery_seconds=gap)
        same_tokens(finished, reference)
        each_ended_once(finished)
        assert seen == {READY}
        assert migrated == 0
        assert (await client.index_info()).state == cluster_pb2.INDEX_STATE_EXACT
        await all_is_as_before(cluster, baseline, client)
