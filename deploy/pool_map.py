"""A block pool as a map: one character a block, coloured on a terminal.

Owns the picture and its reading back from text; asks nobody and prints nothing.
"""

import math
from collections.abc import Iterator

from blockyard.proto.v1 import cluster_pb2
from rich.console import Group, RenderableType
from rich.text import Text

MAX_CELLS = 2048
"""A map of more blocks draws several in one cell."""
ROW_CELLS = 64
FREE, CACHED, USED_ONCE, USED_BY_MANY = ".", "c", "1", "+"
"""The characters of the map that each worker writes into Ray's logs; 2-9 stand for themselves."""
_ORDER_OF_BUSYNESS = ".c123456789+"
_STYLES = {FREE: "bright_black", CACHED: "cyan", USED_ONCE: "green"}
_SHARED_STYLE = "yellow"


def block_cells(pool: cluster_pb2.BlockPool) -> str:
    """One character for each block, in block order."""
    return "".join(_cell(run) * run.length for run in pool.runs)


def cells_of_map(text: str) -> str:
    """The same characters out of the text that a worker writes: rows of `<first block>  <cells>`."""
    rows = (line.split() for line in text.splitlines())
    return "".join(row[1] for row in rows if len(row) == 2 and row[0].isdigit())


def merged_cells(cells: str, blocks_per_cell: int) -> str:
    """Several blocks a cell: the busiest of them shows."""
    chunks = (cells[start : start + blocks_per_cell] for start in range(0, len(cells), blocks_per_cell))
    return "".join(max(chunk, key=_ORDER_OF_BUSYNESS.index) for chunk in chunks)


def pool_map(pool: cluster_pb2.BlockPool) -> RenderableType:
    """The pool as a map with a headline of counts and a legend."""
    blocks_per_cell = max(1, math.ceil(pool.total_blocks / MAX_CELLS))
    cells = merged_cells(block_cells(pool), blocks_per_cell)
    scale = "a block each" if blocks_per_cell == 1 else f"{blocks_per_cell} blocks each, the busiest shows"
    headline = Text.assemble((pool.worker_id, "bold"), f"  {pool_counts(pool)}")
    return Group(headline, *_map_rows(cells, blocks_per_cell), _legend(scale))


def pool_counts(pool: cluster_pb2.BlockPool) -> str:
    size_bytes = pool.total_blocks * pool.bytes_per_block
    return (
        f"{pool.total_blocks} blocks of {pool.block_size} tokens ({format_bytes(size_bytes)}): "
        f"{pool.free_blocks} free, {pool.cached_blocks} cached, {pool.used_blocks} used"
    )


def format_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _cell(run: cluster_pb2.BlockRun) -> str:
    if run.state == cluster_pb2.BLOCK_STATE_USED:
        return str(max(1, run.references)) if run.references <= 9 else USED_BY_MANY
    return CACHED if run.state == cluster_pb2.BLOCK_STATE_CACHED else FREE


def _map_rows(cells: str, blocks_per_cell: int) -> Iterator[Text]:
    width = len(str(len(cells) * blocks_per_cell))
    for start in range(0, len(cells), ROW_CELLS):
        row = Text(f"{start * blocks_per_cell:>{width}} ", style="bright_black")
        for cell in cells[start : start + ROW_CELLS]:
            row.append(cell, style=_STYLES.get(cell, _SHARED_STYLE))
        yield row


def _legend(scale: str) -> Text:
    return Text.assemble(
        (FREE, _STYLES[FREE]),
        " free  ",
        (CACHED, _STYLES[CACHED]),
        " cached prefix  ",
        (USED_ONCE, _STYLES[USED_ONCE]),
        " held by one sequence  ",
        (f"2-9 {USED_BY_MANY}", _SHARED_STYLE),
        f" shared by so many  |  {scale}",
    )
