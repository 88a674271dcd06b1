"""Sequences that fork: n outputs of a request, and beams. Blocks are shared to the last, copied at the first write."""

import pytest
from blockyard.worker.scheduling.commit import BeamsUpdate
from blockyard.worker.scheduling.scheduler import CapacityError, Scheduler
from blockyard.worker.sequences.sequence import Sequence

from .scheduling import make_scheduler, make_sequence, next_token, run, run_to_end, step


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start + index) % 50 + 1 for index in range(length)]


def blocks_held(scheduler: Scheduler) -> int:
    return scheduler.pool.num_used


def test_a_fork_of_16_holds_13_blocks_until_its_first_write_and_28_after_it() -> None:
    scheduler = make_scheduler(256)
    scheduler.submit(make_sequence(0, prompt(200), max_tokens=4, n=16))
    step(scheduler)
    assert len(scheduler.running) == 16
    assert blocks_held(scheduler) == 13
    plan = scheduler.plan()
    assert len(plan.copies) == 15
    assert len({destination for _, destination in plan.copies}) == 15
    assert len({source for source, _ in plan.copies}) == 1
    scheduler.commit(plan, run(plan))
    scheduler.check_invariants()
    assert blocks_held(scheduler) == 28


def test_a_fork_at_a_block_boundary_copies_nothing() -> None:
    scheduler = make_scheduler(64)
    scheduler.submit(make_sequence(0, prompt(64), max_tokens=4, n=4))
    step(scheduler)
    plan = scheduler.plan()
    assert not plan.copies
    scheduler.commit(plan, run(plan))
    assert blocks_held(scheduler) == 4 + 4


def test_forks_get_the_tokens_that_each_would_get_alone() -> None:
    scheduler = make_scheduler(64)
    leader = make_sequence(0, prompt(37), max_tokens=9, n=3)
    leader.client = 7
    scheduler.submit(leader)
    outputs: dict[int, Sequence] = {}
    while scheduler.has_work:
        for update in step(scheduler):
            outputs[update.sequence.index] = update.sequence
    assert sorted(outputs) == [0, 1, 2]
    assert all(sequence.client == 7 for sequence in outputs.values())
    for index, sequence in outputs.items():
        expected = make_sequence(9, prompt(37))
        while len(expected.tokens) < 37 + 9:
            expected.tokens.append(next_token(expected, len(expected.tokens), index))
        assert sequence.tokens == expected.tokens
    assert scheduler.pool.num_used == 0


def test_the_source_of_a_copy_is_not_given_away_while_its_step_runs() -> None:
    scheduler = make_scheduler(40)
    scheduler.submit(make_sequence(0, prompt(20), max_tokens=8, n=3))
    step(scheduler)
    plan = scheduler.plan()
    source = plan.copies[0][0]
    for sequence in tuple(scheduler.running):
        scheduler.cancel(sequence)
    following = scheduler.plan()
    assert not following.has_work
    assert scheduler.pool.references(source) > 0
    scheduler.commit(plan, run(plan))
    scheduler.check_invariants()
    assert scheduler.pool.num_used == 0


def test_one_output_ends_and_the_others_go_on() -> None:
    scheduler = make_scheduler(40)
    leader = make_sequence(0, prompt(20), max_tokens=8, n=3)
    scheduler.submit(leader)
    step(scheduler)
    scheduler.cancel_request(leader.request_id, index=1)
    scheduler.check_invariants()
    assert sorted(sequence.index for sequence in scheduler.running) == [0, 2]
    run_to_end(scheduler)
    assert scheduler.pool.num_used == 0


def test_outputs_count_as_running_sequences_before_they_fork() -> None:
    scheduler = make_scheduler(64, max_num_seqs=4)
    scheduler.submit(make_sequence(0, prompt(20), n=3))
    scheduler.submit(make_sequence(1, prompt(20, start=9), n=2))
    scheduler.plan()
    assert [sequence.sequence_id for sequence in scheduler.running] == [0]
    with pytest.raises(CapacityError, match="more outputs than"):
        scheduler.submit(make_sequence(2, prompt(20), n=5))


def test_four_beams_on_48_tokens_hold_at_most_7_blocks_after_16_tokens() -> None:
    scheduler = make_scheduler(64)
    scheduler.submit(make_sequence(0, prompt(48), max_tokens=32, n=4, beam_width=4))
    held = []
    for _ in range(17):
        step(scheduler)
        held.append(blocks_held(scheduler))
    separate = 4 * 4
    print(f"4 beams, 48 + 16 tokens: {held[-1]} blocks, {separate} without sharing")
    assert held[-1] <= 7
    assert max(held) <= 8


def test_beams_end_with_their_n_best_and_free_everything() -> None:
    scheduler = make_scheduler(64)
    scheduler.submit(make_sequence(0, prompt(30), max_tokens=6, n=2, beam_width=3))
    updates = []
    while scheduler.has_work:
        updates += step(scheduler)
    (update,) = updates
    assert isinstance(update, BeamsUpdate)
    first, second = update.hypotheses
    assert first.score >= second.score
    assert {len(first.token_ids), len(second.token_ids)} == {6}
    assert first.token_ids != second.token_ids
    assert scheduler.pool.num_used == 0


def test_beams_that_give_way_find_what_they_would_have_found() -> None:
    alone = make_scheduler(64)
    alone.submit(make_sequence(1, prompt(40, start=20), max_tokens=30, n=3, beam_width=3))
    expected = []
    while alone.has_work:
        expected += step(alone)
    crowded = make_scheduler(20, max_model_len=160)
    beams = make_sequence(1, prompt(40, start=20), max_tokens=30, n=3, beam_width=3)
    crowded.submit(make_sequence(0, prompt(100), max_tokens=60))
    crowded.submit(beams)
    crowded.submit(make_sequence(2, prompt(90, start=7), max_tokens=60))
    found = []
    while crowded.has_work:
        found += [update for update in step(crowded) if isinstance(update, BeamsUpdate)]
    assert crowded.num_preemptions > 0
    assert found[0].hypotheses == expected[0].hypotheses  # type: ignore[union-attr]


def test_beams_that_can_never_fit_together_are_refused() -> None:
    scheduler = make_scheduler(10, max_model_len=160)
    with pytest.raises(CapacityError, match="never fit"):
        scheduler.submit(make_sequence(0, prompt(20), max_tokens=100, beam_width=4))
