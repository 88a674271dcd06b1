"""Names live from scheduling to the eviction of their last copy, and the published set is closed under prefixes."""

import pytest
from blockyard.worker.cache.block_pool import BlockPool
from blockyard.worker.cache.net_changes import NetChanges
from blockyard.worker.cache.prefix_cache import CacheChanges, PrefixCache
from blockyard.worker.cache.tier_names import AnywhereNames
from blockyard.worker.sequences.identifiers import BlockName, TenantId
from hypothesis import given
from hypothesis import strategies as st

A, B, C = (BlockName(bytes([letter]) * 16) for letter in b"ABC")
NONE = CacheChanges(stored=(), removed=())


def make(num_blocks: int = 6) -> tuple[BlockPool, PrefixCache]:
    pool = BlockPool(num_blocks)
    return pool, PrefixCache(pool)


def test_a_name_is_found_when_scheduled_up_to_a_gap_and_published_when_computed() -> None:
    pool, cache = make()
    blocks = pool.allocate(3)
    cache.assign(blocks[0], A)
    cache.assign(blocks[2], C)
    assert cache.match([A, B, C]) == blocks[:1]
    cache.assign(blocks[1], B)
    assert cache.match([A, B, C]) == blocks
    assert cache.take_changes() == NONE
    cache.confirm(blocks[0])
    cache.confirm(blocks[1])
    assert cache.take_changes() == CacheChanges(stored=(A, B), removed=(), roots={A: A, B: B})
    cache.check_invariants()


def test_a_failed_step_takes_its_names_back_and_nothing_was_published() -> None:
    pool, cache = make()
    blocks = pool.allocate(1)
    cache.assign(blocks[0], A)
    cache.retract(blocks[0])
    pool.release(blocks)
    assert (cache.match([A]), cache.take_changes(), pool.num_free) == ([], NONE, 6)


def test_a_name_that_the_index_is_not_to_know_is_found_and_never_in_the_news() -> None:
    pool, anywhere = BlockPool(2), AnywhereNames()
    cache = PrefixCache(pool, anywhere=anywhere)
    blocks = pool.allocate(2)
    cache.assign(blocks[0], A, is_indexed=False)
    cache.assign(blocks[1], B)
    cache.confirm_all(blocks)
    assert cache.match([A, B]) == blocks
    assert len(cache) == len(anywhere) == 2
    assert cache.take_changes() == CacheChanges(stored=(B,), removed=(), anywhere_stored=(B,), roots={B: B})
    pool.release(list(reversed(blocks)))
    pool.allocate(2)
    assert cache.take_changes() == CacheChanges(stored=(), removed=(B,), anywhere_removed=(B,))
    assert cache.match([A]) == []
    cache.check_invariants()


def test_an_unindexed_name_stays_unindexed_in_its_second_place() -> None:
    anywhere = AnywhereNames()
    anywhere.add(A, is_indexed=False)
    anywhere.add(A)
    anywhere.remove(A)
    assert A in anywhere
    anywhere.remove(A)
    assert anywhere.take_changes() == ((), ())
    anywhere.add(A)
    assert anywhere.take_changes() == ((A,), ())
    anywhere.remove(A)
    assert anywhere.take_changes() == ((), (A,))


def test_a_name_remembers_its_parent_and_when_it_was_given_until_its_block_is_evicted() -> None:
    pool, cache = make(num_blocks=2)
    root, child = pool.allocate(2)
    cache.assign(root, A)
    pool.now_seconds = 5.0
    cache.assign(child, B, parent=A)
    assert cache.lineage(root) == (None, 0.0)
    assert cache.lineage(child) == (A, 5.0)
    assert (cache.blocks_named(B), cache.blocks_named(C)) == ([child], [])
    pool.release([root, child])
    pool.allocate(1)
    assert cache.lineage(child) is None
    assert cache.blocks_named(B) == []
    cache.check_invariants()


@pytest.mark.parametrize("evicted", [0, 1, 2])
def test_of_several_copies_the_longest_named_is_found_and_the_name_is_removed_with_the_last(
    evicted: int,
) -> None:
    pool, cache = make(num_blocks=3)
    blocks = pool.allocate(3)
    for number, block in enumerate(blocks):
        cache.assign(block, A, tenant=TenantId(number))
    cache.confirm_all(blocks[1:])
    assert (len(cache), cache.match([A]), cache.owner(A)) == (1, blocks[:1], TenantId(0))
    cache.confirm(blocks[0])
    pool.release([blocks[evicted]])
    assert pool.allocate(1) == [blocks[evicted]]
    left = [block for block in blocks if block != blocks[evicted]]
    assert cache.blocks_named(A) == left
    assert (cache.match([A]), cache.owner(A)) == (left[:1], TenantId(blocks.index(left[0])))
    assert cache.take_changes() == CacheChanges(stored=(A,), removed=(), roots={A: A})
    cache.check_invariants()
    pool.release(left)
    pool.allocate(2)
    assert (len(cache), cache.blocks_named(A), cache.owner(A)) == (0, [], None)
    assert cache.take_changes() == CacheChanges(stored=(), removed=(A,))
    cache.check_invariants()


def test_net_changes_come_in_the_order_of_the_last_ones_up_to_a_limit_and_opposites_cancel() -> None:
    changes = NetChanges[bytes]()
    for name in (A, B, C):
        changes.add(name)
    changes.remove(A)
    assert changes.take_removed() == ()
    changes.add(A)
    assert changes.take_added(0) == ()
    assert changes.take_added(2) == (B, C)
    assert changes.take_added(2) == (A,)
    changes.remove(B)
    changes.add(B)
    assert (len(changes), changes.take_added()) == (0, ())


@given(st.lists(st.tuples(st.sampled_from([A, B, C]), st.sampled_from([None, 0, 1, 9])), max_size=60))
def test_a_reader_that_applies_the_net_changes_that_it_takes_ends_with_the_set(
    toggles: list[tuple[bytes, int | None]],
) -> None:
    changes = NetChanges[bytes]()
    held, copy = set[bytes](), set[bytes]()
    for name, limit in toggles:
        (changes.remove if name in held else changes.add)(name)
        held ^= {name}
        if limit != 9:
            gone, added = set(changes.take_removed(limit)), set(changes.take_added(limit))
            assert gone <= copy
            assert not added & (copy - gone)
            copy = copy - gone | added
    copy.difference_update(changes.take_removed())
    copy.update(changes.take_added())
    assert copy == held
