"""The pool conserves blocks, evicts from the tenant with most of them, and a failed allocation changes nothing.

Without knowledge of reuse, the longest unused prefix of that tenant goes first, from its tail.
"""

import random
from collections import Counter, OrderedDict

import pytest
from blockyard.worker.cache.block_pool import BlockPool, BlockState, NoFreeBlocks
from blockyard.worker.cache.tenant_shares import TenantShares
from blockyard.worker.sequences.identifiers import NOBODY, BlockId, TenantId
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from tests.properties import examples

A, B, C = TenantId(1), TenantId(2), TenantId(3)


def make(num_blocks: int) -> tuple[BlockPool, list[BlockId]]:
    """Return a pool, and the blocks that it has evicted so far."""
    pool, evicted = BlockPool(num_blocks), list[BlockId]()
    pool.on_evict = evicted.append
    return pool, evicted


def cache(pool: BlockPool, tenant: TenantId, count: int) -> list[BlockId]:
    """Return `count` blocks that the tenant used and keeps."""
    blocks = pool.allocate(count)
    for block in blocks:
        pool.keep(block, tenant)
    pool.release(blocks)
    return blocks


def is_kept(pool: BlockPool, block: BlockId) -> bool:
    return bool(pool.snapshot()[1][block])


def survivors(pool: BlockPool, blocks: list[BlockId], tenant: TenantId) -> list[BlockId]:
    return [block for block in blocks if is_kept(pool, block) and pool.owner(block) == tenant]


def test_an_allocation_that_fails_changes_nothing_and_an_empty_pool_is_refused() -> None:
    pool = BlockPool(4)
    held = pool.allocate(2)
    cache(pool, A, 1)
    with pytest.raises(NoFreeBlocks):
        pool.allocate(3)
    assert (pool.num_free, pool.num_cached, pool.num_used) == (1, 1, 2)
    pool.release(held)
    assert (pool.num_free, pool.num_cached) == (3, 1)
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)


def test_a_shared_block_returns_with_its_last_holder_and_a_discarded_one_is_free() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.keep(blocks[0])
    pool.share(blocks)
    pool.release(blocks)
    assert pool.state(blocks[0]) is BlockState.USED
    pool.release(blocks)
    assert pool.state(blocks[0]) is BlockState.CACHED
    pool.discard(blocks[0])
    assert (pool.num_free, pool.num_cached) == (2, 0)


def test_evictions_count_what_was_given_to_others_and_no_flush() -> None:
    pool = BlockPool(8)
    cache(pool, A, 8)
    assert (pool.num_cached, pool.num_evictions) == (8, 0), "a tenant alone may have everything"
    cache(pool, A, 3)
    assert (pool.num_cached, pool.num_evictions) == (8, 3)
    pool.allocate(1)
    assert pool.num_evictions == 4
    assert pool.flush() == 7
    assert pool.num_evictions == 4


def test_a_flood_stops_at_what_a_smaller_tenant_has() -> None:
    pool = BlockPool(20)
    of_b = cache(pool, B, 5)
    for _ in range(100):
        cache(pool, A, 3)
    assert survivors(pool, of_b, B) == of_b


def test_of_the_tenant_that_gives_it_is_the_longest_unused_tail_first() -> None:
    pool, evicted = make(7)
    oldest, _, old, _ = cache(pool, A, 2), cache(pool, B, 1), cache(pool, A, 2), cache(pool, A, 2)
    pool.share(oldest)
    pool.release(oldest)
    pool.allocate(2)
    assert evicted == old[::-1]


def test_tenants_that_come_and_go_leave_nothing_behind() -> None:
    pool = BlockPool(16)
    for tenant in range(1000):
        cache(pool, TenantId(tenant), 3)
    shares = pool._shares
    assert len(shares) <= 16
    assert len(shares._ranking) <= 5 * 16 + 16
    assert shares._changed <= shares._accounts.keys()
    pool.flush()
    assert len(shares) == len(shares._changed) == len(shares._ranking) == 0


def test_the_small_that_come_and_go_below_a_large_one_leave_nothing_behind() -> None:
    shares = TenantShares[int]()
    for key in range(10):
        large = shares.hold(A)
        large.offered[0][key] = None
        shares.offers(large)
    shares.hold(B)
    for tenant in range(10, 1000):
        small = shares.hold(TenantId(tenant))
        assert shares.can_give
        shares.drop(small)
    assert len(shares) == 2
    assert len(shares._ranking) < 100


def test_nothing_offered_is_nothing_to_give() -> None:
    shares = TenantShares[int]()
    assert not shares.can_give
    accounts = [shares.hold(tenant) for tenant in (A, B, B)]
    assert not shares.can_give
    accounts[0].offered[0][7] = None
    shares.offers(accounts[0])
    assert shares.can_give
    giver = shares.give()
    assert giver is accounts[0], "B holds more and offers nothing"
    giver.offered[0].clear()
    assert not shares.can_give


@examples(150, deadline=None)
@given(seed=st.integers(0, 2**32), tenant=st.sampled_from([NOBODY, A]))
def test_one_tenant_is_evicted_in_the_order_of_a_plain_lru_until_a_reuse_is_counted(
    seed: int, tenant: TenantId
) -> None:
    chance = random.Random(seed)
    pool, evicted = make(chance.randint(1, 20))
    free = OrderedDict[BlockId, None].fromkeys(pool.blocks())
    lru = OrderedDict[BlockId, None]()
    gone: list[BlockId] = []
    held: list[list[BlockId]] = []
    for _ in range(120):
        if chance.random() < 0.5 and pool.num_allocatable:
            count = chance.randint(1, pool.num_allocatable)
            expected = []
            for _ in range(count):
                if not free:
                    gone.append(next(iter(lru)))
                expected.append((free or lru).popitem(last=False)[0])
            blocks = pool.allocate(count)
            assert blocks == expected
            for block in blocks[: chance.randint(0, count)]:
                pool.keep(block, tenant)
            held.append(blocks)
        elif held:
            blocks = held.pop(chance.randrange(len(held)))
            for block in reversed(blocks):
                (lru if is_kept(pool, block) else free)[block] = None
            pool.release(blocks)
        assert evicted == gone
        pool.check_invariants()


class PoolMachine(RuleBasedStateMachine):
    """Any order of what tenants do to a pool: nobody gives from below its share."""

    held = Bundle("held")

    @initialize(num_blocks=st.integers(4, 24))
    def begin(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.pool.on_evict = self._check_who_gives

    def _cached(self) -> list[BlockId]:
        return [block for block in self.pool.blocks() if self.pool.state(block) is BlockState.CACHED]

    def _check_who_gives(self, block: BlockId) -> None:
        """`block` has just left its owner's account, which has one less now."""
        kept = (other for other in self.pool.blocks() if is_kept(self.pool, other))
        giver, holdings = self.pool.owner(block), Counter(self.pool.owner(other) for other in kept)
        caching = {self.pool.owner(other) for other in self._cached()}
        held = holdings[giver] + 1
        fair = (held + sum(holdings[t] for t in caching - {giver})) / len(caching | {giver})
        assert held >= fair, f"{giver} had {held}, below its share of {fair}"
        assert all(holdings[tenant] <= held for tenant in caching)

    @rule(target=held, count=st.integers(1, 8), kept=st.integers(0, 8), tenant=st.integers(0, 4))
    def allocate(self, count: int, kept: int, tenant: int) -> list[BlockId]:
        before = (self.pool.num_free, self.pool.num_cached)
        try:
            blocks = self.pool.allocate(count)
        except NoFreeBlocks:
            assert (self.pool.num_free, self.pool.num_cached) == before
            return []
        for block in blocks[:kept]:
            self.pool.keep(block, TenantId(tenant))
        return blocks

    @rule(target=held, blocks=held)
    def share(self, blocks: list[BlockId]) -> list[BlockId]:
        self.pool.share(blocks)
        return list(blocks)

    @rule(target=held, start=st.integers(0, 23), count=st.integers(1, 4))
    def find_again(self, start: int, count: int) -> list[BlockId]:
        found = self._cached()[start : start + count]
        self.pool.share(found)
        return found

    @rule(blocks=consumes(held), discards=st.booleans())
    def release(self, blocks: list[BlockId], discards: bool) -> None:
        for block in blocks if discards else ():
            self.pool.discard(block)
        self.pool.release(blocks)

    @rule(start=st.integers(0, 23))
    def discard_cached(self, start: int) -> None:
        for block in self._cached()[start : start + 1]:
            self.pool.discard(block)

    @rule()
    def flush(self) -> None:
        self.pool.flush()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_invariants()


PoolMachine.TestCase.settings = examples(100, stateful_step_count=40, deadline=None)
test_no_tenant_below_its_share_gives_anything = PoolMachine.TestCase
