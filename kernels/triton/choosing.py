"""Host side of the Triton kernels that choose tokens: the largest logits, thresholds of top-k and top-p, and draws.

Shapes: S rows of logits, V vocabulary, D rows that draw, F rows with a filter, N outputs a row. C chunks of a row.
"""

# Triton ships no types.
# mypy: disable-error-code="import-untyped"

import torch
import triton
from blockyard.kernels.triton.choice import (
    draw_kernel,
    largest_of_chunks_kernel,
    largest_of_rows_kernel,
    weigh_chunks_kernel,
)
from blockyard.kernels.triton.nucleus import gather_nearest_kernel, sums_above_kernel, top_k_top_p_kernel
from blockyard.kernels.triton.numbers.devices import check_dense_rows

CHUNK_TOKENS = 4096
NUCLEUS_PASSES = 3
"""Passes over whole rows that look for the threshold of a top-k or top-p."""
NUCLEUS_THRESHOLDS = 8
"""Thresholds that one pass tries."""
NUCLEUS_TILE, NUCLEUS_WARPS = 512, 4


def launch_greedy_tokens(logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `Backend.greedy_tokens` does."""
    num_rows, vocab_size = logits_SV.shape
    check_dense_rows(logits_SV)
    num_chunks = triton.cdiv(vocab_size, CHUNK_TOKENS)
    chunk_largest_SC = logits_SV.new_empty((num_rows, num_chunks), dtype=torch.float32)
    chunk_tokens_SC = logits_SV.new_empty((num_rows, num_chunks), dtype=torch.int32)
    chunk_finite_SC = logits_SV.new_empty((num_rows, num_chunks), dtype=torch.int8)
    tokens_S = logits_SV.new_empty(num_rows, dtype=torch.int64)
    finite_S = logits_SV.new_empty(num_rows, dtype=torch.bool)
    if not num_rows:
        return tokens_S, finite_S
    largest_of_chunks_kernel[(num_rows, num_chunks)](
        logits_SV,
        chunk_largest_SC,
        chunk_tokens_SC,
        chunk_finite_SC,
        logits_SV.stride(0),
        vocab_size,
        TILE=CHUNK_TOKENS,
    )
    largest_of_rows_kernel[(num_rows,)](
        chunk_largest_SC,
        chunk_tokens_SC,
        chunk_finite_SC,
        tokens_S,
        finite_S,
        num_chunks,
        CHUNKS_POW2=triton.next_power_of_2(num_chunks),
    )
    return tokens_S, finite_S


def launch_thresholds(
    weights_FV: torch.Tensor,
    top_k_F: torch.Tensor,
    top_p_F: torch.Tensor,
    pending_F: torch.Tensor,
    threshold_F: torch.Tensor,
) -> None:
    """Do what `Backend.top_k_top_p_thresholds` does."""
    num_rows, vocab_size = weights_FV.shape
    check_dense_rows(weights_FV, top_k_F, top_p_F, pending_F, threshold_F)
    if not num_rows:
        return
    num_chunks = triton.cdiv(vocab_size, CHUNK_TOKENS)
    tried, of_chunks = (num_rows, NUCLEUS_THRESHOLDS), (num_rows, num_chunks, NUCLEUS_THRESHOLDS)
    filters = (top_k_F, top_p_F, pending_F)
    sizes = {"NUM_THRESHOLDS": NUCLEUS_THRESHOLDS, "CHUNKS_POW2": triton.next_power_of_2(num_chunks)}
    grid = (num_rows, num_chunks)
    last: tuple[torch.Tensor, ...] = ()
    for _ in range(NUCLEUS_PASSES):
        found = (
            weights_FV.new_empty(tried, dtype=torch.int32),
            weights_FV.new_empty(of_chunks, dtype=torch.int32),
            weights_FV.new_empty(of_chunks, dtype=torch.float64),
        )
        sums_above_kernel[grid](
            weights_FV,
            *filters,
            *(last or found),
            *found,
            weights_FV.stride(0),
            vocab_size,
            num_chunks,
            IS_FIRST=not last,
            CHUNK=CHUNK_TOKENS,
            TILE=NUCLEUS_TILE,
            num_warps=NUCLEUS_WARPS,
            **sizes,
        )
        last = found
    nearest_FV = weights_FV.new_empty(num_rows, vocab_size)
    gather_nearest_kernel[grid](
        weights_FV,
        *filters,
        *last,
        nearest_FV,
        weights_FV.stride(0),
        vocab_size,
        num_chunks,
        CHUNK=CHUNK_TOKENS,
        **sizes,
    )
    top_k_top_p_kernel[(num_rows,)](
        nearest_FV,
        *filters,
        *last,
        threshold_F,
        vocab_size,
        num_chunks,
        TILE=NUCLEUS_TILE,
        num_warps=NUCLEUS_WARPS,
        **sizes,
    )


class TritonDraws:
    """Implements `Draws`."""

    def from_logits(
        self,
        logits_SV: torch.Tensor,
        greedy_S: torch.Tensor,
        rows_D: torch.Tensor,
        temperature_D: torch.Tensor,
        min_p_D: torch.Tensor,
        uniform_DN: torch.Tensor,
    ) -> torch.Tensor:
        check_dense_rows(greedy_S, rows_D, temperature_D)
        rows = (rows_D, greedy_S, temperature_D)
        return _launch_draw(logits_SV, rows, min_p_D, uniform_DN, are_weights=False)

    def from_weights(
        self, weights_FV: torch.Tensor, least_F: torch.Tensor, uniform_FN: torch.Tensor
    ) -> torch.Tensor:
        # These rows are all drawn, and have no temperature: the kernels read nothing there.
        return _launch_draw(weights_FV, (least_F,) * 3, least_F, uniform_FN, are_weights=True)


def _launch_draw(
    values_SV: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    least_D: torch.Tensor,
    uniform_DN: torch.Tensor,
    *,
    are_weights: bool,
) -> torch.Tensor:
    (num_rows, num_outputs), vocab_size = uniform_DN.shape, values_SV.shape[1]
    check_dense_rows(values_SV, least_D, uniform_DN)
    num_chunks = triton.cdiv(vocab_size, CHUNK_TOKENS)
    sums_DC = values_SV.new_empty((num_rows, num_chunks), dtype=torch.float64)
    tokens_DN = values_SV.new_empty((num_rows, num_outputs), dtype=torch.int64)
    if not num_rows:
        return tokens_DN
    inputs = (values_SV, *rows, least_D, sums_DC)
    sizes = (values_SV.stride(0), vocab_size)
    weigh_chunks_kernel[(num_rows, num_chunks)](*inputs, *sizes, TILE=CHUNK_TOKENS, ARE_WEIGHTS=are_weights)
    draw_kernel[(num_rows, num_outputs)](
        *inputs,
        uniform_DN,
        tokens_DN,
        *sizes,
        num_chunks,
        TILE=CHUNK_TOKENS,
        CHUNKS_POW2=triton.next_power_of_2(num_chunks),
        ARE_WEIGHTS=are_weights,
    )
    return tokens_DN
