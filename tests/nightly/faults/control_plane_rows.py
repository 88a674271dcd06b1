"""`python -m tests.nightly.faults.control_plane_rows FOLDER ROW...`: cuts off the host of a part of the control plane.

Runs within a network namespace of its own, where test_control_plane.py starts it. A ROW is PART:SECONDS, for example
`supervisor:65`. The host of that part is cut off for that time while clients stream from both routers, and then comes
back. Prints what each row measured as a line of JSON; a row that does not hold raises.
"""

import asyncio
import itertools
import json
import sys
import time
import traceback
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blockyard.router.client import AsyncClient

from tests.system.load import Stream, streams, until

from .three_hosts import ThreeHosts, host_number, three_hosts

STREAMS_PER_SECOND = 4.0
NUM_TOKENS = 150
BEFORE_SECONDS = 8.0
AFTER_SECONDS = 30.0
TELL_SECONDS = 5.0
"""Time in which `status` tells what has changed."""
HEAL_SECONDS = 300.0
VICTIMS = {"head": 1, "router": 2, "worker": 3, "supervisor": 3}
"""Host that is cut off, by the part for which a row tries it. Host 3 has neither Ray's head nor a router."""


@dataclass(slots=True, kw_only=True)
class Traffic:
    """Streams from both routers in turn."""

    routers: dict[int, str]
    """Address of each router, by its host."""
    begun: list[tuple[int, Stream]] = field(default_factory=list)
    """Streams, each with the host of its router."""

    async def run(self) -> None:
        """Start streams until cancelled. Then wait for the end of those that run."""
        clients = {host: AsyncClient(address, retries=0) for host, address in self.routers.items()}
        calls: list[asyncio.Task[None]] = []
        try:
            for host in itertools.cycle(self.routers):
                (stream,) = streams(1, max_tokens=NUM_TOKENS)
                self.begun.append((host, stream))
                calls.append(asyncio.create_task(stream.run(clients[host])))
                await asyncio.sleep(1 / STREAMS_PER_SECOND)
        finally:
            await asyncio.gather(*calls)
            for client in clients.values():
                await client.close()

    def failed(self, hosts: Iterable[int]) -> list[Stream]:
        """Return the streams of these hosts' routers that did not end well."""
        return [
            stream
            for host, stream in self.begun
            if host in hosts and (stream.error is not None or stream.num_tokens != NUM_TOKENS)
        ]


@asynccontextmanager
async def traffic(routers: dict[int, str]) -> AsyncIterator[Traffic]:
    driven = Traffic(routers=routers)
    task = asyncio.create_task(driven.run())
    try:
        yield driven
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One answer of `status`. Times count from the cut."""

    begun: float
    ended: float
    document: dict[str, Any]

    @property
    def silent_routers(self) -> set[str]:
        return set(self.document["router_errors"])


async def ask_status(cluster: ThreeHosts, *, on: int, cut_at: float, told: list[Told]) -> None:
    """Run `status` on a host again and again, until cancelled."""
    while True:
        begun = time.monotonic() - cut_at
        document = await asyncio.to_thread(cluster.report, on)
        told.append(Told(begun=begun, ended=time.monotonic() - cut_at, document=document))


async def row(cluster: ThreeHosts, part: str, cut_seconds: float) -> dict[str, Any]:
    """Cut the host off, and bring it back. Return what that cost."""
    victim = VICTIMS[part]
    cluster.move_supervisor({1, 2} if part == "supervisor" else {victim})
    routers = await all_serve(cluster)
    actors, nodes = cluster.actors(), cluster.raylets()
    told: list[Told] = []
    async with traffic(routers) as driven:
        await asyncio.sleep(BEFORE_SECONDS)
        cut_at = time.monotonic()
        cluster.hosts[victim].cut()
        asking = asyncio.create_task(
            ask_status(cluster, on=2 if victim == 1 else 1, cut_at=cut_at, told=told)
        )
        await asyncio.sleep(cut_seconds)
        cluster.hosts[victim].heal()
        await asyncio.sleep(AFTER_SECONDS)
        asking.cancel()
    ended_nodes = {host for host, pid in nodes.items() if cluster.raylets().get(host) != pid}
    reachable = set(cluster.hosts) - {victim} - ended_nodes
    measured = {
        "failed": len(driven.failed(reachable)),
        "note": f"{part} cut off for {cut_seconds:g} s; {len(driven.begun)} requests; "
        f"Ray ended {len(ended_nodes)} of 3 nodes",
    }
    print(
        f"{measured}, longest `status` {max(each.ended - each.begun for each in told):.1f} s", file=sys.stderr
    )
    ended = [
        actor for pid, actor in actors.items() if actor.host in reachable and pid not in cluster.actors()
    ]
    assert [actor for actor in ended if not actor.is_supervisor] == [], (
        "a reachable worker or router was ended"
    )
    assert [str(stream.error) for stream in driven.failed(reachable)] == []
    told_the_truth(told, routers, victim=victim, reachable=reachable, cut_seconds=cut_seconds)
    await all_serve(cluster)
    assert sum(actor.is_supervisor for actor in cluster.actors().values()) == 1
    healed = time.monotonic() - cut_at - cut_seconds
    return measured | {"recovery_seconds": healed if ended_nodes else 0.0}


def told_the_truth(
    told: Sequence[Told], routers: dict[int, str], *, victim: int, reachable: set[int], cut_seconds: float
) -> None:
    """Check that `status` named the cut-off router while it was cut off, and never a router that others reach."""
    for each in told:
        assert not each.silent_routers & {routers[host] for host in reachable & set(routers)}, each
        is_in_cut = each.begun >= TELL_SECONDS and each.ended <= cut_seconds
        if is_in_cut and victim in routers:
            assert routers[victim] in each.silent_routers, each
        if reachable & set(routers):
            assert each.document["cluster"] is not None, each


async def all_serve(cluster: ThreeHosts) -> dict[int, str]:
    """Wait until all serve, as `status` and every router say. Return the routers' addresses by host."""
    places: list[dict[str, Any]] = []

    async def do() -> bool:
        nonlocal places
        document = await asyncio.to_thread(cluster.report)
        places = document["places"]
        seen = document["cluster"] or {}
        serving = len(places) == 5 and all(place["phase"] == "serving" for place in places)
        return serving and not document["router_errors"] and seen.get("workers_ready") == 3

    await until(do, "all workers and routers serve", seconds=HEAL_SECONDS, every=1.0)
    addresses = [place["address"] for place in places if place["kind"] == "router"]
    return {host_number(address): address for address in addresses}


def main(folder: Path, rows: Sequence[str], options: Sequence[str]) -> int:
    """Try all rows, also after one that does not hold. Return the exit code."""
    failures = 0
    with three_hosts(folder, *options) as cluster:
        for part, _, seconds in (each.partition(":") for each in rows):
            try:
                print(json.dumps(asyncio.run(row(cluster, part, float(seconds)))), flush=True)
            except AssertionError:
                print(f"{part} for {seconds} s:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
                failures += 1
    return 1 if failures else 0


if __name__ == "__main__":
    arguments = sys.argv[2:]
    rows = [argument for argument in arguments if ":" in argument]
    sys.exit(main(Path(sys.argv[1]), rows, [argument for argument in arguments if argument not in rows]))
