"""The work items of one step's attention: which program reads which keys.

Attention is a list of work items. An item is six integers:

    row, first query token, end query token, first key, end key, partial slot

Query tokens count from the row's first query. Keys are positions in the row's context. A decode row of a long context
becomes several items, each with a partial slot, and one merge joins them. Partial slot -1 means that the item sees all
keys that it needs and writes the output itself. A prefill row becomes items of `PREFILL_ITEM_TOKENS` queries. A prefix
that many decode rows share becomes items over several rows (shared_prefix.py). The rows' own items begin after it, and
the same merge joins both.

Owns the balance between programs. Pure arithmetic in numpy: knows no blocks, tensors or backends.

Shapes: R sequences (rows), D decode rows, Q prefill rows. W decode items, X prefill items, Y shared items, M members of
shared items.
"""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from blockyard.kernels.attention.shared_prefix import Int32Array, Int64Array, SharedPrefixes, members_of_item

PREFILL_ITEM_TOKENS = 128
# A split reads at least this many keys. Below it, the merge costs more than the parallelism gains.
MIN_SPLIT_TOKENS = 256
# Splits are multiples of the kernels' largest key tile, so only the last tile of a row is not full.
SPLIT_ALIGNMENT_TOKENS = 64
# Most decode programs wanted in flight: four for each of an H100's or H200's 132 multiprocessors, which hold three.
DEFAULT_TARGET_PROGRAMS = 528
# Half as many are wanted while each of them reads no more keys than this. On an H100, 264 programs took 0.83 to 1.32 of
# the time of 528 below it, in most shapes less, and 0.87 to 1.27 above it, in most shapes more.
FEW_PROGRAMS_TOKENS = 4096
# Query heads of a kv head where the caller does not say. It sets how many decodes share an item, not their results.
DEFAULT_GROUP = 4
# The items of a step that is not cut into work items.
NO_ITEMS: Mapping[str, Int32Array] = MappingProxyType(
    {
        "decode": np.zeros((0, 6), dtype=np.int32),
        "prefill": np.zeros((0, 6), dtype=np.int32),
        "shared": np.zeros((0, 5), dtype=np.int32),
        "members": np.zeros(0, dtype=np.int32),
        "partials": np.zeros(1, dtype=np.int32),
    }
)


def items_of_step(
    query_R: Int64Array,
    context_R: Int64Array,
    window: int | None,
    shared: SharedPrefixes,
    num_kv_heads: int,
    group: int,
    target_programs: int,
) -> Mapping[str, Int32Array]:
    """Return the work items of decode rows [W, 6], of prefill rows [X, 6] and over shared prefixes [Y, 5] with their
    members [M]. `partials` [D + 1] says where each decode row's partial slots start.

    Decode row i owns the partial slots from `partials[i]` up to `partials[i + 1]`. Those of its shared prefix come
    first.
    """
    num_decodes = int((query_R == 1).sum())
    context_D = context_R[:num_decodes]
    begin_D = np.maximum(_first_keys(context_D - 1, window), shared.tokens_of_rows(num_decodes))
    members = members_of_item(group)
    total_reads = (int((context_D - begin_D).sum()) + shared.reads(members)) * num_kv_heads
    few_programs = -(-target_programs // 2)
    wanted = few_programs if total_reads <= FEW_PROGRAMS_TOKENS * few_programs else target_programs
    wanted_tokens = max(MIN_SPLIT_TOKENS, -(-total_reads // wanted))
    split_tokens = -(-wanted_tokens // SPLIT_ALIGNMENT_TOKENS) * SPLIT_ALIGNMENT_TOKENS
    shared_Y5, splits_M = shared.items(split_tokens, members)
    shared_splits_D = np.zeros(num_decodes, dtype=np.int64)
    shared_splits_D[shared.members_M] = splits_M
    decode_W6, partial_starts_D1 = _decode_items(context_D, begin_D, shared_splits_D, wanted_tokens)
    return {
        "decode": decode_W6,
        "prefill": NO_ITEMS["prefill"]
        if num_decodes == len(query_R)
        else _prefill_items(query_R, context_R, window, num_decodes),
        "shared": shared_Y5,
        "members": shared.members_M.astype(np.int32),
        "partials": partial_starts_D1,
    }


def _first_keys(position: Int64Array, window: int | None) -> Int64Array:
    """Return the first key that the query at each position sees."""
    return np.zeros_like(position) if window is None else np.maximum(position - window + 1, 0)


def _decode_items(
    context_D: Int64Array, begin_D: Int64Array, shared_splits_D: Int64Array, wanted_tokens: int
) -> tuple[Int32Array, Int32Array]:
    """Return the items [W, 6], and where each row's partial slots start [D + 1]. The keys that a row reads alone are
    cut into splits of about equal size. The total work sets the size, not the batch size. A row with splits of shared
    keys has partial slots for them and for its own."""
    keys_D = context_D - begin_D
    if keys_D.max(initial=0) <= wanted_tokens and not shared_splits_D.any():
        whole_D6 = _item_array(np.arange(len(keys_D)), 0, 1, begin_D, context_D, -1)
        return whole_D6, np.zeros(len(keys_D) + 1, dtype=np.int32)
    wanted_D = -(-keys_D // wanted_tokens)
    size_D = -(-keys_D // (wanted_D * SPLIT_ALIGNMENT_TOKENS)) * SPLIT_ALIGNMENT_TOKENS
    splits_D = -(-keys_D // size_D)
    partials_D = np.where(splits_D + shared_splits_D > 1, splits_D + shared_splits_D, 0)
    partial_starts_D1 = np.concatenate(([0], np.cumsum(partials_D)))

    row_W = np.repeat(np.arange(len(context_D)), splits_D)
    split_W = np.arange(len(row_W)) - np.repeat(np.cumsum(splits_D) - splits_D, splits_D)
    first_W = begin_D[row_W] + split_W * size_D[row_W]
    end_W = np.minimum(first_W + size_D[row_W], context_D[row_W])
    own_slot_W = partial_starts_D1[row_W] + shared_splits_D[row_W] + split_W
    slot_W = np.where(partials_D[row_W] > 0, own_slot_W, -1)
    return _item_array(row_W, 0, 1, first_W, end_W, slot_W), partial_starts_D1.astype(np.int32)


def _item_array(row_W: Int64Array, *others: Int64Array | int) -> Int32Array:
    """Return items [W, 6] from their six columns. A number stands for a column of that number."""
    items_W6 = np.empty((len(row_W), 6), dtype=np.int32)
    for column, values in enumerate((row_W, *others)):
        items_W6[:, column] = values
    return items_W6


def _prefill_items(
    query_R: Int64Array, context_R: Int64Array, window: int | None, num_decodes: int
) -> Int32Array:
    """Return items [X, 6] of at most PREFILL_ITEM_TOKENS queries, those with most keys first: short ones fill the gaps
    at the launch's end."""
    query_Q, context_Q = query_R[num_decodes:], context_R[num_decodes:]
    tiles_Q = -(-query_Q // PREFILL_ITEM_TOKENS)
    row_X = np.repeat(np.arange(len(query_Q)), tiles_Q)
    tile_X = np.arange(len(row_X)) - np.repeat(np.cumsum(tiles_Q) - tiles_Q, tiles_Q)
    first_X = tile_X * PREFILL_ITEM_TOKENS
    end_X = np.minimum(first_X + PREFILL_ITEM_TOKENS, query_Q[row_X])
    first_position_X = context_Q[row_X] - query_Q[row_X]
    begin_X = _first_keys(first_position_X + first_X, window)
    keys_X = first_position_X + end_X
    items_X6 = _item_array(row_X + num_decodes, first_X, end_X, begin_X, keys_X, -1)
    return items_X6[np.argsort(begin_X - keys_X, kind="stable")]
