"""Queued work: the tokens that sequences have still to compute, for the next step and for the load that routers see.

Pure estimates. A new sequence counts only what is neither cached nor computed for another one before it.
"""

from collections.abc import Iterable

from blockyard.proto.step_costs import pairs_of
from blockyard.worker.cache.block_tables import BlockTables
from blockyard.worker.sequences.sequence import Sequence, SequenceState


def tokens_to_compute(sequence: Sequence) -> int:
    """Return how many tokens of a running sequence the next step may compute, beyond those that are scheduled."""
    if sequence.state is not SequenceState.RUNNING or sequence.num_drafted:
        return 0
    in_flight = sequence.num_samples_in_flight if sequence.num_in_flight else 0
    group = sequence.group
    if in_flight and (group is not None or sequence.num_outputs > 1):
        return 0
    if group is not None and group.waits(sequence):
        return 0
    known = len(sequence.tokens)
    if known - sequence.prompt_length + in_flight >= sequence.sampling.max_results:
        return 0
    return known + in_flight - sequence.num_scheduled


def queued_prefill(waiting: Iterable[Sequence], running: Iterable[Sequence]) -> tuple[int, int]:
    """Return how many known tokens are still to be computed, and their pairs. Routers estimate a request's wait by
    these numbers.

    A waiting sequence counts its tokens that, at its submit, were neither cached nor to be computed for another. A
    running one counts those beyond the token that its next decode computes.
    """
    tokens = pairs = 0
    for sequence in waiting:
        own_tokens, own_pairs = uncached_work(sequence)
        tokens += own_tokens
        pairs += own_pairs
    for sequence in running:
        start = sequence.num_scheduled
        num_tokens = len(sequence.tokens) - start - 1
        if num_tokens > 0:
            tokens += num_tokens
            pairs += pairs_of(start, num_tokens)
    return tokens, pairs


def uncached_work(sequence: Sequence) -> tuple[int, int]:
    """Return how many tokens a waiting sequence must compute first, and their pairs.

    They are those not swapped, or not cached at its submit.
    """
    length = len(sequence.tokens)
    start = sequence.cached_at_submit if sequence.swapped is None else sequence.swapped.num_tokens
    start = min(start, length - 1)
    return length - start, pairs_of(start, length - start)


def expected_blocks(sequence: Sequence, others: Iterable[Sequence], tables: BlockTables) -> int:
    """Return how many leading blocks of a new sequence are cached, or shared with one that is computed before."""
    if sequence.wants_whole_prompt:
        return 0
    shared = max((_shared_blocks(sequence, other) for other in others), default=0)
    usable = (len(sequence.tokens) - 1) // tables.block_size
    return max(len(tables.match(sequence)), min(shared, usable))


def _shared_blocks(one: Sequence, other: Sequence) -> int:
    """Return how many leading blocks of two sequences have equal names, by bisection: a name stands for a prefix."""
    least, most = 0, min(len(one.names), len(other.names)) - 1
    if most < 1 or one.names[1] != other.names[1]:
        return 0
    while least < most:
        middle = (least + most + 1) // 2
        if one.names[middle] == other.names[middle]:
            least = middle
        else:
            most = middle - 1
    return least
