"""Triton kernels that find which tokens top-k and top-p keep, without a sort or the host.

Weights of at least 0 have the order of their bits, so the smallest kept weight is searched by bits. A search tries
several thresholds at once: it adds up the weights above each, and goes on between the two nearest. The first passes
read the whole row, one program a chunk. What lies between is then few weights nearly always: they are gathered, and one
program finishes the search on them. Sums are in fp64, in an order that depends on the row alone. Owns the kernels
alone: choosing.py launches.

Shapes: F rows, V vocabulary, C chunks of a row, K thresholds, J weights of a tile.
"""

# Triton ships no types, and its kernels' arguments have none that Python knows.
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

BITS_OF_ONE = tl.constexpr(0x3F800000)
BITS_OF_INFINITY = tl.constexpr(0x7F800000)
BITS_OF_OCTAVE = tl.constexpr(1 << 23)
SEARCHED_OCTAVES = tl.constexpr(28)
"""The first thresholds divide so many octaves below 1, and the lowest is 23 octaves below 1. At most 5 % of the sum of
2^19 weights lies below it."""

FEW_WEIGHTS = tl.constexpr(1024)
"""A range that holds no more is not divided by a pass over the row."""


@triton.jit
def sums_above_kernel(
    weights_ptr,  # [F, V], fp32, strides (weights_stride_f, 1), at least 0
    top_k_ptr,  # [F], int64; vocab_size means no top-k
    top_p_ptr,  # [F], fp64
    pending_ptr,  # [F], bool
    last_thresholds_ptr,  # results of the pass before, not read with IS_FIRST
    last_counts_ptr,
    last_masses_ptr,
    thresholds_ptr,  # [F, K], int32, the bits of weights
    counts_ptr,  # [F, C, K], int32
    masses_ptr,  # [F, C, K], fp64
    weights_stride_f,
    vocab_size,
    num_chunks,
    IS_FIRST: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    NUM_THRESHOLDS: tl.constexpr,
    CHUNKS_POW2: tl.constexpr,
):
    """count, mass = the number and the sum of a chunk's weights above each threshold.

    The thresholds divide the range that the pass before left. If that range holds few weights, as is usual, its results
    stay. Only pending rows are written.

    Grid (F, C). Bytes 4 * V + 12 * C * C * K a row. FLOPs (comparisons included) 3 * V * K a row.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(pending_ptr + row) == 0:
        return
    threshold = tl.arange(0, NUM_THRESHOLDS)
    of_row_K = row * NUM_THRESHOLDS + threshold
    place_K = (row * num_chunks + chunk) * NUM_THRESHOLDS + threshold
    if IS_FIRST:
        step: tl.constexpr = SEARCHED_OCTAVES * BITS_OF_OCTAVE // (NUM_THRESHOLDS - 2)
        octave_K = BITS_OF_ONE - (NUM_THRESHOLDS - 2 - threshold) * step
        up_to_largest_K = tl.where(threshold == NUM_THRESHOLDS - 1, BITS_OF_INFINITY, octave_K)
        threshold_K = tl.where(threshold == 0, -1, up_to_largest_K)
    else:
        low, high, _, _, held_C = _last_range(
            top_k_ptr, top_p_ptr, last_thresholds_ptr, last_counts_ptr, last_masses_ptr,
            row, vocab_size, num_chunks, NUM_THRESHOLDS, CHUNKS_POW2,
        )  # fmt: skip
        if tl.sum(held_C, axis=0) <= FEW_WEIGHTS:
            tl.store(counts_ptr + place_K, tl.load(last_counts_ptr + place_K))
            tl.store(masses_ptr + place_K, tl.load(last_masses_ptr + place_K))
            if chunk == 0:
                tl.store(thresholds_ptr + of_row_K, tl.load(last_thresholds_ptr + of_row_K))
            return
        threshold_K = _between(low, high, NUM_THRESHOLDS)
    count_KJ = tl.full([NUM_THRESHOLDS, TILE], 0, tl.int32)
    mass_KJ = tl.full([NUM_THRESHOLDS, TILE], 0, tl.float64)
    # Unrolled, so that all loads of a chunk are under way together.
    for part in tl.static_range(CHUNK // TILE):
        count_KJ, mass_KJ = _add_tile(
            weights_ptr + row * weights_stride_f, chunk * CHUNK + part * TILE, vocab_size, threshold_K,
            count_KJ, mass_KJ, TILE,
        )  # fmt: skip
    tl.store(counts_ptr + place_K, tl.sum(count_KJ, axis=1))
    tl.store(masses_ptr + place_K, tl.sum(mass_KJ, axis=1))
    if chunk == 0:
        tl.store(thresholds_ptr + of_row_K, threshold_K)


@triton.jit
def gather_nearest_kernel(
    weights_ptr,  # as `sums_above_kernel`'s
    top_k_ptr,
    top_p_ptr,
    pending_ptr,
    last_thresholds_ptr,
    last_counts_ptr,
    last_masses_ptr,
    nearest_ptr,  # [F, V], fp32
    weights_stride_f,
    vocab_size,
    num_chunks,
    CHUNK: tl.constexpr,
    NUM_THRESHOLDS: tl.constexpr,
    CHUNKS_POW2: tl.constexpr,
):
    """nearest = the weights that the last range holds, in their order. With top-k also those above it.

    Grid (F, C). Bytes 4 * V + 12 * C * C * K a row, and 4 for each weight that is written. FLOPs 3 * V a row.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(pending_ptr + row) == 0:
        return
    low, high, _, _, held_C = _last_range(
        top_k_ptr, top_p_ptr, last_thresholds_ptr, last_counts_ptr, last_masses_ptr,
        row, vocab_size, num_chunks, NUM_THRESHOLDS, CHUNKS_POW2,
    )  # fmt: skip
    high = tl.where(tl.load(top_k_ptr + row) < vocab_size, BITS_OF_INFINITY, high)
    offset_J = chunk * CHUNK + tl.arange(0, CHUNK)
    weight_J = tl.load(
        weights_ptr + row * weights_stride_f + offset_J, mask=offset_J < vocab_size, other=-1.0
    )
    bits_J = weight_J.to(tl.int32, bitcast=True)
    is_held_J = (bits_J > low) & (bits_J <= high)
    before = tl.sum(tl.where(tl.arange(0, CHUNKS_POW2) < chunk, held_C, 0), axis=0)
    place_J = before + tl.cumsum(is_held_J.to(tl.int32), axis=0) - 1
    tl.store(nearest_ptr + row * vocab_size + place_J, weight_J, mask=is_held_J)


@triton.jit
def top_k_top_p_kernel(
    nearest_ptr,  # as `gather_nearest_kernel` writes them
    top_k_ptr,
    top_p_ptr,
    pending_ptr,
    last_thresholds_ptr,
    last_counts_ptr,
    last_masses_ptr,
    threshold_ptr,  # [F], fp32
    vocab_size,
    num_chunks,
    TILE: tl.constexpr,
    NUM_THRESHOLDS: tl.constexpr,
    CHUNKS_POW2: tl.constexpr,
):
    """threshold = the smallest weight that is among the k largest and has less than p of their sum before it.

    Only pending rows are written. Without top-k the sum is taken as 1. A row that holds NaN gets an arbitrary
    threshold.

    Grid (F,). The bytes depend on how many weights are nearest: 4 for each, once per search step. A step divides the
    range by K - 1.
    """
    row = tl.program_id(0).to(tl.int64)
    if tl.load(pending_ptr + row) == 0:
        return
    low, high, count, above, held_C = _last_range(
        top_k_ptr, top_p_ptr, last_thresholds_ptr, last_counts_ptr, last_masses_ptr,
        row, vocab_size, num_chunks, NUM_THRESHOLDS, CHUNKS_POW2,
    )  # fmt: skip
    nearest_ptr += row * vocab_size
    num_nearest = tl.sum(held_C, axis=0)
    top_k = tl.load(top_k_ptr + row)
    total = tl.full([], 1, tl.float64)
    if top_k < vocab_size:
        high, count, above = _smallest_bits(
            nearest_ptr, num_nearest, low, high, count, above, above - above, top_k, total,
            True, TILE, NUM_THRESHOLDS,
        )  # fmt: skip
        of_k = high.to(tl.float32, bitcast=True).to(tl.float64)
        total = above + (top_k - count).to(tl.float64) * of_k
        low = high - 1
        high = tl.full([], BITS_OF_INFINITY, tl.int32)
        above = total - total
    most_mass = tl.load(top_p_ptr + row) * total
    high, _, _ = _smallest_bits(
        nearest_ptr, num_nearest, low, high, count, above, above, top_k, most_mass,
        False, TILE, NUM_THRESHOLDS,
    )  # fmt: skip
    tl.store(threshold_ptr + row, high.to(tl.float32, bitcast=True))


@triton.jit
def _smallest_bits(
    nearest_ptr, num_nearest, low, high, count, mass, mass_before, top_k, most_mass,
    BY_COUNT: tl.constexpr, TILE: tl.constexpr, NUM_THRESHOLDS: tl.constexpr,
):  # fmt: skip
    """Return the smallest bits above `low`, up to `high`, with few enough weights above them. Also return how many
    weights are above them, and their sum.

    Few enough is fewer than `top_k`, or a sum below `most_mass`. `count` and `mass` are of the weights above `high`,
    and `mass_before` is the sum of those that are not gathered.
    """
    while high - low > 1:
        threshold_K = _between(low, high, NUM_THRESHOLDS)
        count_KJ = tl.full([NUM_THRESHOLDS, TILE], 0, tl.int32)
        mass_KJ = tl.full([NUM_THRESHOLDS, TILE], 0, tl.float64)
        for first in range(0, num_nearest, TILE):
            count_KJ, mass_KJ = _add_tile(
                nearest_ptr, first, num_nearest, threshold_K, count_KJ, mass_KJ, TILE
            )
        count_K = tl.sum(count_KJ, axis=1)
        mass_K = mass_before + tl.sum(mass_KJ, axis=1)
        nearest = _nearest(count_K < top_k if BY_COUNT else mass_K < most_mass, NUM_THRESHOLDS)
        low, high = _at(threshold_K, nearest - 1), _at(threshold_K, nearest)
        count, mass = _at(count_K, nearest), _at(mass_K, nearest)
    return high, count, mass


@triton.jit
def _last_range(
    top_k_ptr, top_p_ptr, thresholds_ptr, counts_ptr, masses_ptr, row, vocab_size, num_chunks,
    NUM_THRESHOLDS: tl.constexpr, CHUNKS_POW2: tl.constexpr,
):  # fmt: skip
    """Return the range of bits, above a low and up to a high, that a pass leaves to one row's search.

    Also return how many of the row's weights are above it, their sum, and how many of each chunk are to be gathered
    [C].
    """
    threshold, chunk_C = tl.arange(0, NUM_THRESHOLDS), tl.arange(0, CHUNKS_POW2)
    place_CK = (row * num_chunks + chunk_C)[:, None] * NUM_THRESHOLDS + threshold[None, :]
    valid_CK = (chunk_C < num_chunks)[:, None] & (threshold >= 0)[None, :]
    threshold_K = tl.load(thresholds_ptr + row * NUM_THRESHOLDS + threshold)
    count_CK = tl.load(counts_ptr + place_CK, mask=valid_CK, other=0)
    count_K = tl.sum(count_CK, axis=0)
    mass_K = tl.sum(tl.load(masses_ptr + place_CK, mask=valid_CK, other=0.0), axis=0)
    top_k = tl.load(top_k_ptr + row)
    has_top_k = top_k < vocab_size
    is_enough_K = (has_top_k & (count_K < top_k)) | ((not has_top_k) & (mass_K < tl.load(top_p_ptr + row)))
    nearest = _nearest(is_enough_K, NUM_THRESHOLDS)
    above_low_C = tl.sum(tl.where((threshold == nearest - 1)[None, :], count_CK, 0), axis=1)
    above_high_C = tl.sum(tl.where((threshold == nearest)[None, :], count_CK, 0), axis=1)
    held_C = above_low_C - tl.where(has_top_k, 0, above_high_C)
    low, high = _at(threshold_K, nearest - 1), _at(threshold_K, nearest)
    return low, high, _at(count_K, nearest), _at(mass_K, nearest), held_C


@triton.jit
def _add_tile(values_ptr, first, end, threshold_K, count_KJ, mass_KJ, TILE: tl.constexpr):
    """Add to the number and the sum of the weights above each threshold those of a tile."""
    offset_1J = first + tl.arange(0, TILE)[None, :]
    # -1 has negative bits.
    weight_1J = tl.load(values_ptr + offset_1J, mask=offset_1J < end, other=-1.0)
    is_above_KJ = weight_1J.to(tl.int32, bitcast=True) > threshold_K[:, None]
    mass_KJ = tl.where(is_above_KJ, mass_KJ + weight_1J.to(tl.float64), mass_KJ)
    return count_KJ + is_above_KJ.to(tl.int32), mass_KJ


@triton.jit
def _between(low, high, NUM_THRESHOLDS: tl.constexpr):
    """Return thresholds [K] from `low` to `high`, both included."""
    step = (high - low + NUM_THRESHOLDS - 2) // (NUM_THRESHOLDS - 1)
    return tl.minimum(low + tl.arange(0, NUM_THRESHOLDS) * step, high)


@triton.jit
def _nearest(is_enough_K, NUM_THRESHOLDS: tl.constexpr):
    """Return the index of the first threshold that is enough. The first of all never is, and the last always."""
    return tl.minimum(tl.maximum(tl.sum(1 - is_enough_K.to(tl.int32), axis=0), 1), NUM_THRESHOLDS - 1)


@triton.jit
def _at(value_K, index):
    return tl.sum(tl.where(tl.arange(0, value_K.shape[0]) == index, value_K, 0), axis=0)
