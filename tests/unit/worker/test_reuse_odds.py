"""Eviction by the odds of reuse: learned from the load, a child always before its parent, and a plain LRU at first."""

from itertools import pairwise
from random import Random

from blockyard.worker.cache.block_pool import BlockPool
from blockyard.worker.cache.prefix_cache import PrefixCache
from blockyard.worker.cache.reuse_odds import KINDS, NUM_AGES, ReuseOdds
from blockyard.worker.sequences.identifiers import BlockId, BlockName
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples

BLOCKS = 64


def named(*parts: int) -> list[BlockName]:
    """Return the names of a chain of blocks, each with the content that its number stands for."""
    return [BlockName(str(parts[: end + 1]).encode()) for end in range(len(parts))]


def serve(cache: PrefixCache, pool: BlockPool, names: list[BlockName], *, num_generated: int = 0) -> int:
    """Run one sequence from its match to its release. Return how many blocks it found."""
    table = start(cache, pool, names, num_generated=num_generated)
    pool.release(table[0])
    return table[1]


def start(
    cache: PrefixCache, pool: BlockPool, names: list[BlockName], *, num_generated: int = 0
) -> tuple[list[BlockId], int]:
    found = cache.match(names[: len(names) - num_generated])
    pool.share(found)
    table = found + pool.allocate(len(names) - len(found))
    for index in range(len(found), len(names)):
        cache.assign(
            table[index],
            names[index],
            parent=names[index - 1] if index else None,
            is_generated=index >= len(names) - num_generated,
        )
    cache.confirm_all(table)
    return table, len(found)


def make() -> tuple[PrefixCache, BlockPool]:
    pool = BlockPool(BLOCKS)
    return PrefixCache(pool), pool


def test_of_prompts_and_outputs_of_equal_age_the_ones_that_are_found_again_stay() -> None:
    """Six prompts of 8 blocks come back in random order, with new outputs of 7. An LRU finds 5 of 8 blocks."""
    cache, pool = make()
    chance, found = Random(1), 0
    for number in range(600):
        group = 100 * chance.randrange(6)
        names = named(*range(group, group + 8), *[10_000 + number] * 7)
        hits = serve(cache, pool, names, num_generated=7)
        found += hits if number >= 300 else 0
    assert found > 0.95 * 300 * 8


def test_a_scan_does_not_push_out_what_is_found_again_and_again() -> None:
    """With the scan, a round is longer than the pool, so an LRU would find nothing."""
    cache, pool = make()
    number = 0
    for turn in range(100):
        for group in range(4):
            hit = serve(cache, pool, named(*range(100 * group, 100 * group + 8)))
            assert hit == 8 or turn in (0, 50, 51)
        for _ in range(1 if turn < 50 else 6):
            number += 1
            serve(cache, pool, named(10_000 + number, *range(9)))


def test_where_only_the_newest_comes_back_the_order_is_that_of_the_last_use() -> None:
    """A conversation at a time: what was found often in the last one is worthless, and must go."""
    cache, pool = make()
    for conversation in range(60):
        for turn in range(1, 12):
            hit = serve(cache, pool, named(1000 * conversation, *range(4 * turn - 1)), num_generated=2)
            assert hit >= 4 * (turn - 1) or conversation < 20


@examples(100, deadline=None)
@given(
    waits=st.lists(
        st.tuples(st.sampled_from(KINDS), st.integers(0, 2000), st.booleans(), st.integers(1, 500)),
        max_size=20,
    )
)
def test_odds_never_rise_with_time_nor_fall_with_the_kind(
    waits: list[tuple[int, int, bool, int]],
) -> None:
    odds = ReuseOdds(100)
    odds.now = 2000
    for kind, wait, is_reused, times in waits:
        for name in range(times):
            if is_reused:
                odds.reused(kind, odds.now - wait)
            else:
                odds.lost[kind, wait, name] = (odds.now - wait) << 3 | 4 | kind
    odds.refresh()
    table = [[odds.of(kind, odds.now - wait) for wait in range(0, 2000, 5)] for kind in KINDS]
    for row in table:
        assert all(later <= sooner for sooner, later in pairwise(row))
        assert all(0 <= each <= 1 for each in row)
    for less, more in pairwise(table):
        assert all(one <= other for one, other in zip(less, more, strict=True))


@examples(150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_whatever_was_learned_every_cached_name_has_its_parent(seed: int) -> None:
    """Sequences overlap, and hold copies of one name: a prompt that is cached wholly computes its last block again."""
    chance = Random(seed)
    pool = BlockPool(chance.randint(6, 40))
    cache = PrefixCache(pool)
    running: list[list[BlockId]] = []
    for _ in range(150):
        length = chance.randint(1, 6)
        if chance.random() < 0.6 and pool.num_allocatable >= length:
            names = named(*(chance.randrange(2) for _ in range(length)))
            found = cache.match(names[: chance.randint(0, length)])
            pool.share(found)
            if pool.num_allocatable < length - len(found):
                pool.release(found)
                continue
            table = found + pool.allocate(length - len(found))
            num_prompt = chance.randint(len(found), length)
            for index in range(len(found), length):
                parent = names[index - 1] if index else None
                cache.assign(table[index], names[index], parent=parent, is_generated=index >= num_prompt)
            cache.confirm_all(table)
            running.append(table)
        elif running:
            pool.release(running.pop(chance.randrange(len(running))))
        _learn_anything(pool._odds, chance)
        for block in pool.blocks():
            lineage = cache.lineage(block)
            assert lineage is None or lineage.parent is None or cache.blocks_named(lineage.parent)
        pool.check_invariants()
        cache.check_invariants()


def _learn_anything(odds: ReuseOdds, chance: Random) -> None:
    for _ in range(chance.randint(0, 3)):
        count = odds._reused if chance.random() < 0.5 else odds._ended
        kind, age = chance.choice(KINDS), chance.randrange(NUM_AGES)
        odds._ended[kind][age] += 50.0
        if count is odds._reused:
            odds._reused[kind][age] += 50.0
    odds.refresh()


def test_the_memory_of_evicted_blocks_is_bounded_and_a_flush_adds_nothing_to_it() -> None:
    cache, pool = make()
    for number in range(2000):
        serve(cache, pool, named(number, 0, 1))
    assert 0 < len(pool._odds.lost) <= BLOCKS // 2 + BLOCKS // 4 + 3
    before = len(pool._odds.lost)
    cache.flush()
    assert len(pool._odds.lost) <= before
