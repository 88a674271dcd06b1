"""The backend of PyTorch operations alone, batched and folded so that they are fast on a CPU.

A plan becomes indices into the pool once a step and window (attention.py), for all layers. A pool may be quantised
(kv_pool.py). Must never import triton.

Shapes: T tokens, N query heads, K kv heads, X = N + 2 K, D head size. P tokens a block, B blocks in the pool, C block
copies. H hidden size, I input or intermediate size, O output size, S positions in the rotary table.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from blockyard.kernels.attention.plan import AttentionPlan
from blockyard.kernels.interface import HeadNorms, Stacked, greedy_tokens, split_heads
from blockyard.kernels.kv_pool import PLAIN_LAYOUT, movable, store
from blockyard.kernels.lora import LoraLinear, LoraPlan
from blockyard.kernels.quantised import LinearWeight, plain
from blockyard.kernels.rounding import pytorch_words
from blockyard.kernels.torch.attention import PreparedPlan, attend_decodes, attend_prefill, prepare
from blockyard.kernels.torch.experts import choose_experts, run_experts
from blockyard.kernels.torch.huge_pages import collapse_packed
from blockyard.kernels.torch.nucleus import thresholds_by_sorting
from blockyard.kernels.torch.packed_linear import can_pack, pack, packed_linear


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slots:
    written_T: torch.Tensor | None  # None: all tokens are
    blocks_T: torch.Tensor  # blocks of the written tokens
    offsets_T: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _TokenInputs:
    """Rotary angles and slots of a step's tokens: the same in all layers and for plans of all windows."""

    positions_T: torch.Tensor
    slot_mapping_T: torch.Tensor
    cos_sin_SD: torch.Tensor
    cos_T1H: torch.Tensor
    sin_T1H: torch.Tensor
    slots: _Slots

    def are_of(self, plan: AttentionPlan, cos_sin_SD: torch.Tensor) -> bool:
        """Return whether these inputs were made from the plan's tensors and this rotary table."""
        return (
            self.positions_T is plan.positions_T
            and self.slot_mapping_T is plan.slot_mapping_T
            and self.cos_sin_SD is cos_sin_SD
        )


class TorchBackend:
    """PyTorch backend. Not thread-safe: it remembers the token indices of the last plan, and the pool indices of the
    last plan of each window. The content of a plan's tensors must not change once it has been used."""

    name = "torch"
    reads_items = False
    thresholds_all_rows = False
    draws = None
    mlp_rows: int | None = None
    widens_bfloat16 = False

    def __init__(self) -> None:
        self._prepared_by_window: dict[int | None, PreparedPlan] = {}
        self._token_inputs: _TokenInputs | None = None
        self._can_pack: dict[torch.dtype, bool] = {}

    def kv_layout(self, kv_pool_B2KPD: torch.Tensor, dtype: torch.dtype) -> str:
        return PLAIN_LAYOUT

    def arithmetic(self, kv_pool_B2KPD: torch.Tensor, dtype: torch.dtype) -> tuple[str, ...]:
        # An activation leaves the last elements of each thread's share to a scalar loop, which rounds otherwise.
        threads = (f"threads={torch.get_num_threads()}",) if kv_pool_B2KPD.device.type == "cpu" else ()
        return ("kernels=torch", *pytorch_words(kv_pool_B2KPD.device), *threads)

    def embed(self, table_VH: torch.Tensor, tokens_T: torch.Tensor) -> torch.Tensor:
        return table_VH[tokens_T]

    def qk_norm_rope_write(
        self,
        heads_TXD: torch.Tensor,
        norms: HeadNorms | None,
        cos_sin_SD: torch.Tensor,
        kv_pool_B2KPD: torch.Tensor,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        token_inputs = self._token_inputs
        if token_inputs is None or not token_inputs.are_of(plan, cos_sin_SD):
            token_inputs = self._token_inputs = _token_inputs_of(plan, cos_sin_SD)
        num_kv_heads = kv_pool_B2KPD.shape[2]
        q_TND, k_TKD, v_TKD = split_heads(heads_TXD, num_kv_heads)
        if norms is None:
            _rotate(heads_TXD[:, :-num_kv_heads], token_inputs.cos_T1H, token_inputs.sin_T1H)
        else:
            q_TND = self._norm_heads(q_TND, norms.q_weight_D, norms.eps)
            k_TKD = self._norm_heads(k_TKD, norms.k_weight_D, norms.eps)
            _rotate(q_TND, token_inputs.cos_T1H, token_inputs.sin_T1H)
            _rotate(k_TKD, token_inputs.cos_T1H, token_inputs.sin_T1H)
        _write(k_TKD, v_TKD, kv_pool_B2KPD, token_inputs.slots)
        return q_TND

    def _norm_heads(self, heads: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        flat = heads.reshape(-1, heads.shape[-1])
        self.rms_norm(flat, weight_D, eps, out_TH=flat)
        return flat.view(heads.shape)

    def write_kv(
        self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv_pool_B2KPD: torch.Tensor, plan: AttentionPlan
    ) -> None:
        _write(k_TKD, v_TKD, kv_pool_B2KPD, _slots_of(plan, len(k_TKD)))

    def attention(
        self,
        q_TND: torch.Tensor,
        kv_pool_B2KPD: torch.Tensor,
        plan: AttentionPlan,
        *,
        scale: float,
        out_TND: torch.Tensor,
    ) -> None:
        prepared = self._prepared_by_window.get(plan.window)
        if prepared is None or prepared.plan is not plan:
            prepared = self._prepared_by_window[plan.window] = prepare(plan, kv_pool_B2KPD, q_TND.dtype)
        for group in prepared.decode_groups:
            attend_decodes(group, q_TND, kv_pool_B2KPD, scale, out_TND)
        for row in prepared.prefill_rows:
            attend_prefill(row, q_TND, kv_pool_B2KPD, scale, out_TND)

    def rms_norm(
        self, x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float, *, out_TH: torch.Tensor
    ) -> None:
        x_fp32 = x_TH.float()
        inverse_T1 = torch.rsqrt((x_fp32 * x_fp32).mean(dim=-1, keepdim=True).add_(eps))
        if weight_H.dtype == x_TH.dtype:
            torch.mul((x_fp32 * inverse_T1).to(x_TH.dtype), weight_H, out=out_TH)
        else:
            out_TH.copy_(x_fp32 * inverse_T1 * weight_H)

    def add_rms_norm(
        self,
        x_TH: torch.Tensor,
        residual_TH: torch.Tensor,
        weight_H: torch.Tensor,
        eps: float,
        *,
        out_TH: torch.Tensor,
    ) -> None:
        residual_TH += x_TH
        self.rms_norm(residual_TH, weight_H, eps, out_TH=out_TH)

    def rms_norm_add(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> None:
        self.rms_norm(x_TH, weight_H, eps, out_TH=x_TH)
        residual_TH += x_TH

    def scale(self, x_TH: torch.Tensor, factor: float) -> None:
        x_TH *= factor

    def rotary(
        self, q_TND: torch.Tensor, k_TKD: torch.Tensor, cos_sin_SD: torch.Tensor, positions_T: torch.Tensor
    ) -> None:
        cos_T1H, sin_T1H = cos_sin_SD[positions_T][:, None].chunk(2, dim=-1)
        _rotate(q_TND, cos_T1H, sin_T1H)
        _rotate(k_TKD, cos_T1H, sin_T1H)

    def silu_mul(self, gate_up_T2I: torch.Tensor, *, out_TI: torch.Tensor) -> None:
        gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
        torch.mul(F.silu(gate_TI), up_TI, out=out_TI)

    def gelu_mul(self, gate_up_T2I: torch.Tensor, *, out_TI: torch.Tensor) -> None:
        gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
        torch.mul(F.gelu(gate_TI, approximate="tanh"), up_TI, out=out_TI)

    def copy_blocks(self, kv_pool_B2KPD: torch.Tensor, src_dst_C2: torch.Tensor) -> None:
        pool = movable(kv_pool_B2KPD)
        pool[src_dst_C2[:, 1]] = pool[src_dst_C2[:, 0]]

    def add_lora(self, out_TO: torch.Tensor, x_TI: torch.Tensor, weights: LoraLinear, plan: LoraPlan) -> None:
        ranks = weights.ranks_S.tolist()
        for slot, run in plan.segments():
            tokens, rank = plan.tokens_M[run].long(), ranks[slot]
            if not rank:
                continue
            parts = weights.b_SRO[slot, :rank].split(weights.widths, dim=1)
            outputs = out_TO.split(weights.widths, dim=1)
            for a_RI, b_RO, part_TO in zip(weights.a_SPRI[slot, :, :rank], parts, outputs, strict=True):
                shrunk_TR = self.linear(x_TI[tokens], a_RI)
                part_TO.index_add_(0, tokens, self.linear(shrunk_TR, b_RO.t()))

    def greedy_tokens(self, logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return greedy_tokens(logits_SV)

    def top_k_top_p_thresholds(
        self,
        weights_FV: torch.Tensor,
        top_k_F: torch.Tensor,
        top_p_F: torch.Tensor,
        pending_F: torch.Tensor,
        threshold_F: torch.Tensor,
    ) -> None:
        thresholds_by_sorting(weights_FV, top_k_F, top_p_F, pending_F, threshold_F)

    def pack_linear(self, weight_OI: LinearWeight) -> LinearWeight:
        weight_OI = plain(weight_OI)
        dtype = weight_OI.dtype
        if dtype not in self._can_pack:
            self._can_pack[dtype] = can_pack(dtype)
        if not self._can_pack[dtype]:
            return weight_OI
        packed = pack(weight_OI)
        collapse_packed(packed)
        return packed

    def linear(
        self, x_TI: torch.Tensor, weight_OI: LinearWeight, bias_O: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert isinstance(weight_OI, torch.Tensor), "a quantised weight that was not packed"
        return packed_linear(x_TI, weight_OI, bias_O)

    def pack_gate(self, weight_EH: torch.Tensor) -> torch.Tensor:
        return _tensor(self.pack_linear(weight_EH))

    def pack_experts(self, weight_EOI: Stacked) -> Stacked:
        return tuple(_tensor(self.pack_linear(weight_OI)) for weight_OI in weight_EOI)

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
        experts_TK, weights_TK = self._choose_experts(logits_TE, top_k, normalizes=normalizes)
        return run_experts(self, x_TH, experts_TK, weights_TK, gate_up_E2IH, down_EHI)

    def _choose_experts(
        self, logits_TE: torch.Tensor, top_k: int, *, normalizes: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return choose_experts(logits_TE, top_k, normalizes=normalizes)


def _tensor(weight: LinearWeight) -> torch.Tensor:
    """Return what a plain weight was packed into."""
    assert isinstance(weight, torch.Tensor)
    return weight


def _token_inputs_of(plan: AttentionPlan, cos_sin_SD: torch.Tensor) -> _TokenInputs:
    cos_T1H, sin_T1H = cos_sin_SD[plan.positions_T][:, None].chunk(2, dim=-1)
    slots = _slots_of(plan, len(plan.positions_T))
    return _TokenInputs(
        positions_T=plan.positions_T,
        slot_mapping_T=plan.slot_mapping_T,
        cos_sin_SD=cos_sin_SD,
        cos_T1H=cos_T1H,
        sin_T1H=sin_T1H,
        slots=slots,
    )


def _slots_of(plan: AttentionPlan, num_tokens: int) -> _Slots:
    slots_T = plan.slot_mapping_T[:num_tokens]
    is_written_T = slots_T >= 0
    are_all = bool(is_written_T.all())
    if not are_all:
        slots_T = slots_T[is_written_T]
    written_T = None if are_all else is_written_T
    return _Slots(
        written_T=written_T, blocks_T=slots_T // plan.block_size, offsets_T=slots_T % plan.block_size
    )


def _rotate(heads: torch.Tensor, cos_T1H: torch.Tensor, sin_T1H: torch.Tensor) -> None:
    first, second = heads.chunk(2, dim=-1)
    rotated_first = first * cos_T1H - second * sin_T1H
    second.copy_(second * cos_T1H + first * sin_T1H)
    first.copy_(rotated_first)


def _write(
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    kv_pool_B2KPD: torch.Tensor,
    slots: _Slots,
) -> None:
    if slots.written_T is not None:
        k_TKD, v_TKD = k_TKD[slots.written_T], v_TKD[slots.written_T]
    store(kv_pool_B2KPD, 0, slots.blocks_T, slots.offsets_T, k_TKD)
    store(kv_pool_B2KPD, 1, slots.blocks_T, slots.offsets_T, v_TKD)
