"""Host side of the Triton kernels that fill a pool, and the checks of a pool before every launch.

Shapes: T tokens, K kv heads, N query heads, X = N + 2 K, D head size. P tokens a block, B blocks in the pool, S
positions.
"""

# Triton ships no types.
# mypy: disable-error-code="import-untyped"

import torch
import triton
from blockyard.kernels.attention.plan import AttentionPlan
from blockyard.kernels.interface import HeadNorms
from blockyard.kernels.kv_pool import SCALE_BYTES, head_dim_of, is_quantised
from blockyard.kernels.triton.cache_ops import write_kv_kernel
from blockyard.kernels.triton.numbers.devices import check_dense_rows, converts_e4m3
from blockyard.kernels.triton.qk_norm_rope import qk_norm_rope_write_kernel

SUPPORTED_BLOCK_SIZES = (16, 32, 64, 128)


def launch_write_kv(
    k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv_pool_B2KPD: torch.Tensor, plan: AttentionPlan
) -> None:
    num_tokens, num_kv_heads, head_dim = k_TKD.shape
    check_pool(kv_pool_B2KPD, num_kv_heads, head_dim, plan.block_size)
    check_dense_rows(k_TKD, v_TKD)
    if not num_tokens:
        return
    numbers, scales, scale_bytes = pool_pointers(kv_pool_B2KPD)
    write_kv_kernel[(num_tokens,)](
        k_TKD,
        v_TKD,
        numbers,
        scales,
        plan.slot_mapping_T,
        *k_TKD.stride()[:2],
        *v_TKD.stride()[:2],
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=plan.block_size,
        SCALE_BYTES=scale_bytes,
        HEADS_POW2=triton.next_power_of_2(num_kv_heads),
    )


def launch_qk_norm_rope_write(
    heads_TXD: torch.Tensor,
    norms: HeadNorms | None,
    cos_sin_SD: torch.Tensor,
    kv_pool_B2KPD: torch.Tensor,
    plan: AttentionPlan,
) -> None:
    """Launch `qk_norm_rope_write_kernel`. It overwrites the queries in `heads_TXD` and leaves the keys there
    unchanged."""
    num_tokens, num_all_heads, head_dim = heads_TXD.shape
    num_kv_heads = kv_pool_B2KPD.shape[2]
    num_heads = num_all_heads - 2 * num_kv_heads
    check_pool(kv_pool_B2KPD, num_kv_heads, head_dim, plan.block_size)
    check_dense_rows(heads_TXD, cos_sin_SD)
    if not num_tokens:
        return
    numbers, scales, scale_bytes = pool_pointers(kv_pool_B2KPD)
    qk_norm_rope_write_kernel[(num_tokens,)](
        heads_TXD,
        heads_TXD if norms is None else norms.q_weight_D,
        heads_TXD if norms is None else norms.k_weight_D,
        cos_sin_SD,
        plan.positions_T,
        numbers,
        scales,
        plan.slot_mapping_T,
        *heads_TXD.stride()[:2],
        0.0 if norms is None else norms.eps,
        NORMED=norms is not None,
        NUM_HEADS=num_heads,
        HEADS_POW2=triton.next_power_of_2(num_heads),
        NUM_KV_HEADS=num_kv_heads,
        KV_HEADS_POW2=triton.next_power_of_2(num_kv_heads),
        HALF_DIM=head_dim // 2,
        BLOCK_SIZE=plan.block_size,
        SCALE_BYTES=scale_bytes,
    )


def pool_pointers(kv_pool_B2KPD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return a kernel's `pool_ptr`, `scales_ptr` and `SCALE_BYTES`. fp8 is passed as bits where the device does not
    convert it. The scales lie in the same memory."""
    if not is_quantised(kv_pool_B2KPD):
        return kv_pool_B2KPD, kv_pool_B2KPD, 0
    as_bits = kv_pool_B2KPD.dtype == torch.float8_e4m3fn and not converts_e4m3(kv_pool_B2KPD.device)
    numbers = kv_pool_B2KPD.view(torch.uint8) if as_bits else kv_pool_B2KPD
    return numbers, kv_pool_B2KPD.view(torch.float32), SCALE_BYTES


def check_pool(kv_pool_B2KPD: torch.Tensor, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    held = (*kv_pool_B2KPD.shape[1:4], head_dim_of(kv_pool_B2KPD))
    if held != (2, num_kv_heads, block_size, head_dim):
        raise ValueError(
            f"a pool of shape {tuple(kv_pool_B2KPD.shape)} does not hold {num_kv_heads} kv heads "
            f"of size {head_dim} in blocks of {block_size}"
        )
    if block_size not in SUPPORTED_BLOCK_SIZES or head_dim < 16 or head_dim & (head_dim - 1):
        raise ValueError(
            f"the triton backend takes block sizes {SUPPORTED_BLOCK_SIZES} and head sizes that are "
            f"powers of two from 16 up, got {block_size} and {head_dim}; use the torch backend"
        )
    assert kv_pool_B2KPD.is_contiguous()
