"""Tiles of the attention kernels: what holds for every group, head size, data type and GPU."""

import pytest
import torch
from blockyard.kernels.triton.tiles import MIN_DOT_ROWS, Launch, attention_tiles
from hypothesis import given
from hypothesis import strategies as st

CONSUMER_BYTES, A100_BYTES, HOPPER_BYTES = 99 << 10, 163 << 10, 227 << 10


@given(
    launch=st.sampled_from(["decode", "prefill", "shared"]),
    group=st.integers(1, 64),
    head_dim=st.sampled_from([16, 32, 64, 128, 256]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    is_quantised=st.booleans(),
    shared_bytes=st.sampled_from([CONSUMER_BYTES, A100_BYTES, HOPPER_BYTES]),
)
def test_tiles_hold_the_group_and_fit_shared_memory(
    launch: Launch, group: int, head_dim: int, dtype: torch.dtype, is_quantised: bool, shared_bytes: int
) -> None:
    tiles = attention_tiles(
        launch,
        group=group,
        head_dim=head_dim,
        dtype=dtype,
        is_quantised=is_quantised,
        shared_bytes=shared_bytes,
    )
    assert tiles.rows >= MIN_DOT_ROWS
    assert tiles.rows & (tiles.rows - 1) == tiles.keys & (tiles.keys - 1) == 0
    assert launch != "decode" or tiles.rows >= group
    # Hopper's matrix instructions read a tile from shared memory while the next one's turn begins.
    kept = tiles.stages if shared_bytes == HOPPER_BYTES else tiles.stages - 1
    bytes_a_head = head_dim * dtype.itemsize
    assert (tiles.rows + 2 * kept * tiles.keys) * bytes_a_head <= shared_bytes


@pytest.mark.parametrize("launch", ["decode", "prefill", "shared"])
def test_a_gpu_with_less_shared_memory_gets_fewer_keys(launch: Launch) -> None:
    keys = [
        attention_tiles(
            launch,
            group=4,
            head_dim=128,
            dtype=torch.bfloat16,
            is_quantised=False,
            shared_bytes=shared_bytes,
        ).keys
        for shared_bytes in (CONSUMER_BYTES, HOPPER_BYTES)
    ]
    assert keys == [32, 64]
