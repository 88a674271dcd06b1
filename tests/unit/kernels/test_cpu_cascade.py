"""Decodes on a CPU that share blocks are computed together, and each gets the same bits as alone."""

from ctypes import byref, c_int, c_int32, c_int64
from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch
from blockyard.kernels.attention.plan import AttentionPlan
from blockyard.kernels.cpu.backend import CpuBackend, to_native
from blockyard.kernels.cpu.library import Attention, CpuLibrary
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.properties import examples

from .rig import KV_DTYPES, NAN, Step, assert_near, quantised_pool, small_plan, with_threads

HEAD_DIM = 32
HEADS, KV_HEADS = 8, 2


@pytest.fixture(scope="module")
def library(cpu_backend: CpuBackend) -> CpuLibrary:
    return cpu_backend.library


@dataclass(frozen=True)
class Row:
    table: list[int]
    context: int


@st.composite
def trees(draw: st.DrawFn) -> tuple[int, list[Row]]:
    """Draw a block size and rows in any order.

    A row begins with some blocks of another row, with all of them, or with none. Some rows end where their shared
    blocks end.
    """
    block_size = draw(st.sampled_from([16, 32, 64]))
    rows: list[Row] = []
    fresh = 0
    for _ in range(draw(st.integers(2, 16))):
        shared: list[int] = []
        if rows and draw(st.booleans()):
            whole = draw(st.sampled_from(rows))
            shared = whole.table[: draw(st.integers(0, whole.context // block_size))]
        own = draw(st.integers(0 if shared else 1, 150))
        num_own = -(-own // block_size)
        rows.append(Row([*shared, *range(fresh, fresh + num_own)], len(shared) * block_size + own))
        fresh += num_own
    return block_size, draw(st.permutations(rows))


def plan_of(rows: list[Row], block_size: int, num_kv_heads: int, prompt: int = 0) -> AttentionPlan:
    """One token of each; and behind them, where a length is given, the last row's whole context as a prompt."""
    every = [*rows, *(rows[-1:] if prompt else [])]
    return small_plan(
        [*[1] * len(rows), *([prompt] if prompt else [])],
        [row.context for row in every],
        [row.table for row in every],
        block_size=block_size,
        num_kv_heads=num_kv_heads,
    )


def pool_of(rows: list[Row], block_size: int, num_kv_heads: int) -> torch.Tensor:
    """Random where a row looks, NaN elsewhere."""
    num_blocks = 1 + max(max(row.table) for row in rows)
    pool = torch.full((num_blocks, 2, num_kv_heads, block_size, HEAD_DIM), NAN)
    for row in rows:
        for index, block in enumerate(row.table):
            filled = min(block_size, row.context - index * block_size)
            unknown = pool[block, :, :, :filled].isnan()
            pool[block, :, :, :filled][unknown] = torch.randn(int(unknown.sum()))
    return pool


@dataclass(frozen=True)
class Group:
    """Decodes that are one item for each kv head."""

    shared: int
    rows: list[int]


def groups_of(
    library: CpuLibrary,
    rows: list[Row],
    *,
    block_size: int = 16,
    num_heads: int = HEADS,
    threads: int = 1,
    window: int = 0,
) -> list[Group]:
    plan = plan_of(rows, block_size, KV_HEADS)
    work = Attention(
        query_starts=plan.query_starts_R1.data_ptr(),
        context_lens=plan.context_lens_R.data_ptr(),
        table=plan.block_table_RB.data_ptr(),
        num_heads=num_heads,
        num_kv_heads=KV_HEADS,
        block_size=block_size,
        num_rows=len(rows),
        table_stride=plan.block_table_RB.stride(0),
        window=window,
    )
    shared, counts, order = ((kind * len(rows))() for kind in (c_int64, c_int32, c_int32))
    num_groups = library.loaded.by_decode_groups(c_int(threads), byref(work), shared, counts, order)
    ends = list(accumulate(counts[:num_groups]))
    return [Group(shared[number], order[end - counts[number] : end]) for number, end in enumerate(ends)]


@examples(150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    tree=trees(),
    group=st.integers(1, 8),
    num_kv_heads=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    kv_dtype=st.sampled_from([None, *KV_DTYPES.values()]),
    has_prompt=st.booleans(),
    threads=st.integers(1, 3),
)
def test_a_decode_has_the_same_bits_alone_and_with_those_that_share_its_blocks(
    library: CpuLibrary,
    tree: tuple[int, list[Row]],
    group: int,
    num_kv_heads: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    has_prompt: bool,
    threads: int,
) -> None:
    block_size, rows = tree
    torch.manual_seed(len(rows) + group)
    pool = pool_of(rows, block_size, num_kv_heads)
    prompt = rows[-1].context if has_prompt and rows[-1].context > 1 else 0
    step = Step(
        plan=plan_of(rows, block_size, num_kv_heads, prompt),
        q_TND=torch.randn(len(rows) + prompt, group * num_kv_heads, HEAD_DIM).to(dtype),
        kv_pool_B2KPD=pool.to(dtype) if kv_dtype is None else quantised_pool(pool, kv_dtype),
        scale=HEAD_DIM**-0.5,
    )
    expected, backend = step.expected(), CpuBackend(library)
    step = replace(step, kv_pool_B2KPD=to_native(step.kv_pool_B2KPD, dtype))
    together = with_threads(threads, lambda: step.attend(backend))
    assert_near(together, expected)
    for index, row in enumerate(rows):
        own = slice(index, index + 1)
        alone = step.attend(backend, plan_of([row], block_size, num_kv_heads), step.q_TND[own])
        assert torch.equal(together[own], alone), f"row {index}"


@pytest.mark.parametrize("window", [1, 64, 100])
def test_under_a_window_decodes_that_share_read_what_they_see_alone(
    cpu_backend: CpuBackend, library: CpuLibrary, window: int
) -> None:
    rows = [Row([*range(8), 8 + row], 8 * 16 + 1 + row) for row in range(12)]
    assert max(len(group.rows) for group in groups_of(library, rows)) == 8
    assert max(len(group.rows) for group in groups_of(library, rows, window=window)) == 1
    torch.manual_seed(window)
    pool, plan = pool_of(rows, 16, 2), plan_of(rows, 16, 2).windowed(window)
    step = Step(plan=plan, q_TND=torch.randn(len(rows), 8, HEAD_DIM), kv_pool_B2KPD=pool, scale=0.1)
    assert_near(step.attend(cpu_backend), step.expected())


@given(tree=trees(), num_heads=st.sampled_from([4, 8, 64]), threads=st.integers(1, 8))
def test_items_are_of_rows_that_share_what_they_read_together(
    library: CpuLibrary, tree: tuple[int, list[Row]], num_heads: int, threads: int
) -> None:
    block_size, rows = tree
    groups = groups_of(library, rows, block_size=block_size, num_heads=num_heads, threads=threads)
    assert sorted(row for group in groups for row in group.rows) == list(range(len(rows)))
    keys = [sum(rows[row].context for row in group.rows) for group in groups]
    assert keys == sorted(keys, reverse=True)
    for group, seen in zip(groups, keys, strict=True):
        assert (group.shared > 0) == (len(group.rows) > 1)
        assert group.shared % 64 == 0
        assert all(group.shared < rows[row].context for row in group.rows)
        assert len({tuple(rows[row].table[: -(-group.shared // block_size)]) for row in group.rows}) == 1
        if len(group.rows) > 1:
            assert len(group.rows) * num_heads // KV_HEADS <= 32
            assert seen <= sum(keys) * KV_HEADS / (2 * threads)
            assert group.shared * (len(group.rows) - 1) >= seen / 8


def family(first_block: int, num_shared: int, count: int, own: int = 64) -> list[Row]:
    """Return rows that share blocks of 64 tokens, and none with any other family."""
    shared, num_own = range(first_block, first_block + num_shared), -(-own // 64)
    begins = range(10_000 * (first_block + 1), 10_000 * (first_block + 1) + count * num_own, num_own)
    return [Row([*shared, *range(begin, begin + num_own)], num_shared * 64 + own) for begin in begins]


# A stray whose first block is that of the others, and whose second comes before theirs.
STRAY = Row([5, *range(6, 10), *range(50, 67)], 22 * 64)
MEMBERS = [Row([5, *range(10, 30), 100 + number], 22 * 64) for number in range(8)]
LONG = [*family(0, 500, 8), *family(2, 1, 120)]


@pytest.mark.parametrize(
    ("rows", "threads", "sizes"),
    [
        pytest.param(family(0, 20, 20), 1, [(8, 1280), (8, 1280), (4, 1280)], id="as many as fill an item"),
        pytest.param([*MEMBERS[:3], STRAY, *MEMBERS[3:]], 1, [(8, 21 * 64), (1, 0)], id="a stray"),
        pytest.param(family(0, 1, 8, own=960), 1, [(1, 0)] * 8, id="too little is spared"),
        pytest.param(LONG, 16, [(1, 0)] * 8, id="no thread gets more than half of its share"),
        pytest.param(LONG, 1, [(8, 500 * 64)], id="one thread gets all"),
    ],
)
def test_decodes_are_together_where_it_pays(
    library: CpuLibrary, rows: list[Row], threads: int, sizes: list[tuple[int, int]]
) -> None:
    groups = groups_of(library, rows, block_size=64, threads=threads)
    found = [(len(group.rows), group.shared) for group in groups]
    assert found[: len(sizes)] == sizes
    assert len(found) == len(sizes) or rows is LONG
