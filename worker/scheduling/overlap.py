"""Overlap: which steps may be in flight while the host plans the next one.

A step may not be in flight where the host needs its result first: for a grammar's mask, a beam search, logprobs,
several outputs, or drafts. Tokens that are sampled with filters alone are chosen on the device. Triton's kernels need
no synchronisation for that. Where PyTorch samples on a GPU, top-p filtering synchronises as the step starts, which
waits for the step before.

A step that may not be in flight runs by itself: the step before is committed first, and so is this one before the next.
"""

from blockyard.worker.sequences.step_plan import ScheduledRow, StepPlan


def may_be_in_flight(plan: StepPlan) -> bool:
    """Return whether the next step may be planned and started before this one's tokens are known."""
    return not any(_waits(row) for row in plan.rows)


def _waits(row: ScheduledRow) -> bool:
    sequence = row.sequence
    if row.drafts:
        return True
    if sequence.wants_whole_prompt:
        return True
    return row.samples and (
        sequence.grammar is not None
        or sequence.group is not None
        or sequence.num_outputs > 1
        or sequence.sampling.logprobs is not None
    )
