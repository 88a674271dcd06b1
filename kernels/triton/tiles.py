"""Tile sizes of the Triton kernels: a few rules by head size, group and the queries' data type.

The group counts for decodes alone: prompts pack any group into the same rows. Nothing is tried at run time. The sizes
are derived from registers and shared memory, and not measured on a GPU yet. Imports no triton.
"""

from dataclasses import dataclass
from typing import Any

import torch
from blockyard.kernels.kv_pool import is_quantised

# tl.dot multiplies no fewer rows.
MIN_DOT_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """The shape of one attention program: packed query rows, keys a tile, warps, loads in flight."""

    rows: int
    keys: int
    warps: int
    stages: int


def decode_tiles(group: int, head_dim: int, dtype: torch.dtype) -> Tiles:
    """Return tiles for one query token: its group of heads in 16 rows. Reading keys dominates, so the tile is wide."""
    rows = max(MIN_DOT_ROWS, 1 << (group - 1).bit_length())
    if dtype == torch.float32:
        return Tiles(rows=rows, keys=_fp32_keys(head_dim), warps=4, stages=2)
    return Tiles(rows=rows, keys=64 if head_dim <= 128 else 32, warps=4, stages=2)


def prefill_tiles(head_dim: int, dtype: torch.dtype) -> Tiles:
    """Return tiles for prompts. Queries and two stages of keys and values stay under 99 KB, accumulators in
    registers."""
    if dtype == torch.float32:
        return Tiles(rows=MIN_DOT_ROWS, keys=_fp32_keys(head_dim), warps=4, stages=2)
    if head_dim > 128:
        return Tiles(rows=64, keys=32, warps=8, stages=2)
    return Tiles(rows=128, keys=64, warps=8, stages=2)


def _fp32_keys(head_dim: int) -> int:
    """Return the keys of a tile for fp32. Without tensor cores larger tiles spill: 64 x 32 at head size 128 spilled 1.8
    KB a thread."""
    return 32 if head_dim <= 64 else 16


def widens(q_TND: torch.Tensor, kv_pool: torch.Tensor) -> bool:
    """Return whether to widen operands: under the interpreter, which multiplies bf16 as bit patterns. Beside fp16, a
    quantised pool's values are bf16."""
    has_bf16 = q_TND.dtype == torch.bfloat16 or (q_TND.dtype == torch.float16 and is_quantised(kv_pool))
    return has_bf16 and q_TND.device.type == "cpu"


def launch_options(tiles: Tiles) -> dict[str, Any]:
    return {"num_warps": tiles.warps, "num_stages": tiles.stages}
