"""What is promised of blocks and places: how much of the pool a sequence may take, and whether another fits.

Pure arithmetic over the running and the waiting; changes nothing. A beam search counts as a whole, wherever its beams
are: it is admitted, and gives way, as one.
"""

from collections.abc import Sequence as Items

from blockyard.worker.cache.block_tables import BlockTables, Hits
from blockyard.worker.sequences.sequence import Sequence


def most_blocks(sequence: Sequence, tables: BlockTables) -> int:
    """What a sequence, or a whole beam search, can ever hold."""
    most = tables.blocks_for(sequence.prompt_length + sequence.sampling.max_tokens)
    shared = sequence.prompt_length // tables.block_size
    return shared + (most - shared) * sequence.group.width if sequence.group else most


def blocks_soon(sequence: Sequence, tables: BlockTables) -> int:
    """For all its tokens, and one for each output or beam that it is about to fork into."""
    forks = sequence.num_outputs - 1
    if sequence.group is not None and not sequence.num_generated:
        forks = sequence.group.width - 1
    return tables.blocks_for(len(sequence.tokens)) + forks


def reserved_blocks(running: Items[Sequence], tables: BlockTables) -> int:
    """What reserved sequences may yet take."""
    return sum(
        max(0, most_blocks(sequence, tables) - _blocks_held(sequence))
        for sequence in running
        if sequence.is_reserved and (sequence.group is None or sequence is sequence.group.live[0])
    )


def _blocks_held(sequence: Sequence) -> int:
    if sequence.group is None:
        return len(sequence.block_table)
    return len({block for beam in sequence.group.live for block in beam.block_table})


def spared_blocks(sequence: Sequence, tables: BlockTables, most: int) -> int:
    """Cached blocks that its work leaves to other tenants, `most` of them at the most."""
    return min(most, tables.pool.num_cached_by_others(sequence.tenant)) if most else 0


def places(sequence: Sequence, running: Items[Sequence]) -> int:
    """Of max_num_seqs, that it would take beside those that run: all that it will fork into."""
    if sequence.group is None:
        return sequence.num_outputs
    return 0 if any(other.group is sequence.group for other in running) else sequence.group.width


def places_taken(running: Items[Sequence]) -> int:
    groups = {id(sequence.group): sequence.group.width for sequence in running if sequence.group is not None}
    return sum(groups.values()) + sum(sequence.num_outputs for sequence in running if sequence.group is None)


def fits(
    sequence: Sequence,
    hits: Hits,
    *,
    running: Items[Sequence],
    waiting: Items[Sequence],
    tables: BlockTables,
    is_reserved: bool,
    most_spared: int,
) -> bool:
    """Whether all that is uncached fits beside what running prompts still need and a block for each decode.

    `is_reserved` asks for room for all that it can ever need. `most_spared` blocks that other tenants have cached
    are no room for it.
    """
    if is_reserved and any(
        other.is_reserved and other.group is sequence.group is not None for other in running
    ):
        return True  # its search came with room for all of its beams
    needed = most_blocks(sequence, tables) if is_reserved else blocks_soon(sequence, tables)
    if sequence.group is not None and not is_reserved:
        mates = (other for other in waiting if other.group is sequence.group and other is not sequence)
        needed += sum(blocks_soon(mate, tables) for mate in mates)
    promised = sum(max(1, blocks_soon(other, tables) - len(other.block_table)) for other in running)
    unused_hits = sum(tables.pool.references(block) == 0 for block in hits.blocks)
    available = tables.pool.num_allocatable - reserved_blocks(running, tables) - unused_hits
    available -= spared_blocks(sequence, tables, most_spared)
    return needed - len(hits.blocks) + promised <= available
