"""Cascade: keys that many decode rows share are read by items over all these rows, and the result is unchanged."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from blockyard.kernels.attention.plan import AttentionPlan, plan_attention
from blockyard.kernels.attention.shared_prefix import MIN_SHARED_TOKENS, MIN_SHARERS
from blockyard.kernels.interface import Backend
from blockyard.kernels.torch import reference

from .conftest import in_computed_type, quantised_pool

AssertNear = Callable[[torch.Tensor, torch.Tensor], None]
BLOCK_SIZE = 64
DEEP = MIN_SHARED_TOKENS // BLOCK_SIZE


def tables_of(
    shared_blocks: list[int], context_lens: list[int], block_size: int, groups: list[int] | None = None
) -> list[list[int]]:
    """Row i's first shared_blocks[i] blocks are its group's, of group 0 the blocks 0, 1, 2 ..., the others its own."""
    tables, deepest = [], max(shared_blocks, default=0)
    groups = groups or [0] * len(shared_blocks)
    fresh = deepest * (1 + max(groups, default=0))
    for shared, context_len, group in zip(shared_blocks, context_lens, groups, strict=True):
        own = -(-context_len // block_size) - shared
        first = group * deepest
        tables.append([*range(first, first + shared), *range(fresh, fresh + own)])
        fresh += own
    return tables


def plan_of(
    shared_blocks: list[int],
    context_lens: list[int],
    *,
    block_size: int = BLOCK_SIZE,
    groups: list[int] | None = None,
    **options: Any,
) -> AttentionPlan:
    return plan_attention(
        query_lens=[1] * len(context_lens),
        context_lens=context_lens,
        block_tables=tables_of(shared_blocks, context_lens, block_size, groups),
        block_size=block_size,
        device="cpu",
        **{"num_kv_heads": 2, **options},
    )


def test_two_groups_and_a_loner_are_told_apart() -> None:
    context_len = MIN_SHARED_TOKENS + 100
    one = tables_of([DEEP] * 9, [context_len] * 9, BLOCK_SIZE)
    other = [
        [1000 + block for block in table]
        for table in tables_of([DEEP + 1] * 8, [context_len] * 8, BLOCK_SIZE)
    ]
    loner = [list(range(5000, 5000 + len(one[0])))]
    tables = [table for pair in zip(one, [*other, *loner], strict=True) for table in pair]
    plan = plan_attention(
        query_lens=[1] * 18,
        context_lens=[context_len] * 18,
        block_tables=tables,
        block_size=BLOCK_SIZE,
        device="cpu",
        num_kv_heads=1,
    )
    assert plan.shared_members_M.tolist() in (
        [*range(0, 18, 2), *range(1, 17, 2)],
        [*range(1, 17, 2), *range(0, 18, 2)],
    )
    ends = {
        first: max(end for begin, _, _, end, _ in plan.shared_items_Y5.tolist() if begin == first)
        for first in (0, 9)
    }
    assert ends == {0: MIN_SHARED_TOKENS, 9: MIN_SHARED_TOKENS + BLOCK_SIZE}


def test_rows_that_share_a_late_block_only_are_no_group() -> None:
    context_len = MIN_SHARED_TOKENS + 1
    tables = tables_of([DEEP] * MIN_SHARERS, [context_len] * MIN_SHARERS, BLOCK_SIZE)
    for row, table in enumerate(tables):
        table[0] = 9000 + row  # a copy of the first block, such as two that computed it at once leave behind
    plan = plan_attention(
        query_lens=[1] * MIN_SHARERS,
        context_lens=[context_len] * MIN_SHARERS,
        block_tables=tables,
        block_size=BLOCK_SIZE,
        device="cpu",
        num_kv_heads=1,
    )
    assert not len(plan.shared_members_M)


def test_a_long_context_of_many_is_read_once_instead_of_by_each() -> None:
    """The example of the design: 64 chats on a prompt of 8,192 tokens with 256 of their own."""
    block_size = 16
    plan = plan_of([512] * 64, [8192 + 256] * 64, block_size=block_size)
    own = sum(end - first for _, _, _, first, end, _ in plan.decode_items_W6.tolist())
    shared = sum(end - first for _, _, first, end, _ in plan.shared_items_Y5.tolist())
    assert own == 64 * 256
    assert shared == 2 * 8192, "two items of 32 members"


def test_under_a_window_that_hides_something_every_row_reads_for_itself() -> None:
    plan = plan_of([DEEP] * MIN_SHARERS, [MIN_SHARED_TOKENS + 9] * MIN_SHARERS)
    assert len(plan.shared_items_Y5)
    windowed = plan.windowed(MIN_SHARED_TOKENS)
    assert not len(windowed.shared_items_Y5)
    assert not len(windowed.shared_members_M)
    assert min(first for _, _, _, first, _, _ in windowed.decode_items_W6.tolist()) == 9


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float32, None),
        (torch.float16, None),
        (torch.bfloat16, None),
        (torch.float32, torch.int8),
        (torch.float16, torch.float8_e4m3fn),
        (torch.bfloat16, torch.int8),
    ],
)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 1), (5, 1), (4, 2)])
def test_the_result_is_that_of_rows_that_read_alone(
    backend: Backend,
    device: torch.device,
    assert_near: AssertNear,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    num_heads: int,
    num_kv_heads: int,
) -> None:
    """Nine members run among other rows and a prefill; unwritten slots hold NaN."""
    shared_blocks = [DEEP, 0, *[DEEP] * (MIN_SHARERS - 1), DEEP + 1, 0]
    context_lens = [
        shared * BLOCK_SIZE + own for shared, own in zip(shared_blocks, range(1, 12), strict=True)
    ]
    context_lens[-1] = 20
    query_lens = [*[1] * (len(context_lens) - 1), 20]
    tables = tables_of(shared_blocks, context_lens, BLOCK_SIZE)
    plan = plan_attention(
        query_lens=query_lens,
        context_lens=context_lens,
        block_tables=tables,
        block_size=BLOCK_SIZE,
        device=device,
        num_kv_heads=num_kv_heads,
        group=num_heads // num_kv_heads,
    )
    assert len(plan.shared_members_M) == MIN_SHARERS + 1
    # Other numbers each time: partial results that an earlier step left in the workspace must not do.
    generator = torch.Generator().manual_seed(10 * num_heads + len(str(dtype)))
    pool = torch.full((max(map(max, tables)) + 1, 2, num_kv_heads, BLOCK_SIZE, 16), float("nan"))
    for table, context_len in zip(tables, context_lens, strict=True):
        for position in range(context_len):
            place = pool[table[position // BLOCK_SIZE], :, :, position % BLOCK_SIZE]
            place.copy_(torch.randn(place.shape, generator=generator))
    q_TND = torch.randn((sum(query_lens), num_heads, 16), generator=generator).to(device, dtype)
    pool_B2KPD = pool.to(device, dtype) if kv_dtype is None else quantised_pool(pool, kv_dtype).to(device)
    expected, out = torch.full_like(q_TND, float("nan")), torch.full_like(q_TND, float("nan"))
    reference.attention(q_TND, pool_B2KPD, plan, scale=0.25, out_TND=expected)
    backend.attention(q_TND, pool_B2KPD, plan, scale=0.25, out_TND=out)
    assert_near(*in_computed_type(out, expected, kv_dtype))
