"""A scheduler with everything around it, small enough to drive by hand."""

from collections.abc import Sequence as Items
from typing import Any

from blockyard.proto.naming.block_hash import chain, root_name
from blockyard.worker.scheduling.commit import Update
from blockyard.worker.scheduling.preemption import Victim, choose_victim
from blockyard.worker.scheduling.scheduler import Scheduler, SchedulerConfig
from blockyard.worker.sequences.beams import num_candidates
from blockyard.worker.sequences.identifiers import BlockName, RequestId, SequenceId, TenantId
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.sequence import Sequence, token_array
from blockyard.worker.sequences.step_plan import NO_TOKEN, RowExtras, ScheduledRow, StepPlan, StepTokens

ROOT = root_name(cluster_secret="", model_fingerprint="test", block_size=16, kv_dtype="float32")


def make_scheduler(num_blocks: int, **settings: Any) -> Scheduler:
    budget = settings.get("max_num_batched_tokens", 2048)
    defaults = {
        "max_model_len": num_blocks * settings.get("block_size", 16),
        "max_num_seqs": min(256, budget),
    }
    return Scheduler(SchedulerConfig(**(defaults | settings)), num_blocks=num_blocks)


def make_sequence(
    number: int,
    tokens: Items[int],
    *,
    max_tokens: int = 8,
    block_size: int = 16,
    priority: int = 0,
    tenant: int = 0,
    **sampling: Any,
) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return Sequence(
        sequence_id=SequenceId(number),
        tokens=token_array(tokens),
        prompt_length=len(tokens),
        sampling=params,
        names=[BlockName(name) for name in (ROOT, *chain(ROOT, tokens, block_size))],
        arrival=number,
        rank=float(priority),
        priority=priority,
        tenant=TenantId(tenant),
        request_id=RequestId(number),
        num_outputs=1 if params.beam_width else params.n,
    )


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start + index) % 50 + 1 for index in range(length)]


def submit(
    scheduler: Scheduler, number: int, tokens: int | Items[int], *, start: int = 1, **settings: Any
) -> Sequence:
    """Make a sequence of these tokens, or of so many, and submit it."""
    given = prompt(tokens, start) if isinstance(tokens, int) else tokens
    sequence = make_sequence(number, given, **settings)
    scheduler.submit(sequence)
    return sequence


def next_token(sequence: Sequence, position: int, index: int = 0) -> int:
    """The stand-in for a model: a token that depends on everything before it, as a model's does."""
    return (sum(sequence.tokens[:position]) * 31 + position * 7 + 11 + index * 5) % 50 + 1


def candidates(row: ScheduledRow) -> tuple[tuple[int, float], ...]:
    """Return the candidates of a beam: different tokens, each less probable than the one before."""
    first = next_token(row.sequence, row.end)
    count = num_candidates(row.sequence.sampling)
    return tuple(
        ((first + 7 * number) % 50 + 1, -0.3 - 0.1 * number - first / 500) for number in range(count)
    )


def run(plan: StepPlan) -> StepTokens:
    tokens, extras = [], {}
    for index, row in enumerate(plan.rows):
        tokens.append(next_token(row.sequence, row.end, row.sequence.index) if row.samples else NO_TOKEN)
        if row.samples and row.sequence.group is not None:
            extras[index] = RowExtras(candidates=candidates(row))
        elif row.embeds:
            extras[index] = RowExtras(embedding=bytes(4))
        elif row.num_outputs > 1:
            others = (next_token(row.sequence, row.end, other) for other in range(1, row.num_outputs))
            extras[index] = RowExtras(tokens=tuple(others))
    return StepTokens(tokens=tokens, extras=extras)


def step(scheduler: Scheduler) -> list[Update]:
    plan = scheduler.plan()
    updates = scheduler.commit(plan, run(plan))
    scheduler.check_invariants()
    return updates


def rows(scheduler: Scheduler) -> dict[int, int]:
    """Plan and commit a step. Return its tokens by sequence."""
    plan = scheduler.plan()
    scheduler.commit(plan, run(plan))
    scheduler.check_invariants()
    return {int(row.sequence.sequence_id): row.num_tokens for row in plan.rows}


def run_to_end(scheduler: Scheduler, limit: int = 20_000) -> int:
    """Run steps until nothing is left. Return how many tokens they computed."""
    computed = 0
    for _ in range(limit):
        if not scheduler.has_work:
            return computed
        computed += sum(rows(scheduler).values())
    raise AssertionError(f"work is left after {limit} steps")


def victims_of(scheduler: Scheduler) -> tuple[Victim, ...]:
    """Return the victim that the scheduler would preempt now, if there is one."""
    mode, rates = scheduler.config.preemption, scheduler.mixed_steps.rates
    victim = choose_victim(
        scheduler.running, {}, scheduler.tables, mode=mode, rates=rates, elsewhere=scheduler.elsewhere
    )
    return () if victim is None else (victim,)


def measured(scheduler: Scheduler, *, prefill: float = 0.0, swap: float = 0.0, decode: float = 0.0) -> None:
    """Let these be the measured rates: tokens, and blocks, a second."""
    rates = scheduler.mixed_steps.rates
    rates.prefill_tokens_per_second, rates.swap_blocks_per_second = prefill, swap
    rates.decode_tokens_per_second = decode


def sampled(*tokens: int) -> StepTokens:
    """A step's tokens, said by hand."""
    return StepTokens(tokens=list(tokens))
