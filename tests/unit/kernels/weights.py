"""Random quantised weights, inputs for them, and the comparison of their products."""

from dataclasses import fields

import torch
from blockyard.kernels.quantised import Fp8Weight, Int4Weight, Int8Weight, QuantisedWeight

from .rig import CPU, DEVICE, NAN, normal, seeded


def int4_weight(
    outputs: int,
    inputs: int,
    group_size: int,
    dtype: torch.dtype,
    *,
    has_zeros: bool = True,
    has_order: bool = False,
) -> Int4Weight:
    rng, groups = seeded(outputs + inputs + group_size), inputs // group_size
    packed_OI = torch.randint(0, 256, (outputs, inputs // 2), generator=rng, dtype=torch.uint8)
    scale_OG = torch.rand(outputs, groups, generator=rng) * 0.02 + 0.01
    zero_OG = torch.randint(0, 16, (outputs, groups), generator=rng, dtype=torch.uint8)
    return Int4Weight(
        packed_OI=packed_OI,
        scale_OG=scale_OG,
        zero_OG=zero_OG if has_zeros else torch.full_like(zero_OG, 8),
        group_size=group_size,
        order_I=torch.randperm(inputs, generator=rng, dtype=torch.int32) if has_order else None,
        dtype=dtype,
    )


def int8_weight(
    outputs: int,
    inputs: int,
    group_size: int,
    dtype: torch.dtype,
    *,
    has_zeros: bool = False,
    has_order: bool = False,
) -> Int8Weight:
    rng, groups = seeded(outputs + inputs + group_size), inputs // group_size
    zero_OG = torch.randint(-128, 128, (outputs, groups), generator=rng, dtype=torch.int8)
    return Int8Weight(
        weight_OI=torch.randint(-128, 128, (outputs, inputs), generator=rng, dtype=torch.int8),
        scale_OG=torch.rand(outputs, groups, generator=rng) * 0.001 + 0.0005,
        zero_OG=zero_OG if has_zeros else None,
        group_size=group_size,
        order_I=torch.randperm(inputs, generator=rng, dtype=torch.int32) if has_order else None,
        dtype=dtype,
    )


def fp8_weight(
    outputs: int, inputs: int, block_shape: tuple[int, int] | None, dtype: torch.dtype
) -> Fp8Weight:
    rng, shape = seeded(outputs + inputs), (outputs,)
    if block_shape is not None:
        shape = (-(-outputs // block_shape[0]), -(-inputs // block_shape[1]))
    return Fp8Weight(
        weight_OI=torch.randn(outputs, inputs, generator=rng).to(torch.float8_e4m3fn),
        scale=torch.rand(shape, generator=rng) * 0.1 + 0.05,
        block_shape=block_shape,
        dtype=dtype,
    )


def moved(weight: QuantisedWeight, device: torch.device = DEVICE) -> QuantisedWeight:
    values = {field.name: getattr(weight, field.name) for field in fields(weight)}
    tensors = {name: value.to(device) for name, value in values.items() if isinstance(value, torch.Tensor)}
    return type(weight)(**values | tensors)


def inputs_for(weight: QuantisedWeight, rows: int) -> torch.Tensor:
    """Return inputs in rows that lie apart, with NaN between them."""
    wide = torch.full((rows, weight.shape[1] + 16), NAN)
    wide[:, : weight.shape[1]] = normal(rows, weight.shape[1], on=CPU)
    return wide.to(DEVICE, weight.dtype)[:, : weight.shape[1]]


def assert_product(result: torch.Tensor, expected: torch.Tensor) -> None:
    """The oracle rounds the weight to its type, and the kernels round nothing but the result."""
    share = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[result.dtype]
    largest = max(0.1, float(expected.abs().max()))  # A lone product may be near 0.
    torch.testing.assert_close(result.float(), expected, atol=share * largest, rtol=0)
