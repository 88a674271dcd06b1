"""Rows 76 to 79: a request that one worker begins and another continues, and a death or a freeze between the two.

The second worker is frozen while the first one computes the prompt. So the fault comes after the first token, and
before the pull.
"""

import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from blockyard.router.client import AsyncClient

from tests.system.load import CANARY, Stream, answers, holders, load, until
from tests.system.processes import DETERMINISTIC, Process, Processes, free_port, processes

from .invariants import Baseline, all_is_as_before, each_ended_once, same_tokens
from .rig import whole

GAP_SECONDS = 10.0
PATIENT = ("--suspect-seconds", "60", "--lost-seconds", "90")
"""A router that does not give up a worker that is frozen for a while."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with processes(tmp_path_factory.mktemp("splits")) as cluster:
        # Each finds its own transfer port again after a restart.
        for role in ("prefill", "decode"):
            options = ("--role", role, "--host-cache-gib", "0.03", "--transfer-port", str(free_port()))
            cluster.add_worker(role, *DETERMINISTIC, *options)
        workers = tuple(cluster.workers.values())
        addresses = [worker.address for worker in workers]
        cluster.start(*workers, cluster.add_router("r0", *PATIENT, workers=addresses))
        yield cluster


def long_stream() -> Stream:
    return Stream(
        request_id=f"split-{time.monotonic_ns()}",
        prompt=f"# {CANARY}\n" + "".join(f"def f{number}(a): return a + {number}\n" for number in range(60)),
        arguments={"max_tokens": 60, "ignore_eos": True, "seed": 7, "temperature": 0.8},
    )


async def until_it_would_be_split(client: AsyncClient) -> None:
    async def would_be_split() -> bool:
        explained = await client.explain_placement(long_stream().prompt)
        return explained.split.is_chosen

    await until(would_be_split, "the link is measured, and the prompt would be split", seconds=60.0)


@asynccontextmanager
async def ready_to_split(cluster: Processes) -> AsyncIterator[tuple[AsyncClient, Stream]]:
    """Yield a client, and an answer without a fault. No worker has any of its blocks any more."""
    async with whole(cluster) as client:
        await client.flush_cache()
        await until_it_would_be_split(client)
        splits = (await client.cluster_info()).splits
        (expected,) = await answers(client, [long_stream()])
        assert (await client.cluster_info()).splits == splits + 1
        await client.flush_cache()
        await until_it_would_be_split(client)
        yield client, expected


async def _disturbed_between_the_workers(
    cluster: Processes, measured: dict[str, Any], number: signal.Signals, *, restarts: bool = False
) -> None:
    """Send a signal to the first worker once it has given the request back, before the second one asks for blocks."""
    first, second = cluster.workers["prefill"], cluster.workers["decode"]
    async with ready_to_split(cluster) as (client, expected):
        baseline = Baseline.of(cluster)
        second.signal(signal.SIGSTOP)
        async with load(client, [long_stream()]) as running:
            (stream,) = running.streams
            await stream.until_tokens(1)

            async def is_given_back() -> bool:
                return (await holders(client))[stream.request_id] == second.name

            await until(is_given_back, "the second worker has the request")
            _harm(cluster, first, number, restarts=restarts)
            at = time.monotonic()
            second.signal(signal.SIGCONT)
            finished = await running.finished()
        first.signal(signal.SIGCONT) if first.is_running else None
        same_tokens(finished, [expected])
        each_ended_once(finished)
        assert stream.finish is not None
        assert (stream.finish.worker_id, stream.finish.migrations) == (second.name, 0)
        # The client has waited for the frozen worker before that.
        recovery_seconds = next(arrival for arrival in stream.arrivals if arrival > at) - at
        measured.update(failed=0, migrated=0, recovery_seconds=recovery_seconds)
        assert measured["recovery_seconds"] < GAP_SECONDS
    async with whole(cluster) as client:
        if restarts or number == signal.SIGSTOP:
            await all_is_as_before(cluster, baseline, client)


def _harm(cluster: Processes, worker: Process, number: signal.Signals, *, restarts: bool) -> None:
    worker.signal(number)
    if number == signal.SIGKILL:
        worker.wait(10)
    if restarts:
        cluster.start(worker)


@pytest.mark.fault(76)
async def test_a_prefill_worker_killed_before_the_pull_costs_only_its_computing(
    cluster: Processes, measured: dict[str, Any]
) -> None:
    await _disturbed_between_the_workers(cluster, measured, signal.SIGKILL)


@pytest.mark.fault(77)
async def test_a_prefill_worker_frozen_before_the_pull_costs_no_more_than_the_estimate(
    cluster: Processes, measured: dict[str, Any]
) -> None:
    await _disturbed_between_the_workers(cluster, measured, signal.SIGSTOP)


@pytest.mark.fault(78)
async def test_a_prefill_worker_restarted_before_the_pull_has_nothing_to_lend(
    cluster: Processes, measured: dict[str, Any]
) -> None:
    await _disturbed_between_the_workers(cluster, measured, signal.SIGKILL, restarts=True)


@pytest.mark.fault(79)
async def test_the_prefill_worker_goes_on_alone_where_the_decode_worker_dies(
    cluster: Processes, measured: dict[str, Any]
) -> None:
    async with ready_to_split(cluster) as (client, expected):
        async with load(client, [long_stream()]) as running:
            (stream,) = running.streams
            await stream.until_tokens(10)
            at = time.monotonic()
            cluster.workers["decode"].kill()
            finished = await running.finished()
        same_tokens(finished, [expected])
        each_ended_once(finished)
        assert stream.finish is not None
        assert (stream.finish.worker_id, stream.finish.migrations) == ("prefill", 1)
        measured.update(failed=0, migrated=1, recovery_seconds=stream.longest_gap(at))
        assert measured["recovery_seconds"] < GAP_SECONDS
