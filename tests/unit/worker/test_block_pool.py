"""The pool conserves blocks, evicts the oldest prefix tail-first, and a failed allocation changes nothing."""

import pytest
from blockyard.worker.cache.block_pool import BlockPool, BlockState, NoFreeBlocks
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tests.properties import examples


def test_an_allocation_that_fails_changes_nothing() -> None:
    pool = BlockPool(4)
    held = pool.allocate(3)
    with pytest.raises(NoFreeBlocks):
        pool.allocate(2)
    assert (pool.num_free, pool.num_cached, pool.num_used) == (1, 0, 3)
    pool.release(held)
    assert pool.num_free == 4


def test_free_blocks_are_reused_before_cached_ones() -> None:
    pool = BlockPool(3)
    evicted = []
    pool.on_evict = evicted.append
    kept, plain, _ = pool.allocate(3)
    pool.keep(kept)
    pool.release([kept, plain])
    assert pool.state(kept) is BlockState.CACHED
    assert pool.allocate(1) == [plain]
    assert evicted == []
    assert pool.allocate(1) == [kept]
    assert evicted == [kept]


def test_the_tail_of_a_released_sequence_is_evicted_first() -> None:
    pool = BlockPool(4)
    evicted = []
    pool.on_evict = evicted.append
    blocks = pool.allocate(4)
    for block in blocks:
        pool.keep(block)
    pool.release(blocks)
    pool.allocate(4)
    assert evicted == list(reversed(blocks))


def test_a_shared_block_returns_with_its_last_holder() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.keep(blocks[0])
    pool.share(blocks)
    pool.release(blocks)
    assert pool.state(blocks[0]) is BlockState.USED
    pool.release(blocks)
    assert pool.state(blocks[0]) is BlockState.CACHED


def test_a_discarded_block_is_free_again() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.keep(blocks[0])
    pool.release(blocks)
    pool.discard(blocks[0])
    assert (pool.num_free, pool.num_cached) == (1, 0)


def test_evictions_count_what_was_given_to_others_and_no_flush() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.keep(block)
    pool.release(blocks)
    pool.allocate(1)
    assert pool.num_evictions == 1
    assert pool.flush() == 2
    assert pool.num_evictions == 1


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)


class PoolMachine(RuleBasedStateMachine):
    """Any order of allocating, sharing, keeping, discarding and releasing."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)

    @rule(target=held, count=st.integers(1, 6))
    def allocate(self, count: int) -> list[int]:
        before = (self.pool.num_free, self.pool.num_cached)
        try:
            return self.pool.allocate(count)
        except NoFreeBlocks:
            assert (self.pool.num_free, self.pool.num_cached) == before
            return []

    @rule(blocks=held, target=held)
    def share(self, blocks: list[int]) -> list[int]:
        self._keep(blocks)
        self.pool.share(blocks)
        return list(blocks)

    def _keep(self, blocks: list[int]) -> None:
        for block in blocks:
            if not self.pool.snapshot()[1][block]:
                self.pool.keep(block)

    @rule(blocks=consumes(held), keep=st.booleans())
    def release(self, blocks: list[int], keep: bool) -> None:
        if keep:
            self._keep(blocks)
        else:
            for block in blocks:
                self.pool.discard(block)
        self.pool.release(blocks)

    @invariant()
    def holds(self) -> None:
        self.pool.check_invariants()


PoolMachine.TestCase.settings = examples(60, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
