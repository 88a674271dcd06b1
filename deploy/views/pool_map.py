"""Map of a block pool, coloured on a terminal.

Owns the map and reading it back from text. Makes no calls and prints nothing. worker/inspection/pool_map.py owns the
characters.
"""

from collections.abc import Iterator

from blockyard.deploy.views.quantities import format_bytes
from blockyard.proto.v1 import cluster_pb2
from blockyard.worker.inspection.pool_map import (
    CACHED,
    FREE,
    ROW_CELLS,
    USED_BY_MANY,
    USED_ONCE,
    activity_text,
    block_cells,
    blocks_per_cell,
    merged_cells,
    scale_text,
)
from rich.console import Group, RenderableType
from rich.text import Text

_STYLES = {FREE: "bright_black", CACHED: "cyan", USED_ONCE: "green"}
_SHARED_STYLE = "yellow"


def cells_of_map(text: str) -> str:
    """Extract the characters of the map from a worker's text, whose rows are `<first block>  <cells>`."""
    rows = (line.split() for line in text.splitlines())
    return "".join(row[1] for row in rows if len(row) == 2 and row[0].isdigit())


def pool_map(pool: cluster_pb2.BlockPool) -> RenderableType:
    """Draw the pool as a map, with a headline of counts and a legend."""
    scale = blocks_per_cell(pool)
    cells = merged_cells(block_cells(pool), scale)
    headline = Text.assemble((pool.worker_id, "bold"), f"  {pool_counts(pool)}")
    lines = [Text(line) for line in (activity_text(pool), *host_lines(pool))]
    return Group(headline, *lines, *_map_rows(cells, scale), _legend(scale_text(pool)))


def pool_counts(pool: cluster_pb2.BlockPool) -> str:
    size_bytes = pool.total_blocks * pool.bytes_per_block
    return (
        f"{pool.total_blocks} blocks of {pool.block_size} tokens ({format_bytes(size_bytes)}): "
        f"{pool.free_blocks} free, {pool.cached_blocks} cached, {pool.used_blocks} used"
    )


def host_lines(pool: cluster_pb2.BlockPool) -> list[str]:
    """Return a line about the worker's blocks in host memory, or none without a host cache and without swaps."""
    load, parts = pool.load, []
    if pool.host_cache_blocks:
        size_bytes = pool.host_cache_blocks * pool.bytes_per_block
        parts.append(
            f"{load.host_cached_blocks} of {pool.host_cache_blocks} blocks ({format_bytes(size_bytes)}) cached"
        )
    if load.swaps:
        parts.append(f"{load.swaps} of {load.preemptions} preemptions moved their blocks there")
    return [f"host memory: {'; '.join(parts)}"] if parts else []


def _map_rows(cells: str, scale: int) -> Iterator[Text]:
    width = len(str(len(cells) * scale))
    for start in range(0, len(cells), ROW_CELLS):
        row = Text(f"{start * scale:>{width}} ", style="bright_black")
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
        f" shared by that many  |  {scale}",
    )
