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
    experts_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    gate_up_E2IH: Stacked,
    down_EHI: Stacked,
) -> torch.Tensor:
    """Return the weighted sum [T, H] of each token's experts, computed by the backend's own linears."""
    pairs, top_k = experts_TK.flatten().argsort(stable=True), experts_TK.shape[1]
    counts = experts_TK.flatten().bincount(minlength=len(gate_up_E2IH)).tolist()
    weights = weights_TK.flatten()
    sum_TH = torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
    for expert, pairs_of_expert in enumerate(pairs.split(counts)):
        if not len(pairs_of_expert):
            continue
        for pairs_R in pairs_of_expert.split(backend.mlp_rows or len(pairs_of_expert)):
            tokens_R = pairs_R // top_k
            gate_up_R2I = backend.linear(x_TH[tokens_R], gate_up_E2IH[expert])
            inner_RI = gate_up_R2I.new_empty(len(pairs_R), gate_up_R2I.shape[1] // 2)
            backend.silu_mul(gate_up_R2I, out_TI=inner_RI)
            out_RH = backend.linear(inner_RI, down_EHI[expert])
            sum_TH.index_add_(0, tokens_R, out_RH.float() * weights[pairs_R][:, None])
    return sum_TH.to(x_TH.dtype)
