"""Workers that live but cannot be reached: frozen, cut off, behind a bad link, or merely slow."""

import asyncio
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from blockyard.proto.v1 import cluster_pb2
from blockyard.router.client import AsyncClient

from tests.system.load import READY, answers, holders, load, states, streams, until, until_ready
from tests.system.processes import SIMULATED, Process, Processes, processes

from .chaos_proxy import ChaosProxy
from .invariants import Baseline, all_is_as_before, blocks_are_free, each_ended_once, same_tokens
from .rig import busiest, cost, victims, whole

NUM_STREAMS, NUM_LATER = 12, 9
STEP = ("--simulated-step-seconds", "0.02")
LONG = 200
"""Tokens per request: it lasts longer than a fault takes to be noticed."""
NUM_ALONE = 40
"""Requests sent. By chance alone each of four workers gets a quarter, and in 1 of 200 runs one gets fewer than four."""
ENDLESS = 1000
"""20 s of tokens, so that a worker which went on to the end would be noticed."""
LONG_PAUSE_SECONDS = 0.3
PAUSE_COUNTS_SECONDS = 2.0
"""Time for which a worker may seem silent after a long pause of this process."""
FREED_SECONDS = 15.0
SUSPECT_SECONDS = 20.0
MOVED_SECONDS = 30.0
"""Ten times the bounds of 2 s and 3 s."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with processes(tmp_path_factory.mktemp("silence"), with_redis=True) as cluster:
        workers = [cluster.add_worker(f"w{number}", *SIMULATED, *STEP) for number in range(3)]
        cluster.start(*workers, cluster.add_router("r0"))
        yield cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxied:
    """A router that reaches each worker through a proxy of its own."""

    client: AsyncClient
    proxies: dict[str, ChaosProxy]
    router: Process


@asynccontextmanager
async def proxied(cluster: Processes, *options: str) -> AsyncIterator[Proxied]:
    """Start without Redis, which would give the router the workers' own addresses."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(whole(cluster))
        proxies = {
            name: await stack.enter_async_context(ChaosProxy(worker.address))
            for name, worker in cluster.workers.items()
        }
        addresses = [proxy.address for proxy in proxies.values()]
        router = cluster.add_router("proxied", *options, workers=addresses)
        router.environment.pop("BLOCKYARD_REDIS_URL")
        stack.enter_context(cluster.extra(router))
        client = await stack.enter_async_context(AsyncClient(router.address, retries=0))
        await until_ready(client, *cluster.workers)
        yield Proxied(client=client, proxies=proxies, router=router)


@pytest.mark.fault(20)
async def test_a_frozen_worker_loses_its_streams_and_changes_nothing_when_it_wakes(
    cluster: Processes, measured: dict[str, Any]
) -> None:
    async with whole(cluster) as client:
        reference = await answers(client, streams(NUM_STREAMS, max_tokens=LONG))
        baseline = Baseline.of(cluster)
        async with load(client, streams(NUM_STREAMS, max_tokens=LONG)) as running:
            await running.until_tokens(5)
            held = await holders(client)
            frozen = busiest(held)
            at = time.monotonic()
            cluster.workers[frozen].signal(signal.SIGSTOP)
            try:

                async def is_out() -> bool:
                    return (await states(client)).get(frozen) != READY

                suspected = await until(is_out, "the frozen worker is suspect")
                touched = victims(running.streams, held, frozen)
                later = [running.start(stream) for stream in streams(NUM_LATER, prefix="later")]
                for stream in touched:
                    await stream.until_tokens(stream.num_tokens + 1)
            finally:
                # It wakes with streams that are over, tokens that no client waits for, and a lapsed lease.
                cluster.workers[frozen].signal(signal.SIGCONT)
            finished = (await running.finished())[:NUM_STREAMS]
        measured.update(cost(touched, frozen, at=at), note=f"suspect after {suspected:.2f} s")
        same_tokens(finished, reference)
        each_ended_once([*finished, *later])
        assert {stream.finish.migrations for stream in later if stream.finish is not None} == {0}
        assert all(stream.finish is not None and stream.finish.worker_id != frozen for stream in later)
        assert measured["migrated"] == len(touched) > 0
        assert suspected < SUSPECT_SECONDS
        assert measured["recovery_seconds"] < MOVED_SECONDS
        await until_ready(client, *cluster.workers)
        await until(lambda: _is_exact(client), "the index is exact again")
        await all_is_as_before(cluster, baseline, client)


async def _is_exact(client: AsyncClient) -> bool:
    return (await client.index_info()).state == cluster_pb2.INDEX_STATE_EXACT


@pytest.mark.fault(21)
async def test_a_cut_moves_streams_and_the_worker_frees_what_it_ran(
    cluster: Processes, measured: dict[str, Any]
) -> None:
    async with proxied(cluster) as rig:
        reference = await answers(rig.client, streams(NUM_STREAMS, max_tokens=ENDLESS))
        baseline = Baseline.of(cluster)
        async with load(rig.client, streams(NUM_STREAMS, max_tokens=ENDLESS)) as running:
            await running.until_tokens(5)
            held = await holders(rig.client)
            cut = busiest(held)
            at = time.monotonic()
            await rig.proxies[cut].black_hole()
            freed = asyncio.create_task(blocks_are_free(cluster.workers[cut]))
            finished = await running.finished()
            freed_seconds = await freed
        touched = victims(finished, held, cut)
        measured.update(
            cost(touched, cut, at=at), note=f"the worker freed its blocks after {freed_seconds:.1f} s"
        )
        same_tokens(finished, reference)
        each_ended_once(finished)
        assert measured["migrated"] == len(touched) > 0
        assert measured["recovery_seconds"] < MOVED_SECONDS
        assert freed_seconds < FREED_SECONDS, "they may have run to their end"
        await rig.proxies[cut].heal()
        await until_ready(rig.client, *cluster.workers)
        await all_is_as_before(cluster, baseline, rig.client)


@pytest.mark.fault(22)
@pytest.mark.parametrize("lost_way", ["upstream", "downstream"])
async def test_a_link_that_loses_one_way_brings_each_token_once(
    cluster: Processes, measured: dict[str, Any], lost_way: str
) -> None:
    async with proxied(cluster) as rig:
        reference = await answers(rig.client, streams(NUM_STREAMS, max_tokens=LONG))
        async with load(rig.client, streams(NUM_STREAMS, max_tokens=LONG)) as running:
            await running.until_tokens(5)
            held = await holders(rig.client)
            cut = busiest(held)
            at = time.monotonic()
            await rig.proxies[cut].black_hole(
                upstream=lost_way == "upstream", downstream=lost_way == "downstream"
            )
            finished = await running.finished()
        measured.update(cost(victims(finished, held, cut), cut, at=at), note=f"{lost_way} lost")
        same_tokens(finished, reference)
        each_ended_once(finished)
        assert measured["recovery_seconds"] < MOVED_SECONDS
        await rig.proxies[cut].heal()
        await until_ready(rig.client, *cluster.workers)
        await blocks_are_free(cluster.workers[cut])


@pytest.mark.fault(22)
async def test_a_flapping_link_brings_each_token_once_without_a_storm(
    cluster: Processes, measured: dict[str, Any]
) -> None:
    num_flaps = 5
    async with proxied(cluster) as rig:
        wanted = 400
        reference = await answers(rig.client, streams(NUM_STREAMS, max_tokens=wanted))
        async with load(rig.client, streams(NUM_STREAMS, max_tokens=wanted)) as running:
            await running.until_tokens(5)
            held = await holders(rig.client)
            flapping = busiest(held)
            connections = rig.proxies[flapping].num_accepted
            at = time.monotonic()
            for number in range(num_flaps):
                # Alternate a silent cut and a refusal. A worker that refuses connections can come back at once.
                proxy = rig.proxies[flapping]
                await (proxy.refuse() if number % 2 else proxy.black_hole())
                await asyncio.sleep(1.0)
                await rig.proxies[flapping].heal()
                await asyncio.sleep(1.0)
            finished = await running.finished()
        connections = rig.proxies[flapping].num_accepted - connections
        touched = victims(finished, held, flapping)
        measured.update(
            cost(touched, flapping, at=at), note=f"{connections} connections in {num_flaps} flaps of 1 s"
        )
        same_tokens(finished, reference)
        each_ended_once(finished)
        assert connections <= 10 * num_flaps
        await until_ready(rig.client, *cluster.workers)


@pytest.mark.fault(23)
async def test_a_slow_link_is_slower_and_nobody_is_taken_for_dead(
    cluster: Processes, measured: dict[str, Any]
) -> None:
    """TCP turns loss into delay: 80 ms with as much jitter, over 1 Mbit/s."""
    async with _near(cluster) as near, proxied(cluster) as rig:
        reference = await answers(rig.client, streams(NUM_STREAMS))
        for proxy in rig.proxies.values():
            await proxy.latency(0.08, 0.08)
            await proxy.bandwidth(125_000)
        seen: set[int] = set()
        paused: set[str] = set()
        async with load(rig.client, streams(NUM_STREAMS)) as running:
            while any(stream.ended is None for stream in running.streams):
                now, far_states = time.monotonic(), await states(rig.client)
                paused |= {name for name, state in (await states(near)).items() if state != READY}
                # The proxies are in this process, so its own pauses silence everybody.
                if running.pauses.seconds(now - PAUSE_COUNTS_SECONDS, time.monotonic()) < LONG_PAUSE_SECONDS:
                    seen |= {state for name, state in far_states.items() if name not in paused}
                await asyncio.sleep(0.05)
            finished = await running.finished()
        slower = _mean_seconds(finished) / _mean_seconds(reference)
        measured.update(failed=0, migrated=0, note=f"{slower:.1f} times as slow")
        same_tokens(finished, reference)
        each_ended_once(finished)
        assert seen == {READY}


@asynccontextmanager
async def _near(cluster: Processes) -> AsyncIterator[AsyncClient]:
    """Start a router without proxies. It soon suspects a worker that stands still for a reason of its own."""
    workers = [worker.address for worker in cluster.workers.values()]
    router = cluster.add_router("near", "--suspect-seconds", "0.75", workers=workers)
    router.environment.pop("BLOCKYARD_REDIS_URL")
    with cluster.extra(router):
        async with AsyncClient(router.address, retries=0) as client:
            await until_ready(client, *cluster.workers)
            yield client


def _mean_seconds(finished: list[Any]) -> float:
    return sum(stream.ended - stream.started for stream in finished) / len(finished)


@pytest.mark.fault(24)
async def test_a_straggler_gets_less_and_is_not_taken_for_dead(
    cluster: Processes, measured: dict[str, Any]
) -> None:
    slow = cluster.add_worker("slow", *SIMULATED, "--simulated-step-seconds", "0.2")
    slow.environment.pop("BLOCKYARD_REDIS_URL")
    addresses = [worker.address for worker in cluster.workers.values()]
    router = cluster.add_router("r24", workers=addresses)
    router.environment.pop("BLOCKYARD_REDIS_URL")
    with cluster.extra(slow, router):
        async with AsyncClient(router.address, retries=0) as client:
            await until_ready(client, *cluster.workers)
            # Until the router has measured how slow it is, it is a worker like the others.
            await answers(client, streams(8, prefix="first"))
            # Sent one at a time, no request waits anywhere. Only the measured speed keeps them away from it.
            alone = [
                stream
                for asked in streams(NUM_ALONE, prefix="alone", max_tokens=4)
                for stream in await answers(client, [asked])
            ]
            finished = []
            async with load(client) as running:
                for stream in streams(60, prefix="more", max_tokens=20):
                    running.start(stream)
                    await asyncio.sleep(0.05)
                    assert (await states(client))["slow"] == READY
                finished = await running.finished()
    shares = Counter(stream.finish.worker_id for stream in finished if stream.finish is not None)
    share = shares["slow"] / len(finished)
    shares_alone = Counter(stream.finish.worker_id for stream in alone if stream.finish is not None)
    measured.update(
        failed=0, migrated=0, note=f"{share:.0%} of requests went to one that is 10 times as slow, of 4"
    )
    each_ended_once([*alone, *finished])
    assert all(stream.error is None for stream in (*alone, *finished))
    assert shares_alone["slow"] < NUM_ALONE / 10, shares_alone
    assert share < 0.1, shares
