"""Background work: sequences of the lowest priority, and how many of them a step computes beside other work.

They are for batches that nobody waits for. Beside other sequences a step computes none of their prompts. It takes as
many of their decodes as hardly lengthen it. Pure: it chooses no rows and changes nothing.

A sequence is background only while those of a better priority go before it in the order. So one that has waited for as
long as its priority makes up for is computed like any other, and none starves.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items

from blockyard.proto.limits import MAX_PRIORITY
from blockyard.worker.scheduling.decode_times import DecodeTimes
from blockyard.worker.sequences.sequence import Sequence
from blockyard.worker.sequences.step_plan import ScheduledRow

BACKGROUND_PRIORITY = MAX_PRIORITY
EXTRA_SHARE = 0.03
"""How much longer a step may take by the decodes of background work."""

PREFILL_SECONDS = 0.01
"""Time of prompts in a step that has background work alone. A request that comes may wait for two such steps."""
LEAST_PREFILL_TOKENS = 64
UNBOUNDED_TOKENS = 2**31


def is_background(sequence: Sequence) -> bool:
    return sequence.priority >= BACKGROUND_PRIORITY


def num_background(running: Items[Sequence]) -> int:
    """Return how many sequences at the end of `running`, which is in order of rank, are background work."""
    count = 0
    while count < len(running) and is_background(running[-1 - count]):
        count += 1
    return count


def goes_before(running: Items[Sequence], waiting: Sequence) -> bool:
    """Return whether a running sequence of a better priority goes before this one, which is background work."""
    return any(not is_background(other) and other.order < waiting.order for other in running)


def decodes_beside(num_others: int, num_background: int, times: DecodeTimes) -> int:
    """Return how many decodes of background work a step takes beside those of others."""
    alone = times.expected(num_others)
    if not alone:
        return 0
    count = num_background
    while count and times.expected(num_others + count) > (1 + EXTRA_SHARE) * alone:
        count //= 2
    return count


def held_back_of(running: Items[Sequence], waiting: Items[Sequence], times: DecodeTimes) -> Items[Sequence]:
    """Return the running sequences of background work that the step leaves to others. They are the last ones."""
    count = num_background(running)
    num_others = len(running) - count
    if not count:
        return []
    if num_others:
        return running[num_others + decodes_beside(num_others, count, times) :]
    others = (sequence for sequence in waiting if not is_background(sequence))
    first = next(others, None)
    return [] if first is None else [one for one in running if one.order > first.order]


def background_room(rows: Iterable[ScheduledRow], tokens_per_second: float) -> int:
    """Return how many more prompt tokens of background work a step takes that has these rows.

    `tokens_per_second` is the measured rate of prompts, 0 before it is known. The room is bounded only while all rows
    are background work.
    """
    room = max(int(tokens_per_second * PREFILL_SECONDS), LEAST_PREFILL_TOKENS)
    for row in rows:
        if not is_background(row.sequence):
            return UNBOUNDED_TOKENS
        if row.num_tokens > 1:
            room -= row.num_tokens
    return max(room, 0)


def num_before(waiting: Items[Sequence], priority: int) -> int:
    """Return how many waiting sequences count for a new request. Background work is in nobody's way but its own."""
    if priority >= BACKGROUND_PRIORITY:
        return len(waiting)
    return sum(not is_background(sequence) for sequence in waiting)
