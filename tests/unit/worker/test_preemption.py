"""The choice of the victim, the order in which requests run, and host memory that keeps computed blocks."""

from dataclasses import replace
from typing import Any

import pytest
from blockyard.worker.scheduling.preemption import Elsewhere, waiting_seconds
from blockyard.worker.scheduling.scheduler import Scheduler
from blockyard.worker.sequences.sequence import Sequence, SequenceState
from blockyard.worker.sequences.step_plan import FAILED_TOKEN

from .scheduling import make_scheduler, make_sequence, run, run_to_end, sampled, step, victim_of


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start + index) % 50 + 1 for index in range(length)]


def crowd(scheduler: Scheduler, count: int = 4, **settings: int) -> list[Sequence]:
    """Submit more sequences than fit at once after each has grown."""
    sequences = [
        make_sequence(number, prompt(40, start=11 * number), max_tokens=60, **settings)
        for number in range(count)
    ]
    for sequence in sequences:
        scheduler.submit(sequence)
    return sequences


@pytest.mark.parametrize(("mode", "swap_blocks"), [("recompute", 0), ("swap", 40), ("swap", 3), ("auto", 40)])
def test_outputs_are_the_same_after_any_preemption(mode: str, swap_blocks: int) -> None:
    tokens = []
    for num_blocks in (100, 12):
        scheduler = make_scheduler(num_blocks, max_model_len=112, preemption=mode, swap_blocks=swap_blocks)
        (
            scheduler.mixed_steps.rates.prefill_tokens_per_second,
            scheduler.mixed_steps.rates.swap_blocks_per_second,
        ) = 10.0, 1000.0
        sequences = crowd(scheduler)
        run_to_end(scheduler)
        tokens.append([sequence.tokens for sequence in sequences])
    assert tokens[0] == tokens[1]
    assert scheduler.num_preemptions > 0
    assert (scheduler.num_swaps > 0) == (swap_blocks > 3)


def test_what_was_swapped_out_is_not_computed_again() -> None:
    scheduler = make_scheduler(12, max_model_len=112, preemption="swap", swap_blocks=40)
    sequences = crowd(scheduler)
    computed = 0
    while scheduler.has_work:
        plan = scheduler.plan()
        computed += plan.num_tokens
        scheduler.commit(plan, run(plan))
        scheduler.check_invariants()
    assert scheduler.num_swaps > 0
    # The last token of each is never computed.
    assert computed == sum(len(sequence.tokens) - 1 for sequence in sequences)


def test_swapping_moves_what_only_the_victim_has() -> None:
    scheduler = make_scheduler(64, preemption="swap", swap_blocks=8)
    shared = prompt(64)
    for number in range(2):
        scheduler.submit(make_sequence(number, [*shared, 3 + number], max_tokens=20))
    step(scheduler)
    victim = victim_of(scheduler)
    assert victim is not None
    assert victim.swaps
    scheduler._preempt(victim)
    assert len(scheduler.plan().to_host) == 1


def test_auto_swaps_where_that_is_quicker() -> None:
    scheduler = make_scheduler(64, preemption="auto", swap_blocks=8)
    for number in range(2):
        scheduler.submit(make_sequence(number, prompt(48, start=9 * number), max_tokens=20))
    step(scheduler)
    for prefill, swap, swaps in ((480.0, 40.0, True), (480.0, 20.0, False), (0.0, 40.0, False)):
        (
            scheduler.mixed_steps.rates.prefill_tokens_per_second,
            scheduler.mixed_steps.rates.swap_blocks_per_second,
        ) = prefill, swap
        victim = victim_of(scheduler)
        assert victim is not None
        assert victim.swaps is swaps


def test_a_step_that_fails_while_it_swaps_leaves_the_victim_to_be_computed_again() -> None:
    scheduler = make_scheduler(12, max_model_len=112, preemption="swap", swap_blocks=40)
    sequences = crowd(scheduler)
    while not (plan := scheduler.plan()).to_host:
        scheduler.commit(plan, run(plan))
    scheduler.fail(plan)
    scheduler.check_invariants()
    assert not any(sequence.swapped for sequence in sequences)
    run_to_end(scheduler)
    assert SequenceState.FINISHED in {sequence.state for sequence in sequences}


def test_cancelling_a_swapped_sequence_frees_its_host_memory() -> None:
    scheduler = make_scheduler(12, max_model_len=112, preemption="swap", swap_blocks=40)
    sequences = crowd(scheduler)
    while not any(sequence.swapped for sequence in sequences):
        step(scheduler)
    for sequence in sequences:
        scheduler.cancel(sequence)
    scheduler.check_invariants()
    assert scheduler.tables.swap.num_free == 40


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
        scheduler.submit(
            make_sequence(number, prompt(40, start=9 * number), max_tokens=20, priority=priority)
        )
    step(scheduler)
    victim = victim_of(scheduler)
    assert victim is not None
    assert [sequence.sequence_id for sequence in victim.sequences] == [1]


def test_the_more_urgent_is_admitted_first_and_age_makes_up_for_priority() -> None:
    scheduler = make_scheduler(64, max_num_seqs=1)
    for number, rank in enumerate((3.0, 1.0, 2.0)):
        sequence = make_sequence(number, prompt(20, start=9 * number), max_tokens=1)
        sequence.rank = rank
        scheduler.submit(sequence)
    order = []
    while scheduler.has_work:
        plan = scheduler.plan()
        order += [row.sequence.sequence_id for row in plan.rows]
        scheduler.commit(plan, run(plan))
    assert order == [1, 2, 0]


def test_prompts_beside_decodes_take_no_more_than_they_may() -> None:
    scheduler = make_scheduler(600, max_num_batched_tokens=2048)
    scheduler.submit(make_sequence(0, prompt(20), max_tokens=30))
    step(scheduler)
    scheduler.mixed_steps.limit_tokens = 100
    scheduler.submit(make_sequence(1, prompt(450, start=7), max_tokens=3))
    assert [row.num_tokens for row in scheduler.plan().rows] == [1, 100]


def churn(scheduler: Scheduler, groups: int, rounds: int) -> int:
    """Prompts of several groups in turn, more than the pool holds; how many tokens were computed."""
    computed = number = 0
    for _ in range(rounds):
        for group in range(groups):
            scheduler.submit(make_sequence(number, prompt(65, start=13 * group), max_tokens=1))
            number += 1
            while scheduler.has_work:
                plan = scheduler.plan()
                computed += plan.num_tokens
                scheduler.commit(plan, run(plan))
                scheduler.check_invariants()
    return computed


def test_evicted_blocks_come_back_from_host_memory() -> None:
    without = churn(make_scheduler(10), groups=4, rounds=3)
    scheduler = make_scheduler(10, host_cache_blocks=32)
    with_host = churn(scheduler, groups=4, rounds=3)
    assert without == 3 * 4 * 65
    assert with_host == 4 * 65 + 2 * 4
    assert scheduler.pool.num_evictions > 0


def test_a_small_host_cache_evicts_leaf_first() -> None:
    scheduler = make_scheduler(6, max_model_len=96, host_cache_blocks=3)
    churn(scheduler, groups=3, rounds=2)
    assert scheduler.host_cache is not None
    assert len(scheduler.host_cache) == 3
    assert scheduler.host_cache.num_evictions > 0


def test_names_anywhere_are_those_of_both_tiers_and_closed_under_prefixes() -> None:
    scheduler = make_scheduler(8, max_model_len=128, host_cache_blocks=6)
    told: set[bytes] = set()
    on_gpu: set[bytes] = set()
    parents: dict[bytes, bytes] = {}
    for number in range(40):
        start = (7 * number * number) % 5
        sequence = make_sequence(
            number, [*prompt(33, start=start), *prompt(30, start=number % 7)], max_tokens=2
        )
        names = sequence.names
        scheduler.submit(sequence)
        while scheduler.has_work:
            step(scheduler)
            changes = scheduler.cache.take_changes()
            told = (told - set(changes.anywhere_removed)) | set(changes.anywhere_stored)
            on_gpu = (on_gpu - set(changes.removed)) | set(changes.stored)
            parents.update(zip(names[2:], names[1:-1], strict=True))
            assert on_gpu <= told
            assert all(parents[name] in told for name in told if name in parents)
    assert scheduler.host_cache is not None
    assert told == on_gpu | {name for name in parents if scheduler.host_cache.match([name])} | {  # type: ignore[list-item]
        name
        for name in parents.values()
        if scheduler.host_cache.match([name])  # type: ignore[list-item]
    }


def test_a_host_block_that_cannot_be_read_fails_nobody_a_second_time() -> None:
    scheduler = make_scheduler(40, host_cache_blocks=32, max_model_len=160)
    for group in range(10):
        scheduler.submit(make_sequence(group, prompt(65, start=13 * group), max_tokens=1))
        run_to_end(scheduler)
    scheduler.submit(make_sequence(99, prompt(150, start=45), max_tokens=1))
    scheduler.commit(scheduler.plan(), sampled(FAILED_TOKEN))
    scheduler.submit(make_sequence(100, prompt(65, start=0), max_tokens=1))
    plan = scheduler.plan()
    assert plan.from_host
    assert not plan.to_host, "there is room on the GPU"
    scheduler.fail(plan)
    scheduler.check_invariants()
    again = make_sequence(101, prompt(65, start=0), max_tokens=1)
    scheduler.submit(again)
    plan = scheduler.plan()
    assert not plan.from_host
    scheduler.commit(plan, run(plan))
    assert again.state is SequenceState.FINISHED


def test_a_failed_step_forgets_what_host_memory_was_to_hold() -> None:
    scheduler = make_scheduler(6, max_model_len=96, host_cache_blocks=8)
    churn(scheduler, groups=2, rounds=1)
    scheduler.submit(make_sequence(100, prompt(65, start=45), max_tokens=1))
    plan = scheduler.plan()
    assert plan.to_host
    scheduler.fail(plan)
    scheduler.check_invariants()
    assert scheduler.host_cache is not None
    assert len(scheduler.host_cache) == 0


def test_no_slot_of_host_memory_is_written_twice_in_one_step() -> None:
    scheduler = make_scheduler(12, max_model_len=192, host_cache_blocks=2)
    churn(scheduler, groups=2, rounds=1)
    scheduler.submit(make_sequence(100, prompt(180, start=45), max_tokens=1))
    plan = scheduler.plan()
    slots = [slot for _, slot in plan.to_host]
    assert len(slots) == len(set(slots)) == 2
    assert scheduler.pool.num_evictions > 2


def test_a_victim_whose_prompt_another_has_computed_meanwhile_takes_that() -> None:
    scheduler = make_scheduler(
        40, max_num_batched_tokens=48, preemption="swap", swap_blocks=8, max_num_seqs=4
    )
    victim = make_sequence(1, prompt(160), max_tokens=4)
    scheduler.submit(make_sequence(0, prompt(20, start=30), max_tokens=60))
    scheduler.submit(victim)
    step(scheduler)
    chosen = victim_of(scheduler)
    assert chosen is not None
    scheduler._preempt(chosen)
    assert victim.swapped is not None
    helper = make_sequence(2, prompt(160), max_tokens=1)
    helper.rank = -1.0
    scheduler.submit(helper)
    run_to_end(scheduler)
    assert len(victim.tokens) == 164
    assert scheduler.tables.swap.num_free == 8


def movers(**changes: Any) -> Scheduler:
    """Return a scheduler with two decoding sequences that may move, and another worker with room."""
    settings = {"preemption": "auto", "host_cache_blocks": 8} | changes
    scheduler = make_scheduler(64, **settings)
    for number in range(2):
        sequence = make_sequence(number, prompt(48, start=9 * number), max_tokens=20)
        sequence.may_move = True
        scheduler.submit(sequence)
    step(scheduler)
    rates = scheduler.mixed_steps.rates
    rates.prefill_tokens_per_second, rates.decode_tokens_per_second = 480.0, 20.0
    scheduler.elsewhere = ROOM
    return scheduler


ROOM = Elsewhere(num_blocks=40, setup_seconds=0.01, blocks_per_second=1000.0)


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
    victim = victim_of(scheduler)
    assert victim is not None
    assert victim.moves == moves
    assert victim.sequences == (scheduler.running[1],), "never the first of all"


def test_a_long_wait_for_room_makes_a_slow_link_worth_it() -> None:
    scheduler = movers()
    scheduler.elsewhere = replace(ROOM, setup_seconds=0.2)
    victim = victim_of(scheduler)
    assert victim is not None
    assert waiting_seconds(
        victim.sequences, scheduler.running, scheduler.tables, scheduler.mixed_steps.rates
    ) == pytest.approx(0.5 * 19 * 1 / 20.0)
    assert victim.moves
    scheduler.mixed_steps.rates.decode_tokens_per_second = 0.0
    victim = victim_of(scheduler)
    assert victim is not None
    assert not victim.moves, "an unknown wait counts as none"


def test_nothing_moves_that_its_router_could_not_continue() -> None:
    scheduler = movers()
    last = scheduler.running[1]
    last.may_move = False
    victim = victim_of(scheduler)
    assert victim is not None
    assert not victim.moves


def test_what_moves_is_given_back_once_and_leaves_its_blocks_cached() -> None:
    scheduler = movers()
    leaving = scheduler.running[1]
    names = leaving.names[1:]
    victim = victim_of(scheduler)
    assert victim is not None
    scheduler._preempt(victim)
    scheduler.check_invariants()
    assert leaving.is_over
    assert scheduler.take_given_back() == [leaving.request_id]
    assert scheduler.take_given_back() == []
    assert len(scheduler.tables.lend(names)) == len(names)
    assert (scheduler.num_moves, scheduler.num_preemptions, scheduler.num_swaps) == (1, 1, 0)
    assert scheduler.elsewhere is not None
    assert scheduler.elsewhere.num_blocks == 40 - 5, "four blocks, and one to grow"


def test_all_outputs_of_a_request_move_together() -> None:
    scheduler = make_scheduler(64, preemption="auto", host_cache_blocks=8)
    scheduler.submit(make_sequence(0, prompt(20), max_tokens=20))
    request = make_sequence(1, prompt(48, start=9), max_tokens=20, n=3)
    request.may_move = True
    scheduler.submit(request)
    step(scheduler)
    rates = scheduler.mixed_steps.rates
    rates.prefill_tokens_per_second, rates.decode_tokens_per_second = 480.0, 20.0
    scheduler.elsewhere = ROOM
    for _ in range(3):
        step(scheduler)
    victim = victim_of(scheduler)
    assert victim is not None
    assert victim.moves
    assert {sequence.index for sequence in victim.sequences} == {0, 1, 2}
