"""The router's look-up never raises, never waits long, and recovers after a failure."""

import asyncio
import time

import pytest
from blockyard.proto.index.contract import (
    FIRST_SEQUENCE,
    MAX_LISTED,
    Batch,
    ErrorKind,
    Holder,
    Incarnation,
    IndexInfo,
    WorkerId,
    WorkerRecord,
)
from blockyard.proto.index.twin import TwinPrefixIndex
from blockyard.router.cluster.depths import CachedDepth
from blockyard.router.dispatch.prefix_lookup import (
    BreakerState,
    IndexHealth,
    LookupResult,
    PrefixLookup,
    PrefixLookupConfig,
)

from .harness import chain, record

KNOWN = {WorkerId("a"): Incarnation("1"), WorkerId("b"): Incarnation("1")}
UNAVAILABLE = LookupResult(available=False)


async def twin_with_blocks() -> TwinPrefixIndex:
    index = TwinPrefixIndex(lambda: 0.0)
    for worker_id, incarnation, depth in (("a", "1", 4), ("b", "0", 9), ("b", "1", 2), ("stranger", "1", 9)):
        berth = await index.register(record(worker_id, incarnation), lease_seconds=60, has_host_cache=True)
        batch = Batch(sequence=FIRST_SEQUENCE, added=chain(depth), anywhere_added=chain(depth + depth // 4))
        await index.apply(berth, batch)
    return index


async def test_only_the_incarnations_the_router_knows_count() -> None:
    lookup = PrefixLookup(await twin_with_blocks())
    assert await lookup.lookup(chain(9), KNOWN) == LookupResult(
        depth_by_worker={
            WorkerId("a"): CachedDepth(blocks=4, host_blocks=1),
            WorkerId("b"): CachedDepth(blocks=2),
        },
        available=True,
    )


async def test_nothing_to_ask_asks_nothing() -> None:
    lookup = PrefixLookup(await twin_with_blocks())
    assert await lookup.lookup((), KNOWN) == LookupResult(available=True)
    assert await lookup.lookup(chain(9), {}) == LookupResult(available=True)
    assert lookup.num_lookups == 0


async def test_the_breaker_opens_after_failures_in_a_row_probes_once_and_closes() -> None:
    index, now = await twin_with_blocks(), 0.0
    config = PrefixLookupConfig(failures_to_open=3, open_seconds=10.0)
    lookup = PrefixLookup(index, config=config, clock=lambda: now)
    index.available = False
    for _ in range(5):
        assert await lookup.lookup(chain(9), KNOWN) == UNAVAILABLE
    assert (lookup.num_lookups, lookup.num_skipped) == (3, 2)
    assert lookup.errors == {ErrorKind.CONNECTION: 3}
    now = 10.0
    assert await lookup.lookup(chain(9), KNOWN) == UNAVAILABLE
    assert lookup.breaker_state().name == "OPEN"
    index.available, now = True, 19.0
    assert await lookup.lookup(chain(9), KNOWN) == UNAVAILABLE
    now = 20.0
    assert (await lookup.lookup(chain(9), KNOWN)).available
    assert lookup.breaker_state() is BreakerState.CLOSED
    assert lookup.num_lookups == 5


async def test_failures_that_are_not_in_a_row_leave_the_breaker_closed() -> None:
    index = await twin_with_blocks()
    lookup = PrefixLookup(index, config=PrefixLookupConfig(failures_to_open=2))
    for attempt in range(8):
        index.available = attempt % 2 == 0
        await lookup.lookup(chain(9), KNOWN)
    assert lookup.breaker_state() is BreakerState.CLOSED


async def test_who_asks_how_it_is_is_told_of_the_last_second_and_not_of_the_last_request() -> None:
    index, now = await twin_with_blocks(), 0.0
    lookup = PrefixLookup(index, clock=lambda: now)
    assert (await lookup.health()).answers
    index.available = False
    assert (await lookup.health()).answers, "somebody asked less than a second ago"
    now = 1.0
    assert await lookup.health() == IndexHealth(answers=False, in_time=False, standing=frozenset())
    assert lookup.breaker_state() is BreakerState.CLOSED
    index.available, now = True, 2.0
    health = await lookup.health()
    assert (health.answers, health.in_time) == (True, True)
    assert health.standing == {("a", "1"), ("b", "0"), ("b", "1"), ("stranger", "1")}
    assert (lookup.num_lookups, lookup.errors.total(), len(lookup.durations_seconds)) == (0, 0, 0)


async def test_an_open_breaker_is_closed_by_who_asks_how_the_index_is() -> None:
    index, now = await twin_with_blocks(), 0.0
    lookup = PrefixLookup(index, config=PrefixLookupConfig(open_seconds=1.5), clock=lambda: now)
    await open_breaker(lookup, index)
    now = 1.0
    health = await lookup.health()
    assert (health.answers, health.in_time) == (True, False), "it answers, but requests go without still"
    now = 1.5
    assert (await lookup.health()).in_time
    assert (lookup.breaker_state(), lookup.num_lookups) == (BreakerState.CLOSED, 3)


async def test_prompts_too_short_for_the_stride_close_an_open_breaker() -> None:
    index, now = await twin_with_blocks(), 0.0
    lookup = PrefixLookup(index, config=PrefixLookupConfig(open_seconds=1.5), clock=lambda: now)
    await open_breaker(lookup, index)
    assert await lookup.lookup(chain(3), KNOWN, stride_blocks=4) == UNAVAILABLE
    now = 1.5
    assert await lookup.lookup(chain(3), KNOWN, stride_blocks=4) == LookupResult(available=True)
    assert lookup.breaker_state() is BreakerState.CLOSED
    index.available = False
    assert await lookup.lookup(chain(3), KNOWN, stride_blocks=4) == LookupResult(available=True)
    assert (lookup.num_lookups, lookup.errors.total()) == (3, 3), "a probe is no look-up"


async def open_breaker(lookup: PrefixLookup, index: TwinPrefixIndex) -> None:
    index.available = False
    for _ in range(PrefixLookupConfig().failures_to_open):
        await lookup.lookup(chain(9), KNOWN)
    index.available = True
    assert lookup.breaker_state() is BreakerState.OPEN


class _CountedIndex(TwinPrefixIndex):
    """Counts what is asked, and answers neither question before `resume` is set."""

    def __init__(self) -> None:
        super().__init__(lambda: 0.0)
        self.resume = asyncio.Event()
        self.num_counts = self.num_checks = 0

    async def info(self) -> IndexInfo:
        self.num_counts += 1
        await self.resume.wait()
        return await super().info()

    async def directory(self) -> list[WorkerRecord]:
        self.num_checks += 1
        await self.resume.wait()
        return await super().directory()


async def test_all_who_ask_within_a_second_share_one_count_and_one_check() -> None:
    index, now = _CountedIndex(), 0.0
    lookup = PrefixLookup(index, clock=lambda: now)
    async with asyncio.TaskGroup() as tasks:
        counts = [tasks.create_task(lookup.info()) for _ in range(20)]
        checks = [tasks.create_task(lookup.health()) for _ in range(20)]
        await asyncio.sleep(0)
        counts.pop().cancel()
        index.resume.set()
    assert (index.num_counts, index.num_checks) == (1, 1)
    assert all(count.result() is not None for count in counts)
    assert all(check.result().answers for check in checks)
    await lookup.info()
    assert index.num_counts == 1
    now = 1.0
    await lookup.info()
    await lookup.health()
    assert (index.num_counts, index.num_checks) == (2, 2)


async def test_a_state_told_with_a_size_is_no_older_than_the_size() -> None:
    index, now = await twin_with_blocks(), 0.0
    lookup = PrefixLookup(index, clock=lambda: now)
    assert (await lookup.health()).standing
    index.flush()
    now = 0.5
    size = await lookup.info()
    assert size is not None
    assert size.live_berths == 0
    assert not (await lookup.health()).standing


class _SoonAnsweringIndex(TwinPrefixIndex):
    """Answers 10 ms after it was asked, unless the loop stands still."""

    async def lookup(
        self, names: object, *, most: int = MAX_LISTED, expects_workers: bool = False
    ) -> list[Holder]:
        answer = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.01, answer.set_result, [])
        return list(await answer)


async def test_a_loop_that_stood_still_past_the_time_out_makes_no_failure() -> None:
    lookup = PrefixLookup(_SoonAnsweringIndex(lambda: 0.0))
    for _ in range(3):
        asyncio.get_running_loop().call_soon(time.sleep, 2.5 * lookup.timeout_seconds)
        assert (await lookup.lookup(chain(9), KNOWN)).available
    assert not lookup.errors


async def test_an_index_that_does_not_answer_has_no_size() -> None:
    index, now = await twin_with_blocks(), 0.0
    lookup = PrefixLookup(index, clock=lambda: now)
    size = await lookup.info()
    assert size is not None
    assert size.names == len({*chain(9), *chain(11)})
    index.available, now = False, 1.0
    assert await lookup.info() is None


class _StoppedIndex(TwinPrefixIndex):
    """Answers only once `resume` is set."""

    def __init__(self) -> None:
        super().__init__(lambda: 0.0)
        self.resume = asyncio.Event()

    async def lookup(
        self, names: object, *, most: int = MAX_LISTED, expects_workers: bool = False
    ) -> list[Holder]:
        await self.resume.wait()
        return []


async def test_while_one_request_probes_the_others_go_without() -> None:
    index, now = _StoppedIndex(), 0.0
    config = PrefixLookupConfig(timeout_seconds=0.5, failures_to_open=1, open_seconds=1.0)
    lookup = PrefixLookup(index, config=config, clock=lambda: now)
    lookup._shards[0].breaker.failed(now)
    now = 1.0
    probe = asyncio.create_task(lookup.lookup(chain(9), KNOWN))
    await asyncio.sleep(0)
    assert lookup.breaker_state() is BreakerState.HALF_OPEN
    assert await lookup.lookup(chain(9), KNOWN) == UNAVAILABLE
    index.resume.set()
    assert (await probe).available


async def test_a_cancelled_probe_lets_the_next_request_probe() -> None:
    index, now = _StoppedIndex(), 0.0
    config = PrefixLookupConfig(timeout_seconds=5, failures_to_open=1, open_seconds=1.0)
    lookup = PrefixLookup(index, config=config, clock=lambda: now)
    lookup._shards[0].breaker.failed(now)
    now = 1.0
    probe = asyncio.create_task(lookup.lookup(chain(9), KNOWN))
    await asyncio.sleep(0)
    probe.cancel()
    with pytest.raises(asyncio.CancelledError):
        await probe
    index.resume.set()
    assert (await lookup.lookup(chain(9), KNOWN)).available
