"""Capacity: how many blocks and sequence slots a sequence may take, and whether another one fits.

Pure arithmetic over the running and the waiting sequences. It changes nothing. A beam search counts as a whole, running
or waiting: its beams are admitted and preempted together.
"""

from collections.abc import Sequence as Items

from blockyard.worker.cache.block_tables import BlockTables, Hits
from blockyard.worker.scheduling.queues import Queues
from blockyard.worker.sequences.sequence import Sequence


def most_blocks(sequence: Sequence, tables: BlockTables) -> int:
    """Return the most blocks that a sequence (or its whole beam search) can ever hold, with `max_tokens` generated."""
    most = tables.blocks_for(sequence.prompt_length + sequence.sampling.max_tokens)
    shared = sequence.prompt_length // tables.block_size
    return shared + (most - shared) * sequence.group.width if sequence.group else most


def blocks_soon(sequence: Sequence, tables: BlockTables) -> int:
    """Return how many blocks a sequence needs for its known tokens, and one for each further output or beam to fork."""
    forks = sequence.num_outputs - 1
    if sequence.group is not None and not sequence.num_generated:
        forks = sequence.group.width - 1
    return tables.blocks_for(len(sequence.tokens)) + forks


def reserved_blocks(running: Items[Sequence], tables: BlockTables) -> int:
    """Return how many more blocks the running sequences with `is_reserved` may take, beyond those that they hold."""
    return sum(
        max(0, most_blocks(sequence, tables) - _blocks_held(sequence))
        for sequence in running
        if sequence.is_reserved and (sequence.group is None or sequence is sequence.group.live[0])
    )


def _blocks_held(sequence: Sequence) -> int:
    if sequence.group is None:
        return len(sequence.block_table)
    return len({block for beam in sequence.group.live for block in beam.block_table})


def protected_blocks(sequence: Sequence, tables: BlockTables, most: int) -> int:
    """Return how many cached blocks of other tenants this sequence must leave alone, at most `most`."""
    return min(most, tables.pool.num_cached_by_others(sequence.tenant)) if most else 0


def available_blocks(sequence: Sequence, queues: Queues, tables: BlockTables, most_protected: int) -> int:
    """Return how many blocks a running sequence may take.

    Blocks reserved for other sequences are left out, and up to `most_protected` cached blocks of other tenants.

    The first sequence of all may take protected blocks, so that something always makes progress.
    """
    if sequence.is_reserved:
        return tables.pool.num_allocatable
    first, reserved = queues.running[0], reserved_blocks(queues.reserved, tables)
    is_first = sequence is first or sequence.group is first.group is not None
    protected = 0 if is_first else protected_blocks(sequence, tables, most_protected)
    return tables.pool.num_allocatable - reserved - protected


def seq_slots(sequence: Sequence, running: Items[Sequence]) -> int:
    """Return how many slots of max_num_seqs a waiting sequence would take, all its future forks included.

    It is 0 for a beam of a search that already runs.
    """
    if sequence.group is None:
        return sequence.num_outputs
    return 0 if any(other.group is sequence.group for other in running) else sequence.group.width


def seq_slots_taken(running: Items[Sequence]) -> int:
    groups = {id(sequence.group): sequence.group.width for sequence in running if sequence.group is not None}
    return sum(groups.values()) + sum(sequence.num_outputs for sequence in running if sequence.group is None)


def fits(
    sequence: Sequence,
    hits: Hits,
    *,
    queues: Queues,
    tables: BlockTables,
    is_reserved: bool,
    max_protected: int,
) -> bool:
    """Return whether the pool has room for a sequence, beside what running prompts still need and a block a decode.

    Its cached blocks, `hits`, need no room. With `is_reserved` there must be room for all blocks that it can ever need.
    Up to `max_protected` blocks that other tenants have cached do not count as room.

    A request alone always fits, once no loan holds blocks: `Scheduler.submit` and its constructor have checked that.
    """
    group, running, waiting = sequence.group, queues.running, queues.waiting
    is_alone = all(group is not None and other.group is group for other in running)
    if is_alone and not queues.is_any_leaving and not tables.num_lent:
        return True
    if is_reserved and any(other.is_reserved and other.group is group is not None for other in running):
        return True  # the first beam was admitted with room for all beams of its search
    needed = most_blocks(sequence, tables) if is_reserved else blocks_soon(sequence, tables)
    if sequence.group is not None and not is_reserved:
        mates = (other for other in waiting if other.group is sequence.group and other is not sequence)
        needed += sum(blocks_soon(mate, tables) for mate in mates)
    promised = sum(max(1, blocks_soon(other, tables) - len(other.block_table)) for other in running)
    unused_hits = sum(tables.pool.references(block) == 0 for block in hits.blocks)
    available = tables.pool.num_allocatable - reserved_blocks(running, tables) - unused_hits
    available -= protected_blocks(sequence, tables, max_protected)
    return needed - len(hits.blocks) + promised <= available
