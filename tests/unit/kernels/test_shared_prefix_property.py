"""Cascade over any tables: each row reads every key once, and exactly the rows that share enough are members."""

import hypothesis
import pytest
import torch
from blockyard.kernels.attention.items import FEW_PROGRAMS_TOKENS
from blockyard.kernels.attention.plan import AttentionPlan
from blockyard.kernels.attention.shared_prefix import MIN_SHARERS, members_of_item
from blockyard.kernels.attention.static_plan import Bounds, StaticDecodes
from hypothesis import strategies

from .test_shared_prefix import BLOCK_SIZE, DEEP, plan_of


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


@hypothesis.given(
    rows=strategies.lists(
        strategies.tuples(strategies.integers(0, DEEP + 3), strategies.integers(1, 400)),
        min_size=1,
        max_size=50,
    ),
    group=strategies.sampled_from([1, 4, 5, 48]),
    target_programs=strategies.sampled_from([1, 64, 528]),
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


@hypothesis.given(
    shared_blocks=strategies.lists(strategies.integers(0, DEEP + 3), min_size=1, max_size=40),
)
def test_who_shares_enough_with_enough_others_is_a_member_and_nobody_else(shared_blocks: list[int]) -> None:
    plan = plan_of(shared_blocks, [shared * BLOCK_SIZE + 7 for shared in shared_blocks])
    deep = [row for row, shared in enumerate(shared_blocks) if shared >= DEEP]
    assert sorted(plan.shared_members_M.tolist()) == (deep if len(deep) >= MIN_SHARERS else [])


@hypothesis.given(
    rows=strategies.lists(
        strategies.tuples(strategies.integers(0, 40), strategies.integers(0, 3)), min_size=1, max_size=70
    ),
    own=strategies.integers(1, 3000),
    group=strategies.sampled_from([1, 2, 4, 5, 8, 16, 48]),
    num_kv_heads=strategies.sampled_from([1, 2, 8]),
    target_programs=strategies.sampled_from([1, 64, 528]),
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
        device=torch.device("cpu"),
    )
