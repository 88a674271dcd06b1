"""Experts in Triton: the choice of each token, pairs of token and expert in the order of experts, and grouped products.

Pairs of an expert fill tiles of BLOCK_M rows, and each tile has one expert. The numbers of tiles and programs follow
from the number of tokens alone, so the host waits for nothing and a graph can be replayed. Tiles beyond the last pair
end at once. A token adds its experts from the largest weight to the smallest. Owns kernels and their launch.

Shapes: T tokens, K experts a token, E experts, P = T K pairs (pair p belongs to token p / K). H hidden size, I
intermediate size of an expert. S rows of all tiles, M rows of a tile. N outputs and J inputs of a program's turn.
"""

# Triton ships no types, and its kernels' arguments have none that Python knows.
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from blockyard.kernels.triton.linears.dot import dot
from blockyard.kernels.triton.linears.expert_products import launch_quantised_experts
from blockyard.kernels.triton.linears.weights import TiledExperts
from blockyard.kernels.triton.numbers.devices import check_dense_rows

LEAST_ROWS = 16
"""tl.dot multiplies no fewer."""
PAIRS_TILE = 1024
"""Pairs that a program sorts in one turn."""
SUM_TILE = 1024
FEW_TOKENS = 64
"""Up to so many tokens, an expert has few rows. With more, tiles of 64 rows still take less time to multiply than their
weights take to load."""


@triton.jit
def choose_experts_kernel(
    logits_ptr,  # [T, E], strides (logits_stride_t, 1)
    experts_ptr,  # [P], int32
    weights_ptr,  # [P], fp32
    logits_stride_t,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALIZES: tl.constexpr,
):
    """experts, weights = the K largest logits of a token, of equals the first, and their softmax over all logits.

    Grid (T,). With NORMALIZES the weights are divided by their sum. NaN weighs everything NaN. Bytes: E * itemsize + 8
    * K a token. FLOPs: 3 * E * K a token.
    """
    token = tl.program_id(0).to(tl.int64)
    expert_E = tl.arange(0, EXPERTS_POW2)
    valid_E = expert_E < NUM_EXPERTS
    logits_ptrs_E = logits_ptr + token * logits_stride_t + expert_E
    logit_E = tl.load(logits_ptrs_E, mask=valid_E, other=float("-inf")).to(tl.float32)
    largest = tl.max(logit_E, axis=0)
    exp_E = tl.exp(logit_E - largest)
    total = tl.sum(exp_E, axis=0)
    if NORMALIZES:
        total = 0.0
        left_E = valid_E
        for _ in tl.static_range(TOP_K):
            expert = _largest_left(logit_E, left_E, expert_E, EXPERTS_POW2)
            left_E = left_E & (expert_E != expert)
            total += tl.sum(tl.where(expert_E == expert, exp_E, 0.0), axis=0)
    left_E = valid_E
    for rank in tl.static_range(TOP_K):
        expert = _largest_left(logit_E, left_E, expert_E, EXPERTS_POW2)
        left_E = left_E & (expert_E != expert)
        weight = tl.sum(tl.where(expert_E == expert, exp_E, 0.0), axis=0) / total
        tl.store(experts_ptr + token * TOP_K + rank, expert)
        tl.store(weights_ptr + token * TOP_K + rank, weight)


@triton.jit
def _largest_left(logit_E, left_E, expert_E, EXPERTS_POW2: tl.constexpr):
    """Return the first expert with the largest logit of those that are left. NaN counts as -inf."""
    number_E = tl.where(left_E & (logit_E == logit_E), logit_E, float("-inf"))
    largest = tl.max(number_E, axis=0)
    return tl.min(tl.where(left_E & (number_E == largest), expert_E, EXPERTS_POW2), axis=0)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def sort_pairs_kernel(
    experts_ptr,  # [P], int32
    pairs_ptr,  # [S], int32: the pair of each row, P where a row has none
    tiles_ptr,  # [S / M], int32: the expert of each tile, -1 where a tile has none
    num_pairs,
    num_tiles,
    EXPERTS_POW2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
):
    """Give every pair a row, so that an expert's rows are whole tiles. Its pairs keep their order.

    Grid (E,): a program places the pairs of one expert, and the last one also marks the tiles that are left. It reads
    all pairs twice. Bytes: 8 * P an expert. FLOPs: 2 * P * log2(E) an expert, comparisons.
    """
    own = tl.program_id(0)
    bin_E = tl.arange(0, EXPERTS_POW2)
    offset_J = tl.arange(0, TILE)
    count_E = tl.zeros([EXPERTS_POW2], dtype=tl.int32)
    for first in range(0, num_pairs, TILE):
        pair_J = first + offset_J
        # The last bin belongs to no expert.
        expert_J = tl.load(experts_ptr + pair_J, mask=pair_J < num_pairs, other=EXPERTS_POW2 - 1)
        count_E += tl.histogram(expert_J, EXPERTS_POW2)
    tiles_E = tl.where(bin_E < tl.num_programs(0), (count_E + BLOCK_M - 1) // BLOCK_M, 0)
    first_tile = tl.sum(tl.where(bin_E < own, tiles_E, 0), axis=0)
    own_tiles = tl.sum(tl.where(bin_E == own, tiles_E, 0), axis=0)
    row = first_tile * BLOCK_M
    for first in range(0, num_pairs, TILE):
        pair_J = first + offset_J
        expert_J = tl.load(experts_ptr + pair_J, mask=pair_J < num_pairs, other=EXPERTS_POW2 - 1)
        is_own_J = (expert_J == own).to(tl.int32)
        place_J = row + tl.cumsum(is_own_J, axis=0) - 1
        tl.store(pairs_ptr + place_J, pair_J, mask=is_own_J != 0)
        row += tl.sum(is_own_J, axis=0)
    padding_M = row + tl.arange(0, BLOCK_M)
    end_row = (first_tile + own_tiles) * BLOCK_M
    tl.store(pairs_ptr + padding_M, tl.zeros_like(padding_M) + num_pairs, mask=padding_M < end_row)
    last_tile = first_tile + own_tiles
    for first in range(first_tile, last_tile, TILE):
        tile_J = first + offset_J
        tl.store(tiles_ptr + tile_J, tl.zeros_like(tile_J) + own, mask=tile_J < last_tile)
    if own == tl.num_programs(0) - 1:
        for first in range(last_tile, num_tiles, TILE):
            tile_J = first + offset_J
            tl.store(tiles_ptr + tile_J, tl.zeros_like(tile_J) - 1, mask=tile_J < num_tiles)


@triton.jit(do_not_specialize=["num_pairs"])
def grouped_linear_kernel(
    x_ptr,  # [P / PAIRS_A_ROW, inputs], strides (x_stride, 1)
    weight_ptr,  # [E, outputs, inputs], strides (weight_stride_e, weight_stride_o, 1); with GATED twice the outputs
    out_ptr,  # [P, outputs], strides (out_stride, 1)
    pairs_ptr,  # [S], int32
    tiles_ptr,  # [S / M], int32
    num_pairs,
    num_inputs,
    num_outputs,
    x_stride,
    out_stride,
    weight_stride_e,
    weight_stride_o,
    PAIRS_A_ROW: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """out = x @ weight[expert]^T for every pair. With GATED out = silu(x @ first half^T) * (x @ second half^T), both
    rounded first.

    Grid (ceil(outputs / N), S / M): a program has a tile of one expert's pairs. Bytes: inputs * outputs * itemsize for
    each tile, twice with GATED, and the rows. FLOPs: 2 * P * inputs * outputs, twice with GATED.
    """
    tile = tl.program_id(1)
    expert = tl.load(tiles_ptr + tile)
    if expert < 0:
        return
    pair_M = tl.load(pairs_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    is_pair_M1 = (pair_M < num_pairs)[:, None]
    row_M = tl.where(pair_M < num_pairs, pair_M // PAIRS_A_ROW, 0).to(tl.int64)
    output_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output_N = output_N < num_outputs
    input_J = tl.arange(0, BLOCK_J)
    x_ptrs_MJ = x_ptr + row_M[:, None] * x_stride + input_J[None, :]
    weight_row_N = tl.where(is_output_N, output_N, 0).to(tl.int64) * weight_stride_o
    weight_ptr += expert.to(tl.int64) * weight_stride_e
    weight_ptrs_JN = weight_ptr + weight_row_N[None, :] + input_J[:, None]
    acc_MN = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up_MN = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    half = num_outputs.to(tl.int64) * weight_stride_o
    for first in range(0, num_inputs, BLOCK_J):
        is_input_J = input_J < num_inputs - first
        x_MJ = tl.load(x_ptrs_MJ + first, mask=is_pair_M1 & is_input_J[None, :], other=0.0)
        weight_JN = tl.load(weight_ptrs_JN + first, mask=is_input_J[:, None], other=0.0)
        acc_MN = dot(x_MJ, weight_JN, acc_MN, WIDEN)
        if GATED:
            weight_JN = tl.load(weight_ptrs_JN + half + first, mask=is_input_J[:, None], other=0.0)
            up_MN = dot(x_MJ, weight_JN, up_MN, WIDEN)
    type: tl.constexpr = out_ptr.dtype.element_ty
    if GATED:
        gate_MN = acc_MN.to(type).to(tl.float32)
        acc_MN = gate_MN / (1.0 + tl.exp(-gate_MN)) * up_MN.to(type).to(tl.float32)
    out_ptrs_MN = out_ptr + pair_M.to(tl.int64)[:, None] * out_stride + output_N[None, :]
    tl.store(out_ptrs_MN, acc_MN.to(type), mask=is_pair_M1 & is_output_N[None, :])


@triton.jit
def add_experts_kernel(
    pairs_ptr,  # [P, H], contiguous
    weights_ptr,  # [P], fp32
    out_ptr,  # [T, H], strides (out_stride_t, 1)
    hidden,
    out_stride_t,
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
):
    """out = the sum of weight * the output of each of a token's experts, in fp32, rounded once.

    Grid (T, ceil(H / TILE)). Bytes: (K + 1) * H * itemsize a token. FLOPs: 2 * K * H a token.
    """
    token = tl.program_id(0).to(tl.int64)
    column_H = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask_H = column_H < hidden
    sum_H = tl.zeros([TILE], dtype=tl.float32)
    for rank in tl.static_range(TOP_K):
        pair = token * TOP_K + rank
        y_H = tl.load(pairs_ptr + pair * hidden + column_H, mask=mask_H, other=0.0).to(tl.float32)
        sum_H += y_H * tl.load(weights_ptr + pair)
    tl.store(out_ptr + token * out_stride_t + column_H, sum_H.to(out_ptr.dtype.element_ty), mask=mask_H)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTiles:
    """The shape of one program of a grouped product: rows, outputs and inputs of a turn, warps, pipeline stages."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


def expert_tiles(num_tokens: int, *, dtype: torch.dtype) -> ExpertTiles:
    """Return the tiles of a step. Larger ones read a weight less often.

    Only the number of tokens decides, and not that of experts: so a worker's warm-up compiles both.
    """
    if dtype == torch.float32:
        return ExpertTiles(rows=LEAST_ROWS, outputs=32, inputs=32, warps=4, stages=2)
    if num_tokens <= FEW_TOKENS:
        return ExpertTiles(rows=LEAST_ROWS, outputs=64, inputs=64, warps=4, stages=4)
    return ExpertTiles(rows=64, outputs=64, inputs=64, warps=4, stages=3)


def launch_experts(
    x_TH: torch.Tensor,
    logits_TE: torch.Tensor,
    gate_up_E2IH: torch.Tensor | TiledExperts,
    down_EHI: torch.Tensor | TiledExperts,
    *,
    top_k: int,
    normalizes: bool,
    silu_mul: Callable[..., None],
) -> torch.Tensor:
    """Compute `Backend.experts`. `silu_mul` is the backend's, for a quantised matrix of gate and up."""
    num_tokens, hidden = x_TH.shape
    num_experts, inner = len(down_EHI), _sizes(down_EHI)[1]
    _check(x_TH, logits_TE, gate_up_E2IH, down_EHI, top_k)
    out_TH = torch.empty_like(x_TH)
    if not num_tokens:
        return out_TH
    num_pairs = num_tokens * top_k
    experts_P = torch.empty(num_pairs, dtype=torch.int32, device=x_TH.device)
    weights_P = torch.empty(num_pairs, dtype=torch.float32, device=x_TH.device)
    choose_experts_kernel[(num_tokens,)](
        logits_TE,
        experts_P,
        weights_P,
        logits_TE.stride(0),
        NUM_EXPERTS=num_experts,
        EXPERTS_POW2=triton.next_power_of_2(num_experts),
        TOP_K=top_k,
        NORMALIZES=normalizes,
    )
    tiles = expert_tiles(num_tokens, dtype=x_TH.dtype)
    num_tiles = most_tiles(num_pairs, num_experts, tiles.rows)
    pairs_S = torch.empty(num_tiles * tiles.rows, dtype=torch.int32, device=x_TH.device)
    expert_of_tile = torch.empty(num_tiles, dtype=torch.int32, device=x_TH.device)
    sort_pairs_kernel[(num_experts,)](
        experts_P,
        pairs_S,
        expert_of_tile,
        num_pairs,
        num_tiles,
        # One bin more than there are experts.
        EXPERTS_POW2=triton.next_power_of_2(num_experts + 1),
        BLOCK_M=tiles.rows,
        TILE=PAIRS_TILE,
    )
    inner_PI = x_TH.new_empty(num_pairs, inner)
    if isinstance(gate_up_E2IH, TiledExperts):
        gate_up_P2I = x_TH.new_empty(num_pairs, 2 * inner)
        launch_quantised_experts(x_TH, gate_up_E2IH, gate_up_P2I, pairs_S, expert_of_tile, top_k)
        silu_mul(gate_up_P2I, out_TI=inner_PI)
    else:
        _launch_linear(x_TH, gate_up_E2IH, inner_PI, pairs_S, expert_of_tile, top_k, tiles)
    out_PH = x_TH.new_empty(num_pairs, hidden)
    if isinstance(down_EHI, TiledExperts):
        launch_quantised_experts(inner_PI, down_EHI, out_PH, pairs_S, expert_of_tile, 1)
    else:
        _launch_linear(inner_PI, down_EHI, out_PH, pairs_S, expert_of_tile, 1, tiles)
    add_experts_kernel[(num_tokens, triton.cdiv(hidden, SUM_TILE))](
        out_PH, weights_P, out_TH, hidden, out_TH.stride(0), TOP_K=top_k, TILE=SUM_TILE
    )
    return out_TH


def most_tiles(num_pairs: int, num_experts: int, rows: int) -> int:
    """Return the most tiles that so many pairs can fill: all but one row of a tile may be left free by each expert."""
    return (num_pairs + min(num_pairs, num_experts) * (rows - 1)) // rows


def _launch_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    pairs_S: torch.Tensor,
    expert_of_tile: torch.Tensor,
    pairs_a_row: int,
    tiles: ExpertTiles,
) -> None:
    num_outputs = out.shape[1]
    options: dict[str, Any] = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    grouped_linear_kernel[(triton.cdiv(num_outputs, tiles.outputs), len(expert_of_tile))](
        x,
        weight,
        out,
        pairs_S,
        expert_of_tile,
        len(out),
        x.shape[1],
        num_outputs,
        x.stride(0),
        out.stride(0),
        *weight.stride()[:2],
        PAIRS_A_ROW=pairs_a_row,
        GATED=weight.shape[1] != num_outputs,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.outputs,
        BLOCK_J=tiles.inputs,
        WIDEN=x.dtype == torch.bfloat16 and x.device.type == "cpu",
        **options,
    )


def _check(
    x_TH: torch.Tensor,
    logits_TE: torch.Tensor,
    gate_up_E2IH: torch.Tensor | TiledExperts,
    down_EHI: torch.Tensor | TiledExperts,
    top_k: int,
) -> None:
    num_experts, (hidden, inner) = len(down_EHI), _sizes(down_EHI)
    check_dense_rows(x_TH, logits_TE)
    if not (
        len(gate_up_E2IH) == num_experts
        and _sizes(gate_up_E2IH) == (2 * inner, hidden)
        and logits_TE.shape == (len(x_TH), num_experts)
        and x_TH.shape[1] == hidden
        and 1 <= top_k <= num_experts
        and all(isinstance(w, TiledExperts) or w.is_contiguous() for w in (gate_up_E2IH, down_EHI))
    ):
        raise ValueError(
            f"{len(gate_up_E2IH)} experts {_sizes(gate_up_E2IH)} and {num_experts} {_sizes(down_EHI)} do not fit "
            f"inputs {tuple(x_TH.shape)}, logits {tuple(logits_TE.shape)} and {top_k} experts a token"
        )


def _sizes(weight: torch.Tensor | TiledExperts) -> tuple[int, int]:
    """Return outputs and inputs of each expert's weight."""
    if isinstance(weight, TiledExperts):
        return weight.first.shape
    return weight.shape[1], weight.shape[2]
