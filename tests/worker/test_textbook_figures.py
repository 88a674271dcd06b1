"""The figures that the textbooks of paged attention give, computed by the real scheduler and pool, and printed."""

import random

from .scheduling import make_scheduler, make_sequence, run, step


def test_sixteen_chats_on_one_system_prompt_hold_28_blocks_for_it() -> None:
    system = list(range(1, 201))
    scheduler = make_scheduler(256)
    sequences = [make_sequence(number, [*system, 300 + number], max_tokens=4) for number in range(16)]
    for sequence in sequences:
        scheduler.submit(sequence)
    step(scheduler)
    held = {block for sequence in sequences for block in sequence.block_table[:13]}
    unshared = 16 * -(-200 // 16)
    print(f"16 chats on a 200-token system prompt: {len(held)} blocks, {unshared} without sharing")
    assert (len(held), unshared) == (28, 208)


def slot_efficiency(outputs: list[int], slots: int) -> float:
    """Share of (step, slot) pairs that sampled a token, by the real scheduler."""
    scheduler = make_scheduler(4096, max_num_seqs=slots, max_model_len=1024)
    for number, length in enumerate(outputs):
        scheduler.submit(make_sequence(number, [1 + number % 50] * 8, max_tokens=length))
    steps = sampled = 0
    while scheduler.has_work:
        plan = scheduler.plan()
        sampled += len(scheduler.commit(plan, run(plan)))
        steps += 1
    return sampled / (steps * slots)


def test_continuous_batching_keeps_95_percent_of_the_slots_useful() -> None:
    outputs = [32, 128, 64, 256] * 64
    batches = [outputs[start : start + 4] for start in range(0, len(outputs), 4)]
    static = sum(outputs) / sum(4 * max(batch) for batch in batches)
    continuous = slot_efficiency(outputs, slots=4)
    print(f"256 requests over 4 slots: static {static:.1%} useful, continuous {continuous:.1%}")
    assert round(static, 3) == 0.469
    assert continuous >= 0.95


def test_fifty_sequences_use_97_percent_of_the_memory_they_take() -> None:
    deviations = random.Random(0).sample(range(250), 25)
    lengths = [258 + sign * deviation for deviation in deviations for sign in (1, -1)]
    scheduler = make_scheduler(2048, max_num_batched_tokens=20_000)
    sequences = [
        make_sequence(number, [(number * 7 + index) % 50 + 1 for index in range(length)])
        for number, length in enumerate(lengths)
    ]
    for sequence in sequences:
        scheduler.submit(sequence)
    scheduler.plan()
    tokens = sum(sequence.num_scheduled for sequence in sequences)
    taken = sum(len(sequence.block_table) for sequence in sequences) * 16
    print(f"50 sequences of mean {tokens / 50:.0f} tokens use {tokens / taken:.1%} of the KV they take")
    assert tokens / 50 == 258
    assert tokens / taken >= 0.965
