"""The choice of the victim, the order in which requests run, and host memory that keeps computed blocks."""

from dataclasses import replace
from typing import Any

import pytest
from blockyard.worker.scheduling.preemption import Elsewhere, waiting_seconds
from blockyard.worker.scheduling.scheduler import Scheduler
from blockyard.worker.sequences.sequence import Sequence, SequenceState
from blockyard.worker.sequences.step_plan import FAILED_TOKEN

from .scheduling import (
    make_scheduler,
    make_sequence,
    measured,
    prompt,
    rows,
    run,
    run_to_end,
    sampled,
    step,
    submit,
    victims_of,
)

SWAPS: dict[str, Any] = {"max_model_len": 112, "preemption": "swap", "swap_blocks": 40}


def crowd(scheduler: Scheduler, count: int = 4) -> list[Sequence]:
    """Submit more sequences than fit at once after each has grown."""
    return [submit(scheduler, number, 40, start=11 * number, max_tokens=60) for number in range(count)]


@pytest.mark.parametrize(("mode", "swap_blocks"), [("recompute", 0), ("swap", 40), ("swap", 3), ("auto", 40)])
def test_outputs_are_the_same_after_any_preemption(mode: str, swap_blocks: int) -> None:
    tokens = []
    for num_blocks in (100, 12):
        scheduler = make_scheduler(num_blocks, max_model_len=112, preemption=mode, swap_blocks=swap_blocks)
        measured(scheduler, prefill=10.0, swap=1000.0)
        sequences = crowd(scheduler)
        run_to_end(scheduler)
        tokens.append([sequence.tokens for sequence in sequences])
    assert tokens[0] == tokens[1]
    assert scheduler.num_preemptions > 0
    assert (scheduler.num_swaps > 0) == (swap_blocks > 3)


def test_what_was_swapped_out_is_not_computed_again() -> None:
    scheduler = make_scheduler(12, **SWAPS)
    sequences = crowd(scheduler)
    # The last token of each is never computed.
    assert run_to_end(scheduler) == sum(len(sequence.tokens) - 1 for sequence in sequences)
    assert scheduler.num_swaps > 0


def test_swapping_moves_what_only_the_victim_has() -> None:
    scheduler = make_scheduler(64, preemption="swap", swap_blocks=8)
    for number in range(2):
        submit(scheduler, number, [*prompt(64), 3 + number], max_tokens=20)
    step(scheduler)
    (victim,) = victims_of(scheduler)
    assert victim.swaps
    scheduler._preempt(victim)
    assert len(scheduler.plan().to_host) == 1


def test_auto_swaps_where_that_is_quicker() -> None:
    scheduler = make_scheduler(64, preemption="auto", swap_blocks=8)
    for number in range(2):
        submit(scheduler, number, 48, start=9 * number, max_tokens=20)
    step(scheduler)
    for prefill, swap, swaps in ((480.0, 40.0, True), (480.0, 20.0, False), (0.0, 40.0, False)):
        measured(scheduler, prefill=prefill, swap=swap)
        assert [victim.swaps for victim in victims_of(scheduler)] == [swaps]


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_no_sequence_gives_way_more_often_than_the_bound(bound: int) -> None:
    scheduler = make_scheduler(14, max_model_len=112, max_preemptions=bound)
    sequences = crowd(scheduler, count=10)
    run_to_end(scheduler)
    assert max(sequence.num_preemptions for sequence in sequences) <= bound
    assert all(sequence.state is SequenceState.FINISHED for sequence in sequences)


def test_the_less_urgent_gives_way_first() -> None:
    scheduler = make_scheduler(64)
    for number, priority in enumerate((0, 5, 0)):
        submit(scheduler, number, 40, start=9 * number, max_tokens=20, priority=priority)
    step(scheduler)
    (victim,) = victims_of(scheduler)
    assert [sequence.sequence_id for sequence in victim.sequences] == [1]


def test_the_more_urgent_is_admitted_first_and_age_makes_up_for_priority() -> None:
    scheduler = make_scheduler(64, max_num_seqs=1)
    for number, rank in enumerate((3.0, 1.0, 2.0)):
        sequence = make_sequence(number, prompt(20, start=9 * number), max_tokens=1)
        sequence.rank = rank
        scheduler.submit(sequence)
    assert [list(rows(scheduler)) for _ in range(3)] == [[1], [2], [0]]


def test_prompts_beside_decodes_take_no_more_than_they_may() -> None:
    scheduler = make_scheduler(600, max_num_batched_tokens=2048)
    submit(scheduler, 0, 20, max_tokens=30)
    step(scheduler)
    scheduler.mixed_steps.limit_tokens = 100
    submit(scheduler, 1, 450, start=7, max_tokens=3)
    assert rows(scheduler) == {0: 1, 1: 100}


def churn(scheduler: Scheduler, groups: int, rounds: int) -> int:
    """Compute prompts of several groups in turn, more than the pool holds. Return how many tokens were computed."""
    computed = 0
    for number in range(rounds * groups):
        submit(scheduler, number, 65, start=13 * (number % groups), max_tokens=1)
        computed += run_to_end(scheduler)
    return computed


def test_evicted_blocks_come_back_from_host_memory() -> None:
    without = churn(make_scheduler(10), groups=4, rounds=3)
    scheduler = make_scheduler(10, host_cache_blocks=32)
    with_host = churn(scheduler, groups=4, rounds=3)
    assert without == 3 * 4 * 65
    assert with_host == 4 * 65 + 2 * 4
    assert scheduler.pool.num_evictions > 0


def test_a_host_block_that_cannot_be_read_fails_nobody_a_second_time() -> None:
    scheduler = make_scheduler(40, host_cache_blocks=32, max_model_len=160)
    churn(scheduler, groups=10, rounds=1)
    submit(scheduler, 99, 150, start=45, max_tokens=1)
    scheduler.commit(scheduler.plan(), sampled(FAILED_TOKEN))
    submit(scheduler, 100, 65, start=0, max_tokens=1)
    plan = scheduler.plan()
    assert plan.from_host
    assert not plan.to_host, "there is room on the GPU"
    scheduler.fail(plan)
    scheduler.check_invariants()
    again = submit(scheduler, 101, 65, start=0, max_tokens=1)
    plan = scheduler.plan()
    assert not plan.from_host
    scheduler.commit(plan, run(plan))
    assert again.state is SequenceState.FINISHED


def test_a_step_that_fails_while_it_swaps_leaves_the_victim_to_be_computed_again() -> None:
    scheduler = make_scheduler(12, **SWAPS)
    sequences = crowd(scheduler)
    while not (plan := scheduler.plan()).to_host:
        scheduler.commit(plan, run(plan))
    scheduler.fail(plan)
    scheduler.check_invariants()
    assert not any(sequence.swapped for sequence in sequences)
    run_to_end(scheduler)
    assert SequenceState.FINISHED in {sequence.state for sequence in sequences}


def test_a_failed_step_forgets_what_host_memory_was_to_hold() -> None:
    scheduler = make_scheduler(6, max_model_len=96, host_cache_blocks=8)
    churn(scheduler, groups=2, rounds=1)
    submit(scheduler, 100, 65, start=45, max_tokens=1)
    plan = scheduler.plan()
    assert plan.to_host
    scheduler.fail(plan)
    scheduler.check_invariants()
    assert scheduler.host_cache is not None
    assert len(scheduler.host_cache) == 0


def test_a_victim_whose_prompt_another_has_computed_meanwhile_takes_that() -> None:
    swaps: dict[str, Any] = {"preemption": "swap", "swap_blocks": 8}
    scheduler = make_scheduler(40, max_num_batched_tokens=48, max_num_seqs=4, **swaps)
    submit(scheduler, 0, 20, start=30, max_tokens=60)
    victim = submit(scheduler, 1, 160, max_tokens=4)
    step(scheduler)
    (chosen,) = victims_of(scheduler)
    scheduler._preempt(chosen)
    assert victim.swapped is not None
    helper = make_sequence(2, prompt(160), max_tokens=1)
    helper.rank = -1.0
    scheduler.submit(helper)
    run_to_end(scheduler)
    assert len(victim.tokens) == 164
    assert scheduler.tables.swap.num_free == 8


ROOM = Elsewhere(num_blocks=40, setup_seconds=0.01, blocks_per_second=1000.0)


def movers(n: int = 1, **changes: Any) -> Scheduler:
    """Return a scheduler with two decoding requests that may move, the second with `n` outputs, and another worker
    with room."""
    scheduler = make_scheduler(64, **({"preemption": "auto", "host_cache_blocks": 8} | changes))
    for number in range(2):
        outputs = {"n": n} if number else {}
        sequence = make_sequence(number, prompt(48, start=9 * number), max_tokens=20, **outputs)
        sequence.may_move = True
        scheduler.submit(sequence)
    step(scheduler)
    measured(scheduler, prefill=480.0, decode=20.0)
    scheduler.elsewhere = ROOM
    return scheduler


@pytest.mark.parametrize(
    ("changes", "room", "moves"),
    [
        ({}, ROOM, True),
        ({}, None, False),
        ({}, replace(ROOM, blocks_per_second=1.0), False),
        ({}, replace(ROOM, setup_seconds=2.0), False),
        ({}, replace(ROOM, num_blocks=4), False),
        ({"host_cache_blocks": 0}, ROOM, False),
        ({"preemption": "recompute"}, ROOM, False),
    ],
)
def test_a_victim_moves_only_where_that_costs_less_than_to_stay(
    changes: dict[str, Any], room: Elsewhere | None, moves: bool
) -> None:
    scheduler = movers(**changes)
    scheduler.elsewhere = room
    (victim,) = victims_of(scheduler)
    assert victim.moves == moves
    assert victim.sequences == (scheduler.running[1],), "never the first of all"
    scheduler.running[1].may_move = False
    assert not victims_of(scheduler)[0].moves, "its router could not continue it"


def test_a_long_wait_for_room_makes_a_slow_link_worth_it() -> None:
    scheduler = movers()
    scheduler.elsewhere = replace(ROOM, setup_seconds=0.2)
    (victim,) = victims_of(scheduler)
    rates = scheduler.mixed_steps.rates
    waiting = waiting_seconds(victim.sequences, scheduler.running, scheduler.tables, rates)
    assert waiting == pytest.approx(0.5 * 19 * 1 / 20.0)
    assert victim.moves
    rates.decode_tokens_per_second = 0.0
    assert not victims_of(scheduler)[0].moves, "an unknown wait counts as none"


def test_what_moves_is_given_back_once_and_leaves_its_blocks_cached() -> None:
    scheduler = movers()
    leaving = scheduler.running[1]
    names = leaving.names[1:]
    scheduler._preempt(victims_of(scheduler)[0])
    scheduler.check_invariants()
    assert leaving.is_over
    assert scheduler.take_given_back() == [leaving.request_id]
    assert scheduler.take_given_back() == []
    assert len(scheduler.tables.lend(names)) == len(names)
    assert (scheduler.num_moves, scheduler.num_preemptions, scheduler.num_swaps) == (1, 1, 0)
    assert scheduler.elsewhere is not None
    assert scheduler.elsewhere.num_blocks == 40 - 5, "four blocks, and one to grow"


def test_all_outputs_of_a_request_move_together() -> None:
    scheduler = movers(n=3)
    for _ in range(3):
        step(scheduler)
    (victim,) = victims_of(scheduler)
    assert victim.moves
    assert {sequence.index for sequence in victim.sequences} == {0, 1, 2}
