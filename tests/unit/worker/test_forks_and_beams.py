"""Sequences that fork: n outputs of a request, and beams. Blocks are shared to the last, copied at the first write."""

import pytest
from blockyard.worker.scheduling.commit import BeamsUpdate
from blockyard.worker.scheduling.scheduler import CapacityError, Scheduler
from blockyard.worker.sequences.sequence import Sequence

from .scheduling import make_scheduler, make_sequence, next_token, prompt, run, step, submit


@pytest.mark.parametrize(
    ("length", "outputs", "before", "copies", "after"),
    [(200, 16, 13, 15, 28), (64, 4, 4, 0, 8)],
    ids=["in a block", "at a boundary"],
)
def test_a_fork_shares_all_blocks_until_its_first_write_and_copies_the_last_one_if_it_is_not_full(
    length: int, outputs: int, before: int, copies: int, after: int
) -> None:
    scheduler = make_scheduler(256)
    submit(scheduler, 0, length, max_tokens=4, n=outputs)
    step(scheduler)
    assert len(scheduler.running) == outputs
    assert scheduler.pool.num_used == before
    plan = scheduler.plan()
    assert len({destination for _, destination in plan.copies}) == len(plan.copies) == copies
    assert len({source for source, _ in plan.copies}) == min(copies, 1)
    scheduler.commit(plan, run(plan))
    scheduler.check_invariants()
    assert scheduler.pool.num_used == after


def test_forks_get_the_tokens_that_each_would_get_alone() -> None:
    scheduler = make_scheduler(64)
    leader = make_sequence(0, prompt(37), max_tokens=9, n=3)
    leader.client = 7
    scheduler.submit(leader)
    outputs: dict[int, Sequence] = {}
    while scheduler.has_work:
        outputs |= {update.sequence.index: update.sequence for update in step(scheduler)}
    assert sorted(outputs) == [0, 1, 2]
    assert all(sequence.client == 7 for sequence in outputs.values())
    for index, sequence in outputs.items():
        expected = make_sequence(9, prompt(37))
        while len(expected.tokens) < 37 + 9:
            expected.tokens.append(next_token(expected, len(expected.tokens), index))
        assert sequence.tokens == expected.tokens
    assert scheduler.pool.num_used == 0


def test_outputs_count_as_running_sequences_before_they_fork() -> None:
    scheduler = make_scheduler(64, max_num_seqs=4)
    submit(scheduler, 0, 20, n=3)
    submit(scheduler, 1, 20, start=9, n=2)
    scheduler.plan()
    assert [sequence.sequence_id for sequence in scheduler.running] == [0]
    with pytest.raises(CapacityError, match="more outputs than"):
        submit(scheduler, 2, 20, n=5)


def test_beams_that_can_never_fit_together_are_refused() -> None:
    scheduler = make_scheduler(10, max_model_len=160)
    with pytest.raises(CapacityError, match="never fit"):
        submit(scheduler, 0, 20, max_tokens=100, beam_width=4)


def test_four_beams_on_48_tokens_hold_at_most_7_blocks_after_16_tokens() -> None:
    scheduler = make_scheduler(64)
    submit(scheduler, 0, 48, max_tokens=32, n=4, beam_width=4)
    held = []
    for _ in range(17):
        step(scheduler)
        held.append(scheduler.pool.num_used)
    assert held[-1] <= 7, "16 without sharing"
    assert max(held) <= 8


def search(scheduler: Scheduler) -> BeamsUpdate:
    """Run until the scheduler's only beam search ends, and everything else."""
    updates = []
    while scheduler.has_work:
        updates += [update for update in step(scheduler) if isinstance(update, BeamsUpdate)]
    (update,) = updates
    assert scheduler.pool.num_used == 0
    return update


def test_beams_end_with_their_n_best_and_free_everything() -> None:
    scheduler = make_scheduler(64)
    submit(scheduler, 0, 30, max_tokens=6, n=2, beam_width=3)
    first, second = search(scheduler).hypotheses
    assert first.score >= second.score
    assert {len(first.token_ids), len(second.token_ids)} == {6}
    assert first.token_ids != second.token_ids
