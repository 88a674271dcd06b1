"""Once updates stop, the index knows exactly what the worker holds, whatever was lost on the way."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from blockyard.proto.index.contract import MAX_BATCH_NAMES, ErrorKind, PrefixIndex, PrefixIndexError
from blockyard.proto.index.twin import TwinPrefixIndex
from blockyard.worker.indexing.net_difference import NetDifference, TieredDifference
from blockyard.worker.indexing.publisher import IndexPublisher
from blockyard.worker.indexing.state import PublisherConfig

from .harness import UnreliableIndex, chain, record
from .truth import ALL_CHAINS, Tiers, brute_force, name_of

QUICK = PublisherConfig(
    lease_seconds=0.6,
    flush_seconds=0.002,
    purge_seconds=0.01,
    purge_slice_seconds=0.002,
    resync_jitter_seconds=0.005,
    first_backoff_seconds=0.002,
    max_backoff_seconds=0.02,
    call_timeout_seconds=0.5,
)


@contextlib.asynccontextmanager
async def running(
    index: Any, worker_id: str = "w0", config: PublisherConfig = QUICK, *, has_host_cache: bool = False
) -> AsyncIterator[IndexPublisher]:
    publisher = IndexPublisher(
        cast(PrefixIndex, index), record(worker_id), config=config, has_host_cache=has_host_cache
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(publisher.run())
        try:
            yield publisher
        finally:
            await publisher.close()


async def until_quiet(publisher: IndexPublisher, deadline_seconds: float = 10.0) -> None:
    async with asyncio.timeout(deadline_seconds):
        while True:
            await asyncio.sleep(0.005)
            if publisher.state().berth is not None and not publisher.state().num_pending:
                return


async def until_index_equals(index: PrefixIndex, tiers: Tiers, deadline_seconds: float = 10.0) -> None:
    """A loss that no batch follows is noticed at the next renewal: hence not at once, but soon."""
    deadline = time.monotonic() + deadline_seconds
    while not await index_equals(index, tiers):
        assert time.monotonic() < deadline, "the index never came to equal the worker's caches"
        await asyncio.sleep(0.02)


async def index_equals(index: PrefixIndex, tiers: Tiers) -> bool:
    on_gpu = {("w0", "1"): tiers.on_gpu.paths}
    anywhere = {("w0", "1"): tiers.anywhere.paths} if tiers.has_host_cache else on_gpu
    for path in ALL_CHAINS:
        names = [name_of(path[: depth + 1]) for depth in range(len(path))]
        try:
            holders = await index.lookup(names)
        except PrefixIndexError:
            # After a restart each idle connection of the pool fails once.
            return False
        found = {(holder.worker_id, holder.incarnation): holder for holder in holders}
        if {who: h.depth for who, h in found.items() if h.depth} != brute_force(on_gpu, path):
            return False
        if {who: h.depth + h.host_blocks for who, h in found.items()} != brute_force(anywhere, path):
            return False
    return True


def report(publisher: IndexPublisher, tiers: Tiers, seed: int) -> None:
    for step in tiers.seeded_change(seed):
        publisher.record(*step.names)


def take(difference: NetDifference, limit: int) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    return difference.take_removed(limit), difference.take_added(limit)


def test_what_is_stored_and_removed_between_two_batches_is_never_sent() -> None:
    difference = NetDifference()
    difference.record(stored=chain(5), removed=())
    difference.record(stored=(), removed=tuple(reversed(chain(5)[2:])))
    assert take(difference, MAX_BATCH_NAMES) == ((), chain(5)[:2])
    difference.record(stored=(), removed=(chain(5)[1],))
    difference.record(stored=(chain(5)[1],), removed=())
    assert len(difference) == 0


@pytest.mark.parametrize("has_host_cache", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_every_batch_leaves_prefix_closed_sets_and_what_is_on_the_gpu_is_anywhere(
    seed: int, has_host_cache: bool
) -> None:
    """Batches of three names, taken while the caches go on changing."""
    chooser = random.Random(seed)
    difference, tiers = TieredDifference(), Tiers(has_host_cache=has_host_cache)
    difference.restart(publishes_anywhere=has_host_cache)
    on_gpu, anywhere = set[bytes](), set[bytes]()
    for step in range(400):
        if step < 150:
            for change in tiers.seeded_change(chooser.randrange(2**32)):
                stored, removed, anywhere_stored, anywhere_removed = change.names
                difference.on_gpu.record(stored, removed)
                difference.anywhere.record(anywhere_stored, anywhere_removed)
        batch = difference.take(3, sequence=step + 1)
        assert batch.num_names <= 3
        tell(on_gpu, batch.removed, batch.added)
        tell(anywhere, batch.anywhere_removed, batch.anywhere_added)
        assert on_gpu <= anywhere or not has_host_cache
        if step < 150 and chooser.random() < 0.02:
            on_gpu.clear()
            anywhere.clear()
            difference.restart(publishes_anywhere=has_host_cache)
    assert len(difference) == 0
    assert on_gpu == {name_of(path) for path in tiers.on_gpu.paths}
    assert anywhere == {name_of(path) for path in tiers.anywhere.paths}


PARENTS = {name_of(path[:d]): name_of(path[: d - 1]) for path in ALL_CHAINS for d in range(2, len(path) + 1)}


def tell(published: set[bytes], removed: tuple[bytes, ...], added: tuple[bytes, ...]) -> None:
    """One change after the other: none leaves a child without its parent."""
    for name in removed:
        published.remove(name)
        assert name not in {PARENTS.get(other) for other in published}
    for name in added:
        assert name not in published
        assert PARENTS.get(name, name) in published | {name}
        published.add(name)


@pytest.mark.parametrize("seed", range(12))
async def test_losses_duplicates_and_flushes_end_in_the_workers_truth(seed: int) -> None:
    chooser = random.Random(seed)
    twin = TwinPrefixIndex(time.monotonic)
    is_troubled = True

    def fate(_: str) -> str:
        fates, weights = ["deliver", "lose_request", "lose_reply"], [6, 2, 2]
        return chooser.choices(fates, weights)[0] if is_troubled else "deliver"

    tiers = Tiers(has_host_cache=seed % 2 == 0)
    async with running(UnreliableIndex(twin, fate), has_host_cache=tiers.has_host_cache) as publisher:
        for _ in range(60):
            report(publisher, tiers, chooser.randrange(2**32))
            await asyncio.sleep(chooser.choice([0, 0, 0.001, 0.005]))
            if chooser.random() < 0.08:
                twin.flush()
        is_troubled = False
        await until_index_equals(twin, tiers)
        assert publisher.state().num_entries == len(tiers.on_gpu.paths)
        assert publisher.state().num_anywhere == len(tiers.anywhere.paths)
    assert await twin.directory() == []


async def test_a_worker_that_gets_no_second_number_tells_of_its_gpu() -> None:
    twin, tiers = TwinPrefixIndex(time.monotonic, max_berths=1), Tiers(has_host_cache=True)
    async with running(twin, has_host_cache=True) as publisher:
        for seed in range(5):
            report(publisher, tiers, seed)
        await until_quiet(publisher)
        assert await index_equals(twin, Tiers(has_host_cache=False, on_gpu=tiers.on_gpu))
        assert publisher.state().num_resyncs == 0


async def test_a_flush_that_no_batch_follows_is_noticed_by_the_renewal() -> None:
    twin, tiers = TwinPrefixIndex(time.monotonic), Tiers(has_host_cache=True)
    async with running(twin, has_host_cache=True) as publisher:
        report(publisher, tiers, seed=1)
        await until_index_equals(twin, tiers)
        twin.flush()
        await until_index_equals(twin, tiers)
        assert publisher.state().num_resyncs == 1


async def test_a_long_cache_goes_out_in_batches_within_the_limit_and_the_lease_holds() -> None:
    now_seconds = 0.0
    sizes: list[int] = []

    class Watching(TwinPrefixIndex):
        async def apply(self, berth: Any, batch: Any) -> Any:
            sizes.append(len(batch.removed) + len(batch.added))
            return await super().apply(berth, batch)

    index = Watching(lambda: now_seconds)
    async with running(index) as publisher:
        publisher.record(chain(2000), ())
        await until_quiet(publisher)
        assert [holder.depth for holder in await index.lookup(chain(2000))] == [2000]
    assert sizes == [512, 512, 512, 464]


async def test_a_cancellation_that_the_index_takes_for_a_time_out_still_ends_it() -> None:
    asked = asyncio.Event()

    class Tidying(TwinPrefixIndex):
        async def register(self, *arguments: Any, **named: Any) -> Any:
            asked.set()
            try:
                await asyncio.sleep(60)
            except (
                asyncio.CancelledError
            ):  # as redis-py does where closing its connection takes too long meanwhile
                raise PrefixIndexError(ErrorKind.TIMEOUT, "closing the connection") from None

    publisher = IndexPublisher(
        Tidying(time.monotonic), record(), config=PublisherConfig(call_timeout_seconds=60)
    )
    run = asyncio.create_task(publisher.run())
    await asked.wait()
    run.cancel()
    async with asyncio.timeout(10):
        with pytest.raises(asyncio.CancelledError):
            await run


async def test_a_worker_keeps_its_lease_and_purges_the_dead_beside_it() -> None:
    twin = TwinPrefixIndex(time.monotonic)
    await twin.register(record("dead"), lease_seconds=0.05)
    async with running(twin) as publisher:
        publisher.record(chain(4), ())
        await asyncio.sleep(2.5 * QUICK.lease_seconds)
        assert [entry.worker_id for entry in await twin.directory()] == ["w0"]
        assert (await twin.register(record("new"), lease_seconds=60)).number == 1
        assert publisher.state().num_resyncs == 0


async def test_an_index_that_is_away_from_the_start_costs_nothing_but_the_hints() -> None:
    twin = TwinPrefixIndex(time.monotonic)
    twin.available = False
    async with running(twin) as publisher:
        publisher.record(chain(4), ())
        await asyncio.sleep(0.05)
        state = publisher.state()
        assert (state.berth, state.num_pending, state.last_error) == (None, 4, ErrorKind.CONNECTION)
        assert state.lag_seconds > 0.02
        twin.available = True
        await until_quiet(publisher)
        assert publisher.state().last_error is None
        assert publisher.state().lag_seconds == 0.0
        assert [holder.depth for holder in await twin.lookup(chain(9))] == [4]
        twin.available = False
    assert publisher.state().last_error is ErrorKind.CONNECTION


def test_a_change_that_was_undone_leaves_no_lag() -> None:
    now_seconds = 5.0
    twin = TwinPrefixIndex(lambda: now_seconds)
    publisher = IndexPublisher(twin, record(), config=QUICK, clock=lambda: now_seconds)
    publisher.record(chain(2), ())
    now_seconds = 9.0
    assert publisher.state().lag_seconds == 4.0
    publisher.record((), tuple(reversed(chain(2))))
    assert (publisher.state().lag_seconds, publisher.state().num_pending) == (0.0, 0)


async def test_cancelling_run_ends_it_and_close_still_says_goodbye() -> None:
    twin = TwinPrefixIndex(time.monotonic)
    publisher = IndexPublisher(twin, record(), config=QUICK)
    task = asyncio.create_task(publisher.run())
    publisher.record(chain(3), ())
    await until_quiet(publisher)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await publisher.close()
    await publisher.close()
    assert await twin.lookup(chain(3)) == []
