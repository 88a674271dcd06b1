"""`python -m tests.nightly.faults.network_rows ROW FOLDER`, within a network namespace: faults of a real link.

One worker is beside the router, the other at the far end of a pair of virtual interfaces, in a namespace of its own.
The kernel takes the link down, or makes it narrow. Prints what the row measured as JSON; a row that does not hold
raises. test_network.py starts it, because a namespace is that of a whole process.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockyard.router.client import AsyncClient

from tests.system.load import READY, answers, holders, load, states, streams, until_ready
from tests.system.processes import SIMULATED, Process, Processes, processes

from .invariants import Baseline, all_is_as_before, each_ended_once, same_tokens
from .rig import cost, victims

NEAR, FAR = "10.77.0.1", "10.77.0.2"
OURS, THEIRS = "near0", "far0"
STEP = ("--simulated-step-seconds", "0.02")
NUM_STREAMS = 12
LONG = 400
"""Tokens per request: it lasts longer than a cut takes to be noticed."""
MOVED_SECONDS = 30.0
RATE = "64kbit"
NARROW = f"rate {RATE} burst 2kb limit 8kb"
"""Less than tokens one by one would take: the worker has to merge what waits."""
COME_UP = f"""
until ip link set {THEIRS} up 2>/dev/null; do sleep 0.02; done
ip link set lo up && ip address add {FAR}/24 dev {THEIRS} && exec "$@"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoNetworks:
    cluster: Processes
    far: Process
    client: AsyncClient


def run(command: str) -> str:
    return subprocess.run(command.split(), check=True, capture_output=True, text=True).stdout


@asynccontextmanager
async def two_networks(folder: Path) -> AsyncIterator[TwoNetworks]:
    run("ip link set lo up")
    with processes(folder) as cluster:
        near = cluster.add_worker("near", *SIMULATED, *STEP)
        far = cluster.add_worker("far", *SIMULATED, *STEP, "--host", FAR)
        far.address = far.address.replace("127.0.0.1", FAR)
        far.command = ("unshare", "--net", "sh", "-c", COME_UP, "sh", *far.command)
        far.spawn()
        _join(far)
        cluster.start(near, cluster.add_router("r0", workers=[near.address, far.address]))
        far.await_address()
        async with AsyncClient(cluster.routers["r0"].address, retries=0) as client:
            await until_ready(client, *cluster.workers)
            yield TwoNetworks(cluster=cluster, far=far, client=client)


def _join(far: Process) -> None:
    """The pair's other end goes to the worker, once it is in its own namespace."""
    own = Path("/proc/self/ns/net").readlink()
    while Path(f"/proc/{far.pid}/ns/net").readlink() == own:
        time.sleep(0.02)
    run(f"ip link add {OURS} type veth peer name {THEIRS}")
    run(f"ip link set {THEIRS} netns {far.pid}")
    run(f"ip address add {NEAR}/24 dev {OURS}")
    run(f"ip link set {OURS} up")


async def cut(rig: TwoNetworks) -> dict[str, Any]:
    """Run row 21: the link goes down, and comes up again."""
    reference = await answers(rig.client, streams(NUM_STREAMS, max_tokens=LONG))
    baseline = Baseline.of(rig.cluster)
    async with load(rig.client, streams(NUM_STREAMS, max_tokens=LONG)) as running:
        await running.until_tokens(5)
        held = await holders(rig.client)
        at = time.monotonic()
        run(f"ip link set {OURS} down")
        finished = await running.finished()
    touched = victims(finished, held, rig.far.name)
    measured = cost(touched, rig.far.name, at=at) | {"note": "a virtual link went down"}
    same_tokens(finished, reference)
    each_ended_once(finished)
    assert measured["migrated"] == len(touched) > 0
    assert measured["recovery_seconds"] < MOVED_SECONDS
    run(f"ip link set {OURS} up")
    await until_ready(rig.client, *rig.cluster.workers)
    await all_is_as_before(rig.cluster, baseline, rig.client)
    return measured


async def narrow(rig: TwoNetworks) -> dict[str, Any]:
    """Run row 23: the link carries little, both ways."""
    reference = await answers(rig.client, streams(NUM_STREAMS, max_tokens=LONG))
    run(f"tc qdisc add dev {OURS} root tbf {NARROW}")
    run(f"nsenter --net=/proc/{rig.far.pid}/ns/net tc qdisc add dev {THEIRS} root tbf {NARROW}")
    seen: set[int] = set()
    async with load(rig.client, streams(NUM_STREAMS, max_tokens=LONG)) as running:
        while any(stream.ended is None for stream in running.streams):
            seen |= set((await states(rig.client)).values())
            await asyncio.sleep(0.05)
        finished = await running.finished()
    same_tokens(finished, reference)
    each_ended_once(finished)
    assert seen == {READY}
    pieces, before = (statistics.mean(len(s.arrivals) for s in found) for found in (finished, reference))
    return {
        "failed": 0,
        "migrated": 0,
        "note": f"a virtual link of {RATE}/s; {LONG} tokens came in {pieces:.0f} pieces, else in {before:.0f}",
    }


ROWS: dict[str, Callable[[TwoNetworks], Awaitable[dict[str, Any]]]] = {"cut": cut, "narrow": narrow}


async def main(row: str, folder: Path) -> None:
    async with two_networks(folder) as rig:
        measured = await ROWS[row](rig)
    print(json.dumps(measured))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
