"""Host side of the Triton kernels: checks shapes, picks tile sizes and launches. The backend on CUDA.

Allocates nothing a layer: the partial results of split decodes lie in a workspace that only grows. Never synchronises.
Importing this module imports triton. On a CPU that needs TRITON_INTERPRET=1 in the environment beforehand.

Shapes: T tokens, N query heads, K kv heads, X = N + 2 K, D head size. P tokens a block, B blocks in the pool, C block
copies. H hidden size, I input or intermediate size, O output size. S partial slots or positions of the rotary table. F
rows with a filtered draw, V vocabulary.
"""

# Triton ships no types.
# mypy: disable-error-code="import-untyped"

import math

import torch
import torch.nn.functional as F
import triton
from blockyard.kernels.attention.items import PREFILL_ITEM_TOKENS
from blockyard.kernels.attention.plan import AttentionPlan
from blockyard.kernels.attention.shared_prefix import members_of_item
from blockyard.kernels.interface import HeadNorms, Stacked, split_heads
from blockyard.kernels.kv_pool import PLAIN_LAYOUT, is_quantised, movable
from blockyard.kernels.lora import LoraLinear, LoraPlan
from blockyard.kernels.quantised import LinearWeight, QuantisedWeight, plain
from blockyard.kernels.rounding import pytorch_words
from blockyard.kernels.triton.attention import attend_items_kernel, merge_partials_kernel
from blockyard.kernels.triton.cache_ops import copy_blocks_kernel
from blockyard.kernels.triton.choosing import TritonDraws, launch_greedy_tokens, launch_thresholds
from blockyard.kernels.triton.elementwise import rms_norm_kernel, rotary_kernel, silu_mul_kernel
from blockyard.kernels.triton.linears.experts import launch_experts
from blockyard.kernels.triton.linears.launches import launch_quantised_linear
from blockyard.kernels.triton.linears.lora import launch_add_lora
from blockyard.kernels.triton.linears.weights import (
    TiledExperts,
    TiledWeight,
    can_tile,
    tiled,
    tiled_experts,
)
from blockyard.kernels.triton.numbers.devices import check_dense_rows
from blockyard.kernels.triton.pool_writes import (
    check_pool,
    launch_qk_norm_rope_write,
    launch_write_kv,
    pool_pointers,
)
from blockyard.kernels.triton.shared_attention import attend_shared_kernel
from blockyard.kernels.triton.tiles import (
    Launch,
    Tiles,
    attention_tiles,
    launch_options,
    shared_bytes_of,
    widens,
)

MERGE_SPLITS = 16
# Elements of one program, enough that every thread of four warps issues wide loads.
COPY_TILE = 2048
SILU_TILE = 1024
NORM_TILE = 2048


class TritonBackend:
    """Launches kernels on the current stream. Not thread-safe: the workspace serves one step at a time."""

    name = "triton"
    reads_items = True
    thresholds_all_rows = True
    mlp_rows = None
    widens_bfloat16 = False
    draws = TritonDraws()

    def __init__(self, *, quantises_inputs: bool = False) -> None:
        self.quantises_inputs = quantises_inputs
        """Whether linears with weights of 8 bits round their inputs to 8 bits too."""
        self._partials = torch.empty(0)
        self._lse = torch.empty(0)
        self._outgrown: list[torch.Tensor] = []
        """Smaller workspaces of earlier steps. A graph that was captured with one still writes there."""

    def kv_layout(self, kv_pool_B2KPD: torch.Tensor, dtype: torch.dtype) -> str:
        return PLAIN_LAYOUT

    def arithmetic(self, kv_pool_B2KPD: torch.Tensor, dtype: torch.dtype) -> tuple[str, ...]:
        inputs = ("inputs=8-bit",) if self.quantises_inputs else ()
        return (
            "kernels=triton",
            f"triton={triton.__version__}",
            *inputs,
            *pytorch_words(kv_pool_B2KPD.device),
        )

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
        launch_qk_norm_rope_write(heads_TXD, norms, cos_sin_SD, kv_pool_B2KPD, plan)
        return split_heads(heads_TXD, kv_pool_B2KPD.shape[2])[0]

    def write_kv(
        self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv_pool_B2KPD: torch.Tensor, plan: AttentionPlan
    ) -> None:
        launch_write_kv(k_TKD, v_TKD, kv_pool_B2KPD, plan)

    def attention(
        self,
        q_TND: torch.Tensor,
        kv_pool_B2KPD: torch.Tensor,
        plan: AttentionPlan,
        *,
        scale: float,
        out_TND: torch.Tensor,
    ) -> None:
        _, num_heads, head_dim = q_TND.shape
        num_kv_heads = kv_pool_B2KPD.shape[2]
        check_pool(kv_pool_B2KPD, num_kv_heads, head_dim, plan.block_size)
        check_dense_rows(q_TND, out_TND)
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} query heads do not divide among {num_kv_heads} kv heads")
        if not plan.has_items:
            raise ValueError("the triton backend computes work items, and the plan has none")
        group = num_heads // num_kv_heads
        self._reserve(plan.num_partials, num_heads, head_dim, q_TND.device)
        decode = self._tiles("decode", q_TND, kv_pool_B2KPD)
        self._attend(plan.decode_items_W6, 1, decode, q_TND, kv_pool_B2KPD, plan, scale, out_TND)
        prefill = self._tiles("prefill", q_TND, kv_pool_B2KPD)
        programs = -(-PREFILL_ITEM_TOKENS * group // prefill.rows)
        self._attend(plan.prefill_items_X6, programs, prefill, q_TND, kv_pool_B2KPD, plan, scale, out_TND)
        self._attend_shared(q_TND, kv_pool_B2KPD, plan, scale)
        if plan.num_partials:
            self._merge(plan, out_TND)

    def _tiles(self, launch: Launch, q_TND: torch.Tensor, kv_pool_B2KPD: torch.Tensor) -> Tiles:
        return attention_tiles(
            launch,
            group=q_TND.shape[1] // kv_pool_B2KPD.shape[2],
            head_dim=q_TND.shape[2],
            dtype=q_TND.dtype,
            is_quantised=is_quantised(kv_pool_B2KPD),
            shared_bytes=shared_bytes_of(q_TND.device),
        )

    def _attend_shared(
        self, q_TND: torch.Tensor, kv_pool_B2KPD: torch.Tensor, plan: AttentionPlan, scale: float
    ) -> None:
        if not len(plan.shared_items_Y5):
            return
        tiles = self._tiles("shared", q_TND, kv_pool_B2KPD)
        _, num_heads, head_dim = q_TND.shape
        num_kv_heads = kv_pool_B2KPD.shape[2]
        group = num_heads // num_kv_heads
        programs_per_item = -(-members_of_item(plan.group) * group // tiles.rows)
        numbers, scales, scale_bytes = pool_pointers(kv_pool_B2KPD)
        attend_shared_kernel[(len(plan.shared_items_Y5) * programs_per_item, num_kv_heads)](
            q_TND,
            numbers,
            scales,
            plan.block_table_RB,
            plan.shared_members_M,
            plan.shared_items_Y5,
            plan.partial_starts_D1,
            self._partials,
            self._lse,
            *q_TND.stride()[:2],
            plan.block_table_RB.stride(0),
            scale * math.log2(math.e),
            NUM_KV_HEADS=num_kv_heads,
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=plan.block_size,
            SCALE_BYTES=scale_bytes,
            PROGRAMS_PER_ITEM=programs_per_item,
            BLOCK_M=tiles.rows,
            BLOCK_J=tiles.keys,
            WIDEN=widens(q_TND, kv_pool_B2KPD),
            **launch_options(tiles),
        )

    def _attend(
        self,
        items: torch.Tensor,
        programs_per_item: int,
        tiles: Tiles,
        q_TND: torch.Tensor,
        kv_pool_B2KPD: torch.Tensor,
        plan: AttentionPlan,
        scale: float,
        out_TND: torch.Tensor,
    ) -> None:
        if not len(items):
            return
        _, num_heads, head_dim = q_TND.shape
        num_kv_heads = kv_pool_B2KPD.shape[2]
        numbers, scales, scale_bytes = pool_pointers(kv_pool_B2KPD)
        attend_items_kernel[(len(items) * programs_per_item, num_kv_heads)](
            q_TND,
            numbers,
            scales,
            plan.block_table_RB,
            plan.query_starts_R1,
            plan.context_lens_R,
            items,
            out_TND,
            self._partials,
            self._lse,
            *q_TND.stride()[:2],
            *out_TND.stride()[:2],
            plan.block_table_RB.stride(0),
            scale * math.log2(math.e),
            plan.window or 0,
            NUM_KV_HEADS=num_kv_heads,
            GROUP=num_heads // num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=plan.block_size,
            SCALE_BYTES=scale_bytes,
            PROGRAMS_PER_ITEM=programs_per_item,
            BLOCK_M=tiles.rows,
            BLOCK_J=tiles.keys,
            DECODES=items is plan.decode_items_W6,
            WINDOWED=plan.window is not None and items is plan.prefill_items_X6,
            ALIGNED=plan.window is None,
            WIDEN=widens(q_TND, kv_pool_B2KPD),
            **launch_options(tiles),
        )

    def _merge(self, plan: AttentionPlan, out_TND: torch.Tensor) -> None:
        _, num_heads, head_dim = out_TND.shape
        merge_partials_kernel[(plan.num_decodes, num_heads)](
            self._partials,
            self._lse,
            plan.partial_starts_D1,
            plan.query_starts_R1,
            out_TND,
            *out_TND.stride()[:2],
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            BLOCK_U=MERGE_SPLITS,
        )

    def _reserve(self, num_partials: int, num_heads: int, head_dim: int, device: torch.device) -> None:
        """Grow the workspace if it is too small, to 1.5 times the need, so that slowly growing contexts do not allocate
        in each step."""
        rows = max(1, num_partials) * num_heads
        if self._lse.numel() < rows or self._lse.device != device:
            rows += rows // 2
            self._outgrown += (self._lse, self._partials)
            self._lse = torch.empty(rows, dtype=torch.float32, device=device)
        if self._partials.numel() < rows * head_dim or self._partials.device != device:
            self._partials = torch.empty(rows * head_dim, dtype=torch.float32, device=device)

    def rms_norm(
        self, x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float, *, out_TH: torch.Tensor
    ) -> None:
        _launch_rms_norm(x_TH, None, weight_H, eps, out_TH)

    def add_rms_norm(
        self,
        x_TH: torch.Tensor,
        residual_TH: torch.Tensor,
        weight_H: torch.Tensor,
        eps: float,
        *,
        out_TH: torch.Tensor,
    ) -> None:
        _launch_rms_norm(x_TH, residual_TH, weight_H, eps, out_TH)

    def rms_norm_add(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> None:
        _launch_rms_norm(x_TH, residual_TH, weight_H, eps, residual_TH, adds_after=True)

    def scale(self, x_TH: torch.Tensor, factor: float) -> None:
        x_TH *= factor

    def rotary(
        self, q_TND: torch.Tensor, k_TKD: torch.Tensor, cos_sin_SD: torch.Tensor, positions_T: torch.Tensor
    ) -> None:
        num_tokens, num_heads, head_dim = q_TND.shape
        num_kv_heads = k_TKD.shape[1]
        check_dense_rows(q_TND, k_TKD, cos_sin_SD)
        if not num_tokens:
            return
        rotary_kernel[(num_tokens,)](
            q_TND,
            k_TKD,
            cos_sin_SD,
            positions_T,
            *q_TND.stride()[:2],
            *k_TKD.stride()[:2],
            NUM_HEADS=num_heads,
            HEADS_POW2=triton.next_power_of_2(num_heads),
            NUM_KV_HEADS=num_kv_heads,
            KV_HEADS_POW2=triton.next_power_of_2(num_kv_heads),
            HALF_DIM=head_dim // 2,
        )

    def silu_mul(self, gate_up_T2I: torch.Tensor, *, out_TI: torch.Tensor) -> None:
        _launch_activation(gate_up_T2I, out_TI, is_gelu=False)

    def gelu_mul(self, gate_up_T2I: torch.Tensor, *, out_TI: torch.Tensor) -> None:
        _launch_activation(gate_up_T2I, out_TI, is_gelu=True)

    def copy_blocks(self, kv_pool_B2KPD: torch.Tensor, src_dst_C2: torch.Tensor) -> None:
        if not len(src_dst_C2):
            return
        pool = movable(kv_pool_B2KPD)
        block_numel = pool[0].numel()
        grid = (len(src_dst_C2), triton.cdiv(block_numel, COPY_TILE))
        copy_blocks_kernel[grid](pool, src_dst_C2.contiguous(), block_numel, TILE=COPY_TILE)

    def add_lora(self, out_TO: torch.Tensor, x_TI: torch.Tensor, weights: LoraLinear, plan: LoraPlan) -> None:
        launch_add_lora(out_TO, x_TI, weights, plan)

    def greedy_tokens(self, logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return launch_greedy_tokens(logits_SV)

    def top_k_top_p_thresholds(
        self,
        weights_FV: torch.Tensor,
        top_k_F: torch.Tensor,
        top_p_F: torch.Tensor,
        pending_F: torch.Tensor,
        threshold_F: torch.Tensor,
    ) -> None:
        launch_thresholds(weights_FV, top_k_F, top_p_F, pending_F, threshold_F)

    def pack_linear(self, weight_OI: LinearWeight) -> LinearWeight:
        """Return a quantised weight as `TiledWeight`, or as plain numbers if its groups are too small for that."""
        if not isinstance(weight_OI, QuantisedWeight) or not can_tile(weight_OI):
            return plain(weight_OI)
        return tiled(weight_OI, quantises_inputs=self.quantises_inputs)

    def linear(
        self, x_TI: torch.Tensor, weight_OI: LinearWeight, bias_O: torch.Tensor | None = None
    ) -> torch.Tensor:
        if isinstance(weight_OI, TiledWeight):
            return launch_quantised_linear(x_TI, weight_OI, bias_O)
        assert isinstance(weight_OI, torch.Tensor), "a quantised weight that was not packed"
        return F.linear(x_TI, weight_OI, bias_O)

    def pack_gate(self, weight_EH: torch.Tensor) -> torch.Tensor:
        return weight_EH

    def pack_experts(self, weight_EOI: Stacked) -> Stacked:
        """Return quantised weights as `TiledExperts`, or as plain numbers if their groups are too small for that."""
        if isinstance(weight_EOI, torch.Tensor):
            return weight_EOI
        quantised = [weight for weight in weight_EOI if isinstance(weight, QuantisedWeight)]
        if len(quantised) == len(weight_EOI) and all(map(can_tile, quantised)):
            if isinstance(weight_EOI, list):
                weight_EOI.clear()  # Each weight is freed once it is in the stack.
            return tiled_experts(quantised)
        return torch.stack([plain(weight_OI) for weight_OI in weight_EOI])

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
        assert isinstance(gate_up_E2IH, torch.Tensor | TiledExperts)
        assert isinstance(down_EHI, torch.Tensor | TiledExperts)
        return launch_experts(
            x_TH,
            logits_TE,
            gate_up_E2IH,
            down_EHI,
            top_k=top_k,
            normalizes=normalizes,
            silu_mul=self.silu_mul,
        )


def _launch_activation(gate_up_T2I: torch.Tensor, out_TI: torch.Tensor, *, is_gelu: bool) -> None:
    num_tokens, width = out_TI.shape
    check_dense_rows(gate_up_T2I, out_TI)
    if not num_tokens:
        return
    silu_mul_kernel[(num_tokens, triton.cdiv(width, SILU_TILE))](
        gate_up_T2I, out_TI, width, gate_up_T2I.stride(0), out_TI.stride(0), GELU=is_gelu, TILE=SILU_TILE
    )


def _launch_rms_norm(
    x_TH: torch.Tensor,
    residual_TH: torch.Tensor | None,
    weight_H: torch.Tensor,
    eps: float,
    out_TH: torch.Tensor,
    *,
    adds_after: bool = False,
) -> None:
    num_rows, hidden = x_TH.shape
    residual = x_TH if residual_TH is None else residual_TH
    check_dense_rows(x_TH, residual, out_TH)
    if not num_rows:
        return
    hidden_pow2 = triton.next_power_of_2(hidden)
    rows = max(1, NORM_TILE // hidden_pow2)
    rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x_TH,
        residual,
        weight_H,
        out_TH,
        num_rows,
        x_TH.stride(0),
        residual.stride(0),
        out_TH.stride(0),
        eps,
        HAS_RESIDUAL=residual_TH is not None and not adds_after,
        ADDS_AFTER=adds_after,
        HIDDEN=hidden,
        HIDDEN_POW2=hidden_pow2,
        BLOCK_M=rows,
    )
