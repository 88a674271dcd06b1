"""The index arithmetic of a step: slots, positions, and items that cover every visible key once."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from blockyard.kernels.attention.items import FEW_PROGRAMS_TOKENS, PREFILL_ITEM_TOKENS
from blockyard.kernels.attention.plan import (
    PADDING_SLOT,
    AttentionPlan,
    IntArray,
    _in_one_copy,
    plan_rows,
)
from blockyard.kernels.attention.shared_prefix import MIN_SHARED_TOKENS, MIN_SHARERS

from tests.counted_work import lines_run

from .rig import DEVICE, small_plan

OF_ONE_HEAD = {"block_size": 16, "device": "cpu", "num_kv_heads": 1}


def make_plan(query_lens: list[int], context_lens: list[int], **options: int) -> AttentionPlan:
    """Return a plan in which the blocks of each row are in reverse."""
    tables, next_block = [], 0
    for context_len in context_lens:
        count = -(-context_len // 16)
        tables.append(list(range(next_block + count - 1, next_block - 1, -1)))
        next_block += count
    return small_plan(query_lens, context_lens, tables, num_kv_heads=2, **options)


def reads_of(plan: AttentionPlan) -> list[torch.Tensor]:
    """Return how many decode items read each key, for each row."""
    seen = [torch.zeros(context_len, dtype=torch.int32) for context_len in plan.context_lens]
    for row, _, _, first_key, end_key, _ in plan.decode_items_W6.tolist():
        assert first_key < end_key
        seen[row][first_key:end_key] += 1
    return seen


def test_position_37_with_block_size_16_is_logical_block_2_offset_5() -> None:
    plan = small_plan([1], [38], [[70, 11, 40]])
    assert plan.positions_T.tolist() == [37]
    assert plan.slot_mapping_T.tolist() == [40 * 16 + 5]


def test_queries_are_the_last_positions_of_their_context() -> None:
    plan = make_plan([1, 3, 2], [5, 3, 20])
    assert plan.positions_T.tolist() == [4, 0, 1, 2, 18, 19]
    assert plan.query_starts_R1.tolist() == [0, 1, 4, 6]
    assert plan.num_decodes == 1
    assert plan.slot_mapping_T.tolist() == [4, 16, 17, 18, 2 * 16 + 2, 2 * 16 + 3]


def test_every_key_of_a_decode_row_is_in_exactly_one_item() -> None:
    plan = make_plan([1] * 9, [1, 63, 64, 65, 255, 256, 257, 1000, 4099])
    assert all(bool((counts == 1).all()) for counts in reads_of(plan))


def test_partial_slots_are_distinct_and_grouped_by_row() -> None:
    plan = make_plan([1] * 4, [5, 4000, 100, 900])
    slots_of_row: dict[int, list[int]] = {row: [] for row in range(4)}
    for row, _, _, _, _, slot in plan.decode_items_W6.tolist():
        slots_of_row[row].append(slot)
    starts = plan.partial_starts_D1.tolist()
    for row, slots in slots_of_row.items():
        expected = list(range(starts[row], starts[row + 1]))
        assert slots == (expected or [-1])
    assert plan.num_partials == starts[-1] > 0
    assert len(slots_of_row[1]) > len(slots_of_row[3]) > 1


def test_splits_grow_with_the_total_work_not_with_the_batch() -> None:
    alone = make_plan([1], [8192])
    crowded = make_plan([1] * 256, [8192] * 256, target_programs=512)
    assert len(alone.decode_items_W6) == 32
    assert len(crowded.decode_items_W6) == 256


def test_prefill_items_cover_every_query_once_longest_context_first() -> None:
    plan = make_plan([1, 2, 300, 129], [9, 700, 300, 1000])
    seen = [torch.zeros(query_len, dtype=torch.int32) for query_len in plan.query_lens]
    keys = []
    for row, first, end, first_key, end_key, slot in plan.prefill_items_X6.tolist():
        assert 0 < end - first <= PREFILL_ITEM_TOKENS
        assert (first_key, slot) == (0, -1)
        assert end_key == plan.context_lens[row] - plan.query_lens[row] + end
        seen[row][first:end] += 1
        keys.append(end_key)
    assert all(bool((counts == 1).all()) for counts in seen[1:])
    assert keys == sorted(keys, reverse=True)


def test_padding_tokens_have_slot_minus_one() -> None:
    plan = make_plan([1, 1], [3, 4], padded_tokens=4)
    assert plan.slot_mapping_T.tolist()[2:] == [-1, -1]
    assert plan.positions_T.tolist() == [2, 3, 0, 0]
    assert plan.num_query_tokens == 2


def test_a_step_without_rows_has_typed_empty_tensors() -> None:
    plan = make_plan([], [])
    assert plan.slot_mapping_T.dtype == plan.positions_T.dtype == torch.int64
    assert plan.context_lens_R.dtype == plan.decode_items_W6.dtype == torch.int32
    assert plan.query_starts_R1.tolist() == [0]
    assert plan.decode_items_W6.shape == plan.prefill_items_X6.shape == (0, 6)


@pytest.mark.parametrize(
    ("query_lens", "context_lens", "tables", "message"),
    [
        ([2, 1], [2, 1], [[0], [1]], "decode rows"),
        ([2], [1], [[0]], "query length <= context length"),
        ([0], [1], [[0]], "query length <= context length"),
        ([1], [17], [[0]], "row 0: 1 blocks of 16 for 17 tokens"),
        ([1], [1], [], "0 block tables"),
    ],
)
def test_contradicting_rows_are_refused(
    query_lens: list[int], context_lens: list[int], tables: list[list[int]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        small_plan(query_lens, context_lens, tables)


def test_planning_runs_no_line_of_python_for_each_row() -> None:
    def lines(num_rows: int) -> int:
        tables = [list(range(row * 32, row * 32 + 32)) for row in range(num_rows)]
        return lines_run(lambda: small_plan([1] * num_rows, [500] * num_rows, tables, num_kv_heads=8))

    assert lines(256) <= lines(64) + 64


def test_a_plan_without_items_is_the_same_but_for_them() -> None:
    tables_RB = np.array([[7, 3], [9, 0], [1, 4]], dtype=np.int32)
    query_R, context_R = np.array([1, 1, 5]), np.array([17, 3, 30])
    whole, bare = (
        plan_rows(
            query_R, context_R, tables_RB, block_size=16, device="cpu", num_kv_heads=2, with_items=with_items
        )
        for with_items in (True, False)
    )
    for name in ("query_starts_R1", "context_lens_R", "block_table_RB", "slot_mapping_T", "positions_T"):
        assert torch.equal(getattr(whole, name), getattr(bare, name)), name
    assert (whole.num_decodes, whole.query_lens) == (bare.num_decodes, bare.query_lens)
    assert len(whole.decode_items_W6) == 2
    for plan in (bare, bare.windowed(4)):
        assert not plan.has_items
        assert plan.decode_items_W6.shape == plan.prefill_items_X6.shape == (0, 6)
        assert plan.num_partials == 0
    assert bare.windowed(4).window == 4


LAST_CONTEXTS = [9, 700, 3, 600, 1000]


def step_of(query_lens: list[int], *, with_items: bool, padded_tokens: int | None = None) -> AttentionPlan:
    tables_RB = np.random.default_rng(0).permutation(5 * 63).astype(np.int32).reshape(5, 63)
    return plan_rows(
        np.array(query_lens),
        np.array(LAST_CONTEXTS),
        tables_RB,
        block_size=16,
        device="cpu",
        num_kv_heads=2,
        padded_tokens=padded_tokens,
        with_items=with_items,
    )


def assert_same_but_for_slots(plan: AttentionPlan, expected: AttentionPlan) -> None:
    for name in (field.name for field in fields(AttentionPlan)):
        if name == "slot_mapping_T":
            continue
        ours, theirs = getattr(plan, name), getattr(expected, name)
        if isinstance(ours, torch.Tensor):
            assert ours.dtype == theirs.dtype, name
            assert ours.tolist() == theirs.tolist(), name
        else:
            assert ours == theirs, name


@pytest.mark.parametrize("with_items", [True, False])
@pytest.mark.parametrize("window", [None, 1, 40, 300, 5000])
def test_last_queries_are_planned_as_rows_of_one_query_and_write_nothing(
    with_items: bool, window: int | None
) -> None:
    whole = step_of([1, 1, 3, 40, 300], with_items=with_items, padded_tokens=348)
    plans, expected = [whole.of_last_queries()], step_of([1] * 5, with_items=with_items)
    if window is not None:
        plans = [plans[0].windowed(window), whole.windowed(window).of_last_queries()]
        expected = expected.windowed(window)
    has_long_rows = window not in (1, 40)
    assert bool(expected.num_partials) == (with_items and has_long_rows)
    for plan in plans:
        assert_same_but_for_slots(plan, expected)
        assert plan.slot_mapping_T.dtype == torch.int64
        assert plan.slot_mapping_T.tolist() == [PADDING_SLOT] * 5


def test_last_queries_read_what_decodes_share_each_by_itself() -> None:
    num_rows, num_shared = MIN_SHARERS + 1, MIN_SHARED_TOKENS // 16
    tables = [[*range(num_shared), num_shared + row] for row in range(num_rows)]
    context_lens = [MIN_SHARED_TOKENS + 5 + row for row in range(num_rows)]
    whole = small_plan([*[1] * (num_rows - 1), 4], context_lens, tables, num_kv_heads=2)
    plan = whole.of_last_queries()
    assert len(whole.shared_items_Y5)
    assert (len(plan.shared_items_Y5), len(plan.shared_members_M)) == (0, 0)
    assert all(bool((counts == 1).all()) for counts in reads_of(plan))


def test_a_dense_table_narrower_than_a_context_is_refused() -> None:
    with pytest.raises(ValueError, match="1 blocks of 16 for 17 tokens"):
        plan_rows(np.array([1]), np.array([17]), np.zeros((1, 1), np.int32), **OF_ONE_HEAD)


def test_a_copy_to_a_device_keeps_every_array_and_aligns_it() -> None:
    arrays: dict[str, IntArray] = {
        "odd": np.arange(3, dtype=np.int32),
        "none": np.zeros((0, 6), dtype=np.int32),
        "wide": np.arange(5, dtype=np.int64) - 2,
        "table": np.arange(21, dtype=np.int32).reshape(3, 7),
        "columns": np.arange(12, dtype=np.int32).reshape(4, 3).T,
        "last": np.arange(1, dtype=np.int64),
    }
    tensors = _in_one_copy(arrays, DEVICE)
    for name, array in arrays.items():
        assert tensors[name].tolist() == array.tolist()
        assert tensors[name].shape == array.shape
        assert tensors[name].is_contiguous()
        assert tensors[name].dtype == torch.from_numpy(array.copy()).dtype
        assert tensors[name].data_ptr() % 16 == 0
    assert [len(tensor) for tensor in _in_one_copy({"none": arrays["none"]}, DEVICE).values()] == [0]


def test_long_reads_are_cut_for_all_programs_and_short_ones_for_half_of_them() -> None:
    """An item has a program for each of the two kv heads."""
    few = 4 * FEW_PROGRAMS_TOKENS // 2
    for tokens, programs in ((few, 4), (few + 1, 8)):
        plan = make_plan([1], [tokens], target_programs=8)
        assert 2 * len(plan.decode_items_W6) == programs
