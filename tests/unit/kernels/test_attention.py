"""Paged attention of both backends against the reference, on pools whose unused slots hold NaN."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from blockyard.kernels.interface import Backend
from blockyard.kernels.torch import attention as torch_attention
from blockyard.kernels.torch import reference
from blockyard.kernels.torch.backend import TorchBackend

AssertNear = Callable[[torch.Tensor, torch.Tensor], None]
MakeStep = Callable[..., Any]


def expected_of(step: Any) -> torch.Tensor:
    expected = torch.full_like(step.out_TND, float("nan"))
    reference.attention(step.q_TND, step.kv_pool_B2KPD, step.plan, scale=step.scale, out_TND=expected)
    assert not expected.isnan().any()
    return expected


def attend(backend: Backend, step: Any) -> torch.Tensor:
    backend.attention(step.q_TND, step.kv_pool_B2KPD, step.plan, scale=step.scale, out_TND=step.out_TND)
    out_TND: torch.Tensor = step.out_TND
    return out_TND


@pytest.mark.parametrize("num_heads", [2, 8, 14, 16])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_mixed_decode_and_prefill_match_the_reference(
    backend: Backend, make_step: MakeStep, assert_near: AssertNear, num_heads: int, block_size: int
) -> None:
    step = make_step([1, 1, 1, 5, 17], [1, 17, 65, 5, 40], num_heads=num_heads, block_size=block_size)
    assert_near(attend(backend, step), expected_of(step))


@pytest.mark.parametrize("context_len", [1, 15, 16, 17, 31, 33, 63, 64, 65, 129])
def test_decode_of_any_context_length(
    backend: Backend, make_step: MakeStep, assert_near: AssertNear, context_len: int
) -> None:
    step = make_step([1, 1], [context_len, 3], num_kv_heads=1)
    assert_near(attend(backend, step), expected_of(step))


@pytest.mark.parametrize(
    ("query_len", "context_len"),
    [(2, 2), (15, 15), (16, 16), (17, 33), (63, 63), (65, 130), (129, 129), (130, 131)],
)
def test_prefill_of_any_chunk(
    backend: Backend, make_step: MakeStep, assert_near: AssertNear, query_len: int, context_len: int
) -> None:
    step = make_step([query_len], [context_len], num_heads=3, num_kv_heads=1)
    assert_near(attend(backend, step), expected_of(step))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_half_precision_and_head_sizes(
    backend: Backend, make_step: MakeStep, assert_near: AssertNear, dtype: torch.dtype, head_dim: int
) -> None:
    step = make_step([1, 1, 20], [70, 9, 52], head_dim=head_dim, dtype=dtype)
    assert_near(attend(backend, step), expected_of(step))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_over_many_tiles(
    backend: Backend, make_step: MakeStep, assert_near: AssertNear, dtype: torch.dtype
) -> None:
    step = make_step([1, 1, 70, 140], [300, 128, 211, 140], num_heads=6, num_kv_heads=2, dtype=dtype)
    assert_near(attend(backend, step), expected_of(step))


def test_a_split_decode_equals_an_unsplit_one(
    triton_backend: Backend, make_step: MakeStep, assert_near: AssertNear
) -> None:
    rows = ([1, 1, 1, 4], [600, 30, 257, 12])
    split = make_step(*rows, num_kv_heads=1, num_heads=2, target_programs=528)
    whole = make_step(*rows, num_kv_heads=1, num_heads=2, target_programs=1)
    assert split.plan.num_partials == 5
    assert whole.plan.num_partials == 0
    assert_near(attend(triton_backend, split), expected_of(split))
    assert_near(attend(triton_backend, whole), split.out_TND)


def test_more_splits_than_one_merge_tile_holds(
    triton_backend: Backend, make_step: MakeStep, assert_near: AssertNear
) -> None:
    step = make_step([1], [17 * 256 + 1], num_heads=1, num_kv_heads=1, block_size=128)
    assert step.plan.num_partials > 16
    # The last key outweighs all before it, so that the second tile of splits has to rescale the first.
    last_slot = int(step.plan.slot_mapping_T[0])
    step.kv_pool_B2KPD[last_slot // 128, 0, 0, last_slot % 128] = step.q_TND[0, 0] * 2
    assert_near(attend(triton_backend, step), expected_of(step))


def test_a_split_without_keys_weighs_nothing(
    triton_backend: Backend, make_step: MakeStep, assert_near: AssertNear
) -> None:
    step = make_step([1], [300], num_heads=2, num_kv_heads=1)
    items = step.plan.decode_items_W6
    assert len(items) == 2
    items_with_empty = torch.cat((items[:1], items[:1], items[1:]))
    items_with_empty[:, 5] = torch.arange(3)
    items_with_empty[0, 4] = items_with_empty[0, 3]
    starts = torch.tensor([0, 3], dtype=torch.int32, device=items.device)
    plan = replace(step.plan, decode_items_W6=items_with_empty, partial_starts_D1=starts, num_partials=3)
    triton_backend.attention(step.q_TND, step.kv_pool_B2KPD, plan, scale=step.scale, out_TND=step.out_TND)
    assert_near(step.out_TND, expected_of(step))


def test_rows_beyond_the_step_stay_untouched(
    backend: Backend, make_step: MakeStep, assert_near: AssertNear
) -> None:
    step = make_step([1, 6], [20, 6])
    q_TND = torch.cat((step.q_TND, step.q_TND[:3]))
    out_TND = torch.full_like(q_TND, float("nan"))
    backend.attention(q_TND, step.kv_pool_B2KPD, step.plan, scale=step.scale, out_TND=out_TND)
    assert_near(out_TND[:7], expected_of(step))
    assert out_TND[7:].isnan().all()


def test_table_entries_beyond_the_context_are_never_read(
    backend: Backend, make_step: MakeStep, assert_near: AssertNear
) -> None:
    step = make_step([1, 1, 1, 3], [5, 46, 60, 18])
    table_RB = step.plan.block_table_RB.clone()
    table_RB[0, 1:] = -(2**30)
    table_RB[1, 3:] = 2**30
    table_RB[3, 2:] = 2**30
    plan = replace(step.plan, block_table_RB=table_RB)
    backend.attention(step.q_TND, step.kv_pool_B2KPD, plan, scale=step.scale, out_TND=step.out_TND)
    assert_near(step.out_TND, expected_of(step))


def test_queries_may_be_a_view_of_a_fused_projection(
    backend: Backend, make_step: MakeStep, assert_near: AssertNear
) -> None:
    step = make_step([1, 4], [20, 9])
    fused_TXD = torch.cat((step.q_TND, torch.full_like(step.q_TND, float("nan"))), dim=1)
    view_TND = fused_TXD[:, : step.q_TND.shape[1]]
    assert not view_TND.is_contiguous()
    backend.attention(view_TND, step.kv_pool_B2KPD, step.plan, scale=step.scale, out_TND=step.out_TND)
    assert_near(step.out_TND, expected_of(step))


@pytest.mark.parametrize("max_group_bytes", [1, 3 * 4096, 1 << 30])
def test_torch_groups_of_any_size_give_the_same_result(
    make_step: MakeStep, assert_near: AssertNear, monkeypatch: pytest.MonkeyPatch, max_group_bytes: int
) -> None:
    monkeypatch.setattr(torch_attention, "MAX_GROUP_BYTES", max_group_bytes)
    step = make_step([1] * 7, [33, 40, 3, 48, 47, 36, 100])
    assert_near(attend(TorchBackend(), step), expected_of(step))


def test_a_step_without_rows_does_nothing(backend: Backend, make_step: MakeStep) -> None:
    step = make_step([], [])
    assert attend(backend, step).shape[0] == 0


def test_a_head_size_that_is_no_power_of_two_is_refused_by_triton_and_served_by_torch(
    make_step: MakeStep, triton_backend: Backend, assert_near: AssertNear
) -> None:
    step = make_step([1, 3], [20, 3], head_dim=48)
    with pytest.raises(ValueError, match="powers of two"):
        attend(triton_backend, step)
    assert_near(attend(TorchBackend(), step), expected_of(step))


def test_triton_refuses_a_plan_without_items(triton_backend: Backend, make_step: MakeStep) -> None:
    step = make_step([1, 4], [20, 9])
    bare = replace(step, plan=replace(step.plan, has_items=False))
    with pytest.raises(ValueError, match="work items"):
        attend(triton_backend, bare)


def test_backends_that_walk_rows_need_no_items(make_step: MakeStep, assert_near: AssertNear) -> None:
    backend = TorchBackend()
    step = make_step([1, 4], [20, 9])
    no_items = step.plan.decode_items_W6[:0]
    bare = replace(step.plan, has_items=False, decode_items_W6=no_items, prefill_items_X6=no_items)
    assert not backend.reads_items
    assert_near(attend(backend, replace(step, plan=bare)), expected_of(step))
