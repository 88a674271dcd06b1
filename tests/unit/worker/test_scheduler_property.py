"""Any order of submits, cancels and steps, with and without a step in flight, keeps every invariant."""

import random

import pytest
from blockyard.worker.sequences.sequence import Sequence
from blockyard.worker.sequences.step_plan import FAILED_TOKEN, StepPlan
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples

from .scheduling import make_scheduler, make_sequence, run, sampled

SHARED = [5 + index % 9 for index in range(200)]


def random_sequence(number: int, chance: random.Random) -> Sequence:
    shared = SHARED[: chance.choice([0, 16, 48, 100])]
    own = [chance.randint(1, 50) for _ in range(chance.randint(1, 60))]
    sequence = make_sequence(number, shared + own, max_tokens=chance.randint(1, 40), block_size=16)
    sequence.expected_pause_seconds = chance.choice([0.0, 0.0, 5.0, 50.0, 500.0])
    return sequence


@examples(40, deadline=None)
@given(seed=st.integers(0, 2**32), num_blocks=st.integers(13, 40), pipelined=st.booleans())
def test_a_storm_of_submits_and_cancels_conserves_blocks(seed: int, num_blocks: int, pipelined: bool) -> None:
    chance = random.Random(seed)
    scheduler = make_scheduler(
        num_blocks, max_num_batched_tokens=chance.choice([16, 64, 256]), max_num_seqs=8
    )
    sequences: list[Sequence] = []
    in_flight: list[StepPlan] = []
    for _ in range(120):
        if chance.random() < 0.3:
            sequences.append(random_sequence(len(sequences), chance))
            scheduler.submit(sequences[-1])
        if sequences and chance.random() < 0.08:
            scheduler.cancel(chance.choice(sequences))
        scheduler.pool.now_seconds += chance.choice([0.1, 3.0])
        in_flight.append(scheduler.plan())
        while len(in_flight) > pipelined:
            plan = in_flight.pop(0)
            if chance.random() < 0.01:
                plans = [plan, *in_flight]
                in_flight.clear()
                for failed in plans:
                    scheduler.fail(failed)
            else:
                scheduler.commit(plan, run(plan))
        scheduler.check_invariants()
    for plan in in_flight:
        scheduler.commit(plan, run(plan))
    for _ in range(20_000):
        if not scheduler.has_work:
            break
        plan = scheduler.plan()
        scheduler.commit(plan, run(plan))
    scheduler.check_invariants()
    assert not scheduler.has_work
    assert all(sequence.is_over for sequence in sequences)
    assert scheduler.pool.num_used == 0


@examples(40, deadline=None)
@given(seed=st.integers(0, 2**32), num_blocks=st.integers(13, 40), share=st.floats(0.0, 1.0))
def test_no_step_has_a_sequence_that_is_held_and_all_others_go_on(
    seed: int, num_blocks: int, share: float
) -> None:
    chance = random.Random(seed)
    scheduler = make_scheduler(num_blocks, max_num_batched_tokens=chance.choice([16, 64]), max_num_seqs=8)
    held: set[int] = set()
    scheduler.must_wait_for_mask = lambda sequence: sequence.sequence_id in held
    sequences = [random_sequence(number, chance) for number in range(16)]
    for sequence in sequences:
        sequence.grammar = "slow" if chance.random() < share else None
        scheduler.submit(sequence)
    for _ in range(20_000):
        if not scheduler.has_work:
            break
        held = {s.sequence_id for s in sequences if s.grammar and chance.random() < 0.7}
        plan = scheduler.plan()
        planned = {row.sequence.sequence_id for row in plan.rows}
        assert not planned & held
        first = [*scheduler.running, *scheduler.waiting][:1]
        if not planned:
            assert any(s.sequence_id in held for s in first), "the first of all has nothing to wait for"
        scheduler.commit(plan, run(plan))
        scheduler.check_invariants()
    assert all(sequence.is_over for sequence in sequences)
    assert scheduler.pool.num_used == 0


@examples(25, deadline=None)
@given(seed=st.integers(0, 2**32), pipelined=st.booleans(), ageing=st.sampled_from([0.0, 1.0, 30.0]))
def test_whatever_is_background_prefetched_or_embedded_all_end_and_every_step_has_rows(
    seed: int, pipelined: bool, ageing: float
) -> None:
    """Sequences age at different paces beside their priorities. So background work is first, last and between."""
    chance = random.Random(seed)
    scheduler = make_scheduler(
        chance.choice([14, 20, 60]), max_num_batched_tokens=chance.choice([8, 64]), max_num_seqs=8
    )
    sequences: list[Sequence] = []
    in_flight: list[StepPlan] = []
    for _ in range(3000):
        if len(sequences) < 40 and chance.random() < 0.3:
            embeds, priority = chance.random() < 0.2, chance.choice([0, 0, 99, 100, 100])
            own = [chance.randint(1, 50) for _ in range(chance.randint(1, 120))]
            max_tokens = 0 if embeds else 1 if priority == 99 else chance.randint(1, 40)
            sequence = make_sequence(
                len(sequences), own, max_tokens=max_tokens, priority=priority, embeds=embeds
            )
            sequence.rank += ageing * len(sequences)
            sequences.append(sequence)
            scheduler.submit(sequence)
        plan = scheduler.plan()
        if not in_flight and (scheduler.running or scheduler.waiting):
            assert plan.rows, "nothing is in the way of the first"
        in_flight.append(plan)
        while len(in_flight) > pipelined:
            plan = in_flight.pop(0)
            scheduler.commit(plan, run(plan))
        scheduler.check_invariants()
        if len(sequences) == 40 and not scheduler.has_work:
            break
    assert not scheduler.has_work, "work is left"
    assert all(sequence.is_over for sequence in sequences)
    assert scheduler.pool.num_used == 0


def test_a_newcomer_joins_where_all_others_are_held() -> None:
    scheduler = make_scheduler(40)
    scheduler.must_wait_for_mask = lambda sequence: True
    running, waiting, newcomer = (make_sequence(number, [5 + number] * 20) for number in range(3))
    running.grammar = None
    scheduler.submit(running)
    plan = scheduler.plan()
    scheduler.commit(plan, run(plan))
    running.grammar = waiting.grammar = "slow"
    scheduler.submit(waiting)
    assert scheduler.plan().rows == ()
    scheduler.submit(newcomer)
    assert [row.sequence for row in scheduler.plan().rows] == [newcomer]


@examples(30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_published_names_equal_the_cache_and_are_closed_under_prefixes(seed: int) -> None:
    chance = random.Random(seed)
    scheduler = make_scheduler(20, max_num_batched_tokens=64, max_num_seqs=6)
    published: set[bytes] = set()
    parents: dict[bytes, bytes] = {}
    for number in range(60):
        sequence = random_sequence(number, chance)
        scheduler.submit(sequence)
        for _ in range(chance.randint(0, 12)):
            scheduler.pool.now_seconds += chance.choice([0.1, 3.0, 30.0])
            plan = scheduler.plan()
            poisoned = chance.random() < 0.05
            scheduler.commit(
                plan,
                sampled(
                    *(
                        FAILED_TOKEN if poisoned and chance.random() < 0.5 else token
                        for token in run(plan).tokens
                    )
                ),
            )
            scheduler.check_invariants()
            for row in plan.rows:
                names = row.sequence.names
                parents.update(zip(names[2:], names[1:-1], strict=True))
            changes = scheduler.cache.take_changes()
            for name in changes.removed:
                published.remove(name)
            for name in changes.stored:
                assert parents.get(name) is None or parents[name] in published
                assert name not in published
                published.add(name)
            assert all(parents.get(name) is None or parents[name] in published for name in published)
            assert len(published) == len(scheduler.cache)


@pytest.mark.parametrize("max_num_batched_tokens", [16, 37, 512])
def test_tokens_do_not_depend_on_the_company(max_num_batched_tokens: int) -> None:
    chance = random.Random(3)
    make = lambda: [random_sequence(number, random.Random(number)) for number in range(24)]  # noqa: E731
    alone = []
    for sequence in make():
        scheduler = make_scheduler(30)
        scheduler.submit(sequence)
        while scheduler.has_work:
            plan = scheduler.plan()
            scheduler.commit(plan, run(plan))
        alone.append(sequence.tokens)
    scheduler = make_scheduler(30, max_num_batched_tokens=max_num_batched_tokens)
    together = make()
    for sequence in together:
        scheduler.submit(sequence)
        if chance.random() < 0.5:
            plan = scheduler.plan()
            scheduler.commit(plan, run(plan))
    while scheduler.has_work:
        plan = scheduler.plan()
        scheduler.commit(plan, run(plan))
        scheduler.check_invariants()
    assert [sequence.tokens for sequence in together] == alone
