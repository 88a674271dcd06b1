"""The picture of the pool shows every block once, in order, and agrees with the worker's own text map."""

import io

from blockyard.deploy.views.pool_map import cells_of_map, host_lines, pool_map
from blockyard.proto.v1 import cluster_pb2
from blockyard.worker.inspection.pool_map import MAX_CELLS, block_cells, map_text, merged_cells
from rich.console import Console


def pool_of(*runs: tuple[cluster_pb2.BlockState, int, int]) -> cluster_pb2.BlockPool:
    """Runs of (state, length, references)."""
    lengths = {state: sum(length for other, length, _ in runs if other == state) for state, _, _ in runs}
    return cluster_pb2.BlockPool(
        worker_id="worker-7",
        incarnation="abc",
        block_size=16,
        bytes_per_block=1024,
        total_blocks=sum(length for _, length, _ in runs),
        free_blocks=lengths.get(cluster_pb2.BLOCK_STATE_FREE, 0),
        cached_blocks=lengths.get(cluster_pb2.BLOCK_STATE_CACHED, 0),
        used_blocks=lengths.get(cluster_pb2.BLOCK_STATE_USED, 0),
        runs=[cluster_pb2.BlockRun(state=s, length=length, references=refs) for s, length, refs in runs],
    )


MIXED = pool_of(
    (cluster_pb2.BLOCK_STATE_USED, 2, 1),
    (cluster_pb2.BLOCK_STATE_USED, 3, 6),
    (cluster_pb2.BLOCK_STATE_USED, 1, 40),
    (cluster_pb2.BLOCK_STATE_CACHED, 70, 0),
    (cluster_pb2.BLOCK_STATE_FREE, 57, 0),
)


MIXED.evictions = 5
MIXED.load.running, MIXED.load.waiting, MIXED.load.preemptions = 2, 1, 4


def drawn(pool: cluster_pb2.BlockPool) -> str:
    page = io.StringIO()
    Console(file=page, width=200).print(pool_map(pool))
    return page.getvalue()


def test_each_block_is_one_character_in_block_order() -> None:
    assert block_cells(MIXED) == "11" + "666" + "+" + "c" * 70 + "." * 57


def test_the_workers_text_map_reads_back_as_the_same_blocks() -> None:
    assert cells_of_map(map_text(MIXED)) == block_cells(MIXED)


def test_the_picture_shows_counts_cells_and_legend_without_colour_codes() -> None:
    page = drawn(MIXED)
    assert "133 blocks of 16 tokens (133.0 KiB): 57 free, 70 cached, 6 used" in page
    assert "sequences: 2 running, 1 waiting; since the start 5 evictions, 4 preemptions" in page
    assert "  0 11666+" + "c" * 58 in page
    assert "\x1b" not in page


def test_host_memory_has_a_line_where_a_worker_has_a_cache_there_or_has_moved_blocks_to_it() -> None:
    assert "host memory" not in drawn(MIXED)
    pool = cluster_pb2.BlockPool(bytes_per_block=1024, host_cache_blocks=512)
    pool.load.host_cached_blocks = 17
    assert host_lines(pool) == ["host memory: 17 of 512 blocks (512.0 KiB) cached"]
    pool.load.swaps, pool.load.preemptions = 3, 4
    pool.MergeFrom(MIXED)
    assert (
        "host memory: 17 of 512 blocks (512.0 KiB) cached; 3 of 4 preemptions moved their blocks there"
        in drawn(pool).splitlines()
    )
    pool.host_cache_blocks = 0
    assert host_lines(pool) == ["host memory: 3 of 4 preemptions moved their blocks there"]


def test_of_merged_blocks_the_busiest_shows() -> None:
    assert merged_cells("..c.c1..21+.....", 4) == "c1+."


def test_a_pool_of_any_size_fits_the_picture() -> None:
    pool = pool_of((cluster_pb2.BLOCK_STATE_FREE, 30_000, 0), (cluster_pb2.BLOCK_STATE_USED, 1, 1))
    page = drawn(pool)
    assert page.count(".") <= MAX_CELLS + 3
    assert "15 blocks each" in page
    assert "1" in page.splitlines()[-2]


def test_the_workers_text_map_of_a_large_pool_stays_short() -> None:
    pool = pool_of((cluster_pb2.BLOCK_STATE_FREE, 500_000, 0), (cluster_pb2.BLOCK_STATE_CACHED, 1, 0))
    lines = map_text(pool).splitlines()
    assert len(lines) <= 4 + MAX_CELLS // 64
    assert lines[-1].endswith("c")
    assert "245 blocks each" in lines[3]
