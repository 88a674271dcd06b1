"""Who gives way when blocks run out, and whether its blocks are kept in host memory or computed again.

Pure choices over running sequences. Owns the estimates; moving is cache/block_tables.py's, queues are scheduler.py's.
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
    """Sequences that give way together: one, or all running beams of a search."""

    sequences: tuple[Sequence, ...]
    swaps: bool


def choose_victim(
    running: Items[Sequence],
    rows: dict[SequenceId, ScheduledRow],
    tables: BlockTables,
    *,
    mode: PreemptionMode,
    rates: Rates,
) -> Victim | None:
    """The least urgent, and among them the one that costs the least for each block that it really frees; ties go to
    the youngest. `running` is in order of rank.

    Never chosen is the first of all, so that something always gets done, nor one that holds all it can ever need,
    nor one that this step or a step in flight computes, whose blocks could not be had now. One that frees nothing by
    itself gives way only where nobody frees anything, but it shares with the first, or with others like it: outputs
    of one request that are about to write the same half-filled block.
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
    """The youngest of those that free nothing alone, where they and the first free something together."""
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
    """Seconds (or tokens, while nothing is measured) to have them back, and whether by swapping."""
    tokens = sum(recompute_tokens(sequence, tables) for sequence in sequences)
    recompute = tokens / (rates.prefill_tokens_per_second or 1.0)
    # Beams share their tails among each other: what is private to one of them is little, so they are computed again.
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
    """Tokens to compute again: all but the leading blocks that others hold too."""
    shared_tokens = tables.num_shared(sequence) * tables.block_size
    return sequence.num_computed - min(sequence.num_computed, shared_tokens)
