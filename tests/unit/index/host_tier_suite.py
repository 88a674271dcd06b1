"""A worker with a host cache is in the index twice: for its GPU, and for either memory. Redis and its twin alike."""

from dataclasses import replace

import pytest
from blockyard.proto.index.contract import (
    FIRST_SEQUENCE,
    ApplyResult,
    Batch,
    Berth,
    ErrorKind,
    PrefixIndex,
    PrefixIndexError,
    RenewResult,
)

from .harness import IndexHarness, chain, free_of, purge_all, record

LEASE_SECONDS = 60.0
BLOCK_SIZE = 16


async def join(
    harness: IndexHarness, worker_id: str, on_gpu: int, anywhere: int, incarnation: str = "1"
) -> Berth:
    """Register a worker that holds these numbers of leading blocks of the one chain."""
    berth = await harness.index.register(
        record(worker_id, incarnation), lease_seconds=LEASE_SECONDS, has_host_cache=True
    )
    batch = Batch(sequence=FIRST_SEQUENCE, added=chain(on_gpu), anywhere_added=chain(anywhere))
    assert await harness.index.apply(berth, batch) is ApplyResult.OK
    return berth


async def depths(index: PrefixIndex, names: tuple[bytes, ...]) -> dict[str, tuple[int, int]]:
    """On the GPU, and in host memory beyond that."""
    return {holder.worker_id: (holder.depth, holder.host_blocks) for holder in await index.lookup(names)}


async def test_a_lookup_tells_the_gpu_from_host_memory(harness: IndexHarness) -> None:
    tiers = {"both": (20, 20), "more": (7, 33), "host": (0, 40), "little": (0, 1), "nothing": (0, 0)}
    for worker_id, (on_gpu, anywhere) in tiers.items():
        await join(harness, worker_id, on_gpu, anywhere)
    plain = await harness.index.register(record("plain"), lease_seconds=LEASE_SECONDS)
    await harness.index.apply(plain, Batch(sequence=1, added=chain(12)))
    assert plain.anywhere is None
    expected = {"both": (20, 0), "more": (7, 26), "host": (0, 40), "little": (0, 1), "plain": (12, 0)}
    assert await depths(harness.index, chain(40)) == expected
    assert await depths(harness.index, chain(10)) == {
        "both": (10, 0),
        "more": (7, 3),
        "host": (0, 10),
        "little": (0, 1),
        "plain": (10, 0),
    }


async def test_a_block_that_leaves_the_gpu_stays_anywhere_until_the_last_copy_goes(
    harness: IndexHarness,
) -> None:
    berth = await join(harness, "a", 4, 4)
    await harness.index.apply(berth, Batch(sequence=2, removed=chain(4)[:1:-1]))
    assert await depths(harness.index, chain(4)) == {"a": (2, 2)}
    await harness.index.apply(berth, Batch(sequence=3, anywhere_removed=chain(4)[:2:-1]))
    assert await depths(harness.index, chain(4)) == {"a": (2, 1)}
    assert await harness.num_entries() == 3


async def test_one_lease_holds_both_and_the_directory_names_the_worker_once(harness: IndexHarness) -> None:
    berth = await join(harness, "a", 2, 5)
    assert await harness.index.directory() == [record("a")]
    await harness.advance(LEASE_SECONDS + 1)
    assert await depths(harness.index, chain(5)) == {}
    renewed = await harness.index.renew(berth, lease_seconds=LEASE_SECONDS, applied_sequence=1)
    assert renewed is RenewResult.OK
    assert await depths(harness.index, chain(5)) == {"a": (2, 3)}
    assert await harness.index.directory() == [record("a")]


async def test_both_are_retired_refused_and_purged_together(harness: IndexHarness) -> None:
    berth = await join(harness, "a", 2, 5)
    await harness.index.retire(berth)
    assert await depths(harness.index, chain(5)) == {}
    late = Batch(sequence=2, anywhere_added=chain(9)[5:])
    assert await harness.index.apply(berth, late) is ApplyResult.UNKNOWN
    assert await harness.index.renew(berth, lease_seconds=LEASE_SECONDS) is RenewResult.UNKNOWN
    assert free_of(await purge_all(harness.index)) == {berth.number, berth.anywhere}
    assert await harness.num_entries() == 0


async def test_registering_again_supersedes_both(harness: IndexHarness) -> None:
    old = await join(harness, "a", 4, 6)
    plain = await harness.index.register(record("a"), lease_seconds=LEASE_SECONDS)
    assert await depths(harness.index, chain(6)) == {}, "nor does the second stay where the new life has none"
    new = await join(harness, "a", 1, 2)
    numbers = {old.number, old.anywhere, plain.number, new.number, new.anywhere}
    assert len(numbers) == 5
    assert await depths(harness.index, chain(6)) == {"a": (1, 1)}
    for superseded in (old, plain):
        assert await harness.index.apply(superseded, Batch(sequence=2)) is ApplyResult.UNKNOWN


async def test_a_duplicate_and_a_gap_change_neither(harness: IndexHarness) -> None:
    berth = await join(harness, "a", 2, 3)
    again = Batch(sequence=FIRST_SEQUENCE, added=chain(9), anywhere_added=chain(9))
    assert await harness.index.apply(berth, again) is ApplyResult.DUPLICATE
    assert await harness.index.apply(berth, replace(again, sequence=3)) is ApplyResult.GAP
    assert await depths(harness.index, chain(9)) == {"a": (2, 1)}


async def test_nobody_writes_under_the_second_number_of_another(harness: IndexHarness) -> None:
    mine, other = await join(harness, "mine", 1, 1), await join(harness, "other", 2, 2)
    forged = replace(mine, anywhere=other.anywhere)
    late = Batch(sequence=2, anywhere_removed=chain(2)[::-1])
    assert await harness.index.apply(forged, late) is ApplyResult.UNKNOWN
    assert await harness.index.renew(forged, lease_seconds=LEASE_SECONDS) is RenewResult.UNKNOWN
    await harness.index.retire(forged)
    assert await depths(harness.index, chain(2)) == {"mine": (1, 0), "other": (2, 0)}


async def test_with_one_number_left_the_gpu_is_in_the_index_and_with_none_nobody_is(
    harness: IndexHarness,
) -> None:
    index = harness.limited(3)
    whole, half = [
        await index.register(record(name), lease_seconds=LEASE_SECONDS, has_host_cache=True) for name in "ab"
    ]
    assert (whole.anywhere is None, half.anywhere is None) == (False, True)
    for berth in (whole, half):
        batch = Batch(sequence=1, added=chain(2), anywhere_added=chain(5))
        assert await index.apply(berth, batch) is ApplyResult.OK
        assert await index.renew(berth, lease_seconds=LEASE_SECONDS) is RenewResult.OK
    assert await depths(index, chain(5)) == {"a": (2, 3), "b": (2, 0)}
    with pytest.raises(PrefixIndexError) as caught:
        await index.register(record("c"), lease_seconds=LEASE_SECONDS, has_host_cache=True)
    assert caught.value.kind is ErrorKind.BERTHS_EXHAUSTED
