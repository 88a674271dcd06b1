"""Which steps may be in flight while the host goes on: those whose choices need nothing from it.

A grammar's mask and the choice between beams need the tokens before them on the host, and so does whatever reports more
than a token. Such a step runs by itself: the one before it is committed first, and so is this one before the next.
"""

from blockyard.worker.draw import NUCLEUS_CANDIDATES
from blockyard.worker.sequence import SamplingParams, ScheduledRow, StepPlan


def may_be_in_flight(plan: StepPlan) -> bool:
    """Whether the next step may be planned and started before this one's tokens are known."""
    return not any(_waits(row) for row in plan.rows)


def _waits(row: ScheduledRow) -> bool:
    sequence, sampling = row.sequence, row.sequence.sampling
    if sequence.wants_whole_prompt:
        return True
    return row.samples and (
        sequence.grammar is not None
        or sequence.group is not None
        or sequence.num_outputs > 1
        or sampling.logprobs is not None
        or _asks_the_device(sampling)
    )


def _asks_the_device(sampling: SamplingParams) -> bool:
    """Whether its nucleus may be wider than where it is looked for (draw.py)."""
    is_narrow = sampling.top_p == 1.0 or 0 < sampling.top_k <= NUCLEUS_CANDIDATES
    return sampling.temperature > 0 and not is_narrow
