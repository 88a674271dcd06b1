"""A scheduler with everything around it, small enough to drive by hand."""

from blockyard.proto.block_hash import chain, root_name
from blockyard.worker.block_pool import BlockPool
from blockyard.worker.prefix_cache import PrefixCache
from blockyard.worker.scheduler import NO_TOKEN, Scheduler, SchedulerConfig, SequenceUpdate
from blockyard.worker.sequence import BlockName, SamplingParams, Sequence, SequenceId, StepPlan

ROOT = root_name(cluster_secret="", model_fingerprint="test", block_size=16, kv_dtype="float32")


def make_scheduler(num_blocks: int, **settings: int) -> Scheduler:
    budget = settings.get("max_num_batched_tokens", 2048)
    defaults = {
        "max_model_len": num_blocks * settings.get("block_size", 16),
        "max_num_seqs": min(256, budget),
    }
    config = SchedulerConfig(**(defaults | settings))
    pool = BlockPool(num_blocks)
    return Scheduler(config, pool, PrefixCache(pool))


def make_sequence(
    number: int, tokens: list[int], *, max_tokens: int = 8, block_size: int = 16, **sampling: object
) -> Sequence:
    return Sequence(
        sequence_id=SequenceId(number),
        tokens=list(tokens),
        prompt_length=len(tokens),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
        names=[BlockName(name) for name in (ROOT, *chain(ROOT, tokens, block_size))],
        arrival=number,
    )


def next_token(sequence: Sequence, position: int) -> int:
    """The stand-in for a model: a token that depends on everything before it, as a model's does."""
    return (sum(sequence.tokens[:position]) * 31 + position * 7 + 11) % 50 + 1


def run(plan: StepPlan) -> list[int]:
    return [next_token(row.sequence, row.end) if row.samples else NO_TOKEN for row in plan.rows]


def step(scheduler: Scheduler) -> list[SequenceUpdate]:
    plan = scheduler.plan()
    updates = scheduler.commit(plan, run(plan))
    scheduler.check_invariants()
    return updates


def run_to_end(scheduler: Scheduler, limit: int = 10_000) -> int:
    """Steps until nothing is left; how many it took."""
    for count in range(limit):
        if not scheduler.has_work:
            return count
        step(scheduler)
    raise AssertionError(f"work is left after {limit} steps")
