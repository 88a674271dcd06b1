"""Invariants that hold after every fault. Each function checks one of them and raises AssertionError.

- I1: blocks are conserved: free + cached + used = total. After the last request no block is used.
- I2: tokens come exactly once, in the order of the undisturbed run. The client checks offsets.
- I3: every call ends once, by its deadline, with a status that is not UNKNOWN.
- I4: a request that the fault did not touch has the undisturbed run's tokens.
- I6: no log contains a prompt or a secret.
- I7: processes and Redis are as before: descriptors, threads, memory, keys, and no request left.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import redis as redis_client
from blockyard.proto.security.tls import session_channels
from blockyard.proto.v1 import cluster_pb2
from blockyard.proto.v1.session_pb2_grpc import EngineServiceStub
from blockyard.router.client import AsyncClient

from tests.system.load import CANARY, Stream, until
from tests.system.processes import SECRET, Process, Processes

open_session = session_channels(None, secret=SECRET, cluster="default")
QUIET_SECONDS = 30.0
LATE_SECONDS = 1.0
MAX_MORE_DESCRIPTORS = 12
"""Connections that are just being closed or opened again, and files that were opened at the first use."""
MAX_MORE_THREADS = 12
MAX_MORE_BYTES = 64 * 2**20
MAX_MORE_KEYS = 64
FAILURES = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS}


async def pool_of(worker: Process) -> cluster_pb2.BlockPool:
    """Return the pool as the worker itself reports it, not through a router."""
    async with open_session(worker.address) as channel:
        stub = EngineServiceStub(channel)  # type: ignore[no-untyped-call]
        pool: cluster_pb2.BlockPool = await stub.GetBlockPool(cluster_pb2.GetBlockPoolRequest(), timeout=10.0)
        return pool


async def holders_of_blocks(worker: Process) -> set[str]:
    """Return the requests that hold a block, as the worker itself reports them. A count could include other
    requests."""
    async with open_session(worker.address) as channel:
        stub = EngineServiceStub(channel)  # type: ignore[no-untyped-call]
        page = await stub.ListBlocks(cluster_pb2.ListBlocksRequest(page_size=1000), timeout=10.0)
        assert not page.next_page_token, "the pool has more blocks than one page"
        return {name for block in page.blocks for name in block.request_ids}


def check_pool(pool: cluster_pb2.BlockPool) -> None:
    """Check I1, at any moment."""
    assert pool.free_blocks + pool.cached_blocks + pool.used_blocks == pool.total_blocks
    assert sum(run.length for run in pool.runs) == pool.total_blocks
    used = sum(run.length for run in pool.runs if run.state == cluster_pb2.BLOCK_STATE_USED)
    assert used == pool.used_blocks


async def blocks_are_free(worker: Process, *, seconds: float = QUIET_SECONDS) -> float:
    """Check I1 once nothing runs. Return the seconds until no block was used."""

    async def is_free() -> bool:
        pool = await pool_of(worker)
        check_pool(pool)
        assert not any(run.references for run in pool.runs if run.state != cluster_pb2.BLOCK_STATE_USED)
        return pool.used_blocks == 0 and not pool.load.running and not pool.load.waiting

    return await until(is_free, f"no block of {worker.name} is used", seconds=seconds)


def same_tokens(streams: Sequence[Stream], reference: Sequence[Stream]) -> None:
    """Check I2 and I4: all tokens, in order, against the run without a fault."""
    assert len(streams) == len(reference)
    for stream, undisturbed in zip(streams, reference, strict=True):
        assert stream.error is None, f"{stream.request_id}: {stream.error}"
        assert stream.tokens == undisturbed.tokens, stream.request_id


def each_ended_once(streams: Iterable[Stream]) -> None:
    """Check I3."""
    for stream in streams:
        assert stream.ended is not None, f"{stream.request_id} has not ended"
        allowed_seconds = stream.timeout_seconds + LATE_SECONDS + stream.own_pause_seconds
        assert stream.ended <= stream.started + allowed_seconds
        assert stream.code is not grpc.StatusCode.UNKNOWN


def nothing_is_told(logs: Iterable[Path]) -> None:
    """Check I6."""
    for log in logs:
        text = log.read_bytes()
        assert CANARY.encode() not in text, f"{log.name} holds a prompt"
        assert SECRET.encode() not in text, f"{log.name} holds the secret"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Resources that a process uses."""

    descriptors: int
    threads: int
    resident_bytes: int

    @classmethod
    def of(cls, pid: int) -> "Usage":
        fields = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
        )
        return cls(
            descriptors=len(list(Path(f"/proc/{pid}/fd").iterdir())),
            threads=int(fields["Threads"]),
            resident_bytes=int(fields["VmRSS"].split()[0]) * 1024,
        )

    def is_about(self, before: "Usage") -> bool:
        return (
            self.descriptors <= before.descriptors + MAX_MORE_DESCRIPTORS
            and self.threads <= before.threads + MAX_MORE_THREADS
            and self.resident_bytes <= before.resident_bytes + MAX_MORE_BYTES
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """State of the cluster before the fault. A process that was restarted since has no entry."""

    by_pid: dict[int, Usage]
    num_keys: int

    @classmethod
    def of(cls, cluster: Processes) -> "Baseline":
        running = [*cluster.workers.values(), *cluster.routers.values()]
        return cls(
            by_pid={process.pid: Usage.of(process.pid) for process in running if process.is_running},
            num_keys=num_keys(cluster),
        )

    def differences(self, cluster: Processes) -> list[str]:
        now = Baseline.of(cluster)
        changed = [
            f"pid {pid}: {before} -> {now.by_pid[pid]}"
            for pid, before in self.by_pid.items()
            if pid in now.by_pid and not now.by_pid[pid].is_about(before)
        ]
        if now.num_keys > self.num_keys + MAX_MORE_KEYS:
            changed.append(f"Redis keys: {self.num_keys} -> {now.num_keys}")
        return changed


def num_keys(cluster: Processes) -> int:
    """Count the keys except the index's buckets. There are at most 4,096 buckets, and their content follows the
    caches."""
    if cluster.redis is None:
        return 0
    with redis_client.Redis.from_url(cluster.redis.url, socket_timeout=5.0) as client:
        return sum(1 for key in client.scan_iter(count=1000) if client.type(key) != b"hash")


async def all_is_as_before(cluster: Processes, baseline: Baseline, *clients: AsyncClient) -> None:
    """Check I1, I6 and I7 of everything that runs."""
    for client in clients:

        async def is_idle(client: AsyncClient = client) -> bool:
            return not await client.list_requests()

        await until(is_idle, "no request is left in the router")
    for worker in cluster.workers.values():
        if worker.is_running:
            await blocks_are_free(worker)
    deadline = time.monotonic() + QUIET_SECONDS
    await until(
        lambda: not baseline.differences(cluster) or time.monotonic() > deadline,
        "usage is told",
        seconds=2 * QUIET_SECONDS,
        every=0.2,
    )
    assert baseline.differences(cluster) == []
    nothing_is_told(cluster.logs())
