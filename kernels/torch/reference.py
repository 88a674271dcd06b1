"""Each operation in the plainest PyTorch that is obviously right: the oracle of the tests, too slow to serve.

Attention goes row by row. It gathers the row's keys and values into dense tensors and repeats the kv heads. Then it
takes a masked softmax in fp32. Nothing here is tuned, and nothing in the product calls it. A pool may be quantised.

Shapes: T tokens, N query heads, K kv heads, D head size. P tokens a block, B blocks in the pool, C block copies. H
hidden size, I intermediate size, S positions in the rotary table. L context length, Q queries of one row.
"""

import math

import torch
from blockyard.kernels.attention.plan import AttentionPlan
from blockyard.kernels.kv_pool import LARGEST, is_quantised, numbers_of, scales_of


def write_kv(
    k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv_pool_B2KPD: torch.Tensor, plan: AttentionPlan
) -> None:
    """Set pool[slot // P, 0 or 1, :, slot % P] = k or v, for every slot that is not padding."""
    for token, slot in enumerate(plan.slot_mapping_T.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, plan.block_size)
            for kind, heads_KD in enumerate((k_TKD[token], v_TKD[token])):
                if is_quantised(kv_pool_B2KPD):
                    _write_quantised(heads_KD, kv_pool_B2KPD[block : block + 1], kind, offset)
                else:
                    kv_pool_B2KPD[block, kind, :, offset] = heads_KD


def _write_quantised(heads_KD: torch.Tensor, kv_pool_12KPD: torch.Tensor, kind: int, offset: int) -> None:
    """Set scale = max |head| / largest number, and number = the nearest to head / scale. NaN if a value is
    not finite."""
    dtype = kv_pool_12KPD.dtype
    for head, head_D in enumerate(heads_KD.float()):
        peak = head_D.abs().max()
        scale = peak / LARGEST[dtype] if torch.isfinite(peak) else torch.tensor(float("nan"))
        number_D = head_D / scale if scale > 0 else torch.zeros_like(head_D)
        number_D = number_D.round() if dtype == torch.int8 else number_D
        numbers_of(kv_pool_12KPD)[0, kind, head, offset] = number_D.to(dtype)
        scales_of(kv_pool_12KPD)[0, kind, head, offset] = scale


def heads_of(kv_pool_B2KPD: torch.Tensor) -> torch.Tensor:
    """Return the heads [B, 2, K, P, D] of any pool in fp32. A quantised pool is dequantised."""
    if not is_quantised(kv_pool_B2KPD):
        return kv_pool_B2KPD.float()
    return numbers_of(kv_pool_B2KPD).float() * scales_of(kv_pool_B2KPD)[..., None]


def attention(
    q_TND: torch.Tensor,
    kv_pool_B2KPD: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    out_TND: torch.Tensor,
) -> None:
    """Set out = softmax(scale * q k^T + mask) v for each row. Its queries are its last positions.

    The mask hides what comes after a query, and under a window of W tokens what lies W or more before it. A hidden
    value weighs 0, and may be NaN.
    """
    token = 0
    for row, (query_len, context_len) in enumerate(zip(plan.query_lens, plan.context_lens, strict=True)):
        num_blocks = -(-context_len // plan.block_size)
        blocks = plan.block_table_RB[row, :num_blocks].long()
        rows = slice(token, token + query_len)
        kv_B2KPD = heads_of(kv_pool_B2KPD[blocks])
        out_TND[rows] = _attend_row(q_TND[rows], kv_B2KPD, context_len, scale, plan.window).to(out_TND.dtype)
        token += query_len


def _attend_row(
    q_QND: torch.Tensor, kv_B2KPD: torch.Tensor, context_len: int, scale: float, window: int | None
) -> torch.Tensor:
    query_len, num_heads, head_dim = q_QND.shape
    num_kv_heads = kv_B2KPD.shape[2]
    dense_2KLD = kv_B2KPD.permute(1, 2, 0, 3, 4).reshape(2, num_kv_heads, -1, head_dim)[:, :, :context_len]
    if window is not None:
        # 0 * NaN is NaN, so values that no query sees are set to 0 first.
        dense_2KLD[:, :, : max(0, context_len - query_len - window + 1)] = 0.0
    k_NLD, v_NLD = dense_2KLD.repeat_interleave(num_heads // num_kv_heads, dim=1)
    scores_NQL = q_QND.float().transpose(0, 1) @ k_NLD.transpose(1, 2) * scale
    key_L = torch.arange(context_len, device=q_QND.device)
    query_Q = torch.arange(context_len - query_len, context_len, device=q_QND.device)
    hidden_QL = key_L > query_Q[:, None]
    if window is not None:
        hidden_QL |= key_L <= query_Q[:, None] - window
    scores_NQL = scores_NQL.masked_fill(hidden_QL, float("-inf"))
    out_NQD: torch.Tensor = torch.softmax(scores_NQL, dim=-1) @ v_NLD
    return out_NQD.transpose(0, 1)


def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float, *, out_TH: torch.Tensor) -> None:
    """Set out = (x / sqrt(mean(x^2) + eps), rounded to x's type) * weight, as LlamaRMSNorm rounds.

    With an fp32 weight only the product is rounded.
    """
    x_fp32 = x_TH.float()
    normed_TH = x_fp32 * torch.rsqrt((x_fp32 * x_fp32).mean(dim=-1, keepdim=True) + eps)
    out_TH.copy_(weight_H * (normed_TH if weight_H.dtype == torch.float32 else normed_TH.to(x_TH.dtype)))


def add_rms_norm(
    x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float, *, out_TH: torch.Tensor
) -> None:
    """Set residual += x, rounded to its type, then out = rms_norm(residual)."""
    residual_TH += x_TH
    rms_norm(residual_TH, weight_H, eps, out_TH=out_TH)


def rms_norm_add(x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> None:
    """Set residual += rms_norm(x), rounded to its type."""
    normed_TH = torch.empty_like(x_TH)
    rms_norm(x_TH, weight_H, eps, out_TH=normed_TH)
    residual_TH += normed_TH


def rotary(
    q_TND: torch.Tensor, k_TKD: torch.Tensor, cos_sin_SD: torch.Tensor, positions_T: torch.Tensor
) -> None:
    """Set x1, x2 = x1 cos - x2 sin, x2 cos + x1 sin for the halves x1, x2 of a head, in place, in fp32."""
    cos_T1D, sin_T1D = cos_sin_SD[positions_T][:, None].chunk(2, dim=-1)
    for x in (q_TND, k_TKD):
        first, second = x.float().chunk(2, dim=-1)
        x.copy_(torch.cat((first * cos_T1D - second * sin_T1D, second * cos_T1D + first * sin_T1D), dim=-1))


def silu_mul(gate_up_T2I: torch.Tensor, *, out_TI: torch.Tensor) -> None:
    """Set out = silu(gate) * up, computed in fp32."""
    gate_TI, up_TI = gate_up_T2I.float().chunk(2, dim=-1)
    out_TI.copy_(gate_TI * torch.sigmoid(gate_TI) * up_TI)


def gelu_mul(gate_up_T2I: torch.Tensor, *, out_TI: torch.Tensor) -> None:
    """Set out = gate / 2 * (1 + tanh(sqrt(2 / pi) * (gate + 0.044715 gate^3))) * up, computed in fp32."""
    gate_TI, up_TI = gate_up_T2I.float().chunk(2, dim=-1)
    inner_TI = math.sqrt(2 / math.pi) * (gate_TI + 0.044715 * gate_TI**3)
    out_TI.copy_(gate_TI / 2 * (1 + torch.tanh(inner_TI)) * up_TI)


def copy_blocks(kv_pool_B2KPD: torch.Tensor, src_dst_C2: torch.Tensor) -> None:
    """Set pool[dst] = pool[src], one pair after the other."""
    for source, destination in src_dst_C2.tolist():
        kv_pool_B2KPD[destination] = kv_pool_B2KPD[source]


def experts(
    x_TH: torch.Tensor,
    logits_TE: torch.Tensor,
    gate_up_E2IH: torch.Tensor,
    down_EHI: torch.Tensor,
    *,
    top_k: int,
    normalizes: bool,
) -> torch.Tensor:
    """Return the sum of softmax(logits)[e] * down_e(silu(gate_e(x)) * up_e(x)) over each token's experts e, in fp32.

    The experts have the largest logits, of equals the first.
    """
    rows = []
    for x_H, logits_E in zip(x_TH.float(), logits_TE.float(), strict=True):
        chosen = sorted(range(len(logits_E)), key=lambda expert: (-float(logits_E[expert]), expert))[:top_k]
        weights_K = torch.softmax(logits_E, dim=0)[chosen]
        weights_K = weights_K / weights_K.sum() if normalizes else weights_K
        inner_KI = torch.stack([gate_up_E2IH[expert].float() @ x_H for expert in chosen])
        gate_KI, up_KI = inner_KI.chunk(2, dim=-1)
        hidden_KI = gate_KI * torch.sigmoid(gate_KI) * up_KI
        outs_KH = torch.stack([down_EHI[e].float() @ h_I for e, h_I in zip(chosen, hidden_KI, strict=True)])
        rows.append(weights_K @ outs_KH)
    return torch.stack(rows).to(x_TH.dtype) if rows else torch.empty_like(x_TH)
