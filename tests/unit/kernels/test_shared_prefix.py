"""Cascade: keys that many decode rows share are read by items over all these rows.

Each row reads every key once, and exactly the rows that share enough are members. What the items compute is in
test_attention.py.
"""

from typing import Any

import pytest
from blockyard.kernels.attention.items import FEW_PROGRAMS_TOKENS
from blockyard.kernels.attention.plan import AttentionPlan
from blockyard.kernels.attention.shared_prefix import MIN_SHARED_TOKENS, MIN_SHARERS, members_of_item
from blockyard.kernels.attention.static_plan import Bounds, StaticDecodes
from hypothesis import given
from hypothesis import strategies as st

from .rig import CPU, small_plan

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
    tables = tables_of(shared_blocks, context_lens, block_size, groups)
    options = {"num_kv_heads": 2, **options}
    return small_plan([1] * len(context_lens), context_lens, tables, block_size=block_size, **options)


def test_two_groups_and_a_loner_are_told_apart() -> None:
    context_len = MIN_SHARED_TOKENS + 100
    one = tables_of([DEEP] * 9, [context_len] * 9, BLOCK_SIZE)
    other = [
        [1000 + block for block in table]
        for table in tables_of([DEEP + 1] * 8, [context_len] * 8, BLOCK_SIZE)
    ]
    loner = [list(range(5000, 5000 + len(one[0])))]
    tables = [table for pair in zip(one, [*other, *loner], strict=True) for table in pair]
    plan = small_plan([1] * 18, [context_len] * 18, tables, block_size=BLOCK_SIZE)
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
    plan = small_plan([1] * MIN_SHARERS, [context_len] * MIN_SHARERS, tables, block_size=BLOCK_SIZE)
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


def reads_of(plan: AttentionPlan) -> list[dict[int, list[tuple[int, int]]]]:
    """Return for each decode row the ranges of keys, by the partial slot of their result."""
    rows: list[dict[int, list[tuple[int, int]]]] = [{} for _ in range(plan.num_decodes)]
    for row, _, _, first, end, slot in plan.decode_items_W6.tolist():
        rows[row].setdefault(slot, []).append((first, end))
    starts, members = plan.partial_starts_D1.tolist(), plan.shared_members_M.tolist()
    for first_member, end_member, first, end, split in plan.shared_items_Y5.tolist():
        assert 0 < end_member - first_member <= members_of_item(plan.group)
        for row in members[first_member:end_member]:
            rows[row].setdefault(starts[row] + split, []).append((first, end))
    return rows


@given(
    rows=st.lists(
        st.tuples(st.integers(0, DEEP + 3), st.integers(1, 400)),
        min_size=1,
        max_size=50,
    ),
    group=st.sampled_from([1, 4, 5, 48]),
    target_programs=st.sampled_from([1, 64, 528]),
)
def test_every_key_of_every_row_is_read_once_into_a_slot_of_its_own(
    rows: list[tuple[int, int]], group: int, target_programs: int
) -> None:
    shared_blocks = [shared for shared, _ in rows]
    context_lens = [shared * BLOCK_SIZE + own for shared, own in rows]
    plan = plan_of(shared_blocks, context_lens, group=group, target_programs=target_programs)
    starts = plan.partial_starts_D1.tolist()
    for row, (reads, context_len) in enumerate(zip(reads_of(plan), context_lens, strict=True)):
        expected = list(range(starts[row], starts[row + 1])) or [-1]
        assert sorted(reads) == expected
        ranges = sorted(keys for each in reads.values() for keys in each)
        assert len(ranges) == len(reads)
        assert [first for first, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
        assert ranges[-1][1] == context_len
    assert plan.num_partials == starts[-1]


@given(shared_blocks=st.lists(st.integers(0, DEEP + 3), min_size=1, max_size=40))
def test_who_shares_enough_with_enough_others_is_a_member_and_nobody_else(shared_blocks: list[int]) -> None:
    plan = plan_of(shared_blocks, [shared * BLOCK_SIZE + 7 for shared in shared_blocks])
    deep = [row for row, shared in enumerate(shared_blocks) if shared >= DEEP]
    assert sorted(plan.shared_members_M.tolist()) == (deep if len(deep) >= MIN_SHARERS else [])


@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), min_size=1, max_size=70),
    own=st.integers(1, 3000),
    group=st.sampled_from([1, 2, 4, 5, 8, 16, 48]),
    num_kv_heads=st.sampled_from([1, 2, 8]),
    target_programs=st.sampled_from([1, 64, 528]),
)
def test_what_rows_share_never_outgrows_the_buffers_of_a_graph(
    rows: list[tuple[int, int]], own: int, group: int, num_kv_heads: int, target_programs: int
) -> None:
    shared_blocks = [shared for shared, _ in rows]
    contexts = [shared * BLOCK_SIZE + 1 + own * row % 1000 for row, shared in enumerate(shared_blocks)]
    bounds = Bounds(num_kv_heads=num_kv_heads, group=group, target_programs=target_programs)
    cut = {"num_kv_heads": num_kv_heads, "group": group, "target_programs": target_programs}
    plan = plan_of(shared_blocks, contexts, groups=[number for _, number in rows], **cut)
    assert static_decodes(bounds, len(rows), max(contexts)).takes(plan)


@pytest.mark.parametrize(
    ("num_groups", "shared", "target_programs"),
    [(8, DEEP, 1), (1, 264 * FEW_PROGRAMS_TOKENS // BLOCK_SIZE + 1, 528)],
)
def test_those_buffers_are_nearly_filled(num_groups: int, shared: int, target_programs: int) -> None:
    """Fill them by many groups, each of which rounds up, and by one group that gets all programs."""
    num_rows = MIN_SHARERS * num_groups
    contexts = [shared * BLOCK_SIZE + 1] * num_rows
    bounds = Bounds(num_kv_heads=1, target_programs=target_programs)
    plan = plan_of(
        [shared] * num_rows,
        contexts,
        groups=[row % num_groups for row in range(num_rows)],
        num_kv_heads=1,
        target_programs=target_programs,
    )
    assert static_decodes(bounds, num_rows, contexts[0]).takes(plan)
    assert len(plan.shared_items_Y5) > 0.6 * bounds.num_shared_items(num_rows)
    assert plan.num_partials > 0.6 * bounds.num_partials(num_rows, is_shared=True)


def static_decodes(bounds: Bounds, num_rows: int, longest: int) -> StaticDecodes:
    return StaticDecodes(
        max_rows=num_rows,
        max_context_tokens=longest,
        block_size=BLOCK_SIZE,
        bounds=bounds,
        device=CPU,
    )
