"""Guarantees of every PrefixIndex: one suite for the Redis product and its twin."""

import pytest
from blockyard.proto.index.contract import (
    FIRST_SEQUENCE,
    MAX_PAGE_RECORDS,
    ApplyResult,
    Batch,
    Berth,
    ErrorKind,
    Holder,
    Incarnation,
    PrefixIndexError,
    RenewResult,
    SpotCheck,
    WorkerId,
)

from .harness import IndexHarness, chain, free_of, purge_all, record

LEASE_SECONDS = 60.0


def first(*added: bytes) -> Batch:
    return Batch(sequence=FIRST_SEQUENCE, added=added)


async def join(harness: IndexHarness, worker_id: str, *added: bytes, incarnation: str = "1") -> Berth:
    berth = await harness.index.register(record(worker_id, incarnation), lease_seconds=LEASE_SECONDS)
    assert await harness.index.apply(berth, first(*added)) is ApplyResult.OK
    return berth


async def depths(harness: IndexHarness, names: tuple[bytes, ...]) -> dict[str, int]:
    return {holder.worker_id: holder.depth for holder in await harness.index.lookup(names)}


async def test_an_empty_index_and_an_empty_chain_have_no_holders(harness: IndexHarness) -> None:
    assert await harness.index.lookup(chain(5)) == []
    await join(harness, "a", *chain(5))
    assert await harness.index.lookup(()) == []


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 8, 9, 63, 450])
async def test_lookup_finds_each_depth_of_a_chain(harness: IndexHarness, length: int) -> None:
    names = chain(length)
    expected = {f"w{depth}": depth for depth in {1, length // 2, length - 1, length} - {0}}
    for worker_id, depth in expected.items():
        await join(harness, worker_id, *names[:depth])
    await join(harness, "elsewhere", *chain(3, "other"))
    assert await depths(harness, names) == expected


async def test_lookup_tells_many_holders_apart(harness: IndexHarness) -> None:
    names = chain(100)
    for number in range(1, 41):
        await join(harness, f"w{number}", *names[: number * 2])
    assert await depths(harness, names) == {f"w{number}": number * 2 for number in range(1, 41)}
    assert await depths(harness, names[:10]) == {f"w{n}": min(n * 2, 10) for n in range(1, 41)}


async def test_a_holder_carries_its_incarnation(harness: IndexHarness) -> None:
    await join(harness, "a", *chain(2), incarnation="life-7")
    assert await harness.index.lookup(chain(3)) == [
        Holder(worker_id=WorkerId("a"), incarnation=Incarnation("life-7"), depth=2)
    ]


async def test_removals_come_before_additions_in_one_batch(harness: IndexHarness) -> None:
    names, berth = chain(4), await join(harness, "a", *chain(4))
    both = Batch(sequence=2, removed=(names[3], names[2]), added=(names[2],))
    assert await harness.index.apply(berth, both) is ApplyResult.OK
    assert await depths(harness, names) == {"a": 3}


async def test_removing_a_name_leaves_it_to_the_others(harness: IndexHarness) -> None:
    names, berth = chain(3), await join(harness, "b", *chain(3))
    await join(harness, "a", *names)
    await join(harness, "c", *names)
    await harness.index.apply(berth, Batch(sequence=2, removed=tuple(reversed(names))))
    assert await depths(harness, names) == {"a": 3, "c": 3}


async def test_a_name_that_nobody_holds_any_more_takes_no_memory(harness: IndexHarness) -> None:
    names, berth = chain(9), await join(harness, "a", *chain(9))
    await harness.index.apply(berth, Batch(sequence=2, removed=tuple(reversed(names[4:]))))
    assert await harness.num_entries() == 4


async def test_a_duplicate_is_dropped_and_a_gap_is_refused(harness: IndexHarness) -> None:
    names, berth = chain(4), await join(harness, "a", *chain(2))
    assert await harness.index.apply(berth, first(*names)) is ApplyResult.DUPLICATE
    assert await harness.index.apply(berth, Batch(sequence=3, added=names)) is ApplyResult.GAP
    assert await depths(harness, names) == {"a": 2}
    assert await harness.index.apply(berth, Batch(sequence=2, added=names[2:])) is ApplyResult.OK
    assert await depths(harness, names) == {"a": 4}


async def test_a_foreign_epoch_can_neither_write_nor_renew_nor_retire(harness: IndexHarness) -> None:
    names, berth = chain(2), await join(harness, "a", *chain(2))
    forged = Berth(number=berth.number, epoch=berth.epoch ^ 1)
    assert await harness.index.apply(forged, Batch(sequence=2, removed=names)) is ApplyResult.UNKNOWN
    assert await harness.index.renew(forged, lease_seconds=LEASE_SECONDS) is RenewResult.UNKNOWN
    await harness.index.retire(forged)
    assert await depths(harness, names) == {"a": 2}


async def test_a_lapsed_lease_hides_a_worker_and_a_renewal_brings_it_back(harness: IndexHarness) -> None:
    names, berth = chain(2), await join(harness, "a", *chain(2))
    await harness.advance(LEASE_SECONDS + 1)
    assert await depths(harness, names) == {}
    assert await harness.index.directory() == []
    assert await harness.index.renew(berth, lease_seconds=LEASE_SECONDS) is RenewResult.OK
    assert await depths(harness, names) == {"a": 2}


async def test_holes_of_the_dead_do_not_spoil_the_depths_of_the_living(harness: IndexHarness) -> None:
    names = chain(64)
    await join(harness, "dead", *names[::3])
    await harness.advance(LEASE_SECONDS + 1)
    for number in (5, 20, 64):
        await join(harness, f"w{number}", *names[:number])
    assert await depths(harness, names) == {"w5": 5, "w20": 20, "w64": 64}


async def test_a_chain_that_hundreds_hold_is_found_with_all_its_depths_and_without_the_dead(
    harness: IndexHarness,
) -> None:
    names, expected = chain(60), {}
    for number in range(300):
        depth = (12, 37, 38, 60)[number % 4]
        berth = await join(harness, f"w{number}", *names[:depth])
        if number % 10 == 3:
            await harness.index.retire(berth)
        else:
            expected[f"w{number}"] = depth
    assert await depths(harness, names) == expected


async def test_a_renewal_sees_that_confirmed_batches_were_forgotten(harness: IndexHarness) -> None:
    berth = await join(harness, "a", *chain(2))
    for applied, expected in ((0, RenewResult.OK), (1, RenewResult.OK), (2, RenewResult.UNKNOWN)):
        result = await harness.index.renew(berth, lease_seconds=LEASE_SECONDS, applied_sequence=applied)
        assert result is expected


async def test_a_retired_worker_is_gone_at_once_and_its_late_writes_are_refused(
    harness: IndexHarness,
) -> None:
    names, berth = chain(3), await join(harness, "a", *chain(2))
    await harness.index.retire(berth)
    assert await depths(harness, names) == {}
    assert await harness.index.directory() == []
    assert await harness.index.apply(berth, Batch(sequence=2, added=names[2:])) is ApplyResult.UNKNOWN
    assert await harness.index.renew(berth, lease_seconds=LEASE_SECONDS) is RenewResult.UNKNOWN
    assert free_of(await purge_all(harness.index)) == {berth.number}
    assert await harness.num_entries() == 0


async def test_registering_again_supersedes_the_same_incarnation_alone(harness: IndexHarness) -> None:
    names, old = chain(2), await join(harness, "a", *chain(2))
    await join(harness, "a", names[0], incarnation="2")
    new = await join(harness, "a", names[0])
    assert new.number != old.number
    assert await harness.index.apply(old, Batch(sequence=2, removed=names)) is ApplyResult.UNKNOWN
    holders = sorted((holder.incarnation, holder.depth) for holder in await harness.index.lookup(names))
    assert holders == [("1", 1), ("2", 1)]


async def test_the_directory_returns_live_records_as_registered(harness: IndexHarness) -> None:
    await join(harness, "gone")
    await harness.advance(LEASE_SECONDS + 1)
    await join(harness, "a")
    await join(harness, "b")
    found = sorted(await harness.index.directory(), key=lambda entry: entry.worker_id)
    assert found == [record("a"), record("b")]


@pytest.mark.quick_cases(2)
async def test_pages_of_the_directory_have_each_live_record_once_and_go_on_where_the_last_one_ended(
    harness: IndexHarness,
) -> None:
    workers = [f"w{number:03}" for number in range(2 * MAX_PAGE_RECORDS + 3)]
    for worker_id in workers:
        await harness.index.register(
            record(worker_id), lease_seconds=LEASE_SECONDS, has_host_cache=worker_id < "w100"
        )
    pages = [await harness.index.directory_page()]
    while pages[-1].next_after:
        pages.append(await harness.index.directory_page(pages[-1].next_after))
    assert [len(page.records) for page in pages] == [MAX_PAGE_RECORDS, MAX_PAGE_RECORDS, 3]
    assert [known.worker_id for page in pages for known in page.records] == workers
    assert [known.worker_id for known in await harness.index.directory()] == workers


async def test_a_look_up_tells_of_no_more_berths_than_it_is_asked_for(harness: IndexHarness) -> None:
    names = chain(2)
    for number in range(9):
        await join(harness, f"w{number}", *names)
    assert len(await harness.index.lookup(names, most=5)) == 5
    assert len(await harness.index.lookup(names, most=9)) == 9


async def test_the_purge_waits_for_two_leases_of_service_after_the_lease(harness: IndexHarness) -> None:
    dead = await join(harness, "dead", *chain(3))
    alive = await join(harness, "alive", *chain(2))
    for _ in range(6):
        assert free_of(await purge_all(harness.index)) == set()
        assert await harness.num_entries() == 3
        await harness.advance(LEASE_SECONDS / 2)
        await harness.index.renew(alive, lease_seconds=LEASE_SECONDS)
    assert free_of(await purge_all(harness.index)) == {dead.number}
    assert await harness.num_entries() == 2
    assert await depths(harness, chain(3)) == {"alive": 2}
    assert await harness.index.apply(dead, Batch(sequence=2)) is ApplyResult.UNKNOWN


async def test_after_an_outage_nothing_is_purged_and_everyone_may_come_back(harness: IndexHarness) -> None:
    names = chain(3)
    slow, quick = await join(harness, "slow", *names), await join(harness, "quick", *names)
    await harness.advance(20 * LEASE_SECONDS)
    assert free_of(await purge_all(harness.index)) == set()
    await harness.index.renew(quick, lease_seconds=LEASE_SECONDS)
    await harness.advance(LEASE_SECONDS * 0.9)
    assert free_of(await purge_all(harness.index)) == set()
    assert await harness.index.renew(slow, lease_seconds=LEASE_SECONDS) is RenewResult.OK
    assert await depths(harness, names) == {"quick": 3, "slow": 3}


async def test_a_purged_number_is_used_again_under_another_epoch(harness: IndexHarness) -> None:
    old = await join(harness, "old", *chain(4))
    await harness.index.retire(old)
    await purge_all(harness.index)
    new = await join(harness, "new", *chain(1))
    assert new.number == old.number
    assert new.epoch != old.epoch
    assert await depths(harness, chain(4)) == {"new": 1}


async def test_a_number_is_not_reused_while_the_walk_that_strikes_it_out_is_under_way(
    harness: IndexHarness,
) -> None:
    old = await join(harness, "old", *chain(40))
    await harness.index.retire(old)
    assert (await harness.index.purge(slice_buckets=64)).active
    newcomer = await join(harness, "new", *chain(40))
    assert newcomer.number != old.number
    assert free_of(await purge_all(harness.index)) == {old.number}
    assert await depths(harness, chain(40)) == {"new": 40}


async def test_a_zombie_cannot_write_while_the_walk_that_strikes_it_out_is_under_way(
    harness: IndexHarness,
) -> None:
    zombie, alive = await join(harness, "zombie", *chain(9)), await join(harness, "alive")
    for _ in range(7):
        await harness.advance(LEASE_SECONDS / 2)
        await harness.index.renew(alive, lease_seconds=LEASE_SECONDS)
    assert (await harness.index.purge(slice_buckets=4000)).active
    assert await harness.index.renew(zombie, lease_seconds=LEASE_SECONDS) is RenewResult.UNKNOWN
    late = Batch(sequence=2, added=chain(300, "late"))
    assert await harness.index.apply(zombie, late) is ApplyResult.UNKNOWN
    await purge_all(harness.index)
    assert await harness.num_entries() == 0


async def test_churn_leaves_neither_entries_nor_berths_behind(harness: IndexHarness) -> None:
    numbers = set()
    for number in range(20):
        berth = await join(harness, "w", *chain(30, f"life-{number}"), incarnation=str(number))
        numbers.add(berth.number)
        await harness.index.retire(berth)
        await purge_all(harness.index)
    assert len(numbers) == 1
    assert await harness.num_entries() == 0


async def test_registering_beyond_the_last_berth_is_refused_with_a_reason(harness: IndexHarness) -> None:
    index = harness.limited(2)
    for worker_id in ("a", "b"):
        await index.register(record(worker_id), lease_seconds=LEASE_SECONDS)
    with pytest.raises(PrefixIndexError, match=r"all 2 berths are taken.*c is not in the index") as caught:
        await index.register(record("c"), lease_seconds=LEASE_SECONDS)
    assert caught.value.kind is ErrorKind.BERTHS_EXHAUSTED


async def test_after_a_flush_old_berths_are_unknown_and_new_ones_start_empty(harness: IndexHarness) -> None:
    old = await join(harness, "a", *chain(3))
    await harness.flush()
    assert await harness.index.renew(old, lease_seconds=LEASE_SECONDS) is RenewResult.UNKNOWN
    new = await join(harness, "b", *chain(1))
    assert new.number == old.number
    assert await harness.index.apply(old, Batch(sequence=2, added=chain(3))) is ApplyResult.UNKNOWN
    assert await depths(harness, chain(3)) == {"b": 1}


async def test_info_counts_names_once_and_berths_by_whether_they_live(harness: IndexHarness) -> None:
    empty = await harness.index.info()
    assert (empty.names, empty.bytes, empty.live_berths, empty.dead_berths) == (0, 0, 0, 0)
    await join(harness, "a", *chain(5))
    await join(harness, "b", *chain(3))
    gone = await join(harness, "gone", *chain(300, "gone"))
    await harness.index.register(record("host"), lease_seconds=LEASE_SECONDS, has_host_cache=True)
    await harness.index.retire(gone)
    before = await harness.index.info()
    assert (before.names, before.live_berths, before.dead_berths) == (305, 4, 1)
    assert before.bytes > 305
    await purge_all(harness.index)
    purged = await harness.index.info()
    assert (purged.names, purged.live_berths, purged.dead_berths) == (5, 4, 0)
    assert purged.bytes < before.bytes


async def renewed(harness: IndexHarness, berth: Berth, **names: tuple[bytes, ...]) -> RenewResult:
    return await harness.index.renew(
        berth, lease_seconds=LEASE_SECONDS, applied_sequence=1, check=SpotCheck(record=record("a"), **names)
    )


@pytest.mark.parametrize("has_host_cache", [False, True])
async def test_a_check_agrees_with_what_was_told_and_with_nothing_else(
    has_host_cache: bool, harness: IndexHarness
) -> None:
    names, others = chain(6), chain(2, "others")
    berth = await harness.index.register(
        record("a"), lease_seconds=LEASE_SECONDS, has_host_cache=has_host_cache
    )
    anywhere = names if has_host_cache else ()
    batch = Batch(sequence=1, added=names[:4], anywhere_added=anywhere)
    assert await harness.index.apply(berth, batch) is ApplyResult.OK
    assert await renewed(harness, berth) is RenewResult.OK
    assert (
        await renewed(harness, berth, held=names[:4], gone=others, anywhere_held=anywhere) is RenewResult.OK
    )
    assert await renewed(harness, berth, held=names) is RenewResult.DAMAGED
    assert await renewed(harness, berth, gone=names[3:]) is RenewResult.DAMAGED
    wrong_anywhere = RenewResult.DAMAGED if has_host_cache else RenewResult.OK
    assert await renewed(harness, berth, anywhere_held=others) is wrong_anywhere
    assert await renewed(harness, berth, anywhere_gone=names) is wrong_anywhere


async def test_a_check_that_fails_still_extends_the_lease(harness: IndexHarness) -> None:
    berth = await harness.index.register(record("a"), lease_seconds=LEASE_SECONDS)
    await harness.index.apply(berth, Batch(sequence=1, added=chain(2)))
    await harness.advance(0.9 * LEASE_SECONDS)
    assert await renewed(harness, berth, held=chain(3)) is RenewResult.DAMAGED
    await harness.advance(0.9 * LEASE_SECONDS)
    assert [holder.depth for holder in await harness.index.lookup(chain(3))] == [2]


async def test_a_clock_set_back_keeps_no_dead_worker_alive(harness: IndexHarness) -> None:
    alive = await harness.index.register(record("alive"), lease_seconds=LEASE_SECONDS)
    await harness.index.apply(alive, Batch(sequence=1, added=chain(3)))
    dead = await harness.index.register(record("dead"), lease_seconds=LEASE_SECONDS)
    await harness.index.apply(dead, Batch(sequence=1, added=chain(3)))
    await harness.advance(-3600)
    await harness.index.renew(alive, lease_seconds=LEASE_SECONDS)
    await harness.advance(0.9 * LEASE_SECONDS)
    await harness.index.renew(alive, lease_seconds=LEASE_SECONDS)
    await harness.advance(0.2 * LEASE_SECONDS)
    assert [holder.worker_id for holder in await harness.index.lookup(chain(3))] == ["alive"]
    for _ in range(4):
        await harness.advance(0.9 * LEASE_SECONDS)
        await harness.index.renew(alive, lease_seconds=LEASE_SECONDS)
    assert dead.number in {number for slice in await purge_all(harness.index) for number in slice.freed}


async def test_a_clock_set_forward_costs_nobody_the_berth(harness: IndexHarness) -> None:
    berth = await harness.index.register(record("a"), lease_seconds=LEASE_SECONDS)
    await harness.index.apply(berth, Batch(sequence=1, added=chain(3)))
    await harness.advance(3600)
    assert all(not progress.freed for progress in await purge_all(harness.index))
    assert await harness.index.renew(berth, lease_seconds=LEASE_SECONDS) is RenewResult.OK
    assert all(not progress.freed for progress in await purge_all(harness.index))
    assert [holder.depth for holder in await harness.index.lookup(chain(3))] == [3]


async def test_a_lookup_that_expects_workers_wants_a_running_lease(harness: IndexHarness) -> None:
    async def kind() -> ErrorKind | None:
        try:
            assert not await harness.index.lookup(chain(3), expects_workers=True)
        except PrefixIndexError as error:
            return error.kind
        return None

    assert await kind() is ErrorKind.NO_LEASE, "nobody has registered"
    berth = await harness.index.register(record("a"), lease_seconds=0.2)
    assert await kind() is None, "the worker has published nothing"
    await harness.advance(0.3)
    assert await kind() is ErrorKind.NO_LEASE
    assert not await harness.index.lookup(chain(3))
    await harness.index.renew(berth, lease_seconds=60)
    assert await kind() is None
