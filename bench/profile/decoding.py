"""Steady decodes: a number of sequences of about one length, all of which run in every step.

Owns starting them, the number of blocks they need, and the check that none of them missed a step. Does not own the
measurements (scenarios.py).
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

from blockyard.worker.engine import Engine
from blockyard.worker.sequences.sequence import Sequence, SequenceState

from bench.engine.build import engine_request

START_STEPS = 16
"""Maximum steps until all sequences have their first token. The earliest sequences get a token in each of them."""


def blocks_of_decodes(*, running: int, context: int, num_steps: int, block_size: int) -> int:
    """Return the number of blocks that `decoding` holds at its end."""
    return running * -(-(context + START_STEPS + num_steps) // block_size)


@contextmanager
def decoding(engine: Engine, *, running: int, context: int, num_steps: int) -> Iterator[None]:
    """Keep `running` sequences of `context` tokens decoding, for at most `num_steps` steps.

    The engine has no other work. Raise ValueError if the engine has no room for them, and RuntimeError if not all of
    them ran in every step. A KeyboardInterrupt may leave the engine within a step, so nobody can use it afterwards.
    """
    _check_room(engine, running=running, context=context, num_steps=num_steps)
    chance, salt = Random(running), str(time.perf_counter_ns())
    prompts = [[chance.randrange(10, 4000) for _ in range(context)] for _ in range(running)]
    try:
        # Cache the prompts first. Otherwise early sequences would be long when the last ones start.
        _submit(engine, prompts, 1, salt)
        _drain(engine)
        _submit(engine, prompts, START_STEPS + num_steps, salt)
        del prompts  # A worker does not keep them either, and the garbage collector would visit them.
        _start(engine, running)
        lengths = [(sequence, len(sequence.tokens)) for sequence in engine.scheduler.running]
        yield
        _check_steps(lengths, num_steps)
    except Exception:
        _end(engine)
        raise
    _end(engine)


def _end(engine: Engine) -> None:
    for sequence in (*engine.scheduler.running, *engine.scheduler.waiting):
        engine.cancel(sequence.request_id)
    _drain(engine)


def _check_room(engine: Engine, *, running: int, context: int, num_steps: int) -> None:
    config, available = engine.scheduler.config, engine.pool.num_blocks
    if running > config.max_num_seqs:
        raise ValueError(f"{running} sequences are more than max_num_seqs {config.max_num_seqs}")
    longest = context + START_STEPS + num_steps
    if longest > config.max_model_len:
        raise ValueError(
            f"sequences of {longest} tokens by the end are longer than max_model_len {config.max_model_len}"
        )
    needed = blocks_of_decodes(
        running=running, context=context, num_steps=num_steps, block_size=config.block_size
    )
    if needed > available:
        raise ValueError(
            f"{running} sequences of {context} tokens need {needed:,} blocks by the end of {num_steps} steps, and the "
            f"KV pool has {available:,}: {(needed - available) * engine.bytes_per_block / 2**20:.1f} MiB are missing"
        )


def _submit(engine: Engine, prompts: list[list[int]], max_tokens: int, salt: str) -> None:
    for tokens in prompts:
        engine.submit(engine_request(tokens, max_tokens, salt=salt))


def _drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def _start(engine: Engine, running: int) -> None:
    """Prefill all sequences, without the limit that keeps the gaps of running decodes short.

    Raise RuntimeError if not all of them run after START_STEPS steps.
    """
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
            f"only {len(scheduler.running)} of {running} sequences run after {START_STEPS} steps; "
            f"{scheduler.queued_prefill_tokens:,} prompt tokens are left"
        )


def _check_steps(lengths: list[tuple[Sequence, int]], num_steps: int) -> None:
    """Raise RuntimeError if a sequence missed a step. `lengths` are from before the steps."""
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
            f"only {steady} of {len(lengths)} sequences ran in each of {most} steps, {num_steps} were planned: "
            f"{preempted} were preempted for lack of blocks, {ended} have ended"
        )
