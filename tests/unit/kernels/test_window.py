"""Attention within a window, of every backend against the reference, on pools with NaN behind every window too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from blockyard.kernels.attention.plan import AttentionPlan, plan_attention
from blockyard.kernels.interface import Backend
from blockyard.kernels.torch import reference
from blockyard.kernels.torch.deterministic import CHUNK_TOKENS, DeterministicTorchBackend

AssertNear = Callable[[torch.Tensor, torch.Tensor], None]
MakeStep = Callable[..., Any]
MIXED = ([1, 1, 1, 5, 17, 70], [1, 17, 100, 5, 40, 131])


def poison_behind(step: Any, plan: AttentionPlan) -> None:
    """NaN in every position that no query of its row sees."""
    for row in range(plan.num_rows):
        for position in range(plan.first_visible_key(row)):
            block = int(plan.block_table_RB[row, position // plan.block_size])
            step.kv_pool_B2KPD[block, :, :, position % plan.block_size] = float("nan")


def assert_matches_reference(backend: Backend, step: Any, window: int, assert_near: AssertNear) -> None:
    plan = step.plan.windowed(window)
    expected = torch.full_like(step.out_TND, float("nan"))
    reference.attention(step.q_TND, step.kv_pool_B2KPD, plan, scale=step.scale, out_TND=expected)
    poison_behind(step, plan)
    backend.attention(step.q_TND, step.kv_pool_B2KPD, plan, scale=step.scale, out_TND=step.out_TND)
    assert not expected.isnan().any()
    assert_near(step.out_TND, expected)


def brute_force(step: Any, window: int) -> torch.Tensor:
    """Query by query and key by key, by the definition: i - window < j <= i."""
    plan, out_TND, token = step.plan, torch.empty_like(step.q_TND), 0
    group = step.q_TND.shape[1] // step.kv_pool_B2KPD.shape[2]
    for row, (query_len, context_len) in enumerate(zip(plan.query_lens, plan.context_lens, strict=True)):
        for i in range(context_len - query_len, context_len):
            seen = [j for j in range(context_len) if i - window < j <= i]
            slots = [(int(plan.block_table_RB[row, j // plan.block_size]), j % plan.block_size) for j in seen]
            kv_L2KD = torch.stack([step.kv_pool_B2KPD[block, :, :, offset] for block, offset in slots])
            k_LND, v_LND = kv_L2KD.repeat_interleave(group, dim=2).unbind(1)
            weights_LN = torch.softmax((k_LND * step.q_TND[token]).sum(-1) * step.scale, dim=0)
            out_TND[token] = (weights_LN[..., None] * v_LND).sum(0)
            token += 1
    return out_TND


@pytest.mark.parametrize("window", [1, 2, 16, 30])
def test_the_reference_sees_the_window_by_its_definition(
    make_step: MakeStep, assert_near: AssertNear, window: int
) -> None:
    step = make_step([1, 1, 7], [40, 3, 33])
    plan = step.plan.windowed(window)
    reference.attention(step.q_TND, step.kv_pool_B2KPD, plan, scale=step.scale, out_TND=step.out_TND)
    assert_near(step.out_TND, brute_force(step, window))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("window", [1, 15, 16, 17, 50, 129, 131, 1000])
def test_windows_of_any_width_match_the_reference(
    backend: Backend, make_step: MakeStep, assert_near: AssertNear, window: int
) -> None:
    step = make_step(*MIXED)
    assert_matches_reference(backend, step, window, assert_near)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "dtype"),
    [(1, 1, torch.float16), (3, 1, torch.bfloat16), (8, 1, torch.bfloat16), (14, 2, torch.float16)],
)
def test_half_precision_and_groups_of_heads(
    backend: Backend,
    make_step: MakeStep,
    assert_near: AssertNear,
    num_heads: int,
    num_kv_heads: int,
    dtype: torch.dtype,
) -> None:
    step = make_step([1, 1, 131], [90, 9, 160], num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=dtype)
    assert_matches_reference(backend, step, 45, assert_near)


@pytest.mark.ci
@pytest.mark.parametrize("block_size", [32, 64])
def test_larger_blocks(
    backend: Backend, make_step: MakeStep, assert_near: AssertNear, block_size: int
) -> None:
    for window in (block_size - 1, block_size, block_size + 1):
        step = make_step([1, 1, 40], [block_size, 3 * block_size + 1, 150], block_size=block_size)
        assert_matches_reference(backend, step, window, assert_near)


def test_a_window_wider_than_a_split_is_merged_from_splits(
    backend: Backend, make_step: MakeStep, assert_near: AssertNear
) -> None:
    step = make_step([1, 1, 2], [900, 30, 40], num_heads=2, num_kv_heads=1)
    assert step.plan.windowed(300).num_partials == 2 < step.plan.num_partials
    assert_matches_reference(backend, step, 300, assert_near)


def test_deterministic_windows_match_the_reference(make_step: MakeStep, assert_near: AssertNear) -> None:
    backend = DeterministicTorchBackend()
    for window in (1, 15, 16, 200, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 600):
        step = make_step([1, 1, 1, 5, 300], [1, 257, 700, 300, 620], num_heads=6, on=torch.device("cpu"))
        assert_matches_reference(backend, step, window, assert_near)


@pytest.mark.parametrize("window", [1, 5, 100, CHUNK_TOKENS, CHUNK_TOKENS + 9])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (6, 2)])
def test_deterministic_windows_are_the_same_bits_however_the_prompt_is_cut(
    make_step: MakeStep, window: int, num_heads: int, num_kv_heads: int
) -> None:
    backend, context_len = DeterministicTorchBackend(), 2 * CHUNK_TOKENS + 40
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "on": torch.device("cpu")}
    whole = make_step([context_len], [context_len], **heads)
    plan = whole.plan.windowed(window)
    backend.attention(whole.q_TND, whole.kv_pool_B2KPD, plan, scale=whole.scale, out_TND=whole.out_TND)
    begin = 0
    for query_len in (1, 2, 13, CHUNK_TOKENS - 1, 1, 77, 1, 1, CHUNK_TOKENS - 55):
        end = begin + query_len
        chunk = plan_attention(
            query_lens=[1, query_len] if query_len > 1 else [query_len, 3],
            context_lens=[33, end] if query_len > 1 else [end, 33],
            block_tables=_beside(plan.block_table_RB[0].tolist(), own_first=query_len == 1),
            block_size=16,
            device="cpu",
            num_kv_heads=num_kv_heads,
        ).windowed(window)
        rows = slice(1, 1 + query_len) if query_len > 1 else slice(0, 1)
        q_TND = torch.zeros(sum(chunk.query_lens), num_heads, 16)
        q_TND[rows] = whole.q_TND[begin:end]
        out_TND = torch.full_like(q_TND, float("nan"))
        backend.attention(q_TND, whole.kv_pool_B2KPD, chunk, scale=whole.scale, out_TND=out_TND)
        assert torch.equal(out_TND[rows], whole.out_TND[begin:end]), (begin, end)
        begin = end
    assert begin == context_len


def _beside(table: list[int], *, own_first: bool) -> list[list[int]]:
    """With a neighbour in the step, whose blocks are the same in reverse."""
    return [table, table[::-1]] if own_first else [table[::-1], table]


def test_layers_may_take_turns_with_their_windows(
    backend: Backend, make_step: MakeStep, assert_near: AssertNear
) -> None:
    step = make_step([1, 20], [60, 50])
    narrow = step.plan.windowed(7)
    for plan in (step.plan, narrow, step.plan, narrow):
        out_TND, expected = torch.full_like(step.out_TND, float("nan")), torch.empty_like(step.out_TND)
        backend.attention(step.q_TND, step.kv_pool_B2KPD, plan, scale=step.scale, out_TND=out_TND)
        reference.attention(step.q_TND, step.kv_pool_B2KPD, plan, scale=step.scale, out_TND=expected)
        assert_near(out_TND, expected)


def test_a_window_moves_the_first_keys_of_items_and_nothing_else(make_step: MakeStep) -> None:
    plan = make_step([1, 1, 200], [1000, 9, 500]).plan
    narrow = plan.windowed(300)
    decodes = {tuple(item[:1] + item[3:5]) for item in narrow.decode_items_W6.tolist()}
    assert decodes == {(0, 700, 892), (0, 892, 1000), (1, 0, 9)}
    items = {tuple(item[:5]) for item in narrow.prefill_items_X6.tolist()}
    assert items == {(2, 0, 128, 1, 428), (2, 128, 200, 129, 500)}
    assert narrow.block_table_RB is plan.block_table_RB
    assert narrow.slot_mapping_T is plan.slot_mapping_T


def test_a_window_that_hides_nothing_is_the_plan_itself(make_step: MakeStep) -> None:
    plan = make_step([1, 3], [40, 25]).plan
    assert plan.windowed(40) is plan
    assert plan.windowed(39) is not plan
    with pytest.raises(ValueError, match="a window of 0 tokens"):
        plan.windowed(0)
    empty = make_step([], []).plan
    assert empty.windowed(1) is empty
