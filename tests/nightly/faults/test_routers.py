"""Routers that die, stand still, shut down in order, or receive the same request twice."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from blockyard.router.client import AsyncClient

from tests.system.load import Stream, answers, load, streams, until, until_ready
from tests.system.processes import SIMULATED, Processes, processes

from .invariants import Baseline, all_is_as_before, blocks_are_free, each_ended_once, same_tokens
from .rig import is_serving, whole

NUM_STREAMS = 8
LONG_PROMPT = "one two three " * 100
STEP = ("--simulated-step-seconds", "0.02")
FROZEN_SECONDS = 3.0
ORPHAN_SECONDS = 30.0
"""Much more than the bound of 7 s, and less than the 38 s in which the orphans would end by themselves."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with processes(tmp_path_factory.mktemp("routers"), with_redis=True) as cluster:
        workers = [cluster.add_worker(f"w{number}", *SIMULATED, *STEP) for number in range(2)]
        cluster.start(*workers, cluster.add_router("r0"), cluster.add_router("r1"))
        yield cluster


@pytest.mark.fault(44)
async def test_a_killed_router_leaves_no_orphan_and_comes_back_warm(
    cluster: Processes, measured: dict[str, Any]
) -> None:
    router = cluster.routers["r0"]
    async with whole(cluster, router) as client:
        (warm,) = await answers(client, [_long_prompt("before")])
        async with load(client, streams(NUM_STREAMS, max_tokens=1900)) as running:
            await running.until_tokens(5)
            router.kill()
            orphans = [await blocks_are_free(worker) for worker in cluster.workers.values()]
            finished = await running.finished()
        started = time.monotonic()
        cluster.start(router)
        async with AsyncClient(router.address, retries=0) as again:
            await until_ready(again, *cluster.workers)
            await _until_it_knows_a_holder(again)
            (after,) = await answers(again, [_long_prompt("after")])
        back = time.monotonic() - started
    measured.update(
        failed=len(finished),
        migrated=0,
        recovery_seconds=max(orphans),
        note=f"serves again {back:.1f} s after its start",
    )
    assert {stream.code for stream in finished} == {grpc.StatusCode.UNAVAILABLE}
    each_ended_once(finished)
    assert max(orphans) < ORPHAN_SECONDS
    assert warm.finish is not None
    assert after.finish is not None
    # It learns the contents of the caches from Redis.
    assert after.finish.worker_id == warm.finish.worker_id
    assert after.finish.cached_tokens > 0


async def _until_it_knows_a_holder(client: AsyncClient) -> None:
    """A look-up has 40 ms. On a busy machine the first may take longer, and then it finds nothing."""
    async with asyncio.timeout(30):
        while not (await client.lookup_prefix(LONG_PROMPT)).holders:  # noqa: ASYNC110 - state of the product
            await asyncio.sleep(0.05)


def _long_prompt(name: str) -> Stream:
    return Stream(
        request_id=f"{name}-{time.monotonic_ns()}",
        prompt=LONG_PROMPT,
        arguments={"max_tokens": 4, "ignore_eos": True, "seed": 1},
    )


@pytest.mark.fault(45)
async def test_of_two_routers_the_death_of_one_touches_the_other_in_nothing(
    cluster: Processes, measured: dict[str, Any]
) -> None:
    first, second = cluster.routers["r0"], cluster.routers["r1"]
    async with whole(cluster, second) as other, whole(cluster, first) as client:
        reference = await answers(other, streams(NUM_STREAMS, max_tokens=150))
        # A client that may retry and has both addresses, as an application would.
        async with (
            AsyncClient([first.address, second.address], retries=5) as application,
            load(other, streams(NUM_STREAMS, max_tokens=150)) as untouched,
        ):
            await untouched.until_tokens(5)
            await answers(client, streams(2, prefix="warm"))
            at = time.monotonic()
            first.kill()
            moved = await answers(application, streams(NUM_STREAMS, prefix="moved"))
            finished = await untouched.finished()
    took = max(stream.arrivals[0] for stream in moved) - at
    measured.update(
        failed=sum(stream.error is not None for stream in [*finished, *moved]),
        migrated=len(moved),
        recovery_seconds=took,
    )
    same_tokens(finished, reference)
    assert all(stream.error is None for stream in moved), [stream.error for stream in moved]
    each_ended_once([*finished, *moved])
    cluster.start(first)


@pytest.mark.fault(46)
async def test_a_router_told_to_end_finishes_its_streams_first(
    cluster: Processes, measured: dict[str, Any]
) -> None:
    router = cluster.routers["r0"]
    async with whole(cluster, router) as client:
        reference = await answers(client, streams(NUM_STREAMS, max_tokens=300))
        async with load(client, streams(NUM_STREAMS, max_tokens=300)) as running:
            await running.until_tokens(5)
            assert router.popen is not None
            router.popen.terminate()

            async def says_so() -> bool:
                return not await is_serving(router)

            told = await until(says_so, "health says NOT_SERVING")
            (refused,) = await answers(client, streams(1, prefix="new"))
            finished = await running.finished()
        code = await asyncio.to_thread(router.wait, 30.0)
    measured.update(failed=0, migrated=0, note=f"NOT_SERVING after {told:.2f} s, exit {code}")
    same_tokens(finished, reference)
    assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "ROUTER_DRAINING")
    assert code == 0
    cluster.start(router)


@pytest.mark.fault(85)
async def test_a_router_that_stands_still_for_seconds_moves_no_request(
    cluster: Processes, measured: dict[str, Any]
) -> None:
    """Workers keep the requests of a router that is silent for up to five seconds."""
    router = cluster.routers["r0"]
    async with whole(cluster, router) as client:
        reference = await answers(client, streams(NUM_STREAMS, max_tokens=300))
        async with load(client, streams(NUM_STREAMS, max_tokens=300)) as running:
            await running.until_tokens(5)
            at = time.monotonic()
            router.signal(signal.SIGSTOP)
            await asyncio.sleep(FROZEN_SECONDS)
            router.signal(signal.SIGCONT)
            finished = await running.finished()
    same_tokens(finished, reference)
    each_ended_once(finished)
    moves = sum(stream.finish.migrations for stream in finished if stream.finish is not None)
    measured.update(
        failed=0,
        migrated=moves,
        recovery_seconds=max(stream.longest_gap(at) for stream in finished) - FROZEN_SECONDS,
        note=f"after {FROZEN_SECONDS:g} s",
    )
    assert moves == 0


@asynccontextmanager
async def _all_on_one_worker(cluster: Processes, *clients: AsyncClient) -> AsyncIterator[None]:
    """Where requests could be mixed."""
    first, *others = cluster.workers
    for name in others:
        await clients[0].drain_worker(name, grace_seconds=0.0)
    try:
        for client in clients:
            await until_ready(client, first)
        yield
    finally:
        for name in others:
            await clients[0].resume_worker(name)
        for client in clients:
            await until_ready(client, *cluster.workers)


@pytest.mark.fault(47)
async def test_one_id_twice_is_refused_by_one_router_and_never_mixed_by_two(
    cluster: Processes, measured: dict[str, Any]
) -> None:
    first, second = cluster.routers["r0"], cluster.routers["r1"]
    async with (
        whole(cluster, first) as client,
        whole(cluster, second) as other,
        _all_on_one_worker(cluster, client, other),
    ):
        reference = await answers(client, streams(2, max_tokens=300))
        baseline = Baseline.of(cluster)
        one, two = streams(2, max_tokens=300)
        two.request_id = one.request_id
        (again,) = streams(1, max_tokens=300)
        again.request_id = one.request_id
        async with load(client, [one]) as running, load(other, [two]) as elsewhere:
            await running.until_tokens(1)
            await answers(client, [again])
            finished = [*await running.finished(), *await elsewhere.finished()]
        measured.update(failed=0, note="two routers run it twice, each for its own client")
        assert (again.code, again.reason) == (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ALREADY_RUNS")
        same_tokens(finished, reference)
        await all_is_as_before(cluster, baseline, client, other)
