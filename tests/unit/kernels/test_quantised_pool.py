"""KV in 8 bits on every backend: what is stored and read, and moves of blocks that need not know the format."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from blockyard.kernels.interface import Backend, HeadNorms
from blockyard.kernels.kv_pool import (
    LARGEST,
    head_dim_of,
    movable,
    numbers_of,
    pool_shape,
    quantise,
    scales_of,
)
from blockyard.kernels.torch import reference

from .conftest import in_computed_type

AssertNear = Callable[[torch.Tensor, torch.Tensor], None]
MakeStep = Callable[..., Any]
KV_DTYPES = [torch.int8, torch.float8_e4m3fn]
quantised = pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=["int8", "fp8"])


def empty_pool(step: Any, kv_dtype: torch.dtype) -> torch.Tensor:
    """Every byte is 1, which no test writes everywhere."""
    num_blocks, _, num_kv_heads, block_size, _ = step.kv_pool_B2KPD.shape
    shape = pool_shape(num_blocks, num_kv_heads, block_size, step.q_TND.shape[2], kv_dtype)
    pool = torch.empty(shape, dtype=kv_dtype, device=step.q_TND.device)
    pool.view(torch.uint8).fill_(1)
    return pool


def heads_at(pool: torch.Tensor, plan: Any) -> torch.Tensor:
    """[2, T, K, D] in fp32: what the pool says of the tokens of a step."""
    blocks_T, offsets_T = plan.slot_mapping_T // plan.block_size, plan.slot_mapping_T % plan.block_size
    return reference.heads_of(pool)[blocks_T, :, :, offsets_T].transpose(0, 1)


def steps_between(stored: torch.Tensor, heads_TKD: torch.Tensor, kv_dtype: torch.dtype) -> float:
    """The largest difference, in distances between neighbouring numbers where the head's own numbers lie."""
    wide = heads_TKD.float()
    scale = wide.abs().amax(dim=-1, keepdim=True) / LARGEST[kv_dtype]
    step = scale if kv_dtype == torch.int8 else (wide.abs() / 8).maximum(scale * 2**-9)
    return float(((stored - wide).abs() / step).max())


@quantised
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_kv_heads", [1, 3, 8])
def test_each_head_is_stored_as_near_as_8_bits_can_be(
    backend: Backend, make_step: MakeStep, kv_dtype: torch.dtype, dtype: torch.dtype, num_kv_heads: int
) -> None:
    step = make_step([1, 1, 17], [5, 33, 20], num_kv_heads=num_kv_heads, num_heads=num_kv_heads, dtype=dtype)
    size_T11 = torch.logspace(-3, 2, 19)[:, None, None]
    fused_TXD = (torch.randn(19, 2 * num_kv_heads, 16) * size_T11).to(step.q_TND)
    k_TKD, v_TKD = fused_TXD[:, :num_kv_heads], fused_TXD[:, num_kv_heads:]
    pool = empty_pool(step, kv_dtype)
    backend.write_kv(k_TKD, v_TKD, pool, step.plan)
    stored = heads_at(pool, step.plan)
    assert steps_between(stored[0], k_TKD, kv_dtype) < 0.5001
    assert steps_between(stored[1], v_TKD, kv_dtype) < 0.5001
    expected = empty_pool(step, kv_dtype)
    reference.write_kv(k_TKD, v_TKD, expected, step.plan)
    assert steps_between(heads_at(expected, step.plan)[0], k_TKD, kv_dtype) < 0.5001
    assert ((pool.view(torch.uint8) == 1) == (expected.view(torch.uint8) == 1)).float().mean() > 0.999


@quantised
def test_every_stored_number_is_read_as_what_it_means(
    backend: Backend, make_step: MakeStep, kv_dtype: torch.dtype
) -> None:
    """A lone token's attention gives back its value: all 256 patterns but those of NaN, in heads of 16."""
    numbers = torch.arange(256, dtype=torch.uint8).view(kv_dtype)
    finite = numbers[torch.isfinite(numbers.float())].view(torch.uint8)
    finite = torch.cat([finite, finite[: 256 - len(finite)]]).view(16, 16)
    step = make_step([1] * 16, [1] * 16, num_heads=1, num_kv_heads=1)
    pool = empty_pool(step, kv_dtype)
    blocks_T = step.plan.block_table_RB[:, 0].long()
    numbers_of(pool).view(torch.uint8)[blocks_T, 1, 0, 0] = finite.to(pool.device)
    scales_of(pool)[blocks_T, 1, 0, 0] = 0.5
    scales_of(pool)[blocks_T, 0, 0, 0] = 1.0
    backend.attention(step.q_TND, pool, step.plan, scale=step.scale, out_TND=step.out_TND)
    expected = finite.view(kv_dtype).float() * 0.5
    torch.testing.assert_close(step.out_TND[:, 0].cpu(), expected, rtol=1e-6, atol=0.0)


@pytest.mark.quick_cases(1)
@quantised
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (8, 2), (8, 1)])
@pytest.mark.parametrize("block_size", [16, 64])
def test_mixed_decode_and_prefill_match_the_reference(
    backend: Backend,
    make_step: MakeStep,
    assert_near: AssertNear,
    kv_dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    block_size: int,
) -> None:
    """Unwritten slots have a scale of NaN."""
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "block_size": block_size}
    step = make_step([1, 1, 1, 5, 17, 65], [1, 17, 65, 5, 40, 130], kv_dtype=kv_dtype, **shape)
    assert scales_of(step.kv_pool_B2KPD).isnan().any()
    expected = torch.full_like(step.out_TND, float("nan"))
    reference.attention(step.q_TND, step.kv_pool_B2KPD, step.plan, scale=step.scale, out_TND=expected)
    backend.attention(step.q_TND, step.kv_pool_B2KPD, step.plan, scale=step.scale, out_TND=step.out_TND)
    assert_near(step.out_TND, expected)


@quantised
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 19])
def test_half_precision_windows_and_splits_match_the_reference(
    backend: Backend,
    make_step: MakeStep,
    assert_near: AssertNear,
    kv_dtype: torch.dtype,
    dtype: torch.dtype,
    window: int | None,
) -> None:
    step = make_step([1, 1, 20], [300, 9, 52], head_dim=64, dtype=dtype, kv_dtype=kv_dtype)
    plan = step.plan if window is None else step.plan.windowed(window)
    expected = torch.full_like(step.out_TND, float("nan"))
    reference.attention(step.q_TND, step.kv_pool_B2KPD, plan, scale=step.scale, out_TND=expected)
    backend.attention(step.q_TND, step.kv_pool_B2KPD, plan, scale=step.scale, out_TND=step.out_TND)
    assert_near(*in_computed_type(step.out_TND, expected, kv_dtype))


@quantised
def test_small_values_of_long_contexts_are_not_lost_in_fp16(
    backend: Backend, make_step: MakeStep, kv_dtype: torch.dtype
) -> None:
    """A weight of 1/1000 times a scale of 1e-6 is 0 in fp16; the sum of a thousand such is not."""
    step = make_step([1], [1000], head_dim=32, dtype=torch.float16, kv_dtype=kv_dtype)
    scales_of(step.kv_pool_B2KPD)[:, 0] *= 0.0
    scales_of(step.kv_pool_B2KPD)[:, 1] *= 1e-4
    numbers_of(step.kv_pool_B2KPD).view(torch.uint8)[:, 1] = 0x78
    expected = torch.empty_like(step.out_TND)
    reference.attention(step.q_TND, step.kv_pool_B2KPD, step.plan, scale=1.0, out_TND=expected)
    backend.attention(step.q_TND, step.kv_pool_B2KPD, step.plan, scale=1.0, out_TND=step.out_TND)
    assert expected.abs().min() > 0
    torch.testing.assert_close(step.out_TND, expected, rtol=2e-2, atol=0.0)


@quantised
@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_are_placed_as_by_norm_rotation_and_write(
    backend: Backend, make_step: MakeStep, kv_dtype: torch.dtype, dtype: torch.dtype, normalises: bool
) -> None:
    step = make_step([1, 6], [20, 6], num_heads=6, num_kv_heads=3, head_dim=32, dtype=dtype, padded_tokens=9)
    device = step.q_TND.device
    heads_TXD = torch.randn(9, 12, 32, device=device).to(dtype)
    norms = HeadNorms(
        q_weight_D=torch.rand(32, device=device).to(dtype),
        k_weight_D=torch.rand(32, device=device).to(dtype),
        eps=1e-6,
    )
    angles = torch.outer(torch.arange(40.0), torch.rand(16)).to(device)
    cos_sin_SD = torch.cat((angles.cos(), angles.sin()), dim=-1)
    q_TND, k_TKD, v_TKD = heads_TXD.clone().split([6, 3, 3], dim=1)
    if normalises:
        q_TND, k_TKD = _normed(q_TND, norms.q_weight_D), _normed(k_TKD, norms.k_weight_D)
    reference.rotary(q_TND, k_TKD, cos_sin_SD, step.plan.positions_T)
    expected, pool = empty_pool(step, kv_dtype), empty_pool(step, kv_dtype)
    reference.write_kv(k_TKD, v_TKD, expected, step.plan)
    placed = backend.qk_norm_rope_write(heads_TXD, norms if normalises else None, cos_sin_SD, pool, step.plan)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(placed, q_TND, atol=tolerance, rtol=tolerance)
    written = step.plan.slot_mapping_T >= 0
    assert written.sum() == 7
    stored, wanted = heads_at(pool, step.plan)[:, written], heads_at(expected, step.plan)[:, written]
    # One step of the number where the two sides round apart.
    torch.testing.assert_close(stored, wanted, rtol=0.13, atol=0.03)
    assert (stored - wanted).abs().mean() < (1e-3 if dtype == torch.float32 else 1e-2)
    untouched = torch.ones(pool.shape[0] * 16, dtype=torch.bool)
    untouched[step.plan.slot_mapping_T[written].cpu()] = False
    for view in (numbers_of(pool), scales_of(pool)[..., None]):
        bytes_of_slots = view.transpose(1, 3).flatten(0, 1).contiguous().view(torch.uint8)
        assert (bytes_of_slots[untouched.to(device)] == 1).all()


def _normed(heads: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
    flat = heads.flatten(0, 1)
    reference.rms_norm(flat, weight_D, 1e-6, out_TH=flat)
    return flat.view(heads.shape)


@quantised
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_read_as_nan_by_whoever_sees_it_and_by_nobody_else(
    backend: Backend, make_step: MakeStep, kv_dtype: torch.dtype, bad: float
) -> None:
    step = make_step([1, 1], [3, 9], kv_dtype=kv_dtype)
    k_TKD = torch.randn(2, 2, 16).to(step.q_TND)
    v_TKD = torch.randn(2, 2, 16).to(step.q_TND)
    for heads_TKD in (k_TKD, v_TKD):
        spoilt = heads_TKD.clone()
        spoilt[0, 1, 5] = bad
        pool = step.kv_pool_B2KPD.clone()
        keys, values = (spoilt, v_TKD) if heads_TKD is k_TKD else (k_TKD, spoilt)
        backend.write_kv(keys, values, pool, step.plan)
        backend.attention(step.q_TND, pool, step.plan, scale=step.scale, out_TND=step.out_TND)
        assert step.out_TND[0, 2:].isnan().all(), "the heads of the group that reads it"
        assert step.out_TND[0, :2].isfinite().all()
        assert step.out_TND[1].isfinite().all()


@quantised
def test_heads_of_zeros_and_of_next_to_nothing_are_zeros(
    backend: Backend, make_step: MakeStep, kv_dtype: torch.dtype
) -> None:
    step = make_step([1, 1], [3, 9], kv_dtype=kv_dtype)
    k_TKD = torch.zeros(2, 2, 16).to(step.q_TND)
    k_TKD[1] = 1e-38
    backend.write_kv(k_TKD, k_TKD, step.kv_pool_B2KPD, step.plan)
    assert heads_at(step.kv_pool_B2KPD, step.plan).abs().max() <= 1e-38


@quantised
def test_blocks_are_copied_with_their_scales(
    backend: Backend, make_step: MakeStep, kv_dtype: torch.dtype
) -> None:
    step = make_step([1, 1], [40, 70], kv_dtype=kv_dtype)
    expected = step.kv_pool_B2KPD.clone().view(torch.uint8)
    expected[[4, 1]] = expected[[2, 6]]
    src_dst_C2 = torch.tensor([[2, 4], [6, 1]], device=expected.device)
    backend.copy_blocks(step.kv_pool_B2KPD, src_dst_C2)
    assert torch.equal(step.kv_pool_B2KPD.view(torch.uint8), expected)


@quantised
def test_a_block_is_one_run_of_bytes_and_its_views_are_that_memory(kv_dtype: torch.dtype) -> None:
    pool = torch.zeros(pool_shape(5, 3, 32, 64, kv_dtype), dtype=kv_dtype)
    assert pool.is_contiguous()
    assert head_dim_of(pool) == 64
    numbers, scales = quantise(torch.randn(5, 2, 3, 32, 64), kv_dtype)
    numbers_of(pool).copy_(numbers)
    scales_of(pool).copy_(scales)
    row = movable(pool)[3, 1, 2].flatten()
    assert torch.equal(row[: 32 * 64].view(32, 64), movable(numbers)[3, 1, 2])
    assert torch.equal(row[32 * 64 :].view(torch.float32), scales[3, 1, 2])
    assert pool.nbytes == 5 * 2 * 3 * 32 * (64 + 4)


def test_a_quantised_pool_of_another_shape_is_refused(backend: Backend, make_step: MakeStep) -> None:
    if backend.name == "torch":
        pytest.skip("PyTorch refuses by itself")
    step = make_step([1], [5], kv_dtype=torch.int8)
    k_TKD = torch.zeros(1, 2, 32, device=step.q_TND.device)
    with pytest.raises(ValueError, match="of size 32"):
        backend.write_kv(k_TKD, k_TKD, step.kv_pool_B2KPD, step.plan)
