"""The figures of textbooks on paged attention, as `blockyard figures` computes them."""

import pytest
from blockyard.deploy.figures.loads import Drive, mean, mixed
from blockyard.deploy.figures.memory import arrival_figures, fragmentation_figures, memory_figures
from blockyard.deploy.figures.sharing import (
    block_size_figures,
    copy_on_write_figures,
    mixed_samples,
    slot_figures,
)


def test_continuous_batching_keeps_95_percent_of_the_slots_useful() -> None:
    figures = slot_figures()
    assert round(figures.static, 3) == 0.469
    assert figures.continuous >= 0.95
    assert sum(figures.continuous_busy) == sum(figures.static_busy) == 256 // 4 * (32 + 128 + 64 + 256)


def test_fifty_sequences_use_97_percent_of_the_memory_they_take() -> None:
    figures = memory_figures()
    assert figures.mean_tokens == 258
    assert round(figures.contiguous_utilisation, 3) == 0.126
    assert figures.paged_utilisation >= 0.965
    assert round(figures.times_the_sequences, 1) == 7.7
    assert 7.0 <= figures.times_the_sequences_run <= figures.times_the_sequences


def test_a_fork_of_16_and_16_chats_hold_28_blocks_where_208_would_be_held_unshared() -> None:
    figures = copy_on_write_figures()
    assert (figures.fork_before_write, figures.fork_after_write) == (13, 28)
    assert (figures.chats, figures.unshared) == (28, 208)


def test_four_beams_hold_at_most_7_blocks_where_16_would_be_held_unshared() -> None:
    figures = copy_on_write_figures()
    assert figures.beams <= 7
    assert figures.beams_unshared == 16
    assert figures.beams_saved >= 0.56


def test_contiguous_memory_refuses_what_it_has_room_for_and_the_pool_does_not() -> None:
    figures = fragmentation_figures()
    assert figures.worst_largest_piece < figures.worst_wanted <= figures.worst_free
    assert figures.refused_for_pieces > 0
    assert figures.paged_in_pieces > 0.5
    assert figures.paged_steps < figures.steps


def test_the_map_of_each_memory_agrees_with_what_is_free_in_it() -> None:
    figures = fragmentation_figures()
    assert sum(owner < 0 for owner, _ in figures.paged_cells) * 16 == figures.paged_free
    held = sum(owner >= 0 for owner, _ in figures.contiguous_cells) * 16
    assert abs(figures.memory - figures.worst_free - held) <= 16 * len(
        {o for o, _ in figures.contiguous_cells}
    )


def test_the_same_arrivals_run_more_at_once_and_wait_less_on_paged_memory() -> None:
    figures = arrival_figures()
    contiguous, paged = figures.peak_running
    assert contiguous == figures.memory // 2048
    assert paged > 5 * contiguous
    assert figures.utilisation[0] < 0.13 < 0.95 < figures.utilisation[1]
    assert figures.mean_wait_steps[1] < figures.mean_wait_steps[0]


def test_at_most_4_percent_of_the_memory_used_by_the_mixed_load_is_empty() -> None:
    samples = mixed_samples(16)
    assert len(samples) > 1000
    assert all(sample.running == 32 for sample in samples[:-1])
    empty = mean(1 - sample.tokens / sample.taken for sample in samples)
    print(f"mixed load, blocks of 16: {empty:.2%} of the slots of used blocks hold no token")
    assert 0.0 < empty <= 0.04


def test_larger_blocks_leave_more_memory_empty_and_find_less_again() -> None:
    small, large = block_size_figures(16), block_size_figures(64)
    assert small.empty_share < large.empty_share
    assert large.reuse < small.reuse <= small.possible_reuse
    assert large.names < small.names


@pytest.mark.parametrize("block_size", [16, 64])
def test_a_sample_counts_every_token_of_sequences_that_share_nothing_once(block_size: int) -> None:
    drive = Drive(1024, block_size=block_size, max_num_seqs=8)
    for request in mixed(8):
        drive.submit(request.prompt, request.num_output_tokens)
    for step in range(20):
        plan = drive.plan()
        sample = drive.sample(step)
        assert sample.tokens == sum(sequence.num_scheduled for sequence in drive.sequences)
        assert sample.tokens <= sample.taken <= sample.memory
        drive.finish(plan)
