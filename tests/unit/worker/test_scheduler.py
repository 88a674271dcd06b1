"""The plan of a step: budget, order, sharing, preemption, cancellation, and one step in flight."""

import pytest
from blockyard.worker.scheduling.scheduler import CapacityError
from blockyard.worker.sequences.sequence import FinishReason, SequenceState
from blockyard.worker.sequences.step_plan import FAILED_TOKEN

from .scheduling import make_scheduler, make_sequence, run, run_to_end, sampled, step, victim_of


def prompt(length: int, start: int = 1) -> list[int]:
    return [start + index % 40 for index in range(length)]


def test_decodes_share_a_step_with_a_prompt() -> None:
    scheduler = make_scheduler(64)
    scheduler.submit(make_sequence(0, prompt(20)))
    step(scheduler)
    scheduler.submit(make_sequence(1, prompt(30, start=7)))
    plan = scheduler.plan()
    assert [(row.sequence.sequence_id, row.num_tokens) for row in plan.rows] == [(0, 1), (1, 30)]


def test_decode_is_never_starved_by_prefill() -> None:
    scheduler = make_scheduler(128, max_num_batched_tokens=32)
    decoding = make_sequence(0, prompt(8), max_tokens=30)
    scheduler.submit(decoding)
    step(scheduler)
    scheduler.submit(make_sequence(1, prompt(600, start=3)))
    for expected in range(2, 18):
        step(scheduler)
        assert decoding.num_generated == expected


def test_a_long_prompt_is_computed_in_chunks_within_the_budget() -> None:
    scheduler = make_scheduler(64, max_num_batched_tokens=48)
    sequence = make_sequence(0, prompt(100))
    scheduler.submit(sequence)
    chunks = []
    while not sequence.num_generated:
        plan = scheduler.plan()
        chunks.append((plan.num_tokens, plan.rows[0].samples))
        scheduler.commit(plan, run(plan))
    assert chunks == [(48, False), (48, False), (4, True)]


def test_decode_allocates_only_when_the_tail_overflows() -> None:
    scheduler = make_scheduler(8)
    sequence = make_sequence(0, prompt(14), max_tokens=20)
    scheduler.submit(sequence)
    sizes = []
    while not sequence.is_over:
        step(scheduler)
        sizes.append((sequence.num_computed, len(sequence.block_table)))
    assert all(blocks == -(-computed // 16) for computed, blocks in sizes[:-1])
    assert sizes[-1][1] == 0


def test_context_length_equals_written_positions_and_the_table_rebuilds_the_dense_order() -> None:
    scheduler = make_scheduler(32, max_num_batched_tokens=24)
    written: dict[tuple[int, int], tuple[int, int]] = {}
    sequences = [make_sequence(n, prompt(30 + 5 * n, start=n + 1), max_tokens=12) for n in range(3)]
    for sequence in sequences:
        scheduler.submit(sequence)
    while scheduler.has_work:
        plan = scheduler.plan()
        for row in plan.rows:
            for position in range(row.start, row.end):
                slot = (row.sequence.block_table[position // 16], position % 16)
                written[slot] = (row.sequence.sequence_id, position)
            dense = [
                written[row.sequence.block_table[position // 16], position % 16]
                for position in range(row.sequence.num_scheduled)
            ]
            assert dense == [(row.sequence.sequence_id, position) for position in range(row.end)]
        scheduler.commit(plan, run(plan))
        scheduler.check_invariants()


def test_equal_prompts_share_within_one_step() -> None:
    scheduler = make_scheduler(64)
    first, second = make_sequence(0, prompt(40)), make_sequence(1, prompt(40))
    scheduler.submit(first)
    scheduler.submit(second)
    plan = scheduler.plan()
    assert [row.num_tokens for row in plan.rows] == [40, 8]
    assert first.block_table[:2] == second.block_table[:2]
    scheduler.commit(plan, run(plan))
    scheduler.check_invariants()
    assert first.tokens == second.tokens
    assert scheduler.cache.take_changes().stored == tuple(first.names[1:3])


def test_a_fully_cached_aligned_prompt_recomputes_its_last_block() -> None:
    scheduler = make_scheduler(16)
    scheduler.submit(make_sequence(0, prompt(32), max_tokens=1))
    run_to_end(scheduler)
    again = make_sequence(1, prompt(32), max_tokens=1)
    scheduler.submit(again)
    plan = scheduler.plan()
    assert (plan.num_tokens, again.cached_tokens) == (16, 16)


def test_generated_blocks_are_found_by_the_next_turn_of_a_chat() -> None:
    scheduler = make_scheduler(32)
    first = make_sequence(0, prompt(20), max_tokens=20)
    scheduler.submit(first)
    run_to_end(scheduler)
    second = make_sequence(1, [*first.tokens, *prompt(10)], max_tokens=1)
    scheduler.submit(second)
    step(scheduler)
    assert second.cached_tokens == 32


def test_preemption_recomputes_and_changes_no_token() -> None:
    alone = []
    for number in range(4):
        scheduler = make_scheduler(16)
        sequence = make_sequence(number, prompt(40, start=number * 3 + 1), max_tokens=60)
        scheduler.submit(sequence)
        run_to_end(scheduler)
        alone.append(sequence.tokens)
    scheduler = make_scheduler(16)
    together = [make_sequence(n, prompt(40, start=n * 3 + 1), max_tokens=60) for n in range(4)]
    for sequence in together:
        scheduler.submit(sequence)
    run_to_end(scheduler)
    assert scheduler.num_preemptions > 0
    assert [sequence.tokens for sequence in together] == alone


def test_the_oldest_is_never_the_victim() -> None:
    scheduler = make_scheduler(16)
    sequences = [make_sequence(n, prompt(40, start=n * 3 + 1), max_tokens=90) for n in range(4)]
    for sequence in sequences:
        scheduler.submit(sequence)
    run_to_end(scheduler)
    assert sequences[0].num_preemptions == 0
    assert scheduler.num_preemptions > 0


def test_a_sequence_that_frees_nothing_is_no_victim() -> None:
    scheduler = make_scheduler(32)
    shared = prompt(64)
    sequences = [make_sequence(number, [*shared, 1 + number], max_tokens=40) for number in range(3)]
    for sequence in sequences:
        scheduler.submit(sequence)
    step(scheduler)
    victim = victim_of(scheduler)
    assert victim is not None
    assert victim.sequences == (sequences[2],)
    for sequence in sequences[1:]:
        scheduler.pool.share(sequence.block_table)
    assert victim_of(scheduler) is None


def test_the_victim_has_the_least_to_recompute_for_each_block_it_frees() -> None:
    scheduler = make_scheduler(64)
    shared = prompt(64)
    oldest = make_sequence(0, shared, max_tokens=40)
    long_alone = make_sequence(1, prompt(160, start=9), max_tokens=40)
    nearly_empty_tail = make_sequence(2, [*shared, 3], max_tokens=40)
    for sequence in (oldest, long_alone, nearly_empty_tail):
        scheduler.submit(sequence)
    step(scheduler)
    victim = victim_of(scheduler)
    assert victim is not None
    assert victim.sequences == (nearly_empty_tail,)


def test_a_budget_below_the_running_sequences_is_refused() -> None:
    with pytest.raises(ValueError, match="never decode"):
        make_scheduler(16, max_num_batched_tokens=8, max_num_seqs=9)


def test_what_waits_counts_only_what_is_not_cached() -> None:
    scheduler = make_scheduler(32)
    scheduler.submit(make_sequence(0, prompt(64), max_tokens=1))
    run_to_end(scheduler)
    scheduler.submit(make_sequence(1, [*prompt(64), 5]))
    assert scheduler.queued_prefill_tokens == 1


def test_a_row_that_fails_takes_no_name_from_those_who_share_its_blocks() -> None:
    scheduler = make_scheduler(16)
    bad = make_sequence(0, prompt(40))
    good = make_sequence(1, [*prompt(40), *prompt(20, start=30)])
    scheduler.submit(bad)
    scheduler.submit(good)
    plan = scheduler.plan()
    assert good.block_table[:2] == bad.block_table[:2]
    scheduler.commit(plan, sampled(*(FAILED_TOKEN if row.sequence is bad else 7 for row in plan.rows)))
    scheduler.check_invariants()
    assert scheduler.cache.take_changes().stored == tuple(good.names[1:4])


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_cancel_returns_every_block_in_any_state(steps: int) -> None:
    scheduler = make_scheduler(16, max_num_batched_tokens=24)
    sequence = make_sequence(0, prompt(60))
    scheduler.submit(sequence)
    for _ in range(steps):
        step(scheduler)
    scheduler.cancel(sequence)
    scheduler.cancel(sequence)
    scheduler.check_invariants()
    assert scheduler.pool.num_used == 0
    assert not scheduler.has_work


def test_blocks_of_a_step_in_flight_return_after_it() -> None:
    scheduler = make_scheduler(8)
    sequence = make_sequence(0, prompt(20))
    scheduler.submit(sequence)
    plan = scheduler.plan()
    scheduler.cancel(sequence)
    assert scheduler.pool.num_used == 2
    assert scheduler.commit(plan, run(plan)) == []
    scheduler.check_invariants()
    assert scheduler.pool.num_used == 0


def test_one_step_may_be_in_flight_while_the_next_is_planned() -> None:
    reference = make_sequence(0, prompt(20), max_tokens=30)
    scheduler = make_scheduler(16)
    scheduler.submit(reference)
    run_to_end(scheduler)

    scheduler = make_scheduler(16)
    sequence = make_sequence(0, prompt(20), max_tokens=30)
    scheduler.submit(sequence)
    in_flight = scheduler.plan()
    while scheduler.has_work:
        following = scheduler.plan()
        scheduler.commit(in_flight, run(in_flight))
        scheduler.check_invariants()
        in_flight = following
    assert sequence.tokens == reference.tokens


def test_a_failed_step_ends_its_requests_and_leaves_nothing_to_be_found() -> None:
    scheduler = make_scheduler(8)
    sequence = make_sequence(0, prompt(40))
    scheduler.submit(sequence)
    scheduler.fail(scheduler.plan())
    scheduler.check_invariants()
    assert sequence.state is SequenceState.FAILED
    assert scheduler.pool.num_free == 8
    assert scheduler.cache.take_changes().stored == ()


def test_logits_that_are_not_finite_fail_one_row_alone() -> None:
    scheduler = make_scheduler(16)
    bad, good = make_sequence(0, prompt(20)), make_sequence(1, prompt(20, start=9))
    scheduler.submit(bad)
    scheduler.submit(good)
    plan = scheduler.plan()
    scheduler.commit(plan, sampled(FAILED_TOKEN, *run(plan).tokens[1:]))
    scheduler.check_invariants()
    run_to_end(scheduler)
    assert (bad.state, good.state) == (SequenceState.FAILED, SequenceState.FINISHED)
    assert scheduler.cache.match(bad.names[1:]) == []


def test_stop_tokens_wait_for_min_tokens() -> None:
    scheduler = make_scheduler(16)
    every_token = frozenset(range(60))
    sequence = make_sequence(0, prompt(8), max_tokens=9, min_tokens=5, stop_token_ids=every_token)
    scheduler.submit(sequence)
    run_to_end(scheduler)
    assert (sequence.num_generated, sequence.finish_reason) == (5, FinishReason.STOP)


def test_what_can_never_fit_is_refused_at_submit() -> None:
    scheduler = make_scheduler(4)
    with pytest.raises(CapacityError):
        scheduler.submit(make_sequence(0, prompt(60), max_tokens=10))
    assert not scheduler.has_work


def test_a_pool_smaller_than_one_full_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="fewer than max_model_len"):
        make_scheduler(4, max_model_len=65)


def test_a_prefix_that_several_waiting_prompts_share_is_queued_once() -> None:
    scheduler = make_scheduler(64)
    shared = [7] * 100
    scheduler.submit(make_sequence(0, [*shared, 1]))
    scheduler.submit(make_sequence(1, [*shared, 2]))
    scheduler.submit(make_sequence(2, [8] * 50))
    # 100 tokens are 6 full blocks of 16.
    assert scheduler.queued_prefill_tokens == 101 + (101 - 96) + 50
    scheduler.submit(make_sequence(3, shared[:96]))
    # The last token of a prompt is always computed, with its block.
    assert scheduler.waiting[-1].cached_at_submit == 80


@pytest.mark.parametrize("priority", [-1, 0, 1])
def test_a_long_prompt_holds_up_what_is_less_urgent_and_nothing_else(priority: int) -> None:
    scheduler = make_scheduler(128, max_num_batched_tokens=32)
    long = make_sequence(0, prompt(600))
    scheduler.submit(long)
    step(scheduler)
    other = make_sequence(1, prompt(32, start=3), priority=priority)
    scheduler.submit(other)
    step(scheduler)
    assert other.num_generated == (priority < 0)
    assert long.num_computed == (32 if priority < 0 else 64)
    while not long.num_generated:
        step(scheduler)
    assert other.num_generated == (7 if priority < 0 else 0) or other.is_over
