"""Triton's linears with weights of 4 or 8 bits, against the weight as plain numbers."""

from collections.abc import Iterator

import pytest
import torch
from blockyard.kernels.kv_pool import quantise
from blockyard.kernels.quantised import Fp8Weight, Int4Weight, Int8Weight, QuantisedWeight, dequantised
from blockyard.kernels.triton.linears.inputs import launch_quantise_inputs
from blockyard.kernels.triton.linears.launches import launch_quantised_linear
from blockyard.kernels.triton.linears.weights import tiled

# The oracle rounds the weight to its type, and the kernels round nothing but the result.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def of_seed(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def int4_weight(
    outputs: int,
    inputs: int,
    group_size: int,
    dtype: torch.dtype,
    *,
    has_zeros: bool = True,
    has_order: bool = False,
) -> Int4Weight:
    rng = of_seed(outputs + inputs + group_size)
    groups = inputs // group_size
    return Int4Weight(
        packed_OI=torch.randint(0, 256, (outputs, inputs // 2), generator=rng, dtype=torch.uint8),
        scale_OG=torch.rand(outputs, groups, generator=rng) * 0.02 + 0.01,
        zero_OG=torch.randint(0, 16, (outputs, groups), generator=rng, dtype=torch.uint8)
        if has_zeros
        else torch.full((outputs, groups), 8, dtype=torch.uint8),
        group_size=group_size,
        order_I=torch.randperm(inputs, generator=rng, dtype=torch.int32) if has_order else None,
        dtype=dtype,
    )


def int8_weight(
    outputs: int, inputs: int, group_size: int, dtype: torch.dtype, *, has_zeros: bool = False
) -> Int8Weight:
    rng = of_seed(outputs + inputs + group_size)
    groups = inputs // group_size
    zero_OG = torch.randint(-128, 128, (outputs, groups), generator=rng, dtype=torch.int8)
    return Int8Weight(
        weight_OI=torch.randint(-128, 128, (outputs, inputs), generator=rng, dtype=torch.int8),
        scale_OG=torch.rand(outputs, groups, generator=rng) * 0.001 + 0.0005,
        zero_OG=zero_OG if has_zeros else None,
        group_size=group_size,
        order_I=None,
        dtype=dtype,
    )


def fp8_weight(
    outputs: int, inputs: int, block_shape: tuple[int, int] | None, dtype: torch.dtype
) -> Fp8Weight:
    rng = of_seed(outputs + inputs)
    shape = (
        (outputs,) if block_shape is None else (-(-outputs // block_shape[0]), -(-inputs // block_shape[1]))
    )
    return Fp8Weight(
        weight_OI=torch.randn(outputs, inputs, generator=rng).to(torch.float8_e4m3fn),
        scale=torch.rand(shape, generator=rng) * 0.1 + 0.05,
        block_shape=block_shape,
        dtype=dtype,
    )


def weights(dtype: torch.dtype) -> Iterator[tuple[str, QuantisedWeight]]:
    """Yield a weight of every scheme. Outputs and inputs are no multiples of a tile where the scheme allows it."""
    yield "int4, groups of 32", int4_weight(65, 96, 32, dtype)
    yield "int4, groups of 64", int4_weight(48, 192, 64, dtype)
    yield "int4, groups of 128", int4_weight(130, 1152, 128, dtype)
    yield "int4, groups of 256", int4_weight(16, 512, 256, dtype)
    yield "int4, one group", int4_weight(33, 200, 200, dtype)
    yield "int4, symmetric", int4_weight(40, 256, 128, dtype, has_zeros=False)
    yield "int4, act order", int4_weight(40, 256, 64, dtype, has_order=True)
    yield "int8, one group", int8_weight(66, 200, 200, dtype)
    yield "int8, groups", int8_weight(31, 384, 128, dtype)
    yield "int8, zero points", int8_weight(17, 256, 64, dtype, has_zeros=True)
    yield "fp8, outputs", fp8_weight(65, 140, None, dtype)
    yield "fp8, blocks", fp8_weight(200, 330, (128, 128), dtype)
    yield "fp8, blocks of 64", fp8_weight(70, 96, (32, 64), dtype)


NAMES = [name for name, _ in weights(torch.float32)]


def of(name: str, dtype: torch.dtype, device: torch.device) -> QuantisedWeight:
    return moved(dict(weights(dtype))[name], device)


def moved(weight: QuantisedWeight, device: torch.device) -> QuantisedWeight:
    fields = {name: getattr(weight, name) for name in weight.__dataclass_fields__}
    return type(weight)(
        **{
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in fields.items()
        }
    )


def inputs_for(weight: QuantisedWeight, rows: int, device: torch.device) -> torch.Tensor:
    """Return inputs in rows that lie apart, with NaN between them."""
    wide = torch.full((rows, weight.shape[1] + 16), float("nan"))
    wide[:, : weight.shape[1]] = torch.randn(rows, weight.shape[1], generator=of_seed(rows))
    return wide.to(device, weight.dtype)[:, : weight.shape[1]]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", NAMES)
def test_the_product_is_that_of_the_weight_as_plain_numbers(
    device: torch.device, name: str, dtype: torch.dtype
) -> None:
    weight = of(name, dtype, device)
    layout = tiled(weight)
    bias_O = torch.randn(weight.shape[0], generator=of_seed(1)).to(device, dtype)
    plain_OI = dequantised(weight).float()
    for rows, bias in ((1, None), (3, bias_O), (16, bias_O), (65, None)):
        x_TI = inputs_for(weight, rows, device)
        result = launch_quantised_linear(x_TI, layout, bias)
        expected = torch.nn.functional.linear(x_TI.float(), plain_OI, None if bias is None else bias.float())
        assert result.dtype == dtype
        peak = float(expected.abs().max())
        torch.testing.assert_close(result.float(), expected, atol=TOLERANCES[dtype] * peak, rtol=0)
