"""Attention with PyTorch operations: a plan as indices into the pool, and the products over what is gathered.

Decode rows of similar length are gathered and attended together. The G query heads of a kv head become G query rows, so
keys and values are never repeated. Prefill rows go one by one. Blocks wholly behind a window are not gathered. A pool
may be quantised (kv_pool.py).

Shapes: T tokens, N query heads, K kv heads, G = N / K, D head size. P tokens a block, B blocks in the pool. R rows of a
group, L gathered keys, Q queries of one row.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from blockyard.kernels.attention.plan import AttentionPlan
from blockyard.kernels.kv_pool import gather, head_dim_of, is_quantised

# Rows are attended together while the shortest has at least this share of the longest. The rest is padding.
MIN_FILL_OF_GROUP = 0.75
# Gathered keys and values of one group. Larger groups push each other out of the last-level cache.
MAX_GROUP_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecodeGroup:
    """Decode rows gathered together. Stale slots, beyond a row's context or behind its window, may hold anything, NaN
    too."""

    rows_R: torch.Tensor
    block_rows: torch.Tensor  # of the pool viewed as [B * 2 * K, P, D], ordered [2, R, K, blocks]
    stale_slots: torch.Tensor  # of the gathered tensor viewed as [2 * R * K * L, D]
    mask_R11L: torch.Tensor | None  # added to the scores; None if every row sees every slot


@dataclass(frozen=True, slots=True, kw_only=True)
class _PrefillRow:
    tokens: slice
    keys: slice  # of the gathered slots
    block_rows: torch.Tensor  # ordered [2, K, blocks]
    mask_QL: torch.Tensor | None  # None if the queries are the whole context: plain causal attention


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPlan:
    """A plan as indices into the pool, for one pool geometry and data type."""

    plan: AttentionPlan
    decode_groups: tuple[_DecodeGroup, ...]
    prefill_rows: tuple[_PrefillRow, ...]


def prepare(plan: AttentionPlan, kv_pool_B2KPD: torch.Tensor, dtype: torch.dtype) -> PreparedPlan:
    num_kv_heads = kv_pool_B2KPD.shape[2]
    # 8-bit numbers are widened by way of fp32, and that copy lies beside the result.
    number_bytes = dtype.itemsize + (4 if is_quantised(kv_pool_B2KPD) else 0)
    block_bytes = 2 * num_kv_heads * plan.block_size * head_dim_of(kv_pool_B2KPD) * number_bytes
    decode_groups = tuple(
        _prepare_group(plan, rows, num_kv_heads, dtype) for rows in _similar_rows(plan, block_bytes)
    )
    prefill_rows = tuple(
        _prepare_prefill(plan, row, num_kv_heads, dtype) for row in range(plan.num_decodes, plan.num_rows)
    )
    return PreparedPlan(plan=plan, decode_groups=decode_groups, prefill_rows=prefill_rows)


def _similar_rows(plan: AttentionPlan, block_bytes: int) -> list[list[int]]:
    """Return groups of decode rows of similar length, longest first, that are not too large. `block_bytes` is the size
    of a gathered block."""
    groups: list[list[int]] = []
    gathered_tokens = [_gathered_tokens(plan, row) for row in range(plan.num_decodes)]
    longest = 0
    for row in sorted(range(plan.num_decodes), key=lambda row: -gathered_tokens[row]):
        bytes_a_row = -(-longest // plan.block_size) * block_bytes
        if (
            not groups
            or gathered_tokens[row] < MIN_FILL_OF_GROUP * longest
            or (len(groups[-1]) + 1) * bytes_a_row > MAX_GROUP_BYTES
        ):
            groups.append([])
            longest = gathered_tokens[row]
        groups[-1].append(row)
    return groups


def _gathered_tokens(plan: AttentionPlan, row: int) -> int:
    """Return how many tokens to gather for a row, from the start of the first block that any of its queries sees."""
    first_block = plan.first_visible_key(row) // plan.block_size
    return plan.context_lens[row] - first_block * plan.block_size


def _prepare_group(
    plan: AttentionPlan, rows: list[int], num_kv_heads: int, dtype: torch.dtype
) -> _DecodeGroup:
    device = plan.block_table_RB.device
    rows_R = torch.tensor(rows, dtype=torch.int64, device=device)
    contexts_R1 = plan.context_lens_R[rows_R].long()[:, None]
    first_keys_R1 = torch.tensor([[plan.first_visible_key(row)] for row in rows], device=device)
    first_blocks_R1 = first_keys_R1 // plan.block_size
    num_blocks = -(-_gathered_tokens(plan, rows[0]) // plan.block_size)
    key_RL = torch.arange(num_blocks * plan.block_size, device=device) + first_blocks_R1 * plan.block_size
    stale_RL = (key_RL >= contexts_R1) | (key_RL < first_keys_R1)
    stale_2RKL = stale_RL[None, :, None].expand(2, -1, num_kv_heads, -1)
    mask_RL = torch.zeros(stale_RL.shape, dtype=dtype, device=device).masked_fill_(stale_RL, float("-inf"))
    return _DecodeGroup(
        rows_R=rows_R,
        block_rows=_block_rows(plan, rows_R, first_blocks_R1, num_blocks, num_kv_heads),
        stale_slots=stale_2RKL.reshape(-1).nonzero().squeeze(1),
        mask_R11L=mask_RL[:, None, None] if bool(stale_RL.any()) else None,
    )


def _prepare_prefill(plan: AttentionPlan, row: int, num_kv_heads: int, dtype: torch.dtype) -> _PrefillRow:
    device = plan.block_table_RB.device
    query_len, context_len = plan.query_lens[row], plan.context_lens[row]
    first_token = sum(plan.query_lens[:row])
    first_key = plan.first_visible_key(row)
    first_block, skipped = divmod(first_key, plan.block_size)
    num_keys = context_len - first_key
    rows_1 = torch.tensor([row], dtype=torch.int64, device=device)
    first_blocks_11 = torch.full((1, 1), first_block, dtype=torch.int64, device=device)
    num_blocks = -(-(skipped + num_keys) // plan.block_size)
    return _PrefillRow(
        tokens=slice(first_token, first_token + query_len),
        keys=slice(skipped, skipped + num_keys),
        block_rows=_block_rows(plan, rows_1, first_blocks_11, num_blocks, num_kv_heads),
        mask_QL=_prefill_mask(query_len, num_keys, plan.window, dtype, device),
    )


def _prefill_mask(
    query_len: int, num_keys: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """Return the mask [Q, L] of the last `query_len` of `num_keys` positions, or None for plain causal attention."""
    narrow = window is not None and num_keys > window
    if num_keys == query_len and not narrow:
        return None
    mask_QL = torch.full((query_len, num_keys), float("-inf"), dtype=dtype, device=device)
    mask_QL.triu_(diagonal=num_keys - query_len + 1)
    if window is not None and narrow:
        behind_QL = torch.ones(query_len, num_keys, dtype=torch.bool, device=device)
        behind_QL.tril_(diagonal=num_keys - query_len - window)
        mask_QL.masked_fill_(behind_QL, float("-inf"))
    return mask_QL


def _block_rows(
    plan: AttentionPlan,
    rows_R: torch.Tensor,
    first_blocks_R1: torch.Tensor,
    num_blocks: int,
    num_kv_heads: int,
) -> torch.Tensor:
    """Return indices, ordered [2, R, K, blocks], into the pool seen as rows of (block, key or value, kv head)."""
    device = rows_R.device
    position_RB = first_blocks_R1 + torch.arange(num_blocks, device=device)
    owned_R1 = -(-plan.context_lens_R[rows_R].long() // plan.block_size)[:, None]
    within_RB = position_RB.clamp(max=plan.block_table_RB.shape[1] - 1)
    table_RB = plan.block_table_RB[rows_R[:, None], within_RB].long().masked_fill(position_RB >= owned_R1, 0)
    kind_2 = torch.arange(2, device=device)[:, None, None, None]
    head_K = torch.arange(num_kv_heads, device=device)[:, None]
    return ((table_RB[None, :, None] * 2 + kind_2) * num_kv_heads + head_K).reshape(-1)


def attend_decodes(
    group: _DecodeGroup,
    q_TND: torch.Tensor,
    kv_pool_B2KPD: torch.Tensor,
    scale: float,
    out_TND: torch.Tensor,
) -> None:
    num_kv_heads, head_dim = kv_pool_B2KPD.shape[2], q_TND.shape[2]
    num_rows = len(group.rows_R)
    gathered = gather(kv_pool_B2KPD, group.block_rows, q_TND.dtype)
    gathered.view(-1, head_dim).index_fill_(0, group.stale_slots, 0.0)
    k_RKLD, v_RKLD = gathered.view(2, num_rows, num_kv_heads, -1, head_dim)
    q_RKGD = q_TND[group.rows_R].view(num_rows, num_kv_heads, -1, head_dim)
    result = F.scaled_dot_product_attention(q_RKGD, k_RKLD, v_RKLD, attn_mask=group.mask_R11L, scale=scale)
    out_TND[group.rows_R] = result.reshape(num_rows, -1, head_dim)


def attend_prefill(
    row: _PrefillRow,
    q_TND: torch.Tensor,
    kv_pool_B2KPD: torch.Tensor,
    scale: float,
    out_TND: torch.Tensor,
) -> None:
    """Attend a prefill row. The kv heads are the batch dimension, so that a group shares its keys by a stride of 0 and
    not by a copy.

    In fp32 on CUDA it is a copy: there PyTorch 2.11 computes the last of 64 n + 1 queries wrong over a stride of 0.
    """
    num_kv_heads, head_dim = kv_pool_B2KPD.shape[2], q_TND.shape[2]
    gathered = gather(kv_pool_B2KPD, row.block_rows, q_TND.dtype)
    kv_2K1LD = gathered.view(2, num_kv_heads, 1, -1, head_dim)[:, :, :, row.keys]
    q_QND = q_TND[row.tokens]
    group_size = q_QND.shape[1] // num_kv_heads
    kv_2KGLD = kv_2K1LD.expand(-1, -1, group_size, -1, -1)
    is_wrong = kv_2KGLD.is_cuda and kv_2KGLD.dtype == torch.float32
    k_KGLD, v_KGLD = kv_2KGLD.contiguous() if is_wrong else kv_2KGLD
    q_KGQD = q_QND.view(len(q_QND), num_kv_heads, group_size, head_dim).permute(1, 2, 0, 3)
    result_KGQD = F.scaled_dot_product_attention(
        q_KGQD, k_KGLD, v_KGLD, attn_mask=row.mask_QL, is_causal=row.mask_QL is None, scale=scale
    )
    out_TND[row.tokens] = result_KGQD.permute(2, 0, 1, 3).flatten(1, 2)
