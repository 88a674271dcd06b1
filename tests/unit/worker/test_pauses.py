"""Expected pauses: what is due last goes first, what is due now stays, and no hint pins a block or harms others."""

import random

import pytest
from blockyard.proto.limits import MAX_PAUSE_SECONDS
from blockyard.worker.cache.block_pool import BlockPool, BlockState
from blockyard.worker.cache.pauses import BUCKET_SECONDS, bucket_of
from blockyard.worker.cache.prefix_cache import PrefixCache
from blockyard.worker.sequences.identifiers import BlockId, BlockName, TenantId
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples

HOT, COLD = TenantId(1), TenantId(2)


class Cache:
    """A pool and its prefix cache, with sessions whose blocks are named after them."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.pool)
        self.pool.now_seconds = 1.0

    def serve(self, names: list[str], pause: float = 0.0, tenant: TenantId = HOT) -> int:
        """Serve one request, whose session says when it comes back, and return how many blocks it found."""
        wanted = [BlockName(name.encode()) for name in names]
        found = self.cache.match(wanted)
        self.pool.share(found)
        blocks = found + self.pool.allocate(len(names) - len(found))
        for index in range(len(found), len(names)):
            self.cache.assign(
                blocks[index], wanted[index], tenant, parent=wanted[index - 1] if index else None
            )
        self.cache.confirm_all(blocks)
        self.release(blocks, pause)
        return len(found)

    def release(self, blocks: list[BlockId], pause: float) -> None:
        bucket = bucket_of(self.pool.now_seconds + pause) if pause else 0
        self.pool.release(blocks, bucket=bucket, first_alone=self.cache.first_alone(blocks))
        self.pool.check_invariants()
        self.cache.check_invariants()

    def has(self, names: list[str]) -> int:
        return len(self.cache.match([BlockName(name.encode()) for name in names]))


def session(name: str, length: int = 4) -> list[str]:
    return [f"{name}{index}" for index in range(length)]


def busy(num_blocks: int) -> Cache:
    """Return a cache whose pool has turned over, at one block a second, so that it knows its pace."""
    made = Cache(num_blocks)
    for number in range(3 * num_blocks):
        made.serve([f"old {number}"])
        made.pool.now_seconds += 1.0
    made.cache.flush()
    return made


def test_of_paused_sessions_the_one_that_comes_back_last_is_evicted_first() -> None:
    made = busy(16)
    for name, pause in (("soon", 10.0), ("late", 300.0), ("later", 600.0), ("next", 20.0)):
        made.serve(session(name), pause)
    made.serve(session("new", 4))
    assert [made.has(session(name)) for name in ("soon", "late", "later", "next")] == [4, 4, 0, 4]
    made.serve(session("newer", 4))
    assert made.has(session("late")) == 0 or made.has(session("new")) == 0
    assert [made.has(session(name)) for name in ("soon", "next")] == [4, 4]


def test_a_block_that_is_due_now_is_as_safe_as_one_just_used_and_ages_from_then_on() -> None:
    made = busy(12)
    made.serve(session("due"), 8.0)
    made.serve(session("plain"))
    made.pool.now_seconds += 8.0 + BUCKET_SECONDS
    made.serve(session("new"))
    made.serve(session("newer"))
    assert (made.has(session("plain")), made.has(session("due"))) == (0, 4)
    for number in range(3):
        made.serve(session(f"other {number}"))
    assert made.has(session("due")) == 0, "it did not come back"


def test_a_hint_is_forgotten_when_the_session_comes_back_without_one() -> None:
    made = busy(12)
    made.serve(session("a"), MAX_PAUSE_SECONDS)
    assert made.serve(session("a")) == 4
    assert not made.pool.has_pauses


def test_a_block_that_other_chains_build_on_stays_until_the_last_of_them_is_due() -> None:
    made = busy(12)
    made.serve([*session("system", 2), "a"], 8.0)
    made.serve([*session("system", 2), "b"])
    for number in range(4):
        made.serve(session(f"other {number}"))
    assert made.has([*session("system", 2), "a"]) in (2, 3), "no child without its parents"


def test_a_discarded_block_forgets_its_hint() -> None:
    made = Cache(4)
    blocks = made.pool.allocate(2)
    for index, block in enumerate(blocks):
        made.pool.keep(block, HOT, name=index)
    made.pool.release(blocks, bucket=bucket_of(60.0), first_alone=0)
    for block in reversed(blocks):
        made.pool.discard(block)
        made.pool.check_invariants()
        assert made.pool.state(block) is BlockState.FREE
    assert not made.pool.has_pauses


@pytest.mark.parametrize("pause", [0.001, 1.0, 59.0, MAX_PAUSE_SECONDS])
def test_a_bucket_ends_at_or_soon_after_its_time(pause: float) -> None:
    assert 0 <= bucket_of(1000.0 + pause) * BUCKET_SECONDS - (1000.0 + pause) < BUCKET_SECONDS


@examples(40, deadline=None)
@given(seed=st.integers(0, 2**32), num_blocks=st.integers(8, 40), num_systems=st.integers(0, 3))
def test_whatever_clients_say_used_blocks_stay_and_no_child_outlives_its_parent(
    seed: int, num_blocks: int, num_systems: int
) -> None:
    chance = random.Random(seed)
    made = Cache(num_blocks)
    parents: dict[BlockName, BlockName] = {}
    held: list[tuple[list[BlockId], list[BlockName]]] = []
    for _ in range(60):
        made.pool.now_seconds += chance.choice([0.0, 0.5, 5.0, 60.0])
        system = [f"system {chance.randrange(num_systems)}"] if num_systems else []
        branch = session(f"s{chance.randrange(8)} ", chance.randint(1, 5))
        cut = chance.randint(1, len(branch))
        names = system + branch[:cut] + [f"{branch[0]}{chance.randrange(3)}"] * (chance.random() < 0.3)
        wanted = [BlockName(name.encode()) for name in dict.fromkeys(names)]
        wanted = [BlockName(b"/".join(wanted[: index + 1])) for index in range(len(wanted))]
        parents.update(zip(wanted[1:], wanted[:-1], strict=True))
        found = made.cache.match(wanted)
        if chance.random() < 0.2:
            found = found[:-1]  # computes a copy of its last block, as a fully cached prompt does
        made.pool.share(found)
        if len(wanted) - len(found) > made.pool.num_allocatable:
            made.release(found, chance.choice([0.0, 30.0]))
        else:
            blocks = found + made.pool.allocate(len(wanted) - len(found))
            tenant = made.cache.owner(wanted[0]) or chance.choice([HOT, COLD])
            for index in range(len(found), len(blocks)):
                parent = wanted[index - 1] if index else None
                made.cache.assign(blocks[index], wanted[index], tenant, parent=parent)
            made.cache.confirm_all(blocks)
            held.append((blocks, wanted))
        for blocks, wanted in held:
            assert all(made.pool.state(block) is BlockState.USED for block in blocks)
            assert [made.cache.name(block) for block in blocks] == wanted
        while held and (chance.random() < 0.7 or made.pool.num_allocatable < 6):
            blocks, _ = held.pop(chance.randrange(len(held)))
            made.release(blocks, chance.choice([0.0, 0.0, 3.0, 40.0, 700.0]))
        for name, parent in parents.items():
            assert not made.cache.blocks_named(name) or made.cache.blocks_named(parent)
    for blocks, _ in held:
        made.release(blocks, 0.0)
    assert made.pool.num_used == 0
    made.pool.flush()
    assert made.pool.num_free == num_blocks


@examples(10, deadline=None)
@given(seed=st.integers(0, 2**32), pause=st.floats(1.0, MAX_PAUSE_SECONDS))
def test_a_client_that_lies_cannot_take_more_than_its_share_from_another_tenant(
    seed: int, pause: float
) -> None:
    chance = random.Random(seed)
    made = busy(40)
    for number in range(3):
        made.serve(session(f"honest {number}"), tenant=COLD)
    for number in range(60):
        made.serve(session(f"lie {number}", chance.randint(1, 6)), pause, tenant=HOT)
        made.pool.now_seconds += chance.random()
    assert sum(made.has(session(f"honest {number}")) for number in range(3)) == 12


@examples(10, deadline=None)
@given(pause=st.floats(1.0, 300.0))
def test_a_client_that_lies_keeps_its_blocks_at_most_for_a_turnover_of_the_pool_beyond_its_pause(
    pause: float,
) -> None:
    made = busy(20)
    made.serve(session("lie"), pause)
    started = made.pool.now_seconds
    number = 0
    while made.pool.now_seconds <= started + pause + BUCKET_SECONDS + 40:
        made.serve([f"plain {number}"])
        number += 1
        made.pool.now_seconds += 1.0
    assert made.has(session("lie")) == 0
