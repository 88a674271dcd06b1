"""Steady decodes: so many sequences of about one length, which all run in every step.

Owns how they come to be, how many blocks they take, and the proof that none of them missed a step. Does not own what is
measured meanwhile (scenarios.py).
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

from blockyard.worker.engine import Engine
from blockyard.worker.sequences.sequence import Sequence, SequenceState

from bench.engine.build import engine_request

START_STEPS = 16
"""In which all sequences get their first token, at most. Those that are first get one more in each."""


def blocks_of_decodes(*, running: int, context: int, num_steps: int, block_size: int) -> int:
    """What `decoding` holds at its end."""
    return running * -(-(context + START_STEPS + num_steps) // block_size)


@contextmanager
def decoding(engine: Engine, *, running: int, context: int, num_steps: int) -> Iterator[None]:
    """So many sequences of so many tokens, each of which gets one more a step, for so many steps at most. The engine
    has no other work.

    Raises ValueError where the engine has no room for them, RuntimeError where not all of them ran in every step.
    """
    _check_room(engine, running=running, context=context, num_steps=num_steps)
    chance, salt = Random(running), str(time.perf_counter_ns())
    prompts = [[chance.randrange(10, 4000) for _ in range(context)] for _ in range(running)]
    try:
        # Cached first: else those that start early would have grown long when the last ones start.
        _submit(engine, prompts, 1, salt)
        _drain(engine)
        _submit(engine, prompts, START_STEPS + num_steps, salt)
        del prompts  # a worker has none either: the collector would walk them
        _start(engine, running)
        lengths = [(sequence, len(sequence.tokens)) for sequence in engine.scheduler.running]
        yield
        _check_steps(lengths, num_steps)
    finally:
        for sequence in (*engine.scheduler.running, *engine.scheduler.waiting):
            engine.cancel(sequence.request_id)
        _drain(engine)


def _check_room(engine: Engine, *, running: int, context: int, num_steps: int) -> None:
    config, available = engine.scheduler.config, engine.pool.num_blocks
    if running > config.max_num_seqs:
        raise ValueError(f"{running} sequences are to run, {config.max_num_seqs} are allowed to")
    longest = context + START_STEPS + num_steps
    if longest > config.max_model_len:
        raise ValueError(f"sequences of {longest} tokens by the end, {config.max_model_len} fit the context")
    needed = blocks_of_decodes(
        running=running, context=context, num_steps=num_steps, block_size=config.block_size
    )
    if needed > available:
        raise ValueError(
            f"{running} sequences of {context} tokens take {needed:,} blocks of the KV pool by the end of {num_steps} "
            f"steps, it has {available:,}: {(needed - available) * engine.bytes_per_block / 2**20:.1f} MiB more are "
            "needed"
        )


def _submit(engine: Engine, prompts: list[list[int]], max_tokens: int, salt: str) -> None:
    for tokens in prompts:
        engine.submit(engine_request(tokens, max_tokens, salt=salt))


def _drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def _start(engine: Engine, running: int) -> None:
    """With no regard to the pauses of those that run already."""
    scheduler, mixed_steps = engine.scheduler, engine.mixed_steps
    limit, mixed_steps.limit_tokens = mixed_steps.limit_tokens, None
    try:
        for _ in range(START_STEPS):
            engine.step()
            if not scheduler.waiting and not scheduler.queued_prefill_tokens:
                break
    finally:
        mixed_steps.limit_tokens = limit
    if scheduler.waiting or scheduler.queued_prefill_tokens or len(scheduler.running) < running:
        raise RuntimeError(
            f"{len(scheduler.running)} of {running} sequences run after {START_STEPS} steps, "
            f"{scheduler.queued_prefill_tokens:,} tokens of prompts are left"
        )


def _check_steps(lengths: list[tuple[Sequence, int]], num_steps: int) -> None:
    """`lengths` are of before the steps."""
    most = max(len(sequence.tokens) - length for sequence, length in lengths)
    steady = sum(
        len(sequence.tokens) - length == most
        and sequence.state is SequenceState.RUNNING
        and not sequence.num_preemptions
        for sequence, length in lengths
    )
    if steady < len(lengths):
        preempted = sum(sequence.num_preemptions > 0 for sequence, _ in lengths)
        ended = sum(sequence.is_over for sequence, _ in lengths)
        raise RuntimeError(
            f"{steady} of {len(lengths)} sequences ran in each of {most} steps, {num_steps} were asked for: "
            f"{preempted} had too few blocks of the KV pool, {ended} have ended"
        )
