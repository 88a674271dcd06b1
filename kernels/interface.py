"""The interface of every kernel backend.

Does not own which backend is used (selection.py).

Shapes: T tokens in the step, N query heads, K kv heads, D head size. P tokens a block, B blocks in the pool, C block
copies. X = N + 2 K heads of queries, keys and values. H hidden size, I input (or intermediate) size, O output size. S
positions in the rotary table, or rows of logits. V vocabulary, F rows with a top-k or top-p filter, D rows that draw,
N outputs a row. E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from blockyard.kernels.attention.plan import AttentionPlan
from blockyard.kernels.lora import LoraLinear, LoraPlan
from blockyard.kernels.quantised import LinearWeight

BackendName = Literal["auto", "torch", "cpu", "triton"]
LinearsName = Literal["full", "int8"]

Stacked = torch.Tensor | Sequence[LinearWeight]
"""A matrix of each expert: one tensor [E, O, I], a quantised weight for each, or what `Backend.pack_experts` makes of
them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """The RMS norm of each head of queries and keys."""

    q_weight_D: torch.Tensor
    k_weight_D: torch.Tensor
    eps: float


class Backend(Protocol):
    """Operations of one decoder step. `out_*` tensors are written, never read."""

    @property
    def name(self) -> str:
        """Return torch, cpu or triton."""
        ...

    @property
    def reads_items(self) -> bool:
        """Return whether attention reads the plan's work items. If not, the plan needs none."""
        ...

    @property
    def mlp_rows(self) -> int | None:
        """Return how many tokens go through an MLP at once, or None for all.

        What lies between the MLP's linears is the widest tensor of a step. For so many tokens it stays in the CPU's
        caches.
        """
        ...

    @property
    def thresholds_all_rows(self) -> bool:
        """Return whether `top_k_top_p_thresholds` is called for every filtered row. It is then faster than a top-k over
        a few candidates."""
        ...

    @property
    def widens_bfloat16(self) -> bool:
        """Return whether bfloat16 is as fast as float32 even on a CPU without bfloat16 multiplication, because it is
        widened."""
        ...

    def kv_layout(self, kv_pool_B2KPD: torch.Tensor, dtype: torch.dtype) -> str:
        """Return the name of the order in which a block of such a pool holds its bytes, for a model in `dtype`.

        It ends in a version, such as "plain/1". Raise that where the bytes of a block change. Other workers take a
        block under an equal name as it is. `tests/unit/kernels/test_block_bytes.py` keeps a block of each backend.
        """
        ...

    def arithmetic(self, kv_pool_B2KPD: torch.Tensor, dtype: torch.dtype) -> tuple[str, ...]:
        """Return words `key=value` on everything that decides how results are rounded, except the sources in Python.

        Two backends with equal words compute equal bits for a step of the same rows. No word has a space.
        """
        ...

    def embed(self, table_VH: torch.Tensor, tokens_T: torch.Tensor) -> torch.Tensor:
        """Return the table's rows [T, H] of these tokens. The caller may write to them."""
        ...

    def qk_norm_rope_write(
        self,
        heads_TXD: torch.Tensor,
        norms: HeadNorms | None,
        cos_sin_SD: torch.Tensor,
        kv_pool_B2KPD: torch.Tensor,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        """Do everything between a layer's first projection and its attention, and return the queries [T, N, D].
        Applies `rms_norm` to each query and key head if the model has it, then `rotary`, then `write_kv`. May overwrite
        `heads_TXD`.
        """
        ...

    def write_kv(
        self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv_pool_B2KPD: torch.Tensor, plan: AttentionPlan
    ) -> None:
        """Store keys and values at the plan's slots, and skip padding slots. The backend chooses the layout within a
        block, because blocks move only as a whole."""
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
        """Compute causal attention over the pool for all rows of the plan, within the plan's window if it has one. Call
        `write_kv` of this step first."""
        ...

    def rms_norm(
        self, x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float, *, out_TH: torch.Tensor
    ) -> None:
        """Normalise the last dimension in fp32. `out_TH` may be `x_TH`. The result is rounded to x's type, multiplied
        by the weight and rounded again. With a weight in fp32, which every norm here may have, it is rounded once."""
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
        """Add x to the residual in place, then set out = rms_norm(residual). `out_TH` may be `x_TH`."""
        ...

    def rms_norm_add(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> None:
        """Add rms_norm(x) to the residual in place. May overwrite `x_TH`."""
        ...

    def scale(self, x_TH: torch.Tensor, factor: float) -> None:
        """Multiply x by a number in place."""
        ...

    def rotary(
        self, q_TND: torch.Tensor, k_TKD: torch.Tensor, cos_sin_SD: torch.Tensor, positions_T: torch.Tensor
    ) -> None:
        """Apply rotary embedding to queries and keys, in place, by halves of a head. `cos_sin_SD` is fp32: its first
        D/2 columns are cosines, the others sines."""
        ...

    def silu_mul(self, gate_up_T2I: torch.Tensor, *, out_TI: torch.Tensor) -> None:
        """Set out = silu(first half) * second half."""
        ...

    def gelu_mul(self, gate_up_T2I: torch.Tensor, *, out_TI: torch.Tensor) -> None:
        """Set out = gelu(first half) * second half, with the form of GELU that uses tanh."""
        ...

    def copy_blocks(self, kv_pool_B2KPD: torch.Tensor, src_dst_C2: torch.Tensor) -> None:
        """Copy whole blocks. Destinations are distinct, and none is also a source."""
        ...

    def add_lora(self, out_TO: torch.Tensor, x_TI: torch.Tensor, weights: LoraLinear, plan: LoraPlan) -> None:
        """Add (x A^T) B of each token's adapter to the output of a linear layer. Each part of a fused layer has an A of
        its own. Tokens without an adapter stay as they are."""
        ...

    def greedy_tokens(self, logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the token with the largest logit of each row [S], any of equals, and whether all logits of the row are
        finite [S]. A logit of -inf is never the largest. In a row with NaN or +inf the token is arbitrary."""
        ...

    @property
    def draws(self) -> "Draws | None":
        """Return the kernels that draw tokens, or None where PyTorch's operations do (worker/sampling/draw.py)."""
        ...

    def top_k_top_p_thresholds(
        self,
        weights_FV: torch.Tensor,
        top_k_F: torch.Tensor,
        top_p_F: torch.Tensor,
        pending_F: torch.Tensor,
        threshold_F: torch.Tensor,
    ) -> None:
        """Write the smallest weight that each pending row keeps.

        A row keeps the weights among its `top_k_F` (int64) largest which have less than `top_p_F` (fp64) of their sum
        before them. Weights are non-negative fp32 numbers. A row without top-k has the vocabulary's size as `top_k_F`,
        and its weights add up to 1. The threshold of a row that holds NaN is arbitrary. The vectors are contiguous,
        `weights_FV` is contiguous within its rows.
        """
        ...

    def pack_linear(self, weight_OI: LinearWeight) -> LinearWeight:
        """Return the weight in the layout that `linear` of this backend reads fastest: the weight itself, or a copy
        that only `linear` can read.

        A backend without a kernel for a quantised weight returns it as plain numbers (`dequantised`). A caller that
        owns the weight and has no other use for it should drop it. Otherwise it is in memory twice.
        """
        ...

    def linear(
        self, x_TI: torch.Tensor, weight_OI: LinearWeight, bias_O: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return x @ weight^T + bias, for a weight from `pack_linear`, or a plain tensor."""
        ...

    def pack_gate(self, weight_EH: torch.Tensor) -> torch.Tensor:
        """Return the weight of a gate as `pack_linear` does, but never in fewer bits: it chooses experts."""
        ...

    def pack_experts(self, weight_EOI: Stacked) -> Stacked:
        """Return a matrix of each expert in the layout that `experts` of this backend reads fastest."""
        ...

    def experts(
        self,
        x_TH: torch.Tensor,
        logits_TE: torch.Tensor,
        gate_up_E2IH: Stacked,
        down_EHI: Stacked,
        *,
        top_k: int,
        normalizes: bool,
    ) -> torch.Tensor:
        """Return [T, H], for each token the weighted sum of the MLPs of its `top_k` experts.

        These are the experts with the largest logits, of equals those that come first. A weight is the softmax over all
        logits, in fp32. With `normalizes` the weights of a token are divided by their sum. A token's sum is fp32, in an
        order of its own. A token whose logits are not finite gets any experts and a row that is not finite.
        """
        ...


class Draws(Protocol):
    """Draws of tokens [D, N] by numbers in [0, 1) [D, N], in fp64.

    The token is the first one whose cumulative weight exceeds the number's share of the sum, in the order of ids. A
    logit of -inf has weight 0. A row with NaN or +inf gets any token. Vectors are contiguous.
    """

    def from_logits(
        self,
        logits_SV: torch.Tensor,
        greedy_S: torch.Tensor,
        rows_D: torch.Tensor,
        temperature_D: torch.Tensor,
        min_p_D: torch.Tensor,
        uniform_DN: torch.Tensor,
    ) -> torch.Tensor:
        """Draw for the rows `rows_D` (int64). `greedy_S` are the tokens with the largest logits. A weight counts from
        min-p on (fp32), as a share of the largest. Temperatures are fp32."""
        ...

    def from_weights(
        self, weights_FV: torch.Tensor, least_F: torch.Tensor, uniform_FN: torch.Tensor
    ) -> torch.Tensor:
        """Draw for all rows from weights in fp32. Those below `least_F` count as 0."""
        ...


def greedy_tokens(logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `Backend.greedy_tokens` with PyTorch, on any device."""
    # argmax gives the same, and takes four times as long for bf16 on a CPU.
    largest_S, tokens_S = logits_SV.max(dim=-1)
    return tokens_S, torch.isfinite(largest_S) & torch.isfinite(logits_SV.amin(dim=-1))


def split_heads(
    heads_TXD: torch.Tensor, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the output of a layer's first projection into queries, keys and values, as views."""
    counts = [heads_TXD.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads]
    q_TND, k_TKD, v_TKD = heads_TXD.split_with_sizes(counts, dim=1)
    return q_TND, k_TKD, v_TKD
