"""Preemption: chooses the victim when blocks run out, and whether to swap or recompute its blocks, or move it.

- swap: blocks go to host memory and come back. The sequence waits for room.
- recompute: blocks are dropped. The sequence waits for room.
- move: the request is given back. Another worker fetches the blocks (a pull) and goes on at once.

Pure choices over running sequences. Owns the estimates of cost. Does not move blocks (cache/block_tables.py) or change
queues (scheduler.py).
"""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Literal

from blockyard.worker.cache.block_tables import BlockTables
from blockyard.worker.scheduling.mixed_steps import Rates
from blockyard.worker.sequences.identifiers import RequestId, SequenceId
from blockyard.worker.sequences.sequence import Sequence
from blockyard.worker.sequences.step_plan import ScheduledRow

PreemptionMode = Literal["auto", "swap", "recompute"]


EXPECTED_SHARE = 0.5
"""Part of its remaining `max_tokens` that a sequence is expected to generate."""


@dataclass(frozen=True, slots=True)
class Victim:
    """Sequences that are preempted together: one, all running beams of a search, or a request that moves."""

    sequences: tuple[Sequence, ...]
    swaps: bool
    """Whether their blocks are moved to host memory. Otherwise they are computed again."""
    moves: bool = False
    """Whether they go on on another worker. They are then all sequences of their request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """Another worker with room, as far as this one has heard of it."""

    num_blocks: int
    """Blocks that it may take."""
    setup_seconds: float
    blocks_per_second: float
    """Rate at which blocks reach it."""

    def seconds(self, num_blocks: int) -> float:
        """Return the time to fetch so many blocks."""
        return self.setup_seconds + num_blocks / self.blocks_per_second

    def without(self, sequences: Items[Sequence], tables: BlockTables) -> "Elsewhere":
        """Return what is left once these sequences have moved there."""
        return replace(self, num_blocks=self.num_blocks - blocks_elsewhere(sequences, tables))


def choose_victim(
    running: Items[Sequence],
    rows: dict[SequenceId, ScheduledRow],
    tables: BlockTables,
    *,
    mode: PreemptionMode,
    rates: Rates,
    elsewhere: Elsewhere | None = None,
) -> Victim | None:
    """Return the least urgent victim, and among equals the one with the lowest cost for each block that it frees.

    None means that nothing can be preempted. Ties go to the youngest. `running` is in order of rank. Three kinds of
    sequences are never chosen:

    - the first of all, so that something always makes progress;
    - one with room set aside for all blocks that it can ever need;
    - one that this step or a step in flight computes, because its blocks are still in use.

    A sequence that frees nothing alone is chosen only where none frees anything, and it shares blocks with the first or
    with others like it. Outputs of one request that are about to write the same half-filled block are such a case.

    With `elsewhere` and `mode` "auto", a request moves where that costs less than to stay and wait for room.
    """
    best: tuple[tuple[int, float], Victim] | None = None
    freeing_nothing: list[tuple[Sequence, ...]] = []
    for sequences in _units(running):
        if not _may_be_preempted(sequences, running, rows):
            continue
        freed = tables.freed_by(sequences)
        if not freed:
            freeing_nothing.append(sequences)
            continue
        cost, swaps = _cost(sequences, tables, mode, rates)
        key = (-sequences[0].priority, cost / freed)
        if best is None or key <= best[0]:
            best = key, Victim(sequences, swaps)
    if best is None:
        return _last_resort(running, freeing_nothing, tables)
    is_measured = rates.prefill_tokens_per_second > 0
    if elsewhere is None or mode != "auto" or tables.host_cache is None or not is_measured:
        return best[1]
    (priority, cost), stays = best
    waiting = waiting_seconds(stays.sequences, running, tables, rates) / tables.freed_by(stays.sequences)
    moves = _best_move(running, rows, tables, elsewhere)
    return moves[1] if moves is not None and moves[0] < (priority, cost + waiting) else stays


def _may_be_preempted(
    sequences: Items[Sequence], running: Items[Sequence], rows: dict[SequenceId, ScheduledRow]
) -> bool:
    return not any(
        s is running[0] or s.is_reserved or s.num_in_flight or s.sequence_id in rows for s in sequences
    )


def _best_move(
    running: Items[Sequence],
    rows: dict[SequenceId, ScheduledRow],
    tables: BlockTables,
    elsewhere: Elsewhere,
) -> tuple[tuple[int, float], Victim] | None:
    """Return the request that moves at the lowest cost, with its key as in `choose_victim`. All of it moves at once.

    A beam search would begin again, and a request without a token has nothing that its router could continue.
    """
    requests: dict[RequestId, list[Sequence]] = {}
    for sequence in running:
        requests.setdefault(sequence.request_id, []).append(sequence)
    best: tuple[tuple[int, float], Victim] | None = None
    for sequences in requests.values():
        if not all(s.may_move and s.num_generated and s.group is None for s in sequences):
            continue
        num_blocks = blocks_elsewhere(sequences, tables)
        if num_blocks > elsewhere.num_blocks or not _may_be_preempted(sequences, running, rows):
            continue
        freed = tables.freed_by(sequences)
        key = (-sequences[0].priority, elsewhere.seconds(num_blocks) / max(freed, 1))
        if freed and (best is None or key <= best[0]):
            best = key, Victim(tuple(sequences), swaps=False, moves=True)
    return best


def blocks_elsewhere(sequences: Items[Sequence], tables: BlockTables) -> int:
    """Return how many blocks these sequences will soon have on another worker, if they share none there."""
    return sum(tables.blocks_for(len(sequence.tokens)) + 1 for sequence in sequences)


def waiting_seconds(
    sequences: Items[Sequence], running: Items[Sequence], tables: BlockTables, rates: Rates
) -> float:
    """Return the estimated time until others have ended and left the room that these sequences need. 0 while the rate
    of decodes is unknown."""
    if not rates.decode_tokens_per_second:
        return 0.0
    others = [other for other in running if other not in sequences]
    needed = sum(tables.blocks_for(len(sequence.tokens)) for sequence in sequences)
    steps = 0.0
    for other in sorted(others, key=_remaining_tokens):
        if needed <= 0:
            break
        steps = EXPECTED_SHARE * _remaining_tokens(other)
        needed -= len(other.block_table)
    return steps * len(others) / rates.decode_tokens_per_second


def _remaining_tokens(sequence: Sequence) -> int:
    return sequence.sampling.max_tokens - sequence.num_generated


def _last_resort(
    running: Items[Sequence], freeing_nothing: Items[tuple[Sequence, ...]], tables: BlockTables
) -> Victim | None:
    """Return the youngest of `freeing_nothing`.

    Return None where all of them and the first of `running` would free no more than that first one alone.
    """
    together = [*running[:1], *(sequence for sequences in freeing_nothing for sequence in sequences)]
    if tables.freed_by(together) <= tables.freed_by(running[:1]):
        return None
    return Victim(freeing_nothing[-1], swaps=False)


def _units(running: Items[Sequence]) -> Iterator[tuple[Sequence, ...]]:
    seen = set()
    for sequence in running:
        if sequence.group is None:
            yield (sequence,)
        elif id(sequence.group) not in seen:
            seen.add(id(sequence.group))
            yield tuple(other for other in running if other.group is sequence.group)


def _cost(
    sequences: Items[Sequence], tables: BlockTables, mode: PreemptionMode, rates: Rates
) -> tuple[float, bool]:
    """Return the seconds to restore the sequences, and whether by swapping.

    While a rate is unknown, return the number of tokens or blocks in place of seconds.
    """
    tokens = sum(recompute_tokens(sequence, tables) for sequence in sequences)
    recompute = tokens / (rates.prefill_tokens_per_second or 1.0)
    # Beams share most of their blocks with each other. Little is private to one beam, so they are recomputed.
    if mode == "recompute" or len(sequences) > 1 or sequences[0].group is not None:
        return recompute, False
    (sequence,) = sequences
    num_private = tables.blocks_for(sequence.num_computed) - tables.num_shared(sequence)
    if num_private > tables.swap.num_free or not num_private:
        return recompute, False
    if mode == "swap":
        return num_private / (rates.swap_blocks_per_second or 1.0), True
    if not rates.prefill_tokens_per_second or not rates.swap_blocks_per_second:
        return recompute, False
    swap = num_private / rates.swap_blocks_per_second
    return min(recompute, swap), swap < recompute


def recompute_tokens(sequence: Sequence, tables: BlockTables) -> int:
    """Return how many tokens a preemption would compute again: all but leading blocks that other sequences hold too."""
    shared_tokens = tables.num_shared(sequence) * tables.block_size
    return sequence.num_computed - min(sequence.num_computed, shared_tokens)
