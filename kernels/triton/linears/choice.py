"""Tile sizes of products with quantised weights, and how many programs share their columns. Imports no triton.

Nothing is tried at run time. The sizes are those whose compiled code spills nothing and keeps tiles in flight on every
GPU of tests/nightly/kernels/compile_linears.py. With int4 on an H100, three stages took 3 to 14 % less time than four,
and four programs a multiprocessor 4 % less than two. 8 bits and other GPUs were not compared. Larger tiles were faster
for 64 tokens (128 outputs, 8 warps, 4 stages: 9 % less). Their code for other GPUs was not looked at, so they are not
used.
"""

import functools
from dataclasses import dataclass

import torch

DEQUANTISE_FROM_TOKENS = 512
"""From so many tokens on, a weight whose inputs stay in full precision is written out in their type and multiplied so.
On an H100 the product of a weight in 4 bits took 2.4 times as long as that of bf16 for 2,048 tokens, since each tile of
tokens unpacks the weight anew. Where writing it out begins to pay was estimated from those times, and not measured."""
DEQUANTISED_BYTES = 32 << 20
"""Memory for the part of a weight that is written out at once. It stays in an H100's L2 cache of 50 MB."""
DEQUANTISED_OUTPUTS, DEQUANTISE_WARPS = 32, 4
"""Outputs that a program writes out, and its warps."""
WARM_UP_TOKENS = (1, 17, 65)
"""One number of tokens for each size of tiles. A prompt of DEQUANTISE_FROM_TOKENS warms up what writes a weight out."""
MIN_UNITS_A_SPLIT = 4
"""A program that reads fewer units fills its pipeline and is over."""
MAX_SPLITS = 16
PROGRAMS_A_MULTIPROCESSOR = 4
"""Programs of a split product that should be there for each multiprocessor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTiles:
    """The shape of one program: outputs, tokens, warps, pipeline stages."""

    outputs: int
    tokens: int
    warps: int
    stages: int


_FEW = LinearTiles(outputs=64, tokens=16, warps=4, stages=3)
_SOME = LinearTiles(outputs=64, tokens=64, warps=4, stages=3)
_MANY = LinearTiles(outputs=128, tokens=128, warps=8, stages=3)
_MANY_IN_GROUPS = LinearTiles(outputs=128, tokens=64, warps=8, stages=3)
"""Widening 8 bits, subtracting zero points and scaling each group takes registers: 128 x 128 spilled on an A100."""
_FLOAT32 = LinearTiles(outputs=32, tokens=16, warps=4, stages=2)
"""Without tensor cores. No model with a quantised weight runs in fp32 on a GPU for speed."""


def linear_tiles(
    num_tokens: int, dtype: torch.dtype, *, widens_groups: bool, has_wide_products: bool
) -> LinearTiles:
    """Return the tiles of a product.

    `dtype` is that of the inputs before they are quantised. `widens_groups` says that numbers of 8 bits are widened,
    and scaled by groups. `has_wide_products` is for the GPU: see `has_wide_products`.
    """
    if dtype == torch.float32:
        return _FLOAT32
    many = _MANY_IN_GROUPS if widens_groups and not has_wide_products else _MANY
    return next((tiles for tiles in (_FEW, _SOME) if num_tokens <= tiles.tokens), many)


def units_a_split(num_tiles: int, num_units: int, num_multiprocessors: int) -> int:
    """Return how many units one program takes, so that there are programs for the whole GPU.

    `num_tiles` counts the tiles of the result. Parts are later summed in their order.
    """
    wanted = -(-PROGRAMS_A_MULTIPROCESSOR * num_multiprocessors // num_tiles)
    splits = max(1, min(wanted, MAX_SPLITS, num_units // MIN_UNITS_A_SPLIT))
    return -(-num_units // splits)


@functools.cache
def has_wide_products(device: torch.device) -> bool:
    """Return whether several warps multiply together: Hopper's and the data-centre Blackwell's instructions. Sums then
    take fewer registers, or none."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


@functools.cache
def multiprocessors_of(device: torch.device) -> int:
    """Return the multiprocessors of a GPU, or 2 for the interpreter, so that it splits some products of tests."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count
