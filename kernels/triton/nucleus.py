"""Triton kernel that finds which tokens top-k and top-p keep where they are many, without a sort or the host.

Weights of at least 0 have the order of their bits. So 31 bisections find the smallest weight that is kept. Each reads
the row once, and a few rows fit the last-level cache. One program a row, and sums in fp64: meant to be rare, not fast.

Shapes: F rows, V vocabulary, J tokens of a tile.
"""

# Triton ships no types, and its kernels' arguments have none that Python knows.
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl


@triton.jit
def top_k_top_p_kernel(
    weights_ptr,  # [F, V], fp32, strides (weights_stride_f, 1), at least 0
    top_k_ptr,  # [F], int64; vocab_size means no top-k
    top_p_ptr,  # [F], fp64
    pending_ptr,  # [F], bool
    threshold_ptr,  # [F], fp32
    weights_stride_f,
    vocab_size,
    TILE: tl.constexpr,
):
    """threshold = the smallest weight that is among the k largest and has less than p of their sum before it.

    Only pending rows are written. Without top-k the sum is taken as 1. A row that holds NaN gets an arbitrary
    threshold.

    Grid (F,). A pending row with top-k or top-p alone: bytes 4 * V * 33, FLOPs (comparisons included) 2 * V * 31. With
    both: bytes 4 * V * 64, FLOPs 2 * V * 63.
    """
    row = tl.program_id(0).to(tl.int64)
    if tl.load(pending_ptr + row) == 0:
        return
    weights_ptr += row * weights_stride_f
    top_k = tl.load(top_k_ptr + row)
    largest_J = tl.full([TILE], 0, tl.float32)
    for first in range(0, vocab_size, TILE):
        largest_J = tl.maximum(largest_J, _tile(weights_ptr, first, vocab_size, TILE))
    most_bits = tl.max(largest_J, axis=0).to(tl.int32, bitcast=True)
    bits = tl.full([], 0, tl.int32)
    mass = tl.full([], 1, tl.float64)
    if top_k < vocab_size:
        bits = _smallest_bits(weights_ptr, bits, most_bits, top_k, mass, vocab_size, True, TILE)
        of_k = bits.to(tl.float32, bitcast=True)
        count, mass = _above(weights_ptr, of_k, vocab_size, TILE)
        mass += (top_k - count).to(tl.float64) * of_k.to(tl.float64)
    most_mass = tl.load(top_p_ptr + row) * mass
    bits = _smallest_bits(weights_ptr, bits, most_bits, top_k, most_mass, vocab_size, False, TILE)
    tl.store(threshold_ptr + row, bits.to(tl.float32, bitcast=True))


@triton.jit
def _smallest_bits(
    weights_ptr, low, high, top_k, most_mass, vocab_size, BY_COUNT: tl.constexpr, TILE: tl.constexpr
):
    """Return the bits of the smallest number from `low` to `high` with few enough weights above it, found by bisection.

    Few enough is fewer than `top_k`, or a sum below `most_mass`. No weight is above `high`. The result is a weight or
    `low`, because all numbers between two weights have the same weights above them.
    """
    for _ in range(31):
        middle = low + (high - low) // 2
        count, mass = _above(weights_ptr, middle.to(tl.float32, bitcast=True), vocab_size, TILE)
        is_enough = count < top_k if BY_COUNT else mass < most_mass
        high = tl.where(is_enough, middle, high)
        low = tl.where(is_enough, low, tl.minimum(middle + 1, high))
    return high


@triton.jit
def _above(weights_ptr, least, vocab_size, TILE: tl.constexpr):
    """Return how many weights are larger than `least`, and their sum."""
    count_J = tl.full([TILE], 0, tl.int32)
    mass_J = tl.full([TILE], 0, tl.float64)
    for first in range(0, vocab_size, TILE):
        weight_J = _tile(weights_ptr, first, vocab_size, TILE)
        is_larger_J = weight_J > least
        count_J += is_larger_J.to(tl.int32)
        mass_J += tl.where(is_larger_J, weight_J, 0.0).to(tl.float64)
    return tl.sum(count_J, axis=0), tl.sum(mass_J, axis=0)


@triton.jit
def _tile(weights_ptr, first, vocab_size, TILE: tl.constexpr):
    offset_J = first + tl.arange(0, TILE)
    return tl.load(weights_ptr + offset_J, mask=offset_J < vocab_size, other=0.0)
