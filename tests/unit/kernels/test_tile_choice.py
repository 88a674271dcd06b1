"""How products and attention are cut into programs: what holds for every size and GPU."""

from typing import Any

import pytest
import torch
from blockyard.kernels.quantised import dequantised
from blockyard.kernels.triton.linears.choice import (
    MAX_SPLITS,
    MIN_UNITS_A_SPLIT,
    PROGRAMS_A_MULTIPROCESSOR,
    WARM_UP_TOKENS,
    LinearTiles,
    linear_tiles,
    units_a_split,
)
from blockyard.kernels.triton.linears.launches import launch_quantised_linear
from blockyard.kernels.triton.linears.weights import tiled
from blockyard.kernels.triton.tiles import MIN_DOT_ROWS, Launch, attention_tiles
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples

from .weights import assert_product, inputs_for, int4_weight, moved

CONSUMER_BYTES, A100_BYTES, HOPPER_BYTES = 99 << 10, 163 << 10, 227 << 10


@given(num_tiles=st.integers(1, 5000), num_units=st.integers(1, 300), num_multiprocessors=st.integers(1, 160))
def test_parts_are_few_and_not_tiny(num_tiles: int, num_units: int, num_multiprocessors: int) -> None:
    units = units_a_split(num_tiles, num_units, num_multiprocessors)
    splits = -(-num_units // units)
    assert 1 <= splits <= MAX_SPLITS
    assert (splits - 1) * units < num_units <= splits * units
    assert splits == 1 or units >= MIN_UNITS_A_SPLIT
    assert splits == 1 or num_tiles < PROGRAMS_A_MULTIPROCESSOR * num_multiprocessors


def test_a_small_product_has_programs_for_the_whole_gpu() -> None:
    """The product of 4,096 inputs and outputs with one token, on an H100."""
    tiles = linear_tiles(1, torch.bfloat16, widens_groups=False, has_wide_products=True)
    num_tiles = 4096 // tiles.outputs
    splits = -(-32 // units_a_split(num_tiles, 32, 132))
    assert 132 <= num_tiles * splits <= 4 * 132


@given(
    num_tokens=st.integers(1, 10_000),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    widens_groups=st.booleans(),
    has_wide_products=st.booleans(),
)
def test_every_size_of_tiles_is_warmed_up(
    num_tokens: int, dtype: torch.dtype, widens_groups: bool, has_wide_products: bool
) -> None:
    def tiles(tokens: int) -> LinearTiles:
        return linear_tiles(tokens, dtype, widens_groups=widens_groups, has_wide_products=has_wide_products)

    assert tiles(num_tokens) in map(tiles, WARM_UP_TOKENS)


@examples(12, deadline=None)
@given(
    rows=st.integers(1, 20),
    outputs=st.integers(1, 70),
    groups=st.integers(1, 5),
    group_size=st.sampled_from([32, 64, 96, 128]),
    options=st.fixed_dictionaries({"has_zeros": st.booleans(), "has_order": st.booleans()}),
)
def test_any_shape_is_multiplied(
    rows: int, outputs: int, groups: int, group_size: int, options: dict[str, bool]
) -> None:
    weight = moved(int4_weight(outputs, groups * group_size, group_size, torch.float16, **options))
    x_TI = inputs_for(weight, rows)
    result = launch_quantised_linear(x_TI, tiled(weight), None)
    assert_product(result, x_TI.float() @ dequantised(weight).float().T)


@given(
    launch=st.sampled_from(["decode", "prefill", "shared"]),
    group=st.integers(1, 64),
    head_dim=st.sampled_from([16, 32, 64, 128, 256]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    is_quantised=st.booleans(),
    shared_bytes=st.sampled_from([CONSUMER_BYTES, A100_BYTES, HOPPER_BYTES]),
)
def test_tiles_of_attention_hold_the_group_and_fit_shared_memory(
    launch: Launch, group: int, head_dim: int, dtype: torch.dtype, is_quantised: bool, shared_bytes: int
) -> None:
    options = {"is_quantised": is_quantised, "shared_bytes": shared_bytes}
    tiles = attention_tiles(launch, group=group, head_dim=head_dim, dtype=dtype, **options)
    assert tiles.rows >= MIN_DOT_ROWS
    assert tiles.rows & (tiles.rows - 1) == tiles.keys & (tiles.keys - 1) == 0
    assert launch != "decode" or tiles.rows >= group
    # Hopper's matrix instructions read a tile from shared memory while the next one's turn begins.
    kept = tiles.stages if shared_bytes == HOPPER_BYTES else tiles.stages - 1
    assert (tiles.rows + 2 * kept * tiles.keys) * head_dim * dtype.itemsize <= shared_bytes


@pytest.mark.parametrize("launch", ["decode", "prefill", "shared"])
def test_a_gpu_with_less_shared_memory_gets_fewer_keys(launch: Launch) -> None:
    options: dict[str, Any] = {"group": 4, "head_dim": 128, "dtype": torch.bfloat16, "is_quantised": False}
    keys = [
        attention_tiles(launch, shared_bytes=size, **options).keys for size in (CONSUMER_BYTES, HOPPER_BYTES)
    ]
    assert keys == [32, 64]
