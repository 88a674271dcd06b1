"""Triton kernels that choose tokens: the largest logit, and draws from logits or from weights.

A row is cut into chunks, one program each, so that a single row keeps many multiprocessors busy. A second launch joins
the chunks. A draw finds the chunk in which the cumulative weight exceeds the target, and reads that one again. So both
read a row about once, and write next to nothing. Owns the kernels alone: choosing.py launches.

Shapes: S rows of logits, V vocabulary, D rows that draw, N outputs a row. C chunks of a row, J tokens of a chunk.
"""

# Triton ships no types, and its kernels' arguments have none that Python knows.
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl


@triton.jit
def largest_of_chunks_kernel(
    logits_ptr,  # [S, V], strides (logits_stride_s, 1)
    largest_ptr,  # [S, C], fp32
    tokens_ptr,  # [S, C], int32
    finite_ptr,  # [S, C], int8
    logits_stride_s,
    vocab_size,
    TILE: tl.constexpr,
):
    """largest, token = the largest finite logit of a chunk and the first token that has it; finite = whether all are.

    Grid (S, C). A chunk without any finite logit gives -inf and its first token. Bytes: V * itemsize a row. FLOPs: 3 *
    V a row, comparisons.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TILE
    offset_J = tl.arange(0, TILE)
    valid_J = first + offset_J < vocab_size
    logit_J = tl.load(logits_ptr + row * logits_stride_s + first + offset_J, mask=valid_J, other=0.0).to(
        tl.float32
    )
    finite_J = tl.abs(logit_J) < float("inf")
    largest, at = tl.max(tl.where(finite_J & valid_J, logit_J, float("-inf")), axis=0, return_indices=True)
    chunk = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(largest_ptr + chunk, largest)
    tl.store(tokens_ptr + chunk, first + at)
    tl.store(finite_ptr + chunk, tl.min(finite_J.to(tl.int32), axis=0).to(tl.int8))


@triton.jit
def largest_of_rows_kernel(
    largest_ptr,  # [S, C], fp32
    chunk_tokens_ptr,  # [S, C], int32
    chunk_finite_ptr,  # [S, C], int8
    tokens_ptr,  # [S], int64
    finite_ptr,  # [S], bool
    num_chunks,
    CHUNKS_POW2: tl.constexpr,
):
    """token = that of the row's first chunk with the largest logit; finite = whether all chunks are.

    Grid (S,). Bytes: 9 * C a row. FLOPs: 2 * C a row, comparisons.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk_C = tl.arange(0, CHUNKS_POW2)
    valid_C = chunk_C < num_chunks
    first = row * num_chunks
    largest_C = tl.load(largest_ptr + first + chunk_C, mask=valid_C, other=float("-inf"))
    _, chunk = tl.max(largest_C, axis=0, return_indices=True)
    finite_C = tl.load(chunk_finite_ptr + first + chunk_C, mask=valid_C, other=1).to(tl.int32)
    tl.store(tokens_ptr + row, tl.load(chunk_tokens_ptr + first + chunk).to(tl.int64))
    tl.store(finite_ptr + row, tl.min(finite_C, axis=0) != 0)


@triton.jit
def _weights_of_chunk(
    values_ptr,
    rows_ptr,
    greedy_ptr,
    temperatures_ptr,
    least_ptr,
    values_stride_s,
    drawn,
    first,
    vocab_size,
    TILE: tl.constexpr,
    ARE_WEIGHTS: tl.constexpr,
):
    """Return the weights [J] of one chunk in fp64, and 0 where they are less than the least that is kept."""
    token_J = first + tl.arange(0, TILE)
    if ARE_WEIGHTS:
        values_ptr += drawn * values_stride_s
        weight_J = tl.load(values_ptr + token_J, mask=token_J < vocab_size, other=0.0)
    else:
        row = tl.load(rows_ptr + drawn)
        values_ptr += row * values_stride_s
        logit_J = tl.load(values_ptr + token_J, mask=token_J < vocab_size, other=float("-inf")).to(tl.float32)
        largest = tl.load(values_ptr + tl.load(greedy_ptr + row)).to(tl.float32)
        weight_J = tl.exp((logit_J - largest) / tl.load(temperatures_ptr + drawn))
    return tl.where(weight_J >= tl.load(least_ptr + drawn), weight_J, 0.0).to(tl.float64)


@triton.jit
def weigh_chunks_kernel(
    values_ptr,  # logits [S, V], strides (values_stride_s, 1); with ARE_WEIGHTS weights [D, V], fp32
    rows_ptr,  # [D], int64, not with ARE_WEIGHTS
    greedy_ptr,  # [S], int64, not with ARE_WEIGHTS
    temperatures_ptr,  # [D], fp32, not with ARE_WEIGHTS
    least_ptr,  # [D], fp32: min-p; with ARE_WEIGHTS the smallest weight that is kept
    sums_ptr,  # [D, C], fp64
    values_stride_s,
    vocab_size,
    TILE: tl.constexpr,
    ARE_WEIGHTS: tl.constexpr,
):
    """sum = the weights of a chunk that are at least `least`. Without ARE_WEIGHTS a weight is e^((logit - the row's
    largest) / temperature).

    Grid (D, C). Bytes: V * itemsize a row. FLOPs: 5 * V a row, with ARE_WEIGHTS 2 * V.
    """
    drawn = tl.program_id(0).to(tl.int64)
    weight_J = _weights_of_chunk(
        values_ptr, rows_ptr, greedy_ptr, temperatures_ptr, least_ptr, values_stride_s, drawn,
        tl.program_id(1) * TILE, vocab_size, TILE, ARE_WEIGHTS,
    )  # fmt: skip
    tl.store(sums_ptr + drawn * tl.num_programs(1) + tl.program_id(1), tl.sum(weight_J, axis=0))


@triton.jit
def draw_kernel(
    values_ptr,  # as `weigh_chunks_kernel`'s, and so on
    rows_ptr,
    greedy_ptr,
    temperatures_ptr,
    least_ptr,
    sums_ptr,  # [D, C], fp64
    uniforms_ptr,  # [D, N], fp64
    tokens_ptr,  # [D, N], int64
    values_stride_s,
    vocab_size,
    num_chunks,
    TILE: tl.constexpr,
    CHUNKS_POW2: tl.constexpr,
    ARE_WEIGHTS: tl.constexpr,
):
    """token = the first one whose cumulative weight exceeds uniform * the sum of all, in the order of ids.

    Grid (D, N). It has a weight, however sums are rounded, except in rows with NaN: those give any token. Bytes: 8 * C
    + TILE * itemsize a number. FLOPs: 6 * TILE + 2 * C a number.
    """
    drawn = tl.program_id(0).to(tl.int64)
    output = drawn * tl.num_programs(1) + tl.program_id(1)
    chunk_C = tl.arange(0, CHUNKS_POW2)
    sum_C = tl.load(sums_ptr + drawn * num_chunks + chunk_C, mask=chunk_C < num_chunks, other=0.0)
    total = tl.sum(sum_C, axis=0)
    # Strictly below the total, however the product is rounded: the next smaller number has the bits before its own.
    below_total = (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)
    target = tl.minimum(tl.load(uniforms_ptr + output) * total, below_total)
    cumulative_C = tl.cumsum(sum_C, axis=0)
    # The last chunk with a weight, where a scan adds up to less than the sum.
    last = tl.max(tl.where(sum_C > 0, chunk_C, 0), axis=0)
    chunk = tl.minimum(tl.sum((cumulative_C <= target).to(tl.int32), axis=0), last)
    before = tl.sum(tl.where(chunk_C < chunk, sum_C, 0.0), axis=0)

    weight_J = _weights_of_chunk(
        values_ptr, rows_ptr, greedy_ptr, temperatures_ptr, least_ptr, values_stride_s, drawn,
        chunk * TILE, vocab_size, TILE, ARE_WEIGHTS,
    )  # fmt: skip
    offset_J = tl.arange(0, TILE)
    # Of the tokens with a weight: the first beyond the target, or the last where rounding leaves none beyond it.
    is_beyond_J = (tl.cumsum(weight_J, axis=0) + before > target) & (weight_J > 0)
    first_beyond = tl.min(tl.where(is_beyond_J, offset_J, TILE), axis=0)
    last_weighted = tl.max(tl.where(weight_J > 0, offset_J, 0), axis=0)
    token = chunk * TILE + tl.minimum(first_beyond, last_weighted)
    tl.store(tokens_ptr + output, token.to(tl.int64))
