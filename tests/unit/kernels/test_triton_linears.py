"""Triton's linears with weights of 4 or 8 bits, against the weight as plain numbers."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from blockyard.kernels.interface import Backend
from blockyard.kernels.kv_pool import quantise
from blockyard.kernels.quantised import Fp8Weight, Int4Weight, Int8Weight, QuantisedWeight, dequantised
from blockyard.kernels.triton.linears import launches
from blockyard.kernels.triton.linears.choice import DEQUANTISE_FROM_TOKENS
from blockyard.kernels.triton.linears.inputs import launch_quantise_inputs
from blockyard.kernels.triton.linears.launches import launch_quantised_linear
from blockyard.kernels.triton.linears.weights import TiledWeight, tiled

from bench.kernels.case import Bench
from bench.kernels.linear_cases import FORMS, linears

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


def assert_product(result: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCES[result.dtype] * float(expected.abs().max())
    torch.testing.assert_close(result.float(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", NAMES)
def test_the_product_is_that_of_the_weight_as_plain_numbers(
    triton_backend: Backend, device: torch.device, name: str, dtype: torch.dtype
) -> None:
    weight = of(name, dtype, device)
    packed = triton_backend.pack_linear(weight)
    assert isinstance(packed, TiledWeight)
    bias_O = torch.randn(weight.shape[0], generator=of_seed(1)).to(device, dtype)
    plain_OI = dequantised(weight).float()
    for rows, bias in ((1, None), (19, bias_O)):
        x_TI = inputs_for(weight, rows, device)
        result = triton_backend.linear(x_TI, packed, bias)
        assert result.dtype == dtype
        assert_product(result, F.linear(x_TI.float(), plain_OI, None if bias is None else bias.float()))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", NAMES)
def test_many_tokens_are_multiplied_by_the_weight_written_out(
    device: torch.device, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written out in parts, of which the last is smaller, it is the weight as plain numbers but for its rounding."""
    weight = of(name, dtype, device)
    outputs, inputs = weight.shape
    monkeypatch.setattr(launches, "DEQUANTISED_BYTES", 40 * inputs * dtype.itemsize)
    monkeypatch.setattr(launches, "quantised_linear_kernel", None)
    bias_O = torch.randn(outputs, generator=of_seed(1)).to(device, dtype)
    x_TI = inputs_for(weight, DEQUANTISE_FROM_TOKENS, device)
    plain_OI = dequantised(weight).float()
    for bias in (None, bias_O):
        result = launch_quantised_linear(x_TI, tiled(weight), bias)
        assert result.dtype == dtype
        assert_product(result, F.linear(x_TI.float(), plain_OI, None if bias is None else bias.float()))


@pytest.mark.parametrize("rows", [64, 65, 130])
def test_each_size_of_tiles_computes_the_same(device: torch.device, rows: int) -> None:
    weight = moved(int4_weight(130, 256, 64, torch.bfloat16), device)
    x_TI = inputs_for(weight, rows, device)
    assert_product(
        launch_quantised_linear(x_TI, tiled(weight), None), x_TI.float() @ dequantised(weight).float().T
    )


def test_many_tiles_of_tokens_cover_the_result(device: torch.device) -> None:
    weight = moved(int8_weight(70, 32, 32, torch.float32), device)
    x_TI = inputs_for(weight, 150, device)
    assert_product(launch_quantised_linear(x_TI, tiled(weight), None), x_TI @ dequantised(weight).T)


def test_a_weight_in_groups_that_are_too_small_becomes_plain_numbers(
    triton_backend: Backend, device: torch.device
) -> None:
    weight = moved(int4_weight(8, 64, 16, torch.float32), device)
    x_TI = inputs_for(weight, 5, device)
    packed = triton_backend.pack_linear(weight)
    assert isinstance(packed, torch.Tensor)
    assert_product(triton_backend.linear(x_TI, packed), x_TI @ dequantised(weight).T)


def test_inputs_of_another_width_are_refused(device: torch.device) -> None:
    layout = tiled(moved(int4_weight(8, 64, 32, torch.float32), device))
    with pytest.raises(ValueError, match="64 inputs got 63"):
        launch_quantised_linear(torch.zeros(1, 63, device=device), layout, None)


def test_no_tokens_give_no_rows(device: torch.device) -> None:
    layout = tiled(moved(int4_weight(8, 64, 32, torch.float32), device))
    assert launch_quantised_linear(torch.zeros(0, 64, device=device), layout, None).shape == (0, 8)


IN_8_BITS: dict[str, Any] = {
    "int8, one group": torch.int8,
    "fp8, outputs": torch.float8_e4m3fn,
    "fp8, blocks": torch.float8_e4m3fn,
    "fp8, blocks of 64": torch.float8_e4m3fn,
}


def units_of(x_TI: torch.Tensor, unit: int) -> torch.Tensor:
    """Return the units of all tokens [T, U, C]. The last is padded with zeros."""
    padded_TI = F.pad(x_TI, (0, -x_TI.shape[1] % unit))
    return padded_TI.view(len(x_TI), -1, unit)


def rounded_inputs(x_TI: torch.Tensor, number: torch.dtype, unit: int) -> torch.Tensor:
    """Return the inputs as their numbers of 8 bits mean them, in fp32."""
    numbers_TUC, scale_TU = quantise(units_of(x_TI, unit), number)
    return (numbers_TUC.float() * scale_TU[..., None]).flatten(1)[:, : x_TI.shape[1]]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", IN_8_BITS)
def test_inputs_of_8_bits_are_multiplied_as_they_are(
    device: torch.device, name: str, dtype: torch.dtype
) -> None:
    weight = of(name, torch.float32, device)
    layout = tiled(weight, quantises_inputs=True)
    assert layout.quantises_inputs
    unit = layout.unit if layout.units_a_group else weight.shape[1]
    for rows in (1, 19):
        x_TI = inputs_for(weight, rows, device).to(dtype)
        result = launch_quantised_linear(x_TI, layout, None)
        assert_product(result, rounded_inputs(x_TI, IN_8_BITS[name], unit) @ dequantised(weight).T)


@pytest.mark.parametrize("name", sorted(set(NAMES) - IN_8_BITS.keys()))
def test_other_weights_take_inputs_in_full_precision(device: torch.device, name: str) -> None:
    assert not tiled(of(name, torch.float32, device), quantises_inputs=True).quantises_inputs


@pytest.mark.parametrize("number", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("inputs", "unit"), [(300, 300), (300, 128), (64, 32), (5000, 128)])
def test_inputs_are_rounded_as_heads_of_a_pool_are(
    device: torch.device, number: torch.dtype, inputs: int, unit: int
) -> None:
    x_TI = torch.randn(3, inputs, generator=of_seed(inputs)).to(device)
    x_TI[1, :unit] = 0.0
    x_TI[2, inputs - 1] = float("inf")
    numbers_TI, scale_UT = launch_quantise_inputs(x_TI, number, unit)
    expected_TUC, expected_TU = quantise(units_of(x_TI, unit), number)
    expected_TI = expected_TUC.float().flatten(1)[:, :inputs]
    assert torch.equal(scale_UT.T.nan_to_num(-1.0), expected_TU.nan_to_num(-1.0))
    actual_TI = numbers_TI.view(number).float()
    assert torch.equal(actual_TI[:2], expected_TI[:2])
    assert bool(scale_UT[-1, 2].isnan())


def test_a_token_that_is_not_finite_spoils_no_other(device: torch.device) -> None:
    for name, quantises_inputs in (("int4, groups of 64", False), ("int8, one group", True)):
        weight = of(name, torch.float32, device)
        x_TI = inputs_for(weight, 4, device).contiguous()
        x_TI[1, 3] = float("nan")
        result = launch_quantised_linear(x_TI, tiled(weight, quantises_inputs=quantises_inputs), None)
        assert result.isnan().all(dim=1).tolist() == [False, True, False, False]
        assert not result[[0, 2, 3]].isnan().any()


def test_the_benchmark_runs_every_form_in_turns(triton_backend: Backend, device: torch.device) -> None:
    setting = Bench(backend=triton_backend, device=device, dtype=torch.float32)
    every = list(linears(setting, "model", 1, "linear out", 40, 256, with_quantised=True))
    assert [case.kernel for case in every] == ["linear out", *(f"linear out, {form}" for form in FORMS)]
    assert {case.turns for case in every} == {"model linear out 1"}
    for case in every:
        result = case.make()()
        assert isinstance(result, torch.Tensor)
        assert bool(result.isfinite().all())
