"""Which steps may be in flight while the host goes on: those whose choices need nothing from it.

A grammar's mask and the choice between beams need the tokens before them on the host, and so does whatever reports more
than a token. What is sampled with filters alone is chosen on the device, by Triton's kernels without a word to the
host; where PyTorch computes on a GPU, a nucleus waits for the device as the step is started, so for the step before.

A step that waits by this rule runs by itself: the one before it is committed first, and so is this one before the next.
"""

from blockyard.worker.sequences.step_plan import ScheduledRow, StepPlan


def may_be_in_flight(plan: StepPlan) -> bool:
    """Whether the next step may be planned and started before this one's tokens are known."""
    return not any(_waits(row) for row in plan.rows)


def _waits(row: ScheduledRow) -> bool:
    sequence = row.sequence
    if sequence.wants_whole_prompt:
        return True
    return row.samples and (
        sequence.grammar is not None
        or sequence.group is not None
        or sequence.num_outputs > 1
        or sequence.sampling.logprobs is not None
    )
