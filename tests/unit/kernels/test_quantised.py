"""Layouts of quantised weights, and what they mean as plain numbers."""

import torch
from blockyard.kernels.quantised import Fp8Weight, Int4Weight, Int8Weight, dequantised


def test_int4_numbers_lie_low_half_first() -> None:
    weight = Int4Weight(
        packed_OI=torch.tensor([[0x21, 0x43]], dtype=torch.uint8),
        scale_OG=torch.tensor([[0.5, 2.0]]),
        zero_OG=torch.tensor([[1, 8]], dtype=torch.uint8),
        group_size=2,
        order_I=None,
        dtype=torch.float32,
    )
    assert weight.shape == (1, 4)
    assert dequantised(weight).tolist() == [[0.0, 0.5, -10.0, -8.0]]


def test_columns_return_to_the_order_of_the_inputs() -> None:
    weight = Int8Weight(
        weight_OI=torch.tensor([[1, 2, 3, 4]], dtype=torch.int8),
        scale_OG=torch.tensor([[1.0, 10.0]]),
        zero_OG=None,
        group_size=2,
        order_I=torch.tensor([2, 0, 3, 1], dtype=torch.int32),
        dtype=torch.bfloat16,
    )
    plain_OI = dequantised(weight)
    assert plain_OI.dtype == torch.bfloat16
    assert plain_OI.tolist() == [[2.0, 40.0, 1.0, 30.0]]


def test_fp8_blocks_may_be_cut_off() -> None:
    weight = Fp8Weight(
        weight_OI=torch.ones(3, 5).to(torch.float8_e4m3fn),
        scale=torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]),
        block_shape=(2, 2),
        dtype=torch.float32,
    )
    assert dequantised(weight).tolist() == [[1, 1, 2, 2, 3], [1, 1, 2, 2, 3], [4, 4, 5, 5, 6]]


def test_fp8_has_a_scale_for_each_output() -> None:
    weight = Fp8Weight(
        weight_OI=torch.full((2, 2), 0.5).to(torch.float8_e4m3fn),
        scale=torch.tensor([2.0, 4.0]),
        block_shape=None,
        dtype=torch.float16,
    )
    assert dequantised(weight).tolist() == [[1.0, 1.0], [2.0, 2.0]]
