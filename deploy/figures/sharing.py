"""Figures of batching and sharing: busy slots of a batch, copy-on-write, and effects of the block size.

All are counted on the real scheduler and pool, except static batching. This repository has no static batching, so it is
calculated.
"""

import random
from dataclasses import dataclass

from blockyard.deploy.figures.loads import (
    BLOCK_SIZE,
    MIXED_OUTPUTS,
    Drive,
    Sample,
    mean,
    mixed,
    random_tokens,
    share,
)

BLOCK_SIZES = (16, 32, 64, 128)
MIXED_AT_ONCE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFigures:
    """Shares of (step, slot) pairs that yield a token, and the numbers of slots that yield one in each step."""

    num_requests: int
    slots: int
    static: float
    continuous: float
    static_steps: int
    continuous_steps: int
    static_busy: list[int]
    continuous_busy: list[int]


def slot_figures(num_requests: int = 256, slots: int = 4) -> SlotFigures:
    """Compare static and continuous batching on outputs of 32, 128, 64 and 256 tokens in turn.

    A static batch runs until its longest output ends.
    """
    outputs = [MIXED_OUTPUTS[number % len(MIXED_OUTPUTS)] for number in range(num_requests)]
    batches = [outputs[start : start + slots] for start in range(0, num_requests, slots)]
    static_busy = [sum(length > step for length in batch) for batch in batches for step in range(max(batch))]
    drive = Drive(4096, max_num_seqs=slots, max_model_len=1024)
    for number, length in enumerate(outputs):
        drive.submit([number % 50 + 1] * 8, length)
    continuous_busy = []
    while drive.scheduler.has_work:
        continuous_busy.append(len(drive.step()))
    return SlotFigures(
        num_requests=num_requests,
        slots=slots,
        static=mean(static_busy) / slots,
        continuous=mean(continuous_busy) / slots,
        static_steps=len(static_busy),
        continuous_steps=len(continuous_busy),
        static_busy=static_busy,
        continuous_busy=continuous_busy,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOnWriteFigures:
    """Numbers of blocks held. A fork is one request with 16 outputs; chats are 16 requests. Prompts have 200 tokens."""

    fork_before_write: int
    fork_after_write: int
    chats: int
    unshared: int
    beams: int
    """Blocks of 4 beams on a prompt of 48 tokens, after 16 tokens."""
    beams_most: int
    """Maximum blocks of the beams in any step."""
    beams_unshared: int

    @property
    def fork_saved(self) -> float:
        return 1 - self.fork_after_write / self.unshared

    @property
    def beams_saved(self) -> float:
        return 1 - self.beams / self.beams_unshared


def copy_on_write_figures(outputs: int = 16, prompt_tokens: int = 200) -> CopyOnWriteFigures:
    chance = random.Random(0)
    prompt = random_tokens(chance, prompt_tokens)
    fork = Drive(256)
    fork.submit(prompt, 4, n=outputs)
    fork.step()
    before = fork.scheduler.pool.num_used
    fork.step()
    chats = Drive(256)
    for number in range(outputs):
        chats.submit((*prompt, number), 4)
    chats.step()
    blocks = -(-prompt_tokens // BLOCK_SIZE)
    beams, width, beam_prompt, beam_outputs = Drive(64), 4, 48, 16
    beams.submit(random_tokens(chance, beam_prompt), 2 * beam_outputs, n=width, beam_width=width)
    held = []
    for _ in range(1 + beam_outputs):  # The first step computes the prompt.
        beams.step()
        held.append(beams.scheduler.pool.num_used)
    return CopyOnWriteFigures(
        fork_before_write=before,
        fork_after_write=fork.scheduler.pool.num_used,
        chats=len({block for chat in chats.sequences for block in chat.block_table[:blocks]}),
        unshared=outputs * blocks,
        beams=held[-1],
        beams_most=max(held),
        beams_unshared=width * -(-(beam_prompt + beam_outputs) // BLOCK_SIZE),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizeFigures:
    block_size: int
    empty_share: float
    """Share of token slots in used blocks without a token, averaged over the steps of the mixed load."""
    reuse: float
    """Share of prompt tokens found in the cache, for chats on shared system prompts."""
    possible_reuse: float
    """Share of prompt tokens that an earlier prompt had too, for the same chats."""
    names: int
    """Blocks published to the prefix index for the same chats."""


def block_size_figures(block_size: int) -> BlockSizeFigures:
    samples = mixed_samples(block_size)
    reuse, possible, names = _prefix_reuse(block_size)
    return BlockSizeFigures(
        block_size=block_size,
        empty_share=mean(1 - sample.tokens / sample.taken for sample in samples),
        reuse=reuse,
        possible_reuse=possible,
        names=names,
    )


def mixed_samples(block_size: int, *, num_requests: int = 320) -> list[Sample]:
    """Return the counts of each step of the mixed load, with at most 32 requests at once.

    The load ends when no request waits any longer, so that the last requests, which leave slots empty, do not count.
    """
    drive = Drive(16384 // block_size, block_size=block_size, max_num_seqs=MIXED_AT_ONCE, max_model_len=1024)
    for request in mixed(num_requests):
        drive.submit(request.prompt, request.num_output_tokens)
    samples: list[Sample] = []
    while drive.scheduler.waiting:
        plan = drive.plan()
        samples.append(drive.sample(len(samples)))
        drive.finish(plan)
    return samples


def _prefix_reuse(block_size: int, *, systems: int = 8, chats: int = 160) -> tuple[float, float, int]:
    """Return reuse, possible reuse and published blocks of chats on a few system prompts, one chat every two steps."""
    chance = random.Random(1)
    prompts = [random_tokens(chance, chance.randint(100, 600)) for _ in range(systems)]
    drive = Drive(65536 // block_size, block_size=block_size, max_num_seqs=64)
    seen: set[int] = set()
    possible = 0
    for _ in range(chats):
        system = chance.randrange(systems)
        possible += len(prompts[system]) if system in seen else 0
        seen.add(system)
        drive.submit((*prompts[system], *random_tokens(chance, chance.randint(20, 60))), 16)
        drive.step()
        drive.step()
    while drive.scheduler.has_work:
        drive.step()
    found = [sequence.cached_tokens or 0 for sequence in drive.sequences]
    sent = [sequence.prompt_length for sequence in drive.sequences]
    names = len(drive.scheduler.cache.take_changes().stored)
    return share(found, sent), possible / sum(sent), names
