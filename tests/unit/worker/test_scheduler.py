"""The plan of a step: budget, order, sharing, preemption, cancellation, and one step in flight."""

import pytest
from blockyard.worker.scheduling.scheduler import CapacityError
from blockyard.worker.sequences.sequence import FinishReason, SequenceState
from blockyard.worker.sequences.step_plan import FAILED_TOKEN

from .scheduling import (
    make_scheduler,
    make_sequence,
    prompt,
    rows,
    run,
    run_to_end,
    sampled,
    step,
    submit,
    victims_of,
)


def test_decodes_share_a_step_with_a_prompt() -> None:
    scheduler = make_scheduler(64)
    submit(scheduler, 0, 20)
    step(scheduler)
    submit(scheduler, 1, 30, start=7)
    assert list(rows(scheduler).items()) == [(0, 1), (1, 30)]


def test_decode_is_never_starved_by_prefill() -> None:
    scheduler = make_scheduler(128, max_num_batched_tokens=32)
    decoding = submit(scheduler, 0, 8, max_tokens=30)
    step(scheduler)
    submit(scheduler, 1, 600, start=3)
    for expected in range(2, 18):
        step(scheduler)
        assert decoding.num_generated == expected


def test_a_long_prompt_is_computed_in_chunks_within_the_budget() -> None:
    scheduler = make_scheduler(64, max_num_batched_tokens=48)
    sequence = submit(scheduler, 0, 100)
    chunks = []
    while not sequence.num_generated:
        plan = scheduler.plan()
        chunks.append((plan.num_tokens, plan.rows[0].samples))
        scheduler.commit(plan, run(plan))
    assert chunks == [(48, False), (48, False), (4, True)]


def test_decode_allocates_only_when_the_tail_overflows() -> None:
    scheduler = make_scheduler(8)
    sequence = submit(scheduler, 0, 14, max_tokens=20)
    for _ in range(19):
        step(scheduler)
        assert len(sequence.block_table) == -(-sequence.num_computed // 16)
    step(scheduler)
    assert (sequence.is_over, len(sequence.block_table)) == (True, 0)


def test_equal_prompts_share_within_one_step() -> None:
    scheduler = make_scheduler(64)
    first, second = submit(scheduler, 0, 40), submit(scheduler, 1, 40)
    plan = scheduler.plan()
    assert [row.num_tokens for row in plan.rows] == [40, 8]
    assert first.block_table[:2] == second.block_table[:2]
    scheduler.commit(plan, run(plan))
    scheduler.check_invariants()
    assert first.tokens == second.tokens
    assert scheduler.cache.take_changes().stored == tuple(first.names[1:3])


def test_a_fully_cached_aligned_prompt_recomputes_its_last_block() -> None:
    scheduler = make_scheduler(16)
    submit(scheduler, 0, 32, max_tokens=1)
    run_to_end(scheduler)
    again = submit(scheduler, 1, 32, max_tokens=1)
    assert (rows(scheduler), again.cached_tokens) == ({1: 16}, 16)


def test_generated_blocks_are_found_by_the_next_turn_of_a_chat() -> None:
    scheduler = make_scheduler(32)
    first = submit(scheduler, 0, 20, max_tokens=20)
    run_to_end(scheduler)
    second = submit(scheduler, 1, [*first.tokens, *prompt(10)], max_tokens=1)
    step(scheduler)
    assert second.cached_tokens == 32


def test_the_oldest_is_never_the_victim() -> None:
    scheduler = make_scheduler(16)
    sequences = [submit(scheduler, n, 40, start=n * 3 + 1, max_tokens=90) for n in range(4)]
    run_to_end(scheduler)
    assert sequences[0].num_preemptions == 0
    assert scheduler.num_preemptions > 0


def test_a_sequence_that_frees_nothing_is_no_victim() -> None:
    scheduler = make_scheduler(32)
    sequences = [submit(scheduler, number, [*prompt(64), 1 + number], max_tokens=40) for number in range(3)]
    step(scheduler)
    (victim,) = victims_of(scheduler)
    assert victim.sequences == (sequences[2],)
    for sequence in sequences[1:]:
        scheduler.pool.share(sequence.block_table)
    assert not victims_of(scheduler)


def test_the_victim_has_the_least_to_recompute_for_each_block_it_frees() -> None:
    scheduler = make_scheduler(64)
    submit(scheduler, 0, 64, max_tokens=40)
    submit(scheduler, 1, 160, start=9, max_tokens=40)
    nearly_empty_tail = submit(scheduler, 2, [*prompt(64), 3], max_tokens=40)
    step(scheduler)
    (victim,) = victims_of(scheduler)
    assert victim.sequences == (nearly_empty_tail,)


def test_a_budget_below_the_running_sequences_and_a_pool_below_one_sequence_are_refused() -> None:
    with pytest.raises(ValueError, match="never decode"):
        make_scheduler(16, max_num_batched_tokens=8, max_num_seqs=9)
    with pytest.raises(ValueError, match="fewer than max_model_len"):
        make_scheduler(4, max_model_len=65)
    scheduler = make_scheduler(4)
    with pytest.raises(CapacityError):
        submit(scheduler, 0, 60, max_tokens=10)
    assert not scheduler.has_work


def test_what_waits_counts_only_what_is_not_cached_and_a_shared_prefix_once() -> None:
    scheduler = make_scheduler(64)
    submit(scheduler, 0, 64, max_tokens=1)
    run_to_end(scheduler)
    submit(scheduler, 1, [*prompt(64), 5])
    assert scheduler.queued_prefill_tokens == 1
    shared = [7] * 100
    submit(scheduler, 2, [*shared, 1])
    submit(scheduler, 3, [*shared, 2])
    submit(scheduler, 4, [8] * 50)
    # 100 tokens are 6 full blocks of 16.
    assert scheduler.queued_prefill_tokens == 1 + 101 + (101 - 96) + 50
    # The last token of a prompt is always computed, with its block.
    assert submit(scheduler, 5, shared[:96]).cached_at_submit == 80


def test_a_row_that_fails_takes_no_name_from_those_who_share_its_blocks() -> None:
    scheduler = make_scheduler(16)
    bad, good = submit(scheduler, 0, 40), submit(scheduler, 1, [*prompt(40), *prompt(20, start=30)])
    plan = scheduler.plan()
    assert good.block_table[:2] == bad.block_table[:2]
    scheduler.commit(plan, sampled(*(FAILED_TOKEN if row.sequence is bad else 7 for row in plan.rows)))
    scheduler.check_invariants()
    assert scheduler.cache.take_changes().stored == tuple(good.names[1:4])


def test_logits_that_are_not_finite_fail_one_row_alone() -> None:
    scheduler = make_scheduler(16)
    bad, good = submit(scheduler, 0, 20), submit(scheduler, 1, 20, start=9)
    plan = scheduler.plan()
    scheduler.commit(plan, sampled(FAILED_TOKEN, *run(plan).tokens[1:]))
    run_to_end(scheduler)
    assert (bad.state, good.state) == (SequenceState.FAILED, SequenceState.FINISHED)
    assert scheduler.cache.match(bad.names[1:]) == []


def test_a_failed_step_ends_its_requests_and_leaves_nothing_to_be_found() -> None:
    scheduler = make_scheduler(8)
    sequence = submit(scheduler, 0, 40)
    scheduler.fail(scheduler.plan())
    scheduler.check_invariants()
    assert sequence.state is SequenceState.FAILED
    assert scheduler.pool.num_free == 8
    assert scheduler.cache.take_changes().stored == ()


def test_stop_tokens_wait_for_min_tokens() -> None:
    scheduler = make_scheduler(16)
    sequence = submit(scheduler, 0, 8, max_tokens=9, min_tokens=5, stop_token_ids=frozenset(range(60)))
    run_to_end(scheduler)
    assert (sequence.num_generated, sequence.finish_reason) == (5, FinishReason.STOP)


@pytest.mark.parametrize("priority", [-1, 0, 1])
def test_a_long_prompt_holds_up_what_is_less_urgent_and_nothing_else(priority: int) -> None:
    scheduler = make_scheduler(128, max_num_batched_tokens=32)
    long = submit(scheduler, 0, 600)
    step(scheduler)
    other = submit(scheduler, 1, 32, start=3, priority=priority)
    step(scheduler)
    assert other.num_generated == (priority < 0)
    assert long.num_computed == (32 if priority < 0 else 64)
    while not long.num_generated:
        step(scheduler)
    assert other.num_generated == (7 if priority < 0 else 0) or other.is_over


def test_a_newcomer_joins_where_all_others_are_held() -> None:
    scheduler = make_scheduler(40)
    scheduler.must_wait_for_mask = lambda sequence: True
    running, waiting, newcomer = (make_sequence(number, [5 + number] * 20) for number in range(3))
    scheduler.submit(running)
    step(scheduler)
    running.grammar = waiting.grammar = "slow"
    scheduler.submit(waiting)
    assert scheduler.plan().rows == ()
    scheduler.submit(newcomer)
    assert [row.sequence for row in scheduler.plan().rows] == [newcomer]
