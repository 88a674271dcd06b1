"""The plan of one step's attention: which rows attend to which tokens, where the tokens lie, and the work items.

Owns the arithmetic from query lengths, context lengths and block tables to slots and positions. Pure numpy, done once a
step and shared by all layers. It makes tensors only at the end, from one buffer, so one copy takes them to the device.
Does not own how the work is cut (items.py). Launches nothing and knows no backend.

Under a window the query at position i sees the keys j with i - window < j <= i, itself included. A step is
planned without a window. `AttentionPlan.windowed` then derives the plan for the layers that have one. Its items begin
at the first key that one of their queries sees. A window changes which keys are read, and not where tokens lie. Blocks
wholly behind it stay in the table, because the prefix cache must stay closed under prefixes.

Shapes: T tokens in the step (padding included), R sequences (rows), B blocks in the longest table. W decode items, X
prefill items, Y shared items, M their members, D decode rows, S partial slots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any, Self

import numpy as np
import torch
from blockyard.kernels.attention.items import DEFAULT_GROUP, DEFAULT_TARGET_PROGRAMS, NO_ITEMS, items_of_step
from blockyard.kernels.attention.shared_prefix import (
    Int32Array,
    Int64Array,
    SharedPrefixes,
    find_shared_prefixes,
)

PADDING_SLOT = -1
# Block tables are multiples of so many blocks wide. Triton compiles a kernel anew for a width of 1, for multiples of 16
# and for other widths, which would hold up a worker that serves.
TABLE_WIDTH_STEP = 16
# Views into the shared buffer start on 16 bytes, which Triton needs for its widest loads.
_ALIGNMENT_BYTES = 16

IntArray = Int32Array | Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """Everything that the attention of one step needs besides queries and pool. Decode rows come first, then prefill
    rows.

    The queries of a row are its last `query_len` positions. Entries of the block table beyond a row's own blocks are
    arbitrary.
    """

    block_size: int
    num_kv_heads: int
    group: int
    """Query heads of each kv head."""
    target_programs: int
    window: int | None
    """Tokens that a query sees, itself included. None: it sees all keys before it."""
    has_items: bool
    """False: the items below are empty, for backends that walk the rows instead."""
    num_decodes: int
    num_partials: int
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    query_starts_R1: torch.Tensor  # int32
    context_lens_R: torch.Tensor  # int32
    block_table_RB: torch.Tensor  # int32
    slot_mapping_T: torch.Tensor  # int64, PADDING_SLOT where nothing is written
    positions_T: torch.Tensor  # int64, 0 for padding
    decode_items_W6: torch.Tensor  # int32
    prefill_items_X6: torch.Tensor  # int32, most keys first
    shared_items_Y5: torch.Tensor
    """int32, over the keys that members share. Empty under a window that hides keys, and for `of_last_queries`."""
    shared_members_M: torch.Tensor  # int32, decode rows
    partial_starts_D1: torch.Tensor
    """int32. Decode row i owns the partial slots from [i] up to [i + 1]: none if one item computes it alone."""

    @property
    def num_rows(self) -> int:
        return len(self.query_lens)

    @property
    def num_query_tokens(self) -> int:
        """Return the number of query tokens: T without padding."""
        return sum(self.query_lens)

    def first_visible_key(self, row: int) -> int:
        """Return the first key that the row's first query sees. No query of the row sees an earlier one."""
        first_position = self.context_lens[row] - self.query_lens[row]
        return 0 if self.window is None else max(0, first_position - self.window + 1)

    def windowed(self, window: int) -> Self:
        """Return this step under a window of so many tokens, or the plan itself if the window hides nothing.

        Call it once a step for each distinct window of a model. Raises ValueError for a window below 1.
        """
        if window < 1:
            raise ValueError(f"a window of {window} tokens: a query sees itself, so at least 1")
        if self.window is None and window >= max(self.context_lens, default=0):
            return self
        query_R = np.asarray(self.query_lens, dtype=np.int64)
        items = self._items(query_R, window)
        tensors = _to_device(items, self.positions_T.device)
        return replace(
            self,
            window=window,
            **_of_items(items, tensors),
        )

    def of_last_queries(self) -> Self:
        """Return this step as if each row had its last query alone and wrote nothing. A model's last layer uses it when
        no other query's output is wanted. It has no items over a shared prefix."""
        query_R = np.ones(self.num_rows, dtype=np.int64)
        items = self._items(query_R, self.window)
        tensors = _to_device(
            {
                "slots": np.full(self.num_rows, PADDING_SLOT, dtype=np.int64),
                "positions": np.asarray(self.context_lens, dtype=np.int64) - 1,
                "starts": np.arange(self.num_rows + 1, dtype=np.int32),
                **items,
            },
            self.positions_T.device,
        )
        return replace(
            self,
            num_decodes=self.num_rows,
            query_lens=(1,) * self.num_rows,
            query_starts_R1=tensors["starts"],
            slot_mapping_T=tensors["slots"],
            positions_T=tensors["positions"],
            **_of_items(items, tensors),
        )

    def _items(self, query_R: Int64Array, window: int | None) -> Mapping[str, Int32Array]:
        """Return the items of rows with `query_R` queries each, without a shared prefix."""
        if not self.has_items:
            return NO_ITEMS
        return items_of_step(
            query_R,
            np.asarray(self.context_lens, dtype=np.int64),
            window,
            SharedPrefixes.none(),
            self.num_kv_heads,
            self.group,
            self.target_programs,
        )


def plan_attention(
    *,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    device: torch.device | str,
    num_kv_heads: int,
    padded_tokens: int | None = None,
    group: int = DEFAULT_GROUP,
    target_programs: int = DEFAULT_TARGET_PROGRAMS,
) -> AttentionPlan:
    """Plan one step from lists. `context_lens` count the tokens in the KV cache including this step's queries.

    `padded_tokens` lengthens the slot mapping with PADDING_SLOT to that many tokens. Raises ValueError where the rows
    contradict each other: lengths that do not match, decode after prefill, or a table too short for its context.
    """
    context_R = np.asarray(context_lens, dtype=np.int64)
    _check_tables(context_R, block_tables, block_size)
    return plan_rows(
        np.asarray(query_lens, dtype=np.int64),
        context_R,
        _dense_table(block_tables),
        block_size=block_size,
        device=device,
        num_kv_heads=num_kv_heads,
        padded_tokens=padded_tokens,
        group=group,
        target_programs=target_programs,
    )


def plan_rows(
    query_R: Int64Array,
    context_R: Int64Array,
    table_RB: Int32Array,
    *,
    block_size: int,
    device: torch.device | str,
    num_kv_heads: int,
    padded_tokens: int | None = None,
    group: int = DEFAULT_GROUP,
    target_programs: int = DEFAULT_TARGET_PROGRAMS,
    with_items: bool = True,
) -> AttentionPlan:
    """Plan one step as `plan_attention` does, from arrays that stay unchanged while the plan lives. `with_items=False`
    leaves out the work items."""
    num_decodes = int((query_R == 1).sum())
    _check_rows(query_R, context_R, table_RB, block_size, num_decodes)
    is_decodes = num_decodes == len(query_R)
    starts_R1 = np.arange(num_decodes + 1) if is_decodes else np.concatenate(([0], np.cumsum(query_R)))
    positions_T, slots_T = _positions_and_slots(query_R, context_R, starts_R1, table_RB, block_size)
    padding = 0 if padded_tokens is None else padded_tokens - len(positions_T)
    if padding < 0:
        raise ValueError(
            f"padded_tokens={padded_tokens} is less than the {len(positions_T)} tokens of the step"
        )
    items = NO_ITEMS
    if with_items:
        shared = find_shared_prefixes(table_RB, context_R[:num_decodes], block_size)
        items = items_of_step(query_R, context_R, None, shared, num_kv_heads, group, target_programs)
    target = torch.device(device)
    arrays: dict[str, IntArray] = {
        "slots": _padded(slots_T, padding, PADDING_SLOT),
        "positions": _padded(positions_T, padding, 0),
        "starts": starts_R1.astype(np.int32),
        "contexts": context_R.astype(np.int32),
        "table": table_RB,
    }
    if with_items:
        tensors = _to_device({**arrays, **items}, target)
    else:
        tensors = {**_to_device(arrays, target), **_no_items(target)}
    return AttentionPlan(
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        group=group,
        target_programs=target_programs,
        window=None,
        has_items=with_items,
        num_decodes=num_decodes,
        query_lens=(1,) * num_decodes if is_decodes else tuple(query_R.tolist()),
        context_lens=tuple(context_R.tolist()),
        query_starts_R1=tensors["starts"],
        context_lens_R=tensors["contexts"],
        block_table_RB=tensors["table"],
        slot_mapping_T=tensors["slots"],
        positions_T=tensors["positions"],
        **_of_items(items, tensors),
    )


def _of_items(items: Mapping[str, Int32Array], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the fields of a plan that hold its work items."""
    return {
        "num_partials": int(items["partials"][-1]),
        "decode_items_W6": tensors["decode"],
        "prefill_items_X6": tensors["prefill"],
        "shared_items_Y5": tensors["shared"],
        "shared_members_M": tensors["members"],
        "partial_starts_D1": tensors["partials"],
    }


def _check_tables(context_R: Int64Array, block_tables: Sequence[Sequence[int]], block_size: int) -> None:
    if len(context_R) != len(block_tables):
        raise ValueError(f"{len(context_R)} contexts, {len(block_tables)} block tables")
    table_lens_R = np.fromiter(map(len, block_tables), dtype=np.int64, count=len(block_tables))
    short = np.flatnonzero(table_lens_R * block_size < context_R)
    if len(short):
        row = int(short[0])
        raise ValueError(f"row {row}: {table_lens_R[row]} blocks of {block_size} for {context_R[row]} tokens")


def _check_rows(
    query_R: Int64Array, context_R: Int64Array, table_RB: Int32Array, block_size: int, num_decodes: int
) -> None:
    if not len(query_R) == len(context_R) == len(table_RB):
        raise ValueError(
            f"{len(query_R)} query lengths, {len(context_R)} contexts, {len(table_RB)} block tables"
        )
    if (num_decodes < len(query_R) and (query_R < 1).any()) or (context_R < query_R).any():
        raise ValueError(f"need 1 <= query length <= context length, got {query_R} and {context_R}")
    if num_decodes < len(query_R) and query_R[:num_decodes].max(initial=1) > 1:
        raise ValueError(f"decode rows (query length 1) must come before prefill rows, got {query_R}")
    longest = int(context_R.max(initial=0))
    if longest > table_RB.shape[1] * block_size:
        raise ValueError(f"{table_RB.shape[1]} blocks of {block_size} for {longest} tokens")


def table_width(num_blocks: int) -> int:
    """Return the width of a block table that holds so many blocks."""
    return -(-num_blocks // TABLE_WIDTH_STEP) * TABLE_WIDTH_STEP


def _dense_table(block_tables: Sequence[Sequence[int]]) -> Int32Array:
    """Pack tables of uneven length into one array in one flat pass, because an array for each row costs more."""
    lens_R = np.fromiter(map(len, block_tables), dtype=np.int64, count=len(block_tables))
    width = table_width(int(lens_R.max(initial=0)))
    table_RB = np.zeros((len(block_tables), width), dtype=np.int32)
    flat = np.fromiter(chain.from_iterable(block_tables), dtype=np.int32, count=int(lens_R.sum()))
    table_RB[np.arange(width) < lens_R[:, None]] = flat
    return table_RB


def _positions_and_slots(
    query_R: Int64Array, context_R: Int64Array, starts_R1: Int64Array, table_RB: Int32Array, block_size: int
) -> tuple[Int64Array, Int64Array]:
    if starts_R1[-1] == len(query_R):  # one token each
        positions_T = context_R - 1
        blocks_T = table_RB[starts_R1[:-1], positions_T // block_size].astype(np.int64)
        return positions_T, blocks_T * block_size + positions_T % block_size
    first_position_R = context_R - query_R - starts_R1[:-1]
    positions_T = np.arange(starts_R1[-1]) + np.repeat(first_position_R, query_R)
    row_T = np.repeat(np.arange(len(query_R)), query_R)
    blocks_T = table_RB[row_T, positions_T // block_size].astype(np.int64)
    return positions_T, blocks_T * block_size + positions_T % block_size


def _padded(array_T: Int64Array, padding: int, value: int) -> Int64Array:
    return np.pad(array_T, (0, padding), constant_values=value) if padding else array_T


@cache
def _no_items(device: torch.device) -> Mapping[str, torch.Tensor]:
    """Return the empty items on a device. No caller writes to them."""
    return _to_device(NO_ITEMS, device)


def _to_device(arrays: Mapping[str, IntArray], device: torch.device) -> dict[str, torch.Tensor]:
    """Return arrays as tensors on the device. On a CPU the tensors are views of the arrays themselves."""
    if device.type == "cpu":
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    return _in_one_copy(arrays, device)


def _in_one_copy(arrays: Mapping[str, IntArray], device: torch.device) -> dict[str, torch.Tensor]:
    """Copy arrays to the device as views of one byte buffer, in one asynchronous copy."""
    offsets: list[int] = []
    size = 0
    for array in arrays.values():
        offsets.append(size)
        size += -(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    host_bytes = host.numpy()
    for offset, array in zip(offsets, arrays.values(), strict=True):
        host_bytes[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    buffer = host.to(device, non_blocking=True)
    buffers = {4: buffer.view(torch.int32), 8: buffer.view(torch.int64)}
    # One operation each, where slices and views would be three.
    return {
        name: buffers[array.itemsize].as_strided(array.shape, (*array.shape[1:], 1), offset // array.itemsize)
        for offset, (name, array) in zip(offsets, arrays.items(), strict=True)
    }
