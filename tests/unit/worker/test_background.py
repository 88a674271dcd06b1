"""Background work: sequences of the lowest priority cost others nothing, and end all the same."""

import random
from typing import Any

from blockyard.proto.limits import MAX_PRIORITY
from blockyard.worker.scheduling.background import decodes_beside, is_background, num_before
from blockyard.worker.scheduling.decode_times import DecodeTimes
from blockyard.worker.scheduling.scheduler import Scheduler
from blockyard.worker.sequences.sequence import Sequence
from blockyard.worker.sequences.step_plan import StepPlan
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples

from .scheduling import make_scheduler, make_sequence, measured, rows, run, run_to_end, step


def background(number: int, length: int = 20, **settings: int) -> Sequence:
    tokens = [100 + number] * length
    return make_sequence(1000 + number, tokens, priority=MAX_PRIORITY, **settings)


def urgent(number: int, length: int = 20, **settings: int) -> Sequence:
    return make_sequence(number, [number % 40 + 2] * length, **settings)


def with_background(*lengths: int, max_tokens: int = 20, **settings: Any) -> Scheduler:
    """Return a scheduler with background sequences of these lengths."""
    scheduler = make_scheduler(**({"num_blocks": 64} | settings))
    for number, length in enumerate(lengths):
        scheduler.submit(background(number, length, max_tokens=max_tokens))
    return scheduler


def test_beside_others_background_work_waits_and_then_goes_on() -> None:
    scheduler = with_background(20)
    assert rows(scheduler) == {1000: 20}
    assert rows(scheduler) == {1000: 1}
    scheduler.submit(urgent(1, max_tokens=3))
    scheduler.submit(background(1))
    assert [rows(scheduler) for _ in range(4)] == [{1: 20}, {1: 1}, {1: 1}, {1000: 1, 1001: 20}]


def test_a_step_takes_the_decodes_that_lengthen_it_by_little() -> None:
    scheduler = with_background(*[20] * 8)
    for decodes, seconds in ((1, 0.010), (2, 0.0101), (4, 0.0102), (8, 0.02)):
        scheduler.mixed_steps.decode_times.observe(decodes, seconds)
    for _ in range(4):
        rows(scheduler)
    assert len(scheduler.running) == 8
    scheduler.submit(urgent(1, max_tokens=10))
    rows(scheduler)
    assert rows(scheduler) == {1: 1, 1000: 1, 1001: 1}, "half of eight would take 4 % more"


@given(
    num_others=st.integers(1, 64),
    count=st.integers(0, 256),
    seconds=st.lists(st.floats(1e-4, 1.0), min_size=0, max_size=8),
)
def test_the_decodes_beside_others_are_expected_within_the_share(
    num_others: int, count: int, seconds: list[float]
) -> None:
    times = DecodeTimes(smoothing=0.2)
    for power, one in enumerate(seconds):
        times.observe(2**power, one)
    taken = decodes_beside(num_others, count, times)
    assert 0 <= taken <= count
    assert times.expected(num_others + taken) <= 1.03 * times.expected(num_others) or not taken


def test_background_work_gives_its_blocks_and_slots_to_a_waiting_request() -> None:
    by_blocks = with_background(120, 100, max_tokens=100, num_blocks=16)
    by_slots = with_background(20, 20, max_tokens=100, max_num_seqs=2)
    for scheduler, length in ((by_blocks, 100), (by_slots, 20)):
        for _ in range(4):
            rows(scheduler)
        assert len(scheduler.running) == 2
        scheduler.submit(urgent(1, length=length, max_tokens=4))
        assert rows(scheduler) == {1: length}
        assert scheduler.num_preemptions == 1
        sequences = (*scheduler.running, *scheduler.waiting)
        run_to_end(scheduler)
        assert all(sequence.is_over for sequence in sequences)


def test_background_work_alone_takes_short_steps() -> None:
    scheduler = with_background(600)
    assert rows(scheduler) == {1000: 64}, "before anything is measured"
    measured(scheduler, prefill=20_000.0)
    assert rows(scheduler) == {1000: 200}
    scheduler.submit(urgent(1, length=300))
    assert rows(scheduler) == {1: 300}


def test_no_prompt_of_background_work_is_computed_beside_a_decode_however_cheap_decodes_are() -> None:
    scheduler = with_background(300, max_tokens=4)
    for decodes in (1, 2, 4):
        scheduler.mixed_steps.decode_times.observe(decodes, 0.010)
    assert rows(scheduler) == {1000: 64}
    scheduler.submit(urgent(1, max_tokens=3))
    assert [rows(scheduler) for _ in range(4)] == [{1: 20}, {1: 1}, {1: 1}, {1000: 64}]


def test_background_work_runs_while_what_it_waits_for_cannot() -> None:
    scheduler = with_background(20)
    rows(scheduler)
    scheduler.must_wait_for_mask = lambda sequence: True
    held = urgent(1)
    held.grammar = object()  # type: ignore[assignment]
    scheduler.submit(held)
    assert rows(scheduler) == {1000: 1}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["background", "urgent", "held"]),
            st.integers(1, 400),
            st.integers(1, 20),
            st.integers(0, 4),
        ),
        min_size=1,
        max_size=16,
    )
)
def test_a_step_without_other_rows_takes_few_prompt_tokens_of_background_work(
    arrivals: list[tuple[str, int, int, int]],
) -> None:
    """However full the token budget would let it be, also while an urgent request waits for its mask or for room."""
    scheduler = make_scheduler(48, max_num_seqs=6, max_num_batched_tokens=512)
    measured(scheduler, prefill=8_000.0)
    held: set[int] = set()
    scheduler.must_wait_for_mask = lambda sequence: int(sequence.sequence_id) in held

    def check_step() -> None:
        plan = scheduler.plan()
        if all(is_background(row.sequence) for row in plan.rows):
            assert sum(row.num_tokens for row in plan.rows if row.num_tokens > 1) <= 80
        scheduler.commit(plan, run(plan))
        scheduler.check_invariants()

    for number, (kind, length, max_tokens, pause) in enumerate(arrivals):
        make = background if kind == "background" else urgent
        sequence = make(number, length=length, max_tokens=max_tokens)
        if kind == "held":
            sequence.grammar = object()  # type: ignore[assignment]
            held.add(number)
        scheduler.submit(sequence)
        for _ in range(pause):
            check_step()
    held.clear()
    for _ in range(2000):
        if scheduler.has_work:
            check_step()
    assert not scheduler.has_work


def test_a_sequence_that_has_waited_for_its_priority_is_no_longer_background() -> None:
    scheduler = with_background(20)
    (old,) = scheduler.waiting
    rows(scheduler)
    younger = urgent(1, max_tokens=20)
    younger.rank = old.rank + 1
    scheduler.submit(younger)
    assert rows(scheduler) == {1000: 1, 1: 20}
    assert rows(scheduler) == {1000: 1, 1: 1}


def test_background_work_that_has_waited_long_holds_nobody_up_behind_it() -> None:
    scheduler = make_scheduler(64)
    scheduler.submit(urgent(1, max_tokens=40))
    rows(scheduler)
    old, younger = background(0), urgent(2)
    old.rank, younger.rank = 5.0, 6.0
    scheduler.submit(old)
    scheduler.submit(younger)
    assert rows(scheduler) == {1: 1, 2: 20}


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(1, 90), st.integers(1, 30), st.integers(0, 6)),
        min_size=1,
        max_size=20,
    )
)
def test_all_end_and_no_urgent_token_waits_for_background_work(
    arrivals: list[tuple[bool, int, int, int]],
) -> None:
    """The steps in which an urgent sequence gets a token are those that it would have without background work."""

    def steps_of(*, with_background: bool) -> dict[int, list[int]]:
        scheduler = make_scheduler(48, max_num_seqs=4, max_num_batched_tokens=64)
        seen: dict[int, list[int]] = {}
        now = 0

        def take_step() -> None:
            nonlocal now
            now += 1
            for update in step(scheduler):
                seen.setdefault(int(update.sequence.sequence_id), []).append(now)

        for number, (is_urgent, length, max_tokens, pause) in enumerate(arrivals):
            if is_urgent or with_background:
                make = urgent if is_urgent else background
                scheduler.submit(make(number, length=length, max_tokens=max_tokens))
            for _ in range(pause):
                take_step()
        while scheduler.has_work and now < 5000:
            take_step()
        assert not scheduler.has_work
        return seen

    alone, beside = steps_of(with_background=False), steps_of(with_background=True)
    assert len(beside) == len(arrivals)
    assert {number: beside[number] for number in alone} == alone


def test_waiting_background_work_fills_no_place_of_another_request() -> None:
    waiting = [urgent(1), *(background(number) for number in range(3))]
    assert (num_before(waiting, 0), num_before(waiting, MAX_PRIORITY)) == (1, 4)


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
            tokens = [chance.randint(1, 50) for _ in range(chance.randint(1, 120))]
            most = 0 if embeds else 1 if priority == 99 else chance.randint(1, 40)
            number = len(sequences)
            sequence = make_sequence(number, tokens, max_tokens=most, priority=priority, embeds=embeds)
            sequence.rank += ageing * number
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


@examples(40, deadline=None)
@given(seed=st.integers(0, 2**32), num_blocks=st.integers(13, 40), share=st.floats(0.0, 1.0))
def test_no_step_has_a_sequence_that_is_held_and_all_others_go_on(
    seed: int, num_blocks: int, share: float
) -> None:
    chance = random.Random(seed)
    scheduler = make_scheduler(num_blocks, max_num_batched_tokens=chance.choice([16, 64]), max_num_seqs=8)
    held: set[int] = set()
    scheduler.must_wait_for_mask = lambda sequence: sequence.sequence_id in held
    sequences = []
    for number in range(16):
        tokens = [5] * chance.choice([0, 16, 48, 100])
        tokens += [chance.randint(1, 50) for _ in range(chance.randint(1, 60))]
        sequence = make_sequence(number, tokens, max_tokens=chance.randint(1, 40))
        sequence.grammar = "slow" if chance.random() < share else None
        sequences.append(sequence)
        scheduler.submit(sequence)
    for _ in range(20_000):
        if not scheduler.has_work:
            break
        held = {s.sequence_id for s in sequences if s.grammar and chance.random() < 0.7}
        first = [*scheduler.running, *scheduler.waiting][:1]
        planned = rows(scheduler)
        assert not planned.keys() & held
        assert planned or any(s.sequence_id in held for s in first), (
            "the first of all has nothing to wait for"
        )
    assert all(sequence.is_over for sequence in sequences)
    assert scheduler.pool.num_used == 0
