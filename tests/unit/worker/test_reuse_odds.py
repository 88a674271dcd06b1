"""Eviction by the odds of reuse: learned from the load, a child always before its parent, and a plain LRU at first."""

from itertools import pairwise
from random import Random

from blockyard.worker.cache.reuse_odds import KINDS, NUM_AGES, ReuseOdds
from blockyard.worker.sequences.identifiers import BlockName, TenantId
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples

from .caching import Cache, Served, named

BLOCKS = 64


def test_of_prompts_and_outputs_of_equal_age_the_ones_that_are_found_again_stay() -> None:
    """Six prompts of 8 blocks come back in random order, with new outputs of 7. An LRU finds 5 of 8 blocks."""
    made, chance, found = Cache(BLOCKS), Random(1), 0
    for number in range(600):
        group = 100 * chance.randrange(6)
        hits = made.serve(named(*range(group, group + 8), *[10_000 + number] * 7), num_generated=7)
        found += hits if number >= 300 else 0
    assert found > 0.95 * 300 * 8


def test_a_scan_does_not_push_out_what_is_found_again_and_again() -> None:
    """With the scan, a round is longer than the pool, so an LRU would find nothing."""
    made, number = Cache(BLOCKS), 0
    for turn in range(100):
        for group in range(4):
            hit = made.serve(named(*range(100 * group, 100 * group + 8)))
            assert hit == 8 or turn in (0, 50, 51)
        for _ in range(1 if turn < 50 else 6):
            number += 1
            made.serve(named(10_000 + number, *range(9)))


def test_where_only_the_newest_comes_back_the_order_is_that_of_the_last_use() -> None:
    """A conversation at a time: what was found often in the last one is worthless, and must go."""
    made = Cache(BLOCKS)
    for conversation in range(60):
        for turn in range(1, 12):
            hit = made.serve(named(1000 * conversation, *range(4 * turn - 1)), num_generated=2)
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
    table = [[odds.of(kind, odds.now - wait) for wait in range(0, 2000, 25)] for kind in KINDS]
    for row in table:
        assert all(later <= sooner for sooner, later in pairwise(row))
        assert all(0 <= each <= 1 for each in row)
    for less, more in pairwise(table):
        assert all(one <= other for one, other in zip(less, more, strict=True))


@examples(150, deadline=None)
@given(seed=st.integers(0, 2**32), learns=st.booleans())
def test_used_blocks_stay_and_no_child_outlives_its_parent_whatever_was_learned_or_clients_say(
    seed: int, learns: bool
) -> None:
    """Sequences overlap, and hold copies of one name: a prompt that is cached wholly computes its last block again.

    The odds are learned ones, or clients say when they come back.
    """
    chance = Random(seed)
    made = Cache(chance.randint(6, 40))
    running: list[tuple[Served, list[BlockName]]] = []
    for _ in range(100):
        made.pool.now_seconds += chance.choice([0.0, 0.5, 5.0, 60.0])
        length = chance.randint(1, 6)
        if chance.random() < 0.6 and made.pool.num_allocatable >= length:
            names = named(*(chance.randrange(2) for _ in range(length)))
            tenant = made.cache.owner(names[0]) or TenantId(chance.choice([1, 2]))
            most_found, num_generated = chance.randint(0, length), chance.randint(0, length)
            found = made.cache.match(names[:most_found])
            made.pool.share(found)
            has_room = made.pool.num_allocatable >= length - len(found)
            made.end(found)
            if has_room:
                served = made.start(names, tenant, most_found=most_found, num_generated=num_generated)
                running.append((served, names))
        elif running:
            pause = 0.0 if learns else chance.choice([0.0, 0.0, 3.0, 40.0, 700.0])
            made.end(running.pop(chance.randrange(len(running)))[0].blocks, pause)
        if learns:
            learn_anything(made.pool._odds, chance)
        made.check()
        for served, names in running:
            assert [made.cache.name(block) for block in served.blocks] == names
    for served, _ in running:
        made.end(served.blocks)
    assert made.pool.num_used == 0
    made.cache.flush()
    assert made.pool.num_free == made.pool.num_blocks


def learn_anything(odds: ReuseOdds, chance: Random) -> None:
    for _ in range(chance.randint(0, 3)):
        kind, age, is_reused = chance.choice(KINDS), chance.randrange(NUM_AGES), chance.random() < 0.5
        odds._ended[kind][age] += 50.0
        odds._reused[kind][age] += 50.0 * is_reused
    odds.refresh()


def test_the_memory_of_evicted_blocks_is_bounded_and_a_flush_adds_nothing_to_it() -> None:
    made = Cache(BLOCKS)
    for number in range(2000):
        made.serve(named(number, 0, 1))
    before = len(made.pool._odds.lost)
    assert 0 < before <= BLOCKS // 2 + BLOCKS // 4 + 3
    made.cache.flush()
    assert len(made.pool._odds.lost) <= before
