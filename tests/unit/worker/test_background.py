"""Background work: sequences of the lowest priority cost others nothing, and end all the same."""

from blockyard.proto.limits import MAX_PRIORITY
from blockyard.worker.scheduling.background import decodes_beside, is_background, num_before
from blockyard.worker.scheduling.decode_times import DecodeTimes
from blockyard.worker.scheduling.scheduler import Scheduler
from blockyard.worker.sequences.sequence import Sequence
from hypothesis import given
from hypothesis import strategies as st

from .scheduling import make_scheduler, make_sequence, run, step


def background(number: int, length: int = 20, **settings: int) -> Sequence:
    tokens = [100 + number] * length
    return make_sequence(1000 + number, tokens, priority=MAX_PRIORITY, **settings)


def urgent(number: int, length: int = 20, **settings: int) -> Sequence:
    return make_sequence(number, [number % 40 + 2] * length, **settings)


def rows(scheduler: Scheduler) -> dict[int, int]:
    """Plan and commit a step. Return its tokens by sequence."""
    plan = scheduler.plan()
    scheduler.commit(plan, run(plan))
    scheduler.check_invariants()
    return {int(row.sequence.sequence_id): row.num_tokens for row in plan.rows}


def test_beside_others_background_work_waits_and_then_goes_on() -> None:
    scheduler = make_scheduler(64)
    scheduler.submit(background(0, max_tokens=20))
    assert rows(scheduler) == {1000: 20}
    assert rows(scheduler) == {1000: 1}
    scheduler.submit(urgent(1, max_tokens=3))
    scheduler.submit(background(1))
    assert rows(scheduler) == {1: 20}
    assert rows(scheduler) == {1: 1}
    assert rows(scheduler) == {1: 1}
    assert rows(scheduler) == {1000: 1, 1001: 20}


def test_a_step_takes_the_decodes_that_lengthen_it_by_little() -> None:
    scheduler = make_scheduler(64)
    times = scheduler.mixed_steps.decode_times
    for decodes, seconds in ((1, 0.010), (2, 0.0101), (4, 0.0102), (8, 0.02)):
        times.observe(decodes, seconds)
    for number in range(8):
        scheduler.submit(background(number, max_tokens=20))
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
    by_blocks = make_scheduler(16)
    by_blocks.submit(background(0, length=120, max_tokens=100))
    by_blocks.submit(background(1, length=100, max_tokens=100))
    by_slots = make_scheduler(64, max_num_seqs=2)
    for number in range(2):
        by_slots.submit(background(number, max_tokens=100))
    for scheduler, length in ((by_blocks, 100), (by_slots, 20)):
        for _ in range(4):
            rows(scheduler)
        assert len(scheduler.running) == 2
        scheduler.submit(urgent(1, length=length, max_tokens=4))
        assert rows(scheduler) == {1: length}
        assert scheduler.num_preemptions == 1
        ends = {int(one.sequence_id) for one in (*scheduler.running, *scheduler.waiting)}
        while scheduler.has_work:
            ends -= {
                int(update.sequence.sequence_id) for update in step(scheduler) if update.sequence.is_over
            }
        assert not ends


def test_background_work_alone_takes_short_steps() -> None:
    scheduler = make_scheduler(64)
    scheduler.submit(background(0, length=600))
    assert rows(scheduler) == {1000: 64}, "before anything is measured"
    scheduler.mixed_steps.rates.prefill_tokens_per_second = 20_000.0
    assert rows(scheduler) == {1000: 200}
    scheduler.submit(urgent(1, length=300))
    assert rows(scheduler) == {1: 300}


def test_no_prompt_of_background_work_is_computed_beside_a_decode_however_cheap_decodes_are() -> None:
    scheduler = make_scheduler(64)
    for decodes in (1, 2, 4):
        scheduler.mixed_steps.decode_times.observe(decodes, 0.010)
    scheduler.submit(background(0, length=300, max_tokens=4))
    assert rows(scheduler) == {1000: 64}
    scheduler.submit(urgent(1, max_tokens=3))
    assert rows(scheduler) == {1: 20}
    assert rows(scheduler) == {1: 1}
    assert rows(scheduler) == {1: 1}
    assert rows(scheduler) == {1000: 64}


def test_background_work_runs_while_what_it_waits_for_cannot() -> None:
    scheduler = make_scheduler(64)
    scheduler.submit(background(0, max_tokens=20))
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
    scheduler.mixed_steps.rates.prefill_tokens_per_second = 8_000.0
    held: set[int] = set()
    scheduler.must_wait_for_mask = lambda sequence: int(sequence.sequence_id) in held

    def check_step() -> None:
        plan = scheduler.plan()
        if all(is_background(row.sequence) for row in plan.rows):
            assert sum(row.num_tokens for row in plan.rows if row.num_tokens > 1) <= 80
        scheduler.commit(plan, run(plan))
        scheduler.check_invariants()

    for number, (kind, length, max_tokens, pause) in enumerate(arrivals):
        if kind == "background":
            scheduler.submit(background(number, length=length, max_tokens=max_tokens))
        else:
            sequence = urgent(number, length=length, max_tokens=max_tokens)
            if kind == "held":
                sequence.grammar = object()  # type: ignore[assignment]
                held.add(number)
            scheduler.submit(sequence)
        for _ in range(pause):
            check_step()
    held.clear()
    for _ in range(2000):
        if not scheduler.has_work:
            break
        check_step()
    assert not scheduler.has_work


def test_a_sequence_that_has_waited_for_its_priority_is_no_longer_background() -> None:
    scheduler = make_scheduler(64)
    old = background(0, max_tokens=20)
    scheduler.submit(old)
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
    old = background(0)
    old.rank = 5.0
    younger = urgent(2)
    younger.rank = 6.0
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
        for number, (is_urgent, length, max_tokens, pause) in enumerate(arrivals):
            if is_urgent:
                scheduler.submit(urgent(number, length=length, max_tokens=max_tokens))
            elif with_background:
                scheduler.submit(background(number, length=length, max_tokens=max_tokens))
            for _ in range(pause):
                now += 1
                for update in step(scheduler):
                    seen.setdefault(int(update.sequence.sequence_id), []).append(now)
        while scheduler.has_work:
            now += 1
            assert now < 5000
            for update in step(scheduler):
                seen.setdefault(int(update.sequence.sequence_id), []).append(now)
            scheduler.check_invariants()
        return seen

    alone, beside = steps_of(with_background=False), steps_of(with_background=True)
    assert len(beside) == len(arrivals)
    assert {number: beside[number] for number in alone} == alone


def test_waiting_background_work_fills_no_place_of_another_request() -> None:
    waiting = [urgent(1), *(background(number) for number in range(3))]
    assert (num_before(waiting, 0), num_before(waiting, MAX_PRIORITY)) == (1, 4)
