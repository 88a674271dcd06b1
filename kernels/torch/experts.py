"""Experts with PyTorch operations, for the torch backends: the choice, and one MLP after the other on gathered rows.

Each token adds its experts in the order of their numbers. Nothing here depends on the other tokens of the step, except
the shapes of the linears.

Shapes: T tokens, K experts a token, E experts, H hidden size, I intermediate size, R rows of one expert.
"""

import torch
from blockyard.kernels.interface import Backend, Stacked


def choose_experts(
    logits_TE: torch.Tensor, top_k: int, *, normalizes: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts [T, K] of each token, the largest logit first and of equals the first, and their weights in
    fp32."""
    sorted_TE, order_TE = logits_TE.float().sort(dim=-1, descending=True, stable=True)
    exp_TE = torch.exp(sorted_TE - sorted_TE[:, :1])
    total_T1 = (exp_TE[:, :top_k] if normalizes else exp_TE).sum(dim=-1, keepdim=True)
    return order_TE[:, :top_k], exp_TE[:, :top_k] / total_T1


def run_experts(
    backend: Backend,
    x_TH: torch.Tensor,
    logits_TE: torch.Tensor,
    gate_up_E2IH: Stacked,
    down_EHI: Stacked,
    *,
    top_k: int,
    normalizes: bool,
) -> torch.Tensor:
    """Compute `Backend.experts` with the backend's own linears."""
    experts_TK, weights_TK = choose_experts(logits_TE, top_k, normalizes=normalizes)
    pairs = experts_TK.flatten().argsort(stable=True)
    counts = experts_TK.flatten().bincount(minlength=logits_TE.shape[1]).tolist()
    weights = weights_TK.flatten()
    sum_TH = torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
    for expert, pairs_R in enumerate(pairs.split(counts)):
        for some in pairs_R.split(backend.mlp_rows or max(1, len(pairs_R))) if len(pairs_R) else ():
            tokens = some // top_k
            gate_up_R2I = backend.linear(x_TH[tokens], gate_up_E2IH[expert])
            inner_RI = gate_up_R2I.new_empty(len(some), gate_up_R2I.shape[1] // 2)
            backend.silu_mul(gate_up_R2I, out_TI=inner_RI)
            out_RH = backend.linear(inner_RI, down_EHI[expert])
            sum_TH.index_add_(0, tokens, out_RH.float() * weights[some][:, None])
    return sum_TH.to(x_TH.dtype)
