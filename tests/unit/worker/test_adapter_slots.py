"""Adapters in slots: no step uses more than there are, none is evicted in use, and nothing waits for ever."""

import random
from math import exp

import pytest
from blockyard.worker.cache.adapter_book import AdapterBook, UnknownAdapter
from blockyard.worker.cache.adapter_slots import RATE_SECONDS, AdapterRates, AdapterSlots
from blockyard.worker.scheduling.scheduler import Scheduler
from blockyard.worker.sequences.adapter import Adapter
from blockyard.worker.sequences.identifiers import BlockName
from blockyard.worker.sequences.sequence import Sequence
from blockyard.worker.sequences.step_plan import StepPlan
from blockyard.worker.simulated.runner import ADAPTER_BYTES_PER_SECOND, SimulatedRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.properties import examples

from .scheduling import make_scheduler, make_sequence, run, step

ADAPTERS = tuple(Adapter(fingerprint=f"{number:032x}", rank=4, num_bytes=100) for number in range(6))


def with_adapter(sequence: Sequence, adapter: Adapter | None) -> Sequence:
    sequence.adapter = adapter
    if adapter is not None:  # its blocks have other names
        sequence.names = [BlockName(bytes.fromhex(adapter.fingerprint))]
    return sequence


def check(plan: StepPlan, scheduler: Scheduler, in_flight: list[StepPlan]) -> None:
    """Check the slots of a plan, and that it takes none from a step in flight or a running sequence."""
    slot_of = {adapter.fingerprint: slot for slot, adapter in plan.adapters}
    assert len(slot_of) == len(set(slot_of.values())) == len(plan.adapters) <= scheduler.config.max_loras
    used = {row.sequence.adapter.fingerprint for row in plan.rows if row.sequence.adapter is not None}
    assert used == slot_of.keys()
    held = {one.adapter.fingerprint for one in scheduler.running if one.adapter is not None}
    held |= {adapter.fingerprint for earlier in in_flight for _, adapter in earlier.adapters}
    assert held <= {adapter.fingerprint for adapter in scheduler.adapters.resident}
    assert len(scheduler.adapters.resident) <= scheduler.config.max_loras


@examples(12, deadline=None)
@given(seed=st.integers(0, 2**32), num_slots=st.integers(1, 4), pipelined=st.booleans())
def test_a_storm_with_adapters_ends_and_never_evicts_what_is_in_use(
    seed: int, num_slots: int, pipelined: bool
) -> None:
    chance = random.Random(seed)
    scheduler = make_scheduler(
        chance.choice([14, 40]),
        max_num_batched_tokens=chance.choice([8, 64]),
        max_num_seqs=8,
        max_loras=num_slots,
        swap_blocks=chance.choice([0, 20]),
    )
    sequences: list[Sequence] = []
    in_flight: list[StepPlan] = []
    slots: dict[int, str] = {}
    for _ in range(4000):
        if len(sequences) < 25 and chance.random() < 0.3:
            tokens = [chance.randint(1, 50) for _ in range(chance.randint(1, 100))]
            kind = chance.choice([{}, {}, {"n": 2}, {"beam_width": 2}])
            sequence = make_sequence(
                len(sequences),
                tokens,
                max_tokens=chance.randint(1, 20),
                priority=chance.choice([0, 0, 1, 100]),
                **kind,
            )
            sequence.rank += len(sequences) / 10
            sequences.append(with_adapter(sequence, chance.choice([None, *ADAPTERS])))
            scheduler.submit(sequence)
        if sequences and chance.random() < 0.05:
            scheduler.cancel_request(chance.choice(sequences).request_id)
        plan = scheduler.plan()
        check(plan, scheduler, in_flight)
        before, slots = slots, slots | {slot: adapter.fingerprint for slot, adapter in plan.adapters}
        for earlier in in_flight:
            assert all(slots[slot] == before[slot] for slot, _ in earlier.adapters)
        if not in_flight and (scheduler.running or scheduler.waiting):
            assert plan.rows, "nothing is in the way of the first"
        in_flight.append(plan)
        while len(in_flight) > pipelined:
            plan = in_flight.pop(0)
            scheduler.commit(plan, run(plan))
        scheduler.check_invariants()
        if len(sequences) == 25 and not scheduler.has_work:
            break
    assert not scheduler.has_work, "work is left"


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32), num_slots=st.integers(1, 3))
def test_an_endless_stream_for_resident_adapters_starves_no_other(seed: int, num_slots: int) -> None:
    chance = random.Random(seed)
    scheduler = make_scheduler(60, max_num_batched_tokens=64, max_num_seqs=8, max_loras=num_slots)
    most_tokens, number = 12, 0

    def fill() -> None:
        nonlocal number
        while len(scheduler.waiting) < 6:
            number += 1
            sequence = make_sequence(number, [number % 50] * 5, max_tokens=chance.randint(1, most_tokens))
            scheduler.submit(with_adapter(sequence, ADAPTERS[chance.randrange(num_slots)]))

    for _ in range(10):
        fill()
        step(scheduler)
    number += 1
    late = with_adapter(make_sequence(number, [7] * 5, max_tokens=2), ADAPTERS[5])
    scheduler.submit(late)
    ahead = len(scheduler.waiting)
    num_steps = 0
    while not late.is_over:
        fill()
        step(scheduler)
        num_steps += 1
        assert num_steps <= most_tokens * (ahead + 3)


def test_others_pass_a_sequence_that_lacks_a_slot_until_one_becomes_free() -> None:
    scheduler = make_scheduler(60, max_num_seqs=8, max_loras=1)
    prompts = [(ADAPTERS[0], 9), (ADAPTERS[1], 2), (None, 2), (ADAPTERS[0], 2)]
    first, other, bare, behind = (
        with_adapter(make_sequence(number, [5 + number] * 4, max_tokens=count), adapter)
        for number, (adapter, count) in enumerate(prompts)
    )
    for sequence in (first, other, bare, behind):
        scheduler.submit(sequence)
    ends: list[Sequence] = []
    while scheduler.has_work:
        step(scheduler)
        ends += [one for one in (first, other, bare, behind) if one.is_over and one not in ends]
    assert ends == [bare, first, other, behind]


def test_the_least_recently_used_adapter_goes_first_and_none_in_use() -> None:
    slots = AdapterSlots(2)
    a, b, c, d = ADAPTERS[:4]
    (slot_a, _), (slot_b, _) = slots.place([a, b, a], [])
    assert slots.place([a], []) == ((slot_a, a),)
    assert slots.place([c], [a]) == ((slot_b, c),)
    assert slots.place([d], [c]) == ((slot_a, d),)
    assert {adapter.fingerprint for adapter in slots.resident} == {c.fingerprint, d.fingerprint}


def test_the_book_serves_content_that_was_added_and_measures_loads() -> None:
    slots = AdapterSlots(2)
    book, (a, b) = AdapterBook(slots), ADAPTERS[:2]
    book.add(a)
    again = Adapter(fingerprint=a.fingerprint, rank=4, num_bytes=100)
    book.add(again)
    assert (book.find(""), book.find(a.fingerprint)) == (None, a)
    with pytest.raises(UnknownAdapter):
        book.find(b.fingerprint)
    book.remove("")
    slots.place([a], [])
    book.note_loads({a.fingerprint: 0.1})
    book.note_loads({a.fingerprint: 0.2})
    assert (book.num_loads, book.average_seconds) == (2, pytest.approx(0.13))
    book.note_request(a.fingerprint, now=30.0)
    running = [with_adapter(make_sequence(0, [1]), a), make_sequence(1, [1])]
    (resident,) = book.resident(running, now=30.0)
    assert resident.requests_per_second == pytest.approx(1 / RATE_SECONDS)
    assert (resident.load_seconds, resident.running, resident.rank) == (0.2, 1, 4)
    book.remove(a.fingerprint)
    with pytest.raises(UnknownAdapter):
        book.find(a.fingerprint)


def test_a_simulated_device_takes_time_for_a_load_and_none_for_a_hit() -> None:
    slept: list[float] = []
    runner = SimulatedRunner(
        vocab_size=50, prefill_tokens_per_second=1e9, step_seconds=0.0, sleep=slept.append
    )
    scheduler = make_scheduler(20, max_loras=1)
    seconds = ADAPTERS[0].num_bytes / ADAPTER_BYTES_PER_SECOND
    for number, adapter in enumerate((ADAPTERS[0], ADAPTERS[0], ADAPTERS[1])):
        scheduler.submit(with_adapter(make_sequence(number, [5], max_tokens=1), adapter))
        plan = scheduler.plan()
        tokens = runner.execute(plan)
        scheduler.commit(plan, tokens)
        assert tokens.adapter_seconds == ({} if number == 1 else {adapter.fingerprint: seconds})
    assert sum(slept) == pytest.approx(2 * seconds)


def named(name: str) -> Adapter:
    return Adapter(fingerprint=name, rank=8, num_bytes=1)


EVENTS = st.lists(st.tuples(st.floats(0, 100), st.sampled_from("abc")), max_size=30)


@given(EVENTS, st.floats(0, 1000))
def test_a_rate_is_the_decayed_count_of_requests_and_the_order_of_rates_needs_no_clock(
    events: list[tuple[float, str]], later: float
) -> None:
    rates, now, counts = AdapterRates(), 1e6, dict.fromkeys("abc", 0.0)
    for pause, name in events:
        now += pause
        counts = {known: count * exp(-pause / RATE_SECONDS) for known, count in counts.items()}
        counts[name] += 1
        rates.note(name, now)
    for name, count in counts.items():
        assert rates.per_second(name, now) == pytest.approx(count / RATE_SECONDS, rel=1e-6)
    at = now + later
    by_rate = {name: rates.per_second(name, at) for name in "abc"}
    by_score = sorted("abc", key=rates.score)
    assert [by_rate[name] for name in by_score] == sorted(by_rate.values())


def test_the_rarest_idle_adapter_makes_room_and_of_equal_ones_the_least_recently_used() -> None:
    slots = AdapterSlots(3)
    often, rare, used = named("often"), named("rare"), named("used")
    for one in (often, rare, used):
        slots.place([one], [])
    for now in range(5):
        slots.rates.note("often", float(now))
    slots.rates.note("rare", 5.0)
    slots.place([named("new")], in_use=[used])
    assert {one.fingerprint for one in slots.resident} == {"often", "used", "new"}
    slots.place([named("newer")], in_use=[])
    assert {one.fingerprint for one in slots.resident} == {"often", "new", "newer"}, "`used` is oldest"
