"""Tile sizes of the Triton attention kernels, chosen by launch, head size, data type and shared memory.

The group counts for decodes alone: prompts pack any group into the same rows. Nothing is tried at run time. We
chose sizes whose compiled code spills nothing in a loop and loads the next keys and values while a tile is computed.
Of these the fastest on an H100 was taken (bench/reports/summary.md). Imports no triton.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from blockyard.kernels.kv_pool import is_quantised

# tl.dot multiplies no fewer rows.
MIN_DOT_ROWS = 16
# Shared memory that one program may use, in bytes.
DATACENTER_SHARED_BYTES = 160 << 10
"""A100 has 163 KB and Hopper 227 KB. Consumer GPUs have 99 KB."""

Launch = Literal["decode", "prefill", "shared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """The shape of one attention program: packed query rows, keys a tile, warps, pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


_DECODE = Tiles(rows=MIN_DOT_ROWS, keys=64, warps=4, stages=3)
_PREFILL = Tiles(rows=128, keys=64, warps=8, stages=3)
# Keys of a tile with 99 KB of shared memory, with heads of more than 128, or of a decode over a pool in 8 bits. Two
# programs of a decode then fit one multiprocessor. Without Hopper's matrix instructions, 64 keys of a prompt would need
# more registers than there are. On an H100, 64 decodes of 2,048 tokens in int8 took 125 us, and 138 us with 64 keys.
_FEW_KEYS = 32


@functools.cache
def attention_tiles(
    launch: Launch, *, group: int, head_dim: int, dtype: torch.dtype, is_quantised: bool, shared_bytes: int
) -> Tiles:
    """Return the tiles of a launch. `dtype` is the queries'. `shared_bytes` is what one program may use."""
    if dtype == torch.float32:
        rows = _decode_rows(group) if launch == "decode" else MIN_DOT_ROWS
        return Tiles(rows=rows, keys=_fp32_keys(head_dim), warps=4, stages=2)
    if launch != "decode" and head_dim > 128:
        return Tiles(rows=64, keys=32, warps=8, stages=3)
    tiles = replace(_DECODE, rows=_decode_rows(group)) if launch == "decode" else _PREFILL
    is_small = (
        head_dim > 128 or shared_bytes < DATACENTER_SHARED_BYTES or (launch == "decode" and is_quantised)
    )
    return replace(tiles, keys=_FEW_KEYS) if is_small else tiles


def _decode_rows(group: int) -> int:
    """Return the rows of a decode's program: the heads of its group."""
    return max(MIN_DOT_ROWS, 1 << (group - 1).bit_length())


def _fp32_keys(head_dim: int) -> int:
    """Return the keys of a tile for fp32. Without tensor cores larger tiles spill: 64 x 32 at head size 128 spilled 1.8
    KB a thread."""
    return 32 if head_dim <= 64 else 16


@functools.cache
def shared_bytes_of(device: torch.device) -> int:
    """Return the shared memory that one program may use on a GPU. The interpreter, on a CPU, has no limit."""
    if device.type != "cuda":
        return DATACENTER_SHARED_BYTES
    # CUDA keeps 1 KB a program for itself.
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor - (1 << 10)


def widens(q_TND: torch.Tensor, kv_pool: torch.Tensor) -> bool:
    """Return whether to widen operands: under the interpreter, which multiplies bf16 as bit patterns. Beside fp16, a
    quantised pool's values are bf16."""
    has_bf16 = q_TND.dtype == torch.bfloat16 or (q_TND.dtype == torch.float16 and is_quantised(kv_pool))
    return has_bf16 and q_TND.device.type == "cpu"


def launch_options(tiles: Tiles) -> dict[str, Any]:
    return {"num_warps": tiles.warps, "num_stages": tiles.stages}
