"""Decodes on a CPU that share blocks: they are computed together, and each has the bits that it has alone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from blockyard.kernels import reference
from blockyard.kernels.attention_plan import AttentionPlan, plan_attention
from blockyard.kernels.backend import Backend
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .conftest import quantised_pool

AssertNear = Callable[[torch.Tensor, torch.Tensor], None]
HEAD_DIM = 32


@dataclass(frozen=True)
class Row:
    table: list[int]
    context: int


@st.composite
def trees(draw: st.DrawFn) -> tuple[int, list[Row]]:
    """Block size, and rows in any order of which each begins with some blocks of another, with all of them, or with
    none; some end where what they share does."""
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
    return plan_attention(
        query_lens=[*[1] * len(rows), *([prompt] if prompt else [])],
        context_lens=[row.context for row in (*rows, *(rows[-1:] if prompt else []))],
        block_tables=[row.table for row in (*rows, *(rows[-1:] if prompt else []))],
        block_size=block_size,
        device="cpu",
        num_kv_heads=num_kv_heads,
    )


def pool_of(rows: list[Row], block_size: int, num_kv_heads: int) -> torch.Tensor:
    """Random where a row looks, NaN elsewhere."""
    num_blocks = 1 + max(max(row.table) for row in rows)
    pool = torch.full((num_blocks, 2, num_kv_heads, block_size, HEAD_DIM), float("nan"))
    for row in rows:
        for index, block in enumerate(row.table):
            filled = min(block_size, row.context - index * block_size)
            unknown = pool[block, :, :, :filled].isnan()
            pool[block, :, :, :filled][unknown] = torch.randn(int(unknown.sum()))
    return pool


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    tree=trees(),
    group=st.integers(1, 8),
    num_kv_heads=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    kv_dtype=st.sampled_from([None, torch.int8, torch.float8_e4m3fn]),
    has_prompt=st.booleans(),
    threads=st.integers(1, 3),
)
def test_a_decode_has_the_same_bits_alone_and_with_those_that_share_its_blocks(
    cpu_backend: Backend,
    assert_near: AssertNear,
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
    pool = pool.to(dtype) if kv_dtype is None else quantised_pool(pool, kv_dtype)
    prompt = rows[-1].context if has_prompt and rows[-1].context > 1 else 0
    q_TND = torch.randn(len(rows) + prompt, group * num_kv_heads, HEAD_DIM).to(dtype)
    scale = HEAD_DIM**-0.5

    def attend(backend: Any, plan: AttentionPlan, queries: torch.Tensor) -> torch.Tensor:
        out = torch.full_like(queries, float("nan"))
        backend.attention(queries, pool, plan, scale=scale, out_TND=out)
        return out

    whole = plan_of(rows, block_size, num_kv_heads, prompt)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = attend(cpu_backend, whole, q_TND)
    finally:
        torch.set_num_threads(before)
    assert_near(together, attend(reference, whole, q_TND))
    for index, row in enumerate(rows):
        alone = attend(cpu_backend, plan_of([row], block_size, num_kv_heads), q_TND[index : index + 1])
        assert torch.equal(together[index : index + 1], alone), f"row {index}"


@pytest.mark.parametrize("window", [1, 100, 5000])
def test_under_a_window_decodes_that_share_read_what_they_see(
    cpu_backend: Backend, assert_near: AssertNear, window: int
) -> None:
    rows = [Row([*range(8), 8 + row], 8 * 16 + 1 + row) for row in range(12)]
    pool, plan = pool_of(rows, 16, 2), plan_of(rows, 16, 2).windowed(window)
    q_TND = torch.randn(len(rows), 8, HEAD_DIM)
    results = [torch.empty_like(q_TND) for _ in range(2)]
    for backend, out in zip((cpu_backend, reference), results, strict=True):
        backend.attention(q_TND, pool, plan, scale=0.1, out_TND=out)
    assert_near(*results)
