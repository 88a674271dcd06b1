"""Workers whose model is divided among ranks: the loss of any rank costs its worker, and no stream a token."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blockyard.router.client import AsyncClient

from tests.system.load import Stream, answers, holders, load, streams, until, until_ready
from tests.system.processes import DETERMINISTIC, Process, Processes, processes

from .invariants import Baseline, all_is_as_before, each_ended_once, same_tokens
from .rig import busiest, cost, whole

RANKS = ("--tensor-parallel-size", "2")
SWAPPING = ("--preempt", "swap", "--swap-space-gib", "0.05", "--max-preemptions", "1000")
NUM_STREAMS = 8
PATIENT_SECONDS = 300.0
"""Deadline of each stream: ranks that share a busy core wait for one another in every layer."""
LOST_SECONDS = 30.0
"""Far above the bounds of 0.3 s and 3 s, and below the 60 s after which a rank that waits in vain would give up."""
RANK = re.compile(r"rank 1 is process (\d+)")
LOADED = "rank 1 of 2 has loaded its part"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with processes(tmp_path_factory.mktemp("ranks"), with_redis=True) as cluster:
        workers = [cluster.add_worker(f"w{number}", *DETERMINISTIC, *RANKS) for number in range(2)]
        cluster.start(*workers, cluster.add_router("r0", "--no-worker-seconds", "120"))
        yield cluster


def rank_of(worker: Process) -> int:
    """Return the process id of the worker's rank 1."""
    return int(RANK.findall(worker.log_text())[-1])


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def long_prompts(count: int) -> list[Stream]:
    """Return streams whose prompts take much longer than a decode."""
    wanted = streams(count, max_tokens=20, prefix="long")
    for stream in wanted:
        stream.prompt += " + 1" * 200
    return wanted


async def test_two_ranks_give_the_tokens_of_a_single_worker(cluster: Processes) -> None:
    async with whole(cluster) as client:
        divided = await answers(client, streams(NUM_STREAMS, temperature=0.0))
    alone = cluster.add_worker("alone", *DETERMINISTIC)
    router = cluster.add_router("of-one", workers=[alone.address])
    for process in (alone, router):
        process.environment.pop("BLOCKYARD_REDIS_URL")
    with cluster.extra(alone, router):
        async with AsyncClient(router.address, retries=0) as client:
            await until_ready(client, "alone")
            same_tokens(divided, await answers(client, streams(NUM_STREAMS, temperature=0.0)))


async def _lose(
    cluster: Processes,
    measured: dict[str, Any],
    number: signal.Signals,
    *,
    within_seconds: float,
    wanted: list[Stream] | None = None,
    num_tokens: int = 5,
    of_rank: int = 1,
) -> None:
    """Run streams, signal one rank of the busiest worker, and check that all streams end with each token once."""
    wanted = streams(NUM_STREAMS) if wanted is None else wanted
    for stream in wanted:
        stream.timeout_seconds = PATIENT_SECONDS
    async with whole(cluster) as client:
        reference = await answers(client, [_again(stream) for stream in wanted])
        assert all(stream.error is None for stream in reference)
        baseline = Baseline.of(cluster)
        async with load(client, wanted) as running:
            await until(lambda: any(one.num_tokens >= num_tokens for one in running.streams), "tokens")
            # Without those that the router has not placed yet.
            held = {name: worker for name, worker in (await holders(client)).items() if worker}
            lost = cluster.workers[busiest(held)]
            rank = rank_of(lost)
            at = time.monotonic()
            os.kill(rank if of_rank else lost.pid, number)
            finished = await running.finished()
        lost.wait(LOST_SECONDS)
        await until(lambda: not is_alive(rank), "no rank is left")
        touched = [stream for stream in finished if held.get(stream.request_id) == lost.name]
        measured.update(cost(touched, lost.name, at=at))
        same_tokens(finished, reference)
        each_ended_once(finished)
        assert measured["migrated"] == len(touched) > 0
        assert measured["recovery_seconds"] < within_seconds
        await all_is_as_before(cluster, baseline, client)


def _again(stream: Stream) -> Stream:
    return Stream(
        request_id=f"reference-{stream.request_id}",
        prompt=stream.prompt,
        arguments=stream.arguments,
        timeout_seconds=PATIENT_SECONDS,
    )


@pytest.mark.fault(72)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_killed_rank_ends_its_worker_at_once_and_its_streams_go_on_elsewhere(
    cluster: Processes, measured: dict[str, Any], phase: str
) -> None:
    wanted = long_prompts(NUM_STREAMS) if phase == "prefill" else None
    await _lose(
        cluster,
        measured,
        signal.SIGKILL,
        within_seconds=LOST_SECONDS,
        wanted=wanted,
        num_tokens=1 if wanted else 5,
    )


@pytest.mark.fault(72)
async def test_a_rank_killed_while_blocks_are_swapped_costs_no_token(
    tmp_path: Path, measured: dict[str, Any]
) -> None:
    # 16 blocks: four streams fit at first, and three at their end.
    small = ("--device", "cpu", "--deterministic", "--kv-cache-memory", "393216", "--max-model-len", "256")
    with processes(tmp_path, with_redis=True) as cluster:
        workers = [cluster.add_worker(f"s{number}", *small, *SWAPPING, *RANKS) for number in range(2)]
        cluster.start(*workers, cluster.add_router("r72", "--no-worker-seconds", "120"))
        wanted = streams(NUM_STREAMS, max_tokens=60)
        await _lose(
            cluster, measured, signal.SIGKILL, within_seconds=LOST_SECONDS, wanted=wanted, num_tokens=52
        )
        async with whole(cluster) as client:
            workers_now = await client.list_workers()
            assert sum(worker.load.swaps for worker in workers_now) > 0


@pytest.mark.fault(73)
async def test_a_frozen_rank_ends_its_worker_and_its_streams_go_on_elsewhere(
    cluster: Processes, measured: dict[str, Any]
) -> None:
    await _lose(
        cluster,
        measured,
        signal.SIGSTOP,
        within_seconds=LOST_SECONDS,
        wanted=streams(NUM_STREAMS, max_tokens=120),
    )


@pytest.mark.fault(75)
async def test_the_end_of_rank_0_ends_the_others(cluster: Processes, measured: dict[str, Any]) -> None:
    await _lose(cluster, measured, signal.SIGKILL, within_seconds=LOST_SECONDS, of_rank=0)


@pytest.mark.fault(74)
@pytest.mark.parametrize("is_loaded", [False, True], ids=["load", "warm-up"])
async def test_a_rank_killed_before_its_worker_serves_fails_that_start_in_words(
    cluster: Processes, measured: dict[str, Any], is_loaded: bool
) -> None:
    starting = cluster.add_worker("starting", *DETERMINISTIC, *RANKS)
    async with whole_but(cluster, starting) as client:
        starting.spawn()
        await until(lambda: bool(RANK.search(starting.log_text())), "a rank begins")
        if is_loaded:
            await until(lambda: LOADED in starting.log_text(), "the rank has loaded", every=0.0005)
        at = time.monotonic()
        os.kill(rank_of(starting), signal.SIGKILL)
        assert starting.wait(LOST_SECONDS) == 1
        took = time.monotonic() - at
        assert re.search(r"rank 1 is lost|a rank's process ended", starting.log_text())
        finished = await answers(client, streams(NUM_STREAMS))
        each_ended_once(finished)
        measured.update(failed=0, migrated=0, recovery_seconds=took)
        assert all(stream.error is None for stream in finished)


def whole_but(cluster: Processes, starting: Process) -> Any:
    """Return the context of a whole cluster without a worker that the test starts."""
    del cluster.workers[starting.name]
    return whole(cluster)
