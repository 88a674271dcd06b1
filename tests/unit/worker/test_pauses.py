"""Expected pauses: what is due last goes first, what is due now stays, and no hint pins a block or harms others."""

import random

import pytest
from blockyard.proto.limits import MAX_PAUSE_SECONDS
from blockyard.worker.cache.block_pool import BlockPool, BlockState
from blockyard.worker.cache.pauses import BUCKET_SECONDS, bucket_of
from blockyard.worker.sequences.identifiers import BlockName, TenantId
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples

from .caching import Cache, named

LIAR, HONEST = TenantId(1), TenantId(2)


class Sessions(Cache):
    """A cache whose pool has turned over, at one block a second, so that it knows its pace."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        for number in range(3 * num_blocks):
            self.serve(session(f"old {number}", 1))
            self.pool.now_seconds += 1.0
        self.cache.flush()

    def has(self, *names: str) -> list[int]:
        """Return how many leading blocks of each session are cached."""
        self.check()
        return [len(self.cache.match(session(name))) for name in names]


def session(name: str, length: int = 4) -> list[BlockName]:
    return named(*[name] * length)


def test_of_paused_sessions_the_one_that_comes_back_last_is_evicted_first() -> None:
    made = Sessions(16)
    for name, pause in (("soon", 10.0), ("late", 300.0), ("later", 600.0), ("next", 20.0)):
        made.serve(session(name), pause)
    made.serve(session("new"))
    assert made.has("soon", "late", "later", "next") == [4, 4, 0, 4]
    made.serve(session("newer"))
    assert 0 in made.has("late", "new")
    assert made.has("soon", "next") == [4, 4]


def test_a_block_that_is_due_now_is_as_safe_as_one_just_used_and_ages_from_then_on() -> None:
    made = Sessions(12)
    made.serve(session("due"), 8.0)
    made.serve(session("plain"))
    made.pool.now_seconds += 8.0 + BUCKET_SECONDS
    made.serve(session("new"))
    made.serve(session("newer"))
    assert made.has("plain", "due") == [0, 4]
    for number in range(3):
        made.serve(session(f"other {number}"))
    assert made.has("due") == [0], "it did not come back"


def test_a_hint_is_forgotten_when_the_session_comes_back_without_one() -> None:
    made = Sessions(12)
    made.serve(session("a"), MAX_PAUSE_SECONDS)
    assert made.serve(session("a")) == 4
    assert not made.pool.has_pauses


def test_a_block_that_other_chains_build_on_stays_until_the_last_of_them_is_due() -> None:
    made = Sessions(12)
    for last, pause in (("a", 8.0), ("b", 0.0)):
        made.serve(named("system", "system", last), pause)
    for number in range(4):
        made.serve(session(f"other {number}"))
    made.check()
    assert len(made.cache.match(named("system", "system", "a"))) in (2, 3), "no child without its parents"


def test_a_discarded_block_forgets_its_hint() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    for index, block in enumerate(blocks):
        pool.keep(block, LIAR, name=index)
    pool.release(blocks, bucket=bucket_of(60.0), first_alone=0)
    for block in reversed(blocks):
        pool.discard(block)
        pool.check_invariants()
        assert pool.state(block) is BlockState.FREE
    assert not pool.has_pauses


@pytest.mark.parametrize("pause", [0.001, 1.0, 59.0, MAX_PAUSE_SECONDS])
def test_a_bucket_ends_at_or_soon_after_its_time(pause: float) -> None:
    assert 0 <= bucket_of(1000.0 + pause) * BUCKET_SECONDS - (1000.0 + pause) < BUCKET_SECONDS


@examples(10, deadline=None)
@given(seed=st.integers(0, 2**32), pause=st.floats(1.0, MAX_PAUSE_SECONDS))
def test_a_client_that_lies_cannot_take_more_than_its_share_from_another_tenant(
    seed: int, pause: float
) -> None:
    chance, made = random.Random(seed), Sessions(40)
    honest = [f"honest {number}" for number in range(3)]
    for name in honest:
        made.serve(session(name), tenant=HONEST)
    for number in range(60):
        made.serve(session(f"lie {number}", chance.randint(1, 6)), pause, tenant=LIAR)
        made.pool.now_seconds += chance.random()
    assert made.has(*honest) == [4, 4, 4]


@examples(10, deadline=None)
@given(pause=st.floats(1.0, 300.0))
def test_a_client_that_lies_keeps_its_blocks_at_most_for_a_turnover_of_the_pool_beyond_its_pause(
    pause: float,
) -> None:
    made = Sessions(20)
    made.serve(session("lie"), pause)
    until, number = made.pool.now_seconds + pause + BUCKET_SECONDS + 40, 0
    while made.pool.now_seconds <= until:
        made.serve(session(f"plain {number}", 1))
        number += 1
        made.pool.now_seconds += 1.0
    assert made.has("lie") == [0]
