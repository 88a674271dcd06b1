"""The fast backend for CPUs, in C++ (native/). It covers embedding, attention, rotary embedding with the KV write,
norms, SiLU-mul, GELU-mul, linears, experts and the choice of tokens.

PyTorch keeps block copies, linears that `can_lay_out` refuses, and everything that the C++ does not serve. These are
fp16, head sizes that are no multiple of 16, and head sizes beyond MAX_HEAD_DIM. checks.py checks everything before an
address leaves Python. Linears may be in int8 instead. Must never import triton.

Blocks hold keys in sub-tiles of 16, so that one dimension of 16 keys is one vector, and bf16 in pairs (see
`to_native`). Copies and swaps move whole blocks and ignore the layout.

Shapes: T tokens, N query heads, K kv heads, X = N + 2 K, D head size. P tokens a block, B blocks in the pool, J = P /
16 sub-tiles of a block. H hidden size, I intermediate size, S positions in the rotary table. A quantised pool
(kv_pool.py) has its scales in the same place in every backend.
"""

from collections.abc import Callable
from functools import partial

import torch
from blockyard.kernels.attention.plan import AttentionPlan
from blockyard.kernels.cpu.checks import (
    PlanChecks,
    check_heads,
    check_norms,
    check_nuclei,
    check_pool,
    check_rotary_table,
    need,
)
from blockyard.kernels.cpu.experts import are_stacked, native_experts, stack_experts
from blockyard.kernels.cpu.grouped_linear import GroupedWeight, can_group, group, grouped_linear
from blockyard.kernels.cpu.int8_linear import can_quantise, int8_linear, quantise
from blockyard.kernels.cpu.library import (
    Attention,
    CpuLibrary,
    Gather,
    GreedyTokens,
    Nuclei,
    Placement,
)
from blockyard.kernels.cpu.lora import add_lora
from blockyard.kernels.cpu.panel_linear import can_lay_out, lay_out, panel_linear
from blockyard.kernels.cpu.recording import Allocations, Arena, RecordedCalls, RecordingLibrary
from blockyard.kernels.cpu.row_ops import NATIVE_DTYPES, activate, is_native, normalise, scale
from blockyard.kernels.interface import HeadNorms, LinearsName, Stacked, split_heads
from blockyard.kernels.kv_pool import head_dim_of, is_quantised, numbers_of
from blockyard.kernels.lora import LoraLinear, LoraPlan
from blockyard.kernels.quantised import Int4Weight, Int8Weight, LinearWeight, plain
from blockyard.kernels.rounding import pytorch_words
from blockyard.kernels.torch.backend import TorchBackend

LANES = 16
NATIVE_LAYOUT = f"cpu-{LANES}/1"
"""Name of the layout of `to_native`."""
MAX_HEAD_DIM = 256
# Numbered as `stored_as` of native/lanes.h numbers them. 0 is the type of the heads.
_STORED = {torch.int8: 1, torch.float8_e4m3fn: 2}


class CpuBackend(TorchBackend):
    """Backend in C++. Like the torch backend it is not thread-safe. extension.py provides the library."""

    name = "cpu"
    thresholds_all_rows = True
    mlp_rows = 256  # as many as its linears take at once

    def __init__(self, library: CpuLibrary, *, linears: LinearsName = "full") -> None:
        super().__init__()
        self._library = library
        self._plans = PlanChecks()
        self._linears = linears
        self.widens_bfloat16 = library.has_linear(is_bf16=True)

    def kv_layout(self, kv_pool_B2KPD: torch.Tensor, dtype: torch.dtype) -> str:
        if not has_native_layout(kv_pool_B2KPD, dtype):
            return super().kv_layout(kv_pool_B2KPD, dtype)
        return NATIVE_LAYOUT

    def arithmetic(self, kv_pool_B2KPD: torch.Tensor, dtype: torch.dtype) -> tuple[str, ...]:
        # A build for other vector units, or by another compiler, is another library. PyTorch keeps some linears.
        own = f"kernels=cpu:{self._library.file_hash()}", f"linears={self._linears}"
        if has_native_layout(kv_pool_B2KPD, dtype):
            keeps_linears = not self._library.has_linear(is_bf16=dtype == torch.bfloat16)
            threads = (f"threads={torch.get_num_threads()}",) if keeps_linears else ()
            return (*own, *pytorch_words(kv_pool_B2KPD.device), *threads)
        return (*own, *super().arithmetic(kv_pool_B2KPD, dtype)[1:])

    @property
    def library(self) -> CpuLibrary:
        """The library that calls go to now. While a computation is recorded, it is the one that records."""
        return self._library

    def record(self, compute: Callable[[], torch.Tensor], arena: Arena) -> "RecordedStep":
        """Run a computation and record it for replay. Every tensor that it reads must live, and stay in place, as long
        as the recording does.

        Raises NotRecordable where PyTorch would compute a part of it.
        """
        library, plans = self._library, self._plans
        recording = self._library = RecordingLibrary(library)
        checks = self._plans = PlanChecks.keeping()
        try:
            with Allocations(arena):
                result = compute()
        finally:
            self._library, self._plans = library, plans
        return RecordedStep(RecordedCalls(recording, arena, result), checks)

    def write_kv(
        self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv_pool_B2KPD: torch.Tensor, plan: AttentionPlan
    ) -> None:
        if not has_native_layout(kv_pool_B2KPD, k_TKD.dtype):
            return super().write_kv(k_TKD, v_TKD, kv_pool_B2KPD, plan)
        self._place(k_TKD[:, :0], k_TKD, v_TKD, None, None, kv_pool_B2KPD, plan)

    def qk_norm_rope_write(
        self,
        heads_TXD: torch.Tensor,
        norms: HeadNorms | None,
        cos_sin_SD: torch.Tensor,
        kv_pool_B2KPD: torch.Tensor,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        if not has_native_layout(kv_pool_B2KPD, heads_TXD.dtype):
            return super().qk_norm_rope_write(heads_TXD, norms, cos_sin_SD, kv_pool_B2KPD, plan)
        q_TND, k_TKD, v_TKD = split_heads(heads_TXD, kv_pool_B2KPD.shape[2])
        self._place(q_TND, k_TKD, v_TKD, norms, cos_sin_SD, kv_pool_B2KPD, plan)
        return q_TND

    def _place(
        self,
        q_TND: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        norms: HeadNorms | None,
        cos_sin_SD: torch.Tensor | None,
        kv_pool_B2KPD: torch.Tensor,
        plan: AttentionPlan,
    ) -> None:
        num_tokens, num_kv_heads, head_dim = k_TKD.shape
        check_pool(kv_pool_B2KPD, k_TKD, plan)
        check_heads(kv_pool_B2KPD, q_TND, k_TKD, v_TKD)
        num_positions = None if cos_sin_SD is None else cos_sin_SD.shape[0]
        self._plans.check(plan, kv_pool_B2KPD.shape[0], num_positions)
        need(
            q_TND.shape[0] == v_TKD.shape[0] == num_tokens <= plan.slot_mapping_T.shape[0],
            "tokens without a slot",
        )
        need(v_TKD.shape[1] == num_kv_heads, "more keys than values")
        if cos_sin_SD is not None:
            check_rotary_table(cos_sin_SD, head_dim)
        if norms is not None:
            check_norms(norms, k_TKD)
        placement = Placement(
            q=q_TND.data_ptr(),
            k=k_TKD.data_ptr(),
            v=v_TKD.data_ptr(),
            pool=kv_pool_B2KPD.data_ptr(),
            cos_sin=None if cos_sin_SD is None else cos_sin_SD.data_ptr(),
            positions=plan.positions_T.data_ptr(),
            slots=plan.slot_mapping_T.data_ptr(),
            q_norm=None if norms is None else norms.q_weight_D.data_ptr(),
            k_norm=None if norms is None else norms.k_weight_D.data_ptr(),
            q_stride=q_TND.stride(0),
            k_stride=k_TKD.stride(0),
            v_stride=v_TKD.stride(0),
            num_tokens=num_tokens,
            num_heads=q_TND.shape[1],
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=plan.block_size,
            stored=_STORED.get(kv_pool_B2KPD.dtype, 0),
            norm_is_fp32=norms is not None and norms.q_weight_D.dtype == torch.float32,
            eps=0.0 if norms is None else norms.eps,
        )
        self._library.place(k_TKD.dtype == torch.bfloat16, torch.get_num_threads(), placement)

    def attention(
        self,
        q_TND: torch.Tensor,
        kv_pool_B2KPD: torch.Tensor,
        plan: AttentionPlan,
        *,
        scale: float,
        out_TND: torch.Tensor,
    ) -> None:
        if not has_native_layout(kv_pool_B2KPD, q_TND.dtype):
            return super().attention(q_TND, kv_pool_B2KPD, plan, scale=scale, out_TND=out_TND)
        _, num_heads, head_dim = q_TND.shape
        num_kv_heads = kv_pool_B2KPD.shape[2]
        check_pool(kv_pool_B2KPD, q_TND[:, :num_kv_heads], plan)
        check_heads(kv_pool_B2KPD, q_TND, out_TND)
        self._plans.check(plan, kv_pool_B2KPD.shape[0])
        need(
            num_heads % num_kv_heads == 0,
            "{} query heads do not divide among {} kv heads",
            num_heads,
            num_kv_heads,
        )
        need(out_TND.shape[1] == num_heads, "an output of other heads")
        need(
            plan.num_query_tokens <= min(q_TND.shape[0], out_TND.shape[0]), "fewer queries than the plan has"
        )
        work = Attention(
            q=q_TND.data_ptr(),
            out=out_TND.data_ptr(),
            pool=kv_pool_B2KPD.data_ptr(),
            query_starts=plan.query_starts_R1.data_ptr(),
            context_lens=plan.context_lens_R.data_ptr(),
            table=plan.block_table_RB.data_ptr(),
            q_stride=q_TND.stride(0),
            out_stride=out_TND.stride(0),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=plan.block_size,
            num_rows=plan.num_rows,
            table_stride=plan.block_table_RB.stride(0),
            window=plan.window or 0,
            stored=_STORED.get(kv_pool_B2KPD.dtype, 0),
            scale=scale,
        )
        self._library.attend(q_TND.dtype == torch.bfloat16, torch.get_num_threads(), work)

    def rms_norm(
        self, x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float, *, out_TH: torch.Tensor
    ) -> None:
        if not is_native(x_TH, out_TH):
            return super().rms_norm(x_TH, weight_H, eps, out_TH=out_TH)
        normalise(self._library, x_TH, None, weight_H, eps, out_TH)

    def add_rms_norm(
        self,
        x_TH: torch.Tensor,
        residual_TH: torch.Tensor,
        weight_H: torch.Tensor,
        eps: float,
        *,
        out_TH: torch.Tensor,
    ) -> None:
        if not is_native(x_TH, residual_TH, out_TH):
            return super().add_rms_norm(x_TH, residual_TH, weight_H, eps, out_TH=out_TH)
        normalise(self._library, x_TH, residual_TH, weight_H, eps, out_TH)

    def rms_norm_add(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> None:
        if not is_native(x_TH, residual_TH):
            return super().rms_norm_add(x_TH, residual_TH, weight_H, eps)
        normalise(self._library, x_TH, residual_TH, weight_H, eps, residual_TH, adds_after=True)

    def scale(self, x_TH: torch.Tensor, factor: float) -> None:
        if not is_native(x_TH):
            return super().scale(x_TH, factor)
        scale(self._library, x_TH, factor)

    def silu_mul(self, gate_up_T2I: torch.Tensor, *, out_TI: torch.Tensor) -> None:
        if not is_native(gate_up_T2I, out_TI):
            return super().silu_mul(gate_up_T2I, out_TI=out_TI)
        activate(self._library, gate_up_T2I, out_TI, is_gelu=False)

    def gelu_mul(self, gate_up_T2I: torch.Tensor, *, out_TI: torch.Tensor) -> None:
        if not is_native(gate_up_T2I, out_TI):
            return super().gelu_mul(gate_up_T2I, out_TI=out_TI)
        activate(self._library, gate_up_T2I, out_TI, is_gelu=True)

    def embed(self, table_VH: torch.Tensor, tokens_T: torch.Tensor) -> torch.Tensor:
        """Return the table's rows [T, H] of these tokens. In C++, a token outside the table gives a row of NaN."""
        if not is_native(table_VH) or not table_VH.is_contiguous():
            return super().embed(table_VH, tokens_T)
        need(
            tokens_T.dtype == torch.int64 and tokens_T.is_contiguous() and tokens_T.is_cpu,
            "tokens of {}",
            tokens_T.dtype,
        )
        out_TH = table_VH.new_empty(tokens_T.shape[0], table_VH.shape[1])
        work = Gather(
            table=table_VH.data_ptr(),
            rows=tokens_T.data_ptr(),
            out=out_TH.data_ptr(),
            table_rows=table_VH.shape[0],
            num_rows=tokens_T.shape[0],
            row_bytes=table_VH.shape[1] * table_VH.itemsize,
        )
        self._library.gather(table_VH.dtype == torch.bfloat16, torch.get_num_threads(), work)
        return out_TH

    def add_lora(self, out_TO: torch.Tensor, x_TI: torch.Tensor, weights: LoraLinear, plan: LoraPlan) -> None:
        if not is_native(x_TI, out_TO, weights.a_SPRI):
            return super().add_lora(out_TO, x_TI, weights, plan)
        add_lora(self._library, out_TO, x_TI, weights, plan)

    def greedy_tokens(self, logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not is_native(logits_SV):
            return super().greedy_tokens(logits_SV)
        num_rows, vocab_size = logits_SV.shape
        tokens_S = torch.empty(num_rows, dtype=torch.int64)
        is_finite_S = torch.empty(num_rows, dtype=torch.bool)
        work = GreedyTokens(
            logits=logits_SV.data_ptr(),
            tokens=tokens_S.data_ptr(),
            is_finite=is_finite_S.data_ptr(),
            stride=logits_SV.stride(0),
            num_rows=num_rows,
            vocab_size=vocab_size,
        )
        self._library.greedy_tokens(logits_SV.dtype == torch.bfloat16, torch.get_num_threads(), work)
        return tokens_S, is_finite_S

    def top_k_top_p_thresholds(
        self,
        weights_FV: torch.Tensor,
        top_k_F: torch.Tensor,
        top_p_F: torch.Tensor,
        pending_F: torch.Tensor,
        threshold_F: torch.Tensor,
    ) -> None:
        check_nuclei(weights_FV, top_k_F, top_p_F, pending_F, threshold_F)
        num_rows, vocab_size = weights_FV.shape
        threads = torch.get_num_threads()
        members = torch.empty(threads, vocab_size)
        work = Nuclei(
            weights=weights_FV.data_ptr(),
            top_k=top_k_F.data_ptr(),
            top_p=top_p_F.data_ptr(),
            pending=pending_F.data_ptr(),
            threshold=threshold_F.data_ptr(),
            members=members.data_ptr(),
            stride=weights_FV.stride(0),
            num_rows=num_rows,
            vocab_size=vocab_size,
        )
        self._library.top_k_top_p_thresholds(False, threads, work)

    def pack_linear(self, weight_OI: LinearWeight) -> LinearWeight:
        if isinstance(weight_OI, Int4Weight | Int8Weight) and can_group(self._library, weight_OI):
            return group(weight_OI, input_bits=8 if self._linears == "int8" else 16)
        weight_OI = plain(weight_OI)
        if self._linears == "int8" and can_quantise(weight_OI):
            return quantise(weight_OI)
        if can_lay_out(self._library, weight_OI):
            return lay_out(weight_OI)
        return super().pack_linear(weight_OI)

    def linear(
        self, x_TI: torch.Tensor, weight_OI: LinearWeight, bias_O: torch.Tensor | None = None
    ) -> torch.Tensor:
        if isinstance(weight_OI, GroupedWeight):
            return grouped_linear(self._library, x_TI, weight_OI, bias_O)
        assert isinstance(weight_OI, torch.Tensor), "a quantised weight that was not packed"
        if weight_OI.dtype == torch.int8:
            return int8_linear(self._library, x_TI, weight_OI, bias_O)
        if weight_OI.dim() > 2:
            return panel_linear(self._library, x_TI, weight_OI, bias_O)
        return super().linear(x_TI, weight_OI, bias_O)

    def pack_gate(self, weight_EH: torch.Tensor) -> torch.Tensor:
        return lay_out(weight_EH) if can_lay_out(self._library, weight_EH) else weight_EH

    def pack_experts(self, weight_EOI: Stacked) -> Stacked:
        stacked = stack_experts(self._library, weight_EOI, in_int8=self._linears == "int8")
        return super().pack_experts(weight_EOI) if stacked is None else stacked

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
        is_served = are_stacked(gate_up_E2IH, down_EHI) and is_native(x_TH, logits_TE)
        run = partial(native_experts, self._library) if is_served else super().experts
        return run(x_TH, logits_TE, gate_up_E2IH, down_EHI, top_k=top_k, normalizes=normalizes)


class RecordedStep:
    """A recorded computation of the backend. Its tensors may hold another step at each replay."""

    def __init__(self, calls: RecordedCalls, checks: PlanChecks) -> None:
        self._calls = calls
        self._checks = checks

    def replay(self) -> torch.Tensor:
        """Run the computation again and return its result, which is the same tensor each time. Raises ValueError for a
        plan with indices out of range."""
        self._checks.check_again()
        self._calls.replay()
        return self._calls.result


def has_native_layout(kv_pool_B2KPD: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether the C++ kernels serve such a pool for a model in `dtype`, in the layout of `to_native`."""
    block_size, head_dim = kv_pool_B2KPD.shape[3], head_dim_of(kv_pool_B2KPD)
    return (
        (dtype if is_quantised(kv_pool_B2KPD) else kv_pool_B2KPD.dtype) in NATIVE_DTYPES
        and head_dim % LANES == 0
        and head_dim <= MAX_HEAD_DIM
        and block_size % LANES == 0
    )


def to_native(kv_pool_B2KPD: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of a pool, in the layout of the C++ kernels if they serve it for a model in `dtype`.

    Each head's keys [P, D] become [J, D, 16]. In bf16 they become [J, D / 2, 16, 2], and values [P / 2, D, 2]. Scales
    stay.
    """
    native = kv_pool_B2KPD.clone()
    if has_native_layout(kv_pool_B2KPD, dtype):
        for there, here in zip(_as_native(native), _as_plain(kv_pool_B2KPD), strict=True):
            there.copy_(here)
    return native


def from_native(kv_pool_B2KPD: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of a pool in the plain layout, which undoes `to_native`."""
    plain = kv_pool_B2KPD.clone()
    if has_native_layout(kv_pool_B2KPD, dtype):
        for there, here in zip(_as_plain(plain), _as_native(kv_pool_B2KPD), strict=True):
            there.copy_(here)
    return plain


def _as_plain(kv_pool_B2KPD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of keys [B, K, J, D / E, 16, E] and values [B, K, P / E, D, E]. E numbers lie together natively."""
    keys_BKPD, values_BKPD, together = _numbers_of(kv_pool_B2KPD)
    keys = keys_BKPD.unflatten(3, (-1, together)).unflatten(2, (-1, LANES)).transpose(3, 4)
    return keys, values_BKPD.unflatten(2, (-1, together)).transpose(3, 4)


def _as_native(kv_pool_B2KPD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the views of `_as_plain`, with the same shapes, of a pool in the native layout."""
    keys_BKPD, values_BKPD, together = _numbers_of(kv_pool_B2KPD)
    head_dim = keys_BKPD.shape[3]
    keys = (
        keys_BKPD.unflatten(2, (-1, LANES))
        .flatten(3, 4)
        .unflatten(3, (head_dim // together, LANES, together))
    )
    return keys, values_BKPD.unflatten(2, (-1, together)).flatten(3, 4).unflatten(3, (head_dim, together))


def _numbers_of(kv_pool_B2KPD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return views of keys and values [B, K, P, D], and how many numbers lie together natively."""
    numbers = numbers_of(kv_pool_B2KPD) if is_quantised(kv_pool_B2KPD) else kv_pool_B2KPD
    return numbers[:, 0], numbers[:, 1], 2 if kv_pool_B2KPD.dtype == torch.bfloat16 else 1
