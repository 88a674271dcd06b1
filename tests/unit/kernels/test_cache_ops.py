"""KV writes by slot mapping and block copies, of both backends, against the reference."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from blockyard.kernels.interface import Backend, HeadNorms
from blockyard.kernels.torch import reference

MakeStep = Callable[..., Any]


@pytest.mark.parametrize("num_kv_heads", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_lands_in_its_slots_and_nowhere_else(
    backend: Backend, make_step: MakeStep, num_kv_heads: int, dtype: torch.dtype
) -> None:
    step = make_step([1, 1, 17], [5, 33, 20], num_kv_heads=num_kv_heads, num_heads=num_kv_heads, dtype=dtype)
    fused_TXD = torch.randn(19, 2 * num_kv_heads, 16, device=step.q_TND.device).to(dtype)
    k_TKD, v_TKD = fused_TXD[:, :num_kv_heads], fused_TXD[:, num_kv_heads:]
    pool = torch.full_like(step.kv_pool_B2KPD, float("nan"))
    expected = pool.clone()
    backend.write_kv(k_TKD, v_TKD, pool, step.plan)
    reference.write_kv(k_TKD, v_TKD, expected, step.plan)
    torch.testing.assert_close(pool, expected, rtol=0, atol=0, equal_nan=True)
    assert (~pool.isnan()).sum() == fused_TXD.numel()


def test_padding_slots_write_nothing(backend: Backend, make_step: MakeStep) -> None:
    step = make_step([1, 4], [9, 4], padded_tokens=8)
    slots_T = step.plan.slot_mapping_T.clone()
    slots_T[2] = -1
    plan = replace(step.plan, slot_mapping_T=slots_T)
    k_TKD = torch.randn(8, 2, 16, device=step.q_TND.device)
    # A block of guard before and behind the pool: slot -1 taken at its word would land outside of it.
    guarded = torch.full((len(step.kv_pool_B2KPD) + 2, 2, 2, 16, 16), float("nan"), device=k_TKD.device)
    pool = guarded[1:-1]
    backend.write_kv(k_TKD, -k_TKD, pool, plan)
    written = ~guarded.isnan()
    assert written.sum() == 4 * 2 * k_TKD[0].numel()
    last_slot = int(slots_T[4])
    assert torch.equal(pool[last_slot // 16, 0, :, last_slot % 16], k_TKD[4])
    assert torch.equal(pool[last_slot // 16, 1, :, last_slot % 16], -k_TKD[4])


def test_a_write_then_attention_sees_this_steps_keys(backend: Backend, make_step: MakeStep) -> None:
    step = make_step([1, 6], [20, 6])
    k_TKD = torch.randn(7, 2, 16, device=step.q_TND.device)
    backend.write_kv(k_TKD, k_TKD, step.kv_pool_B2KPD, step.plan)
    expected = torch.empty_like(step.out_TND)
    reference.attention(step.q_TND, step.kv_pool_B2KPD, step.plan, scale=step.scale, out_TND=expected)
    backend.attention(step.q_TND, step.kv_pool_B2KPD, step.plan, scale=step.scale, out_TND=step.out_TND)
    torch.testing.assert_close(step.out_TND, expected, atol=2e-5, rtol=2e-5)
    # The first token of a prompt attends to itself alone: each head returns the value just written.
    torch.testing.assert_close(step.out_TND[1], k_TKD[1].repeat_interleave(2, dim=0), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("norms_dtype", [None, "as heads", torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(3, 3, 64), (12, 3, 16), (8, 1, 128)])
def test_heads_are_placed_as_by_norm_rotation_and_write(
    backend: Backend,
    make_step: MakeStep,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    norms_dtype: torch.dtype | str | None,
) -> None:
    """Padding's queries are placed too, its keys and values nowhere."""
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "dtype": dtype}
    step = make_step([1, 6], [20, 6], padded_tokens=9, **shape)
    device = step.q_TND.device
    heads_TXD = torch.randn(9, num_heads + 2 * num_kv_heads, head_dim, device=device).to(dtype)
    q_TND, k_TKD, v_TKD = heads_TXD.clone().split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    weights = torch.rand(2, head_dim, device=device)
    weights = weights if norms_dtype == torch.float32 else weights.to(dtype)
    norms = HeadNorms(q_weight_D=weights[0], k_weight_D=weights[1], eps=1e-6)
    angles = torch.outer(torch.arange(40.0), torch.rand(head_dim // 2)).to(device)
    cos_sin_SD = torch.cat((angles.cos(), angles.sin()), dim=-1)
    pool = torch.full_like(step.kv_pool_B2KPD, float("nan"))
    expected = pool.clone()
    if norms_dtype is not None:
        q_TND, k_TKD = _normed(q_TND, norms.q_weight_D), _normed(k_TKD, norms.k_weight_D)
    reference.rotary(q_TND, k_TKD, cos_sin_SD, step.plan.positions_T)
    reference.write_kv(k_TKD, v_TKD, expected, step.plan)
    placed = backend.qk_norm_rope_write(
        heads_TXD, norms if norms_dtype is not None else None, cos_sin_SD, pool, step.plan
    )
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(placed, q_TND, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(pool, expected, atol=tolerance, rtol=tolerance, equal_nan=True)
    assert (~pool.isnan()).sum() == 7 * 2 * num_kv_heads * head_dim


def _normed(heads: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
    flat = heads.flatten(0, 1)
    reference.rms_norm(flat, weight_D, 1e-6, out_TH=flat)
    return flat.view(heads.shape)


@pytest.mark.parametrize("pairs", [[], [(0, 3)], [(1, 4), (1, 0), (2, 6)]])
def test_blocks_are_copied_whole_and_others_stay(
    backend: Backend, device: torch.device, pairs: list[tuple[int, int]]
) -> None:
    pool = torch.randn(7, 2, 3, 16, 32, device=device)
    expected = pool.clone()
    src_dst_C2 = torch.tensor(pairs, dtype=torch.int64, device=device).reshape(-1, 2)
    backend.copy_blocks(pool, src_dst_C2)
    reference.copy_blocks(expected, src_dst_C2)
    assert torch.equal(pool, expected)


def test_a_pool_of_another_shape_is_refused(triton_backend: Backend, make_step: MakeStep) -> None:
    step = make_step([1], [5])
    k_TKD = torch.zeros(1, 4, 16, device=step.q_TND.device)
    with pytest.raises(ValueError, match="does not hold 4 kv heads"):
        triton_backend.write_kv(k_TKD, k_TKD, step.kv_pool_B2KPD, step.plan)
