"""Pool map: a block pool as text, with one character for one block, or for several blocks of a large pool.

Knows messages only, no engine. The worker's map file and the command line draw the same characters.
"""

from blockyard.proto.v1.cluster_pb2 import BlockPool, BlockRun, BlockState

MAX_CELLS = 2048
"""Maximum cells of a map. In a map of more blocks, one cell stands for several."""
ROW_CELLS = 64
FREE, CACHED, USED_ONCE, USED_BY_MANY = ".", "c", "1", "+"
"""The characters 2-9 stand for the number of sequences that hold the block."""
_ORDER_OF_BUSYNESS = ".c123456789+"


def block_cells(pool: BlockPool) -> str:
    """Return one character for each block, in block order."""
    return "".join(_cell(run) * run.length for run in pool.runs)


def merged_cells(cells: str, blocks_per_cell: int) -> str:
    """Merge several blocks into each cell, which shows the busiest of them."""
    if blocks_per_cell == 1:
        return cells
    chunks = (cells[start : start + blocks_per_cell] for start in range(0, len(cells), blocks_per_cell))
    return "".join(max(chunk, key=_ORDER_OF_BUSYNESS.index) for chunk in chunks)


def blocks_per_cell(pool: BlockPool) -> int:
    """Return the least number of blocks in a cell that keeps the map within MAX_CELLS."""
    return max(1, -(-pool.total_blocks // MAX_CELLS))


def scale_text(pool: BlockPool) -> str:
    scale = blocks_per_cell(pool)
    return "a block each" if scale == 1 else f"{scale} blocks each, the busiest shows"


def activity_text(pool: BlockPool) -> str:
    load = pool.load
    return (
        f"sequences: {load.running} running, {load.waiting} waiting; since the start "
        f"{pool.evictions} evictions, {load.preemptions} preemptions"
    )


def map_text(pool: BlockPool) -> str:
    """Return the pool as lines of text, with its counts and a legend.

    Rows begin with the number of their first block, padded with zeros: the dashboard's log page folds spaces.
    """
    scale = blocks_per_cell(pool)
    cells = merged_cells(block_cells(pool), scale)
    head = (
        f"worker {pool.worker_id}, incarnation {pool.incarnation}\n"
        f"blocks: {pool.total_blocks} of {pool.block_size} tokens = {pool.free_blocks} free + "
        f"{pool.cached_blocks} cached + {pool.used_blocks} used\n"
        f"{_host_line(pool)}"
        f"{activity_text(pool)}\n"
        f"legend: . free | c cached prefix | 1-9 held by so many sequences | + by ten or more | {scale_text(pool)}\n"
    )
    rows = (
        f"{start * scale:06d} {cells[start : start + ROW_CELLS]}" for start in range(0, len(cells), ROW_CELLS)
    )
    return head + "\n".join(rows) + "\n"


def _host_line(pool: BlockPool) -> str:
    """Return the line on host memory. Empty where there is no host cache."""
    if not pool.host_cache_blocks:
        return ""
    return f"host memory: {pool.load.host_cached_blocks} of {pool.host_cache_blocks} blocks keep what was evicted\n"


def _cell(run: BlockRun) -> str:
    if run.state == BlockState.BLOCK_STATE_USED:
        return str(max(1, run.references)) if run.references <= 9 else USED_BY_MANY
    return CACHED if run.state == BlockState.BLOCK_STATE_CACHED else FREE
