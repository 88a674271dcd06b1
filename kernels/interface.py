"""The interface every kernel backend has, and the one place that chooses a backend.

Shapes: T tokens in the step, N query heads, K kv heads, D head size, P tokens a block, B blocks in the pool,
X = N + 2 K heads of queries, keys and values, H hidden size, I input (or intermediate) size, O output size, S positions
in the rotary table, C block copies, V vocabulary, S also rows of logits, F rows whose draw top-k or top-p filters.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from blockyard.kernels.attention.plan import AttentionPlan

BackendName = Literal["auto", "torch", "cpu", "triton"]
LinearsName = Literal["full", "int8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """The RMS norm of each head of queries and keys (Qwen3)."""

    q_weight_D: torch.Tensor
    k_weight_D: torch.Tensor
    eps: float


class Backend(Protocol):
    """Operations of one decoder step. `out_*` tensors are written, never read."""

    @property
    def name(self) -> str:
        """torch, cpu or triton."""
        ...

    @property
    def reads_items(self) -> bool:
        """Whether its attention reads the plan's work items; if not, they need not be made."""
        ...

    @property
    def mlp_rows(self) -> int | None:
        """How many tokens go through an MLP at once: what lies between its linears is the widest of a step, and for so
        many stays in the CPU's caches. None: all."""
        ...

    @property
    def thresholds_all_rows(self) -> bool:
        """Whether every row with top-k or top-p is for `top_k_top_p_thresholds`, as it is quicker than a look at the likeliest
        few."""
        ...

    @property
    def widens_bfloat16(self) -> bool:
        """Whether bfloat16 is as fast as float32 on a CPU that does not multiply it."""
        ...

    def embed(self, table_VH: torch.Tensor, tokens_T: torch.Tensor) -> torch.Tensor:
        """The table's rows [T, H] of these tokens, for the caller to write to."""
        ...

    def place_heads(
        self,
        heads_TXD: torch.Tensor,
        norms: HeadNorms | None,
        cos_sin_SD: torch.Tensor,
        kv_pool_B2KPD: torch.Tensor,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        """`rms_norm` of each query and key head if the model has it, `rotary`, `write_kv`: all that a layer does
        between its first projection and attention. The queries for `attention`; `heads_TXD` may be overwritten."""
        ...

    def write_kv(
        self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv_pool_B2KPD: torch.Tensor, plan: AttentionPlan
    ) -> None:
        """Store keys and values at the plan's slots; padding slots are skipped. How they lie within a block is
        the backend's: what moves blocks moves them whole."""
        ...

    def attention(
        self,
        q_TND: torch.Tensor,
        kv_pool_B2KPD: torch.Tensor,
        plan: AttentionPlan,
        *,
        scale: float,
        out_TND: torch.Tensor,
    ) -> None:
        """Causal attention of all rows of the plan, within its window if it has one, over the pool, after this
        step's `write_kv`."""
        ...

    def rms_norm(
        self, x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float, *, out_TH: torch.Tensor
    ) -> None:
        """Normalise the last dimension in fp32. `out_TH` may be `x_TH`."""
        ...

    def add_rms_norm(
        self,
        x_TH: torch.Tensor,
        residual_TH: torch.Tensor,
        weight_H: torch.Tensor,
        eps: float,
        *,
        out_TH: torch.Tensor,
    ) -> None:
        """residual += x in place, then out = norm(residual). `out_TH` may be `x_TH`."""
        ...

    def rotary(
        self, q_TND: torch.Tensor, k_TKD: torch.Tensor, cos_sin_SD: torch.Tensor, positions_T: torch.Tensor
    ) -> None:
        """Rotate halves in place; `cos_sin_SD` is fp32, its first D/2 columns cosines, the others sines."""
        ...

    def silu_mul(self, gate_up_T2I: torch.Tensor, *, out_TI: torch.Tensor) -> None:
        """out = silu(first half) * second half."""
        ...

    def copy_blocks(self, kv_pool_B2KPD: torch.Tensor, src_dst_C2: torch.Tensor) -> None:
        """Copy whole blocks; destinations are distinct and none is also a source."""
        ...

    def likeliest(self, logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each row the likeliest token [S], any of equals, and whether all its logits are finite [S]; where they are
        not, any token."""
        ...

    def top_k_top_p_thresholds(
        self,
        weights_FV: torch.Tensor,
        top_k_F: torch.Tensor,
        top_p_F: torch.Tensor,
        pending_F: torch.Tensor,
        threshold_F: torch.Tensor,
    ) -> None:
        """Writes the smallest weight that each pending row keeps: of those that are among its `top_k_F` (int64)
        largest and have less than `top_p_F` (fp64) of their sum before them. Weights are fp32 and at least 0; a row
        whose top-k is the vocabulary has no such filter, and a sum of 1. Any number for a row that holds NaN. The
        vectors are contiguous, `weights_FV` in its rows."""
        ...

    def pack_linear(self, weight_OI: torch.Tensor) -> torch.Tensor:
        """The weight as this backend's `linear` likes it best: itself, or a copy that only `linear` can read.

        Who owns the weight and has no other use for it should let it go, or it is in memory twice.
        """
        ...

    def linear(
        self, x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x @ weight^T + bias, for a weight as it is or from `pack_linear`."""
        ...


def likeliest(logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """By PyTorch, on any device."""
    # The same as argmax, which takes four times as long for bf16 on a CPU.
    largest_S, tokens_S = logits_SV.max(dim=-1)
    return tokens_S, torch.isfinite(largest_S) & torch.isfinite(logits_SV.amin(dim=-1))


def split_heads(
    heads_TXD: torch.Tensor, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values, as views of what a layer's first projection gave."""
    counts = [heads_TXD.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads]
    q_TND, k_TKD, v_TKD = heads_TXD.split_with_sizes(counts, dim=1)
    return q_TND, k_TKD, v_TKD
