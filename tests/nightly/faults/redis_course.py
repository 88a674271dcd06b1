"""Redis faults: one course of events under load, and the assertions after it.

Owns the traffic, the measuring of placement, and `survives`, which the rows of test_redis_*.py share. Does not own the
cluster (redis_rig.py) or the faults.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import Any

from blockyard.proto.v1 import cluster_pb2
from blockyard.router.client import AsyncClient
from blockyard.router.client.errors import BlockyardError

from tests.pauses import Pauses, watched_pauses
from tests.system.load import CANARY, until

from .invariants import blocks_are_free, nothing_is_told
from .redis_rig import DEGRADED, NUM_WORKERS, RedisCluster, num_resyncs

NUM_GROUPS = 6
NUM_LOOPS = 6
CALM_SECONDS = 1.5
ADDED_SECONDS = 0.05
"""Bound on the time that a fault of Redis adds to a placement. Tests allow ten times it."""

Action = Callable[[], object]


@dataclass(slots=True, kw_only=True)
class Traffic:
    """Results of the requests, and of the ExplainPlacement calls beside them."""

    num_done: int = 0
    errors: list[str] = field(default_factory=list)
    placements: list[tuple[float, float]] = field(default_factory=list)
    """Start time and duration of each ExplainPlacement call."""
    placed_without: list[float] = field(default_factory=list)
    """Start times of the ExplainPlacement calls that went without the index."""
    tokenizations: list[tuple[float, float]] = field(default_factory=list)
    """Start time and duration of each Tokenize call. It takes the same way and asks no index."""
    pauses: Pauses = field(default_factory=Pauses)
    """Pauses of this process."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    is_over: bool = False

    def placement_seconds(self, begin: float, end: float) -> list[float]:
        return sorted(took for at, took in self.placements if begin <= at < end)

    def slow_placements(self, begin: float, end: float, bound_seconds: float) -> list[tuple[float, float]]:
        """Return placements that took longer than the bound, twice the slowest Tokenize call beside them, and this
        process's own pauses."""
        return [
            (at, took)
            for at, took in self.placements
            if begin <= at < end
            and took
            > bound_seconds + 2 * self._slowest_beside(at, at + took) + self.pauses.seconds(at, at + took)
        ]

    def _slowest_beside(self, begin: float, end: float) -> float:
        return max((took for at, took in self.tokenizations if at < end and at + took > begin), default=0.0)


@asynccontextmanager
async def running_traffic(client: AsyncClient) -> AsyncIterator[Traffic]:
    """Run loops of requests that share prefixes, and one loop of ExplainPlacement calls, until the context ends."""
    numbers = count()
    async with watched_pauses() as pauses, asyncio.TaskGroup() as tasks:
        traffic = Traffic(pauses=pauses)
        for _ in range(NUM_LOOPS):
            tasks.create_task(_ask_again_and_again(client, traffic, numbers))
        tasks.create_task(_measure_placement(client, traffic))
        tasks.create_task(_measure_tokenization(client, traffic))
        try:
            yield traffic
        finally:
            traffic.is_over = True


def prompt(number: int) -> str:
    """Return some 20 blocks that a sixth of all prompts share, then words of its own."""
    return f"# {CANARY} group {number % NUM_GROUPS}\n" + "def f(x): return x\n" * 40 + f"# {number}\n" * 5


async def _ask_again_and_again(client: AsyncClient, traffic: Traffic, numbers: Iterator[int]) -> None:
    while not traffic.is_over:
        number = next(numbers)
        try:
            done = await client.generate(prompt(number), max_tokens=6, seed=number, ignore_eos=True)
        except BlockyardError as error:
            traffic.errors.append(str(error))
            await asyncio.sleep(0.05)
        else:
            traffic.num_done += 1
            traffic.prompt_tokens += done.finish.prompt_tokens
            traffic.cached_tokens += done.finish.cached_tokens
        await asyncio.sleep(0.03)


async def _measure_placement(client: AsyncClient, traffic: Traffic) -> None:
    numbers = count()
    while not traffic.is_over:
        began = time.monotonic()
        try:
            explained = await client.explain_placement(prompt(next(numbers)))
        except BlockyardError as error:
            traffic.errors.append(f"ExplainPlacement: {error}")
        else:
            if not explained.index_available:
                traffic.placed_without.append(began)
        traffic.placements.append((began, time.monotonic() - began))
        await asyncio.sleep(0.015)


async def _measure_tokenization(client: AsyncClient, traffic: Traffic) -> None:
    numbers = count()
    while not traffic.is_over:
        began = time.monotonic()
        await client.tokenize(prompt(next(numbers)))
        traffic.tokenizations.append((began, time.monotonic() - began))
        await asyncio.sleep(0.015)


@dataclass(slots=True, kw_only=True)
class Survived:
    """Measurements of one fault."""

    exact_seconds: float
    """Time from the end of the fault until the index reports EXACT, under load."""
    equal_seconds: float
    """Time from EXACT, without load, until the index equals the workers' truth."""
    added_p50_ms: float
    added_worst_ms: float
    pause_ms: float
    index: cluster_pb2.IndexInfo
    num_resyncs: int
    """Number of times that a worker republished all its blocks."""
    num_done: int
    told_seconds: float | None
    """Time from the fault until the state was DEGRADED. None: it was not, or nobody looked."""
    fallback_seconds: float | None
    """Time from the fault until a placement went without the index."""
    num_indexed_at_last: int
    """Placements in the last second of the fault that used the index."""


async def survives(
    cluster: RedisCluster,
    measured: dict[str, Any],
    *,
    harm: Action,
    heal: Action = lambda: None,
    hold_seconds: float = 2.0,
    is_degraded: bool = True,
    resyncs: int = 0,
) -> Survived:
    """Run load, calm, `harm`, load and `heal`; wait until EXACT, then until the index equals the truth.

    Asserts what every row of Redis asserts.

    - `is_degraded`: the fault lasts long enough to see the state, and it must have been DEGRADED.
    - `resyncs`: the least number of times that workers must have republished all their blocks.
    """
    async with cluster.client() as client:
        await cluster.until_exact(client)
        before, num_keys = await client.index_info(), cluster.num_keys()
        async with running_traffic(client) as traffic:
            await asyncio.sleep(CALM_SECONDS)
            await asyncio.to_thread(cluster.loop_pause)
            harmed_at = time.monotonic()
            await asyncio.to_thread(harm)
            told_at = await _when_told(client, DEGRADED, hold_seconds)
            await asyncio.sleep(max(0.0, harmed_at + hold_seconds - time.monotonic()))
            if is_degraded and told_at is None:
                told_at = await _when_told(client, DEGRADED, 10.0)
            healing_at = time.monotonic()
            await asyncio.to_thread(heal)
            healed_at = time.monotonic()
            await cluster.until_exact(client, resyncs=num_resyncs(before) + resyncs)
            exact_seconds = time.monotonic() - healed_at
            pause_seconds, computing_seconds = await asyncio.to_thread(cluster.loop_pause)
            await asyncio.sleep(0.5)
        equal_seconds = await cluster.until_equal(client)
        index = await client.index_info()
        for worker in cluster.workers:
            await blocks_are_free(worker)
        await _keys_are_back(cluster, num_keys)
        await cluster.until_exact(client)
    nothing_is_told(cluster.processes.logs())
    course = _Course(
        harmed_at=harmed_at,
        healing_at=healing_at,
        exact_at=healed_at + exact_seconds,
        told_at=told_at,
        pause_seconds=pause_seconds,
        calm_seconds=median(traffic.placement_seconds(harmed_at - CALM_SECONDS / 2, harmed_at)),
    )
    survived = _survived(traffic, course, before, index, exact_seconds, equal_seconds)
    _check(traffic, course, survived)
    assert computing_seconds <= 10 * ADDED_SECONDS, "the event loop was held up"
    assert told_at is not None or not is_degraded
    measured |= {
        "failed": len(traffic.errors),
        "recovery_seconds": exact_seconds,
        "note": f"placement {survived.added_p50_ms:+.1f} ms in the middle, at worst "
        f"+{survived.added_worst_ms:.0f} ms; {traffic.num_done} requests",
    }
    print(f"\n{survived.exact_seconds:.2f} s to EXACT, {survived.equal_seconds:.2f} s to equal; ", end="")
    print(f"loop {1000 * pause_seconds:.0f} ms; {measured['note']}; errors {index.failed_lookups}")
    return survived


@dataclass(frozen=True, slots=True, kw_only=True)
class _Course:
    """Times of one fault, on the monotonic clock."""

    harmed_at: float
    healing_at: float
    exact_at: float
    told_at: float | None
    pause_seconds: float
    """Longest pause of an event loop of this process meanwhile."""
    calm_seconds: float
    """Usual time of a placement before the fault."""


def _survived(
    traffic: Traffic,
    course: _Course,
    before: cluster_pb2.IndexInfo,
    index: cluster_pb2.IndexInfo,
    exact_seconds: float,
    equal_seconds: float,
) -> Survived:
    """Return the measurements. `before` and `index` are the index before the fault and at the end."""
    without = [at for at in traffic.placed_without if at >= course.harmed_at]
    at_last = (course.healing_at - 1.0, course.healing_at - 0.1)
    harmed = traffic.placement_seconds(course.harmed_at - 0.1, course.exact_at)
    return Survived(
        exact_seconds=exact_seconds,
        equal_seconds=equal_seconds,
        added_p50_ms=1000 * (median(harmed) - course.calm_seconds),
        added_worst_ms=1000 * (max(harmed) - course.calm_seconds),
        pause_ms=1000 * course.pause_seconds,
        index=index,
        num_resyncs=num_resyncs(index) - num_resyncs(before),
        num_done=traffic.num_done,
        told_seconds=course.told_at and course.told_at - course.harmed_at,
        fallback_seconds=min(without) - course.harmed_at if without else None,
        num_indexed_at_last=len(traffic.placement_seconds(*at_last))
        - sum(at_last[0] <= at < at_last[1] for at in without),
    )


def _check(traffic: Traffic, course: _Course, survived: Survived) -> None:
    """Assert that no request failed and no placement was slow."""
    assert not traffic.errors, traffic.errors
    assert traffic.num_done >= NUM_LOOPS
    # Without a processor no answer arrives. A pause of the loop and the calls that ask no index tell how long that was.
    bound_seconds = course.calm_seconds + 10 * ADDED_SECONDS + 2 * course.pause_seconds
    slow = traffic.slow_placements(course.harmed_at - 0.1, course.exact_at, bound_seconds)
    assert not slow, (slow, survived)


async def _when_told(client: AsyncClient, state: int, seconds: float) -> float | None:
    """Return when the state was told, or None if it was not within so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (await client.cluster_info()).index_state == state:
            return time.monotonic()
        await asyncio.sleep(0.02)
    return None


async def _keys_are_back(cluster: RedisCluster, num_keys: int) -> None:
    """Assert that nothing of earlier berths is left once the janitors have run."""

    def are_back() -> bool:
        return cluster.num_strays() == 0 and cluster.num_keys() <= num_keys + NUM_WORKERS + 1

    await until(are_back, "the dead berths are purged", seconds=60, every=0.2)
