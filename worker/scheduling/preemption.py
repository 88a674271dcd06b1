"""Preemption: chooses the victim when blocks run out, and whether to swap or to recompute its blocks.

Pure choices over running sequences. Owns the estimates of cost. Does not move blocks (cache/block_tables.py) or change
queues (scheduler.py).
"""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Literal

from blockyard.worker.cache.block_tables import BlockTables
from blockyard.worker.scheduling.mixed_steps import Rates
from blockyard.worker.sequences.identifiers import SequenceId
from blockyard.worker.sequences.sequence import Sequence
from blockyard.worker.sequences.step_plan import ScheduledRow

PreemptionMode = Literal["auto", "swap", "recompute"]


@dataclass(frozen=True, slots=True)
class Victim:
    """Sequences that are preempted together: one, or all running beams of a search."""

    sequences: tuple[Sequence, ...]
    swaps: bool
    """Whether their blocks are moved to host memory. Otherwise they are computed again."""


def choose_victim(
    running: Items[Sequence],
    rows: dict[SequenceId, ScheduledRow],
    tables: BlockTables,
    *,
    mode: PreemptionMode,
    rates: Rates,
) -> Victim | None:
    """Return the least urgent victim, and among equals the one with the lowest cost for each block that it frees.

    None means that nothing can be preempted. Ties go to the youngest. `running` is in order of rank. Three kinds of
    sequences are never chosen:

    - the first of all, so that something always makes progress;
    - one with room set aside for all blocks that it can ever need;
    - one that this step or a step in flight computes, because its blocks are still in use.

    A sequence that frees nothing alone is chosen only where none frees anything, and it shares blocks with the first or
    with others like it. Outputs of one request that are about to write the same half-filled block are such a case.
    """
    best: tuple[tuple[int, float], Victim] | None = None
    freeing_nothing: list[tuple[Sequence, ...]] = []
    for sequences in _units(running):
        if sequences[0] is running[0] or any(
            s.is_reserved or s.num_in_flight or s.sequence_id in rows for s in sequences
        ):
            continue
        freed = tables.freed_by(sequences)
        if not freed:
            freeing_nothing.append(sequences)
            continue
        cost, swaps = _cost(sequences, tables, mode, rates)
        key = (-sequences[0].priority, cost / freed)
        if best is None or key <= best[0]:
            best = key, Victim(sequences, swaps)
    return best[1] if best is not None else _last_resort(running, freeing_nothing, tables)


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
