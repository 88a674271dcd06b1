"""KV in a pool, in full precision and in 8 bits: what each backend writes, reads and copies, against the reference."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from blockyard.kernels.interface import Backend
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

from .rig import (
    DEVICE,
    FLOATS,
    KV_DTYPES,
    NAN,
    TOLERANCES,
    Step,
    crossed,
    make_step,
    normal,
    on_each_backend,
    placed_heads,
)

quantised = pytest.mark.parametrize("kv_dtype", KV_DTYPES.values(), ids=KV_DTYPES)
STORED = [None, *KV_DTYPES.values()]
BackendOf = Callable[[str], Backend]


def empty_pool(step: Step, kv_dtype: torch.dtype | None) -> torch.Tensor:
    """Return a pool in which every number is NaN, or every byte is 1, which no test writes everywhere."""
    if kv_dtype is None:
        return torch.full_like(step.kv_pool_B2KPD, NAN)
    num_blocks, _, num_kv_heads, block_size, _ = step.kv_pool_B2KPD.shape
    shape = pool_shape(num_blocks, num_kv_heads, block_size, step.q_TND.shape[2], kv_dtype)
    pool = torch.empty(shape, dtype=kv_dtype, device=step.q_TND.device)
    pool.view(torch.uint8).fill_(1)
    return pool


def heads_at(pool: torch.Tensor, plan: Any) -> torch.Tensor:
    """Return [2, T, K, D] in fp32: what the pool says of the tokens of a step that have a slot."""
    slots_T = plan.slot_mapping_T[plan.slot_mapping_T >= 0]
    blocks_T, offsets_T = slots_T // plan.block_size, slots_T % plan.block_size
    return reference.heads_of(pool)[blocks_T, :, :, offsets_T].transpose(0, 1)


def untouched_bytes(pool: torch.Tensor, plan: Any) -> torch.Tensor:
    """Return the bytes of all slots that the step has no token for."""
    is_free = torch.ones(pool.shape[0] * plan.block_size, dtype=torch.bool)
    is_free[plan.slot_mapping_T[plan.slot_mapping_T >= 0].cpu()] = False
    views = [pool] if pool.dtype not in KV_DTYPES.values() else [numbers_of(pool), scales_of(pool)[..., None]]
    slots = [view.transpose(1, 3).flatten(0, 1).contiguous()[is_free.to(pool.device)] for view in views]
    return torch.cat([slot.view(torch.uint8).flatten() for slot in slots])


def steps_between(read: torch.Tensor, heads_TKD: torch.Tensor, kv_dtype: torch.dtype) -> float:
    """Return the largest difference, in distances between neighbouring numbers where the head's own numbers lie."""
    wide = heads_TKD.float()
    scale = wide.abs().amax(dim=-1, keepdim=True) / LARGEST[kv_dtype]
    step = scale if kv_dtype == torch.int8 else (wide.abs() / 8).maximum(scale * 2**-9)
    return float(((read - wide).abs() / step).max())


@on_each_backend(crossed(kv_dtype=STORED, dtype=FLOATS, num_kv_heads=[1, 3, 8]), usual=3)
def test_each_head_lands_in_its_slot_as_near_as_its_numbers_allow(
    backend_of: BackendOf, run: tuple[str, dict[str, Any]]
) -> None:
    backend, case = backend_of(run[0]), run[1]
    kv_dtype, num_kv_heads = case["kv_dtype"], case["num_kv_heads"]
    heads = {"num_heads": num_kv_heads, "num_kv_heads": num_kv_heads}
    step = make_step([1, 1, 17], [5, 33, 20], **heads, dtype=case["dtype"])
    size_T11 = torch.logspace(-3, 2, 19)[:, None, None]
    fused_TXD = (normal(19, 2 * num_kv_heads, 16).cpu() * size_T11).to(step.q_TND)
    both = fused_TXD[:, :num_kv_heads], fused_TXD[:, num_kv_heads:]
    pool, empty = empty_pool(step, kv_dtype), empty_pool(step, kv_dtype)
    backend.write_kv(*both, pool, step.plan)
    for read, heads_TKD in zip(heads_at(pool, step.plan), both, strict=True):
        if kv_dtype is None:
            assert torch.equal(read, heads_TKD.float())
        else:
            assert steps_between(read, heads_TKD, kv_dtype) < 0.5001
    assert torch.equal(untouched_bytes(pool, step.plan), untouched_bytes(empty, step.plan))


def test_padding_slots_write_nothing(backend: Backend) -> None:
    """A block of guard before and behind the pool: slot -1 taken at its word would land outside of it."""
    step = make_step([1, 4], [9, 4], padded_tokens=8)
    slots_T = step.plan.slot_mapping_T.clone()
    slots_T[2] = -1
    k_TKD = normal(8, 2, 16)
    guarded = torch.full((len(step.kv_pool_B2KPD) + 2, 2, 2, 16, 16), NAN, device=DEVICE)
    backend.write_kv(k_TKD, -k_TKD, guarded[1:-1], replace(step.plan, slot_mapping_T=slots_T))
    assert (~guarded.isnan()).sum() == 4 * 2 * k_TKD[0].numel()
    block, offset = divmod(int(slots_T[4]), 16)
    assert torch.equal(guarded[1 + block, :, :, offset], torch.stack((k_TKD[4], -k_TKD[4])))


PLACED = crossed(
    kv_dtype=STORED,
    norms=["as heads", "fp32", None],
    dtype=[torch.float32, torch.bfloat16],
    heads=[(3, 3, 64), (12, 3, 16), (8, 1, 128)],
)


@on_each_backend(PLACED, usual=6)
def test_heads_are_placed_as_by_norm_rotation_and_write(
    backend_of: BackendOf, run: tuple[str, dict[str, Any]]
) -> None:
    """Padding's queries are placed too, its keys and values nowhere."""
    backend, case = backend_of(run[0]), run[1]
    dtype, norms, kv_dtype = case["dtype"], case["norms"], case["kv_dtype"]
    heads = dict(zip(("num_heads", "num_kv_heads", "head_dim"), case["heads"], strict=True))
    step = make_step([1, 6], [20, 6], padded_tokens=9, dtype=dtype, **heads)
    placed = placed_heads(step, {None: None, "as heads": dtype, "fp32": torch.float32}[norms])
    pool, expected = empty_pool(step, kv_dtype), empty_pool(step, kv_dtype)
    empty = pool.clone()
    reference.write_kv(placed.k_TKD, placed.v_TKD, expected, step.plan)
    q_TND = placed.by(backend, pool)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(q_TND, placed.q_TND, atol=tolerance, rtol=tolerance)
    read, wanted = heads_at(pool, step.plan), heads_at(expected, step.plan)
    assert read.shape[1] == 7
    if kv_dtype is None:
        torch.testing.assert_close(read, wanted, atol=tolerance, rtol=tolerance)
    else:  # One step of the number where the two sides round apart.
        torch.testing.assert_close(read, wanted, rtol=0.13, atol=0.03)
        assert (read - wanted).abs().mean() < (1e-3 if dtype == torch.float32 else 1e-2)
    assert torch.equal(untouched_bytes(pool, step.plan), untouched_bytes(empty, step.plan))


def test_blocks_are_copied_whole_with_their_scales_and_others_stay(backend: Backend) -> None:
    for kv_dtype, pairs in product(STORED, ([], [(0, 3)], [(1, 4), (1, 0), (2, 6)])):
        pool = make_step([1, 1], [40, 70], kv_dtype=kv_dtype).kv_pool_B2KPD
        expected = pool.clone().view(torch.uint8)
        for source, target in pairs:
            expected[target] = expected[source]
        backend.copy_blocks(pool, torch.tensor(pairs, dtype=torch.int64, device=DEVICE).reshape(-1, 2))
        assert torch.equal(pool.view(torch.uint8), expected), (kv_dtype, pairs)


@quantised
def test_every_stored_number_is_read_as_what_it_means(backend: Backend, kv_dtype: torch.dtype) -> None:
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
    out_TND = replace(step, kv_pool_B2KPD=pool).attend(backend)
    expected = finite.view(kv_dtype).float() * 0.5
    torch.testing.assert_close(out_TND[:, 0].cpu(), expected, rtol=1e-6, atol=0.0)


@quantised
@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
def test_what_is_not_finite_is_nan_for_whoever_reads_it_and_for_nobody_else(
    backend: Backend, kv_dtype: torch.dtype, bad: float
) -> None:
    step = make_step([1, 1], [3, 9], kv_dtype=kv_dtype)
    for kind in (0, 1):
        both = [normal(2, 2, 16, seed=seed) for seed in (1, 2)]
        both[kind][0, 1, 5] = bad
        spoilt = replace(step, kv_pool_B2KPD=step.kv_pool_B2KPD.clone())
        backend.write_kv(*both, spoilt.kv_pool_B2KPD, step.plan)
        out_TND = spoilt.attend(backend)
        assert out_TND[0, 2:].isnan().all(), "the heads of the group that reads it"
        assert out_TND[0, :2].isfinite().all()
        assert out_TND[1].isfinite().all()


@quantised
def test_heads_of_zeros_and_of_next_to_nothing_are_zeros(backend: Backend, kv_dtype: torch.dtype) -> None:
    step = make_step([1, 1], [3, 9], kv_dtype=kv_dtype)
    k_TKD = torch.zeros(2, 2, 16).to(step.q_TND)
    k_TKD[1] = 1e-38
    backend.write_kv(k_TKD, k_TKD, step.kv_pool_B2KPD, step.plan)
    assert heads_at(step.kv_pool_B2KPD, step.plan).abs().max() <= 1e-38


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


@pytest.mark.parametrize(
    ("kv_dtype", "shape", "told"),
    [(None, (1, 4, 16), "does not hold 4 kv heads"), (torch.int8, (1, 2, 32), "of size 32")],
)
def test_a_pool_of_another_shape_is_refused(
    backend: Backend, kv_dtype: torch.dtype | None, shape: tuple[int, ...], told: str
) -> None:
    if backend.name == "torch":
        pytest.skip("PyTorch refuses by itself")
    step, k_TKD = make_step([1], [5], kv_dtype=kv_dtype), torch.zeros(shape, device=DEVICE)
    with pytest.raises(ValueError, match=told):
        backend.write_kv(k_TKD, k_TKD, step.kv_pool_B2KPD, step.plan)
