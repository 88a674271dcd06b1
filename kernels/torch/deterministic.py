"""The torch backend in deterministic mode: a token's result does not depend on what else is in the step.

It has the same bits alone or in a batch, however the prompt is cut into chunks, and wherever the blocks lie. Rounding
depends on the shapes of matrix products, and on which elements a vector loop leaves to its scalar tail. So every
operation that rounds in an order of its own gets operands of one fixed shape:

- Linears see tiles of LINEAR_TILE_ROWS tokens, padded with zeros.
- Attention sees tiles of queries and chunks of CHUNK_TOKENS keys, both cut at absolute positions and joined by an
  online softmax. Keys that a query may not see, after it or behind its window, weigh exactly 0. They leave sum and
  maximum unchanged.
- Gates of experts see tiles of LINEAR_TILE_ROWS tokens too. A token adds its experts in the order of their numbers.
- SiLU and GELU see slabs of SILU_SLAB elements, fewer than PyTorch would share among threads.

Adds, multiplications and square roots are exact to the last bit in any order of elements and stay as they are. A mean
over the last dimension adds each row by itself. A quantised pool keeps all this: each head is quantised by itself, and
reading back takes one product a number. The mode computes in fp32 on a CPU, and its bits hold for one number of
threads. It is slower by design.

Shapes: as in backend.py. A keys of a chunk, M = query tile * G packed query rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from blockyard.kernels.attention.plan import AttentionPlan
from blockyard.kernels.kv_pool import gather, is_quantised
from blockyard.kernels.quantised import LinearWeight, plain
from blockyard.kernels.torch.backend import TorchBackend
from blockyard.kernels.torch.experts import choose_experts

LINEAR_TILE_ROWS = 16
CHUNK_TOKENS = 256
# Query tokens of a tile times G stay within this, so that a decode, one token of a tile, wastes little.
QUERY_TILE_ROWS = 16
SILU_SLAB = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One sequence of the step: its tokens in the step, its first query's position, and its keys as chunks.

    Chunks wholly behind the window of its first query's tile are left out.
    """

    tokens: slice
    first_position: int
    tile_tokens: int
    window: int | None
    first_chunk: int
    block_rows: (
        torch.Tensor
    )  # of the pool viewed as [B * 2 * K, P, D], ordered [chunks, 2, K, blocks a chunk]
    stale_slots: torch.Tensor  # of the gathered tensor viewed as [chunks * 2 * K * A, D]


class DeterministicTorchBackend(TorchBackend):
    """PyTorch backend with fixed shapes. Like the torch backend it is not thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._rows_by_window: dict[int | None, tuple[AttentionPlan, list[_Row]]] = {}

    def arithmetic(self, kv_pool_B2KPD: torch.Tensor, dtype: torch.dtype) -> tuple[str, ...]:
        return ("kernels=torch-deterministic", *super().arithmetic(kv_pool_B2KPD, dtype)[1:])

    def attention(
        self,
        q_TND: torch.Tensor,
        kv_pool_B2KPD: torch.Tensor,
        plan: AttentionPlan,
        *,
        scale: float,
        out_TND: torch.Tensor,
    ) -> None:
        _check_fp32(q_TND, *(() if is_quantised(kv_pool_B2KPD) else (kv_pool_B2KPD,)))
        if CHUNK_TOKENS % plan.block_size:
            raise ValueError(
                f"deterministic mode needs a block size that divides {CHUNK_TOKENS}, got {plan.block_size}"
            )
        prepared = self._rows_by_window.get(plan.window)
        if prepared is None or prepared[0] is not plan:
            rows = _prepare_rows(plan, q_TND.shape[1], kv_pool_B2KPD.shape[2])
            prepared = self._rows_by_window[plan.window] = plan, rows
        for row in prepared[1]:
            _attend_row(row, q_TND[row.tokens], kv_pool_B2KPD, scale, out_TND[row.tokens])

    def silu_mul(self, gate_up_T2I: torch.Tensor, *, out_TI: torch.Tensor) -> None:
        _activate(F.silu, gate_up_T2I, out_TI)

    def gelu_mul(self, gate_up_T2I: torch.Tensor, *, out_TI: torch.Tensor) -> None:
        _activate(partial(F.gelu, approximate="tanh"), gate_up_T2I, out_TI)

    def pack_linear(self, weight_OI: LinearWeight) -> LinearWeight:
        return plain(weight_OI)

    def linear(
        self, x_TI: torch.Tensor, weight_OI: LinearWeight, bias_O: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert isinstance(weight_OI, torch.Tensor), "a quantised weight that was not packed"
        _check_fp32(x_TI, weight_OI)
        num_tokens = len(x_TI)
        padding = -num_tokens % LINEAR_TILE_ROWS
        padded = F.pad(x_TI, (0, 0, 0, padding)) if padding else x_TI.contiguous()
        result = x_TI.new_empty(len(padded), len(weight_OI))
        for first in range(0, len(padded), LINEAR_TILE_ROWS):
            tile = slice(first, first + LINEAR_TILE_ROWS)
            torch.mm(padded[tile], weight_OI.t(), out=result[tile])
        return result[:num_tokens] if bias_O is None else result[:num_tokens] + bias_O

    def _choose_experts(
        self, logits_TE: torch.Tensor, top_k: int, *, normalizes: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _check_fp32(logits_TE)
        num_tokens = len(logits_TE)
        padded = F.pad(logits_TE, (0, 0, 0, -num_tokens % LINEAR_TILE_ROWS))
        tiles = [
            choose_experts(tile, top_k, normalizes=normalizes) for tile in padded.split(LINEAR_TILE_ROWS)
        ]
        experts, weights = (torch.cat(parts)[:num_tokens] for parts in zip(*tiles, strict=True))
        return experts, weights


def _activate(
    function: Callable[[torch.Tensor], torch.Tensor], gate_up_T2I: torch.Tensor, out_TI: torch.Tensor
) -> None:
    _check_fp32(gate_up_T2I)
    gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
    slabs = -(-gate_TI.numel() // SILU_SLAB)
    flat = torch.zeros(slabs * SILU_SLAB)
    gate_copy_TI = flat[: gate_TI.numel()].view(gate_TI.shape).copy_(gate_TI)
    for slab in flat.view(slabs, SILU_SLAB):
        slab.copy_(function(slab))
    torch.mul(gate_copy_TI, up_TI, out=out_TI)


def _check_fp32(*tensors: torch.Tensor) -> None:
    wrong = {tensor.dtype for tensor in tensors} - {torch.float32}
    if wrong:
        raise ValueError(f"deterministic mode computes in float32 only, got {wrong}")


def _prepare_rows(plan: AttentionPlan, num_heads: int, num_kv_heads: int) -> list[_Row]:
    rows = []
    first_token = 0
    tile_tokens = 1 << (max(1, QUERY_TILE_ROWS * num_kv_heads // num_heads).bit_length() - 1)
    for index, (query_len, context_len) in enumerate(zip(plan.query_lens, plan.context_lens, strict=True)):
        first_position = context_len - query_len
        first_chunk = _first_chunk(first_position - first_position % tile_tokens, plan.window)
        rows.append(
            _Row(
                tokens=slice(first_token, first_token + query_len),
                first_position=first_position,
                tile_tokens=tile_tokens,
                window=plan.window,
                first_chunk=first_chunk,
                block_rows=_chunked_block_rows(plan, index, first_chunk, num_kv_heads),
                stale_slots=_stale_slots(
                    first_chunk, plan.first_visible_key(index), context_len, num_kv_heads
                ),
            )
        )
        first_token += query_len
    return rows


def _first_chunk(tile_position: int, window: int | None) -> int:
    """Return the first chunk that a tile may see. It depends on the tile's position alone, because results must agree
    bit for bit."""
    return 0 if window is None else max(0, tile_position - window + 1) // CHUNK_TOKENS


def _chunked_block_rows(plan: AttentionPlan, row: int, first_chunk: int, num_kv_heads: int) -> torch.Tensor:
    """Return indices of whole chunks into the pool's rows. Beyond the sequence's own blocks they name block 0, whose
    slots are stale."""
    context_len = plan.context_lens[row]
    first_block = first_chunk * CHUNK_TOKENS // plan.block_size
    owned = -(-context_len // plan.block_size)
    num_chunks = -(-context_len // CHUNK_TOKENS) - first_chunk
    blocks = torch.zeros(num_chunks * CHUNK_TOKENS // plan.block_size, dtype=torch.int64)
    blocks[: owned - first_block] = plan.block_table_RB[row, first_block:owned]
    kind_2 = torch.arange(2)[:, None, None]
    head_K = torch.arange(num_kv_heads)[:, None]
    return ((blocks.view(num_chunks, 1, 1, -1) * 2 + kind_2) * num_kv_heads + head_K).reshape(-1)


def _stale_slots(first_chunk: int, first_key: int, context_len: int, num_kv_heads: int) -> torch.Tensor:
    """Return the indices of the gathered slots that no query of the row sees."""
    key = torch.arange(first_chunk * CHUNK_TOKENS, -(-context_len // CHUNK_TOKENS) * CHUNK_TOKENS)
    stale = ((key < first_key) | (key >= context_len)).view(-1, 1, 1, CHUNK_TOKENS)
    return stale.expand(-1, 2, num_kv_heads, -1).reshape(-1).nonzero().squeeze(1)


def _attend_row(
    row: _Row, q_QND: torch.Tensor, kv_pool_B2KPD: torch.Tensor, scale: float, out_QND: torch.Tensor
) -> None:
    num_kv_heads, head_dim = kv_pool_B2KPD.shape[2], q_QND.shape[2]
    gathered = gather(kv_pool_B2KPD, row.block_rows, q_QND.dtype)
    gathered.view(-1, head_dim).index_fill_(0, row.stale_slots, 0.0)
    chunks = gathered.view(-1, 2, num_kv_heads, CHUNK_TOKENS, head_dim)
    group = q_QND.shape[1] // num_kv_heads
    tile_tokens = row.tile_tokens
    end_position = row.first_position + len(q_QND)
    tile_position = row.first_position - row.first_position % tile_tokens
    while tile_position < end_position:
        # The part of this tile that the step computes. The other rows of the tile are zeros, and their results are
        # dropped.
        begin, end = max(tile_position, row.first_position), min(tile_position + tile_tokens, end_position)
        wanted = slice(begin - row.first_position, end - row.first_position)
        place = slice(begin - tile_position, end - tile_position)
        q_tile = q_QND.new_zeros(num_kv_heads, tile_tokens, group, head_dim)
        q_tile[:, place] = q_QND[wanted].view(end - begin, num_kv_heads, group, head_dim).transpose(0, 1)
        result_KMD = _attend_tile(row, q_tile.flatten(1, 2) * scale, chunks, tile_position)
        result = result_KMD.view(num_kv_heads, tile_tokens, group, head_dim)[:, place]
        out_QND[wanted] = result.transpose(0, 1).flatten(1, 2)
        tile_position += tile_tokens


def _attend_tile(row: _Row, q_KMD: torch.Tensor, chunks: torch.Tensor, tile_position: int) -> torch.Tensor:
    """Attend to the chunks that a tile may see by online softmax. Masks are for the last chunk, in which the tile lies,
    and for those in which some query's window begins."""
    num_kv_heads, num_packed, head_dim = q_KMD.shape
    last_chunk = tile_position // CHUNK_TOKENS
    position_M1 = (torch.arange(num_packed) // (num_packed // row.tile_tokens) + tile_position)[:, None]
    last_hidden = -1 if row.window is None else tile_position + row.tile_tokens - 1 - row.window
    # Lowest finite, not -inf: a chunk may lie behind the windows of some queries of the tile.
    peak_KM1 = q_KMD.new_full((num_kv_heads, num_packed, 1), torch.finfo(torch.float32).min)
    total_KM1 = q_KMD.new_zeros(num_kv_heads, num_packed, 1)
    acc_KMD = q_KMD.new_zeros(num_kv_heads, num_packed, head_dim)
    for index in range(_first_chunk(tile_position, row.window), last_chunk + 1):
        k_KAD, v_KAD = chunks[index - row.first_chunk]
        scores_KMA = torch.bmm(q_KMD, k_KAD.transpose(1, 2))
        key_A = torch.arange(CHUNK_TOKENS) + index * CHUNK_TOKENS
        if index == last_chunk:
            scores_KMA.masked_fill_(key_A > position_M1, float("-inf"))
        if row.window is not None and index * CHUNK_TOKENS <= last_hidden:
            scores_KMA.masked_fill_(key_A <= position_M1 - row.window, float("-inf"))
        new_peak_KM1 = torch.maximum(peak_KM1, scores_KMA.amax(dim=-1, keepdim=True))
        rescale_KM1 = torch.exp(peak_KM1 - new_peak_KM1)
        weights_KMA = torch.exp(scores_KMA - new_peak_KM1)
        total_KM1 = total_KM1 * rescale_KM1 + weights_KMA.sum(dim=-1, keepdim=True)
        acc_KMD = acc_KMD * rescale_KM1 + torch.bmm(weights_KMA, v_KAD)
        peak_KM1 = new_peak_KM1
    return acc_KMD / total_KM1
